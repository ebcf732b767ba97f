# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The kernels of the causal depthwise convolutions against sums written out term by term in fp64:
on a GPU, or with TRITON_INTERPRET=1 on the CPU."""

import math

import pytest
import torch
from atma.kernels.backend import INTERPRETED
from atma.kernels.short_convolution import (
    canon_convolution,
    causal_conv1d,
    causal_conv1d_reference,
    gated_causal_conv1d,
    gated_causal_conv1d_reference,
)

IS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if IS_CUDA else "cpu"
if not (IS_CUDA or INTERPRETED):
    pytest.skip("Triton needs a GPU, or TRITON_INTERPRET=1.", allow_module_level=True)

# The interpreter rounds to bf16 by cutting digits off.
HALF = torch.bfloat16 if IS_CUDA else torch.float16
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * IS_CUDA
# Of outputs and of gradients. The reference gets the rounded inputs.
TOLERANCES = {
    torch.float32: (1e-6, 1e-6),
    torch.bfloat16: (4e-3, 6e-3),
    torch.float16: (5e-4, 8e-4),
}
LENGTHS = [1, 2, 3, 4, 5, 17, 65, 100] + [1000] * IS_CUDA


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """No element that a kernel leaves unwritten can pass."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    @torch.no_grad()
    def poison(x):
        return x.fill_(math.nan if x.is_floating_point() else 77)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))


