# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The Triton kernels of decoding compute what the plain forms define, on a GPU or interpreted."""

import pytest
import torch
import torch.nn.functional as F
from atma import modeling_atma
from atma.cache_atma import AtmaCache
from atma.decode_layer_atma import fused_step
from atma.kernels import paged_polar_attention as paged_polar_attention_module
from atma.kernels.backend import INTERPRETED
from atma.kernels.decode_convolution import (
    canon_step,
    causal_conv1d_step,
    gated_causal_conv1d_step,
)
from atma.kernels.decode_linear import project_step, project_sum_step
from atma.kernels.gated_delta import gated_delta_reference, gated_delta_step
from atma.kernels.paged_polar_attention import paged_polar_attention
from atma.kernels.pages import (
    gather_key_value_pages,
    gather_pages,
    write_key_value_pages,
    write_pages,
)
from atma.kernels.polar_attention import polar_attention_reference
from atma.kernels.short_convolution import (
    causal_conv1d_reference,
    gated_causal_conv1d_reference,
    shift_window_reference,
)
from torch._dynamo.backends.debugging import aot_eager

if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("Triton needs a GPU, or TRITON_INTERPRET=1.", allow_module_level=True)
paged_polar_attention_triton = pytest.importorskip("atma.kernels.paged_polar_attention_triton")
decode_linear_triton = pytest.importorskip("atma.kernels.decode_linear_triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
NORM_EPS = 2.0**-23


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch):
    """What a kernel does not write stays NaN."""
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def poison(x):
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def strided(*shape, dtype=torch.float32, seed=0):
    """A slice of a larger tensor, as a fused projection gives it."""
    return random(*shape[:-2], shape[-2] + 3, shape[-1], dtype=dtype, seed=seed)[..., 1:-2, :]


def integers(values):
    return None if values is None else torch.tensor(values, device=DEVICE)


def assert_near(actual, expected, tolerance=None):
    """In the norm; the default is what the dtype allows."""
    if tolerance is None:
        # Interpreted, bf16 is cut off where a GPU rounds.
        tolerance = 1e-5 if actual.dtype == torch.float32 else 8e-3 if INTERPRETED else 5e-3
    assert actual.shape == expected.shape and actual.isfinite().all()
    error = torch.linalg.vector_norm(actual.double() - expected.double())
    assert error <= tolerance * torch.linalg.vector_norm(expected.double())


def make_pools(batch, page_size, num_pages, groups, head_dim, dtype, slabs):
    total = batch * num_pages + 1
    sizes = {1: [total], 3: [2, 1, total - 3]}[slabs]
    pools = []
    for seed in (1, 2):
        whole = random(total, page_size, groups, head_dim, dtype=dtype, seed=seed)
        pools.append([slab.clone() for slab in whole.split(sizes)])
    order = torch.randperm(total - 1, generator=torch.Generator().manual_seed(3)) + 1
    return *pools, order.view(batch, num_pages).to(DEVICE, torch.int32)


def learned(heads, head_dim):
    return [random(heads, head_dim, seed=9)] + [random(heads, seed=10 + i) for i in range(4)]


def assert_attends(query, keys, values, table, start, window=None, tolerance=None):
    inputs = learned(*query.shape[2:])
    output = paged_polar_attention(
        query, keys, values, table, start, *inputs,
        window=window, return_statistics=True, backend="triton",
    )  # fmt: skip
    expected = polar_attention_reference(
        query.double(),
        gather_pages(keys, table).nan_to_num().double(),
        gather_pages(values, table).nan_to_num().double(),
        *[x.double() for x in inputs],
        query_start=start,
        window=window,
        return_statistics=True,
    )
    assert output.direction.dtype == output.magnitude.dtype == query.dtype
    tolerance = tolerance or (1e-5 if query.dtype == torch.float32 else None)
    for x, y in zip(
        (*output[:2], *output.statistics), (*expected[:2], *expected.statistics), strict=True
    ):
        assert_near(x, y, tolerance or (8e-3 if INTERPRETED else 5e-3))
    return output


