# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The gated delta rule: the chunked form and the step against the loop over tokens, and the loop
against a solution on paper."""

import math

import pytest
import torch
from atma.kernels import gated_delta as gated_delta_module
from atma.kernels.gated_delta import (
    gated_delta,
    gated_delta_reference,
    gated_delta_step,
    log_retention,
)

LOG_GAMMAS = [0.0, -1e-6, -1.0, -30.0, -100.0, -1e4]
GATES = {"retention_bias": 1.5, "write_bias": 0.3}


def make_inputs(batch=2, tokens=65, heads=4, groups=2, dim=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    query = draw(batch, tokens, heads, dim)
    key, value = draw(batch, tokens, groups, dim), draw(batch, tokens, groups, dim)
    return [query, key, value, 2 * draw(batch, tokens, heads), 2 * draw(batch, tokens, heads)]


def make_state(states, heads=4, dim=8, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(states, heads, dim, dim, generator=generator, dtype=dtype)


def logits_of(log_gamma):
    """The logits whose logsigmoid is log_gamma, in fp64: log(expm1(-x)) is minus the logit."""
    x = torch.as_tensor(log_gamma, dtype=torch.float64)
    return torch.where(x < -50, x, -torch.log(torch.expm1(-x.clamp(-50, -1e-30))))


def run(function, inputs, state=None, weights=None, **options):
    """Read, final state and the gradients of a random weighted sum of both."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    if state is not None:
        state = state.detach().clone().requires_grad_()
    read, final = function(*inputs, initial_state=state, output_final_state=True, **options)
    generator = torch.Generator().manual_seed(7)
    dtype = torch.float64
    read_weights = torch.randn(read.shape, generator=generator, dtype=dtype).to(read.dtype)
    if weights is not None:
        read_weights = read_weights * weights
    final_weights = torch.randn(final.shape, generator=generator, dtype=dtype).to(final.dtype)
    leaves = inputs + ([state] if state is not None else [])
    loss = (read * read_weights).sum() + (final * final_weights).sum()
    return [read.detach(), final.detach(), *torch.autograd.grad(loss, leaves)]


def relative_error(actual, expected):
    expected = expected.double()
    scale = expected.norm().clamp_min(1e-30)
    return ((actual.double() - expected).norm() / scale).item()


def assert_close(actual, expected, tolerance=1e-9):
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape and one.isfinite().all()
        assert relative_error(one, other) <= tolerance


@pytest.mark.parametrize("tokens", [1, 2, 3, 15, 17, 63, 64, 65, 130])
def test_chunks_equal_the_token_loop_with_all_gradients(tokens):
    inputs, state = make_inputs(tokens=tokens), make_state(2)
    expected = run(gated_delta_reference, inputs, state, **GATES)
    assert_close(run(gated_delta, inputs, state, **GATES), expected)


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 100])
def test_chunk_size_changes_nothing(chunk_size):
    inputs, state = make_inputs(tokens=37), make_state(2)
    expected = run(gated_delta_reference, inputs, state, **GATES)
    assert_close(run(gated_delta, inputs, state, chunk_size=chunk_size, **GATES), expected)


def test_many_chunks_cross_the_batches_of_chunks(monkeypatch):
    monkeypatch.setattr(gated_delta_module, "_CHUNKS_AT_ONCE", 3)
    inputs, state = make_inputs(tokens=75), make_state(2)
    expected = run(gated_delta_reference, inputs, state, **GATES)
    assert_close(run(gated_delta, inputs, state, chunk_size=8, **GATES), expected)


@pytest.mark.parametrize("heads, groups", [(1, 1), (3, 3), (4, 2), (3, 1), (8, 2), (6, 3)])
@pytest.mark.parametrize("dim", [8, 24])
def test_heads_share_the_key_and_value_of_their_group(heads, groups, dim):
    inputs = make_inputs(tokens=21, heads=heads, groups=groups, dim=dim)
    actual, _ = gated_delta(*inputs, chunk_size=8)
    expanded = list(inputs)
    for i in (1, 2):
        expanded[i] = torch.stack([inputs[i][:, :, h * groups // heads] for h in range(heads)], 2)
    for function in (gated_delta, gated_delta_reference):
        assert_close([function(*expanded)[0]], [actual])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-6), (torch.bfloat16, 8e-3)])
