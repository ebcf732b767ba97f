# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""What a script says no to before it begins, and how it says so."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path


@contextlib.contextmanager
def without_traceback() -> Iterator[None]:
    """For the first steps of a script: what the user got wrong ends it with that sentence alone."""
    try:
        yield
    except (OSError, ValueError) as error:  # OSError: missing files, names that no Hub knows
        raise SystemExit(f"{error}") from error


def refuse_missing_path(name: str) -> None:
    """
    Raises `FileNotFoundError` for what can only be meant as a path and is not there. The libraries
    would look for it on the Hub, where names are `name` or `owner/name`.
    """
    folder, _, rest = name.partition("/")
    is_path = not folder or folder.startswith((".", "~")) or "/" in rest
    beside = rest and Path(folder).is_dir()
    if (is_path or beside) and "://" not in name and not Path(name).exists():
        hint = "" if is_path else f" (for a Hub repository, call from where no folder is {folder})"
        raise FileNotFoundError(f"There is no file or folder {name}{hint}.")


def refuse_unknown(names: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raises `ValueError` for the first of `names` that is none of `what`'s."""
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"{what} has no field {unknown[0]!r}.")


def read_json(path: Path):
    """What a JSON file holds; `ValueError` names the file if it holds something else."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON file: {error}.") from error


def refuse_other_settings(
    path: Path, settings: dict, later: Iterable[str] = (), dropped: Iterable[str] = ()
) -> None:
    """
    Raises `ValueError` if a folder was begun with other settings: those of its file `path`. Files
    of earlier versions may lack the names `later`, and have the names `dropped`.
    """
    if path.exists():
        before = {name: value for name, value in read_json(path).items() if name not in dropped}
        unknown = {name: settings[name] for name in later if name in settings}
        refuse_changes(path.parent, unknown | before, settings)


def _flat(settings: dict, prefix: str = "") -> dict:
    """`{"model": {"use_memory": x}}` as `{"model.use_memory": x}`."""
    flat = {}
    for name, value in settings.items():
        inner = isinstance(value, dict)
        flat |= _flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return flat


def refuse_changes(place: Path, before: dict, now: dict) -> None:
    """Raises `ValueError` if what stands at `place` was begun with others than the settings now."""
    before, now = (_flat(json.loads(json.dumps(settings))) for settings in (before, now))
    changed = sorted(name for name in before | now if before.get(name) != now.get(name))
    if changed:
        first = changed[0]
        raise ValueError(
            f"{place} was begun with other settings ({', '.join(changed)}; {first} was "
            f"{before.get(first)!r}, is {now.get(first)!r}): choose another output, or delete it."
        )


__all__ = [
    "read_json",
    "refuse_changes",
    "refuse_missing_path",
    "refuse_other_settings",
    "refuse_unknown",
    "without_traceback",
]
