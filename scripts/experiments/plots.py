# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Plots and tables of results: a list of `{"name", "training", "rows"}`, as `collect` makes it."""

import itertools
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter

LOSSES = {
    "document_loss": "held-out documents up to a length",
    "context_loss": "the same last tokens after contexts of a length",
}


def length_name(length: int) -> str:
    for unit, name in ((2**20, "M"), (2**10, "K")):
        if length % unit == 0:
            return f"{length // unit}{name}"
    return str(length)


def select(result: dict, measure: str, depth: float | None = None, half_life=None) -> list[dict]:
    """The rows of one measure (at one depth), by length."""
    rows = [
        row
        for row in result["rows"]
        if row["measure"] == measure
        and row["half_life"] == half_life
        and (depth is None or row["depth"] == depth)
    ]
    return sorted(rows, key=lambda row: row["length"])


def lengths_of(results: list[dict], measure: str) -> list[int]:
    return sorted(
        {row["length"] for result in results for row in result["rows"] if row["measure"] == measure}
    )


def half_lives_of(result: dict) -> list[float | None]:
    found = {row["half_life"] for row in result["rows"]}
    return sorted(found, key=lambda value: (value is not None, value))


def curves(results: list[dict], measure: str) -> list[tuple[str, list[dict]]]:
    """(label, rows by length) of each line of a plot: every result and half-life that has rows."""
    depth = None if measure in LOSSES else 0.0
    lines = [
        (
            result["name"] + ("" if limit is None else f", half-life {limit:g}"),
            select(result, measure, depth, limit),
        )
        for result in results
        for limit in half_lives_of(result)
    ]
    return [(label, rows) for label, rows in lines if rows]


def _axes(figure_size: tuple[float, float]):
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(figsize=figure_size, layout="constrained")
    axes.grid(alpha=0.25)
    return figure, axes


def _length_axis(axes, lengths: list[int], trained: int | None) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [length_name(length) for length in lengths])
    axes.set_xlabel("context (tokens)")
    if trained is not None:
        axes.axvline(trained, color="#777777", linestyle="--", linewidth=1)
        axes.annotate(
            "training length", (trained, 0.5), xycoords=("data", "axes fraction"), xytext=(3, 0),
            textcoords="offset points", color="#777777", fontsize=8, rotation=90, va="center",
        )  # fmt: skip


def plot_by_length(
    results: list[dict], measure: str, key: str, path: Path, title: str, label: str
) -> None:
    """One line for each result (and half-life): `key` of `measure` against the length.

    Each result has a color, each half-life a line style. Losses have a logarithmic axis, on which
    one that collapses leaves the others room.
    """
    figure, axes = _axes((9, 4.5))
    limits = half_lives_of({"rows": [row for result in results for row in result["rows"]]})
    styles = dict(zip(limits, itertools.cycle(["-", "--", ":", "-."])))
    values: list[float] = []
    for result, color in zip(results, itertools.cycle(_colors())):
        for name, rows in curves([result], measure):
            x, y = [row["length"] for row in rows], [row[key] for row in rows]
            values += y
            style = styles[rows[0]["half_life"]]
            axes.plot(x, y, style, marker="o", markersize=4, linewidth=1.5, color=color, label=name)
    trained = {result["run"].get("sequence_length") for result in results if "run" in result}
    _length_axis(axes, lengths_of(results, measure), trained.pop() if len(trained) == 1 else None)
    axes.set(title=title, ylabel=label)
    finite = [value for value in values if math.isfinite(value)]
    if key in ("accuracy", "exact_match"):
        axes.set_ylim(-0.03, 1.03)
    elif finite and min(finite) > 0:
        axes.set_yscale("log")
        axes.set_ylabel(f"{label} (logarithmic)")
        axes.grid(which="both", alpha=0.25)
        axes.yaxis.set_major_formatter("{x:g}")
        narrow = max(finite) < 10 * min(finite)
        axes.yaxis.set_minor_formatter("{x:g}" if narrow else NullFormatter())
    columns = 1 + len(axes.lines) // 25
    figure.legend(fontsize=8, frameon=False, loc="outside right center", ncols=columns)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _colors():
    yield from plt.get_cmap("tab10").colors
    yield from plt.get_cmap("tab20b").colors


def plot_heat_map(results: list[dict], measure: str, path: Path, title: str) -> None:
    """Accuracy of `measure`: one row for each result, one column for each length."""
    lines = curves(results, measure)
    lengths, names = lengths_of(results, measure), [name for name, _ in lines]
    found = [{row["length"]: row["accuracy"] for row in rows} for _, rows in lines]
    table = [[accuracies.get(n) for n in lengths] for accuracies in found]
    figure, axes = _axes((max(2 + 0.7 * len(lengths), 5.5), 1.2 + 0.4 * len(names)))
    axes.grid(False)
    filled = [[float("nan") if value is None else value for value in row] for row in table]
    axes.imshow(filled, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(lengths)), [length_name(length) for length in lengths])
    axes.set_yticks(range(len(names)), names)
    for i, row in enumerate(table):
        for j, value in enumerate(row):
            if value is not None:
                color = "black" if value > 0.6 else "white"
                axes.text(j, i, f"{100 * value:.0f}", ha="center", va="center", color=color)
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def by_depth(result: dict, measure: str) -> list[tuple[float, list[dict]]]:
    """(depth, rows of that depth as if they were of depth 0) of one result."""
    depths = sorted({row["depth"] for row in select(result, measure)})
    return [(d, [row | {"depth": 0.0} for row in select(result, measure, d)]) for d in depths]


