# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Losses and retrieval of a checkpoint from 2K tokens to as far as its device holds the keys.

    python scripts/evaluate.py runs/small/model --data runs/data --output runs/small/evaluation.json
    python scripts/evaluate.py runs/small/model --data runs/data --half-lives none 256 1024 \\
        --lengths 2K 8K 32K 128K 1M --depths 0 0.5 0.9 --output runs/small/evaluation.json

Long inputs are read in chunks through the cache. The JSON file grows part by part, and a second
call does what is missing. (The measures are also there for Hugging Face's `evaluate` library:
`experiments/metrics.py`.)
"""

import time

STARTED = time.monotonic()  # before the imports, which take seconds

import argparse
import gc
import hashlib
import os
import sys
from pathlib import Path

import torch
from benchmarks.common import conditions
from experiments.evaluation import Evaluation, EvaluationSettings
from experiments.files import write_json
from experiments.needles import TASKS
from experiments.refusals import (
    read_json,
    refuse_changes,
    refuse_missing_path,
    without_traceback,
)
from experiments.shards import Shards, fingerprint
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoModelForCausalLM, AutoTokenizer

MEASURED = ("model", "data", "split", "dtype")  # of a results file, beside its settings


def tokens(text: str) -> int:
    """`2K`, `1M` or a plain number."""
    units = {"K": 2**10, "M": 2**20}
    number, unit = text[:-1], text[-1:].upper()
    return int(number) * units[unit] if unit in units else int(text)


def half_life(text: str) -> float | None:
    return None if text.lower() == "none" else float(text)


def parse_arguments() -> argparse.Namespace:
    defaults = EvaluationSettings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(name: str, default, text: str, **options) -> None:
        parser.add_argument(name, default=default, help=f"{text} (default: {default})", **options)

    parser.add_argument("model", help="folder or Hub repository of a checkpoint")
    parser.add_argument("--data", required=True, help="folder that prepare_data.py wrote")
    add("--split", "long", "split that documents and gaps come from")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    add("--lengths", defaults.lengths, "contexts; 2K and 1M are understood", type=tokens, nargs="+")
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
    return parser.parse_args()


def model_fingerprint(model: str) -> str | None:
    """A hash of a local checkpoint's configuration and weights; `None` for one of the Hub."""
    digest = hashlib.sha256()
    paths = sorted([*Path(model).glob("*.safetensors"), *Path(model).glob("config.json")])
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(2**24):
                digest.update(block)
    return digest.hexdigest()[:16] if paths else None


def load(arguments: argparse.Namespace, longest_half_life: float | None):
    """The checkpoint in evaluation mode, its memory's half-life limited if that is wanted."""
    overrides = {} if longest_half_life is None else {"memory_max_half_life": longest_half_life}
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=getattr(torch, arguments.dtype), **overrides
    )
    return model.to(arguments.device).eval()


def parts_of(path: Path, result: dict) -> dict:
    """The parts of an earlier call; `ValueError` if it measured another model or in other ways."""
    before = read_json(path)
    now = {name: result[name] for name in (*MEASURED, "fingerprints")} | result["settings"]
    # What did not exist then has a default that does what was done then.
    past = now | vars(EvaluationSettings()) | before["settings"]
    past |= {name: before[name] for name in (*MEASURED, "fingerprints") if name in before}
    # Each part is of one task and depth: others may come in.
    past, now = ({n: v for n, v in x.items() if n not in ("tasks", "depths")} for x in (past, now))
    refuse_changes(path, past, now)
    return before["parts"]


def main() -> None:
    arguments = parse_arguments()
    fields = {name: getattr(arguments, name) for name in vars(EvaluationSettings())}
    result = {name: getattr(arguments, name) for name in MEASURED}
    result |= {"settings": fields, "parts": {}}
    with without_traceback():
        settings = EvaluationSettings(**fields)
        refuse_missing_path(arguments.model)
        shards = Shards(arguments.data, arguments.split)
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        of_data = AutoTokenizer.from_pretrained(shards.folder / "tokenizer")
        if not of_data.get_vocab().items() <= tokenizer.get_vocab().items():
            raise ValueError(
                f"{arguments.data} was made with another tokenizer than the model's: prepare it "
                f"again, with --tokenizer {arguments.model}."
            )
        if not shards.num_tokens:
            raise ValueError(
                f"The split {arguments.split!r} of {arguments.data} is empty: prepare the data "
                "with a smaller --long-tokens, or choose another --split."
            )
        result["fingerprints"] = {
            "model": model_fingerprint(arguments.model),
            "data": fingerprint(arguments.data),
        }
        if arguments.output.exists():
            result["parts"] = parts_of(arguments.output, result)
    result["conditions"] = conditions()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)

    deadline = STARTED + (float("inf") if arguments.stop_after is None else arguments.stop_after)
    if shards.num_tokens < max(settings.lengths):
        print(
            f"The split {arguments.split!r} holds {shards.num_tokens:,} tokens: the gaps of "
            "needles in longer contexts repeat it."
        )
    console = Console(width=None if sys.stdout.isatty() else 200)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for limit in arguments.half_lives:
            model = load(arguments, limit)
            result["parameters"] = model.num_parameters()
            with without_traceback():
                evaluation = Evaluation(model, tokenizer, shards, settings)
                parts = list(evaluation.parts())
            task = progress.add_task("", total=len(parts))
            for method, options in parts:
                name = " ".join([method, *map(str, options.values()), f"half-life {limit}"])
                progress.update(task, description=name)
                done = [
                    row
                    for part in result["parts"].values()
                    for row in part["rows"]
                    if row["half_life"] == limit
                ]
                if evaluation.gives_up(options, done):
                    console.print(f"Left out: {name}", highlight=False)
                elif name not in result["parts"]:
                    if time.monotonic() > deadline:
                        console.print("Out of time; the same command does what is missing.")
                        raise SystemExit(os.EX_TEMPFAIL)
                    start = time.perf_counter()
                    rows = getattr(evaluation, method)(**options)
                    seconds = round(time.perf_counter() - start, 2)
                    result["parts"][name] = {
                        "seconds": seconds,
                        "rows": [{"half_life": limit, **row} for row in rows],
                    }
                    write_json(arguments.output, result)
                    for row in rows:
                        console.print(describe(row, seconds), highlight=False)
                progress.advance(task)
            del model, evaluation
            gc.collect()


def describe(row: dict, seconds: float) -> str:
    numbers = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
    ]
    return ", ".join([*numbers, f"{seconds} s"])


if __name__ == "__main__":
    main()
