# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The notebooks run from top to bottom, and what is committed is the output of such a run."""

import importlib.util
import re
import subprocess
import sys
import types
from pathlib import Path

import nbformat
import pytest

REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
# A folder of somebody's machine.
ABSOLUTE_PATH = re.compile(
    r"(?<![\w.])/(?:home|root|tmp|usr|work|opt|content|Users)/|[A-Z]:\\Users"
)

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list:
    notebook = nbformat.read(path, as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def setup_cell(path: Path) -> str:
    return code_cells(path)[0].source


@pytest.fixture(scope="module")
def runner():
    path = REPOSITORY / "scripts" / "run_notebooks.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@each_notebook
def test_a_notebook_runs_and_shows_what_is_committed(path, runner, quickstart_folder, monkeypatch):
    """Cell by cell the same kinds of output; texts and pictures differ with the checkpoint."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_MODULES_CACHE", str(quickstart_folder / "modules"))
    notebook = runner.run(path, quickstart_folder)
    runner.clean(notebook)

    def kinds(cells) -> list[list[str]]:
        # Where DeepSpeed is installed, it says so before the first training.
        return [
            [
                x.get("name", x.output_type)
                for x in cell.outputs
                if "[real_accelerator.py:" not in x.get("text", "")
            ]
            for cell in cells
        ]

    ran = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert kinds(ran) == kinds(code_cells(path))


@each_notebook
def test_committed_outputs_are_of_one_clean_run(path):
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(
        output.output_type != "error" and output.get("name") != "stderr" for output in outputs
    )
    for cell in cells:
        assert "execution" not in cell.metadata
        for output in cell.outputs:
            texts = [output.get("text", ""), *output.get("data", {}).values()]
            assert not any(ABSOLUTE_PATH.search(str(text)) for text in texts), cell.source


def test_there_are_five_notebooks_that_lead_to_each_other():
    assert [path.name[0] for path in NOTEBOOKS] == list("12345")
    for path, following in zip(NOTEBOOKS, NOTEBOOKS[1:], strict=False):
        last = nbformat.read(path, as_version=4).cells[-1].source
        assert f"({following.name})" in last
    assert len({setup_cell(path) for path in NOTEBOOKS}) == 1


@pytest.fixture
def commands(monkeypatch):
    """The commands that a cell would run."""
    found = []

    def note(command, check):
        assert check
        found.append([Path(command[0]).name, *command[1:]])
        if "clone" in command:
            (Path(command[-1]) / "scripts").mkdir(parents=True)
            (Path(command[-1]) / "scripts" / "quickstart.py").touch()

    monkeypatch.setattr(subprocess, "run", note)
    return found


def test_the_first_cell_fetches_installs_and_trains_on_colab(commands, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    monkeypatch.chdir(tmp_path)
    cell, python = setup_cell(NOTEBOOKS[0]), Path(sys.executable).name
    namespace = {}
    exec(cell, namespace)
    clone, install, train = commands
    assert clone == ["git", "clone", "--depth", "1", namespace["REPOSITORY"], "atma"]
    assert install[:4] == [python, "-m", "pip", "install"] and install[-1] == ".[train,peft]"
    assert train == [python, "scripts/quickstart.py"]
    assert Path.cwd() == tmp_path / "atma"
    Path("runs/quickstart/model").mkdir(parents=True)
    exec(cell, {})  # once more, as people do
    assert len(commands) == 3 and Path.cwd() == tmp_path / "atma"


def test_the_first_cell_leaves_a_machine_with_a_checkpoint_alone(commands, tmp_path, monkeypatch):
    (tmp_path / "runs" / "quickstart" / "model").mkdir(parents=True)
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    exec(setup_cell(NOTEBOOKS[0]), {})
    assert commands == [] and Path.cwd() == tmp_path
