# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Plots and Markdown tables from the JSON files of ablate.py and evaluate.py.

    python scripts/plot_results.py runs/long-context/results.json --output runs/long-context
    python scripts/plot_results.py a/evaluation.json b/evaluation.json --output runs/compared \\
        --model-card runs/small/model/README.md

In a model card the tables go between the two lines `<!-- results -->`; they are put at its end if
it has none.
"""

import argparse
from pathlib import Path

from experiments.plots import plot_all, report
from experiments.refusals import read_json, without_traceback

MARK = "<!-- results -->"


def read_results(path: Path) -> list[dict]:
    """`results.json` as it is; an `evaluation.json` as one result named after its folder."""
    content = read_json(path)
    if isinstance(content, list):
        return content
    if "parts" not in content:
        raise ValueError(f"{path} is neither of ablate.py nor of evaluate.py: it has no parts.")
    rows = [row for part in content["parts"].values() for row in part["rows"]]
    return [{"name": path.resolve().parent.name, "rows": rows}]


def update_card(text: str, tables: str) -> str:
    """The model card with `tables` between the marks."""
    before, mark, rest = text.partition(MARK)
    after = rest.partition(MARK)[2] if mark else ""
    separator = "" if mark else "\n"
    return f"{before}{separator}{MARK}\n\n{tables}\n{MARK}{after or chr(10)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="JSON files")
    parser.add_argument("--output", type=Path, required=True, help="folder of plots and tables.md")
    parser.add_argument("--only", nargs="+", help="names of runs (default: all)")
    parser.add_argument("--model-card", type=Path, help="card to put the tables into, or to begin")
    arguments = parser.parse_args()
    with without_traceback():
        results = [result for path in arguments.results for result in read_results(path)]
    if unknown := set(arguments.only or ()) - {result["name"] for result in results}:
        raise SystemExit(f"No run {unknown.pop()}: there are {[x['name'] for x in results]}.")
    if arguments.only:
        results = [result for result in results if result["name"] in arguments.only]
    for path in plot_all(results, arguments.output):
        print(path)
    tables = report(results)
    (arguments.output / "tables.md").write_text(tables)
    print(arguments.output / "tables.md")
    if arguments.model_card:
        card = arguments.model_card
        if not card.exists():
            card.write_text(f"# {card.resolve().parent.name}\n")
        card.write_text(update_card(card.read_text(), tables))
        print(card)


if __name__ == "__main__":
    main()
