# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
Pages of keys and values, and which row owns which: shared by all layers of a cache, and by its
forks.
"""

import math
from collections.abc import Sequence

import torch

from .kernels.pages import gather_pages, write_pages


def mark_static(*tensors: torch.Tensor) -> None:
    """
    Tells the compiler that the addresses stay, as CUDA graphs need it. Not possible inside a
    compiled region.
    """
    if not torch.compiler.is_compiling():
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)


class PagePool:
    """
    The pages of every attention layer, with reference counts, shared by a cache and its forks.

    A page id means the same page in every layer. Growing appends a slab of pages to each layer and
    copies nothing. Page 0 is a scratch page: padding is written there and nobody reads it.

    Args:
        static: whether the pool never grows, so that the addresses of its pages stay.
    """

    def __init__(self, page_size: int, static: bool = False):
        self.page_size = page_size
        self.static = static
        self.slab_sizes: list[int] = []
        self.reference_counts: list[int] = []
        self.free_pages: list[int] = []
        self.slabs: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def allocate(self, count: int) -> list[int]:
        """
        Ids of `count` pages with one reference each; grows the pool by one slab if too few are
        free.
        """
        missing = count - len(self.free_pages)
        if missing > 0:
            first = len(self.reference_counts)
            if first == 0:  # the scratch page is never free
                self.reference_counts.append(1)
                first, slab_size = 1, missing + 1
            else:
                slab_size = missing
            self.slab_sizes.append(slab_size)
            self.reference_counts.extend([0] * missing)
            self.free_pages.extend(range(first + missing - 1, first - 1, -1))
        pages = [self.free_pages.pop() for _ in range(count)]
        for page in pages:
            self.reference_counts[page] = 1
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.reference_counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.reference_counts[page] -= 1
            if self.reference_counts[page] == 0:
                self.free_pages.append(page)

    def layer_slabs(
        self, layer_idx: int, like: torch.Tensor | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """
        The slabs `[pages, page_size, G, D]` of keys and of values of a layer. Slabs that are
        missing are made with the heads, head size, dtype and device of `like`, `[B, T, G, D]`, or
        of the slabs that exist.
        """
        keys, values = self.slabs.setdefault(layer_idx, ([], []))
        like = keys[0] if like is None and keys else like
        for size in self.slab_sizes[len(keys) :]:
            shape = (size, self.page_size, *like.shape[2:])
            # Zeros, not empty: a masked weight of 0 times an uninitialised NaN would still be NaN.
            keys.append(torch.zeros(shape, dtype=like.dtype, device=like.device))
            values.append(torch.zeros(shape, dtype=like.dtype, device=like.device))
            if self.static:
                mark_static(keys[-1], values[-1])
        return keys, values

    def read(self, slabs: list[torch.Tensor], pages: Sequence[int]) -> torch.Tensor:
        """The content of `pages` (ids known on the host), `[len(pages), page_size, G, D]`."""
        table = torch.tensor([list(pages)], dtype=torch.int64, device=slabs[0].device)
        flat = gather_pages(slabs, table)[0]
        return flat.reshape(len(pages), self.page_size, *flat.shape[1:])

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copies pages in every layer."""
        if not source:
            return
        for layer_idx in self.slabs:
            for slabs in self.layer_slabs(layer_idx):
                content = self.read(slabs, source)
                table = torch.tensor([target], dtype=torch.int64, device=content.device)
                start = torch.zeros(1, dtype=torch.int64, device=content.device)
                write_pages(slabs, table, content.flatten(0, 1)[None], start, None)