def test_single_precision_stays_near_the_loop_in_double(dtype, tolerance):
    inputs = make_inputs(tokens=200, dim=16, dtype=dtype)
    state = make_state(2, dim=16, dtype=torch.float32)
    expected = run(gated_delta_reference, [x.double() for x in inputs], state.double(), **GATES)
    actual = run(gated_delta, inputs, state, **GATES)
    assert actual[0].dtype == dtype and actual[1].dtype == torch.float32
    # The final state is not rounded to the dtype of the inputs, nor is anything on the way to it.
    assert relative_error(actual[1], expected[1]) < 3e-6
    assert_close(actual, expected, tolerance)


def test_a_thousand_tokens_in_half_precision_are_accumulated_in_single():
    inputs = make_inputs(batch=1, tokens=1000, dim=16, dtype=torch.bfloat16)
    options = {"retention_bias": 6.0, "output_final_state": True}
    expected = gated_delta_reference(*(x.double() for x in inputs), **options)
    read, state = gated_delta(*inputs, **options)
    assert relative_error(read, expected[0]) < 4e-3
    assert relative_error(state, expected[1]) < 1e-5


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("log_gamma", [*LOG_GAMMAS, "mixed"])
@pytest.mark.parametrize("write", [-1e4, 0.0, 1e4])
def test_any_decay_and_any_write_strength_are_exact(log_gamma, write, dtype, tolerance):
    inputs = make_inputs(batch=1, tokens=70, heads=2, groups=1, dtype=dtype)
    if log_gamma == "mixed":
        pattern = torch.tensor(LOG_GAMMAS, dtype=torch.float64)
        chosen = torch.randint(6, (1, 70, 2), generator=torch.Generator().manual_seed(3))
        inputs[3] = logits_of(pattern[chosen]).to(dtype)
    else:
        inputs[3] = logits_of(torch.full((1, 70, 2), log_gamma)).to(dtype)
    inputs[4] = torch.full_like(inputs[4], write)
    inputs[1][:, 5:9] = 0.0
    inputs[1][:, 20:40] = inputs[1][:, 20:21]
    state = make_state(1, heads=2, dtype=dtype)
    expected = run(gated_delta_reference, [x.double() for x in inputs], state.double())
    actual = run(gated_delta, inputs, state)
    assert_close(actual[:2], expected[:2], tolerance)
    # The gradients of the zero keys are those of x / 1e-12: they are compared by themselves.
    for parts in (actual, expected):
        parts.append(parts[3][:, 5:9].clone())
        parts[3][:, 5:9] = 0.0
    for one, other in zip(actual[2:], expected[2:], strict=True):
        assert one.isfinite().all()
        assert (one.double() - other).norm() <= tolerance * other.norm() + 1e-30


def test_strong_decay_does_not_blur_the_tokens_after_it():
    """Log gammas of -1e4 beside small ones: a plain cumulative sum in fp32 is off by about 1e-3."""
    inputs = make_inputs(batch=1, tokens=64, heads=1, groups=1, dtype=torch.float32)
    log_gamma = torch.full((1, 64, 1), -0.01, dtype=torch.float64)
    log_gamma[:, 10:30] = -1e4
    inputs[3] = logits_of(log_gamma).float()
    expected, _ = gated_delta_reference(*(x.double() for x in inputs))
    actual, _ = gated_delta(*inputs)
    assert relative_error(actual[:, 30:], expected[:, 30:]) < 2e-6


@pytest.mark.parametrize("chunk_size", [4, 64])
@pytest.mark.parametrize("offsets", [[0, 40], [0, 0, 1, 23, 23, 24, 40, 40], [0, 16, 17, 40]])
def test_packed_documents_equal_each_document_alone(offsets, chunk_size):
    inputs, state = make_inputs(batch=1, tokens=40), make_state(len(offsets) - 1)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    options = {"chunk_size": chunk_size, **GATES}
    actual = run(gated_delta, inputs, state, cu_seqlens=cu_seqlens, **options)
    assert_close(actual, run(gated_delta_reference, inputs, state, cu_seqlens=cu_seqlens, **GATES))
    for n, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        alone = [x[:, start:end] for x in inputs]
        read, final = gated_delta(
            *alone, initial_state=state[n : n + 1], output_final_state=True, **options
        )
        assert_close([actual[0][:, start:end], actual[1][n : n + 1]], [read, final])
        torch.testing.assert_close(actual[0][:, start:end], read)
    without_state, _ = gated_delta(*inputs, cu_seqlens=cu_seqlens, **options)
    zeros = gated_delta(*inputs, cu_seqlens=cu_seqlens, initial_state=0 * state, **options)[0]
    torch.testing.assert_close(without_state, zeros)


