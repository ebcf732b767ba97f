# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Trains and measures every cell of a grid, one at a time on each GPU; tables and plots at the end.

    python scripts/ablate.py scripts/configs/long_context.yaml --data runs/data
    python scripts/ablate.py scripts/configs/grid.yaml --data runs/data --only polar-memory

An interrupted grid goes on where it stopped, cells in the middle of a run from their checkpoint.
"""

import argparse
import time

import torch
from experiments.evaluation_arguments import refuse_evaluation
from experiments.files import write_json
from experiments.grid import Scheduler, collect, read_grid, refuse_other_runs
from experiments.plots import plot_all, report
from experiments.refusals import without_traceback
from experiments.settings import RunSettings, build
from experiments.training import check_start
from rich.console import Console
from rich.live import Live
from rich.table import Table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("grid", help="YAML file; see experiments/grid.py")
    parser.add_argument("--data", help="folder of prepare_data.py (default: that of the YAML file)")
    parser.add_argument("--output", help="folder of the cells (default: that of the YAML file)")
    parser.add_argument("--only", nargs="+", help="names of cells to run (default: all)")
    parser.add_argument(
        "--cpu-processes", type=int, default=1, help="at once where there is no GPU (default: 1)"
    )
    parser.add_argument(
        "--stop-after", type=float, metavar="SECONDS",
        help="save checkpoints and stop then (default: run to the end)",
    )  # fmt: skip
    return parser.parse_args()


def status(states: dict[str, str]) -> Table:
    table = Table("cell", "state")
    for name, state in states.items():
        table.add_row(name, state)
    return table


def main() -> None:
    arguments = parse_arguments()
    with without_traceback():
        grid = read_grid(arguments.grid, arguments.data, arguments.output)
        for cell in grid:
            check_start(build(RunSettings, cell.run))
            for arguments_of_cell in cell.evaluations.values():
                refuse_evaluation(arguments_of_cell, cell.run["data"])
        refuse_other_runs(grid)  # all of them are in the tables
    cells = grid
    if arguments.only:
        if unknown := set(arguments.only) - {cell.name for cell in grid}:
            raise SystemExit(f"No cell {unknown.pop()}: there are {[c.name for c in grid]}.")
        cells = [cell for cell in grid if cell.name in arguments.only]
    devices = list(range(torch.cuda.device_count())) or [None] * arguments.cpu_processes
    console = Console()
    with Live(console=console) as live:

        def show(states: dict[str, str]) -> None:
            live.update(status(states))
            if not console.is_terminal:  # where nothing is seen before the end
                print(time.strftime("%X"), states, flush=True)

        scheduler = Scheduler(cells, devices, arguments.stop_after, show)
        live.update(status(scheduler.states))
        states = scheduler.run()
    console.line()
    results = collect(grid)  # those of earlier calls too
    if results:
        folder = cells[0].folder.parent
        write_json(folder / "results.json", results)
        (folder / "tables.md").write_text(report(results))
        plot_all(results, folder)
        console.print(f"Results, tables and plots are in {folder}")
    failed = [cell for cell in cells if states[cell.name].startswith("failed")]
    for cell in failed:
        print(f"{cell.name} {states[cell.name]}")
        for log in sorted(cell.folder.glob("*.log"), key=lambda path: path.stat().st_mtime)[-1:]:
            print("\n".join([f"The end of {log}:", *log.read_text().splitlines()[-20:]]))
    if failed:
        raise SystemExit(f"Failed: {', '.join(cell.name for cell in failed)}.")


if __name__ == "__main__":
    main()
