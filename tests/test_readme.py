# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""What the README, the model card and the documentation show runs as it stands."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
DOCUMENTS = [
    REPOSITORY / "README.md",
    REPOSITORY / "model_card.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
# What others say, quoted as a symptom.
FOREIGN_MESSAGES = {
    "Do you wish to run the custom code? [y/N]",
    "cannot import name ... from transformers",
    "module transformers has no attribute AtmaForCausalLM",
    "Please specify `target_modules`",
}


def blocks(document: Path, language: str) -> list[str]:
    """The texts of the fenced blocks of a language."""
    text = document.read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(document: Path) -> list[list[str]]:
    """The words of each command of the bash blocks."""
    lines = "\n".join(blocks(document, "bash")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


ALL_COMMANDS = [(document, words) for document in DOCUMENTS for words in commands(document)]


def extras() -> set[str]:
    """The extras that setup.py declares."""
    text = (REPOSITORY / "setup.py").read_text("utf-8")
    return set(re.findall(r'^        "(\w+)": \[', text, flags=re.MULTILINE))


@pytest.mark.smoke
@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if blocks(d, "python")], ids=lambda path: path.stem
)
def test_python_blocks_run_in_order(document, quickstart_folder):
    namespace = {"repository": "runs/quickstart/model"}
    for i, block in enumerate(blocks(document, "python")):
        exec(compile(block, f"{document.name}, block {i}", "exec"), namespace)


def test_model_card_has_the_header_that_the_hub_reads():
    from huggingface_hub import ModelCard

    card = ModelCard.load(REPOSITORY / "model_card.md")
    assert card.data.license == "apache-2.0"
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert "custom_code" in card.data.tags


def test_make_and_pip_commands_name_what_there_is():
    makefile = (REPOSITORY / "Makefile").read_text("utf-8")
    found = {"make": 0, "pip": 0}
    for document, words in ALL_COMMANDS:
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, flags=re.MULTILINE), (document, words)
        elif words[0] == "pip":
            for brackets in re.findall(r"(?<!\w)\.\[(.*?)\]", " ".join(words)):
                assert set(brackets.split(",")) <= extras(), (document, words)
        else:
            assert words[0] == "python" and words[1] in SMALL, (document, words)
        found[words[0]] = found.get(words[0], 0) + 1
    assert all(found.values())


# What makes a command small: replaced words, and words at its end.
TINY_MODEL = (
    "model.hidden_size=32 model.num_hidden_layers=3 model.num_attention_heads=2 "
    "model.num_key_value_heads=1 model.head_dim=16"
)
SMALL = {
    "scripts/prepare_data.py": "--vocab-size 400 --long-tokens 4000 --validation-fraction 0.2 "
    "--workers 1 --block-megabytes 0.05",
    "scripts/train.py": f"--set {TINY_MODEL} sequence_length=64 tokens_per_step=256 steps=2 "
    "rows_per_device=2 trainer.bf16=false trainer.torch_compile=false trainer.report_to=none "
    "trainer.dataloader_num_workers=0",
    "scripts/evaluate.py": "--lengths 256 512 --documents 2 --min-documents 1 --depths 0.5 "
    "--scored-tokens 32 --needles 1 --generated 1",
    "scripts/finetune.py": "--set max_steps=1",
    "scripts/convert_original_checkpoint.py": "",
    "scripts/serve.py": "--help",
}
GOLDEN = REPOSITORY.parent / "shared" / "goldens" / "polar_memory"


@pytest.fixture
def working_folder(tmp_path) -> Path:
    """A folder with all that the commands read."""
    library = Path(os.__file__).parent
    (tmp_path / "texts").mkdir()
    for name in "abc bisect calendar cmd colorsys contextlib copy csv fnmatch gzip".split():
        shutil.copy(library / f"{name}.py", tmp_path / "texts")
    chats = [
        [{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": f"{i}."}]
        for i in range(8)
    ]
    lines = [json.dumps({"messages": chat}) for chat in chats]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    (tmp_path / "scripts").symlink_to(REPOSITORY / "scripts")
    if GOLDEN.exists():
        (tmp_path / "original").symlink_to(GOLDEN)
    return tmp_path


def run(script: str, arguments: list[str], monkeypatch) -> None:
    """A script as a command would run it, but in this process, which has loaded its libraries."""
    if script == "scripts/finetune.py":  # here, the Auto classes know the model anyhow
        subprocess.run([sys.executable, script, *arguments], check=True)
        return
    with monkeypatch.context() as patch:
        # At the end, because scripts/evaluate.py has the name of a library.
        patch.setattr(sys, "path", [*sys.path, str(REPOSITORY / "scripts")])
        patch.setattr(sys, "argv", [script, *arguments])
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("transformers.AtmaForCausalLM", None, raising=False)  # serve.py leaves it
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            assert not end.code, (script, end.code)


def test_script_commands_run_one_after_the_other(working_folder, monkeypatch):
    """As the documents show them, at a small size."""
    monkeypatch.chdir(working_folder)
    shown = [words for _, words in ALL_COMMANDS if words[0] == "python"]
    assert {words[1] for words in shown} == set(SMALL)
    for words in shown:
        script, arguments = words[1], [*words[2:], *SMALL[words[1]].split()]
        if "original/" in arguments and not GOLDEN.exists():
            continue  # test_goldens.py says so
        run(
            script,
            ["texts" if word == "/usr/lib/python3" else word for word in arguments],
            monkeypatch,
        )
        if "--output" in arguments:
            assert Path(arguments[arguments.index("--output") + 1]).exists(), words


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_files_and_links_that_are_named_exist(document):
    text = document.read_text("utf-8")
    places = [REPOSITORY, REPOSITORY / "scripts", REPOSITORY / "tests", document.parent]
    for name in re.findall(r"`((?:[\w.-]+/)*[a-z]\w*\.(?:py|md|ipynb|yaml))`", text):
        assert any((place / name).exists() for place in places), name
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (document.parent / target).exists(), target


def test_messages_that_are_quoted_as_symptoms_are_messages_of_the_code():
    sources = [*REPOSITORY.glob("*.py"), *(REPOSITORY / "kernels").glob("*.py")]
    code = "\n".join(path.read_text("utf-8") for path in sources)
    code = re.sub(r'"\s*f?"', "", code)  # adjacent literals are one text
    text = " ".join((REPOSITORY / "docs" / "troubleshooting.md").read_text("utf-8").split())
    quoted = set(re.findall(r'\*\*(?:\w+: )?"([^"]+)"', text)) - FOREIGN_MESSAGES
    assert len(quoted) > 10
    for message in quoted:
        pieces = [re.escape(piece.strip()) for piece in message.split("...")]
        assert re.search("[^\n]*".join(pieces), code), message


def test_numbers_of_the_first_screen_are_those_of_the_benchmarks():
    text = (REPOSITORY / "README.md").read_text("utf-8").split("## Quickstart")[0]
    measured = (REPOSITORY / "benchmarks" / "README.md").read_text("utf-8")
    rows = re.findall(r"^\|[^|]*\|([^|]*)\|([^|]*)\|$", text, flags=re.MULTILINE)
    numbers = [n for row in rows for cell in row for n in re.findall(r"\d+\.\d+", cell)]
    assert numbers
    for number in numbers:
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", measured), number
