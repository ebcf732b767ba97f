# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The arguments of evaluate.py, which a grid gives for each of its cells."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from .evaluation import EvaluationSettings
from .needles import TASKS
from .shards import Shards


def number_of_tokens(text: str) -> int:
    """`2K`, `1M` or a plain number."""
    units = {"K": 2**10, "M": 2**20}
    number, unit = text[:-1], text[-1:].upper()
    count = int(number) * units[unit] if unit in units else int(text)
    if count < 1:
        raise ValueError(text)
    return count


def half_life(text: str) -> float | None:
    if text.lower() == "none":
        return None
    limit = float(text)
    if not limit > 0:
        raise ValueError(text)
    return limit


def evaluation_parser(description: str | None = None) -> argparse.ArgumentParser:
    defaults = EvaluationSettings()
    parser = argparse.ArgumentParser(
        "evaluate.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(name: str, default, text: str, **options) -> None:
        parser.add_argument(name, default=default, help=f"{text} (default: {default})", **options)

    parser.add_argument("model", help="folder or Hub repository of a checkpoint")
    parser.add_argument("--data", required=True, help="folder that prepare_data.py wrote")
    add("--split", "long", "split that documents and gaps come from")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    add(
        "--lengths",
        defaults.lengths,
        "contexts; 2K and 1M are understood",
        type=number_of_tokens,
        nargs="+",
    )
    add("--documents", defaults.documents, "long documents for the losses, 0 for none", type=int)
    add("--min-documents", defaults.min_documents, "of one length, or a shorter one", type=int)
    add("--scored-tokens", defaults.scored_tokens, "at the end of each document", type=int)
    add("--tasks", defaults.tasks, "of retrieval", nargs="*", choices=sorted(TASKS))
    add("--depths", defaults.depths, "where needles stand", type=float, nargs="+")
    add("--needles", defaults.needles, "at each length and depth, at most", type=int)
    add("--needle-tokens", defaults.needle_tokens, "limit of needles times length", type=int)
    add("--generated", defaults.generated, "answers by generate() of each", type=int)
    add(
        "--give-up-below", defaults.give_up_below,
        "share of right answer tokens, 0 to 1, under which longer contexts are left out; 0: never",
        type=float,
    )  # fmt: skip
    add("--tokens-at-once", defaults.tokens_at_once, "rows of a batch times length", type=int)
    add("--chunk", None, "tokens of one call, 0 for all; by the model if not given", type=int)
    add("--seed", defaults.seed, "of needles and gaps", type=int)
    add(
        "--half-lives", [None], "memory_max_half_life; 'none' leaves the model as it is",
        type=half_life, nargs="+",
    )  # fmt: skip
    add(
        "--dtype", "bfloat16" if torch.cuda.is_available() else "float32", "of the weights",
        choices=["float32", "bfloat16", "float16"],
    )  # fmt: skip
    add("--device", "cuda" if torch.cuda.is_available() else "cpu", "to run on")
    parser.add_argument("--stop-after", type=float, help="seconds; the next call does the rest")
    return parser


def refuse_evaluation(arguments: Sequence[str], data: str) -> None:
    """
    Ends the program, as argparse does, for arguments that evaluate.py does not know; raises
    `ValueError` if the data have nothing to measure on, `FileNotFoundError` if they are not there.
    """
    parsed = evaluation_parser().parse_args(["model", "--data", data, "--output", "o", *arguments])
    EvaluationSettings(**{name: getattr(parsed, name) for name in vars(EvaluationSettings())})
    held_out(parsed.data, parsed.split)


def held_out(data: str, split: str) -> Shards:
    """The split that is measured on. Raises `ValueError` if it is empty."""
    shards = Shards(data, split)
    if not shards.num_tokens:
        raise ValueError(
            f"The split {split!r} of {data} is empty: prepare the data with a smaller "
            "--long-tokens, or choose another --split."
        )
    return shards


__all__ = ["evaluation_parser", "held_out", "refuse_evaluation"]