@pytest.mark.parametrize("offsets", [[0, 17, 30], [0, 30, 30]])
def test_tokens_past_the_last_document_are_padding(offsets):
    cu_seqlens = torch.tensor(offsets)
    inputs, state = make_inputs(batch=1, tokens=40), make_state(2)
    real = (torch.arange(40) < 30).double()[None, :, None, None]
    actual = run(gated_delta, inputs, state, real, cu_seqlens=cu_seqlens, chunk_size=8)
    expected = run(gated_delta_reference, inputs, state, real, cu_seqlens=cu_seqlens)
    assert actual[0].isfinite().all()
    assert_close([actual[0][:, :30], *actual[1:]], [expected[0][:, :30], *expected[1:]])


def test_padding_leaves_no_trace():
    inputs, state = make_inputs(batch=4, tokens=20), make_state(4)
    lengths = torch.tensor([20, 13, 1, 0])
    real = (torch.arange(20) < lengths[:, None]).double()[..., None, None]
    for function, options in ((gated_delta, {"chunk_size": 8}), (gated_delta_reference, {})):
        actual = run(function, inputs, state, real, lengths=lengths, **options)
        for b, length in enumerate(lengths.tolist()):
            alone = [x[b : b + 1, :length] for x in inputs]
            read, final = gated_delta_reference(
                *alone, initial_state=state[b : b + 1], output_final_state=True
            )
            torch.testing.assert_close(actual[0][b : b + 1, :length], read)
            torch.testing.assert_close(actual[1][b : b + 1], final)
        assert all(x.isfinite().all() for x in actual)
        for gradient in actual[2:7]:
            assert not gradient.mul(1 - real.view(4, 20, *[1] * (gradient.dim() - 2))).any()


@pytest.mark.parametrize("pieces", [[1, 1, 1, 37], [20, 20], [1, 2, 3, 5, 16, 13], [39, 1]])
def test_any_split_continues_the_state(pieces):
    inputs = make_inputs(tokens=40)
    whole, last = gated_delta(*inputs, output_final_state=True, **GATES)
    reads, state, stepped = [], None, torch.zeros(2, 4, 8, 8, dtype=torch.float64)
    for piece in zip(*(x.split(pieces, dim=1) for x in inputs), strict=True):
        read, state = gated_delta(*piece, initial_state=state, output_final_state=True, **GATES)
        reads.append(read)
        torch.testing.assert_close(gated_delta_step(*piece, stepped, **GATES), read)
    torch.testing.assert_close(torch.cat(reads, 1), whole)
    torch.testing.assert_close(state, last)
    torch.testing.assert_close(stepped, last)


def test_the_caller_keeps_its_initial_state():
    inputs, state = make_inputs(tokens=9), make_state(2)
    before = state.clone()
    _, final = gated_delta(*inputs, initial_state=state, output_final_state=True)
    assert torch.equal(state, before)
    assert final.untyped_storage().data_ptr() != state.untyped_storage().data_ptr()
    assert final.untyped_storage().nbytes() == final.nbytes


def test_final_state_comes_only_on_request():
    assert gated_delta(*make_inputs(tokens=3))[1] is None
    assert gated_delta_reference(*make_inputs(tokens=3))[1] is None


@pytest.mark.parametrize("tokens", [1, 3])
def test_step_writes_into_the_given_storage(tokens):
    inputs = make_inputs(tokens=tokens, dtype=torch.bfloat16)
    cache = make_state(6, dtype=torch.float32)
    others = cache[1::2].clone()
    state = cache[::2][:2]
    expected_read, expected_state = gated_delta_reference(
        *inputs, initial_state=state, output_final_state=True, **GATES
    )
    address = state.data_ptr()
    read = gated_delta_step(*(x.requires_grad_() for x in inputs), state, **GATES)
    assert read.dtype == torch.bfloat16 and not read.requires_grad and not state.requires_grad
    assert state.data_ptr() == address and torch.equal(cache[1::2], others)
    torch.testing.assert_close(read, expected_read)
    torch.testing.assert_close(state, expected_state)


