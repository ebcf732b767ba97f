# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Padding and packing: how the columns of a call map to what the mixers see."""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from transformers.utils import logging

from .cache_atma import AtmaCache
from .kernels.columns import gather_columns

logger = logging.get_logger(__name__)


@dataclass
class TokenLayout:
    """
    How the columns of a call map to what the mixers see. Mixers never see padding before a real
    token: with a mask each row's real tokens are moved to its front; packed documents are laid out
    in one row with their boundaries.

    Attributes:
        shape: B and T of the call.
        order, inverse (`[B, T]`): the permutation that moves real tokens to the front, and its
            inverse.
        lengths (`[B]`): number of real tokens of each row in this call; `None` if all are.
        real (`[B, T]`, bool): which of the caller's columns are real; `None` if all are.
        cu_seqlens (`[N + 1]`): boundaries of packed documents in the flattened `[1, B * T]` row.
        start (`[B]`): real tokens that the cache held before this call; `None` if it held nothing.
        positions (`[B, T]` or `[1, B * T]`): rotary positions, in the mixers' order; `None` counts
            from `start`.
        tail_order (`[B, T]`), tail_lengths (`[B]`): for packed documents with a cache, the order
            that moves the last document of each row to its front, and its length: a cache
            continues the last document.
    """

    shape: tuple[int, int]
    order: torch.Tensor | None = None
    inverse: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    real: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    start: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    tail_order: torch.Tensor | None = None
    tail_lengths: torch.Tensor | None = None

    def to(self, device: torch.device) -> "TokenLayout":
        """This layout on another device, for layers that `device_map` put there."""
        moved = {
            f.name: value.to(device)
            if isinstance(value := getattr(self, f.name), torch.Tensor)
            else value
            for f in fields(self)
        }
        return TokenLayout(**moved)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """
        From the caller's columns `[B, T, ...]` to the mixers' order: `[B, T, ...]`, packed `[1, B *
        T, ...]`.
        """
        if self.cu_seqlens is not None:
            return x.reshape(1, -1, *x.shape[2:])
        return x if self.order is None else gather_columns(x, self.order)

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """
        The inverse of `gather`, with 0 at padding: what a mixer would say there depends on how the
        call was cut into chunks, and must not reach a loss.
        """
        if self.cu_seqlens is not None:
            return x.reshape(*self.shape, *x.shape[2:])
        if self.real is None:
            return x
        if self.inverse is not None:
            x = gather_columns(x, self.inverse)
        return x.masked_fill(~self.real.view(*self.shape, *[1] * (x.dim() - 2)), 0)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """
        From the mixers' order to what the cache stores: `[B, T, ...]`, the first `state_lengths` of
        each row real.
        """
        if self.cu_seqlens is None:
            return x
        return gather_columns(x.reshape(*self.shape, *x.shape[2:]), self.tail_order)

    @property
    def state_lengths(self) -> torch.Tensor | None:
        return self.lengths if self.cu_seqlens is None else self.tail_lengths


