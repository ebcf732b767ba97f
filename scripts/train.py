# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Trains a model as a YAML file says, on shards of prepare_data.py; goes on from a checkpoint.

    python scripts/train.py scripts/configs/small.yaml
    accelerate launch --num_processes 2 scripts/train.py scripts/configs/small.yaml
    python scripts/train.py scripts/configs/small.yaml --set steps=100 model.use_memory=false

The order of the data depends on the seed alone, not on the number of processes.
"""

import time

STARTED = time.monotonic()  # before the imports, which take seconds

import argparse

from experiments.refusals import without_traceback
from experiments.settings import load_run
from experiments.training import build_trainer, check_start, train


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", help="YAML file; its names are those of RunSettings")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="changes to it (default: none)"
    )
    parser.add_argument(
        "--stop-after", type=float, metavar="SECONDS",
        help="save a checkpoint and stop then (default: run to the end)",
    )  # fmt: skip
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    deadline = None if arguments.stop_after is None else STARTED + arguments.stop_after
    with without_traceback():
        settings = load_run(arguments.settings, arguments.set)
        check_start(settings)
    trainer = build_trainer(settings, deadline)
    finished = train(trainer) is not None
    if not trainer.is_world_process_zero():
        return
    if not finished:
        print(f"Stopped early; the same command goes on from the checkpoint in {settings.output}")
    else:
        print(f"Saved to {settings.output}/model")


if __name__ == "__main__":
    main()
