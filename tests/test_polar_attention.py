# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Polar attention: the oracle against the definition, the streaming form against the oracle."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from atma.kernels import polar_attention as module
from atma.kernels.backend import choose_backend
from atma.kernels.documents import document_ids, positions_in_document
from atma.kernels.polar_attention import (
    distractor_mass,
    polar_attention,
    polar_attention_reference,
)

DOCUMENTS = torch.tensor([0, 0, 1, 70, 70, 71, 130, 130])


@pytest.fixture
def small_blocks(monkeypatch):
    """The smallest blocks, 64 x 64, so that short inputs take many."""
    monkeypatch.setattr(module, "BLOCK_ELEMENTS_CPU", 1)


def make_inputs(batch, queries, keys, heads, groups, dim, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    return [
        random(batch, queries, heads, dim),
        random(batch, keys, groups, dim),
        random(batch, keys, groups, dim),
        random(heads, dim),
        *(random(heads) for _ in range(4)),
    ]


def relative(x, reference):
    x, reference = x.double(), reference.double()
    return ((x - reference).norm() / reference.norm().clamp(min=1e-30)).item()


def outputs_and_gradients(function, inputs, **options):
    output = function(*inputs, return_statistics=True, **options)
    generator = torch.Generator().manual_seed(1)
    loss = 0
    for x in output[:2]:
        weight = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        loss = loss + (x.double() * weight).sum()
    named = dict(zip(("direction", "magnitude"), output[:2], strict=True))
    named |= output.statistics._asdict()
    names = ("query", "key", "value", "null_value", "length_gain", "null_base", "null_slope")
    gradients = torch.autograd.grad(loss, inputs)
    return named | dict(zip((*names, "magnitude_gain"), gradients, strict=True))


def assert_same(inputs, tolerance, **options):
    actual = outputs_and_gradients(polar_attention, inputs, **options)
    expected = outputs_and_gradients(polar_attention_reference, inputs, **options)
    for name, reference in expected.items():
        assert actual[name].dtype == reference.dtype and actual[name].shape == reference.shape
        # The statistics are fp32 always.
        limit = max(tolerance, 1e-6) if name in ("n_eff", "null_weight") else tolerance
        assert relative(actual[name], reference) < limit, name


def naive(query, key, value, null_value, length_gain, null_base, null_slope, magnitude_gain, sees):
    """The definition, one query at a time; `sees(b, t)` gives the indices of its keys and n."""
    batch, queries, heads, dim = query.shape
    directions, magnitudes = [], []
    for b in range(batch):
        for t in range(queries):
            indices, n = sees(b, t)
            for h in range(heads):
                g = h // (heads // key.shape[2])
                temp = 1 + F.softplus(length_gain[h]) * math.log(n)
                null = null_base[h] + F.softplus(null_slope[h]) * math.sqrt(math.log(n + 1))
                sigma = key[b, indices, g] @ query[b, t, h] / math.sqrt(dim)
                w = torch.softmax(torch.cat([temp * sigma, temp * null[None]]), 0)
                p = w[:-1] / w[:-1].sum()
                m_eff = (1 - w[-1]) / p.square().sum()
                s = w[:-1] @ value[b, indices, g] + w[-1] * null_value[h]
                directions.append(s / s.norm())
                magnitudes.append(torch.tanh(F.softplus(magnitude_gain[h]) * torch.log1p(m_eff)))
    shape = (batch, queries, heads)
    return torch.stack(directions).view(*shape, dim), torch.stack(magnitudes).view(shape)


def assert_naive(inputs, sees, **options):
    gradients = []
    outputs = []
    for direction, magnitude in (
        polar_attention_reference(*inputs, **options)[:2],
        naive(*inputs, sees),
    ):
        loss = (direction * torch.arange(direction.shape[-1])).sum() + magnitude.square().sum()
        outputs.append((direction, magnitude))
        gradients.append(torch.autograd.grad(loss, inputs))
    for actual, expected in zip(
        (*outputs[0], *gradients[0]), (*outputs[1], *gradients[1]), strict=True
    ):
        assert relative(actual, expected) < 1e-9


@pytest.mark.parametrize("window", [None, 1, 4])
def test_oracle_is_the_definition(window):
    width = window or 99
    assert_naive(
        make_inputs(2, 7, 9, 4, 2, 8),
        lambda b, t: (list(range(max(0, t + 3 - width), t + 3)), min(t + 3, width)),
        window=window,
    )


def test_oracle_is_the_definition_from_any_start():
    start = [0, 3]
    assert_naive(
        make_inputs(2, 5, 8, 3, 1, 8),
        lambda b, t: (list(range(start[b] + t + 1)), start[b] + t + 1),
        query_start=torch.tensor(start),
    )


def test_oracle_is_the_definition_on_documents():
    offsets = [0, 1, 1, 6, 9]
    starts = [max(o for o in offsets if o <= t) for t in range(9)]
    assert_naive(
        make_inputs(1, 9, 9, 2, 2, 8),
        lambda b, t: (
            list(range(max(starts[t], t - 3), t + 1)),
            min(t - starts[t] + 1, 4),
        ),
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32),
        window=4,
    )


