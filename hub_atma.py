# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Writes the package's code flat beside a checkpoint: it then loads where the package is unknown.

The remote-code loader of Transformers finds sibling files only: `kernels/<name>.py` becomes
`kernels_<name>.py`, the relative import lines follow, and nothing else changes. This file is not
written out itself: a model that was loaded from such a folder is saved again by the stock copier of
Transformers, for which flat files are the usual case.
"""

import ast
import os
from pathlib import Path

_PACKAGE = Path(__file__).parent

AUTO_MAP = {
    "AutoConfig": "configuration_atma.AtmaConfig",
    "AutoModel": "modeling_atma.AtmaModel",
    "AutoModelForCausalLM": "modeling_atma.AtmaForCausalLM",
}


def _flatten(module: str) -> tuple[str, list[str]]:
    """The text of a module of the package with flat relative imports, and the modules they name."""
    source = _PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_text("utf-8")
    folder = module.rpartition(".")[0]
    lines, imported = source.splitlines(keepends=True), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            target = f"{folder}.{node.module}".lstrip(".")
            line = lines[node.lineno - 1]
            flat = target.replace(".", "_")
            lines[node.lineno - 1] = line.replace(f".{node.module} ", f".{flat} ", 1)
            imported.append(target)
    return "".join(lines), imported


def flat_files() -> dict[str, str]:
    """{file name: text} of the model's code and all that it imports from the package, flat."""
    files, pending = {}, ["modeling_atma"]
    while pending:
        module = pending.pop()
        name = f"{module.replace('.', '_')}.py"
        if name not in files:
            files[name], imported = _flatten(module)
            pending.extend(imported)
    return files


def export_code(config, save_directory: str | os.PathLike) -> None:
    """
    Writes the flat code into `save_directory` (made if absent) and sets `config.auto_map` to it.

    Args:
        config (`AtmaConfig`): Gets the entries of `AUTO_MAP`; those of other Auto classes stay.
        save_directory (`str` or `os.PathLike`): The folder of the checkpoint.
    """
    folder = Path(save_directory)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in flat_files().items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    config.auto_map = {**(getattr(config, "auto_map", None) or {}), **AUTO_MAP}


__all__ = ["AUTO_MAP", "export_code", "flat_files"]
