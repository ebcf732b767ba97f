# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Pages in Triton: how a kernel finds one, and the writing of a layer's new keys and values."""

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("The Triton path of the pages needs the package triton.") from error

from .backend import define_operator, device_of

__all__ = ["MAX_SLABS", "find_page", "slab_arguments", "write_key_value_pages_fwd"]

# A kernel is compiled for 1, 4, 16 or 64 slabs; what is missing to the next number is filled up.
MAX_SLABS = 64
# Compared with odd numbers below, this lies after every page.
_NO_SLAB = 2**31 - 1


def slab_arguments(slabs: list[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """The slabs of a pool and where they begin, as `find_page` takes them.

    Returns:
        The slabs, and for each but the first 2 x (id of its first page) + 1: Triton compiles anew
        for 1 and for multiples of 16, which these odd numbers never are.
    """
    count = 1
    while count < len(slabs):
        count *= 4
    first_pages, pages = [], 0
    for slab in slabs[:-1]:
        pages += slab.shape[0]
        first_pages.append(2 * pages + 1)
    first_pages += [_NO_SLAB] * (count - len(slabs))
    return (*slabs, *[slabs[-1]] * (count - len(slabs))), tuple(first_pages)


@triton.jit
def find_page(slabs, first_pages, page, page_stride):
    """The pointer to a page, given its id, a scalar."""
    p_slab = slabs[0]
    first = page * 0
    for i in tl.static_range(1, len(slabs)):
        is_later = 2 * page + 1 >= first_pages[i - 1]
        p_slab = tl.where(is_later, slabs[i], p_slab)
        first = tl.where(is_later, first_pages[i - 1] // 2, first)
    return p_slab + (page - first).to(tl.int64) * page_stride


@triton.jit
def _write_token(p_new, p_page, within, o_c, m_c, stride_g, stride_d, D: tl.constexpr, GD):
    new = tl.load(p_new + (o_c // D) * stride_g + (o_c % D) * stride_d, mask=m_c)
    tl.store(p_page + within * GD + o_c, new.to(p_page.dtype.element_ty), mask=m_c)


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_pages",
        "stride_table",
        "stride_kb",
        "stride_kt",
        "stride_vb",
        "stride_vt",
    ]
)
def write_key_value_pages_kernel(
    key,
    value,
    key_slabs,
    value_slabs,
    first_pages,
    page_table,
    start,
    lengths,
    num_tokens,
    num_pages,
    stride_table,
    stride_kb,
    stride_kt,
    stride_kg,
    stride_kd,
    stride_vb,
    stride_vt,
    stride_vg,
    stride_vd,
    G: tl.constexpr,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    i_b = tl.program_id(0) // num_tokens
    i_t = tl.program_id(0) % num_tokens
    position = tl.load(start + i_b).to(tl.int64) + i_t
    stored = (position >= 0) & (position < num_pages.to(tl.int64) * PAGE_SIZE)
    if HAS_LENGTHS:
        stored = stored & (i_t < tl.load(lengths + i_b))
    # What has no place is not written at all: nobody reads the scratch page.
    if stored:
        i_b = i_b.to(tl.int64)
        i_t = i_t.to(tl.int64)
        page = tl.load(page_table + i_b * stride_table + position // PAGE_SIZE).to(tl.int32)
        within = position % PAGE_SIZE
        o_c = tl.arange(0, BLOCK)
        m_c = o_c < G * D
        p_page = find_page(key_slabs, first_pages, page, PAGE_SIZE * G * D)
        p_new = key + i_b * stride_kb + i_t * stride_kt
        _write_token(p_new, p_page, within, o_c, m_c, stride_kg, stride_kd, D, G * D)
        p_page = find_page(value_slabs, first_pages, page, PAGE_SIZE * G * D)
        p_new = value + i_b * stride_vb + i_t * stride_vt
        _write_token(p_new, p_page, within, o_c, m_c, stride_vg, stride_vd, D, G * D)
