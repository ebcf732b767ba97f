# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
A grid of runs as data, and its scheduling: each cell is trained and measured by the scripts, one
cell at a time on each device.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from .checkpoints import refuse_other_run
from .files import write_json
from .settings import RunSettings, build, merge, read_yaml

SCRIPTS = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Cell:
    """
    One run of the grid: `run` is what its YAML file says, `evaluations` are further arguments of
    `evaluate.py`, by the file that it writes.
    """

    name: str
    folder: Path
    run: dict
    evaluations: dict[str, tuple[str, ...]]

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    @property
    def is_trained(self) -> bool:
        """Results alone, of a run whose model was left elsewhere, cannot be measured."""
        return self.result.exists() and (self.folder / "model").exists()

    @property
    def done(self) -> Path:
        """Says that all commands of the cell came to their end, and holds its evaluations."""
        return self.folder / "done"

    @property
    def is_done(self) -> bool:
        """In the way that the grid says now; earlier versions wrote down nothing."""
        if not self.done.exists():
            return False
        measured = self.done.read_text()
        return not measured or json.loads(measured) == json.loads(json.dumps(self.evaluations))


def read_grid(path: str | Path, data: str | None = None, output: str | None = None) -> list[Cell]:
    """
    The cells of a YAML file:

        base: small.yaml              # a run; the path is relative to this file
        output: runs/ablation         # each cell gets a folder there
        changes: {steps: 572}         # for every cell
        evaluation: [--lengths, 2K]   # further arguments of evaluate.py, for every cell; or
                                      # {name: arguments}, one call for each
        cells:                        # name: changes to the run; `evaluation` replaces the above
          polar: {model: {use_memory: false}}
        factors:                      # or, beside them, every combination of these
          core: {polar: {}, nope: {model: {attention_type: nope}}}
          memory: {memory: {}, no-memory: {model: {use_memory: false}}}

    Raises `ValueError` for settings that do not exist, before anything runs.
    """
    grid = read_yaml(path)
    known = {"base", "output", "changes", "evaluation", "cells", "factors"}
    if unknown := sorted(set(grid) - known):
        raise ValueError(f"Unknown entry {unknown[0]!r} of {path}: choose from {sorted(known)}.")
    if missing := {"base", "output"} - ({"output"} if output else set()) - set(grid):
        raise ValueError(f"{path} lacks {' and '.join(sorted(missing))}.")
    base = merge(read_yaml(Path(path).parent / grid["base"]), grid.get("changes", {}))
    if data is not None:
        base["data"] = data
    variations = dict(grid.get("cells", {}))
    factors = grid.get("factors", {})
    for combination in itertools.product(*(levels.items() for levels in factors.values())):
        if combination:
            changes: dict = {}
            for _, change in combination:
                changes = merge(changes, change or {})
            variations["-".join(level for level, _ in combination)] = changes
    cells = []
    for name, changes in variations.items():
        changes = dict(changes or {})
        evaluation = changes.pop("evaluation", grid.get("evaluation", []))
        if isinstance(evaluation, list):
            evaluation = {"": evaluation}
        evaluations = {
            f"evaluation{'-' * bool(key)}{key}.json": tuple(map(str, arguments))
            for key, arguments in evaluation.items()
        }
        folder = Path(output or grid["output"]) / name
        run = merge(base, changes) | {"output": str(folder)}
        try:
            build(RunSettings, run)
        except ValueError as error:
            raise ValueError(f"Cell {name} of {path}: {error}") from error
        cells.append(Cell(name, folder, run, evaluations))
    return cells


def refuse_other_runs(cells: Sequence[Cell]) -> None:
    """
    Raises `ValueError` if a cell was run with other settings, or was measured with other arguments
    than the grid has now and its model lies elsewhere: measuring would train it again.
    """
    for cell in cells:
        refuse_other_run(cell.folder, build(RunSettings, cell.run).identity(), later=["data"])
        if cell.done.exists() and not cell.is_done and not cell.is_trained:
            raise ValueError(
                f"{cell.folder} was measured with other arguments of evaluate.py, and its model "
                "lies elsewhere: put it back there, or choose another output."
            )