def plot_depths(result: dict, measure: str, path: Path, title: str) -> None:
    """Accuracy of one result: one row for each depth, one column for each length."""
    named = [
        {"name": f"depth {depth:g}", "rows": rows} for depth, rows in by_depth(result, measure)
    ]
    plot_heat_map(named, measure, path, title)


def plot_all(results: list[dict], folder: Path) -> list[Path]:
    """Every plot that the results have data for."""
    folder.mkdir(parents=True, exist_ok=True)
    measures = {row["measure"] for result in results for row in result["rows"]}
    written = []
    for measure in sorted(measures):
        path = folder / f"{measure}.png"
        if measure in LOSSES:
            title = f"Loss: {LOSSES[measure]}"
            plot_by_length(results, measure, "nats_per_token", path, title, "nats per token")
            written.append(path)
            continue
        title, label = f"Retrieval: {measure}", "accuracy of answer tokens"
        if curves(results, measure):
            plot_by_length(results, measure, "accuracy", path, title, label)
            map_path = folder / f"{measure}_map.png"
            plot_heat_map(results, measure, map_path, f"{title}, accuracy in percent")
            written += [path, map_path]
        for result in results:
            rows = select(result, measure)
            if {row["depth"] for row in rows} - {0.0}:
                written.append(folder / f"{measure}_depths_{result['name']}.png")
                plot_depths(result, measure, written[-1], f"{title}, {result['name']}")
    return written


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def training_table(results: list[dict]) -> str:
    """Markdown: size, tokens, final loss, speed and MFU of each run."""

    def number(value, form: str) -> str:
        return "" if value is None else format(value, form)

    def millions(count: int) -> str:
        return f"{count / 1e6:,.0f}M" if count >= 1e7 else f"{count / 1e6:.2f}M"

    rows = [
        [
            result["name"],
            f"{result['training']['parameters'] / 1e6:.1f}M",
            millions(result["training"]["tokens"]),
            f"{result['training']['loss']:.3f}",
            number(result["training"]["tokens_per_second"], ",.0f"),
            number(result["training"]["mfu"], ".1%"),
        ]
        for result in results
    ]
    header = ["run", "parameters", "tokens", "training loss", "tokens per second", "MFU"]
    return table(header, rows)


def length_table(results: list[dict], measure: str, key: str, form: str) -> str:
    """Markdown: `key` of `measure`, a row for each run, a column for each length."""
    lengths = lengths_of(results, measure)
    rows = []
    for name, measured in curves(results, measure):
        values = {row["length"]: row[key] for row in measured if key in row}
        rows.append([name, *(format(values[n], form) if n in values else "" for n in lengths)])
    return table(["run", *(length_name(n) for n in lengths)], rows)


def depth_table(result: dict, measure: str) -> str:
    """Markdown: accuracy of one run, a row for each depth, a column for each length."""
    named = [{"name": f"{depth:g}", "rows": rows} for depth, rows in by_depth(result, measure)]
    return length_table(named, measure, "accuracy", ".1%").replace("run", "depth", 1)


def report(results: list[dict]) -> str:
    """All tables, in Markdown."""
    measures = {row["measure"] for result in results for row in result["rows"]}
    sections = []
    if any("training" in result for result in results):
        trained = [result for result in results if "training" in result]
        sections.append("Training\n\n" + training_table(trained))

    def add(measure: str, key: str, form: str, title: str) -> None:
        if any(key in row for _, rows in curves(results, measure) for row in rows):
            sections.append(f"{title}\n\n" + length_table(results, measure, key, form))

    for measure in sorted(measures & set(LOSSES)):
        for key, unit in (("nats_per_token", "nats per token"), ("bits_per_byte", "bits per byte")):
            add(measure, key, ".3f", f"Loss, {LOSSES[measure]} ({unit})")
    for measure in sorted(measures - set(LOSSES)):
        for key, what in (
            ("accuracy", "answer tokens that are right"),
            ("exact_match", "answers that are right"),
            ("absent_accuracy", "answer tokens that are right without a needle"),
            ("generate_exact_match", "answers that generate() gives"),
        ):
            add(measure, key, ".1%", f"Retrieval, {measure}: {what}")
        for result in results:
            if {row["depth"] for row in select(result, measure)} - {0.0}:
                title = f"Retrieval, {measure}, {result['name']}: answer tokens by needle's depth"
                sections.append(f"{title}\n\n" + depth_table(result, measure))
    return "\n\n".join(sections) + "\n"


__all__ = ["length_table", "plot_all", "report", "training_table"]
