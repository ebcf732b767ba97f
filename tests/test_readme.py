# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""What the README and the model card show can be run as it stands."""

import re
from pathlib import Path

import pytest
import torch
from atma import AtmaConfig, AtmaForCausalLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def quickstart_folder(tmp_path, monkeypatch):
    """The working directory as `make quickstart` leaves it, with an untrained model."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        [],
        trainers.BpeTrainer(
            special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<end>"
    )
    torch.manual_seed(0)
    model = AtmaForCausalLM(AtmaConfig.tiny(vocab_size=len(tokenizer)))
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/quickstart/model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.smoke
@pytest.mark.parametrize("document", ["README.md", "model_card.md"])
def test_python_blocks_run_in_order(document, quickstart_folder):
    text = (REPOSITORY / document).read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert blocks
    namespace = {"repository": str(quickstart_folder)}
    for i, block in enumerate(blocks):
        exec(compile(block, f"{document}, block {i}", "exec"), namespace)


def test_model_card_has_the_header_that_the_hub_reads():
    from huggingface_hub import ModelCard

    card = ModelCard.load(REPOSITORY / "model_card.md")
    assert card.data.license == "apache-2.0"
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert "custom_code" in card.data.tags


def test_commands_and_files_that_the_readme_names_exist():
    text = (REPOSITORY / "README.md").read_text("utf-8")
    makefile = (REPOSITORY / "Makefile").read_text("utf-8")
    for target in re.findall(r"^make (\w+)", text, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    for name in re.findall(r"`((?:[\w.]+/)*\w+\.(?:py|md))`", text):
        assert (REPOSITORY / name).exists() or (REPOSITORY / "scripts" / name).exists(), name
