# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Training rows of one length, cut from the stream of a split, in an order of their own."""

import numpy as np
import torch
from torch.utils.data import Dataset

from .shards import Shards


class Rows(Dataset):
    """
    `num_rows` rows of `length` tokens: `{"input_ids": [T], "starts": [T] bool}`, where `starts`
    marks the first token of a document (and of the row).

    Row i is the same whatever reads it: pass e over the text is in the order of a permutation drawn
    from (seed, e). Without a seed the rows come in the order of the stream, once.

    Args:
        repeated_rows: share of the rows in which a passage stands twice (`repeat_passage`), drawn
            from (seed, i); it needs a seed.
    """

    def __init__(
        self,
        shards: Shards,
        length: int,
        num_rows: int | None,
        seed: int | None = None,
        repeated_rows: float = 0.0,
    ):
        self.shards, self.length, self.seed = shards, length, seed
        if repeated_rows and seed is None:
            raise ValueError("Which rows repeat a passage follows from the seed: give one.")
        self.repeated_rows = repeated_rows
        self.rows_in_stream = shards.num_tokens // length
        if self.rows_in_stream == 0:
            raise ValueError(
                f"The split {shards.split!r} of {shards.folder} holds {shards.num_tokens} tokens, "
                f"fewer than one row of {length}: prepare more text."
            )
        self.num_rows = self.rows_in_stream if num_rows is None else num_rows
        if seed is None:
            self.num_rows = min(self.num_rows, self.rows_in_stream)
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.num_rows

    def _place(self, index: int) -> int:
        if self.seed is None:
            return index
        epoch, index = divmod(index, self.rows_in_stream)
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._order = epoch, generator.permutation(self.rows_in_stream)
        return int(self._order[1][index])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.num_rows:
            raise IndexError(index)
        start = self._place(index) * self.length
        boundaries = self.shards.document_starts
        inside = boundaries[slice(*np.searchsorted(boundaries, [start, start + self.length]))]
        starts = torch.zeros(self.length, dtype=torch.bool)
        starts[torch.from_numpy(inside - start)] = True
        starts[0] = True
        ids = self.shards.read(start, start + self.length)
        if self.repeated_rows:
            generator = np.random.default_rng([self.seed, index, 1])
            if generator.random() < self.repeated_rows:
                repeat_passage(ids, generator)
        return {"input_ids": torch.from_numpy(ids), "starts": starts}


def repeat_passage(ids: np.ndarray, generator: np.random.Generator) -> None:
    """
    Writes one passage of the row `ids` `[T]` once more, later in it, over what stood there. Its
    length is drawn from 16 to T / 2, then its two places.

    Text says little twice, and a short training may never find out that looking back pays
    (induction: what followed these words the last time?). Here it pays for up to half a row.
    """
    total = len(ids)
    length = int(generator.integers(min(16, total // 2), total // 2 + 1))
    first = int(generator.integers(0, total - 2 * length + 1))
    second = int(generator.integers(first + length, total - length + 1))
    ids[second : second + length] = ids[first : first + length]


def stack_rows(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """`input_ids` and `labels` `[B, T]`: one stream, document after document."""
    ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids.clone()}


def isolate_documents(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """
    One row `[1, B * T]` with the boundaries of its documents, `cu_seq_lens_q` `[N + 1]`; the first
    token of a document is no label.

    N is padded by empty documents to a power of two, so that a compiled model meets few shapes.
    """
    ids = torch.cat([row["input_ids"] for row in rows])
    starts = torch.cat([row["starts"] for row in rows])
    positions = starts.nonzero()[:, 0]
    capacity = max(64, 2 ** int(np.ceil(np.log2(len(positions) + 1))))
    boundaries = torch.full((capacity,), len(ids), dtype=torch.int32)
    boundaries[: len(positions)] = positions.to(torch.int32)
    labels = ids.masked_fill(starts, -100)
    return {
        "input_ids": ids[None],
        "labels": labels[None],
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
    }


__all__ = ["Rows", "isolate_documents", "repeat_passage", "stack_rows"]