def test_step_leaves_padded_rows_bit_for_bit():
    inputs = make_inputs(batch=3, tokens=4, dtype=torch.float32)
    for x in inputs:
        x[0, 0:] = math.nan
        x[1, 2:] = math.nan
    state = make_state(3, dtype=torch.float32)
    state[0, 0, 0] = -0.0
    before = state.clone()
    read = gated_delta_step(*inputs, state, lengths=torch.tensor([0, 2, 4]))
    assert torch.equal(state[0].view(torch.int32), before[0].view(torch.int32))
    alone = before[1:2]
    gated_delta_step(*(x[1:2, :2] for x in inputs), alone)
    assert torch.equal(state[1:2], alone)
    assert state.isfinite().all() and read[2].isfinite().all()
    assert not torch.equal(state[2], before[2])


def test_half_life_caps_the_retention():
    logits = torch.tensor([-3.0, 0.0, 5.0, 50.0], requires_grad=True)
    log_gamma = log_retention(logits, 3.9, max_half_life=100.0)
    cap = -math.log(2) / 100
    expected = torch.nn.functional.logsigmoid(logits + 3.9).clamp(max=cap)
    torch.testing.assert_close(log_gamma, expected)
    assert log_gamma[-1].item() == pytest.approx(cap)
    (gradient,) = torch.autograd.grad(log_gamma.sum(), logits)
    assert gradient[0] > 0 and gradient[2:].eq(0).all()
    assert log_retention(logits.bfloat16()).dtype == torch.float32
    assert log_retention(logits.double()).dtype == torch.float64

    inputs, options = make_inputs(tokens=20), {"retention_bias": 60.0, "max_half_life": 5.0}
    inputs[4] = torch.full_like(inputs[4], -1e4)
    state = make_state(2)
    for function in (gated_delta, gated_delta_reference):
        _, final = function(*inputs, initial_state=state, output_final_state=True, **options)
        torch.testing.assert_close(final, state / 16)
    gated_delta_step(*inputs, state_copy := state.clone(), **options)
    torch.testing.assert_close(state_copy, state / 16)


def test_the_rule_itself_decays_then_corrects_then_reads():
    """One head by hand: forget by a half, replace half of what the key says, read after that."""
    half = torch.zeros(1, 1, 1, dtype=torch.float64)
    state = torch.tensor([[[[4.0, 8.0], [2.0, 6.0]]]], dtype=torch.float64)
    key = torch.tensor([3.0, 0.0], dtype=torch.float64).view(1, 1, 1, 2)
    value = torch.tensor([10.0, -1.0], dtype=torch.float64).view(1, 1, 1, 2)
    query = torch.tensor([3.0, 4.0], dtype=torch.float64).view(1, 1, 1, 2)
    # M = [[2, 4], [1, 3]]; u = ([10, -1] - [2, 1]) / 2 = [4, -1]; M = [[6, 4], [0, 3]].
    for function in (gated_delta_reference, gated_delta):
        read, final = function(
            query, key, value, half, half, initial_state=state, output_final_state=True
        )
        torch.testing.assert_close(final, final.new_tensor([[[[6.0, 4.0], [0.0, 3.0]]]]))
        torch.testing.assert_close(read.flatten(), read.new_tensor([6.8, 2.4]))


@pytest.mark.parametrize("scale", [1e-9, 1e6])
def test_only_the_directions_of_queries_and_keys_count(scale):
    query, key, *others = make_inputs(tokens=20)
    expected, _ = gated_delta(query, key, *others)
    for function in (gated_delta, gated_delta_reference):
        torch.testing.assert_close(function(scale * query, scale * key, *others)[0], expected)


def test_a_memory_that_keeps_and_writes_fully_recalls_orthogonal_keys():
    keys = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0][None, :, None]
    values = torch.randn(1, 8, 1, 8, dtype=torch.float64)
    open_gate = torch.full((1, 8, 1), 1e4, dtype=torch.float64)
    _, state = gated_delta(keys, keys, values, open_gate, open_gate, output_final_state=True)
    torch.testing.assert_close(
        torch.einsum("vk,tk->tv", state[0, 0], keys[0, :, 0]), values[0, :, 0]
    )


