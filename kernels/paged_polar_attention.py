# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Polar attention on paged keys and values: decode and extend, without gradients.

ATMA paper, arXiv 2606.25156, section on polar attention; the mathematics stands in the file of
`polar_attention`. Its reference is `gather_pages` followed by `polar_attention_reference`.
"""

import math

import torch

from .backend import choose_backend, compute_dtype, without_autocast
from .pages import gather_key_value_pages, gather_pages
from .polar_attention import (
    PolarOutput,
    PolarStatistics,
    block_sizes,
    finish_polar_attention,
    polar_attention,
    stream_polar_attention,
    temperature_and_null,
)
from .visibility import Visibility, check_window

try:
    from .paged_polar_attention_triton import paged_polar_op
    from .pages_triton import pools_fit_kernels
    from .polar_attention_triton import serves
except ImportError:  # no Triton here: the torch path serves every device
    paged_polar_op = None

__all__ = ["paged_polar_attention"]

# Chunks of a long prompt: from so many queries x heads of a group, and of the whole batch, on the
# kernels of `polar_attention` read a copy of the pages. Their tiles were made for many queries, and
# the copy is little beside the products of each key with so many of them. It is as long as the
# page table, though, which a static cache has as long as its capacity. Measured on an H200, at 8K
# to 256K keys and with tables of that length: `scripts/benchmark.py chunks`.
_GATHER_FROM = (1024, 16384)


def _gathers(query: torch.Tensor, key_slabs: list, value_slabs: list) -> bool:
    """Whether the pages are gathered for the kernels of `polar_attention`."""
    B, T, H, D = query.shape
    per_group, whole = _GATHER_FROM
    return (
        T * H // key_slabs[0].shape[2] >= per_group
        and B * T * H >= whole
        and query.dtype == key_slabs[0].dtype == value_slabs[0].dtype
        and serves(D, query.dtype)
    )


def _pages_in_reach(
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    num_queries: int,
    page_size: int,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of each row's table that its windows touch, and query_start counted from there.

    The part has the same number of pages for all rows. Whoever loses a page in front has a full
    window, so that its n stays W.
    """
    num_pages = (window + num_queries - 2) // page_size + 2
    surplus = page_table.shape[1] - num_pages
    if surplus <= 0:
        return page_table, query_start
    first = ((query_start.long() - window + 1) // page_size).clamp(0, surplus)
    pages = first[:, None] + torch.arange(num_pages, device=page_table.device)
    return page_table.gather(1, pages), query_start - first * page_size


@torch.no_grad()
def paged_polar_attention(
    query: torch.Tensor,
    key_slabs: list[torch.Tensor],
    value_slabs: list[torch.Tensor],
    page_table: torch.Tensor,
    query_start: torch.Tensor,
    null_value: torch.Tensor,
    length_gain: torch.Tensor,
    null_base: torch.Tensor,
    null_slope: torch.Tensor,
    magnitude_gain: torch.Tensor,
    *,
    window: int | None = None,
    return_statistics: bool = False,
    backend: str = "auto",
) -> PolarOutput:
    """Polar attention of new queries over the pages of their rows; no gradient flows.

    The new tokens' keys and values must be in the pages already. The torch path gathers a block of
    pages at a time; with a window, only the pages that it touches. The Triton path gathers nothing
    for few queries, and for many this layer's pages (in reach) at once; the host never waits for
    the device.

    Args:
        query: [B, T, H, D]; all results take its dtype.
        key_slabs, value_slabs: the pools, slabs of [pages, page_size, G, D]; G divides H.
        page_table: [B, P] page ids, int32 or int64.
        query_start: [B] position of each row's first query.
        null_value, length_gain, null_base, null_slope, magnitude_gain, window, return_statistics:
            as in `polar_attention`.
        backend: "auto", "triton" or "torch".

    Returns:
        `PolarOutput` with direction [B, T, H, D] and magnitude [B, T, H].

    Raises:
        ValueError: for heads that are no multiple of the groups, a window below 1, or a backend
            that cannot run.
    """
    page_size, num_groups, head_dim = key_slabs[0].shape[1:]
    num_queries, num_heads = query.shape[1:3]
    if num_heads % num_groups:
        raise ValueError(
            f"The {num_heads} query heads must be a multiple of the {num_groups} key/value heads."
        )
    check_window(window)
    inputs = (null_value, length_gain, null_base, null_slope, magnitude_gain)
    has_triton = (
        paged_polar_op is not None
        and head_dim <= 256
        and compute_dtype(query, *inputs) == torch.float32
        and pools_fit_kernels(key_slabs, value_slabs)
    )
    if choose_backend(backend, query, "paged_polar_attention", has_triton) == "triton":
        if _gathers(query, key_slabs, value_slabs):
            if window is not None:
                page_table, query_start = _pages_in_reach(
                    page_table, query_start, num_queries, page_size, window
                )
            stop = query_start + num_queries
            key, value = gather_key_value_pages(
                key_slabs, value_slabs, page_table, stop, backend="triton"
            )
            with without_autocast(query):
                return polar_attention(
                    query,
                    key,
                    value,
                    *inputs,
                    window=window,
                    query_start=query_start,
                    return_statistics=return_statistics,
                    backend="triton",
                )
        direction, magnitude, n_eff, null_weight = paged_polar_op(
            query, key_slabs, value_slabs, page_table, query_start, *inputs, window
        )
        statistics = PolarStatistics(n_eff, null_weight) if return_statistics else None
        return PolarOutput(direction, magnitude, statistics)
    if window is not None:
        page_table, query_start = _pages_in_reach(
            page_table, query_start, num_queries, page_size, window
        )
    num_keys = page_table.shape[1] * page_size
    visibility = Visibility(
        num_queries, num_keys, query.device, window=window, query_start=query_start
    )
    dtype = compute_dtype(query, key_slabs[0], value_slabs[0])

    def load(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        pages = page_table[:, keys.start // page_size : keys.stop // page_size]
        key, value = gather_pages(key_slabs, pages), gather_pages(value_slabs, pages)
        return key.transpose(1, 2).to(dtype), value.transpose(1, 2).to(dtype)

    with without_autocast(query):
        temp, null = temperature_and_null(
            visibility.count, length_gain, null_base, null_slope, dtype
        )
        rows = query.transpose(1, 2).to(dtype) * (temp / math.sqrt(head_dim))[..., None]
        block_queries, block_keys = block_sizes(rows, num_groups, num_keys)
        # Blocks of whole pages.
        block_keys = -(-block_keys // page_size) * page_size
        content, l1, l2 = stream_polar_attention(rows, load, visibility, block_queries, block_keys)
        seen = visibility.seen[:, None]
        finished = finish_polar_attention(
            content, l1, l2, temp * null, seen, null_value, magnitude_gain
        )
        return finished.output(query.dtype, return_statistics)
