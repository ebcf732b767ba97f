# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
One decoding step as a CUDA graph, so that generate() without arguments is not bound by launches.

The graph belongs to the cache whose buffers it writes, and dies with it. It is captured at the
second step that could use it and replayed as long as nothing that it refers to has moved: the
cache's buffers, the weights, the modules, their hooks and the settings of adapters. Whatever
changes, the next step runs eagerly and a new graph is captured later; whatever cannot be captured
runs eagerly for good: hooks and offloading, adapters other than LoRA on linear layers and quantised
layers (their switches could go unnoticed), classes derived from those of the layers, and the
softmax cores of ablations (they gather as many keys as the host has counted).

A class derived from the model's own is captured as well, unless it makes its logits otherwise. Its
`forward`, and hooks of the whole model, run around the replayed step as around any other.
"""

import copy
import threading
from collections import OrderedDict

import torch
from torch import nn
from transformers.utils import logging

from .layout_atma import TokenLayout
from .plain_atma import PlainModules, plain_modules

logger = logging.get_logger(__name__)

# What a step calls of the model itself.
_METHODS = ("logits_of", "_cap")
_LORA = "peft.tuners.lora.layer.Linear"
_PARTS_OF_LORA = (
    "torch.nn.modules.container.ModuleDict",
    "torch.nn.modules.container.ParameterDict",
    "torch.nn.modules.dropout.Dropout",
    "torch.nn.modules.linear.Identity",
)
_PLAIN_DATA = {bool, int, float, str, type(None), torch.dtype, torch.device}


def replay_step(
    model: nn.Module,
    base: type,
    cache,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    extras: dict,
) -> torch.Tensor | None:
    """
    The logits `[B, 1, V]` of a plain decoding step, replayed from the cache's graph, or `None` if
    the caller has to run the call eagerly. A replayed step advances the cache as an eager one does.

    Args:
        base: the class of the modelling module whose `forward` asks; the model's may be derived.
        extras: the call's remaining arguments; any that is set means more than a plain step.
    """
    if not _is_plain_step(model, cache, input_ids, attention_mask, extras):
        return None
    if cache.decode_graph is None:
        cache.decode_graph = DecodeGraph()
    return cache.decode_graph.step(model, base, cache, input_ids, attention_mask)


def _is_plain_step(model, cache, input_ids, attention_mask, extras) -> bool:
    """
    One new token for each row, on top of a cache on a CUDA device, without gradients, with nothing
    asked for beyond logits.
    """
    return (
        input_ids is not None
        and input_ids.is_cuda
        and input_ids.dim() == 2
        and input_ids.shape[1] == 1
        and type(cache).__name__ == "AtmaCache"
        and cache.has_content
        and cache.batch_size == input_ids.shape[0]
        and not cache.recording.active
        and model.config.decode_graph
        and not model.training
        # The softmax cores of ablations gather as many keys as the host has counted.
        and model.config.attention_type == "polar"
        and (attention_mask is None or attention_mask.shape[:1] == input_ids.shape[:1])
        and not any(value is not None and value is not False for value in extras.values())
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cuda")
        and not torch.compiler.is_compiling()
        and not torch.cuda.is_current_stream_capturing()
    )


class DecodeGraph:
    """A captured step, and what it must find unchanged to be replayed."""

    def __init__(self):
        self.watch: _Watch | None = None
        self.signature: list[int] | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.impossible = False

    def step(
        self,
        model: nn.Module,
        base: type,
        cache,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """The logits of one step, or `None`; see `replay_step`."""
        if self.impossible:
            return None
        # May grow the cache, which moves its page table and so changes the signature.
        cache.prepare(*input_ids.shape, input_ids.device)
        if self.watch is None or self.watch.model is not model:
            self.watch = _Watch(model, base)
        weights, buffers = self.watch.addresses(input_ids.device), _buffers(model, cache)
        if weights is None or buffers is None:
            # Perhaps only for now: look at the model afresh at the next step.
            self.watch = self.signature = self.graph = None
            return None
        signature = [torch.cuda.current_stream(input_ids.device).cuda_stream, *weights, *buffers]
        if signature != self.signature:
            self.signature, self.graph = signature, None
            return None
        if self.graph is None and not self._capture(model, cache, input_ids):
            return None
        self.input_ids.copy_(input_ids)
        if attention_mask is None:
            self.real.fill_(True)
        else:
            self.real.copy_(attention_mask[:, -1])
        self.graph.replay()
        cache.rows.count_columns(1)
        cache.in_call = False
        return self.logits.clone()

    def _capture(self, model: nn.Module, cache, input_ids: torch.Tensor) -> bool:
        self.input_ids = input_ids.clone()
        self.real = torch.ones(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        graph = torch.cuda.CUDAGraph()
        stream = _CAPTURE_STREAMS.get(input_ids.device)
        stream.wait_stream(torch.cuda.current_stream(input_ids.device))
        try:
            with torch.cuda.stream(stream):
                # Other threads, such as a data loader's, may go on with their own CUDA calls.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self.logits = self._run(model, cache)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self.impossible = True
            logger.warning_once(f"Decoding runs without a CUDA graph, which failed: {error}")
            return False
        torch.cuda.current_stream(input_ids.device).wait_stream(stream)
        self.graph = graph
        return True

    def _run(self, model: nn.Module, cache) -> torch.Tensor:
        lengths = self.real.long()
        layout = TokenLayout(
            (self.input_ids.shape[0], 1),
            lengths=lengths,
            real=self.real[:, None],
            start=cache.lengths.clone(),
        )
        hidden_states = model.model.embed_tokens(self.input_ids)
        for layer in model.model.layers:
            hidden_states = layer(hidden_states, layout=layout, cache=cache)[0]
        logits = model.logits_of(model.model.norm(hidden_states))
        cache.lengths.add_(lengths)
        return logits


class _CaptureStreams(threading.local):
    """
    Where each thread captures, by the stream that it replays on.

    Matrix products of one stream share a work space, which torch keeps for good: with a stream for
    each capture every graph would leave one behind, and graphs that share one must not run at the
    same time.
    """

    def __init__(self):
        self.streams: dict[torch.cuda.Stream, torch.cuda.Stream] = {}

    def get(self, device: torch.device) -> torch.cuda.Stream:
        current = torch.cuda.current_stream(device)
        if current not in self.streams:
            self.streams[current] = torch.cuda.Stream(device)
        return self.streams[current]


_CAPTURE_STREAMS = _CaptureStreams()


class _Watch:
    """What a step calls of a model, as it was found, to see cheaply at each step what changed."""

    def __init__(self, model: nn.Module, base: type):
        self.model, self.base = model, base
        plain = self._plain_modules()
        self.modules = None if plain is None else plain.modules
        self.settings = None if plain is None else _all_settings(plain.modules)
        self.seen: list | None = None

    def _plain_modules(self) -> PlainModules | None:
        model, kind = self.model, type(self.model)
        for name in _METHODS:
            if getattr(kind, name) is not getattr(self.base, name) or name in vars(model):
                return None
        roots = (model.model, model.lm_head)
        return plain_modules(roots, self.base.__module__, (_LORA, *_PARTS_OF_LORA))

    def addresses(self, device: torch.device) -> list[int] | None:
        """
        The addresses of all weights, or `None` if a step through the modules cannot be captured, or
        not be replayed: they are not plain, modules were exchanged, adapters were switched, merged
        or scaled, weights lie elsewhere.
        """
        plain = self._plain_modules()
        if plain is None or self.settings is None or plain.modules != self.modules:
            return None
        if any(vars(module) != settings for module, settings in self.settings):
            return None
        addresses = [x.data_ptr() for x in plain.parameters]
        if [device, *addresses] != self.seen:
            # No address belongs to two devices: what was seen on this one is still there.
            if any(x.device != device for x in plain.parameters):
                return None
            self.seen = [device, *addresses]
        return addresses


def _all_settings(modules: list[nn.Module | None]) -> list[tuple[nn.Module, dict]] | None:
    """
    Adapters and dropouts with copies of their attributes, which decide what a call of them does, or
    `None` if there are attributes that no copy can be compared with, or numbers are drawn.
    """
    found = []
    for module in modules:
        kind = type(module)
        if kind is nn.Dropout or f"{kind.__module__}.{kind.__qualname__}" == _LORA:
            fields = dict(vars(module))
            children = dict(fields.pop("_modules"))
            if kind is nn.Dropout and module.training or not _is_plain_data(fields):
                return None
            found.append((module, {**copy.deepcopy(fields), "_modules": children}))
    return found


def _is_plain_data(value) -> bool:
    if type(value) in (dict, OrderedDict):
        return all(map(_is_plain_data, (*value.keys(), *value.values())))
    if type(value) in (list, tuple, set):
        return all(map(_is_plain_data, value))
    return type(value) in _PLAIN_DATA


def _buffers(model: nn.Module, cache) -> list | None:
    """
    The addresses and sizes of the cache's buffers and the numbers of the configuration that a step
    reads, or `None` if a state is still missing.
    """
    states = [state.current for state in cache.states()]
    if any(state is None for state in states):
        return None
    rows = cache.rows
    tensors = [rows.page_table, rows.lengths, *states]
    cap = model.config.logit_softcap
    return [cap, *rows.page_table.shape, *(tensor.data_ptr() for tensor in tensors)]


__all__ = ["DecodeGraph", "replay_step"]
