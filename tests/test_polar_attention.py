# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Polar attention: the oracle against the definition, the streaming form against the oracle."""

import math
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from atma.kernels import backend as backend_module
from atma.kernels import polar_attention as module
from atma.kernels import polar_attention_tiles as tiles
from atma.kernels.backend import choose_backend
from atma.kernels.documents import document_ids, positions_in_document
from atma.kernels.polar_attention import (
    distractor_mass,
    polar_attention,
    polar_attention_reference,
)
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize("window", [1, 5, 63, 64, 157, 500])
def test_streaming_is_the_oracle_in_a_window(small_blocks, window):
    assert_same(make_inputs(2, 200, 230, 2, 1, 8), 1e-9, window=window)


@pytest.mark.parametrize("window", [None, 7, 80])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_streaming_is_the_oracle_on_documents(small_blocks, window, dtype):
    inputs = make_inputs(1, 130, 130, 4, 2, 8)
    assert_same(inputs, 1e-9, window=window, cu_seqlens=DOCUMENTS.to(dtype))


@pytest.mark.parametrize("window", [None, 7, 80])
def test_streaming_is_the_oracle_from_any_start(small_blocks, window):
    start = torch.tensor([0, 150, 31, -5])
    assert_same(make_inputs(4, 70, 170, 4, 2, 8), 1e-9, window=window, query_start=start)


@pytest.mark.parametrize("keys", [1, 150])
def test_fewer_or_more_keys_than_queries(small_blocks, keys):
    assert_same(make_inputs(1, 100, keys, 2, 1, 8), 1e-9)


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 3e-5), (torch.bfloat16, 8e-3), (torch.float16, 2e-3)]
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


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("function", [polar_attention, polar_attention_reference])
def test_a_query_that_sees_nothing_reads_the_null(function):
    inputs = make_inputs(1, 4, 4, 2, 1, 8)
    with torch.autograd.detect_anomaly(check_nan=True):
        output = function(*inputs, query_start=torch.tensor([-3]), return_statistics=True)
        loss = output.direction[..., 0].sum() + output.magnitude.sum()
        gradients = torch.autograd.grad(loss, inputs)
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


@pytest.mark.parametrize("function", [polar_attention, polar_attention_reference])
def test_the_magnitude_survives_a_dominant_null(function):
    """A sum of squared weights is below any eps with a_0 - a_j near 40; logarithms are exact."""
    inputs = make_inputs(1, 33, 33, 2, 1, 8, dtype=torch.float32)
    for index, number in ((4, -5.0), (5, 40.0), (6, -5.0)):
        inputs[index] = torch.full((2,), number, requires_grad=True)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    actual, expected = function(*inputs).magnitude, polar_attention_reference(*exact).magnitude
    assert 0 < expected.min() and expected.max() < 1e-12
    assert ((actual / expected) - 1).abs().max() < 1e-4
    used = [x for i, x in enumerate(inputs) if i not in (2, 3)]
    gradients = torch.autograd.grad(actual.sum(), used)
    used = [x for i, x in enumerate(exact) if i not in (2, 3)]
    for x, reference in zip(gradients, torch.autograd.grad(expected.sum(), used), strict=True):
        assert relative(x, reference) < 1e-4


@pytest.mark.parametrize("size", [1e-9, 0.0])
def test_gradients_of_clamped_directions(small_blocks, size):
    """Values so small that |s| < 1e-6 is clamped, in some rows only."""
    inputs = make_inputs(1, 80, 80, 4, 2, 8)
    scale = torch.ones(80, dtype=torch.float64)
    scale[:50] = size
    inputs[2] = (inputs[2].detach() * scale[:, None, None]).requires_grad_()
    inputs[3] = torch.zeros_like(inputs[3], requires_grad=True)
    assert_same(inputs, 1e-9)


def test_statistics_are_detached_and_optional():
    inputs = make_inputs(1, 5, 5, 2, 1, 8)
    for function in (polar_attention, polar_attention_reference):
        assert function(*inputs).statistics is None
        assert not any(x.requires_grad for x in function(*inputs, return_statistics=True)[2])


