# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Parts of polar attention over disjoint keys merge to the whole."""

import pytest
import torch
from atma.kernels.backend import INTERPRETED
from atma.kernels.partial_polar_attention import merge_polar_parts, partial_polar_attention
from atma.kernels.polar_attention import polar_attention_reference

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
triton_path = pytest.mark.skipif(
    not (INTERPRETED or ON_GPU), reason="Triton needs a GPU, or TRITON_INTERPRET=1"
)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=triton_path)])
@pytest.mark.parametrize("blocks", [(37,), (20, 17), (1, 15, 21)], ids=str)
def test_parts_over_blocks_of_keys_merge_to_the_whole(blocks, backend):
    generator = torch.Generator().manual_seed(0)
    S, H, G, D = sum(blocks), 6, 2, 24
    new = blocks[-1]  # the queries are the tokens of the last block

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key, value = draw(2, new, H, D), draw(2, S, G, D), draw(2, S, G, D)
    null_value, gains = draw(H, D), [draw(H) for _ in range(4)]
    expected = polar_attention_reference(query, key, value, null_value, *gains)
    dtype = torch.float32 if backend == "triton" else torch.float64
    query, key, value, null_value, *gains = (
        x.to(DEVICE, dtype) for x in (query, key, value, null_value, *gains)
    )
    parts, start = [], 0
    for i, size in enumerate(blocks):
        block = slice(start, start + size)
        parts.append(
            partial_polar_attention(
                query,
                key[:, block],
                value[:, block],
                S - new,
                gains[0],
                is_causal=i == len(blocks) - 1,
                backend=backend,
            )
        )
        start += size
    found = merge_polar_parts(parts, S - new, null_value, *gains, dtype=dtype)
    for name in ("direction", "magnitude"):
        one, other = getattr(found, name).cpu().double(), getattr(expected, name)
        assert (one - other).norm() <= (1e-5 if backend == "triton" else 1e-12) * other.norm()
