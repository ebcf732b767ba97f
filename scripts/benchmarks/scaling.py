# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Training on several GPUs: `accelerate launch scripts/train.py`, DDP and FSDP2, beside one GPU.

Same weights, data and tokens per step on any number of processes, so the losses must agree; the
table says by how much their means of ten steps (the first: of step 1 alone, then of 2 to 10) differ
at most, relative to one process. Efficiency is the tokens per second over those of one process
times the number of processes. Data come from prepare_data.py.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .common import conditions, plot_bars, print_row

SCRIPTS = Path(__file__).parents[1]
MODES = {
    "ddp": [],
    "fsdp2": [
        "--use_fsdp",
        "--fsdp_version=2",
        "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP",
        "--fsdp_state_dict_type=FULL_STATE_DICT",
    ],
}


def add_arguments(parser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="folder of prepare_data.py")
    parser.add_argument("--settings", type=Path, default=SCRIPTS / "configs" / "paper.yaml")
    parser.add_argument("--set", nargs="*", default=[], help="changes to the settings")
    parser.add_argument("--modes", nargs="+", choices=sorted(MODES), default=["ddp", "fsdp2"])
    parser.add_argument("--processes", nargs="+", type=int, default=[2])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens-per-step", type=int, default=524288)
    parser.add_argument("--cpu", action="store_true", help="without GPUs (one process only)")


def first_gpus(count: int) -> str:
    """The first of the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(count)) if visible is None else visible.split(",")[:count]
    return ",".join(names)


def train(mode: str, processes: int, args) -> dict:
    """`result.json` of one run."""
    with tempfile.TemporaryDirectory() as output:
        launch = [sys.executable, "-m", "accelerate.commands.launch"]
        launch += [f"--num_processes={processes}", "--num_machines=1", "--dynamo_backend=no"]
        launch += ["--mixed_precision=no"]  # train.py's own settings say so
        launch += ["--cpu"] if args.cpu else []
        launch += ["--multi_gpu"] if processes > 1 and mode == "ddp" else []
        launch += MODES[mode] if processes > 1 else []
        settings = {
            "data": args.data,
            "output": output,
            "steps": args.steps,
            "tokens_per_step": args.tokens_per_step,
            "trainer.logging_steps": 10,  # a log waits for the device: not at every step
            "trainer.save_strategy": "no",
            "trainer.eval_strategy": "no",
            "trainer.report_to": "none",
        }
        changes = [f"{name}={value}" for name, value in settings.items()] + args.set
        subprocess.run(
            [*launch, str(SCRIPTS / "train.py"), str(args.settings), "--set", *changes],
            check=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": first_gpus(processes)},
        )
        return json.loads((Path(output) / "result.json").read_text())


def run(args) -> dict:
    rows, alone = [], None
    runs = [("one process", 1)] + [
        (mode, n) for n in args.processes if n > 1 for mode in args.modes
    ]
    for mode, processes in runs:
        result = train("ddp" if processes == 1 else mode, processes, args)
        if alone is None:
            alone = result
        rate = result["tokens_per_second"]
        losses = zip(result["losses"], alone["losses"], strict=True)
        row = {
            "mode": mode,
            "processes": processes,
            "tokens_per_second": rate,
            "efficiency_percent": round(100 * rate / alone["tokens_per_second"] / processes, 1),
            "peak_gib": result["peak_gib"],
            "losses": result["losses"],
            "largest_relative_loss_difference": round(
                max(abs(a - b) / b for (_, a), (_, b) in losses), 5
            ),
        }
        rows.append(row)
        print_row(**{**row, "losses": " ".join(f"{loss:.4f}" for _, loss in row["losses"])})
    return {"conditions": conditions(), "rows": rows}


def plot(result: dict, path) -> None:
    rows = result["rows"]
    labels = [
        f"{row['mode']}, {row['processes']} GPU" + "s" * (row["processes"] > 1) for row in rows
    ]
    rates = [row["tokens_per_second"] for row in rows]
    plot_bars(labels, rates, "tokens per second", result, path, scale="linear")
