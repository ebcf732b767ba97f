# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The causal depthwise convolutions against sums written out term by term, and their state."""

import pytest
import torch
from atma.kernels.short_convolution import (
    causal_conv1d,
    causal_conv1d_reference,
    gated_causal_conv1d,
    gated_causal_conv1d_reference,
    shift_window,
    shift_window_reference,
)

LENGTHS = [1, 2, 3, 4, 5, 17, 65]


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def run(function, *inputs, **options):
    """The outputs of function(x, weight[, initial_state]) and the gradients of a weighted sum."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    if len(leaves) == 3:
        options["initial_state"] = leaves[2]
    outputs = function(*leaves[:2], **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum((y * draw(*y.shape, seed=5, dtype=y.dtype)).sum() for y in outputs)
    return [
        *(y.detach() for y in outputs),
        *torch.autograd.grad(loss, leaves, materialize_grads=True),
    ]


def assert_all_close(actual, expected, **tolerances):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerances)


@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("residual", [False, True])
def test_convolution_equals_its_sum_with_all_gradients(tokens, taps, residual):
    inputs = [draw(2, tokens, 6), draw(6, taps, seed=1), draw(2, taps - 1, 6, seed=2)]
    for some in (inputs, inputs[:2]):
        actual = run(causal_conv1d, *some, residual=residual)
        assert_all_close(actual, run(causal_conv1d_reference, *some, residual=residual))


@pytest.mark.parametrize("tokens", LENGTHS)
def test_gated_convolution_equals_its_sum_with_all_gradients(tokens):
    inputs = [draw(2, tokens, 18), draw(6, 3, seed=1), draw(2, 2, 6, seed=2)]
    for some in (inputs, inputs[:2]):
        actual = run(gated_causal_conv1d, *some)
        assert_all_close(actual, run(gated_causal_conv1d_reference, *some))


def test_the_last_tap_multiplies_the_current_input():
    x = torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(1, 4, 1)
    weight = torch.tensor([[3.0, 2.0, 1.0]])
    state = torch.tensor([5.0, 7.0]).view(1, 2, 1)
    for function in (causal_conv1d, causal_conv1d_reference):
        assert function(x, weight).flatten().tolist() == [1, 12, 123, 1230]
        with_state = function(x, weight, initial_state=state)
        assert with_state.flatten().tolist() == [1 + 14 + 15, 12 + 21, 123, 1230]
        assert function(x, weight, residual=True).flatten().tolist() == [2, 22, 223, 2230]
    projected = torch.cat([2 * torch.ones_like(x), 0.5 * torch.ones_like(x), x], dim=-1)
    for function in (gated_causal_conv1d, gated_causal_conv1d_reference):
        y, conv_input = function(projected, weight)
        assert y.flatten().tolist() == [1, 12, 123, 1230]
        assert conv_input.flatten().tolist() == [2, 20, 200, 2000]


@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize("offsets", [[0, 12], [0, 0, 1, 3, 3, 4, 12, 12], [0, 5, 7]])
def test_packed_documents_equal_each_document_alone(offsets, taps):
    x, weight, cu_seqlens = draw(1, 12, 6), draw(6, taps, seed=1), torch.tensor(offsets)
    options = {"cu_seqlens": cu_seqlens, "residual": True}
    actual = run(causal_conv1d, x, weight, **options)
    assert_all_close(actual, run(causal_conv1d_reference, x, weight, **options))
    projected = draw(1, 12, 18, seed=3)
    gated = run(gated_causal_conv1d, projected, weight, cu_seqlens=cu_seqlens.int())
    expected = run(gated_causal_conv1d_reference, projected, weight, cu_seqlens=cu_seqlens)
    assert_all_close(gated, expected)
    for start, end in zip(offsets, offsets[1:], strict=False):
        alone = causal_conv1d(x[:, start:end], weight, residual=True)
        torch.testing.assert_close(actual[0][:, start:end], alone)
        alone, _ = gated_causal_conv1d(projected[:, start:end], weight)
        torch.testing.assert_close(gated[0][:, start:end], alone)


def test_other_documents_cannot_be_seen_even_when_they_are_not_finite():
    x, weight = draw(1, 8, 6), draw(6, 4, seed=1)
    x[:, :3] = torch.nan
    y = causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 3, 8]))
    torch.testing.assert_close(y[:, 3:], causal_conv1d(x[:, 3:], weight))


@pytest.mark.parametrize("pieces", [[1] * 12, [1, 2, 3, 5, 1], [12], [11, 1], [2, 10]])
def test_any_split_continues_the_state_with_the_same_gradients(pieces):
    projected, weight = draw(2, 12, 18).requires_grad_(), draw(6, 4, seed=1).requires_grad_()
    whole, inputs = gated_causal_conv1d(projected, weight)
    window = torch.zeros(2, 3, 6, dtype=torch.float64)
    outputs = []
    for piece in projected.split(pieces, dim=1):
        y, conv_input = gated_causal_conv1d(piece, weight, initial_state=window)
        window = shift_window(window, conv_input)
        outputs.append(y)
    split = torch.cat(outputs, dim=1)
    torch.testing.assert_close(split, whole)
    torch.testing.assert_close(window, inputs[:, -3:])
    gradient = draw(2, 12, 6, seed=4)
    assert_all_close(
        torch.autograd.grad(split, (projected, weight), gradient),
        torch.autograd.grad(whole, (projected, weight), gradient),
    )


@pytest.mark.parametrize("width", [0, 1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_window_keeps_the_last_real_inputs(tokens, width):
    window, x = draw(4, width, 6), draw(4, tokens, 6, seed=1)
    for lengths in (None, torch.tensor([tokens, 1, 0, tokens // 2])):
        actual = run(lambda window, x, n=lengths: shift_window(window, x, n), window, x)
        expected = run(lambda window, x, n=lengths: shift_window_reference(window, x, n), window, x)
        assert_all_close(actual, expected)
        kept = shift_window(window, x, lengths)
        assert kept.untyped_storage().nbytes() == kept.nbytes
        if width:
            addresses = {t.untyped_storage().data_ptr() for t in (kept, window, x)}
            assert len(addresses) == 3
    assert shift_window(window.float(), x).dtype == torch.float32


def test_padded_rows_continue_like_unpadded_ones():
    x, weight = draw(3, 9, 6), draw(6, 4, seed=1)
    lengths = torch.tensor([9, 4, 0])
    window = shift_window(draw(3, 3, 6, seed=2), x, lengths)
    following = causal_conv1d(draw(3, 2, 6, seed=3), weight, initial_state=window)
    before = torch.cat([draw(3, 3, 6, seed=2), x], dim=1)
    for b, length in enumerate(lengths.tolist()):
        row = torch.cat([before[b, : 3 + length], draw(3, 2, 6, seed=3)[b]])[None]
        torch.testing.assert_close(following[b], causal_conv1d(row, weight)[0, -2:])


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_half_precision_is_summed_in_single(weight_dtype):
    x = draw(2, 33, 6, dtype=torch.bfloat16)
    weight = draw(6, 4, seed=1, dtype=weight_dtype)
    state = draw(2, 3, 6, seed=2, dtype=torch.bfloat16)
    expected = causal_conv1d_reference(
        x.double(), weight.double(), initial_state=state.double(), residual=True
    )
    for function in (causal_conv1d, causal_conv1d_reference):
        y = function(x, weight, initial_state=state, residual=True)
        # Nothing but the result is rounded.
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-5)
    actual = run(causal_conv1d, x, weight, state)
    expected = run(causal_conv1d_reference, x.double(), weight.double(), state.double())
    for one, other in zip(actual[1:], expected[1:], strict=True):
        assert (one.double() - other).norm() < 8e-3 * other.norm()

    projected = draw(2, 33, 18, dtype=torch.bfloat16)
    y, conv_input = gated_causal_conv1d(projected, weight)
    assert y.dtype == conv_input.dtype == torch.bfloat16
    gate = projected[..., 6:12].double()
    expected = gate * causal_conv1d_reference(conv_input.double(), weight.double())
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(y, gated_causal_conv1d_reference(projected, weight)[0])


def test_any_strides_of_inputs_and_gradients():
    x, weight = draw(6, 9, 2).permute(2, 1, 0), draw(4, 6, seed=1).t()
    state, gradient = draw(6, 2, 3, seed=2).permute(1, 2, 0), draw(9, 6, 2, seed=3).permute(2, 0, 1)
    results = []
    for prepare in (lambda t: t, torch.Tensor.contiguous):
        leaves = [prepare(t).detach().requires_grad_() for t in (x, weight, state)]
        y = causal_conv1d(*leaves[:2], initial_state=leaves[2])
        sums = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
        results.append([y, *torch.autograd.grad(y, leaves, prepare(gradient)), *sums])
    assert_all_close(*results)


def test_gradients_are_those_of_finite_differences():
    inputs = [draw(2, 4, 9), draw(3, 3, seed=1), draw(2, 2, 3, seed=2)]

    def function(projected, weight, state):
        y, conv_input = gated_causal_conv1d(projected, weight, initial_state=state)
        return causal_conv1d(y, weight, residual=True), shift_window(state, conv_input)

    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in inputs])


def test_compiles_as_one_graph():
    projected, weight = draw(2, 7, 18, dtype=torch.float32), draw(6, 3, dtype=torch.float32)
    window, lengths = draw(2, 2, 6, dtype=torch.float32), torch.tensor([7, 1])

    def cached(projected):
        y, conv_input = gated_causal_conv1d(projected, weight, initial_state=window)
        return causal_conv1d(y, weight, residual=True), shift_window(window, conv_input, lengths)

    def packed(projected):
        return gated_causal_conv1d(projected[:1], weight, cu_seqlens=torch.tensor([0, 3, 7]))

    for function in (cached, packed):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert_all_close(compiled(projected), function(projected))


def test_meta_tensors_give_shapes():
    y, conv_input = gated_causal_conv1d(torch.empty(2, 7, 18, device="meta"), draw(6, 3).to("meta"))
    assert y.shape == conv_input.shape == (2, 7, 6)


@pytest.mark.parametrize(
    "function, channels",
    [
        (causal_conv1d, 6),
        (causal_conv1d_reference, 6),
        (gated_causal_conv1d, 18),
        (gated_causal_conv1d_reference, 18),
    ],
)
def test_wrong_calls_are_refused_in_one_sentence(function, channels):
    x, weight, cu_seqlens = draw(1, 5, channels), draw(6, 4), torch.tensor([0, 5])
    with pytest.raises(ValueError, match="either cu_seqlens or initial_state"):
        function(x, weight, initial_state=draw(1, 3, 6), cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="one packed row"):
        function(x.expand(2, -1, -1), weight, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="initial state must have the shape"):
        function(x, weight, initial_state=draw(1, 4, 6))
    with pytest.raises(ValueError, match="needs a weight of shape"):
        function(x, weight[:5])


@pytest.mark.parametrize("backend", ["cuda", "TORCH"])
def test_unknown_backends_are_refused(backend):
    with pytest.raises(ValueError, match="backend"):
        causal_conv1d(draw(1, 2, 6), draw(6, 3), backend=backend)
    with pytest.raises(ValueError, match="backend"):
        gated_causal_conv1d(draw(1, 2, 18), draw(6, 3), backend=backend)
