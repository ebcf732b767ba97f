# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Norms, gates and the product of the MLP against their formulas in fp64: on the CPU in torch; on a
GPU, or with TRITON_INTERPRET=1, also their kernels."""

import math

import pytest
import torch
from atma.kernels import rms_norm as norms
from atma.kernels import squared_relu as products
from atma.kernels.backend import INTERPRETED
from atma.kernels.rms_norm import add_rms_norm, gated_rms_norm, rms_norm, sigmoid_gate
from atma.kernels.squared_relu import squared_relu_product

IS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if IS_CUDA else "cpu"
BACKENDS = ["torch"] + ["triton"] * (IS_CUDA or INTERPRETED)
# The interpreter rounds to bf16 by cutting digits off.
HALF = torch.bfloat16 if IS_CUDA else torch.float16
TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EPS = 0.1  # large enough that a forgotten one shows


def norm_in_double(x, weight=None, eps=EPS):
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x if weight is None else x * weight


# By name: the operation, its formula, and the shapes of its inputs beside that of x ("w": [D]).
OPERATIONS = {
    "norm": (lambda x, w, **k: rms_norm(x, w, EPS, **k), norm_in_double, "w"),
    "norm of heads": (lambda x, **k: rms_norm(x, None, EPS, **k), norm_in_double, ""),
    "sum and norm": (
        lambda x, u, w, **k: add_rms_norm(x, u, w, EPS, **k),
        lambda x, u, w: (norm_in_double(x + u, w), x + u),
        "xw",
    ),
    "gated norm": (
        lambda x, g, **k: gated_rms_norm(x, g, EPS, **k),
        lambda x, g: norm_in_double(x) * torch.sigmoid(g),
        "x",
    ),
    "gate": (sigmoid_gate, lambda x, g: x * torch.sigmoid(g), "x"),
    "squared ReLU": (squared_relu_product, lambda x, u: x.relu() ** 2 * u, "x"),
}

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """No element that is left unwritten can pass."""
    new_empty = torch.Tensor.new_empty

    def poison(*args, **kwargs):
        x = new_empty(*args, **kwargs)
        with torch.no_grad():
            return x.fill_(math.nan if x.is_floating_point() else 77)

    monkeypatch.setattr(torch.Tensor, "new_empty", poison)


def draw(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def make_inputs(name, shape, dtype=torch.float32):
    shapes = [shape, *(shape if kind == "x" else shape[-1:] for kind in OPERATIONS[name][2])]
    return [draw(*s, seed=i, dtype=dtype) for i, s in enumerate(shapes)]


def run(function, inputs, transpose=False, **options):
    """The outputs, and the gradients of a random weighted sum of them."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*leaves, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [draw(*y.shape, seed=7 + i).to(y.dtype) for i, y in enumerate(outputs)]
    if transpose:
        weights = [w.transpose(0, 1).contiguous().transpose(0, 1) for w in weights]
    return [*outputs, *torch.autograd.grad(outputs, leaves, weights)]


def assert_close(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.isfinite().all()
        assert (one.double() - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 1), (5, 2, 100), (1, 130, 64), (1, 2, 5000)], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_formula_in_double_and_all_gradients(backend, name, shape, dtype):
    inputs = make_inputs(name, shape, dtype)
    found = run(OPERATIONS[name][0], inputs, backend=backend)
    assert all(x.dtype == dtype for x in found)
    expected = run(OPERATIONS[name][1], [x.double() for x in inputs])
    assert_close(found, expected, TOLERANCES[dtype] * (3 if shape[2] == 1 else 1))


@pytest.mark.parametrize("name", OPERATIONS)
def test_any_strides_of_inputs_and_gradients(backend, name):
    inputs = [
        x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() == 3 else x
        for x in make_inputs(name, (4, 3, 20))
    ]
    found = run(OPERATIONS[name][0], inputs, transpose=True, backend=backend)
    assert_close(found, run(OPERATIONS[name][1], [x.double() for x in inputs]), 1e-6)


