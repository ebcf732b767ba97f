# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Files that a later call relies on."""

import json
import os
from pathlib import Path


def write_json(path: Path, content) -> None:
    """Writes a file whole or not at all, whenever the process is stopped."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(content, indent=1))
    os.replace(unfinished, path)


__all__ = ["write_json"]