# (B, T, H, G, D, page_size, pages, slabs, starts, window)
ATTENTION = {
    "one token": (2, 1, 4, 2, 16, 16, 5, 1, [0, 79], None),
    "drafts": (2, 3, 4, 2, 16, 16, 4, 1, [13, 40], None),
    "slabs": (2, 1, 4, 2, 16, 16, 4, 3, [30, 63], None),
    "window": (2, 2, 4, 2, 16, 16, 6, 3, [14, 90], 20),
    "odd sizes": (2, 2, 3, 1, 24, 36, 2, 1, [5, 70], None),
    "tiny pages": (1, 1, 2, 2, 40, 4, 6, 1, [20], None),
    "before the first key": (2, 2, 2, 1, 16, 16, 2, 1, [-1, -5], None),
    "past the capacity": (1, 2, 2, 1, 16, 16, 2, 1, [40], 12),
    "several blocks of queries": (1, 33, 2, 1, 16, 16, 3, 1, [10], 16),
    "large heads": (1, 1, 2, 1, 256, 16, 3, 1, [40], None),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_pages_read_as_the_whole(name):
    B, T, H, G, D, page_size, pages, slabs, starts, window = ATTENTION[name]
    pools = make_pools(B, page_size, pages, G, D, torch.float32, slabs)
    assert_attends(strided(B, T, H, D), *pools, integers(starts), window)


@pytest.fixture
def gathered(monkeypatch):
    """Every call counts as one of many queries; the list has one entry for each that gathered."""
    calls = []

    def gather(*arguments, **options):
        calls.append(arguments)
        return gather_key_value_pages(*arguments, **options)

    monkeypatch.setattr(paged_polar_attention_module, "_GATHER_FROM", (0, 0))
    monkeypatch.setattr(paged_polar_attention_module, "gather_key_value_pages", gather)
    return calls


@pytest.mark.parametrize("name", ATTENTION)
def test_many_queries_read_a_copy_of_the_pages(name, gathered):
    test_pages_read_as_the_whole(name)
    assert len(gathered) == 1


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float16])
def test_copies_are_read_in_the_dtype_of_the_queries(pool_dtype, gathered):
    pools = make_pools(2, 16, 4, 1, 16, pool_dtype, 1)
    assert_attends(random(2, 2, 2, 16, dtype=torch.float16), *pools, integers([3, 60]))
    assert len(gathered) == (pool_dtype == torch.float16)  # else the kernels for pages convert


