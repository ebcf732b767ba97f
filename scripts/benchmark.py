# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Benchmarks, one subcommand each: a correctness gate first, then a table, JSON and a plot."""

import argparse
import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

BENCHMARKS = (
    "attention",
    "memory",
    "conv",
    "decode",
    "chunks",
    "traffic",
    "generation",
    "prefill",
    "training",
    "scaling",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    subparsers = parser.add_subparsers(dest="benchmark", required=True)
    modules = {}
    for name in BENCHMARKS:
        modules[name] = importlib.import_module(f"benchmarks.{name}")
        subparser = subparsers.add_parser(
            name,
            help=modules[name].__doc__.strip().splitlines()[0],
            description=modules[name].__doc__,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        subparser.add_argument("--output", type=Path, help="folder for the JSON file and the plot")
        modules[name].add_arguments(subparser)
    args = parser.parse_args()
    result = modules[args.benchmark].run(args)
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        path = args.output / f"{args.benchmark}.json"
        path.write_text(json.dumps(result, indent=1))
        plot = getattr(modules[args.benchmark], "plot", None)
        if plot is not None:
            plot(result, path.with_suffix(".png"))
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