class Scheduler:
    """
    Runs cells, as many at once as there are `devices`: numbers of GPUs, or `None` for a process on
    the CPU. A cell that is done is left alone; one that was interrupted goes on.

    Args:
        stop_after: seconds, after which every cell saves a checkpoint and stops.
        on_change: called with {cell name: state} at every change.

    Raises `ValueError` for a cell whose folder holds a run with other settings.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        devices: Sequence[int | None],
        stop_after: float | None = None,
        on_change: Callable[[dict[str, str]], None] = lambda states: None,
    ):
        self.cells, self.devices, self.on_change = list(cells), list(devices), on_change
        refuse_other_runs(self.cells)
        self.deadline = time.monotonic() + (stop_after or float("inf"))
        self.states = {c.name: "done" if c.is_done else "waiting" for c in self.cells}
        self._waiting = [cell for cell in self.cells if not cell.is_done]
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen] = set()

    def run(self) -> dict[str, str]:
        """The state of each cell at the end: done, stopped, waiting or failed."""
        threads = [threading.Thread(target=self._work, args=(d,)) for d in self.devices]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            with self._lock:
                self._waiting.clear()
                for child in self._children:
                    child.send_signal(signal.SIGINT)
            raise
        return self.states

    def _report(self, cell: Cell, state: str) -> None:
        with self._lock:
            self.states[cell.name] = state
            self.on_change(dict(self.states))

    def _work(self, device: int | None) -> None:
        while time.monotonic() < self.deadline:
            with self._lock:
                if not self._waiting:
                    return
                cell = self._waiting.pop(0)
            try:
                state = self._run(cell, device)
            except OSError as error:  # of this cell's files: the others go on
                state = f"failed: {error}"
            self._report(cell, state)

    def _run(self, cell: Cell, device: int | None) -> str:
        cell.folder.mkdir(parents=True, exist_ok=True)
        settings = cell.folder / "run.yaml"
        settings.write_text(yaml.safe_dump(cell.run, sort_keys=False))
        if not cell.is_trained:
            for name in (cell.result.name, *cell.evaluations):  # of another model
                (cell.folder / name).unlink(missing_ok=True)
            self._report(cell, "training")
            if self._call(cell, device, "train", [str(settings)]):
                return "failed in training"
        if not cell.is_trained:
            return "stopped in training"
        self._report(cell, "evaluation")
        for name, further in cell.evaluations.items():
            if time.monotonic() > self.deadline:
                return "stopped before evaluation"
            arguments = [str(cell.folder / "model"), "--data", cell.run["data"]]
            arguments += ["--output", str(cell.folder / name), *further]
            if code := self._call(cell, device, "evaluate", arguments):
                return "stopped in evaluation" if code == os.EX_TEMPFAIL else "failed in evaluation"
        write_json(cell.done, cell.evaluations)
        return "done"

    def _call(self, cell: Cell, device: int | None, script: str, arguments: list[str]) -> int:
        """Runs a script of this folder on a device, its output into a log; its exit code."""
        command = [sys.executable, str(SCRIPTS / f"{script}.py"), *arguments]
        if self.deadline != float("inf"):
            left = max(self.deadline - time.monotonic(), 1.0)
            command += ["--stop-after", f"{left:.0f}"]
        environment = dict(os.environ)
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(device)
        with (cell.folder / f"{script}.log").open("a") as log:
            child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            with self._lock:
                self._children.add(child)
            code = child.wait()
            with self._lock:
                self._children.discard(child)
        return code


def collect(cells: Sequence[Cell]) -> list[dict]:
    """
    What the cells have to show so far: `{"name", "run", "training": ..., "rows": [...]}` for each
    cell that is trained.
    """
    results = []
    for cell in cells:
        if not cell.result.exists():
            continue
        files = [cell.folder / name for name in cell.evaluations]
        measured = [json.loads(path.read_text()) for path in files if path.exists()]
        results.append(
            {
                "name": cell.name,
                "run": {k: v for k, v in cell.run.items() if k not in ("data", "output")},
                "training": json.loads(cell.result.read_text()),
                "conditions": [each["conditions"] for each in measured],
                "rows": [
                    row
                    for each in measured
                    for part in each["parts"].values()
                    for row in part["rows"]
                ],
            }
        )
    return results


__all__ = ["Cell", "Scheduler", "collect", "read_grid", "refuse_other_runs"]