class PagedRows:
    """
    What all layers share about the rows of a batch.

    Attributes:
        page_table (`[B, pages]`, int32): the page that holds a row's positions `i * page_size` and
            on.
        lengths (`[B]`, int64): number of real tokens that each row has stored.
        padded_length: number of columns seen, padding included, as `get_seq_length()` reports it. A
            Python int, or a tensor of fixed address when the capacity is fixed, so that compiled
            steps do not specialise on it.
    """

    def __init__(self, pool: PagePool, max_length: int | None, expected_length: int | None):
        self.pool = pool
        self.max_length = max_length
        self.expected_length = expected_length
        self.pages: list[list[int]] | None = None
        self.page_table: torch.Tensor | None = None
        self.lengths: torch.Tensor | None = None
        self.padded_length: int | torch.Tensor = 0
        self.has_content = False

    @property
    def batch_size(self) -> int | None:
        return None if self.lengths is None else self.lengths.shape[0]

    def prepare(self, batch_size: int, num_tokens: int, device: torch.device) -> None:
        """Makes room for `num_tokens` more columns in each of `batch_size` rows.

        Raises `ValueError` if the batch size is not the one that the cache was filled with, or if a
        cache of fixed capacity would overflow (inside a compiled region, and on devices where
        reading the length would stall, the overflow is an assertion on the device).
        """
        if self.lengths is None:
            self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
            self.pages = [[] for _ in range(batch_size)]
            if self.max_length is not None:
                self.padded_length = torch.zeros((), dtype=torch.int64, device=device)
                mark_static(self.lengths, self.padded_length)
        elif self.batch_size != batch_size:
            raise ValueError(
                f"The cache holds {self.batch_size} rows but the input has {batch_size}: use a "
                "new cache for another "
                "batch, or batch_select_indices / batch_repeat_interleave to change the rows of "
                "this one."
            )
        if self.max_length is None:
            self._grow(math.ceil((self.padded_length + num_tokens) / self.pool.page_size))
            return
        if self.page_table is None:
            self._grow(math.ceil(self.max_length / self.pool.page_size))
            mark_static(self.page_table)
        fits = self.padded_length + num_tokens <= self.max_length
        if torch.compiler.is_compiling() or fits.device.type != "cpu":
            torch._assert_async(fits)
        elif not fits:
            raise ValueError(
                f"The cache has room for {self.max_length} tokens, {int(self.padded_length)} are "
                "stored and "
                f"{num_tokens} more were given: make a cache with a larger max_length."
            )

    def _grow(self, pages_per_row: int) -> None:
        have = len(self.pages[0]) if self.pages else 0
        if pages_per_row <= have:
            return
        if self.max_length is None:  # a quarter more than asked, so that tables are rebuilt rarely
            expected = math.ceil((self.expected_length or 0) / self.pool.page_size)
            pages_per_row = max(pages_per_row, expected if have == 0 else have + have // 4 + 1)
        fresh = self.pool.allocate(len(self.pages) * (pages_per_row - have))
        for row in self.pages:
            row.extend(fresh[: pages_per_row - have])
            del fresh[: pages_per_row - have]
        self._publish(self.lengths.device)

    def _publish(self, device: torch.device) -> None:
        self.page_table = torch.tensor(self.pages, dtype=torch.int32, device=device)

    def advance(self, num_tokens: int, lengths: torch.Tensor | None) -> None:
        """Counts `num_tokens` more columns, `lengths` `[B]` of them real (`None`: all)."""
        self.lengths.add_(num_tokens if lengths is None else lengths.to(self.lengths.device))
        self.count_columns(num_tokens)

    def count_columns(self, num_tokens: int) -> None:
        """The part of `advance` that does not depend on what is real."""
        if self.max_length is None:
            self.padded_length += num_tokens
        else:
            self.padded_length.add_(num_tokens)
        self.has_content = True

    def visible_pages(self, num_tokens: int) -> torch.Tensor:
        """The part of the page table that the stored columns and `num_tokens` more can reach."""
        if self.max_length is not None:
            return self.page_table
        return self.page_table[
            :, : math.ceil((self.padded_length + num_tokens) / self.pool.page_size)
        ]

    def take(self, index: list[int], hand_over: bool) -> "PagedRows":
        """
        New rows that continue the rows `index` of this one (growing caches). Full pages are shared;
        the last page, which will be written to, is copied. With `hand_over` the caller frees these
        rows at once, so that the first taker of a row keeps its last page uncopied.
        """
        rows = PagedRows(self.pool, self.max_length, self.expected_length)
        rows.padded_length, rows.has_content = self.padded_length, self.has_content
        if self.lengths is None:
            return rows
        lengths = self.lengths.tolist()
        rows.pages, source, target, taken = [], [], [], set()
        for i in index:
            old = self.pages[i]
            full = len(old) if hand_over and i not in taken else lengths[i] // self.pool.page_size
            taken.add(i)
            self.pool.retain(old[:full])
            own = self.pool.allocate(len(old) - full)
            if own and lengths[i] % self.pool.page_size:
                source.append(old[full])
                target.append(own[0])
            rows.pages.append(old[:full] + own)
        self.pool.copy_pages(source, target)
        rows.lengths = self.lengths[
            torch.tensor(index, dtype=torch.int64, device=self.lengths.device)
        ]
        rows._publish(self.lengths.device)
        return rows

    def drop(self, num_tokens: int, dropped: torch.Tensor) -> None:
        """
        Forgets the last `num_tokens` columns, `dropped` `[B]` of them real. Pages shared with
        others that the rows will write to again are replaced by copies.
        """
        before = self.lengths.tolist()
        self.lengths.sub_(dropped)
        if self.max_length is None:
            self.padded_length -= num_tokens
        else:
            self.padded_length.sub_(num_tokens)
        size, after = self.pool.page_size, self.lengths.tolist()
        written = [
            range(new // size, math.ceil(old / size))
            for old, new in zip(before, after, strict=True)
        ]
        self.pool.copy_pages(*self._replace_shared(written))

    def reset(self) -> None:
        """Forgets all columns. Pages that others share are theirs now; the rows get other ones."""
        self.has_content = False
        if self.lengths is None:
            return
        self.lengths.zero_()
        if self.max_length is not None:
            self.padded_length.zero_()
            return
        self.padded_length = 0
        self._replace_shared([range(len(pages)) for pages in self.pages])

    def _replace_shared(self, written: list[range]) -> tuple[list[int], list[int]]:
        """
        Gives each row its own pages at the indices that it will write to, where others share them.
        Returns the pages left and those taken in their place.
        """
        left, taken = [], []
        for pages, indices in zip(self.pages, written, strict=True):
            for i in indices:
                if self.pool.reference_counts[pages[i]] > 1:
                    left.append(pages[i])
                    self.pool.release([pages[i]])
                    pages[i] = self.pool.allocate(1)[0]
                    taken.append(pages[i])
        if left:
            self._publish(self.lengths.device)
        return left, taken

    def free(self) -> None:
        """Gives the pages back to the pool."""
        # (The compiler makes objects without calling __init__.)
        for pages in getattr(self, "pages", None) or []:
            self.pool.release(pages)
        self.pages = None

    def __del__(self):
        self.free()


__all__ = ["PagePool", "PagedRows", "mark_static"]
