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
from experiments.evaluation_arguments import evaluation_parser, held_out
from experiments.files import write_json
from experiments.refusals import (
    read_json,
    refuse_changes,
    refuse_missing_path,
    without_traceback,
)
from experiments.shards import fingerprint
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoModelForCausalLM, AutoTokenizer

MEASURED = ("model", "data", "split", "dtype")  # of a results file, beside its settings


def model_fingerprint(model: str) -> str | None:
    """A hash of a local checkpoint's configuration and weights; `None` for one of the Hub."""
    digest = hashlib.sha256()
    patterns = ("*.safetensors", "*.bin", "*config.json")
    paths = sorted(path for pattern in patterns for path in Path(model).glob(pattern))
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
    aside = {"tasks", "depths"}
    if all(result["fingerprints"].values()) and "fingerprints" in before:
        aside |= {"model", "data"}  # the same ones, wherever they lie
    past, now = ({n: v for n, v in x.items() if n not in aside} for x in (past, now))
    refuse_changes(path, past, now)
    for name in ("tasks", "depths"):
        earlier = before["settings"][name]
        new = [value for value in result["settings"][name] if value not in earlier]
        result["settings"][name] = [*earlier, *new]
    return before["parts"]


def main() -> None:
    arguments = evaluation_parser(__doc__).parse_args()
    fields = {name: getattr(arguments, name) for name in vars(EvaluationSettings())}
    result = {name: getattr(arguments, name) for name in MEASURED}
    result |= {"settings": fields, "parts": {}}
    with without_traceback():
        settings = EvaluationSettings(**fields)
        refuse_missing_path(arguments.model)
        shards = held_out(arguments.data, arguments.split)
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        of_data = AutoTokenizer.from_pretrained(shards.folder / "tokenizer")
        if not of_data.get_vocab().items() <= tokenizer.get_vocab().items():
            raise ValueError(
                f"{arguments.data} was made with another tokenizer than the model's: prepare it "
                f"again, with --tokenizer {arguments.model}."
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
    if settings.tasks and shards.num_tokens < max(settings.lengths):
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
