# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Polar attention over pages in Triton: the keys of a row are split over programs, then merged.

The first kernel gives every (row, block of queries, split, group) a program. It walks over its
share of the keys, once for all heads of the group, and leaves unnormalised sums: the maximum of the
logits a_j, sum e^(a_j - max), sum e^(2 (a_j - max)) and sum e^(a_j - max) v_j. The second kernel
merges the splits of each query and folds the null. The mathematics stands in the file of
`polar_attention`.

The host chooses the number of splits without a look at the lengths; the programs divide what keys
there are evenly among themselves, and those that get none do nothing.
"""

import functools
import math

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("The Triton path of paged attention needs the package triton.") from error

from .operators import define_operator
from .pages_triton import find_page, slab_arguments
from .polar_attention_triton import (
    LN2,
    LOG2E,
    MIN_NORM,
    NO_WINDOW,
    length_terms,
    softplus,
    tanh,
)

__all__ = ["paged_polar_op"]

# (bytes of an element, head_dim up to) -> keys per block, warps, stages.
_TILES = {
    (2, 128): (64, 4, 3),
    (2, 256): (32, 4, 3),
    (4, 128): (32, 8, 2),
    (4, 256): (16, 8, 2),
}
# Queries x heads of a program: the least that a product takes, or a warp group's.
_FEW_ROWS, _MANY_ROWS = 16, 64
# Programs that a multiprocessor holds at a time, and how many times over to fill the device.
_PROGRAMS_PER_SM = 3
_MAX_WAVES = 3
# The most splits of a row: what one program merges.
_MAX_SPLITS = 128


@triton.jit
def _block_range(
    position,
    i_q,
    num_queries,
    num_keys,
    window,
    num_splits,
    R: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """What a block of BM queries x heads sees, whose row's first query has this position.

    Returns its first and last key, and in blocks of keys, of which none spans two pages, the first,
    how many there are, and how many a split takes.
    """
    BLOCKS: tl.constexpr = (PAGE_SIZE + BN - 1) // BN
    newest = tl.minimum((i_q * BM + BM - 1) // R, num_queries - 1)
    last = tl.minimum(position + newest, num_keys - 1)
    first = tl.maximum(position + i_q * BM // R - window + 1, 0)
    first_block = first // PAGE_SIZE * BLOCKS + first % PAGE_SIZE // BN
    last_block = last // PAGE_SIZE * BLOCKS + last % PAGE_SIZE // BN
    num_blocks = tl.where(last >= first, last_block - first_block + 1, 0)
    share = tl.maximum((num_blocks + num_splits - 1) // num_splits, 1)
    return first, last, first_block, num_blocks, share


@triton.jit(
    do_not_specialize=[
        "num_queries",
        "num_keys",
        "num_splits",
        "num_query_blocks",
        "num_rows",
        "window",
        "stride_table",
        "stride_qb",
        "stride_qt",
    ]
)
def paged_polar_fwd_kernel(
    query,
    key_slabs,
    value_slabs,
    first_pages,
    page_table,
    query_start,
    length_gain,
    partial_content,
    partial_sums,
    num_queries,
    num_keys,
    num_splits,
    num_query_blocks,
    num_rows,
    window,
    scale,
    stride_table,
    stride_qb,
    stride_qt,
    stride_qh,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    FP32: tl.constexpr,
):
    R: tl.constexpr = H // G
    BLOCKS: tl.constexpr = (PAGE_SIZE + BN - 1) // BN
    # Neighbours read the two halves of the same pages, or the same pages.
    i_p = tl.program_id(0)
    i_g = i_p % G
    i_q = i_p // G % num_query_blocks
    i_s = i_p // (G * num_query_blocks) % num_splits
    i_b = (i_p // (G * num_query_blocks) // num_splits).to(tl.int64)

    position = tl.load(query_start + i_b).to(tl.int64)
    first, last, first_block, num_blocks, share = _block_range(
        position, i_q, num_queries, num_keys, window, num_splits, R, PAGE_SIZE, BM, BN
    )
    begin = (first_block + i_s * share).to(tl.int32)
    end = (first_block + tl.minimum((i_s + 1) * share, num_blocks)).to(tl.int32)
    if begin >= end:
        return

    o_m = i_q * BM + tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    o_t = (o_m // R).to(tl.int64)
    o_h = (i_g * R + o_m % R).to(tl.int64)
    m_m = o_t < num_queries
    p_q = query + i_b * stride_qb + o_t[:, None] * stride_qt + o_h[:, None] * stride_qh
    b_q = tl.load(p_q + o_d[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0)
    if FP32:
        b_q = b_q.to(tl.float32)

    position = position + o_t
    oldest = position - window
    log_count, _ = length_terms(tl.minimum(tl.maximum(position + 1, 0), window))
    temp = 1 + softplus(tl.load(length_gain + o_h).to(tl.float32)) * log_count
    rate = temp * (scale * LOG2E)

    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    b_squares = tl.zeros([BM], tl.float32)
    b_content = tl.zeros([BM, BD], tl.float32)
    p_table = page_table + i_b * stride_table
    o_kv = o_n[:, None] * (G * D) + i_g * D + o_d[None, :]
    next_page = tl.load(p_table + begin // BLOCKS).to(tl.int32)
    for block in range(begin, end):
        index = block // BLOCKS
        within = block % BLOCKS * BN
        page = next_page
        next_page = tl.load(p_table + tl.minimum(block + 1, end - 1) // BLOCKS).to(tl.int32)
        key_index = index * PAGE_SIZE + within + o_n
        # What nobody sees is not read either: it might be NaN.
        m_n = (key_index >= first) & (key_index <= last)
        if PAGE_SIZE % BN != 0:
            m_n = m_n & (within + o_n < PAGE_SIZE)
        m_kv = m_n[:, None] & m_d[None, :]
        offset = o_kv + within * (G * D)
        p_k = find_page(key_slabs, first_pages, page, PAGE_SIZE * G * D)
        p_v = find_page(value_slabs, first_pages, page, PAGE_SIZE * G * D)
        b_k = tl.load(p_k + offset, mask=m_kv, other=0.0)
        b_v = tl.load(p_v + offset, mask=m_kv, other=0.0)
        if FP32:
            b_k = b_k.to(tl.float32)
            b_v = b_v.to(tl.float32)
        b_a = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * rate[:, None]
        seen = (key_index[None, :] <= position[:, None]) & (key_index[None, :] > oldest[:, None])
        b_a = tl.where(seen & m_n[None, :], b_a, float("-inf"))
        new_max = tl.maximum(b_max, tl.max(b_a, 1))
        # Nothing seen so far: any finite shift turns the -inf into zero weights.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        b_w = tl.exp2(b_a - shift[:, None])
        decay = tl.exp2(b_max - shift)
        b_sum = b_sum * decay + tl.sum(b_w, 1)
        b_squares = b_squares * decay * decay + tl.sum(b_w * b_w, 1)
        b_content = b_content * decay[:, None]
        b_content = tl.dot(b_w.to(b_v.dtype), b_v, b_content, input_precision="ieee")
        b_max = new_max

    row = (i_b * num_queries + o_t) * H + o_h
    slot = i_s.to(tl.int64) * num_rows + row
    p_content = partial_content + slot[:, None] * D + o_d[None, :]
    tl.store(p_content, b_content, mask=m_m[:, None] & m_d[None, :])
    tl.store(partial_sums + slot * 3, b_max, mask=m_m)
    tl.store(partial_sums + slot * 3 + 1, b_sum, mask=m_m)
    tl.store(partial_sums + slot * 3 + 2, b_squares, mask=m_m)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_splits", "num_rows", "window"])
def paged_polar_merge_kernel(
    partial_content,
    partial_sums,
    query_start,
    null_value,
    length_gain,
    null_base,
    null_slope,
    magnitude_gain,
    direction,
    magnitude,
    n_eff,
    null_weight,
    num_queries,
    num_keys,
    num_splits,
    num_rows,
    window,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BS: tl.constexpr,
):
    R: tl.constexpr = H // G
    row = tl.program_id(0).to(tl.int64)
    i_h = row % H
    i_t = row // H % num_queries
    i_b = row // H // num_queries
    position = tl.load(query_start + i_b).to(tl.int64)
    i_q = (i_t * R + i_h % R) // BM
    first, last, first_block, num_blocks, share = _block_range(
        position, i_q, num_queries, num_keys, window, num_splits, R, PAGE_SIZE, BM, BN
    )
    num_used = ((num_blocks + share - 1) // share).to(tl.int32)

    o_d = tl.arange(0, BD)
    m_d = o_d < D
    o_s = tl.arange(0, BS)
    m_s = o_s < num_used
    slot = o_s.to(tl.int64) * num_rows + row
    b_max = tl.load(partial_sums + slot * 3, mask=m_s, other=float("-inf"))
    b_sum = tl.load(partial_sums + slot * 3 + 1, mask=m_s, other=0.0)
    b_squares = tl.load(partial_sums + slot * 3 + 2, mask=m_s, other=0.0)
    p_content = partial_content + slot[:, None] * D + o_d[None, :]
    b_content = tl.load(p_content, mask=m_s[:, None] & m_d[None, :], other=0.0)
    total_max = tl.max(b_max, 0)
    # Nothing seen: any finite shift turns the -inf into zero weights.
    part = tl.exp2(b_max - tl.where(total_max == float("-inf"), 0.0, total_max))
    total = tl.sum(b_sum * part, 0)
    squares = tl.sum(b_squares * part * part, 0)
    content = tl.sum(b_content * part[:, None], 0)

    seen = total > 0
    total = tl.where(seen, total, 1.0)
    squares = tl.where(seen, squares, 1.0)
    log_count, root = length_terms(tl.minimum(tl.maximum(position + i_t + 1, 0), window))
    temp = 1 + softplus(tl.load(length_gain + i_h).to(tl.float32)) * log_count
    null = tl.load(null_base + i_h).to(tl.float32)
    null += softplus(tl.load(null_slope + i_h).to(tl.float32)) * root
    # Against the null: the real keys' share is sigmoid(l1 - a_0).
    gap = LN2 * (total_max + tl.log2(total)) - temp * null
    real = tl.where(seen, tl.sigmoid(gap), 0.0)
    weight = tl.where(seen, tl.sigmoid(-gap), 1.0)
    log_n_eff = LN2 * (2 * tl.log2(total) - tl.log2(squares))
    b_null = tl.load(null_value + i_h * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    mixed = content * (real / total) + weight * b_null
    norm = tl.sqrt(tl.sum(mixed * mixed, 0))
    b_direction = mixed / tl.maximum(norm, MIN_NORM)
    # tanh(gain ln(1 + m_eff)) with ln(1 + m_eff) = softplus(ln m_eff)
    log_m_eff = tl.where(seen, log_n_eff - softplus(-gap), float("-inf"))
    gain = softplus(tl.load(magnitude_gain + i_h).to(tl.float32))
    b_magnitude = tanh(gain * softplus(log_m_eff))
    tl.store(direction + row * D + o_d, b_direction.to(direction.dtype.element_ty), mask=m_d)
    tl.store(magnitude + row, b_magnitude.to(magnitude.dtype.element_ty))
    tl.store(n_eff + row, tl.where(seen, tl.exp(log_n_eff), 0.0))
    tl.store(null_weight + row, weight)


@functools.lru_cache
def _device(index: int | None) -> tuple[int, int, int]:
    """Multiprocessors, the compute capability's major number, and the bytes of shared memory that a
    program may use."""
    if index is None:
        # The interpreter: few programs, but several for a row.
        return 2, 9, 2**18
    properties = torch.cuda.get_device_properties(index)
    shared_memory = properties.shared_memory_per_block_optin
    return properties.multi_processor_count, properties.major, shared_memory


def _tile(block_dim: int, element_size: int, block_rows: int, device) -> tuple[int, int, int]:
    """Keys per block, warps, stages."""
    for size, dim in _TILES:
        if size == element_size and block_dim <= dim:
            keys, warps, stages = _TILES[size, dim]
            break
    # Key and value blocks in flight, and queries and weights on their way through.
    while (2 * stages * keys + block_rows) * block_dim * element_size > device[2]:
        if stages > 1:
            stages -= 1
        elif keys > 16:
            keys //= 2
        else:
            break
    return keys, warps, stages


@functools.lru_cache
def _wanted_splits(num_programs: int, slots: int) -> int:
    """Into how many programs to split each of `num_programs`, on a device that holds `slots` at a
    time: such that the last wave leaves few slots empty; else rather many, as rows differ."""

    def filling(splits):
        waves = splits * num_programs / slots
        return round(waves / math.ceil(waves), 2), splits

    most = min(_MAX_WAVES * slots // num_programs, _MAX_SPLITS)
    return max(range(1, max(most, 1) + 1), key=filling)


def paged_polar_fwd(
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
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The arguments are those of `paged_polar_attention`; slabs are contiguous.

    Returns:
        direction [B, T, H, D] and magnitude [B, T, H] in the dtype of the query, n_eff and the
        null's weight [B, T, H] in fp32.
    """
    B, T, H, D = query.shape
    page_size, G = key_slabs[0].shape[1:3]
    query = query if query.stride(3) == 1 else query.contiguous()
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    query_start = query_start.contiguous()
    null_value, length_gain, null_base, null_slope, magnitude_gain = (
        x.contiguous() for x in (null_value, length_gain, null_base, null_slope, magnitude_gain)
    )
    direction = query.new_empty(query.shape)
    magnitude = query.new_empty(B, T, H)
    n_eff, null_weight = (query.new_empty(B, T, H, dtype=torch.float32) for _ in range(2))
    if magnitude.numel() == 0:
        return direction, magnitude, n_eff, null_weight

    device = _device(query.device.index if query.is_cuda else None)
    same_dtype = query.dtype == key_slabs[0].dtype == value_slabs[0].dtype
    # The interpreter takes bf16 for integers in its products.
    is_fp32 = not same_dtype or query.dtype == torch.float32 or not query.is_cuda
    BD = max(triton.next_power_of_2(D), 16)
    # Products in fp32 run without matrix units and keep more in registers.
    BM = _MANY_ROWS if T * H // G > _FEW_ROWS and not is_fp32 else _FEW_ROWS
    BN, num_warps, num_stages = _tile(BD, 4 if is_fp32 else 2, BM, device)
    num_query_blocks = triton.cdiv(T * H // G, BM)
    num_keys = page_table.shape[1] * page_size
    window = NO_WINDOW if window is None else min(window, NO_WINDOW)
    most_blocks = triton.cdiv(min(num_keys, window + T - 1), min(BN, page_size)) + 1
    wanted = _wanted_splits(B * G * num_query_blocks, device[0] * _PROGRAMS_PER_SM)
    num_splits = max(min(wanted, most_blocks), 1)
    num_rows = B * T * H
    partial_content = query.new_empty(num_splits, num_rows, D, dtype=torch.float32)
    partial_sums = query.new_empty(num_splits, num_rows, 3, dtype=torch.float32)
    key_slabs, first_pages = slab_arguments(key_slabs)
    value_slabs, _ = slab_arguments(value_slabs)
    sizes = {"H": H, "G": G, "D": D, "PAGE_SIZE": page_size, "BM": BM, "BN": BN, "BD": BD}
    with torch.cuda.device_of(query):
        paged_polar_fwd_kernel[(B * num_splits * num_query_blocks * G,)](
            query,
            key_slabs,
            value_slabs,
            first_pages,
            page_table,
            query_start,
            length_gain,
            partial_content,
            partial_sums,
            T,
            num_keys,
            num_splits,
            num_query_blocks,
            num_rows,
            window,
            D**-0.5,
            page_table.stride(0),
            *query.stride()[:3],
            **sizes,
            FP32=is_fp32,
            num_warps=num_warps,
            num_stages=num_stages,
        )
        paged_polar_merge_kernel[(num_rows,)](
            partial_content,
            partial_sums,
            query_start,
            null_value,
            length_gain,
            null_base,
            null_slope,
            magnitude_gain,
            direction,
            magnitude,
            n_eff,
            null_weight,
            T,
            num_keys,
            num_splits,
            num_rows,
            window,
            **sizes,
            # Of the batch alone, so that a cache that grows compiles nothing.
            BS=max(triton.next_power_of_2(wanted), 16),
            num_warps=4,
        )
    return direction, magnitude, n_eff, null_weight


def _paged_polar_fake(query, *_):
    rows = query.shape[:3]
    n_eff, null_weight = (query.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return query.new_empty(query.shape), query.new_empty(rows), n_eff, null_weight


paged_polar_op = define_operator(
    __name__,
    "paged_polar(Tensor query, Tensor[] key_slabs, Tensor[] value_slabs, Tensor page_table, "
    "Tensor query_start, Tensor null_value, Tensor length_gain, Tensor null_base, "
    "Tensor null_slope, Tensor magnitude_gain, int? window) -> (Tensor, Tensor, Tensor, Tensor)",
    paged_polar_fwd,
    _paged_polar_fake,
)