def test_copies_hold_nothing_from_beyond_the_queries(gathered):
    keys, values, table = make_pools(2, 16, 6, 1, 16, torch.float32, 1)
    start = integers([30, 70])
    for pool in (keys, values):
        for row, first in enumerate(start.tolist()):
            for position in range(first + 2, 96):
                pool[0][table[row, position // 16], position % 16] = torch.nan
    assert_attends(random(2, 2, 2, 16), keys, values, table, start)
    assert len(gathered) == 1


def test_few_queries_read_the_pages_themselves(monkeypatch):
    """From 1024 queries x heads of a group on, and 16384 of the batch."""
    decide = paged_polar_attention_module._gathers
    pool = [torch.empty(2, 64, 2, 128, dtype=torch.bfloat16, device="meta")]
    for batch, tokens, expected in (
        (1, 1, False), (64, 1, False), (1, 1024, False), (4, 1024, True), (1, 2047, False),
        (1, 2048, True), (16, 256, True), (64, 255, False),
    ):  # fmt: skip
        query = torch.empty(batch, tokens, 8, 128, dtype=torch.bfloat16, device="meta")
        assert decide(query, pool, pool) == expected


@pytest.mark.parametrize("slabs", [1, 3])
@pytest.mark.parametrize("page_size, head_dim", [(4, 16), (36, 24), (64, 128)])
def test_keys_and_values_are_gathered_as_apart(slabs, page_size, head_dim):
    keys, values, table = make_pools(3, page_size, 3, 2, head_dim, torch.bfloat16, slabs)
    stop = integers([0, page_size + 1, 3 * page_size + 5])
    found = gather_key_value_pages(keys, values, table, stop, backend="triton")
    expected = gather_key_value_pages(keys, values, table, stop, backend="torch")
    for x, y, pool in zip(found, expected, (keys, values), strict=True):
        assert torch.equal(x, y)
        whole = gather_pages(pool, table)
        assert torch.equal(x[2], whole[2]) and not x[0].any()
        assert torch.equal(x[1, : page_size + 1], whole[1, : page_size + 1])
        assert not x[1, page_size + 1 :].any()


@pytest.mark.parametrize("query_dtype", DTYPES)
def test_pools_in_bf16(query_dtype):
    pools = make_pools(2, 16, 4, 1, 16, torch.bfloat16, 1)
    assert_attends(random(2, 2, 2, 16, dtype=query_dtype), *pools, integers([3, 60]))


def test_what_no_query_sees_is_not_read():
    keys, values, table = make_pools(2, 16, 6, 1, 16, torch.float32, 1)
    start, window = integers([70, 80]), 20
    for pool in (keys, values):
        for row in range(2):
            for position in range(96):
                if not start[row] - window < position <= start[row]:
                    pool[0][table[row, position // 16], position % 16] = torch.nan
    assert_attends(random(2, 1, 2, 16), keys, values, table, start, window)


@pytest.mark.parametrize("programs", [1, 3, 40])
def test_any_number_of_splits_gives_the_same(monkeypatch, programs):
    monkeypatch.setattr(paged_polar_attention_triton, "_PROGRAMS_PER_SM", programs)
    keys, values, table = make_pools(1, 16, 20, 1, 16, torch.float32, 1)
    # The largest logits stand in one split, and not in the first.
    keys[0][table[0, 17].long()] *= 4
    pools = (keys, values, table)
    query, start = random(1, 1, 2, 16), integers([310])
    first = assert_attends(query, *pools, start)
    again = assert_attends(query, *pools, start)
    assert torch.equal(first.direction, again.direction)
    assert torch.equal(first.magnitude, again.magnitude)


def test_rows_do_not_disturb_each_other():
    keys, values, table = make_pools(2, 16, 4, 1, 16, torch.float32, 1)
    inputs = (keys, values, table, integers([50, 20]), *learned(2, 16))
    query = random(2, 1, 2, 16)
    first = paged_polar_attention(query, *inputs, backend="triton")
    query[1] += 1
    keys[0][table[1].long()] += 1
    second = paged_polar_attention(query, *inputs, backend="triton")
    assert torch.equal(first.direction[0], second.direction[0])
    assert not torch.equal(first.direction[1], second.direction[1])


@pytest.mark.parametrize("slabs", [1, 3])
@pytest.mark.parametrize("lengths", [None, [4, 2, 0]])
def test_keys_and_values_are_written_as_apart(slabs, lengths):
    new = [strided(3, 4, 2, 24, seed=seed) for seed in (5, 6)]
    start, lengths = integers([3, -2, 10]), integers(lengths)
    fused, apart = (make_pools(3, 4, 3, 2, 24, torch.float32, slabs) for _ in range(2))
    write_key_value_pages(*fused, *new, start, lengths, backend="triton")
    for pool, x in zip(apart, new, strict=False):
        write_pages(pool, apart[2], x, start, lengths)
    for x, y in zip(fused[:2], apart[:2], strict=True):
        assert torch.equal(torch.cat(x)[1:], torch.cat(y)[1:])


def step_inputs(B, T, H, G, D, dtype):
    vectors = [strided(B, T, heads, D, dtype=dtype, seed=i) for i, heads in enumerate((H, G, G))]
    gates = [random(B, T, H, dtype=dtype, seed=5 + i) for i in range(2)]
    return vectors, gates, strided(B, T, H, D, dtype=dtype, seed=7), random(B, H, D, D, seed=8)


def assert_steps(vectors, gates, readout_gate, state, lengths=None, **options):
    lengths = integers(lengths)
    expected, last = gated_delta_reference(
        *[x.double() for x in (*vectors, *gates)],
        initial_state=state.double(),
        lengths=lengths,
        output_final_state=True,
        **options,
    )
    if readout_gate is not None:
        expected = F.rms_norm(expected, expected.shape[-1:], eps=NORM_EPS)
        expected = expected * torch.sigmoid(readout_gate.double())
    address = state.data_ptr()
    read = gated_delta_step(
        *vectors, *gates, state,
        readout_gate=readout_gate, lengths=lengths, backend="triton", **options,
    )  # fmt: skip
    assert read.dtype == vectors[0].dtype and state.data_ptr() == address
    assert read.isfinite().all()
    for row in range(read.shape[0]):
        real = read.shape[1] if lengths is None else int(lengths[row])
        if real:
            assert_near(read[row, :real], expected[row, :real])
    assert_near(state, last)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T, D", [(1, 40), (1, 128), (2, 64), (8, 24)])
def test_memory_steps_as_the_rule_says(T, D, dtype):
    vectors, gates, readout_gate, state = step_inputs(2, T, 3 if D < 64 else 2, 1, D, dtype)
    options = {"retention_bias": 3.9, "write_bias": 0.5}
    assert_steps(vectors, gates, None, state.clone(), **options)
    assert_steps(vectors, gates, readout_gate, state, max_half_life=5.0, **options)


def test_readout_gate_means_the_same_in_torch():
    vectors, gates, readout_gate, state = step_inputs(2, 2, 2, 1, 16, torch.float32)
    options = {"readout_gate": readout_gate, "max_half_life": 9.0}
    states = [state.clone(), state.clone()]
    reads = [
        gated_delta_step(*vectors, *gates, x, backend=backend, **options)
        for x, backend in zip(states, ("torch", "triton"), strict=True)
    ]
    assert_near(reads[1], reads[0])
    assert_near(states[1], states[0])


@pytest.mark.parametrize("T", [1, 3])
def test_padding_leaves_the_memory_as_it_is(T):
    vectors, gates, readout_gate, state = step_inputs(3, T, 2, 1, 16, torch.bfloat16)
    before, spoiled = state.clone(), state.clone()
    lengths = [0, T, T - 1]
    assert_steps(vectors, gates, readout_gate, state, lengths)
    padded = [row for row in range(3) if lengths[row] == 0]
    assert torch.equal(state[padded], before[padded])
    # What stands at padding may be anything.
    for x in (*vectors, *gates):
        x[0] = x[2, T - 1] = torch.nan
    gated_delta_step(*vectors, *gates, spoiled, lengths=integers(lengths), backend="triton")
    assert torch.equal(spoiled, state)


@pytest.mark.parametrize("retention", [-1e4, 0.0, 1e4])
def test_memory_with_extreme_decay_and_repeated_or_zero_keys(retention):
    vectors, gates, _, state = step_inputs(1, 4, 2, 1, 16, torch.float32)
    vectors[1][:, 1] = vectors[1][:, 0]
    vectors[1][:, 2] = 0
    gates[0].fill_(retention)
    assert_steps(vectors, gates, None, state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize("T, lengths", [(1, None), (1, [1, 0]), (5, [5, 2])])
def test_convolutions_step_as_they_run(T, lengths, taps, dtype):
    channels = (40, 16, 24)
    inputs = [random(2, T, C + 5, dtype=dtype, seed=C)[..., 2:-3] for C in channels]
    weights = [random(C, taps, seed=C + 1) for C in channels]
    window = random(2, taps - 1, sum(channels), dtype=dtype, seed=2)
    lengths = integers(lengths)
    expected_window = shift_window_reference(window, torch.cat(inputs, -1), lengths)
    old = window.double().split(channels, dim=-1)
    alone = window[..., : channels[0]].clone()
    outputs = canon_step(*inputs, *weights, window, lengths=lengths, backend="triton")
    for x, weight, before, y in zip(inputs, weights, old, outputs, strict=True):
        assert y.dtype == dtype
        assert_near(
            y,
            causal_conv1d_reference(
                x.double(), weight.double(), initial_state=before, residual=True
            ),
        )
    assert torch.equal(window, expected_window)
    y = causal_conv1d_step(inputs[0], weights[0], alone, lengths=lengths, backend="triton")
    assert_near(
        y, causal_conv1d_reference(inputs[0].double(), weights[0].double(), initial_state=old[0])
    )
    assert torch.equal(alone, expected_window[..., : channels[0]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T, lengths", [(1, None), (1, [0, 1]), (6, [6, 1])])
def test_gated_convolution_steps_as_it_runs(T, lengths, dtype):
    C = 150
    # Small integers, whose products bf16 holds exactly.
    projected = (random(2, T, 3 * C) * 3).round().to(dtype)
    weight, window = random(C, 3, seed=1), random(2, 2, C, dtype=dtype, seed=2)
    expected, conv_input = gated_causal_conv1d_reference(
        projected.double(), weight.double(), initial_state=window.double()
    )
    lengths = integers(lengths)
    expected_window = shift_window_reference(window, conv_input, lengths)
    y, actual_input = gated_causal_conv1d_step(
        projected, weight, window, lengths=lengths, backend="triton"
    )
    assert_near(y, expected)
    assert torch.equal(actual_input.double(), conv_input)
    assert torch.equal(window, expected_window)


def linears(widths, sizes, dtype, bias):
    weights = [random(n, k, dtype=dtype, seed=n + k) for k, n in zip(widths, sizes, strict=True)]
    biases = [random(n, dtype=dtype, seed=n) if bias else None for n in sizes]
    if bias == "some":
        biases[1] = None
    return weights, biases


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias, norm", [(False, True), (True, False), ("some", True)])
def test_projections_of_a_token_read_as_apart(bias, norm, dtype):
    K, sizes = 40, (24, 24, 7)
    x, (weights, biases) = random(1, 1, K, dtype=dtype), linears([K] * 3, sizes, dtype, bias)
    norm_weight = random(K, dtype=dtype, seed=9) if norm else None
    options = {"norm_weight": norm_weight, "norm_eps": 1e-6}
    exact = x.double()
    if norm:
        exact = F.rms_norm(exact, (K,), norm_weight.double(), 1e-6)
    apart = [
        F.linear(exact, weight.double(), None if bias is None else bias.double())
        for weight, bias in zip(weights, biases, strict=True)
    ]
    product = apart[0].relu().square() * apart[1]
    for backend in ("triton", "torch"):
        found = project_step(x, weights, biases, backend=backend, **options)
        assert_near(found, torch.cat(apart, -1), 1e-2 if dtype == torch.bfloat16 else None)
        found = project_step(
            x, weights[:2], biases[:2], squared_relu=True, backend=backend, **options
        )
        assert_near(found, product, 2e-2 if dtype == torch.bfloat16 else None)


@pytest.mark.parametrize(
    "dtype, bias", [(torch.float32, False), (torch.bfloat16, True), (torch.float32, "some")]
)
def test_projections_add_up_on_the_residual(bias, dtype):
    widths, N = (40, 3, 70), 33
    inputs = [random(1, 1, k, dtype=dtype, seed=k) for k in widths]
    weights, biases = linears(widths, [N] * 3, dtype, bias)
    residual, gate = random(1, 1, N, dtype=dtype, seed=1), random(1, 1, 40, dtype=dtype, seed=2)
    for real in (None, True, False):
        mask = None if real is None else torch.tensor([[real]], device=DEVICE)
        for gating in (None, gate) if real is None else (gate,):
            expected = residual.double()
            for i, (x, weight) in enumerate(zip(inputs, weights, strict=True)):
                if gating is not None and i == 0:
                    x = x.double() * gating.double().sigmoid()
                shift = None if biases[i] is None else biases[i].double()
                if real is not False:
                    expected = expected + F.linear(x.double(), weight.double(), shift)
            for backend in ("triton", "torch"):
                found = project_sum_step(
                    inputs, weights, biases, residual, gate=gating, real=mask, backend=backend
                )
                assert_near(found, expected, 1e-2 if dtype == torch.bfloat16 else None)


def test_a_product_with_nan_is_nan():
    x, weights = random(1, 1, 8), [random(4, 8, seed=i) for i in range(2)]
    weights[0][1] = torch.nan
    for backend in ("triton", "torch"):
        found = project_step(x, weights, [None] * 2, squared_relu=True, backend=backend)
        assert found.isnan().flatten().tolist() == [False, True, False, False]


def test_a_step_in_training_mode_has_its_distractor_loss(make_model, tokens, monkeypatch):
    monkeypatch.undo()
    shape = {"layer_types": ["hybrid"], "num_hidden_layers": 1, "distractor_keys": 3}
    model = make_model(kernel_backend="triton", **shape).to(DEVICE).train()
    ids = tokens(1, 3).to(DEVICE)
    with torch.no_grad():
        cache = model(ids[:, :2], use_cache=True).past_key_values
        assert model(ids[:, 2:], past_key_values=cache).distractor_loss > 0


def test_layers_with_transposed_weights_are_called(make_model, tokens, monkeypatch):
    monkeypatch.undo()
    model = make_model(kernel_backend="triton", layer_types=["conv"], num_hidden_layers=1)
    model, ids = model.to(DEVICE), tokens(1, 3).to(DEVICE)
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data = weight.data.t().contiguous().t()
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, 2:]
        cache = model(ids[:, :2], use_cache=True).past_key_values
        assert_near(model(ids[:, 2:], past_key_values=cache).logits, expected, 1e-4)


@pytest.mark.parametrize(
    "overrides, dropped",
    [
        ({}, ()),
        ({"use_memory": False, "use_bias": False}, ()),
        ({}, ("up_proj", "k_proj", "count_proj")),
    ],
)
def test_a_fused_layer_steps_as_its_modules_do(make_model, tokens, monkeypatch, overrides, dropped):
    """One token on a full cache, then a hook that the fused form would not call."""
    monkeypatch.undo()
    shape = {"layer_types": ["conv", "hybrid"], **overrides}
    plain = make_model(kernel_backend="torch", **shape).to(DEVICE)
    fused = make_model(kernel_backend="triton", **shape).to(DEVICE)
    for name, module in (*plain.named_modules(), *fused.named_modules()):
        if name.endswith(dropped):
            module.bias = None
    ids = tokens(1, 8).to(DEVICE)
    if INTERPRETED:  # few programs, which run one after the other
        monkeypatch.setattr(decode_linear_triton, "_TILE", (64, 64, 1))
        monkeypatch.setattr(decode_linear_triton, "_SUM_TILE", (64, 64, 1))
    steps, calls = [], []
    monkeypatch.setattr(
        modeling_atma, "fused_step", lambda *args: steps.append(args) or fused_step(*args)
    )
    with torch.no_grad():
        expected = plain(ids, use_cache=False).logits
        cache = plain(ids[:, :5], use_cache=True).past_key_values
        for position in (5, 6):
            found = fused(ids[:, position : position + 1], past_key_values=cache).logits
            assert_near(found, expected[:, position : position + 1], 1e-4)
        fused.model.layers[1].mlp.up_proj.register_forward_hook(lambda *args: calls.append(args))
        found = fused(ids[:, 7:], past_key_values=cache).logits
    assert_near(found, expected[:, 7:], 1e-4)
    # Two layers twice, then the first alone.
    assert len(steps) == 5 and len(calls) == 1


def test_fused_layers_are_compiled_whole(make_model, tokens, monkeypatch):
    """One graph on a static cache, with the fused form inside, says what the modules say."""
    monkeypatch.undo()
    shape = {"layer_types": ["conv", "hybrid"]}
    plain = make_model(kernel_backend="torch", **shape).to(DEVICE)
    fused = make_model(kernel_backend="triton", **shape).to(DEVICE)
    ids = tokens(1, 8).to(DEVICE)
    if INTERPRETED:
        monkeypatch.setattr(decode_linear_triton, "_TILE", (64, 64, 1))
        monkeypatch.setattr(decode_linear_triton, "_SUM_TILE", (64, 64, 1))
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph.print_readable(print_output=False))
        return aot_eager(graph, example_inputs)

    cache = AtmaCache(plain.config, max_length=16)
    torch.compiler.reset()
    step = torch.compile(fused, backend=backend, fullgraph=True)
    with torch.no_grad():
        expected = plain(ids, use_cache=False).logits
        plain(ids[:, :5], past_key_values=cache)
        for position in (5, 6, 7):
            found = step(ids[:, position : position + 1], past_key_values=cache).logits
            assert_near(found, expected[:, position : position + 1], 1e-4)
    assert len(graphs) == 1 and "project_sum_step" in graphs[0]


def test_torch_paths_of_the_steps_agree():
    inputs = [random(2, 3, C, dtype=torch.float64, seed=C) for C in (8, 4, 4)]
    weights = [random(C, 4, dtype=torch.float64, seed=C + 1) for C in (8, 4, 4)]
    window = random(2, 3, 16, dtype=torch.float64)
    lengths, old = integers([3, 1]), window.clone()
    outputs = canon_step(*inputs, *weights, window, lengths=lengths)
    for x, weight, before, y in zip(
        inputs, weights, old.split((8, 4, 4), -1), outputs, strict=True
    ):
        assert_near(y, causal_conv1d_reference(x, weight, initial_state=before, residual=True))
    assert torch.equal(window, shift_window_reference(old, torch.cat(inputs, -1), lengths))


def operators():
    from atma.kernels.decode_convolution_triton import (
        canon_step_op,
        causal_conv1d_step_op,
        gated_causal_conv1d_step_op,
    )
    from atma.kernels.decode_linear_triton import project_step_op, project_sum_step_op
    from atma.kernels.gated_delta_step_triton import gated_delta_step_op
    from atma.kernels.pages_triton import gather_key_value_pages_op, write_key_value_pages_op

    vectors, gates, readout_gate, state = step_inputs(1, 1, 2, 1, 16, torch.float32)
    pools, start = make_pools(1, 16, 2, 1, 16, torch.float32, 1), integers([3])
    window = random(1, 2, 16)
    return {
        "attention": (
            paged_polar_attention_triton.paged_polar_op,
            (vectors[0], *pools, start, *learned(2, 16), None),
        ),
        "memory": (
            gated_delta_step_op,
            (*vectors, *gates, readout_gate, None, state, 3.9, 0.0, 1.0),
        ),
        "pages": (write_key_value_pages_op, (*pools, *vectors[1:], start, None)),
        "copy of pages": (gather_key_value_pages_op, (*pools, start)),
        "canon": (
            canon_step_op,
            (random(1, 1, 16).split((8, 4, 4), -1), [random(C, 3) for C in (8, 4, 4)], window)
            + (None, True),
        ),
        "convolution": (
            causal_conv1d_step_op,
            (random(1, 1, 16), random(16, 3), window, None, True),
        ),
        "projections": (
            project_step_op,
            (random(1, 1, 8), [random(4, 8), random(3, 8)], [], random(8), 1e-6, False),
        ),
        "sum of projections": (
            project_sum_step_op,
            ([random(1, 1, 8)], [random(4, 8)], [random(4)], random(1, 1, 4), None, None),
        ),
        "gated convolution": (
            gated_causal_conv1d_step_op,
            (random(1, 1, 48), random(16, 3), window, None),
        ),
    }


@pytest.mark.parametrize(
    "name",
    [
        "attention",
        "memory",
        "pages",
        "copy of pages",
        "canon",
        "convolution",
        "gated convolution",
        "projections",
        "sum of projections",
    ],
)
def test_operators_are_what_they_declare(name, monkeypatch):
    monkeypatch.undo()
    operator, arguments = operators()[name]
    torch.library.opcheck(operator, arguments)


def test_what_triton_cannot_serve_is_refused():
    vectors, gates, _, state = step_inputs(1, 1, 2, 1, 16, torch.float64)
    with pytest.raises(ValueError, match="gated_delta_step"):
        gated_delta_step(*vectors, *gates, state.double(), backend="triton")
    with pytest.raises(ValueError, match="window must have the shape"):
        causal_conv1d_step(random(1, 1, 8), random(8, 3), random(1, 3, 8))
    with pytest.raises(ValueError, match="needs a weight of shape"):
        causal_conv1d_step(random(1, 1, 8), random(7, 3), random(1, 2, 8))
    with pytest.raises(ValueError, match="readout_gate must have the shape"):
        gated_delta_step(*vectors, *gates, state, readout_gate=vectors[1])


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def decode_setup(slabs=1, steps=3):
    """A step of a layer of two rows, its tokens, and where they start."""
    D, dtype = (64, torch.bfloat16) if DEVICE == "cuda" else (16, torch.float32)
    channels = (2 * D, D, D)
    pools = make_pools(2, 16, 4, 1, D, dtype, slabs)
    state, window = random(2, 2, D, D), random(2, 3, 4 * D, dtype=dtype)
    weights = [random(C, 4, seed=C) for C in channels]
    tokens = random(steps, 2, 1, 4 * D, dtype=dtype, seed=4)
    inputs = learned(2, D)

    def step(x, start):
        mixed = canon_step(*x.split(channels, -1), *weights, window, backend="triton")
        q, k, v = [y.unflatten(-1, (-1, D)) for y in mixed]
        write_key_value_pages(*pools, k, v, start, backend="triton")
        logits = x[..., :2]
        read = gated_delta_step(q, k, v, logits, logits, state, readout_gate=q, backend="triton")
        output = paged_polar_attention(q, *pools, start, *inputs, backend="triton")
        start += 1
        return output.direction + read, output.magnitude

    return step, tokens, integers([46, 37])


@needs_gpu
def test_decoding_replays_as_a_graph():
    step, tokens, start = decode_setup()
    expected = [step(x, start) for x in tokens]
    step, tokens, start = decode_setup()
    static = tokens[0].clone()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        decode_setup()[0](static, start.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(static, start)
    for x, (direction, magnitude) in zip(tokens, expected, strict=True):
        static.copy_(x)
        graph.replay()
        assert torch.equal(outputs[0], direction) and torch.equal(outputs[1], magnitude)


@pytest.mark.parametrize("slabs", [1, 3])
def test_decoding_compiles_as_one_graph(slabs, monkeypatch):
    monkeypatch.undo()
    torch._dynamo.reset()
    step, tokens, start = decode_setup(slabs)
    expected = [step(x, start) for x in tokens]
    step, tokens, start = decode_setup(slabs)
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for x, (direction, magnitude) in zip(tokens, expected, strict=True):
        actual = compiled(x, start)
        assert_near(actual[0], direction)
        assert_near(actual[1], magnitude)


@needs_gpu
def test_no_length_compiles_anew():
    pools = make_pools(2, 64, 8, 2, 64, torch.bfloat16, 1)
    kernel = paged_polar_attention_triton.paged_polar_fwd_kernel
    counts = []
    for length in (1, 15, 16, 17, 100, 400):
        for pages in (7, 8):
            table = pools[2][:, :pages].contiguous()
            start = torch.tensor([length, 3], device=DEVICE)
            paged_polar_attention(
                random(2, 1, 4, 64, dtype=torch.bfloat16), *pools[:2], table, start, *learned(4, 64)
            )
        counts.append(sum(len(cache[0]) for cache in kernel.device_caches.values()))
    assert counts[0] == counts[-1]