def test_the_weights_of_keys_and_null_sum_to_one():
    inputs = make_inputs(1, 9, 9, 4, 2, 8)
    output = polar_attention_reference(
        *inputs, window=4, return_weights=True, return_statistics=True
    )
    assert output.weights.shape == (1, 4, 9, 9)
    total = output.weights.sum(-1).transpose(1, 2) + output.statistics.null_weight
    torch.testing.assert_close(total, torch.ones_like(total))
    visible = torch.ones(9, 9).tril().triu(-3).bool()
    assert (output.weights[..., visible] > 0).all() and (output.weights[..., ~visible] == 0).all()


@pytest.mark.parametrize("function", [polar_attention, polar_attention_reference])
def test_autocast_changes_nothing(function):
    inputs = make_inputs(1, 40, 40, 4, 2, 8, dtype=torch.float32)
    inputs[0] = inputs[0].detach().bfloat16().requires_grad_()
    inputs[1] = inputs[1].detach().bfloat16().requires_grad_()
    plain = outputs_and_gradients(function, inputs)

    def under_autocast(*arguments, **options):
        with torch.autocast("cpu", torch.bfloat16):
            return function(*arguments, **options)

    mixed = outputs_and_gradients(under_autocast, inputs)
    assert mixed["direction"].dtype == torch.bfloat16 and mixed["value"].dtype == torch.float32
    for name, x in plain.items():
        torch.testing.assert_close(mixed[name], x, rtol=0, atol=0)


