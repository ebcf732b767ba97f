# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Bytes of device memory that the decoding kernels move, by the counters of Nsight Compute.

Grouped heads beside heads that were expanded, and the memory's step in place beside the same rule
as operations of torch. `least` counts every input read once and every output written once; caches
are flushed before each kernel.
"""

import csv
import functools
import shutil
import subprocess
import sys

import torch
import torch.nn.functional as F
from atma.kernels.gated_delta import gated_delta_step
from atma.kernels.paged_polar_attention import paged_polar_attention

from .common import conditions, plot_bars, print_row
from .decode import paged_inputs
from .kernels import GROUPS, HEAD_DIM, HEADS, draw, require
from .memory import RULE, delta_inputs

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
ROWS, KEYS, SEQUENCES = 64, 8192, 2048
LEAST = {
    "keys and values": 2 * ROWS * KEYS * GROUPS * HEAD_DIM * 2,
    "state": 2 * SEQUENCES * HEADS * HEAD_DIM**2 * 4,
}


def add_arguments(parser) -> None:
    parser.add_argument("--case", choices=sorted(CASES), help="run this once and measure nothing")


def attend(groups: int):
    inputs = paged_inputs(ROWS, KEYS, groups)
    return lambda: paged_polar_attention(*inputs)


def step_inputs(sequences: int = SEQUENCES) -> list[torch.Tensor]:
    inputs = [x.detach() for x in delta_inputs(sequences, 1)]
    return [*inputs, draw(sequences, HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float32)]


def step_by_operations(query, key, value, retention_logits, write_logits, state) -> torch.Tensor:
    """The rule as operations of torch, each of which passes over the state: decay, recall, write,
    read."""

    def by_head(x):
        return x[:, 0].repeat_interleave(HEADS // x.shape[2], 1).float()[..., None].flatten(0, 1)

    query, key, value = (by_head(x) for x in (query, key, value))
    query, key = (F.normalize(x, dim=1, eps=1e-12) for x in (query, key))
    memory = state.flatten(0, 1)
    gamma = torch.sigmoid(retention_logits.float() + RULE["retention_bias"]).view(-1, 1, 1)
    memory.mul_(gamma)
    update = torch.sigmoid(write_logits.float()).view(-1, 1, 1) * (value - memory @ key)
    memory.baddbmm_(update, key.mT)
    return (memory @ query).view(*state.shape[:2], -1)


def check() -> None:
    inputs, other = step_inputs(3), step_inputs(3)
    other[:5], other[5] = inputs[:5], inputs[5].clone()
    found, expected = gated_delta_step(*inputs, **RULE)[:, 0], step_by_operations(*other)
    require("the read", found, expected, 5e-3)
    require("the state", inputs[5], other[5], 1e-5)


def step(function):
    inputs = step_inputs()
    return lambda: function(*inputs)


# What runs, and what it has to move at least.
CASES = {
    "paged decode, grouped heads": (lambda: attend(GROUPS), "keys and values"),
    "paged decode, expanded heads": (lambda: attend(HEADS), "keys and values"),
    "memory step, in place": (
        lambda: step(functools.partial(gated_delta_step, **RULE)),
        "state",
    ),
    "memory step, by operations": (lambda: step(step_by_operations), "state"),
}


def count_bytes(ncu: str, case: str) -> list[float]:
    """Bytes read and written by all kernels of a case."""
    command = [ncu, "--clock-control", "none", "--metrics", ",".join(METRICS), "--csv"]
    command += ["--print-units", "base", "--profile-from-start", "off"]
    command += [sys.executable, sys.argv[0], "traffic", "--case", case]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    table = csv.DictReader(line for line in output.splitlines() if line.startswith('"'))
    moved = dict.fromkeys(METRICS, 0.0)
    for row in table:
        moved[row["Metric Name"]] += float(row["Metric Value"].replace(",", ""))
    return list(moved.values())


@torch.no_grad()
def run(args) -> dict:
    if args.case:
        function = CASES[args.case][0]()
        function()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        function()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
        return {}
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("Nsight Compute (ncu) is not on the PATH: no counters can be read.")
    check()
    rows = []
    for case, (_, what) in CASES.items():
        read, written = count_bytes(ncu, case)
        row = {
            "case": case,
            "read_mb": round(read / 1e6, 1),
            "written_mb": round(written / 1e6, 1),
            "least_mb": round(LEAST[what] / 1e6, 1),
            "times_least": round((read + written) / LEAST[what], 3),
        }
        rows.append(row)
        print_row(**row)
    return {"conditions": conditions(), "rows": rows}


def plot(result: dict, path) -> None:
    rows = result["rows"]
    times = [row["times_least"] for row in rows]
    plot_bars([row["case"] for row in rows], times, "times the fewest bytes", result, path)
