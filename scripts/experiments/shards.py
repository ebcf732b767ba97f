# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
Tokenised text on disk: shards of token ids with an index of their documents.

A folder holds, for each split, `train-00000.bin` (ids, uint16 or uint32, documents one after the
other, each closed by an end-of-text token) and `train-00000.npy` (one record for each document),
the tokenizer, and `meta.json` (exact counts, settings). Nothing is read before it is used: ids and
indices are memory-mapped.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path

import numpy as np

from .refusals import read_json

SPLITS = ("train", "validation", "long")
# Tokens (the end-of-text token included), UTF-8 bytes of the text, and a hash of the text.
DOCUMENT = np.dtype([("tokens", "<i8"), ("bytes", "<i8"), ("hash", "<u8")])


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def write_shard(folder: Path, name: str, documents: list[np.ndarray], index: list[tuple]) -> None:
    """Writes ids and index; a shard with an index is complete."""
    for suffix, array in ((".bin", np.concatenate(documents)), (".npy", np.array(index, DOCUMENT))):
        unfinished = folder / f"{name}{suffix}.tmp"
        with unfinished.open("wb") as file:
            array.tofile(file) if suffix == ".bin" else np.save(file, array)
        unfinished.rename(folder / f"{name}{suffix}")


def fingerprint(folder: str | Path) -> str | None:
    """A hash of the tokenizer and the counts of finished data, wherever they lie; else `None`."""
    folder = Path(folder)
    if not (folder / "meta.json").exists():
        return None
    counts = read_json(folder / "meta.json").get("splits")
    digest = hashlib.sha256(json.dumps(counts, sort_keys=True).encode())
    tokenizer = folder / "tokenizer" / "tokenizer.json"
    if tokenizer.exists():
        digest.update(tokenizer.read_bytes())
    return digest.hexdigest()[:16]


class Shards:
    """
    One split of a folder that `prepare_data.py` wrote, as one stream of `num_tokens` ids.

    Raises `FileNotFoundError` if the folder is not complete.
    """

    def __init__(self, folder: str | Path, split: str):
        self.folder, self.split = Path(folder), split
        if not (self.folder / "meta.json").exists():
            raise FileNotFoundError(
                f"{folder} holds no finished data (no meta.json): run prepare_data.py with "
                f"--output {folder}; it goes on where it stopped."
            )
        self.meta = json.loads((self.folder / "meta.json").read_text())
        if split not in self.meta.get("splits", [split]):
            raise ValueError(f"{folder} has no split {split!r}: {', '.join(self.meta['splits'])}.")
        names = sorted(self.folder.glob(f"{split}-*.npy"))
        dtype = np.dtype(self.meta["dtype"])
        self._ids = [np.memmap(name.with_suffix(".bin"), dtype, "r") for name in names]
        self._index = [np.load(name, mmap_mode="r") for name in names]
        self._starts = np.cumsum([0, *map(len, self._ids)])

    @property
    def num_tokens(self) -> int:
        return int(self._starts[-1])

    @cached_property
    def documents(self) -> np.ndarray:
        """The records of all documents, in the order of the stream, `[N]` of `DOCUMENT`."""
        return np.concatenate([np.empty(0, DOCUMENT), *self._index])

    @cached_property
    def document_starts(self) -> np.ndarray:
        """Where documents start in the stream, and its end: `[N + 1]`."""
        return np.cumsum(np.concatenate([[0], self.documents["tokens"]]))

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids `[stop - start]` of the stream, across the borders of shards, as int64."""
        parts = []
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            offset = self._starts[shard]
            part = self._ids[shard][start - offset : stop - offset]
            parts.append(part)
            start, shard = start + len(part), shard + 1
        return np.concatenate(parts).astype(np.int64)

    def document(self, index: int) -> np.ndarray:
        """The ids of one document, its end-of-text token included, as int64."""
        return self.read(*map(int, self.document_starts[index : index + 2]))


__all__ = ["DOCUMENT", "SPLITS", "Shards", "fingerprint", "token_dtype", "write_shard"]
