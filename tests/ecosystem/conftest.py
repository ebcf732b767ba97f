# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Other people's code judges the model: newest versions only, and no skip without a reason."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["<pad>", "<end>", *(f"w{i}" for i in range(2, 101))]
SKIPS = pytest.StashKey[set]()
MARKS_OF_TRANSFORMERS = (
    "accelerate_tests",
    "flash_attn_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "is_training_test",
    "slow",
    "torch_compile_test",
)


def pytest_configure(config):
    for name in MARKS_OF_TRANSFORMERS:
        config.addinivalue_line("markers", f"{name}: of Transformers' own tests")


def pytest_ignore_collect(collection_path, config):
    # The smoke tests run on the oldest Transformers, whose peers are not installed.
    return True if config.option.markexpr == "smoke" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A module with a dictionary `SKIPPED` names every test that may skip, and why."""
    report = yield
    listed = getattr(item.module, "SKIPPED", None)
    if listed is None or call.when != "call":
        return report
    skipped = item.session.stash.setdefault(SKIPS, set())
    if report.skipped:
        skipped.add(item.name)
        if item.name not in listed:
            report.outcome, report.longrepr = "failed", f"skipped, but not listed: {call.excinfo}"
    elif report.passed and item.name in set(listed) - skipped:
        report.outcome, report.longrepr = "failed", "listed as skipped, but it ran"
    return report


@pytest.fixture(scope="session")
def tokenizer():
    """A word for each token of the tiny model."""
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<end>",
        pad_token="<pad>",
        padding_side="left",
        chat_template="{% for message in messages %}{{ message.content }} {% endfor %}",
    )


@pytest.fixture(scope="session")
def text(tokens):
    """`text(length, seed)`: so many random words."""
    return lambda length, seed: " ".join(
        WORDS[max(i, 2)] for i in tokens(length, seed=seed).tolist()
    )


@pytest.fixture
def saved(make_model, tokenizer, tmp_path):
    """A folder with the tiny model and its tokenizer."""
    folder = tmp_path / "model"
    make_model(eos_token_id=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
