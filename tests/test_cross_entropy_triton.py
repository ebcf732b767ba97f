# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The soft cap and the cross entropies after it: on the CPU in torch; on a GPU, or with
TRITON_INTERPRET=1, also their kernels."""

import math

import pytest
import torch
import torch.nn.functional as F
from atma.kernels import cross_entropy as module
from atma.kernels.backend import INTERPRETED
from atma.kernels.cross_entropy import (
    capped_cross_entropy,
    capped_cross_entropy_reference,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    soft_cap,
    soft_cap_reference,
)

CAP = 15.0
IS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if IS_CUDA else "cpu"
BACKENDS = ["torch"] + ["triton"] * (IS_CUDA or INTERPRETED)
# The interpreter rounds to bf16 by cutting digits off.
HALF = torch.bfloat16 if IS_CUDA else torch.float16
TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """No element that is left unwritten can pass."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    @torch.no_grad()
    def poison(x):
        return x.fill_(math.nan if x.is_floating_point() else 77)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))


def draw(*shape, seed=0, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)


def labels_of(num_tokens, vocab_size, ignored=(1,)):
    labels = torch.randint(0, vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(3))
    labels[list(ignored)] = -100
    return labels.to(DEVICE)


def run(function, inputs, *rest, **options):
    """The value and the gradients of some multiple of it, in the order of the inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    value = function(*leaves, *rest, **options)
    weight = draw(*value.shape, seed=9).to(value.dtype) + 0.5
    return [value, *torch.autograd.grad((value * weight).sum(), leaves)]


def assert_close(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.isfinite().all()
        assert (one.double() - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("shape", [(3, 7, 11), (2, 40)])
def test_the_cap_is_the_formula_in_double(backend, shape, dtype):
    x = draw(*shape, scale=20.0, dtype=dtype).transpose(0, 1)
    found = run(soft_cap, [x], CAP, backend=backend)
    assert found[0].dtype == dtype and found[0].abs().max() <= CAP
    assert_close(found, run(soft_cap_reference, [x.double()], CAP), TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("vocab_size", [5, 64, 4100])
def test_cross_entropy_of_logits_and_its_gradient(backend, vocab_size, dtype):
    logits, labels = draw(6, vocab_size, scale=9.0, dtype=dtype), labels_of(6, vocab_size)
    found = run(capped_cross_entropy, [logits], labels, CAP, backend=backend)
    expected = run(capped_cross_entropy_reference, [logits.double()], labels, CAP)
    assert found[0].dtype == torch.float32
    assert_close(found, expected, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("used", ["loss", "capped", "both"])
def test_cross_entropy_and_capped_logits_in_one_pass(backend, used, dtype):
    """Both results, and the gradient of either or of both, also at ignored labels."""
    logits, labels = draw(5, 70, scale=9.0, dtype=dtype), labels_of(5, 70)
    weight = draw(5, 70, seed=8)

    def both(x, **options):
        if "backend" in options:
            loss, capped = capped_cross_entropy(x, labels, CAP, return_capped=True, **options)
        else:
            loss = capped_cross_entropy_reference(x, labels, CAP)
            capped = soft_cap_reference(x, CAP)
        parts = {"loss": 0.7 * loss, "capped": (weight.to(x.dtype) * capped).sum()}
        total = parts[used] if used in parts else parts["loss"] + parts["capped"]
        return [loss, capped, *torch.autograd.grad(total, x)]

    found = both(logits.clone().requires_grad_(), backend=backend)
    expected = both(logits.double().requires_grad_())
    assert found[0].dtype == torch.float32 and found[1].dtype == dtype
    assert_close(found, expected, TOLERANCES[dtype])


def test_a_large_cap_bounds_nothing(backend):
    """The sum of e^z is taken relative to the greatest z: 300 does not overflow."""
    logits, labels = draw(4, 33, scale=100.0), labels_of(4, 33, ())
    found = run(capped_cross_entropy, [logits], labels, 1e6, backend=backend)
    assert_close(found, run(capped_cross_entropy_reference, [logits.double()], labels, 1e6), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("chunk_size", [None, 1, 4])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_cross_entropy_and_all_gradients(backend, has_bias, chunk_size, dtype):
    """Chunks of one token, a last chunk that is not full, ignored labels within and at the end."""
    inputs = [draw(7, 12, seed=1, dtype=dtype), draw(37, 12, seed=2, dtype=dtype)]
    inputs += [draw(37, seed=4, dtype=dtype)] * has_bias
    rest = ([] if has_bias else [None]) + [labels_of(7, 37, (1, 6)), CAP]
    found = run(linear_cross_entropy, inputs, *rest, chunk_size=chunk_size, backend=backend)
    expected = run(linear_cross_entropy_reference, [x.double() for x in inputs], *rest)
    assert [x.dtype for x in found] == [torch.float32, *[dtype] * len(inputs)]
    assert_close(found, expected, TOLERANCES[dtype])


def test_chunks_are_summed_in_single_precision(backend):
    """150 equal contributions: summed in half precision, they would stop growing."""
    hidden, weight = draw(1, 8, dtype=HALF).expand(150, 8), draw(16, 8, seed=2, dtype=HALF)
    labels = torch.full((150,), 3, device=DEVICE)
    options = {"chunk_size": 1, "backend": backend}
    found = run(linear_cross_entropy, [hidden, weight], None, labels, CAP, **options)
    inputs = [hidden.double(), weight.double()]
    expected = run(linear_cross_entropy_reference, inputs, None, labels, CAP)
    assert_close(found, expected, TOLERANCES[HALF])


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_only_wanted_gradients_are_computed(backend, wanted, monkeypatch):
    """A frozen head costs no product for its gradient."""
    inputs = [draw(7, 12), draw(37, 12, seed=2), draw(37, seed=4)]
    labels = labels_of(7, 37)
    leaves = [x.clone().requires_grad_() for x in inputs]
    loss = linear_cross_entropy(*leaves, labels, CAP, backend=backend)
    expected = torch.autograd.grad(loss, leaves[wanted])[0]
    sizes = []
    original = module._linear_cross_entropy_op
    monkeypatch.setattr(
        module,
        "_linear_cross_entropy_op",
        lambda *arguments: sizes.append(original(*arguments)) or sizes[-1],
    )
    inputs[wanted].requires_grad_()
    loss = linear_cross_entropy(*inputs, labels, CAP, backend=backend)
    (found,) = torch.autograd.grad(loss, inputs[wanted])
    torch.testing.assert_close(found, expected)
    assert [x.numel() > 0 for x in sizes[0][1:]] == [i == wanted for i in range(3)]
    with torch.no_grad():
        torch.testing.assert_close(
            linear_cross_entropy(*inputs, labels, CAP, backend=backend), loss
        )
    assert not any(x.numel() for x in sizes[1][1:])


def test_a_second_backward_pass_gives_the_same(backend):
    inputs = [draw(7, 12).requires_grad_(), draw(37, 12, seed=2).requires_grad_()]
    labels = labels_of(7, 37)
    logits = F.linear(*inputs)
    for loss in (
        linear_cross_entropy(*inputs, None, labels, CAP, backend=backend),
        capped_cross_entropy(logits, labels, CAP, backend=backend),
    ):
        first = torch.autograd.grad(loss, inputs, retain_graph=True)
        assert all(map(torch.equal, first, torch.autograd.grad(loss, inputs, retain_graph=True)))


def test_all_labels_ignored_is_no_loss(backend):
    inputs = [draw(3, 12), draw(37, 12, seed=2), draw(37, seed=4)]
    found = run(linear_cross_entropy, inputs, labels_of(3, 37, (0, 1, 2)), CAP, backend=backend)
    assert not any(x.any() for x in found)


def test_a_mean_over_no_labels_passes_on_no_gradient(backend):
    inputs = [draw(3, 12), draw(37, 12, seed=2), draw(37, seed=4)]
    leaves = [x.requires_grad_() for x in inputs]
    loss = linear_cross_entropy(*leaves, labels_of(3, 37, (0, 1, 2)), CAP, backend=backend) / 0
    assert loss.isnan() and not any(x.any() for x in torch.autograd.grad(loss, leaves))


def test_no_tokens_are_no_loss(backend):
    logits = draw(0, 37)
    value = linear_cross_entropy(draw(0, 12), draw(37, 12), None, labels_of(0, 37, ()), CAP)
    assert value == 0 == capped_cross_entropy(logits, labels_of(0, 37, ()), CAP)


def test_sums_over_tokens_do_not_overflow_half_precision_before_they_are_divided(backend):
    hidden = draw(4096, 8, dtype=torch.float16)
    hidden[:, 0] = 20
    weight = draw(64, 8, seed=2, dtype=torch.float16, scale=0.02).requires_grad_()
    labels = labels_of(4096, 64, ()).zero_()
    options = {"chunk_size": 512, "backend": backend}
    (linear_cross_entropy(hidden, weight, None, labels, CAP, **options) / 4096).backward()
    assert weight.grad.isfinite().all() and weight.grad.abs().max() > 19


@pytest.mark.parametrize("name", ["capped_cross_entropy", "linear_cross_entropy", "soft_cap"])
def test_a_second_derivative_is_right_or_refused(backend, name):
    logits, labels = draw(5, 37).requires_grad_(), labels_of(5, 37)
    weight = torch.eye(37, device=DEVICE)
    run_of = {
        "capped_cross_entropy": lambda: capped_cross_entropy(logits, labels, CAP, backend=backend),
        "linear_cross_entropy": lambda: linear_cross_entropy(
            logits, weight, None, labels, CAP, backend=backend
        ),
        "soft_cap": lambda: soft_cap(logits, CAP, backend=backend).square().sum(),
    }
    if backend == "torch" and name != "linear_cross_entropy":
        (gradient,) = torch.autograd.grad(run_of[name](), logits, create_graph=True)
        assert torch.autograd.grad(gradient.square().sum(), logits)[0].any()
    else:
        with pytest.raises(RuntimeError, match="once_differentiable|create_graph"):
            (gradient,) = torch.autograd.grad(run_of[name](), logits, create_graph=True)
            (logits.sum() + gradient.square().sum()).backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_multiplies_in_its_dtype_and_keeps_the_weights_precision(backend, dtype):
    inputs = [draw(20, 12), draw(37, 12, seed=2), draw(37, seed=4)]
    labels = labels_of(20, 37)
    expected = run(linear_cross_entropy_reference, [x.double() for x in inputs], labels, CAP)
    with torch.autocast(DEVICE, dtype=dtype):
        found = run(linear_cross_entropy, inputs, labels, CAP, chunk_size=8, backend=backend)
    assert all(x.dtype == torch.float32 for x in found)
    assert_close(found, expected, 2e-2)
    assert (found[0].double() - expected[0]).abs() > 1e-7  # products were rounded
    with pytest.raises(ValueError, match="cast one of them, or use autocast"):
        linear_cross_entropy(inputs[0].to(dtype), *inputs[1:], labels, CAP, backend=backend)


def test_labels_may_be_of_any_integer_type_and_are_checked(backend):
    logits, labels = draw(6, 9), labels_of(6, 9)
    expected = capped_cross_entropy(logits, labels, CAP, backend=backend)
    short = capped_cross_entropy(logits, labels.short(), CAP, backend=backend)
    assert torch.equal(short, expected)
    with pytest.raises(ValueError, match=r"labels must have the shape \[N\]"):
        capped_cross_entropy(logits, labels[:5], CAP, backend=backend)
    with pytest.raises(ValueError, match=r"need a weight \[V, 4\]"):
        linear_cross_entropy(draw(6, 4), draw(9, 5), None, labels, CAP, backend=backend)
    if not IS_CUDA:  # where it would end the process, as torch's own does
        for function in (
            lambda wrong: capped_cross_entropy(logits, wrong, CAP, backend=backend),
            lambda wrong: linear_cross_entropy(
                draw(6, 4), draw(9, 4), None, wrong, CAP, backend=backend
            ),
        ):
            for wrong in (9, -1):
                with pytest.raises((RuntimeError, IndexError)):
                    function(labels.clone().fill_(wrong))


def test_compiles_as_one_graph(backend):
    inputs = [draw(7, 12), draw(37, 12, seed=2), draw(37, seed=4)]
    inputs = [x.requires_grad_() for x in inputs]
    labels = labels_of(7, 37)

    def loss(*inputs):
        logits = F.linear(*inputs)
        return (
            linear_cross_entropy(*inputs, labels, CAP, chunk_size=4, backend=backend)
            + capped_cross_entropy(logits, labels, CAP, backend=backend)
            + soft_cap(logits, CAP, backend=backend).square().sum()
        )

    expected = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), inputs), expected)


def test_operators_follow_the_rules_of_torch(backend):
    tests = ("test_schema", "test_faketensor")
    labels = labels_of(7, 37)
    inputs = draw(7, 12), draw(37, 12, seed=2), draw(37, seed=4)
    for wanted in ([True] * 3, [False] * 3):
        arguments = (*inputs, labels, CAP, -100, torch.float32, 4, backend, wanted)
        torch.library.opcheck(module._linear_cross_entropy_op, arguments, test_utils=tests)
    if backend == "triton":
        logits = F.linear(*inputs)
        for operator, arguments in (
            (module._soft_cap_fwd_op, (logits, CAP)),
            (module._soft_cap_bwd_op, (logits, logits, CAP)),
            (module._cross_entropy_fwd_op, (logits, labels, CAP, -100, True)),
            (module._cross_entropy_fwd_op, (logits, labels, CAP, -100, False)),
            (module._cross_entropy_bwd_op, (logits, labels, logits.sum(), logits, CAP, -100)),
            (module._cross_entropy_bwd_op, (logits, labels, logits.sum(), None, CAP, -100)),
        ):
            torch.library.opcheck(operator, arguments, test_utils=tests)