def draw(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def plain(*inputs, reference=False, **options):
    function = causal_conv1d_reference if reference else causal_conv1d
    return (function(*inputs, **options, **({} if reference else {"backend": "triton"})),)


def gated(*inputs, reference=False, **options):
    function = gated_causal_conv1d_reference if reference else gated_causal_conv1d
    return function(*inputs, **options, **({} if reference else {"backend": "triton"}))


def canon(*inputs, reference=False, initial_states=None, **options):
    """Three streams and their weights."""
    if not reference:
        options["initial_states"] = initial_states
        return canon_convolution(*inputs, backend="triton", **options)
    states = initial_states or [None] * 3
    return tuple(
        causal_conv1d_reference(x, weight, initial_state=state, residual=True, **options)
        for x, weight, state in zip(inputs[:3], inputs[3:], states, strict=True)
    )


def make_inputs(function, batch, tokens, channels, taps, has_state, dtype=torch.float32):
    width = 3 * channels if function is gated else channels
    inputs = [draw(batch, tokens, width, dtype=dtype), draw(channels, taps, seed=1, dtype=dtype)]
    if has_state:
        inputs.append(draw(batch, taps - 1, channels, seed=2, dtype=dtype))
    return inputs


def run(function, inputs, **options):
    """The outputs, and the gradients of a random weighted sum of them."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    if len(leaves) == 3:
        options["initial_state"] = leaves[2]
    outputs = function(*leaves[:2], **options)
    loss = sum((y * draw(*y.shape, seed=5 + i).to(y.dtype)).sum() for i, y in enumerate(outputs))
    return outputs, torch.autograd.grad(loss, leaves, materialize_grads=True)


def assert_close(actual, expected, tolerance):
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape and one.isfinite().all()
        assert (one.double() - other).norm() <= tolerance * other.norm()


def check(function, inputs, **options):
    dtype = inputs[0].dtype
    actual = run(function, inputs, **options)
    expected = run(function, [x.double() for x in inputs], reference=True, **options)
    assert all(y.dtype == dtype for y in actual[0])
    assert all(x.dtype == y.dtype for x, y in zip(actual[1], inputs, strict=True))
    for one, other, tolerance in zip(actual, expected, TOLERANCES[dtype], strict=True):
        assert_close(one, other, tolerance)


@pytest.mark.parametrize("function", [plain, gated])
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_kernels_equal_the_sum_with_all_gradients(tokens, has_state, function):
    taps = 3 if function is gated else 4
    check(function, make_inputs(function, 2, tokens, 24, taps, has_state))


@pytest.mark.parametrize("function", [plain, gated])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [6, 136] + [1024] * IS_CUDA)
def test_any_dtype_and_any_number_of_channels(channels, dtype, function):
    check(function, make_inputs(function, 1, 40, channels, 3, True, dtype))


@pytest.mark.parametrize("taps", [1, 2])
def test_other_numbers_of_taps(taps):
    check(plain, make_inputs(plain, 1, 20, 8, taps, taps > 1), residual=True)


def test_residual_is_added_before_rounding():
    check(plain, make_inputs(plain, 2, 70, 24, 4, True), residual=True)
    check(plain, make_inputs(plain, 2, 70, 24, 4, True, HALF), residual=True)


@pytest.mark.parametrize("function", [plain, gated])
@pytest.mark.parametrize("offsets", [[0, 90], [0, 0, 1, 3, 3, 40, 90, 90], [0, 33, 34, 70]])
def test_packed_documents_do_not_see_each_other(offsets, function):
    """Tokens past the last offset are a document of their own."""
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    inputs = make_inputs(function, 1, 90, 24, 4, False)
    check(function, inputs, cu_seqlens=cu_seqlens)
    whole = function(*inputs, cu_seqlens=cu_seqlens)[0]
    for start, end in zip(offsets, [*offsets[1:], 90], strict=True):
        if end > start:
            alone = function(inputs[0][:, start:end], inputs[1])[0]
            assert torch.equal(whole[:, start:end], alone)


def test_any_split_continues_the_state():
    x, weight = make_inputs(gated, 2, 50, 24, 3, False)
    whole, _ = gated(x, weight)
    state, outputs = torch.zeros(2, 2, 24, device=DEVICE), []
    for piece in x.split([1, 2, 40, 7], dim=1):
        y, conv_input = gated(piece, weight, initial_state=state)
        state = torch.cat([state, conv_input], dim=1)[:, -2:]
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), whole)


@pytest.mark.parametrize(
    "tokens, has_state, offsets",
    [(1, True, None), (70, False, None), (300, True, None), (70, False, [0, 0, 3, 40, 66])],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_one_launch_equals_a_convolution_of_each_stream(tokens, has_state, offsets, dtype):
    """Streams of several widths, none a multiple of the kernels' blocks."""
    batch, widths = 1 if offsets else 2, (152, 24, 24)
    streams = [draw(batch, tokens, c, seed=i, dtype=dtype) for i, c in enumerate(widths)]
    streams[2] = streams[2].mT.contiguous().mT
    weights = [draw(c, 4, seed=3 + i, dtype=dtype) for i, c in enumerate(widths)]
    states = [draw(batch, 3, c, seed=6 + i, dtype=dtype) for i, c in enumerate(widths)] * has_state
    cu_seqlens = None if offsets is None else torch.tensor(offsets, device=DEVICE)
    results = []
    for cast in (dtype, torch.float64):
        leaves = [x.detach().to(cast).requires_grad_() for x in (*streams, *weights, *states)]
        outputs = canon(
            *leaves[:6],
            reference=cast == torch.float64,
            initial_states=leaves[6:] or None,
            cu_seqlens=cu_seqlens,
        )
        gradients = [draw(*y.shape, seed=9).to(dtype).to(cast) for y in outputs]
        results.append([outputs, torch.autograd.grad(outputs, leaves, gradients)])
    for found, expected, tolerance in zip(*results, TOLERANCES[dtype], strict=True):
        assert_close(found, expected, tolerance)


@pytest.mark.parametrize("function", [plain, gated])
def test_any_strides_of_inputs_and_gradients(function):
    inputs = make_inputs(function, 2, 35, 24, 3, True)
    width = inputs[0].shape[2]
    wide = torch.cat([inputs[0], draw(2, 35, 5)], dim=2)
    gradient = draw(24, 35, 2).permute(2, 1, 0)
    expected = None
    for x in (inputs[0], inputs[0].mT.contiguous().mT, wide[..., :width]):
        leaves = [x.detach().requires_grad_(), *(y.detach().requires_grad_() for y in inputs[1:])]
        y = function(*leaves[:2], initial_state=leaves[2])[0]
        results = [
            y,
            *torch.autograd.grad(y, leaves, gradient, retain_graph=True),
            *torch.autograd.grad(y.sum(), leaves),
        ]
        expected = expected or results
        for one, other in zip(results, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_convolutions_input_may_be_all_that_is_used():
    inputs = [x.requires_grad_() for x in make_inputs(gated, 2, 9, 24, 3, False)]
    _, conv_input = gated(*inputs)
    dx, d_weight = torch.autograd.grad(conv_input.sum(), inputs, materialize_grads=True)
    b, _, h = inputs[0].chunk(3, dim=-1)
    assert_close([dx], [torch.cat([h, 0 * h, b], dim=-1).double()], 1e-6)
    assert d_weight.eq(0).all()


def test_weights_may_have_another_dtype():
    x, weight = make_inputs(plain, 2, 40, 24, 4, False)
    x = x.to(HALF)
    (y,), (dx, d_weight) = run(plain, [x, weight])
    assert y.dtype == dx.dtype == HALF and d_weight.dtype == torch.float32
    (expected,), gradients = run(plain, [x.double(), weight.double()], reference=True)
    assert_close([y, dx, d_weight], [expected, *gradients], 6e-3)


def test_results_are_the_same_in_every_run():
    inputs = make_inputs(gated, 2, 70, 24, 3, True)
    first, second = (run(gated, inputs) for _ in range(2))
    for one, other in zip(first[0] + first[1], second[0] + second[1], strict=True):
        assert torch.equal(one, other)


def test_operators_follow_the_rules_of_torch():
    from atma.kernels.short_convolution_triton import causal_conv1d_bwd_op, causal_conv1d_fwd_op

    tests = ("test_schema", "test_faketensor")
    for function in (plain, gated):
        is_gated = function is gated
        arguments = (*make_inputs(function, 2, 9, 24, 3, True), None, False, is_gated)
        for return_input in {is_gated, False}:
            options = (*arguments, return_input)
            torch.library.opcheck(causal_conv1d_fwd_op, options, test_utils=tests)
        y, conv_input = causal_conv1d_fwd_op(*arguments, is_gated)
        arguments = (y, conv_input if is_gated else None, *arguments)
        torch.library.opcheck(causal_conv1d_bwd_op, arguments, test_utils=tests)


def test_training_compiles_as_one_graph():
    inputs = [x.requires_grad_() for x in make_inputs(gated, 1, 40, 24, 3, False)]
    cu_seqlens = torch.tensor([0, 9, 40], device=DEVICE)

    def loss(projected, weight):
        y, conv_input = gated(projected, weight, cu_seqlens=cu_seqlens)
        mixed = causal_conv1d(y, weight, residual=True, backend="triton")
        return mixed.square().sum() + conv_input.sum()

    expected = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), inputs), expected)


