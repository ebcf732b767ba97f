# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Runs the notebooks and writes their outputs into them, without timestamps and warnings.

They need the checkpoint of the quickstart, and train it where it is missing.

    python scripts/run_notebooks.py notebooks/5_three_streams.ipynb
"""

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def run(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook at `path`, executed in `folder`; the file stays as it is.

    Raises `nbclient.exceptions.CellExecutionError` at the first cell that fails.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=600,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    return notebook


def clean(notebook: nbformat.NotebookNode) -> None:
    """Drops what differs between machines: progress bars and warnings, versions, cell metadata."""
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [x for x in cell.outputs if x.get("name") != "stderr"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("notebooks", type=Path, nargs="*", help="default: all of notebooks/")
    for path in parser.parse_args().notebooks or sorted(NOTEBOOKS.glob("*.ipynb")):
        print(path, flush=True)
        notebook = run(path, path.parent)
        clean(notebook)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