def test_either_result_of_the_sum_may_go_unused(backend):
    inputs = [x.requires_grad_() for x in make_inputs("sum and norm", (2, 3, 20))]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    for i in range(2):
        found = add_rms_norm(*inputs, EPS, backend=backend)[i].square().sum()
        expected = OPERATIONS["sum and norm"][1](*exact)[i].square().sum()
        used = slice(0, 3 - i)
        grads = torch.autograd.grad(found, inputs[used])
        assert_close(grads, torch.autograd.grad(expected, exact[used]), 1e-6)


@pytest.mark.parametrize("name", ["sum and norm", "norm"])
def test_inputs_of_two_dtypes_promote(backend, name):
    """As under autocast: a residual stream in fp32, an update in half precision."""
    inputs = make_inputs(name, (2, 3, 20))
    inputs[1] = inputs[1].to(HALF) if name == "sum and norm" else inputs[1]
    found = run(OPERATIONS[name][0], inputs, backend=backend)
    expected = run(OPERATIONS[name][1], [x.double() for x in inputs])
    outputs = len(found) - len(inputs)
    assert all(y.dtype == torch.float32 for y in found[:outputs])
    assert [g.dtype for g in found[outputs:]] == [x.dtype for x in inputs]
    for one, other in zip(found, expected, strict=True):
        # Each to the precision of its own dtype.
        assert_close([one], [other], TOLERANCES[one.dtype])


def test_zero_rows_stay_finite(backend):
    x = torch.zeros(3, 16, device=DEVICE, requires_grad=True)
    y = rms_norm(x, backend=backend)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert not y.any() and gradient.isfinite().all() and gradient.all()


def test_the_product_passes_nan_on(backend):
    gate = torch.tensor([math.nan, -1.0, 2.0], device=DEVICE)
    found = squared_relu_product(gate, torch.ones_like(gate), backend=backend)
    assert found.isnan().tolist() == [True, False, False] and found[1:].tolist() == [0.0, 4.0]


@pytest.mark.parametrize("name", OPERATIONS)
def test_compiles_as_one_graph(backend, name):
    torch.compiler.reset()
    inputs = [x.requires_grad_() for x in make_inputs(name, (2, 3, 20))]

    def loss(*inputs):
        outputs = OPERATIONS[name][0](*inputs, backend=backend)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return sum(y.square().sum() for y in outputs)

    expected = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), inputs), expected)


def test_a_second_derivative_is_right_or_refused(backend):
    x = draw(3, 16).requires_grad_()
    functions = [
        lambda: rms_norm(x, backend=backend),
        lambda: squared_relu_product(x, x, backend=backend),
    ]
    for function in functions:
        (gradient,) = torch.autograd.grad(function().square().sum(), x, create_graph=True)
        if backend == "torch":
            assert torch.autograd.grad(gradient.square().sum(), x)[0].any()
        else:
            with pytest.raises(RuntimeError, match="once_differentiable"):
                gradient.square().sum().backward()


def test_wrong_shapes_are_refused(backend):
    x = torch.ones(2, 3, device=DEVICE)
    for call, message in (
        (lambda: rms_norm(x, x[0, :2], backend=backend), r"weight must have the shape \[D\]"),
        (lambda: add_rms_norm(x, x[:1], x[0], EPS, backend=backend), "update must have the shape"),
        (lambda: sigmoid_gate(x, x[:, :1], backend=backend), "gate must have the shape"),
        (lambda: squared_relu_product(x, x[:1], backend=backend), "must have one shape"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_operators_follow_the_rules_of_torch(backend):
    if backend == "torch":
        pytest.skip("formulas, no operators")
    x, update, weight = make_inputs("sum and norm", (2, 3, 20))
    for arguments in ((x, update, weight, None), (x, None, None, update), (x, None, None, None)):
        norms._fwd_op(*arguments, EPS, True)
        for operator, rest in (
            (norms._fwd_op, arguments),
            (norms._bwd_op, (x, *arguments[2:], x, arguments[1])),
        ):
            torch.library.opcheck(
                operator, (*rest, EPS, True), test_utils=("test_schema", "test_faketensor")
            )
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(products._fwd_op, (x, update), test_utils=tests)
    torch.library.opcheck(products._bwd_op, (x, update, x), test_utils=tests)
