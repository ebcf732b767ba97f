# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Pages in Triton: how a kernel finds one; a layer's keys and values written, and gathered."""

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("The Triton path of the pages needs the package triton.") from error

from .operators import define_operator

__all__ = [
    "find_page",
    "gather_key_value_pages_op",
    "pools_fit_kernels",
    "slab_arguments",
    "write_key_value_pages_op",
]

# A kernel is compiled for 1, 4, 16 or 64 slabs; what is missing to the next number is filled up.
_MAX_SLABS = 64
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Compared with odd numbers below, this lies after every page.
_NO_SLAB = 2**31 - 1


def pools_fit_kernels(key_slabs: list[torch.Tensor], value_slabs: list[torch.Tensor]) -> bool:
    """Whether the kernels can address the pages of two pools."""
    slabs = [*key_slabs, *value_slabs]
    return (
        len(key_slabs) <= _MAX_SLABS
        and [slab.shape for slab in key_slabs] == [slab.shape for slab in value_slabs]
        and all(slab.dtype in _DTYPES and slab.is_contiguous() for slab in slabs)
    )


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
    o_new = o_c.to(tl.int64)
    new = tl.load(p_new + (o_new // D) * stride_g + (o_new % D) * stride_d, mask=m_c)
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
    i_b = (tl.program_id(0) // num_tokens).to(tl.int64)
    i_t = (tl.program_id(0) % num_tokens).to(tl.int64)
    position = tl.load(start + i_b).to(tl.int64) + i_t
    stored = (position >= 0) & (position < num_pages.to(tl.int64) * PAGE_SIZE)
    if HAS_LENGTHS:
        stored = stored & (i_t < tl.load(lengths + i_b))
    # What has no place is not written at all: nobody reads the scratch page.
    if stored:
        page = tl.load(page_table + i_b * stride_table + position // PAGE_SIZE).to(tl.int32)
        within = position % PAGE_SIZE
        o_c = tl.arange(0, BLOCK)
        m_c = o_c < G * D
        p_page = find_page(key_slabs, first_pages, page, PAGE_SIZE * G * D)
        p_new = key + i_b * stride_kb + i_t * stride_kt
        _write_token(p_new, p_page, within, o_c, m_c, stride_kg, stride_kd, D, G * D)
        p_value_page = find_page(value_slabs, first_pages, page, PAGE_SIZE * G * D)
        p_new_value = value + i_b * stride_vb + i_t * stride_vt
        _write_token(p_new_value, p_value_page, within, o_c, m_c, stride_vg, stride_vd, D, G * D)


def write_key_value_pages_fwd(
    key_slabs: list[torch.Tensor],
    value_slabs: list[torch.Tensor],
    page_table: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: torch.Tensor,
    lengths: torch.Tensor | None,
) -> None:
    """The arguments are those of `write_key_value_pages`; slabs are contiguous."""
    B, T, G, D = key.shape
    if key.numel() == 0:
        return
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    key_slabs, first_pages = slab_arguments(key_slabs)
    value_slabs, _ = slab_arguments(value_slabs)
    BLOCK = triton.next_power_of_2(G * D)
    with torch.cuda.device_of(key):
        write_key_value_pages_kernel[(B * T,)](
            key,
            value,
            key_slabs,
            value_slabs,
            first_pages,
            page_table,
            start.contiguous(),
            start if lengths is None else lengths.contiguous(),
            T,
            page_table.shape[1],
            page_table.stride(0),
            *key.stride(),
            *value.stride(),
            G=G,
            D=D,
            PAGE_SIZE=key_slabs[0].shape[1],
            BLOCK=BLOCK,
            HAS_LENGTHS=lengths is not None,
            num_warps=max(min(BLOCK // 256, 8), 1),
        )


def _write_key_value_pages_fake(*_):
    return None


write_key_value_pages_op = define_operator(
    __name__,
    "write_key_value_pages(Tensor(a!)[] key_slabs, Tensor(b!)[] value_slabs, Tensor page_table, "
    "Tensor key, Tensor value, Tensor start, Tensor? lengths) -> ()",
    write_key_value_pages_fwd,
    _write_key_value_pages_fake,
)


@triton.jit(do_not_specialize=["num_pages", "stride_table"])
def gather_key_value_pages_kernel(
    key_slabs,
    value_slabs,
    first_pages,
    page_table,
    stop,
    key,
    value,
    num_pages,
    stride_table,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_b = (tl.program_id(0) // num_pages).to(tl.int64)
    i_p = (tl.program_id(0) % num_pages).to(tl.int64)
    page = tl.load(page_table + i_b * stride_table + i_p).to(tl.int32)
    p_key_page = find_page(key_slabs, first_pages, page, PAGE_SIZE * WIDTH)
    p_value_page = find_page(value_slabs, first_pages, page, PAGE_SIZE * WIDTH)
    # Of the page's tokens, those before `stop`.
    num_tokens = tl.load(stop + i_b).to(tl.int64) - i_p * PAGE_SIZE
    first = (i_b * num_pages + i_p) * PAGE_SIZE * WIDTH
    o_c = tl.arange(0, BLOCK)
    for row in range(0, PAGE_SIZE, ROWS):
        o_r = row + tl.arange(0, ROWS)
        offsets = o_r[:, None] * WIDTH + o_c[None, :]
        inside = (o_r[:, None] < PAGE_SIZE) & (o_c[None, :] < WIDTH)
        kept = inside & (o_r[:, None] < num_tokens)
        tl.store(key + first + offsets, tl.load(p_key_page + offsets, kept, 0.0), inside)
        tl.store(value + first + offsets, tl.load(p_value_page + offsets, kept, 0.0), inside)


def gather_key_value_pages_fwd(
    key_slabs: list[torch.Tensor],
    value_slabs: list[torch.Tensor],
    page_table: torch.Tensor,
    stop: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The arguments are those of `gather_key_value_pages`; slabs are contiguous."""
    key, value = _gather_key_value_pages_fake(key_slabs, value_slabs, page_table, stop)
    if key.numel() == 0:
        return key, value
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    page_size, G, D = key_slabs[0].shape[1:]
    key_slabs, first_pages = slab_arguments(key_slabs)
    value_slabs, _ = slab_arguments(value_slabs)
    BLOCK = triton.next_power_of_2(G * D)
    with torch.cuda.device_of(key):
        gather_key_value_pages_kernel[(page_table.numel(),)](
            key_slabs,
            value_slabs,
            first_pages,
            page_table,
            stop.contiguous(),
            key,
            value,
            page_table.shape[1],
            page_table.stride(0),
            WIDTH=G * D,
            PAGE_SIZE=page_size,
            ROWS=max(min(triton.next_power_of_2(page_size), 4096 // BLOCK), 1),
            BLOCK=BLOCK,
            num_warps=4,
        )
    return key, value


def _gather_key_value_pages_fake(key_slabs, value_slabs, page_table, stop):
    page_size, *sizes = key_slabs[0].shape[1:]
    shape = (page_table.shape[0], page_table.shape[1] * page_size, *sizes)
    return key_slabs[0].new_empty(shape), value_slabs[0].new_empty(shape)


gather_key_value_pages_op = define_operator(
    __name__,
    "gather_key_value_pages(Tensor[] key_slabs, Tensor[] value_slabs, Tensor page_table, "
    "Tensor stop) -> (Tensor, Tensor)",
    gather_key_value_pages_fwd,
    _gather_key_value_pages_fake,
)
