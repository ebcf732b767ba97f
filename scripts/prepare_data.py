# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Tokenises text into shards for train.py: folders of text, parquet, jsonl, or a Hub data set.

    python scripts/prepare_data.py --source /usr/lib/python3 --tokenizer train --output runs/data
    python scripts/prepare_data.py --source HuggingFaceFW/fineweb-edu --config sample-10BT \\
        --tokenizer gpt2 --output runs/fineweb

An interrupted call goes on where it stopped. Documents are split by the hash of their text.
"""

import argparse
import os
from pathlib import Path

from experiments.preparation import (
    TEXT_PATTERNS,
    Records,
    Split,
    TextTree,
    is_begun,
    kind_of,
    prepare,
)
from experiments.refusals import refuse_missing_path, without_traceback
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and leaves the examples as they are written."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "--source", nargs="+", required=True, help="folders of text, a file, or a Hub repository"
    )
    parser.add_argument(
        "--format", choices=["auto", "text", "parquet", "json", "hub"], default="auto",
        help="auto: folders are text, files go by their suffix, all else is on the Hub",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--patterns", nargs="+", default=TEXT_PATTERNS, help="text files to read")
    parser.add_argument("--max-bytes", type=int, default=2**23, help="of a text file; no larger")
    parser.add_argument("--config", help="configuration of a Hub data set")
    parser.add_argument("--split", default="train", help="split of a Hub data set")
    parser.add_argument("--column", default="text", help="column of the text in records")
    parser.add_argument(
        "--tokenizer", default="train", help="'train', a Hub repository or a folder"
    )
    parser.add_argument("--vocab-size", type=int, default=16384, help="of a tokenizer trained here")
    parser.add_argument(
        "--tokenizer-megabytes", type=int, default=64, help="text that a tokenizer is trained on"
    )
    parser.add_argument("--validation-fraction", type=float, default=0.005)
    parser.add_argument(
        "--long-tokens", type=int, default=65536, help="documents of as many are held out whole"
    )
    parser.add_argument("--long-fraction", type=float, default=1.0, help="share of them held out")
    parser.add_argument(
        "--max-tokens", type=int, help="stop after as many training tokens, at the end of a block"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--block-megabytes", type=float, default=8, help="text of one shard")
    return parser.parse_args()


def make_tokenizer(arguments: argparse.Namespace, source: TextTree | Records):
    """The tokenizer of the output folder, made if no text is there in its ids."""
    # The workers need neither. With `atma` imported, the tokenizer of a checkpoint asks nothing.
    import atma  # noqa: F401
    from experiments.tokenizer import load_tokenizer, train_tokenizer

    folder = arguments.output / "tokenizer"
    if is_begun(arguments.output) and (folder / "tokenizer.json").exists():
        return load_tokenizer(str(folder))
    if arguments.tokenizer == "train":
        sample = source.sample(arguments.tokenizer_megabytes * 2**20)
        tokenizer = train_tokenizer(sample, arguments.vocab_size)
    else:
        tokenizer = load_tokenizer(arguments.tokenizer)
    tokenizer.save_pretrained(folder)
    return tokenizer


def find_kind(sources: list[str], form: str) -> str:
    """The format of all sources; `FileNotFoundError` or `ValueError` for what cannot be read."""
    if form == "auto":
        kinds = {kind_of(source) for source in sources}
    else:
        kinds = {form}
        for source in sources:
            if form != "hub" and not Path(source).exists():
                raise FileNotFoundError(f"There is no file or folder {source}.")
    if len(sources) > 1 and kinds != {"text"}:
        raise ValueError("Several sources must all be folders of text: give one at a time.")
    return kinds.pop()


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    with without_traceback():
        kind = find_kind(arguments.source, arguments.format)
        if arguments.tokenizer != "train":
            refuse_missing_path(arguments.tokenizer)
        elif arguments.vocab_size <= 256:
            raise ValueError("--vocab-size must be more than 256: each byte is a token.")
    arguments.output.mkdir(parents=True, exist_ok=True)
    if kind == "text":
        source = TextTree(arguments.source, arguments.patterns, arguments.max_bytes)
    else:
        source = Records(
            arguments.source[0], kind, arguments.config, arguments.split, arguments.column
        )

    with console.status("Making the tokenizer"):
        tokenizer = make_tokenizer(arguments, source)
    names = ["source", "patterns", "max_bytes", "config", "split", "column", "tokenizer"]
    if arguments.tokenizer == "train":
        names += ["vocab_size", "tokenizer_megabytes"]
    settings = {name: getattr(arguments, name) for name in names} | {"format": kind}
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=arguments.max_tokens)

        def show(totals: dict) -> None:
            documents = sum(totals[name][0] for name in ("train", "validation", "long"))
            progress.update(
                task,
                completed=totals["train"][1],
                description=f"{documents:,} documents, {totals['train'][1]:,} training tokens",
            )

        with without_traceback():
            meta = prepare(
                source,
                arguments.output,
                len(tokenizer),
                tokenizer.eos_token_id,
                Split(
                    arguments.validation_fraction, arguments.long_tokens, arguments.long_fraction
                ),
                settings,
                max_tokens=arguments.max_tokens,
                block_bytes=int(arguments.block_megabytes * 2**20),
                workers=arguments.workers,
                on_block=show,
            )
    table = Table("split", "documents", "tokens", "bytes")
    for name, counts in meta["splits"].items():
        table.add_row(name, *(f"{counts[key]:,}" for key in ("documents", "tokens", "bytes")))
    console.print(table)


if __name__ == "__main__":
    main()
