# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Polar attention over keys that lie in several places: parts, and their exact merge.

A part is what some of the keys say: the mean of their values under p, and l1 = logsumexp_j a_j and
l2 = logsumexp_j 2 a_j (see polar_attention). Parts over disjoint keys merge by logaddexp; the null
competes once, with the merged sums. Forward only: this is for reading, not for training.
"""

import math
from typing import NamedTuple

import torch

from .backend import choose_backend, compute_dtype
from .polar_attention import (
    PolarOutput,
    block_sizes,
    finish_polar_attention,
    polar_fwd_op,
    serves,
    stream_polar_attention,
    temperature_and_null,
)
from .visibility import Visibility, check_shapes

__all__ = ["PolarPart", "merge_polar_parts", "partial_polar_attention"]

# softplus of this is 0 in fp32, and no logit of a key comes near it: a gain and a null that leave
# the kernel's softmax to the keys.
SILENT = -1e4


class PolarPart(NamedTuple):
    """`content` [B, T, H, D], the mean of the values under p; `l1`, `l2` [B, H, T], natural."""

    content: torch.Tensor
    l1: torch.Tensor
    l2: torch.Tensor


def partial_polar_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position: int,
    length_gain: torch.Tensor,
    *,
    is_causal: bool,
    backend: str = "auto",
) -> PolarPart:
    """What one contiguous block of keys says to some queries.

    Args:
        query: [B, T, H, D]; query t stands at `position` + t and so sees n = position + t + 1 keys
            in all, wherever they lie.
        key, value: [B, S, G, D], the block.
        position: of the first query.
        length_gain: [H], raw.
        is_causal: whether the block ends with the queries' own positions (then T <= S, and query t
            sees the first S - T + t + 1 keys); else every query sees the whole block.
        backend: "auto", "triton" or "torch".
    """
    check_shapes(query, key, value)
    dtype = compute_dtype(query, key, value)
    T, S = query.shape[1], key.shape[1]
    count = torch.arange(position + 1, position + T + 1, device=query.device)[None]
    zero = torch.zeros_like(length_gain)
    temp, _ = temperature_and_null(count, length_gain, zero, zero, dtype)  # [1, H, T]
    # The temperature belongs to the position in the document, which a block does not know.
    scaled = query.to(dtype) * temp.transpose(1, 2)[..., None]
    start = None if is_causal else torch.full(query.shape[:1], S, device=query.device)
    has_triton = polar_fwd_op is not None and serves(query.shape[3], query.dtype)
    if choose_backend(backend, query, "partial_polar_attention", has_triton) == "triton":
        silent = torch.full_like(length_gain, SILENT)
        null_value = query.new_zeros(query.shape[2:])
        direction, _, norm, l1, log_n_eff, _ = polar_fwd_op(
            scaled.to(query.dtype), key, value, null_value, silent, silent, silent, silent,
            None, start, None, False,
        )  # fmt: skip
        content = direction * norm.transpose(1, 2)[..., None]
        l1, log_n_eff = l1 * math.log(2), log_n_eff * math.log(2)
        return PolarPart(content, l1, 2 * l1 - log_n_eff)
    rows, keys, values = (x.transpose(1, 2).to(dtype) for x in (scaled, key, value))
    visibility = Visibility(T, S, query.device, query_start=start)
    content, l1, l2 = stream_polar_attention(
        rows * query.shape[3] ** -0.5,
        lambda block: (keys[:, :, block], values[:, :, block]),
        visibility,
        *block_sizes(rows, key.shape[2], S),
    )
    return PolarPart(content.transpose(1, 2), l1, l2)


def merge_polar_parts(
    parts: list[PolarPart],
    position: int,
    null_value: torch.Tensor,
    length_gain: torch.Tensor,
    null_base: torch.Tensor,
    null_slope: torch.Tensor,
    magnitude_gain: torch.Tensor,
    dtype: torch.dtype,
) -> PolarOutput:
    """The attention of queries from `position` on over all keys, from the parts of each block.

    Returns:
        `PolarOutput` with direction [B, T, H, D] and magnitude [B, T, H] in `dtype`.
    """
    l1 = torch.stack([part.l1 for part in parts]).logsumexp(0)
    l2 = torch.stack([part.l2 for part in parts]).logsumexp(0)
    content = sum(
        part.content.to(l1.dtype).transpose(1, 2) * (part.l1 - l1).exp()[..., None]
        for part in parts
    )
    first, last = position + 1, position + l1.shape[2] + 1
    count = torch.arange(first, last, device=l1.device)[None]
    temp, null = temperature_and_null(count, length_gain, null_base, null_slope, l1.dtype)
    seen = torch.ones_like(count, dtype=torch.bool)[:, None]
    finished = finish_polar_attention(
        content, l1, l2, temp * null, seen, null_value, magnitude_gain
    )
    return finished.output(dtype, return_statistics=False)
