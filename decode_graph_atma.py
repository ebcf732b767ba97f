# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
One decoding step as a CUDA graph, so that generate() without arguments is not bound by launches.

The graph belongs to the cache whose buffers it writes, and dies with it. It is captured at the
second step that could use it and replayed as long as nothing that it refers to has moved: the
cache's buffers, the weights, the modules and their hooks. Whatever changes, the next step runs
eagerly and a new graph is captured later; whatever cannot be captured runs eagerly for good:
adapters and quantised layers (their switches would go unnoticed), hooks and offloading, and the
softmax cores of ablations (they gather as many keys as the host has counted).
"""

import torch
from torch import nn
from transformers.utils import logging

from .decode_layer_atma import plain_parameters
from .layout_atma import TokenLayout

logger = logging.get_logger(__name__)


def replay_step(
    model: nn.Module,
    cache,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    extras: dict,
) -> torch.Tensor | None:
    """
    The logits `[B, 1, V]` of a plain decoding step, replayed from the cache's graph, or `None` if
    the caller has to run the call eagerly. A replayed step advances the cache as an eager one does.

    Args:
        extras: the call's remaining arguments; any that is set means more than a plain step.
    """
    if not _is_plain_step(model, cache, input_ids, attention_mask, extras):
        return None
    if cache.decode_graph is None:
        cache.decode_graph = DecodeGraph()
    return cache.decode_graph.step(model, cache, input_ids, attention_mask)


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
            self.watch = _Watch(model)
        weights, buffers = self.watch.addresses(input_ids.device), _buffers(model, cache)
        if weights is None or buffers is None:
            # Perhaps only for now: look at the model afresh at the next step.
            self.watch = self.signature = self.graph = None
            return None
        if weights + buffers != self.signature:
            self.signature, self.graph = weights + buffers, None
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
        stream = torch.cuda.Stream(input_ids.device)
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


class _Watch:
    """The modules of a model as they were found, to see cheaply at each step what has changed."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.modules = list(model.modules())
        self.children = self._children()

    def _children(self) -> list[nn.Module]:
        return [child for module in self.modules for child in module._modules.values()]

    def addresses(self, device: torch.device) -> list[int] | None:
        """
        The addresses of all weights, or `None` if a step through the modules cannot be captured:
        modules were exchanged (adapters have switches of their own, which a graph would not
        notice), hooks or offloading intervene, weights lie elsewhere or are tensor subclasses.
        """
        weights = plain_parameters(self.modules, type(self.model).__module__)
        if weights is None or self._children() != self.children:
            return None
        if any(x.device != device for x in weights):
            return None
        return [x.data_ptr() for x in weights]


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
