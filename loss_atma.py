# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The loss of the language model, from logits or, chunk by chunk, from hidden states."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .kernels.cross_entropy import capped_cross_entropy, linear_cross_entropy
from .plain_atma import is_plain_linear, is_sharded, is_sharded_linear, run_as_forward

IGNORE_INDEX = -100
# Tokens whose logits a head that has to be called as a module gives at a time.
MODULE_CHUNK = 4096


def loss_of_logits(
    logits: torch.Tensor,
    labels: torch.Tensor,
    cap: float,
    backend: str,
    return_capped: bool = False,
    **kwargs,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """
    The loss of uncapped logits `[B, T, V]`: what Transformers' `ForCausalLMLoss` gives for the
    capped ones; with `return_capped` these too. Only the logits themselves are kept for the
    backward pass.

    Args:
        labels (`[B, T]`): token ids, shifted here.
        cap, backend, return_capped: of `capped_cross_entropy`.
        num_items_in_batch, ignore_index, shift_labels (keywords): as in `ForCausalLMLoss`; others
            are not looked at.
    """
    targets, ignore_index, count = _targets(labels, logits.device, **kwargs)
    rows, options = logits.flatten(0, -2), {"ignore_index": ignore_index, "backend": backend}
    if not return_capped:
        return capped_cross_entropy(rows, targets, cap, **options) / count
    total, capped = capped_cross_entropy(rows, targets, cap, return_capped=True, **options)
    return total / count, capped.view(logits.shape)


def loss_of_hidden_states(
    head: nn.Module,
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    cap: float,
    backend: str,
    **kwargs,
) -> torch.Tensor:
    """
    The same loss of hidden states `[B, T, C]`, without ever holding the logits `[B, T, V]`.

    A plain linear head is one operation (`linear_cross_entropy`), also one that FSDP2 has sharded.
    Any other (adapters, quantisation, offload, hooks) is called as a module, on chunks whose logits
    are computed again in the backward pass; where FSDP2 shards it, on all tokens at once.
    """
    targets, ignore_index, count = _targets(labels, hidden_states.device, **kwargs)
    rows = hidden_states.flatten(0, -2)
    options = {"ignore_index": ignore_index, "backend": backend}

    def loss_of_rows(rows: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(rows, head.weight, head.bias, targets, cap, **options)

    if is_plain_linear(head, hidden_states.device):
        total = loss_of_rows(rows)
    elif is_sharded_linear(head) and not torch.compiler.is_compiling():
        total = run_as_forward(head, loss_of_rows, rows)
    else:
        chunk_loss = partial(_loss_of_chunk, head, cap=cap, **options)
        total = sum(of_chunks(head, chunk_loss, rows, targets))
    return total / count


def of_chunks(
    head: nn.Module, function: Callable, rows: torch.Tensor, targets: torch.Tensor
) -> list:
    """
    `[function(rows, targets)]` for chunks of rows `[N, C]` and targets `[N]`, which calls `head` as
    a module; computed again in the backward pass, so that the logits of one chunk are the most that
    is held. FSDP2 knows one call of a module in each pass: where it shards the head, one chunk.
    """
    size = max(len(rows), 1) if is_sharded(head) else MODULE_CHUNK
    chunks = zip(rows.split(size), targets.split(size), strict=True)
    return [checkpoint(function, *chunk, use_reentrant=False) for chunk in chunks]


def distractor_term(mass: torch.Tensor, labels: torch.Tensor, **kwargs) -> torch.Tensor:
    """
    The mean distractor mass in the units of the main loss: with `num_items_in_batch` each
    micro-batch counts by its share of the labels, so that accumulation changes nothing. Keywords as
    in `loss_of_logits`.
    """
    if kwargs.get("num_items_in_batch") is None:
        return mass
    targets, ignore_index, total = _targets(labels, mass.device, **kwargs)
    return mass * (targets != ignore_index).sum() / total


def _loss_of_chunk(head, chunk, targets, *, cap, ignore_index, backend) -> torch.Tensor:
    logits = head(chunk)
    targets = targets.to(logits.device)
    loss = capped_cross_entropy(logits, targets, cap, ignore_index=ignore_index, backend=backend)
    return loss.to(chunk.device)


def _targets(
    labels,
    device,
    shift_labels=None,
    ignore_index=IGNORE_INDEX,
    num_items_in_batch=None,
    **kwargs,
):
    """The token that each position predicts, flat; the one that does not count; and how many do."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.flatten().to(device)
    count = num_items_in_batch
    if count is None:
        count = (targets != ignore_index).sum()
    return targets, ignore_index, count.to(device) if isinstance(count, torch.Tensor) else count


__all__ = [
    "IGNORE_INDEX",
    "distractor_term",
    "loss_of_hidden_states",
    "loss_of_logits",
    "of_chunks",
]
