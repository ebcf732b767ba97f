# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
From text to token shards. Blocks of documents are tokenised by many processes; which block was
finished last, and how to go on in the source from there, is written down after each.

Workers import this file: it must stay quick to import.
"""

import hashlib
import json
import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from .files import write_json
from .refusals import refuse_missing_path, refuse_other_settings
from .shards import SPLITS, token_dtype, write_shard

TEXT_PATTERNS = ("*.py", "*.pyi", "*.md", "*.rst", "*.txt", "*.c", "*.cc", "*.cpp", "*.h", "*.hpp")


@dataclass
class Split:
    """
    Which documents go where, by the hash of their text: copies of one text stay together, so that
    nothing held out was trained on.

    Attributes:
        validation_fraction: share of the documents that is held out.
        long_tokens: documents of at least as many tokens are long; kept whole in a split of their
            own.
        long_fraction: share of the long documents that is held out in that way; the others are
            treated as all documents are.
    """

    validation_fraction: float = 0.005
    long_tokens: int = 65536
    long_fraction: float = 1.0

    def __call__(self, text_hash: int, num_tokens: int) -> str:
        draw = text_hash / 2**64
        if num_tokens >= self.long_tokens and draw < self.long_fraction:
            return "long"
        # The low half decides here, so that the two draws have nothing to do with each other.
        return "validation" if text_hash % 2**32 < self.validation_fraction * 2**32 else "train"


class TextTree:
    """
    Folders of text files, each file a document, in the order of their paths; a block is a list of
    paths, which the workers read.
    """

    def __init__(self, roots: list[str], patterns: Iterable[str], max_bytes: int):
        self.roots = [Path(root) for root in roots]
        self.patterns, self.max_bytes = tuple(patterns), max_bytes

    def paths(self) -> list[tuple[str, int]]:
        """(path, size) of every file that counts; links are not followed."""
        found = {}
        for root in self.roots:
            for folder, folders, files in os.walk(root):
                folders.sort()
                for name in files:
                    path = Path(folder, name)
                    if not any(path.match(pattern) for pattern in self.patterns):
                        continue
                    if path.is_symlink() or not 0 < (size := path.stat().st_size) < self.max_bytes:
                        continue
                    found[str(path)] = size
        return sorted(found.items())

    def blocks(self, block_bytes: int, state: int | None) -> Iterator[tuple[list[Path], int]]:
        """(block, state after it), from `state` on: the number of files before the block."""
        start = state or 0
        block, size = [], 0
        for count, (path, file_size) in enumerate(self.paths()[start:], start + 1):
            block.append(Path(path))
            size += file_size
            if size >= block_bytes:
                yield block, count
                block, size = [], 0
        if block:
            yield block, count

    def sample(self, num_bytes: int) -> Iterator[str]:
        """Every k-th file, about `num_bytes` in all: to train a tokenizer on."""
        files = self.paths()
        stride = max(sum(size for _, size in files) // max(num_bytes, 1), 1)
        for path, _ in files[::stride]:
            if (text := read_text(Path(path))) is not None:
                yield text


class Records:
    """
    A text column of a `datasets` source: local parquet or jsonl files, or a repository streamed
    from the Hub; a block is a list of texts.
    """

    def __init__(self, source: str, kind: str, config: str | None, split: str, column: str):
        self.source, self.kind, self.column = source, kind, column
        self.config, self.split = config, split

    def _stream(self):
        from datasets import load_dataset  # machines that train on prepared data need no datasets

        if self.kind == "hub":
            return load_dataset(self.source, self.config, split=self.split, streaming=True)
        path = Path(self.source)
        suffixes = {"parquet": (".parquet",), "json": (".json", ".jsonl")}[self.kind]
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        files = [str(file) for file in files if file.suffix in suffixes]
        if not files:
            raise ValueError(f"{path} holds no {' or '.join(suffixes)} files.")
        return load_dataset(self.kind, data_files=files, split="train", streaming=True)

    def _text(self, record: dict) -> str:
        if self.column not in record:
            raise ValueError(
                f"{self.source} has no column {self.column!r}: choose --column from "
                f"{', '.join(record)}."
            )
        return record[self.column]

    def blocks(self, block_bytes: int, state: dict | None) -> Iterator[tuple[list[str], dict]]:
        """(block, state after it), from `state` on: that of the `datasets` stream."""
        stream = self._stream()
        if state is not None:
            stream.load_state_dict(state)
        block, size = [], 0
        for record in stream:
            block.append(self._text(record))
            size += len(block[-1])
            if size >= block_bytes:
                yield block, stream.state_dict()
                block, size = [], 0
        if block:
            yield block, stream.state_dict()

    def sample(self, num_bytes: int) -> Iterator[str]:
        """The first texts, about `num_bytes` in all."""
        for record in self._stream():
            text = self._text(record)
            yield text
            num_bytes -= len(text)
            if num_bytes <= 0:
                return


def kind_of(source: str) -> str:
    """
    What `--format auto` means: "text", "parquet", "json" or "hub".

    Raises `FileNotFoundError` for a path that is not there, `ValueError` for other files.
    """
    refuse_missing_path(source)
    path = Path(source)
    kinds = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
    if path.is_dir():
        return "text"
    if not path.exists():
        if path.suffix in kinds:
            raise FileNotFoundError(f"There is no file {source} (on the Hub: --format hub).")
        return "hub"
    if path.suffix not in kinds:
        raise ValueError(f"{source} is neither a folder nor a parquet or jsonl file.")
    return kinds[path.suffix]


def read_text(path: Path) -> str | None:
    """The text of a file, or `None` for what is no UTF-8 text."""
    try:
        return path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, PermissionError, FileNotFoundError):
        return None


_worker: dict = {}


def _start_worker(folder: Path, end_of_text: int, dtype: str, split: Split) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _worker.update(
        folder=folder, end=end_of_text, dtype=np.dtype(dtype), split=split, tokenizer=tokenizer
    )


def _encode_block(number: int, block: list[Path] | list[str]) -> dict[str, list[int]]:
    """Tokenises and writes one block; returns {split: [documents, tokens, bytes]} and `skipped`."""
    texts = [read_text(item) if isinstance(item, Path) else item for item in block]
    kept = [text for text in texts if text]
    counts = {"skipped": len(texts) - len(kept)}
    encodings = _worker["tokenizer"].encode_batch_fast(kept, add_special_tokens=False)
    shards = {name: ([], []) for name in SPLITS}
    for text, encoding in zip(kept, encodings, strict=True):
        ids = np.array([*encoding.ids, _worker["end"]], _worker["dtype"])
        data = text.encode()
        text_hash = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
        documents, index = shards[_worker["split"](text_hash, len(ids))]
        documents.append(ids)
        index.append((len(ids), len(data), text_hash))
    for name, (documents, index) in shards.items():
        if documents:
            write_shard(_worker["folder"], f"{name}-{number:05d}", documents, index)
        tokens, size = sum(map(len, documents)), sum(entry[1] for entry in index)
        counts[name] = [len(documents), tokens, size]
    return counts


def is_begun(folder: Path) -> bool:
    """Whether text is in the folder already, in the ids of its tokenizer."""
    return (folder / "progress.jsonl").exists() or (folder / "meta.json").exists()


def prepare(
    source: TextTree | Records,
    folder: Path,
    vocab_size: int,
    end_of_text: int,
    split: Split,
    settings: dict,
    max_tokens: int | None = None,
    block_bytes: int = 2**24,
    workers: int = 1,
    on_block=lambda totals: None,
) -> dict:
    """
    Writes the shards of `source` into `folder`, which holds the tokenizer, and at last `meta.json`.

    A folder of an interrupted call is continued. Returns the contents of `meta.json`. Raises
    `ValueError` if the folder was begun with other `settings`, or no training text was found.
    """
    settings = {**settings, **asdict(split), "block_bytes": block_bytes, "max_tokens": max_tokens}
    if is_begun(folder):
        later = ("vocab_size", "tokenizer_megabytes")
        refuse_other_settings(folder / "settings.json", settings, later)
    write_json(folder / "settings.json", settings)
    if (folder / "meta.json").exists():
        return json.loads((folder / "meta.json").read_text())

    log = folder / "progress.jsonl"
    finished = [json.loads(line) for line in complete_lines(log)]
    totals = {name: [0, 0, 0] for name in SPLITS} | {"skipped": 0}
    for line in finished:
        add_counts(totals, line["counts"])
    on_block(totals)
    dtype = token_dtype(vocab_size)
    blocks = source.blocks(block_bytes, finished[-1]["state"] if finished else None)
    arguments = (folder, end_of_text, dtype.str, split)
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start_worker, arguments
    ) as pool:
        # Results are taken in order; only so many blocks are in memory.
        pending: deque[tuple[int, dict | int, Future]] = deque()

        def take() -> None:
            number, state, future = pending.popleft()
            counts = future.result()
            with log.open("a") as file:
                file.write(json.dumps({"block": number, "state": state, "counts": counts}) + "\n")
            add_counts(totals, counts)
            on_block(totals)

        enough = max_tokens or float("inf")
        for number, (block, state) in enumerate(blocks, len(finished)):
            if totals["train"][1] >= enough:
                break
            pending.append((number, state, pool.submit(_encode_block, number, block)))
            while len(pending) > 2 * workers:
                take()
        while pending and totals["train"][1] < enough:
            take()
        # Beyond the limit: the same blocks count for any number of workers.
        for number, _, future in pending:
            future.result()
            for path in folder.glob(f"*-{number:05d}.*"):
                path.unlink()

    if not totals["train"][1]:
        raise ValueError(
            f"No training text was found ({totals['validation'][0] + totals['long'][0]} documents "
            "were held out): look at --source, --patterns and the fractions."
        )
    meta = {
        "dtype": dtype.str,
        "vocab_size": vocab_size,
        "end_of_text": end_of_text,
        "splits": {
            name: dict(zip(("documents", "tokens", "bytes"), totals[name], strict=True))
            for name in SPLITS
        },
        "skipped_documents": totals["skipped"],
        "settings": settings,
    }
    write_json(folder / "meta.json", meta)
    return meta


def complete_lines(path: Path) -> list[str]:
    """The lines of a file without one that was cut off, which is removed."""
    if not path.exists():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return whole.splitlines()


def add_counts(totals: dict, counts: dict) -> None:
    totals["skipped"] += counts["skipped"]
    for name in SPLITS:
        totals[name] = [a + b for a, b in zip(totals[name], counts[name], strict=True)]


__all__ = ["TEXT_PATTERNS", "Records", "Split", "TextTree", "is_begun", "kind_of", "prepare"]
