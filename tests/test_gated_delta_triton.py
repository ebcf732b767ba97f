# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The kernels of the chunked gated delta rule against the loop over tokens in fp64: on a GPU, or
with TRITON_INTERPRET=1 on the CPU."""

import math

import pytest
import torch
from atma.kernels.backend import INTERPRETED
from atma.kernels.gated_delta import gated_delta, gated_delta_reference

IS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if IS_CUDA else "cpu"
if not (IS_CUDA or INTERPRETED):
    pytest.skip("Triton needs a GPU, or TRITON_INTERPRET=1.", allow_module_level=True)


# The interpreter takes bf16 for integers in its products.
HALF = torch.bfloat16 if IS_CUDA else torch.float16
# Of outputs and of gradients.
TOLERANCES = {
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (5e-3, 8e-3),
    torch.float16: (2e-3, 3e-3),
}
LOG_GAMMAS = [0.0, -1e-6, -1.0, -30.0, -100.0, -1e4]
GATES = {"retention_bias": 1.5, "write_bias": 0.3}
NAMES = ["query", "key", "value", "retention_logits", "write_logits", "initial_state"]


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


def make_inputs(batch=1, tokens=40, heads=2, groups=1, dim=16, dtype=torch.float32):
    shapes = [(heads, dim), (groups, dim), (groups, dim), (heads,), (heads,)]
    inputs = [draw(batch, tokens, *s, seed=i, dtype=dtype) for i, s in enumerate(shapes)]
    return [*inputs[:3], 2 * inputs[3], 2 * inputs[4]]


def make_state(states, heads=2, dim=16):
    return draw(states, heads, dim, dim, seed=9)


def triton(*inputs, **options):
    return gated_delta(*inputs, backend="triton", **options)


def run(function, inputs, state=None, real=1.0, **options):
    """Read and final state by name, and the gradients of a random weighted sum of both."""
    leaves = [
        x.detach().clone().requires_grad_() for x in (*inputs, *([state] * (state is not None)))
    ]
    options["initial_state"] = leaves[5] if state is not None else None
    read, final = function(*leaves[:5], output_final_state=True, **options)
    loss = (read * (draw(*read.shape, seed=7) * real).to(read.dtype)).sum()
    loss = loss + (final * draw(*final.shape, seed=8).to(final.dtype)).sum()
    gradients = torch.autograd.grad(loss, leaves)
    return {
        "read": read.detach(),
        "final": final.detach(),
        **dict(zip(NAMES, gradients, strict=False)),
    }


def doubled(inputs):
    return [x.double() for x in inputs]


def error(actual, expected):
    expected = expected.double()
    assert actual.shape == expected.shape and actual.isfinite().all()
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def assert_close(actual, expected, dtype=torch.float32):
    assert actual.keys() == expected.keys()
    for name in actual:
        tolerance = TOLERANCES[dtype][name not in ("read", "final")]
        assert error(actual[name], expected[name]) <= tolerance, name


def check(inputs, state=None, **options):
    dtype = inputs[0].dtype
    actual = run(triton, inputs, state, **options)
    for name, x in zip(NAMES, inputs, strict=False):
        assert actual[name].dtype == x.dtype
    state = None if state is None else state.double()
    assert_close(actual, run(gated_delta_reference, doubled(inputs), state, **options), dtype)
    return actual


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize(
    "tokens", [1, 2, 15, 17, 63, 64, 65, 129, 1000] if IS_CUDA else [1, 33, 65]
)
def test_kernels_equal_the_token_loop_with_all_gradients(tokens, dtype):
    # The errors of a handful of half-precision numbers would not average out.
    batch, heads, groups = (4, 8, 2) if IS_CUDA else (1, 2, 1)
    inputs = make_inputs(batch, tokens, heads, groups, dtype=dtype)
    check(inputs, make_state(batch, heads), **GATES)


@pytest.mark.parametrize("heads, groups", [(3, 1), (6, 2), (1, 1)])
@pytest.mark.parametrize("dim", [16, 24, 40, 64, 72, 96, 128, 160, 256] if IS_CUDA else [24])
def test_any_head_size_and_any_number_of_heads_per_group(heads, groups, dim):
    inputs = make_inputs(2, 70 if IS_CUDA else 20, heads, groups, dim, dtype=HALF)
    check(inputs, make_state(2, heads, dim), **GATES)


@pytest.mark.skipif(not IS_CUDA, reason="many heads are slow in the interpreter")
@pytest.mark.parametrize("heads", [8, 32, 64])
@pytest.mark.parametrize("dim", [32, 128])
def test_few_and_many_sequences(heads, dim):
    """The scans choose their blocks of values by the number of sequences."""
    inputs = make_inputs(1, 200, heads, heads // 4, dim, dtype=HALF)
    check(inputs, make_state(1, heads, dim), **GATES)


@pytest.mark.skipif(not IS_CUDA, reason="64 rows of 128 columns are slow in the interpreter")
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_single_precision_at_large_heads(dim):
    check(make_inputs(2, 70, 4, 2, dim), make_state(2, 4, dim), **GATES)


def test_any_decay_and_any_write_strength_are_exact():
    """Every head has its own decay, the last a mixture, and writes nothing, half or all."""
    tokens, decays = 38, len(LOG_GAMMAS) + 1
    inputs = make_inputs(tokens=tokens, heads=3 * decays)
    x = torch.tensor(LOG_GAMMAS, dtype=torch.float64, device=DEVICE)
    mixed = torch.randint(6, (tokens,), generator=torch.Generator().manual_seed(3))
    log_gamma = torch.cat([x.expand(tokens, -1), x[mixed.to(DEVICE)][:, None]], dim=1)
    logits = torch.where(
        log_gamma < -50, log_gamma, -torch.log(torch.expm1(-log_gamma.clamp(-50, -1e-30)))
    )
    inputs[3] = logits.repeat(1, 3)[None].float()
    inputs[4] = torch.tensor([-1e4, 0.0, 1e4], device=DEVICE).repeat_interleave(decays)
    inputs[4] = inputs[4].expand(1, tokens, -1).clone()
    inputs[1][:, 5:7] = 0.0
    inputs[1][:, 10:30] = inputs[1][:, 10:11]
    state = make_state(1, 3 * decays)
    actual = run(triton, inputs, state)
    expected = run(gated_delta_reference, doubled(inputs), state.double())
    # The gradients of the zero keys are those of x / 1e-12: they are compared by themselves.
    for parts in (actual, expected):
        parts["zero keys"] = parts["key"][:, 5:7].clone()
        parts["key"][:, 5:7] = 0.0
    for name in ("key", "value", "zero keys"):
        assert error(actual.pop(name), expected.pop(name)) <= 1e-5, name
    for name in actual:
        head = 1 if name in ("final", "initial_state") else 2
        for one, other in zip(actual[name].unbind(head), expected[name].unbind(head), strict=True):
            assert one.isfinite().all()
            assert (one.double() - other).norm() <= 1e-5 * other.norm() + 1e-30, name


def test_strong_decay_does_not_blur_the_tokens_after_it():
    inputs = make_inputs(tokens=32)
    inputs[3].fill_(4.6)
    inputs[3][:, 5:15] = -1e4
    expected, _ = gated_delta_reference(*doubled(inputs))
    actual, _ = triton(*inputs)
    assert error(actual[:, 15:], expected[:, 15:]) < 2e-6


@pytest.mark.skipif(not IS_CUDA, reason="bf16 needs a GPU")
def test_gate_gradients_keep_their_precision_at_strong_decay():
    inputs = make_inputs(2, 200, 4, 2, 128, dtype=HALF)
    inputs[3] = torch.full_like(inputs[3], -5.0)
    actual = run(triton, inputs)["retention_logits"]
    expected = run(gated_delta_reference, doubled(inputs))["retention_logits"]
    assert error(actual, expected) < 8e-3
    assert actual[:, 0].abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.parametrize("offsets", [[0, 0, 1, 34, 34, 40], [0, 20, 33]])
def test_packed_documents_do_not_see_each_other(offsets):
    """Documents of no and of one token, too; tokens past the last offset are padding."""
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    real = (torch.arange(40, device=DEVICE) < offsets[-1]).float()[None, :, None, None]
    inputs, state = make_inputs(), make_state(len(offsets) - 1)
    options = {"cu_seqlens": cu_seqlens, "real": real, **GATES}
    actual = run(triton, inputs, state, **options)
    expected = run(gated_delta_reference, doubled(inputs), state.double(), **options)
    assert actual["read"].isfinite().all()
    actual["read"], expected["read"] = actual["read"] * real, expected["read"] * real
    assert_close(actual, expected)
    # What happens in the other documents does not move the last one by one bit.
    others = [x.clone() for x in inputs]
    for x in others:
        x[:, : offsets[-2]] += 1.0
    read, _ = triton(*others, cu_seqlens=cu_seqlens, initial_state=state, **GATES)
    last = slice(offsets[-2], offsets[-1])
    assert torch.equal(read[:, last], actual["read"][:, last])


def test_padding_leaves_no_trace():
    inputs, state = make_inputs(batch=3), make_state(3)
    lengths = torch.tensor([40, 13, 0], device=DEVICE)
    real = (torch.arange(40, device=DEVICE) < lengths[:, None]).float()[..., None, None]
    options = {"lengths": lengths, "real": real, **GATES}
    actual = run(triton, inputs, state, **options)
    assert actual["read"].isfinite().all()
    assert torch.equal(actual["final"][2], state[2])
    expected = run(gated_delta_reference, doubled(inputs), state.double(), **options)
    actual["read"], expected["read"] = actual["read"] * real, expected["read"] * real
    assert_close(actual, expected)


def test_half_life_caps_the_retention():
    check(make_inputs(tokens=34), make_state(1), max_half_life=3.0, **GATES)


def test_any_split_continues_the_state():
    inputs = make_inputs()
    whole, last = triton(*inputs, output_final_state=True)
    reads, state = [], None
    for piece in zip(*(x.split([1, 32, 7], dim=1) for x in inputs), strict=True):
        read, state = triton(*piece, initial_state=state, output_final_state=True)
        reads.append(read)
    assert error(torch.cat(reads, 1), whole) < 1e-5 and error(state, last) < 1e-5
    assert triton(*inputs)[1] is None


def test_any_strides_of_inputs_and_gradients():
    inputs, state = make_inputs(batch=2, tokens=19), make_state(2)

    def shuffled(x):
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    joined = torch.cat([x.flatten(2) for x in inputs], dim=2)
    sliced = joined.split([x[0, 0].numel() for x in inputs], dim=2)
    sliced = [x.view(y.shape) for x, y in zip(sliced, inputs, strict=True)]
    gradient = draw(16, 2, 19, 2).permute(3, 2, 1, 0)
    expected = None
    for variant in (inputs, [shuffled(x) for x in inputs], sliced):
        leaves = [x.detach().requires_grad_() for x in variant]
        read, _ = triton(*leaves, initial_state=shuffled(state))
        results = [
            read,
            *torch.autograd.grad(read, leaves, gradient, retain_graph=True),
            *torch.autograd.grad(read.sum(), leaves),
        ]
        expected = expected or results
        for one, other in zip(results, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("used", ["read", "final"])
def test_either_result_may_go_unused(used):
    inputs = make_inputs(tokens=20)
    gradients = []
    for function, scale in ((triton, torch.float32), (gated_delta_reference, torch.float64)):
        leaves = [x.to(scale).requires_grad_() for x in inputs]
        read, final = function(*leaves, output_final_state=True, **GATES)
        loss = read.sum() if used == "read" else final.sum()
        gradients.append(torch.autograd.grad(loss, leaves, materialize_grads=True))
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-7


def test_results_are_the_same_in_every_run():
    inputs, state = make_inputs(tokens=34, dtype=HALF), make_state(1)
    first, second = (run(triton, inputs, state) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_inputs_of_several_dtypes_are_computed_in_the_widest():
    inputs = make_inputs(tokens=20)
    inputs[0], inputs[3] = inputs[0].half(), inputs[3].half()
    actual = run(triton, inputs)
    expected = run(gated_delta_reference, doubled(inputs))
    assert actual["read"].dtype == torch.float16 and actual["query"].dtype == torch.float16
    assert_close(actual, expected, torch.float16)


@pytest.mark.skipif(not IS_CUDA, reason="the interpreter has no products in bf16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_multiplies_in_its_dtype_and_returns_that_of_the_inputs(dtype):
    inputs = make_inputs(2, 100, 4, 2, 64)
    with torch.autocast("cuda", dtype=dtype):
        actual = run(triton, inputs)
    assert all(x.dtype == torch.float32 for x in actual.values())
    assert_close(actual, run(gated_delta_reference, doubled(inputs)), torch.bfloat16)


def test_operators_follow_the_rules_of_torch():
    from atma.kernels.gated_delta_triton import gated_delta_bwd_op, gated_delta_fwd_op

    query, key, value, retention, write = make_inputs(tokens=20)
    options = (make_state(1), None, None, 1.5, 0.3, 5.0, True)
    arguments = (query, key, value, retention, write, *options)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(gated_delta_fwd_op, arguments, test_utils=tests)
    read, final, *kept = gated_delta_fwd_op(*arguments)
    arguments = (query, key, value, read, final, None, None, *kept, True)
    torch.library.opcheck(gated_delta_bwd_op, arguments, test_utils=tests)


@pytest.mark.parametrize("has_final", [True, False])
def test_training_compiles_as_one_graph(has_final):
    """The compiler makes a gradient, an empty one, of a final state that was not asked for."""
    torch.compiler.reset()
    inputs, state = make_inputs(tokens=20), make_state(2)
    cu_seqlens = torch.tensor([0, 9, 20], device=DEVICE)

    def loss(*inputs):
        options = {"cu_seqlens": cu_seqlens, "output_final_state": has_final}
        read, final = triton(*inputs[:5], initial_state=inputs[5], **options)
        return read.square().sum() + (final.sum() if has_final else 0)

    leaves = [x.requires_grad_() for x in (*inputs, state)]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_recomputes_the_same(use_reentrant):
    inputs = [x.requires_grad_() for x in make_inputs(tokens=20)]
    expected = torch.autograd.grad(triton(*inputs)[0].sum(), inputs)
    for x in inputs:
        x.grad = None
    read = torch.utils.checkpoint.checkpoint(
        lambda *x: triton(*x)[0], *inputs, use_reentrant=use_reentrant
    )
    read.sum().backward()
    assert all(torch.equal(x.grad, y) for x, y in zip(inputs, expected, strict=True))


@pytest.mark.skipif(not IS_CUDA, reason="the interpreter compiles nothing")
def test_a_new_length_compiles_nothing():
    from atma.kernels import gated_delta_backward_triton, gated_delta_forward_triton

    kernels = [
        kernel
        for module in (gated_delta_forward_triton, gated_delta_backward_triton)
        for name, kernel in vars(module).items()
        if name.endswith("_kernel")
    ]

    def count():
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    run(triton, make_inputs(tokens=100, dtype=HALF))
    before = count()
    for tokens in (1, 15, 16, 17, 32, 33, 64, 200, 1000):
        run(triton, make_inputs(tokens=tokens, dtype=HALF))
    assert count() == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_on_the_device_of_their_inputs():
    inputs = make_inputs(dtype=HALF)
    expected = run(triton, inputs)
    with torch.cuda.device(0):
        actual = run(triton, [x.to("cuda:1") for x in inputs])
        assert torch.cuda.current_device() == 0
    assert all(torch.equal(actual[name].cpu(), expected[name].cpu()) for name in actual)


@pytest.mark.parametrize("dtype, dim", [(torch.float64, 16), (torch.float32, 12), (HALF, 264)])
def test_what_the_kernels_cannot_serve_is_refused_or_left_to_torch(dtype, dim):
    inputs = make_inputs(tokens=3, dim=dim, dtype=dtype)
    with pytest.raises(ValueError, match="Triton implementation of gated_delta"):
        triton(*inputs)
    assert gated_delta(*inputs)[0].dtype == dtype
