# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Where a run goes on."""

from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


def last_checkpoint(output: str | Path) -> str | None:
    """The newest checkpoint that is whole: Trainer writes its own state last."""
    found = [
        folder
        for folder in Path(output).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if (folder / TRAINER_STATE_NAME).exists()
    ]
    return str(max(found, key=lambda folder: int(folder.name.split("-")[-1]))) if found else None


__all__ = ["last_checkpoint"]