def real_tokens_first(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The order `[B, T]` that moves the columns where `mask` `[B, T]` is true to the front, and how
    many there are.
    """
    return torch.argsort((~mask).to(torch.uint8), dim=1, stable=True), mask.sum(1)


def packed_documents(position_ids: torch.Tensor) -> torch.Tensor | None:
    """
    Where documents start, `[B, T]`, if `position_ids` `[B, T]` describe packed documents, else
    `None`. A row is packed if it begins at 0 and falls back to 0 later on. Repeated zeros at the
    front alone are how left padding looks, and are no packing: one warning says so. (Reads the
    values, which a compiled graph cannot: give it `cu_seq_lens_q` instead.)
    """
    zero = position_ids == 0
    packed = zero[:, 0] & (zero[:, 1:] & ~zero[:, :-1]).any(1)
    if not packed.any():
        if (zero[:, 0] & zero[:, 1]).any():
            logger.warning_once(
                "position_ids begin with several zeros, which is read as left padding without a "
                "mask. If these are documents of one token, say so with cu_seq_lens_q "
                "(DataCollatorWithFlattening(return_flash_attn_kwargs=True))."
            )
        return None
    starts = zero & packed[:, None]
    starts[:, 0] = True
    return starts


def check_boundaries(cu_seqlens: torch.Tensor, batch_size: int, num_tokens: int) -> torch.Tensor:
    """Refuses offsets `[N + 1]` that do not rise from 0 to the number of tokens of one row."""
    if batch_size != 1:
        raise ValueError("Document boundaries (cu_seq_lens_q) need one row; flatten the batch.")
    rises = (cu_seqlens[1:] >= cu_seqlens[:-1]).all()
    good = rises & (cu_seqlens[0] == 0) & (cu_seqlens[-1] == num_tokens)
    if good.device.type == "cpu" and not torch.compiler.is_compiling():
        if not good:
            raise ValueError(
                f"cu_seq_lens_q must rise from 0 to the number of tokens ({num_tokens}), got "
                f"{cu_seqlens.tolist()}."
            )
    else:  # reading it here would stall the device
        torch._assert_async(good)
    return cu_seqlens


def build_layout(
    shape: tuple[int, int],
    device: torch.device,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cache: AtmaCache | None,
) -> TokenLayout:
    """
    Decides which columns are real and which documents they belong to.

    Raises `ValueError` for what cannot be honoured: a mask that is not two-dimensional or does not
    fit, boundaries together with a mask, with several rows, or on top of a filled cache.
    """
    B, T = shape
    layout = TokenLayout(shape)
    filled = cache is not None and cache.has_content
    if filled:
        layout.start = cache.lengths.to(device, copy=True)
    if attention_mask is not None:
        if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
            raise ValueError(
                "ATMA takes a two-dimensional attention_mask [batch_size, sequence_length] of "
                "real tokens and padding: "
                "its convolutions and memory cannot follow an arbitrary attention pattern."
            )
        # The length of a cache of fixed capacity is known on its device only.
        seen = cache.get_seq_length() if filled else 0
        fits = attention_mask.shape[1] in (T, seen + T) if isinstance(seen, int) else True
        if attention_mask.shape[0] != B or attention_mask.shape[1] < T or not fits:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)} but the input has {B} "
                f"rows and {T} new tokens{f' after {seen}' if filled else ''}: give it as many "
                "columns as there are new tokens, or tokens altogether."
            )
    for name, ids in (("position_ids", position_ids), ("seq_idx", seq_idx)):
        if ids is not None and (ids.shape[-1] != T or ids.shape[0] not in (1, B)):
            raise ValueError(f"{name} has shape {tuple(ids.shape)}, the input is [{B}, {T}].")
    if position_ids is not None:
        position_ids = position_ids.to(device).expand(B, T)
    if (cu_seqlens is not None or seq_idx is not None) and (attention_mask is not None or filled):
        raise ValueError(
            "Document boundaries (cu_seq_lens_q, seq_idx) need a call without attention_mask and "
            "an empty cache."
        )

    starts = None
    if cu_seqlens is not None:
        layout.cu_seqlens = check_boundaries(cu_seqlens.to(device), B, T)
    elif attention_mask is None and not filled and T > 1:
        if seq_idx is not None:
            seq_idx = seq_idx.to(device).expand(B, T)
            starts = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True)
        elif position_ids is not None:
            starts = packed_documents(position_ids)
        if starts is not None:
            total = torch.tensor([B * T], device=device)
            layout.cu_seqlens = torch.cat([starts.flatten().nonzero()[:, 0], total]).to(torch.int32)

    if layout.cu_seqlens is not None:
        if cache is not None:
            column = torch.arange(B * T, device=device)
            row_start = column - column % T
            boundary = layout.cu_seqlens.long().clamp(max=B * T - 1)
            is_start = torch.zeros(B * T, dtype=torch.bool, device=device).index_fill(
                0, boundary, True
            )
            # `cu_seqlens` ends with the number of tokens, which starts no document (and empty
            # documents may stand there).
            is_start[-1] = is_start[-1] & (layout.cu_seqlens == B * T - 1).any()
            last = torch.where(is_start, column, row_start).view(B, T).amax(1, keepdim=True)
            layout.tail_order, layout.tail_lengths = real_tokens_first(column.view(B, T) >= last)
        if position_ids is not None:
            layout.positions = position_ids.reshape(1, -1)
        return layout

    if attention_mask is not None:
        mask = attention_mask[:, -T:].to(device=device, dtype=torch.bool)
        layout.real = mask
        if T == 1:
            layout.lengths = mask[:, 0].long()
        else:
            layout.order, layout.lengths = real_tokens_first(mask)
            layout.inverse = torch.argsort(layout.order, dim=1)
    if position_ids is not None:
        layout.positions = layout.gather(position_ids)
    return layout


def same_boundaries(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Whether the boundaries of queries and keys agree; values are compared where that is free."""
    if one is other:
        return True
    if one is None or one.shape != other.shape:
        return False
    return not (one.device.type == other.device.type == "cpu") or torch.equal(one, other)


def keep_positions(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """
    `[B, kept, C]` of `[B, T, C]`; a boolean mask gives `[kept, C]`. See `AtmaForCausalLM.forward`.
    """
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:] if logits_to_keep else hidden_states
    if logits_to_keep.dim() == 2:
        if logits_to_keep.dtype == torch.bool:
            return hidden_states[logits_to_keep]
        return gather_columns(hidden_states, logits_to_keep)
    return hidden_states[:, logits_to_keep]


__all__ = [
    "TokenLayout",
    "build_layout",
    "keep_positions",
    "packed_documents",
    "real_tokens_first",
    "same_boundaries",
]