@pytest.mark.parametrize("heads, groups, dim", [(2, 2, 8), (4, 2, 16), (3, 1, 24), (4, 1, 64)])
@pytest.mark.parametrize("length", [1, 2, 15, 17, 63, 64, 65, 130])
def test_streaming_is_the_oracle(small_blocks, length, heads, groups, dim):
    assert_same(make_inputs(2, length, length, heads, groups, dim), 1e-9)


def test_streaming_is_the_oracle_at_1000_tokens():
    assert_same(make_inputs(1, 1000, 1000, 2, 1, 8), 1e-9)


@pytest.mark.parametrize("window", [1, 5, 63, 64, 100, 500])
def test_streaming_is_the_oracle_in_a_window(small_blocks, window):
    assert_same(make_inputs(2, 200, 230, 2, 1, 8), 1e-9, window=window)


@pytest.mark.parametrize("window", [None, 7, 80])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_streaming_is_the_oracle_on_documents(small_blocks, window, dtype):
    inputs = make_inputs(1, 130, 130, 4, 2, 8)
    assert_same(inputs, 1e-9, window=window, cu_seqlens=DOCUMENTS.to(dtype))


@pytest.mark.parametrize("window", [None, 7, 80])
def test_streaming_is_the_oracle_from_any_start(small_blocks, window):
    start = torch.tensor([0, 100, 31, -5])
    assert_same(make_inputs(4, 70, 170, 4, 2, 8), 1e-9, window=window, query_start=start)


