# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Paged storage of keys and values.

A pool is a list of slabs, each [pages, page_size, G, D], contiguous and zero at first, so that it
grows without moving a token. Page ids number the pages through all slabs in order. Page 0 is a
scratch page: what must not be stored goes there, and nobody reads it. Row b's token at position p
lies in page `page_table[b, p // page_size]` at offset `p % page_size`; unused entries of the table
are 0.
"""

import torch

from .backend import choose_backend

try:
    from .pages_triton import (
        gather_key_value_pages_op,
        pools_fit_kernels,
        write_key_value_pages_op,
    )
except ImportError:  # no Triton here: the torch path serves every device
    gather_key_value_pages_op = write_key_value_pages_op = None

__all__ = ["gather_key_value_pages", "gather_pages", "write_key_value_pages", "write_pages"]


def write_pages(
    slabs: list[torch.Tensor],
    page_table: torch.Tensor,
    new: torch.Tensor,
    start: torch.Tensor,
    lengths: torch.Tensor | None = None,
) -> None:
    """Writes new tokens into their rows' pages, in place.

    With one slab nothing depends on the data, so that this compiles into a fixed graph.

    Args:
        slabs: the pool.
        page_table: [B, P] page ids, int32 or int64.
        new: [B, T, G, D]; token t of row b goes to position start[b] + t.
        start: [B] integers.
        lengths: [B] number of real tokens of each row; the others go to the scratch page, as does
            what stands outside the table. None if all are real.
    """
    num_tokens, page_size = new.shape[1], slabs[0].shape[1]
    capacity = page_table.shape[1] * page_size
    tokens = torch.arange(num_tokens, device=new.device)
    position = start[:, None].long() + tokens
    stored = (position >= 0) & (position < capacity)
    if lengths is not None:
        stored = stored & (tokens < lengths[:, None])
    offset = position % page_size
    page = page_table.gather(1, (position // page_size).clamp(0, page_table.shape[1] - 1)).long()
    address = (page.masked_fill(~stored, 0) * page_size + offset).flatten()
    new = new.flatten(0, 1).to(slabs[0].dtype)
    if len(slabs) == 1:
        slabs[0].view(-1, *new.shape[1:]).index_copy_(0, address, new)
        return
    base = 0
    for slab in slabs:
        size = slab.shape[0] * page_size
        inside = (address >= base) & (address < base + size)
        slab.view(-1, *new.shape[1:]).index_copy_(0, address[inside] - base, new[inside])
        base += size


@torch.no_grad()
def write_key_value_pages(
    key_slabs: list[torch.Tensor],
    value_slabs: list[torch.Tensor],
    page_table: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> None:
    """`write_pages` of a layer's new keys and values at once.

    Args:
        key_slabs, value_slabs: the pools.
        key, value: [B, T, G, D].
        page_table, start, lengths: as in `write_pages`. What has no place is written to the scratch
            page or nowhere.
        backend: "auto", "triton" or "torch".

    Raises:
        ValueError: for a backend that cannot run.
    """
    has_triton = (
        write_key_value_pages_op is not None
        and key.dtype != torch.float64
        and pools_fit_kernels(key_slabs, value_slabs)
    )
    if choose_backend(backend, key, "write_key_value_pages", has_triton) == "triton":
        write_key_value_pages_op(key_slabs, value_slabs, page_table, key, value, start, lengths)
        return
    write_pages(key_slabs, page_table, key, start, lengths)
    write_pages(value_slabs, page_table, value, start, lengths)


def gather_pages(slabs: list[torch.Tensor], page_table: torch.Tensor) -> torch.Tensor:
    """The tokens of all pages of a table, row by row.

    Args:
        slabs: the pool.
        page_table: [B, P] page ids, int32 or int64.

    Returns:
        [B, P * page_size, G, D], new storage.
    """
    pages = page_table.flatten().long()
    if len(slabs) == 1:
        found = slabs[0].index_select(0, pages)
    else:
        found = slabs[0].new_empty(pages.shape[0], *slabs[0].shape[1:])
        base = 0
        for slab in slabs:
            inside = (pages >= base) & (pages < base + slab.shape[0])
            found[inside] = slab.index_select(0, pages[inside] - base)
            base += slab.shape[0]
    return found.view(page_table.shape[0], -1, *found.shape[2:])


@torch.no_grad()
def gather_key_value_pages(
    key_slabs: list[torch.Tensor],
    value_slabs: list[torch.Tensor],
    page_table: torch.Tensor,
    stop: torch.Tensor,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_pages` of a layer's keys and values at once, up to each row's `stop`.

    Args:
        key_slabs, value_slabs: the pools.
        page_table: [B, P] page ids, int32 or int64.
        stop: [B] integers; positions from there on are 0, whatever a page still holds.
        backend: "auto", "triton" or "torch".

    Returns:
        Keys and values, [B, P * page_size, G, D] each, new storage.

    Raises:
        ValueError: for a backend that cannot run.
    """
    has_triton = gather_key_value_pages_op is not None and pools_fit_kernels(key_slabs, value_slabs)
    if choose_backend(backend, key_slabs[0], "gather_key_value_pages", has_triton) == "triton":
        return gather_key_value_pages_op(key_slabs, value_slabs, page_table, stop)
    key, value = gather_pages(key_slabs, page_table), gather_pages(value_slabs, page_table)
    beyond = torch.arange(key.shape[1], device=key.device) >= stop[:, None]
    beyond = beyond[:, :, None, None]
    return key.masked_fill(beyond, 0), value.masked_fill(beyond, 0)