def test_any_strides_of_inputs_and_gradients():
    inputs, state = make_inputs(tokens=19), make_state(2)

    def shuffled(x):
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    expected, _ = gated_delta(*inputs, initial_state=state)
    strided = [shuffled(x).requires_grad_() for x in inputs]
    actual, _ = gated_delta(*strided, initial_state=shuffled(state))
    torch.testing.assert_close(actual, expected)
    plain = [x.clone().requires_grad_() for x in inputs]
    read, _ = gated_delta_reference(*plain, initial_state=state)
    gradient = torch.randn(8, 4, 19, 2, dtype=torch.float64).permute(3, 2, 1, 0)
    assert_close(
        torch.autograd.grad(actual, strided, gradient), torch.autograd.grad(read, plain, gradient)
    )
    # An expanded gradient, as from a sum.
    assert_close(
        torch.autograd.grad(gated_delta(*strided)[0].sum(), strided),
        torch.autograd.grad(gated_delta_reference(*plain)[0].sum(), plain),
    )


def test_gradients_are_those_of_finite_differences():
    inputs = [x.requires_grad_() for x in make_inputs(batch=1, tokens=5, heads=2, groups=1, dim=3)]
    state = make_state(2, heads=2, dim=3).requires_grad_()
    cu_seqlens = torch.tensor([0, 4, 5])

    def function(*inputs):
        return gated_delta(
            *inputs[:5],
            initial_state=inputs[5],
            cu_seqlens=cu_seqlens,
            output_final_state=True,
            chunk_size=3,
        )

    assert torch.autograd.gradcheck(function, (*inputs, state))


def test_autocast_does_not_round_the_products():
    inputs = make_inputs(tokens=40, dtype=torch.float32)
    expected, final = gated_delta(*inputs, output_final_state=True)
    state = torch.zeros(2, 4, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, autocast_final = gated_delta(*inputs, output_final_state=True)
        reference, _ = gated_delta_reference(*inputs)
        gated_delta_step(*inputs, state)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(autocast_final, final)
    torch.testing.assert_close(reference, expected)
    torch.testing.assert_close(state, final)


def test_meta_tensors_give_shapes():
    inputs = [x.to("meta") for x in make_inputs(tokens=70, dtype=torch.bfloat16)]
    read, state = gated_delta(*inputs, output_final_state=True)
    assert read.shape == (2, 70, 4, 8) and read.dtype == torch.bfloat16
    assert state.shape == (2, 4, 8, 8) and state.dtype == torch.float32


def test_compiles_as_one_graph():
    inputs, lengths = make_inputs(tokens=70, dtype=torch.float32), torch.tensor([70, 3])
    state = make_state(2, dtype=torch.float32)

    def chunked(*inputs):
        return gated_delta(*inputs, initial_state=state, lengths=lengths, output_final_state=True)

    def packed(*inputs):
        cu_seqlens = torch.tensor([0, 50, 70])
        return gated_delta(*(x[:1] for x in inputs), cu_seqlens=cu_seqlens, initial_state=state)[0]

    def step(*inputs):
        memory = state.clone()
        return gated_delta_step(*(x[:, :2] for x in inputs), memory, lengths=lengths), memory

    for function in (chunked, packed, step):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*inputs), function(*inputs))


@pytest.mark.parametrize("function", [gated_delta, gated_delta_reference])
def test_wrong_calls_are_refused_in_one_sentence(function):
    query, key, value, retention, write = make_inputs(tokens=4)
    cu_seqlens = torch.tensor([0, 4])
    with pytest.raises(ValueError, match="must be a multiple of the 3 key/value heads"):
        bad = torch.cat([key, key[:, :, :1]], 2)
        function(query, bad, bad, retention, write)
    with pytest.raises(ValueError, match="need keys and values"):
        function(query, key[:, 1:], value[:, 1:], retention, write)
    with pytest.raises(ValueError, match="write_logits must have the shape"):
        function(query, key, value, retention, write[..., :2])
    with pytest.raises(ValueError, match="one packed row"):
        function(query, key, value, retention, write, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="either cu_seqlens or lengths"):
        one = [x[:1] for x in (query, key, value, retention, write)]
        function(*one, cu_seqlens=cu_seqlens, lengths=torch.tensor([4]))


@pytest.mark.parametrize("backend", ["cuda", "TORCH"])
def test_unknown_backends_are_refused(backend):
    inputs = make_inputs(tokens=2)
    with pytest.raises(ValueError, match="backend"):
        gated_delta(*inputs, backend=backend)
    with pytest.raises(ValueError, match="backend"):
        gated_delta_step(*inputs, make_state(2), backend=backend)
