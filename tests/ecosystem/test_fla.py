# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The gated delta rule beside flash-linear-attention's naive functions (fp32, on the CPU)."""

import pytest
import torch
import torch.nn.functional as F
from atma.kernels.gated_delta import gated_delta, log_retention

naive = pytest.importorskip(
    "fla.ops.gated_delta_rule.naive", reason="pip install -e '.[ecosystem]' brings fla-core"
)


def rule_of_fla(function, query, key, value, retention, write, state):
    """Theirs takes unit vectors, expanded heads and states [D (key), D (value)]."""
    heads_per_group = query.shape[2] // key.shape[2]
    query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
    key, value = (x.repeat_interleave(heads_per_group, dim=2) for x in (key, value))
    read, final = function(
        query,
        key,
        value,
        g=log_retention(retention, 3.9),
        beta=write.sigmoid(),
        scale=1.0,
        initial_state=state.mT,
        output_final_state=True,
    )
    return read, final.mT


@pytest.mark.parametrize(
    "function", [naive.naive_recurrent_gated_delta_rule, naive.naive_chunk_gated_delta_rule]
)
@pytest.mark.parametrize("tokens", [1, 65])
def test_read_state_and_gradients_are_those_of_fla(function, tokens):
    torch.manual_seed(0)
    inputs = [torch.randn(2, tokens, heads, 16) for heads in (4, 2, 2)]
    inputs += [torch.randn(2, tokens, 4) for _ in range(2)] + [torch.randn(2, 4, 16, 16)]
    inputs = [x.requires_grad_() for x in inputs]
    weights = torch.randn(2, tokens, 4, 16), torch.randn(2, 4, 16, 16)
    results = []
    for outputs in (
        gated_delta(
            *inputs[:5], retention_bias=3.9, initial_state=inputs[5], output_final_state=True
        ),
        rule_of_fla(function, *inputs),
    ):
        loss = sum((y * w).sum() for y, w in zip(outputs, weights, strict=True))
        results.append([*outputs, *torch.autograd.grad(loss, inputs)])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).norm() <= 2e-5 * theirs.norm()
