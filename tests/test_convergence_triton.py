# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
A tiny model trained for 20 steps with the Triton kernels and without: the same losses and weights.
"""

import os

import pytest
import torch
from atma import AtmaConfig, AtmaForCausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a GPU, or TRITON_INTERPRET=1 to interpret the kernels on the CPU",
)


def train(backend: str, seed: int = 0) -> tuple[list[float], AtmaForCausalLM]:
    torch.manual_seed(seed)
    config = AtmaConfig(
        vocab_size=31,
        hidden_size=32,
        num_hidden_layers=2,
        layer_types=["conv", "hybrid"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        kernel_backend=backend,
        zero_init_residual=False,
        initializer_range=0.2,
    )
    model = AtmaForCausalLM(config).to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.randint(0, 31, (1, 16), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    # Packed documents of odd lengths, so that boundaries take part.
    position_ids = torch.cat([torch.arange(9), torch.arange(7)])[None].to(DEVICE)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(ids, labels=ids, position_ids=position_ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def test_training_with_and_without_kernels_converges_alike():
    losses, model = train("triton")
    expected, plain = train("torch")
    assert losses[-1] < 0.8 * losses[0]
    for found, wanted in zip(losses, expected, strict=True):
        assert abs(found - wanted) <= 1e-4 * wanted
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (one - other).norm() <= 2e-3 * other.norm(), name
