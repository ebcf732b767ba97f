# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Files that a later call relies on."""

import json
import os
from pathlib import Path

RUN_SETTINGS = "run_settings.json"  # in the folder of a run: what it was begun with


def write_json(path: Path, content) -> None:
    """Writes a file whole or not at all, whenever the process is stopped."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(content, indent=1))
    os.replace(unfinished, path)


def refuse_other_settings(path: Path, settings: dict) -> None:
    """Raises `ValueError` if a folder was begun with other settings: those of its file `path`."""
    if not path.exists():
        return
    before, now = json.loads(path.read_text()), json.loads(json.dumps(settings))
    changed = sorted(name for name in before | now if before.get(name) != now.get(name))
    if changed:
        was, now_is = (x.get(changed[0]) for x in (before, now))
        raise ValueError(
            f"{path.parent} was begun with other settings ({', '.join(changed)}; {changed[0]} was "
            f"{was!r}, is {now_is!r}): choose another output, or delete the folder."
        )


__all__ = ["RUN_SETTINGS", "refuse_other_settings", "write_json"]