def test_the_compiler_may_leave_the_convolutions_input_away():
    """The compiler makes gradients of zeros for results that nobody used: no unwritten ones."""
    inputs = [x.requires_grad_() for x in make_inputs(gated, 1, 40, 24, 3, False)]

    def loss(projected, weight):
        y, conv_input = gated(projected, weight, return_input=False)
        assert conv_input is None
        streams = canon(y, y[..., :8], 2 * y[..., :8], weight, weight[:8], weight[:8])
        return sum(x.square().sum() for x in streams)

    expected = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), inputs), expected)


@pytest.mark.skipif(not IS_CUDA, reason="the interpreter compiles nothing")
def test_a_new_length_compiles_nothing():
    from atma.kernels.short_convolution_triton import (
        causal_conv1d_bwd_kernel,
        causal_conv1d_fwd_kernel,
    )

    def count():
        kernels = (causal_conv1d_fwd_kernel, causal_conv1d_bwd_kernel)
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    run(gated, make_inputs(gated, 2, 100, 64, 3, False))
    before = count()
    for tokens in (1, 15, 16, 17, 32, 33, 1000):
        run(gated, make_inputs(gated, 2, tokens, 64, 3, False))
    assert count() == before


def test_streams_that_do_not_go_together_are_refused():
    streams, taps = [draw(1, 5, 8) for _ in range(3)], [draw(8, 4) for _ in range(3)]
    for inputs in ([*streams, *taps[:2], draw(8, 3)], [*streams[:2], draw(1, 4, 8), *taps]):
        for backend in ("triton", "torch"):
            with pytest.raises(ValueError, match="the same rows and tokens"):
                canon_convolution(*inputs, backend=backend)


@pytest.mark.parametrize("function", [plain, gated, canon])
def test_a_second_derivative_is_refused(function):
    x = draw(1, 5, 24).requires_grad_()
    weights = [draw(24, 3)] * 3 if function is canon else [draw(8 if function is gated else 24, 3)]
    y = function(*([x] * len(weights)), *weights)[0]
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_what_the_kernels_cannot_serve_is_refused_or_left_to_torch():
    inputs = make_inputs(plain, 1, 3, 6, 3, False, torch.float64)
    with pytest.raises(ValueError, match="Triton implementation of causal_conv1d"):
        plain(*inputs)
    assert causal_conv1d(*inputs).dtype == torch.float64