@pytest.mark.parametrize("keys", [1, 150])
def test_fewer_or_more_keys_than_queries(small_blocks, keys):
    assert_same(make_inputs(1, 100, keys, 2, 1, 8), 1e-9)


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 8e-3), (torch.float16, 2e-3)]
)
def test_streaming_is_accurate_in_low_precision(small_blocks, dtype, tolerance):
    inputs = make_inputs(2, 130, 130, 4, 2, 16, dtype=dtype)
    actual = outputs_and_gradients(polar_attention, inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = outputs_and_gradients(polar_attention_reference, exact)
    for name, reference in expected.items():
        assert relative(actual[name], reference) < tolerance, name
        assert actual[name].dtype == (torch.float32 if name in ("n_eff", "null_weight") else dtype)


def test_no_tokens_and_no_rows():
    for batch, length in ((2, 0), (0, 3)):
        inputs = make_inputs(batch, length, length, 4, 2, 8)
        for function in (polar_attention, polar_attention_reference):
            output = function(*inputs)
            assert output.direction.shape == (batch, length, 4, 8)
            assert output.magnitude.shape == (batch, length, 4)


def test_each_document_reads_as_if_alone():
    inputs = make_inputs(1, 130, 130, 4, 2, 8)
    packed = polar_attention(*inputs, cu_seqlens=DOCUMENTS)
    for start, stop in zip(DOCUMENTS[:-1].tolist(), DOCUMENTS[1:].tolist(), strict=True):
        alone = polar_attention(*(x[:, start:stop] for x in inputs[:3]), *inputs[3:])
        torch.testing.assert_close(packed.direction[:, start:stop], alone.direction)
        torch.testing.assert_close(packed.magnitude[:, start:stop], alone.magnitude)


def test_a_row_split_in_two_reads_as_a_whole():
    inputs = make_inputs(2, 90, 90, 4, 2, 8)
    query, key, value, *parameters = inputs
    whole = outputs_and_gradients(polar_attention, inputs)

    def split(query, key, value, *parameters, return_statistics):
        start = torch.full((2,), 37)
        first = polar_attention(
            query[:, :37], key, value, *parameters, query_start=start * 0, return_statistics=True
        )
        second = polar_attention(
            query[:, 37:], key, value, *parameters, query_start=start, return_statistics=True
        )
        statistics = [torch.cat(x, 1) for x in zip(first[2], second[2], strict=True)]
        parts = [torch.cat(x, 1) for x in zip(first[:2], second[:2], strict=True)]
        return module.PolarOutput(*parts, module.PolarStatistics(*statistics))

    for name, x in outputs_and_gradients(split, inputs).items():
        assert relative(x, whole[name]) < 1e-9, name


def test_keys_past_the_end_of_a_row_change_nothing():
    inputs = make_inputs(2, 20, 20, 4, 2, 8)
    query, key, value, *parameters = [x.detach() for x in inputs]
    start = torch.zeros(2, dtype=torch.int32)
    plain = polar_attention(query, key, value, *parameters)
    noise = torch.full((2, 9, 2, 8), 1e3, dtype=torch.float64)
    longer = polar_attention(
        query,
        torch.cat([key, noise], 1),
        torch.cat([value, noise], 1),
        *parameters,
        query_start=start,
    )
    torch.testing.assert_close(longer.direction, plain.direction)
    torch.testing.assert_close(longer.magnitude, plain.magnitude)


@pytest.mark.parametrize("function", [polar_attention, polar_attention_reference])
def test_a_query_that_sees_nothing_reads_the_null(function):
    inputs = make_inputs(1, 4, 4, 2, 1, 8)
    with torch.autograd.detect_anomaly(check_nan=True):
        output = function(*inputs, query_start=torch.tensor([-3]), return_statistics=True)
        gradients = torch.autograd.grad(output.direction[..., 0].sum(), inputs, retain_graph=True)
    null = F.normalize(inputs[3], dim=-1).expand(1, 3, 2, 8)
    torch.testing.assert_close(output.direction[:, :3], null)
    assert (output.magnitude[:, :3] == 0).all() and (output.magnitude[:, 3] > 0).all()
    assert (output.statistics.null_weight[:, :3] == 1).all()
    assert (output.statistics.n_eff[:, :3] == 0).all()
    assert all(x.isfinite().all() for x in gradients)
    inputs[3] = torch.zeros_like(inputs[3], requires_grad=True)
    output = function(*inputs, query_start=torch.tensor([-9]))
    assert (output.direction == 0).all()
    gradients = torch.autograd.grad(output.direction.sum() + output.magnitude.sum(), inputs)
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("excess", [30.0, 80.0, 200.0])
def test_the_magnitude_survives_a_dominant_null(excess):
    """a_0 exceeds each a_j by far more than fp32 can add up; ln m_eff is still exact."""
    query, key, value, null_value, *scalars = make_inputs(1, 33, 33, 2, 1, 8, dtype=torch.float32)
    scalars[1] = torch.full((2,), excess, requires_grad=True)
    inputs = [query, key, value, null_value, *scalars]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = polar_attention_reference(*exact)
    for function in (polar_attention, polar_attention_reference):
        actual = function(*inputs)
        visible = expected.magnitude > 1e-37
        assert excess > 80 or visible.any()
        ratio = actual.magnitude.double()[visible] / expected.magnitude[visible]
        assert (ratio - 1).abs().max() < 1e-3 if visible.any() else True
        if excess > 30:
            continue
        loss, exact_loss = actual.magnitude.sum(), expected.magnitude.sum()
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
        references = torch.autograd.grad(exact_loss, exact, allow_unused=True, retain_graph=True)
        for name, x, reference in zip("qk....b.", gradients, references, strict=True):
            if name != ".":
                assert relative(x, reference) < 1e-3
