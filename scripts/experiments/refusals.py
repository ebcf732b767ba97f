# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""What a script says no to before it begins, and how it says so."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

RUN_SETTINGS = "run_settings.json"  # in the folder of a run: what it was begun with


@contextlib.contextmanager
def without_traceback() -> Iterator[None]:
    """For the first steps of a script: what the user got wrong ends it with that sentence alone."""
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(f"{error}") from error


def refuse_missing_path(name: str) -> None:
    """
    Raises `FileNotFoundError` for what can only be meant as a path and is not there. The libraries
    would look for it on the Hub, where names are `name` or `owner/name`.
    """
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    is_file = Path(name).suffix in (".json", ".jsonl", ".parquet", ".txt")
    if (is_path or is_file) and not Path(name).exists():
        raise FileNotFoundError(f"There is no file or folder {name}.")


def refuse_other_settings(path: Path, settings: dict) -> None:
    """Raises `ValueError` if a folder was begun with other settings: those of its file `path`."""
    if path.exists():
        refuse_changes(path.parent, json.loads(path.read_text()), settings)


def refuse_changes(place: Path, before: dict, settings: dict) -> None:
    """Raises `ValueError` if what stands at `place` was begun with others than these settings."""
    before, now = (json.loads(json.dumps(x)) for x in (before, settings))
    changed = sorted(name for name in before | now if before.get(name) != now.get(name))
    if changed:
        was, now_is = (x.get(changed[0]) for x in (before, now))
        raise ValueError(
            f"{place} was begun with other settings ({', '.join(changed)}; {changed[0]} was "
            f"{was!r}, is {now_is!r}): choose another output, or delete it."
        )


__all__ = [
    "RUN_SETTINGS",
    "refuse_changes",
    "refuse_missing_path",
    "refuse_other_settings",
    "without_traceback",
]
