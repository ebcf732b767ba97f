# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The softmax cores: both implementations against the definition, and rotary positions."""

import pytest
import torch
from atma.kernels.softmax_attention import apply_rotary, softmax_attention

CASES = {
    "plain": {},
    "window": {"window": 3},
    "documents": {"cu_seqlens": torch.tensor([0, 0, 1, 6, 9])},
    "documents_window": {"cu_seqlens": torch.tensor([0, 4, 4, 9], dtype=torch.int32), "window": 2},
    "start": {"query_start": torch.tensor([0, 4, -2])},
    "start_window": {"query_start": torch.tensor([0, 4, -2]), "window": 3},
    "extend": {},
    "one": {},
}


def make_inputs(case, heads=4, groups=2, dim=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    batch = 1 if case.startswith("documents") else 3
    queries = 1 if case == "one" else 9
    keys = 14 if case in ("start", "start_window", "extend", "one") else 9

    def random(*shape):
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    return (
        random(batch, queries, heads, dim),
        random(batch, keys, groups, dim),
        random(batch, keys, groups, dim),
    )


def naive(query, key, value, scale, cu_seqlens=None, window=None, query_start=None):
    """The definition, one query at a time."""
    batch, queries, heads, _ = query.shape
    output = torch.zeros_like(query)
    weights = torch.zeros(batch, heads, queries, key.shape[1], dtype=query.dtype)
    for b in range(batch):
        for t in range(queries):
            start = 0
            index = t + (key.shape[1] - queries if query_start is None else int(query_start[b]))
            if cu_seqlens is not None:
                start = max(x for x in cu_seqlens.tolist() if x <= t)
            first = start if window is None else max(start, index - window + 1)
            for h in range(heads):
                g = h // (heads // key.shape[2])
                if index >= first:
                    keys = slice(first, index + 1)
                    w = torch.softmax(key[b, keys, g] @ query[b, t, h] * scale, 0)
                    weights[b, h, t, keys] = w
                    output[b, t, h] = w @ value[b, keys, g]
    return output, weights


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("heads, groups", [(4, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("case", CASES)
def test_both_implementations_are_the_definition(case, heads, groups, implementation):
    inputs = make_inputs(case, heads, groups)
    output, weights = softmax_attention(
        *inputs, scale=0.12, implementation=implementation, **CASES[case]
    )
    assert weights is None
    expected, _ = naive(*inputs, 0.12, **CASES[case])
    torch.testing.assert_close(output, expected)
    factor = torch.arange(output.numel(), dtype=output.dtype).view(output.shape).cos()
    for x, y in zip(
        torch.autograd.grad((output * factor).sum(), inputs),
        torch.autograd.grad((expected * factor).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("case", ["window", "documents", "start"])
def test_weights_are_those_of_the_definition(case):
    inputs = make_inputs(case)
    _, weights = softmax_attention(
        *inputs, scale=0.3, implementation="eager", return_weights=True, **CASES[case]
    )
    torch.testing.assert_close(weights, naive(*inputs, 0.3, **CASES[case])[1])


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_that_sees_nothing_gives_zero(implementation, dtype):
    inputs = make_inputs("start", dtype=dtype)
    with torch.autograd.detect_anomaly(check_nan=True):
        output, _ = softmax_attention(
            *inputs, scale=0.3, implementation=implementation, **CASES["start"]
        )
        gradients = torch.autograd.grad(output.sum(), inputs)
    assert output.dtype == dtype
    assert (output[2, :2] == 0).all() and (output[2, 2:] != 0).any()
    assert all(x.isfinite().all() for x in gradients)
    assert (gradients[0][2, :2] == 0).all()


def test_autocast_and_mixed_dtypes_are_taken():
    inputs = [x.detach() for x in make_inputs("plain", dtype=torch.float32)]
    expected, _ = softmax_attention(*inputs, scale=0.3)
    inputs[0] = inputs[0].bfloat16()
    for implementation in ("sdpa", "eager"):
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                output, _ = softmax_attention(*inputs, scale=0.3, implementation=implementation)
            assert output.dtype == torch.bfloat16
            torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("case", ["plain", "documents_window", "start"])
def test_it_compiles_as_one_graph(case, implementation):
    torch._dynamo.reset()
    inputs = make_inputs(case)
    options = {"scale": 0.3, "implementation": implementation, **CASES[case]}
    compiled = torch.compile(softmax_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(*inputs, **options)[0], softmax_attention(*inputs, **options)[0]
    )


def test_what_does_not_fit_is_refused():
    inputs = make_inputs("plain")
    for message, options in (
        ("Unknown attention implementation 'flash'", {"implementation": "flash"}),
        ("eager implementation only", {"return_weights": True}),
        ("batch of 1", {"cu_seqlens": torch.tensor([0, 9])}),
        ("window must be at least 1", {"window": 0}),
    ):
        with pytest.raises(ValueError, match=message):
            softmax_attention(*inputs, scale=1.0, **options)


@pytest.mark.parametrize("dim", [4, 8, 24, 64])
def test_rotary_turns_half_of_the_pairs(dim):
    x = torch.randn(2, 5, 3, dim, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 9, 1000, 65536, 131071]])
    turned = apply_rotary(x, positions)
    quarter = dim // 4
    for i in range(dim // 2):
        ratio = i / (quarter - 1) if quarter > 1 else 0.0
        frequency = (1 / 1024) ** ratio if i < quarter else 0.0
        angle = (positions.double() * frequency)[..., None]
        x1, x2 = x[..., i], x[..., i + dim // 2]
        first = x1 * angle.cos() + x2 * angle.sin()
        second = x2 * angle.cos() - x1 * angle.sin()
        torch.testing.assert_close(turned[..., i], first)
        torch.testing.assert_close(turned[..., i + dim // 2], second)


def test_rotary_takes_positions_of_the_row_or_of_each_row():
    x = torch.randn(2, 5, 3, 8)
    positions = torch.arange(5, dtype=torch.int32) + 70000
    both = apply_rotary(x, positions)
    assert torch.equal(both, apply_rotary(x, positions.expand(2, 5).long()))


def test_rotary_products_depend_on_the_distance_only():
    query, key = torch.randn(2, 1, 1, 2, 16, dtype=torch.float64)
    products = [
        (apply_rotary(query, torch.tensor([p + 5])) * apply_rotary(key, torch.tensor([p]))).sum(-1)
        for p in (0, 3, 4000)
    ]
    torch.testing.assert_close(products[0], products[1])
    torch.testing.assert_close(products[0], products[2])


def test_rotary_angles_are_exact_in_low_precision():
    """Angles come from integer positions in fp32: bf16 inputs at position 100001 are not off."""
    x = torch.randn(1, 1, 1, 16).bfloat16()
    positions = torch.tensor([100001])
    turned = apply_rotary(x, positions)
    assert turned.dtype == torch.bfloat16
    exact = apply_rotary(x.double(), positions)
    torch.testing.assert_close(turned.double(), exact, rtol=1e-2, atol=2e-2)