def test_strides_change_nothing(small_blocks):
    inputs = make_inputs(2, 70, 70, 4, 2, 8)
    query, key, value = (x.detach() for x in inputs[:3])
    strided = [
        query.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        torch.stack([key, key], -1).flatten(-2)[..., ::2],
        value.transpose(1, 2).contiguous().transpose(1, 2),
    ]
    strided = [x.requires_grad_() for x in strided] + inputs[3:]
    assert not any(x.is_contiguous() for x in strided[:3])

    def losses(output):
        direction, magnitude, _, _ = output
        yield direction.sum() + magnitude.sum()
        shuffled = direction.transpose(0, 2).flatten(1).cumsum(1)[:, ::3]
        yield shuffled.square().sum() + magnitude.flip(1).cumsum(1).sum()
        yield torch.cat([direction[:, ::2, :, 1:3].flatten(), magnitude[..., 1].flatten()]).norm()

    for mine, reference in zip(
        losses(polar_attention(*strided)), losses(polar_attention_reference(*inputs)), strict=True
    ):
        gradients = torch.autograd.grad(mine, strided, retain_graph=True)
        expected = torch.autograd.grad(reference, inputs, retain_graph=True)
        for x, y in zip(gradients, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


def test_gradcheck():
    inputs = make_inputs(1, 4, 5, 2, 1, 2)
    assert torch.autograd.gradcheck(lambda *x: polar_attention(*x, window=3)[:2], inputs)


def test_a_second_derivative_is_refused():
    inputs = make_inputs(1, 4, 4, 2, 1, 2)
    output = polar_attention(*inputs)
    (gradient,) = torch.autograd.grad(output.magnitude.norm(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def test_16k_tokens_are_read_block_by_block():
    inputs = make_inputs(1, 16384, 16384, 1, 1, 8, dtype=torch.float32)
    with torch.no_grad(), LargestTensor() as mode:
        output = polar_attention(*inputs)
    assert mode.largest <= module.BLOCK_ELEMENTS_CPU
    query, *rest = inputs
    last = polar_attention_reference(query[:, -5:], *rest)
    torch.testing.assert_close(output.direction[:, -5:], last.direction, rtol=1e-4, atol=1e-5)


def test_the_backward_saves_no_weights_and_unpacks_each_tensor_once():
    inputs = make_inputs(1, 300, 300, 2, 1, 8)
    packed, unpacked = [], []

    def pack(x):
        packed.append(x.numel())
        return x

    def unpack(x):
        unpacked.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = polar_attention(*inputs)
        output.direction.sum().backward()
    assert max(packed) == inputs[0].numel() and packed == unpacked


@pytest.mark.parametrize("lengths", [None, [9, 4]])
def test_distractor_mass_is_the_mean_mass(lengths):
    query, _, _, _, length_gain, null_base, null_slope, _ = make_inputs(2, 9, 9, 4, 2, 8)
    distractors = make_inputs(1, 1, 5, 4, 2, 8, seed=3)[1][0]
    start = torch.tensor([0, 3])
    actual = distractor_mass(
        query,
        distractors,
        length_gain,
        null_base,
        null_slope,
        window=6,
        query_start=start,
        lengths=None if lengths is None else torch.tensor(lengths),
    )
    masses = []
    for b in range(2):
        for t in range(9 if lengths is None else lengths[b]):
            n = min(t + int(start[b]) + 1, 6)
            for h in range(4):
                temp = 1 + F.softplus(length_gain[h]) * math.log(n)
                null = null_base[h] + F.softplus(null_slope[h]) * math.sqrt(math.log(n + 1))
                logits = temp * (distractors[:, h // 2] @ query[b, t, h]) / math.sqrt(8)
                masses.append(torch.softmax(torch.cat([logits, temp * null[None]]), 0)[:-1].sum())
    expected = torch.stack(masses).mean()
    inputs = [query, distractors, length_gain, null_base, null_slope]
    assert relative(actual, expected) < 1e-12
    for x, y in zip(
        torch.autograd.grad(actual, inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        assert relative(x, y) < 1e-9


def test_distractor_mass_counts_inside_documents():
    query, _, _, _, *scalars, _ = make_inputs(1, 130, 130, 4, 2, 8)
    distractors = make_inputs(1, 1, 5, 4, 2, 8, seed=3)[1][0]
    packed = distractor_mass(query, distractors, *scalars, cu_seqlens=DOCUMENTS)
    total = 0
    for start, stop in zip(DOCUMENTS[:-1].tolist(), DOCUMENTS[1:].tolist(), strict=True):
        if stop > start:
            alone = distractor_mass(query[:, start:stop], distractors, *scalars)
            total = total + alone * (stop - start)
    torch.testing.assert_close(packed, total / 130)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 5},
        {"cu_seqlens": torch.tensor([0, 0, 1, 40, 70])},
        {"query_start": torch.tensor([-3])},
    ],
    ids=["plain", "window", "documents", "start"],
)
def test_it_compiles_as_one_graph(options):
    torch._dynamo.reset()
    compiled = torch.compile(polar_attention, fullgraph=True, backend="aot_eager")
    inputs = make_inputs(1, 70, 70, 4, 2, 8)
    expected = outputs_and_gradients(polar_attention, inputs, **options)
    for name, x in outputs_and_gradients(compiled, inputs, **options).items():
        torch.testing.assert_close(x, expected[name])


def test_distractor_mass_compiles_as_one_graph():
    torch._dynamo.reset()
    query, _, _, _, *scalars, _ = make_inputs(1, 20, 20, 4, 2, 8)
    distractors = make_inputs(1, 1, 5, 4, 2, 8)[1][0]
    compiled = torch.compile(distractor_mass, fullgraph=True, backend="aot_eager")
    mine, expected = (f(query, distractors, *scalars) for f in (compiled, distractor_mass))
    torch.testing.assert_close(mine, expected)


def test_the_meta_device_gives_shapes():
    inputs = [x.detach().to("meta") for x in make_inputs(2, 7, 7, 4, 2, 8)]
    output = polar_attention(*inputs)
    assert output.direction.shape == (2, 7, 4, 8) and output.magnitude.device.type == "meta"


def test_what_does_not_fit_is_refused():
    inputs = make_inputs(2, 6, 6, 4, 2, 8)
    query, key, value, *parameters = inputs
    documents = torch.tensor([0, 6])
    for message, arguments, options in (
        ("batch of 1", inputs, {"cu_seqlens": documents}),
        ("window must be at least 1", inputs, {"window": 0}),
        ("multiple of the 2 key/value heads", [query[:, :, :3], key, value, *parameters], {}),
        ("must both be", [query, key, value[:, :3], *parameters], {}),
        ("Triton implementation of polar_attention does not exist", inputs, {"backend": "triton"}),
        ("Unknown backend 'cuda'", inputs, {"backend": "cuda"}),
    ):
        with pytest.raises(ValueError, match=message):
            polar_attention(*arguments, **options)
    one = [x[:1] for x in inputs[:3]] + parameters
    with pytest.raises(ValueError, match="leave query_start out"):
        polar_attention(*one, cu_seqlens=documents, query_start=torch.tensor([0]))
    with pytest.raises(ValueError, match="as many keys as queries"):
        polar_attention(one[0][:, :3], *one[1:], cu_seqlens=documents)


def test_the_backend_is_chosen_by_device_and_by_what_exists():
    host, device = torch.empty(0), torch.empty(0, device="meta")
    for backend in ("auto", "torch"):
        for has_triton in (False, True):
            assert choose_backend(backend, host, "op", has_triton) == "torch"
    with pytest.raises(ValueError, match="cannot run on the device meta"):
        choose_backend("triton", device, "op", has_triton=True)


def test_a_gpu_without_triton_is_slow_and_says_so_once(monkeypatch):
    monkeypatch.setattr(backend_module, "triton", None)
    gpu = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for operation in ("one", "another"):
            assert choose_backend("auto", gpu, operation) == "torch"
        choose_backend("torch", gpu, "meant")
    assert ["Install the package triton" in str(x.message) for x in caught] == [True]


def test_documents_may_be_empty_and_end_before_the_row():
    offsets = torch.tensor([0, 0, 1, 4, 4], dtype=torch.int32)
    assert document_ids(offsets, 6).tolist() == [1, 2, 2, 2, 4, 4]
    assert positions_in_document(offsets, 6).tolist() == [0, 0, 1, 2, 0, 1]


@pytest.fixture
def device(monkeypatch):
    """Pretends to be a GPU of some compute capability and shared memory."""

    def pretend(capability, limit):
        tiles._tile.cache_clear()
        monkeypatch.setattr(tiles, "device_limits", lambda _: (capability, limit))
        where = types.SimpleNamespace(index=0)
        return types.SimpleNamespace(is_cuda=True, device=where, element_size=lambda: 2)

    yield pretend
    tiles._tile.cache_clear()


@pytest.mark.parametrize(
    "capability, limit",
    [((8, 0), 166912), ((8, 6), 101376), ((8, 9), 101376), ((9, 0), 232448), ((12, 0), 101376)],
)
def test_every_tile_fits_the_shared_memory_of_its_device(capability, limit, device):
    x = device(capability, limit)
    for kernel in ("forward", "query", "key"):
        for block_dim in (16, 32, 64, 128, 256):
            for reach in (0, tiles.LONG):
                tile = tiles.choose_tile(kernel, x, block_dim, reach)
                assert tiles.shared_memory(kernel, tile, 2, block_dim, capability) <= limit
                assert min(tile[:2]) >= 16


def test_the_forward_runs_ahead_on_hopper_with_room_for_the_first_keys():
    tile, (hopper, ampere) = (64, 64, 4, 3), ((9, 0), (8, 0))
    assert tiles.runs_ahead(hopper, 2, 128)
    for others in ((ampere, 2, 128), ((10, 0), 2, 128), (hopper, 4, 128), (hopper, 2, 256)):
        assert not tiles.runs_ahead(*others)
    for kernel, more in (("forward", 64 * 128 * 2), ("query", 0), ("key", 0)):
        needs = [tiles.shared_memory(kernel, tile, 2, 128, x) for x in (hopper, ampere)]
        assert needs[0] - needs[1] == more


def test_at_most_two_forward_tiles_for_all_lengths(device):
    for capability, tiles_of_it in (((8, 0), 1), ((9, 0), 2)):
        x = device(capability, 232448)
        found = [
            tiles.choose_tile("forward", x, 128, reach)
            for reach in (1, tiles.LONG - 1, tiles.LONG, 2**20)
        ]
        assert len(set(found)) == tiles_of_it
        assert found[0] == found[1] and found[2] == found[3]
