# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
One tiny model for all tests, with its states amplified: on a default initialisation, wiping every
cached state moves the logits by less than any sensible tolerance, and broken caches pass.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from atma import AtmaConfig, AtmaForCausalLM
from filelock import FileLock

REPOSITORY = Path(__file__).parents[1]
VOCAB = 101

# Tests run beside each other, and threads that wait for a busy core cost more than they give.
torch.set_num_threads(1)


def tiny_config(**overrides) -> AtmaConfig:
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "layer_types": ["conv", "hybrid", "conv", "hybrid", "conv"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pad_token_id": 0,
        "zero_init_residual": False,
    }
    if "layer_types" in overrides:
        fields["num_hidden_layers"] = len(overrides["layer_types"])
    return AtmaConfig(**{**fields, **overrides})


@torch.no_grad()
def amplify(model: AtmaForCausalLM, seed: int = 0) -> AtmaForCausalLM:
    """
    Redraws all parameters so that every state matters: large matrices, large taps, non-zero biases,
    slow decay.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        scale = 0.15
        if name.endswith("bias"):
            scale = 0.3
        elif "embed_tokens" in name:
            scale = 1.0
        elif parameter.dim() == 1 or "null_value" in name:
            scale = 0.5
        elif name.endswith(("conv_weight", "canon_weight")):
            scale = 0.8
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * scale
        if "norm" in name:
            noise = 1 + 0.2 * noise
        elif "null_base" in name:
            noise = 1 + noise
        parameter.copy_(noise)
    return model


def build(seed: int = 0, dtype: torch.dtype = torch.float32, **overrides) -> AtmaForCausalLM:
    model = AtmaForCausalLM(tiny_config(**overrides))
    return amplify(model, seed).to(dtype).eval()


@pytest.fixture(scope="session")
def make_model():
    """Builds an amplified tiny model; keyword arguments override configuration fields."""
    return build


@pytest.fixture(scope="session")
def model() -> AtmaForCausalLM:
    """The shared amplified tiny model. Tests do not change it."""
    return build()


@pytest.fixture(scope="session")
def tokens():
    """`tokens(B, T, seed)`: random ids without the pad id."""

    def draw(*shape: int, seed: int = 1) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(1, VOCAB, shape, generator=generator)

    return draw


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 5e-4) -> None:
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    difference = (actual - expected).abs().max().item() if actual.numel() else 0.0
    assert difference <= tolerance, f"max difference {difference:.3g} > {tolerance:g}"


@pytest.fixture(scope="session")
def close():
    """`close(actual, expected, tolerance=5e-4)`: finite, same shape, max absolute difference."""
    return assert_close


@pytest.fixture(scope="session")
def quickstart(request, tmp_path_factory) -> Path:
    """The folder in which a short `scripts/quickstart.py` ran, once for all workers."""
    root = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # of pytest-xdist: below the folder of the run
        root = root.parent
    folder = root / "quickstart"
    options = "--steps 8 --batch-size 2 --context 64 --contexts 128 256 --new-tokens 4"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            folder.mkdir(exist_ok=True)
            script = REPOSITORY / "scripts" / "quickstart.py"
            subprocess.run(
                [sys.executable, str(script), *options.split()],
                check=True,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            (folder / "done").touch()
    return folder


@pytest.fixture
def quickstart_folder(quickstart, tmp_path, monkeypatch) -> Path:
    """A working directory of its own, as `make quickstart` leaves it."""
    shutil.copytree(quickstart / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path
