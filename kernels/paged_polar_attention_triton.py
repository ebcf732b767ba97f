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

import math

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("The Triton path of paged attention needs the package triton.") from error

from .pages_triton import find_page, slab_arguments

__all__ = ["paged_polar_fwd"]

# (compute capability's major number, bytes of an element, head_dim up to) -> keys per block, warps,
# stages.
_TILES = {
    (9, 2, 128): (64, 4, 3),
    (9, 2, 256): (32, 4, 3),
    (9, 4, 128): (32, 4, 2),
    (9, 4, 256): (16, 4, 2),
}
_MAX_BLOCK_ROWS = 64
# Programs per multiprocessor to aim at.
_PROGRAMS_PER_SM = 4


@triton.jit
def _softplus(x):
    """ln(1 + e^x), with a small relative error for all x."""
    e = tl.exp(-tl.abs(x))
    u = 1 + e
    # Rounding 1 + e loses digits of e, which the quotient of e and what remained of it gives back.
    log1p = tl.where(u == 1, e, tl.log(u) * (e / tl.where(u == 1, 1.0, u - 1)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def _tanh(x):
    """tanh of x >= 0, with a small relative error for all x."""
    e = tl.exp(-2 * x)
    x2 = x * x
    series = x * (1 - x2 * (1 / 3 - x2 * (2 / 15 - x2 * (17 / 315))))
    return tl.where(x < 0.1, series, (1 - e) / (1 + e))


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
    o_h = i_g * R + o_m % R
    m_m = o_t < num_queries
    p_q = query + i_b * stride_qb + o_t[:, None] * stride_qt + o_h[:, None] * stride_qh
    b_q = tl.load(p_q + o_d[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0)
    if FP32:
        b_q = b_q.to(tl.float32)

    position = position + o_t
    oldest = position - window
    count = tl.minimum(tl.maximum(position + 1, 1), window)
    gain = _softplus(tl.load(length_gain + o_h).to(tl.float32))
    temp = 1 + gain * tl.log(count.to(tl.float32))
    scale = temp * (1.4426950408889634 / tl.sqrt(D + 0.0))

    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    b_squares = tl.zeros([BM], tl.float32)
    b_content = tl.zeros([BM, BD], tl.float32)
    p_table = page_table + i_b * stride_table
    o_kv = o_n[:, None] * (G * D) + i_g * D + o_d[None, :]
    for block in range(begin, end):
        index = block // BLOCKS
        within = block % BLOCKS * BN
        page = tl.load(p_table + index).to(tl.int32)
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
        b_a = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale[:, None]
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


@triton.jit(
    do_not_specialize=["num_queries", "num_keys", "num_splits", "num_rows", "window", "stride_null"]
)
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
    stride_null,
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
    total_max = float("-inf")
    total = 0.0
    squares = 0.0
    b_content = tl.zeros([BD], tl.float32)
    for i_s in range(0, num_used, BS):
        o_s = i_s + tl.arange(0, BS)
        m_s = o_s < num_used
        slot = o_s.to(tl.int64) * num_rows + row
        b_max = tl.load(partial_sums + slot * 3, mask=m_s, other=float("-inf"))
        b_sum = tl.load(partial_sums + slot * 3 + 1, mask=m_s, other=0.0)
        b_squares = tl.load(partial_sums + slot * 3 + 2, mask=m_s, other=0.0)
        p_part = partial_content + slot[:, None] * D + o_d[None, :]
        b_part = tl.load(p_part, mask=m_s[:, None] & m_d[None, :], other=0.0)
        new_max = tl.maximum(total_max, tl.max(b_max, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        part = tl.exp2(b_max - shift)
        decay = tl.exp2(total_max - shift)
        total = total * decay + tl.sum(b_sum * part, 0)
        squares = squares * decay * decay + tl.sum(b_squares * part * part, 0)
        b_content = b_content * decay + tl.sum(b_part * part[:, None], 0)
        total_max = new_max

    seen = total > 0
    total = tl.where(seen, total, 1.0)
    squares = tl.where(seen, squares, 1.0)
    # The query's own a_0; positions before the first key count as n = 0.
    count = tl.minimum(tl.maximum(position + i_t + 1, 0), window).to(tl.float32)
    temp = 1 + _softplus(tl.load(length_gain + i_h).to(tl.float32)) * tl.log(tl.maximum(count, 1.0))
    slope = _softplus(tl.load(null_slope + i_h).to(tl.float32))
    null = tl.load(null_base + i_h).to(tl.float32) + slope * tl.sqrt(tl.log(count + 1))
    LN2: tl.constexpr = 0.6931471805599453
    l1 = LN2 * (total_max + tl.log2(total))
    over_null = tl.where(seen, l1 - temp * null, float("-inf"))
    log_n_eff = LN2 * (2 * tl.log2(total) - tl.log2(squares))
    e = tl.exp(-tl.abs(over_null))
    real = tl.where(over_null > 0, 1 / (1 + e), e / (1 + e))
    weight = tl.where(over_null > 0, e / (1 + e), 1 / (1 + e))
    m_eff = tl.exp(log_n_eff - _softplus(-over_null))
    # ln(1 + m_eff) is the softplus of its logarithm; a query that sees nothing has -inf there.
    log_m_eff = tl.where(seen, log_n_eff - _softplus(tl.where(seen, -over_null, 0.0)), -1e30)
    gain = _softplus(tl.load(magnitude_gain + i_h).to(tl.float32))
    b_null = tl.load(null_value + i_h * stride_null + o_d, mask=m_d, other=0.0).to(tl.float32)
    mixed = b_content * (real / total) + weight * b_null
    norm = tl.sqrt(tl.sum(mixed * mixed, 0))
    b_direction = mixed / tl.maximum(norm, 1e-6)
    tl.store(direction + row * D + o_d, b_direction.to(direction.dtype.element_ty), mask=m_d)
    b_magnitude = _tanh(gain * _softplus(log_m_eff))
    tl.store(magnitude + row, b_magnitude.to(magnitude.dtype.element_ty))
    tl.store(n_eff + row, tl.where(seen, tl.exp(log_n_eff), 0.0))
    tl.store(null_weight + row, weight)
