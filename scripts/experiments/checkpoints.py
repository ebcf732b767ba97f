# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Where a run goes on, and which run that is."""

from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .refusals import refuse_other_settings

RUN_SETTINGS = "run_settings.json"  # in the folder of a run: what it was begun with


def last_checkpoint(output: str | Path) -> str | None:
    """The newest checkpoint that is whole: Trainer writes its own state last."""
    found = [
        folder
        for folder in Path(output).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if (folder / TRAINER_STATE_NAME).exists()
    ]
    return str(max(found, key=lambda folder: int(folder.name.split("-")[-1]))) if found else None


def refuse_other_run(output: str | Path, settings: dict, **options) -> None:
    """
    Raises `ValueError` if a run with other settings has left work in its folder `output`. `options`
    are those of `refuse_other_settings`.
    """
    output = Path(output)
    if last_checkpoint(output) or any(
        (output / name).exists() for name in ("model", "result.json")
    ):
        refuse_other_settings(output / RUN_SETTINGS, settings, **options)


__all__ = ["RUN_SETTINGS", "last_checkpoint", "refuse_other_run"]
