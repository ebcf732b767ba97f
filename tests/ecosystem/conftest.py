# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Other people's code judges the model: newest versions only, and no skip without a reason."""

import pytest

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
