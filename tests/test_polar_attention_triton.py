# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Polar attention's kernels against the oracle in fp64: on a GPU, or with TRITON_INTERPRET=1 on the
CPU."""

import copy
import importlib.util
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from atma.kernels import polar_attention as module
from atma.kernels.backend import INTERPRETED
from atma.kernels.polar_attention import polar_attention, polar_attention_reference

IS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if IS_CUDA else "cpu"
if not (IS_CUDA or INTERPRETED):
    pytest.skip("Triton needs a GPU, or TRITON_INTERPRET=1.", allow_module_level=True)

from atma.kernels import polar_attention_tiles as tiles  # noqa: E402

# The interpreter takes bf16 for integers in its products.
HALF = torch.bfloat16 if IS_CUDA else torch.float16
NAMES = (
    "query", "key", "value", "null_value", "length_gain", "null_base", "null_slope",
    "magnitude_gain",
)  # fmt: skip
DOCUMENTS = [0, 0, 1, 41, 41, 42, 75, 75]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """No element that a kernel leaves unwritten can pass."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def poison(x):
        return x.fill_(float("nan") if x.is_floating_point() else 77)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))


def make_inputs(batch, queries, keys, heads, groups, dim, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, dtype=torch.float32):
        x = torch.randn(*shape, generator=generator)
        return x.to(DEVICE, dtype).requires_grad_()

    return [
        random(batch, queries, heads, dim, dtype=dtype),
        random(batch, keys, groups, dim, dtype=dtype),
        random(batch, keys, groups, dim, dtype=dtype),
        random(heads, dim),
        *(random(heads) for _ in range(4)),
    ]


def relative(x, reference, floor=1e-30):
    x, reference = x.double(), reference.double()
    return ((x - reference).norm() / reference.norm().clamp(min=floor)).item()


def outputs_and_gradients(function, inputs, dtype=None, **options):
    output = function(*inputs, return_statistics=True, **options)
    generator = torch.Generator().manual_seed(1)
    loss = 0
    for x in output[:2]:
        # Gradients with odd strides, the same numbers for every precision of the outputs.
        weight = torch.randn(*x.shape[::-1], generator=generator).to(DEVICE, dtype or x.dtype)
        weight = weight.permute(*reversed(range(x.dim()))).to(x.dtype)
        loss = loss + (x * weight).sum(dtype=torch.float64)
    named = dict(zip(("direction", "magnitude"), output[:2], strict=True))
    named |= output.statistics._asdict()
    return named | dict(zip(NAMES, torch.autograd.grad(loss, inputs), strict=True))


def limits(name, dtype):
    """The largest relative error, and the smallest norm that it counts from."""
    if name not in NAMES:
        return (1e-5 if dtype == torch.float32 else 5e-3), 1e-30
    if name in ("length_gain", "null_base", "null_slope"):
        # Per-head sums over all tokens, whose terms have both signs and nearly cancel.
        return (1e-5 if dtype == torch.float32 else 2e-2), 1.0
    return (1e-5 if dtype == torch.float32 else 8e-3), 1e-30


def exact(inputs):
    return [x.detach().double().requires_grad_() for x in inputs]


def assert_same(inputs, **options):
    dtype = inputs[0].dtype
    actual = outputs_and_gradients(polar_attention, inputs, backend="triton", **options)
    expected = outputs_and_gradients(polar_attention_reference, exact(inputs), dtype, **options)
    for name, reference in expected.items():
        assert actual[name].shape == reference.shape
        limit, floor = limits(name, dtype)
        assert relative(actual[name], reference, floor) < limit, name
    for x, name in zip(inputs, NAMES, strict=True):
        assert actual[name].dtype == x.dtype


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("length", [1, 15, 17, 63, 65] + [130, 1000] * IS_CUDA)
def test_kernels_are_the_oracle(length, dtype):
    assert_same(make_inputs(1, length, length, 2, 1, 16, dtype))


@pytest.mark.parametrize("heads, groups", [(1, 1), (3, 1), (6, 2)])
@pytest.mark.parametrize("dim", [16, 40, 80, 256])
def test_any_head_size_and_group(heads, groups, dim):
    if not IS_CUDA and dim > 40 and heads > 1:
        pytest.skip("Slow under the interpreter.")
    length = 130 if IS_CUDA else 20
    assert_same(make_inputs(1, length, length, heads, groups, dim, HALF))


@pytest.mark.parametrize("window", [1, 5, 33, 64, 500])
def test_windows(window):
    assert_same(make_inputs(1, 70, 83, 2, 1, 16), window=window)


@pytest.mark.parametrize("window, dtype", [(None, torch.int32), (7, torch.int64)])
def test_documents(window, dtype):
    offsets = torch.tensor(DOCUMENTS, dtype=dtype, device=DEVICE)
    # Two tokens follow the last document.
    assert_same(make_inputs(1, 77, 77, 2, 1, 16), window=window, cu_seqlens=offsets)


@pytest.mark.parametrize("window", [None, 40])
def test_rows_with_their_own_start(window):
    start = torch.tensor([0, 60, -5], device=DEVICE)
    assert_same(make_inputs(3, 40, 90, 1, 1, 16), window=window, query_start=start)


@pytest.mark.parametrize("keys", [1, 99])
def test_fewer_or_more_keys_than_queries(keys):
    assert_same(make_inputs(1, 50, keys, 2, 1, 16))


def test_no_keys_at_all():
    inputs = make_inputs(1, 20, 0, 2, 1, 16)
    actual = outputs_and_gradients(polar_attention, inputs, backend="triton")
    expected = outputs_and_gradients(polar_attention_reference, exact(inputs))
    for name, x in actual.items():
        torch.testing.assert_close(x.double(), expected[name].double(), rtol=1e-5, atol=1e-5)


def test_no_tokens_and_no_rows():
    for batch, length in ((2, 0), (0, 3)):
        inputs = make_inputs(batch, length, length, 4, 2, 16)
        gradients = outputs_and_gradients(polar_attention, inputs, backend="triton")
        for x, name in zip(inputs, NAMES, strict=True):
            assert gradients[name].shape == x.shape and not gradients[name].any()


def test_a_query_that_sees_nothing_reads_the_null():
    inputs = make_inputs(1, 4, 4, 2, 1, 16)
    output = polar_attention(
        *inputs,
        query_start=torch.tensor([-3], device=DEVICE),
        return_statistics=True,
        backend="triton",
    )
    null = torch.nn.functional.normalize(inputs[3], dim=-1).expand(1, 3, 2, 16)
    torch.testing.assert_close(output.direction[:, :3], null)
    assert (output.magnitude[:, :3] == 0).all() and (output.magnitude[:, 3] > 0).all()
    assert (output.statistics.null_weight[:, :3] == 1).all()
    assert (output.statistics.n_eff[:, :3] == 0).all()


@pytest.mark.parametrize("size", [1e-9, 0.0])
def test_gradients_of_clamped_directions(size):
    """Values so small that |s| < 1e-6 is clamped, in some rows only."""
    inputs = make_inputs(1, 50, 50, 2, 1, 16)
    scale = torch.ones(50, device=DEVICE)
    scale[:35] = size
    inputs[2] = (inputs[2].detach() * scale[:, None, None]).requires_grad_()
    inputs[3] = torch.zeros_like(inputs[3], requires_grad=True)
    assert_same(inputs)


def test_the_magnitude_survives_a_dominant_null():
    inputs = make_inputs(1, 33, 33, 2, 1, 16)
    for index, number in ((4, -5.0), (5, 40.0), (6, -5.0)):
        inputs[index] = torch.full((2,), number, device=DEVICE, requires_grad=True)
    actual = polar_attention(*inputs, backend="triton").magnitude
    reference = exact(inputs)
    expected = polar_attention_reference(*reference).magnitude
    assert 0 < expected.min() and expected.max() < 1e-12
    assert ((actual / expected) - 1).abs().max() < 1e-4
    used = [0, 1, 4, 5, 6, 7]
    gradients = torch.autograd.grad(actual.sum(), [inputs[i] for i in used])
    references = torch.autograd.grad(expected.sum(), [reference[i] for i in used])
    for x, y in zip(gradients, references, strict=True):
        assert relative(x, y) < 1e-4


@pytest.mark.parametrize("scale", [1e-4, 1.0, 6e4])
def test_fp16_gradients_neither_overflow_nor_vanish(scale):
    """A loss scaler multiplies gradients, and so does 1 / |s|."""
    inputs = make_inputs(1, 40, 40, 2, 1, 16, torch.float16)
    for i in (2, 3):
        inputs[i] = (inputs[i].detach() * 1e-3).requires_grad_()
    generator = torch.Generator().manual_seed(1)
    weight = (torch.rand(1, 40, 2, 16, generator=generator) * scale).to(DEVICE, torch.float16)
    reference = exact(inputs)
    output = polar_attention(*inputs, backend="triton").direction
    expected = polar_attention_reference(*reference).direction
    # Those in fp32, which can hold the results.
    gradients = torch.autograd.grad(output, inputs[3:7], weight)
    references = torch.autograd.grad(expected, reference[3:7], weight.double())
    for x, y, name in zip(gradients, references, NAMES[3:7], strict=True):
        assert relative(x, y) < 2e-2, name


def test_strides_change_nothing():
    inputs = make_inputs(1, 20, 20, 4, 2, 16)
    query, key, value = (x.detach() for x in inputs[:3])
    strided = [
        query.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        torch.stack([key, key], -1).flatten(-2)[..., ::2],
        value.transpose(1, 2).contiguous().transpose(1, 2),
    ]
    strided = [x.requires_grad_() for x in strided] + inputs[3:]
    assert not any(x.is_contiguous() for x in strided[:3])

    def gradients(tensors):
        direction, magnitude = polar_attention(*tensors, backend="triton")[:2]
        shuffled = direction.transpose(0, 2).flatten(1).cumsum(1)[:, ::3]
        pieces = [direction[:, ::2, :, 1:3].flatten(), magnitude[..., 1].flatten()]
        loss = shuffled.square().sum() + torch.cat(pieces).norm() + magnitude.sum()
        return torch.autograd.grad(loss, tensors)

    for x, y in zip(gradients(strided), gradients(inputs), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", ["sum", "expand"])
def test_gradients_without_storage_of_their_own(which):
    inputs = make_inputs(1, 20, 20, 2, 1, 16)
    direction = polar_attention(*inputs, backend="triton").direction
    loss = direction.sum() if which == "sum" else direction.mean(1, keepdim=True).sum()
    reference = exact(inputs)
    expected = polar_attention_reference(*reference).direction
    expected = expected.sum() if which == "sum" else expected.mean(1, keepdim=True).sum()
    gradients = torch.autograd.grad(loss, inputs[:4])
    for x, y in zip(gradients, torch.autograd.grad(expected, reference[:4]), strict=True):
        assert relative(x, y) < 1e-5


def test_slices_of_one_projection_are_read_in_place():
    """Query, key and value as views of one buffer, between rows of NaN."""
    projection = torch.full((2, 35, 4 * 16), float("nan"), device=DEVICE)
    plain = make_inputs(2, 33, 33, 2, 1, 16)
    views = [x.unflatten(-1, (-1, 16)) for x in projection[:, 1:-1].split([2 * 16, 16, 16], dim=-1)]
    for view, x in zip(views, plain[:3], strict=True):
        view.copy_(x.detach())
    expected = outputs_and_gradients(polar_attention, plain, backend="triton")
    inputs = [x.detach().requires_grad_() for x in views] + plain[3:]
    for name, x in outputs_and_gradients(polar_attention, inputs, backend="triton").items():
        torch.testing.assert_close(x, expected[name], rtol=0, atol=0)


def test_the_same_call_gives_the_same_bits():
    inputs = make_inputs(1, 40, 40, 2, 1, 16, HALF)
    first, second = (
        outputs_and_gradients(polar_attention, inputs, backend="triton") for _ in range(2)
    )
    for name, x in first.items():
        torch.testing.assert_close(x, second[name], rtol=0, atol=0)


def test_without_gradients_nothing_more_is_written():
    inputs = [x.detach() for x in make_inputs(1, 40, 40, 2, 1, 16, HALF)]
    assert module.polar_fwd_op(*inputs, None, None, None, False)[5].numel() == 0
    output = polar_attention(*inputs, backend="triton")
    assert relative(output.direction, polar_attention_reference(*inputs).direction) < 5e-3


def test_autocast_reads_in_its_dtype():
    inputs = make_inputs(1, 40, 40, 2, 1, 16)
    expected = outputs_and_gradients(polar_attention_reference, exact(inputs))

    def under_autocast(*arguments, **options):
        with torch.autocast(DEVICE, HALF):
            return polar_attention(*arguments, backend="triton", **options)

    for name, x in outputs_and_gradients(under_autocast, inputs).items():
        assert x.dtype == torch.float32
        assert relative(x, expected[name]) < 2e-2, name


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"cu_seqlens": [0, 3, 20]}], ids=str)
def test_it_compiles_as_one_graph(options):
    torch._dynamo.reset()
    options = {k: torch.tensor(v, device=DEVICE) if k[0] == "c" else v for k, v in options.items()}
    compiled = torch.compile(polar_attention, fullgraph=True, backend="aot_eager")
    inputs = make_inputs(1, 20, 20, 2, 1, 16)
    expected = outputs_and_gradients(polar_attention, inputs, backend="triton", **options)
    actual = outputs_and_gradients(compiled, inputs, backend="triton", **options)
    for name, x in actual.items():
        torch.testing.assert_close(x, expected[name])


def test_the_operators_keep_their_promises():
    inputs = [x.detach() for x in make_inputs(1, 8, 9, 2, 1, 16)]
    offsets = torch.tensor([0, 3, 8], device=DEVICE)
    for key_slice, documents in ((slice(None), None), (slice(8), offsets)):
        arguments = [x[:, key_slice] if i in (1, 2) else x for i, x in enumerate(inputs)]
        arguments += [documents, None, 7]
        torch.library.opcheck(module.polar_fwd_op, (*arguments, True))
        direction, magnitude, *saved = module.polar_fwd_op(*arguments, True)
        torch.library.opcheck(
            module.polar_bwd_op, (direction, magnitude, *arguments, direction, *saved)
        )


def test_what_the_kernels_do_not_serve_is_refused():
    for dim, dtype in ((12, torch.float32), (264, torch.float32), (16, torch.float64)):
        query, key, value, *parameters = [x.detach() for x in make_inputs(1, 2, 2, 2, 1, dim)]
        inputs = [x.to(dtype) for x in (query, key, value)] + parameters
        with pytest.raises(ValueError, match="does not exist for these inputs"):
            polar_attention(*inputs, backend="triton")
        assert polar_attention(*inputs).direction.isfinite().all()
    inputs = make_inputs(1, 4, 4, 2, 1, 16)
    with pytest.raises(ValueError, match="window must be at least 1"):
        polar_attention(*inputs, window=0, backend="triton")


def test_the_tuner_rewrites_the_table_and_nothing_else(tmp_path, monkeypatch):
    script = Path(__file__).parents[1] / "scripts" / "tune_polar_attention.py"
    spec = importlib.util.spec_from_file_location("tune_polar_attention", script)
    tuner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tuner)
    original = Path(tiles.__file__).read_text()
    path = tmp_path / "tiles.py"
    path.write_text(original)
    tuner.write_table(path)
    assert path.read_text() == original
    monkeypatch.setattr(tiles, "TILES", copy.deepcopy(tiles.TILES))
    tiles.set_tile("query", (10, 0), (2, 128), (128, 64, 4, 2))
    tuner.write_table(path)
    namespace = {}
    exec(path.read_text(), namespace)
    assert namespace["TILES"] == tiles.TILES
    assert namespace["TILES"]["query"][10, 0] == {(2, 128): (128, 64, 4, 2)}


on_gpu = pytest.mark.skipif(not IS_CUDA, reason="Needs a GPU.")


def compiled_variants():
    """How many kernels of each kind have been compiled so far, by name."""
    from atma.kernels import polar_attention_backward_triton as backward
    from atma.kernels import polar_attention_triton as forward

    kernels = {name: x for file in (forward, backward) for name, x in vars(file).items()}
    kernels = {name: x for name, x in kernels.items() if name.startswith("polar_attention_")}
    return {
        name: sum(len(cache[0]) for cache in x.device_caches.values())
        for name, x in kernels.items()
        if hasattr(x, "device_caches")
    }


@on_gpu
def test_a_new_length_compiles_nothing():
    outputs_and_gradients(polar_attention, make_inputs(1, 33, 33, 2, 1, 16, HALF))
    before = compiled_variants()
    assert len(before) == 5 and all(before.values())
    lengths = (1, 2, 15, 16, 17, 32, 33, 64, *range(1000, 1021))
    for batch, length in itertools.product((1, 2), lengths):
        outputs_and_gradients(polar_attention, make_inputs(batch, length, length, 2, 1, 16, HALF))
    assert compiled_variants() == before


@on_gpu
def test_long_rows_compile_one_forward_more_at_most():
    def run(length):
        outputs_and_gradients(polar_attention, make_inputs(1, length, length, 1, 1, 128, HALF))

    run(33)
    before = compiled_variants()
    for length in (tiles.LONG, tiles.LONG + 1, 3 * tiles.LONG):
        run(length)
    after = compiled_variants()
    assert after.pop("polar_attention_fwd_kernel") <= before.pop("polar_attention_fwd_kernel") + 1
    assert after == before


@on_gpu
@pytest.mark.parametrize("dim", [24, 64, 72, 96, 128, 160])
def test_more_head_sizes(dim):
    assert_same(make_inputs(1, 130, 130, 3, 1, dim, HALF))


@on_gpu
@pytest.mark.parametrize("heads, groups", [(7, 7), (12, 4), (14, 2), (20, 4), (15, 5)])
def test_more_groups(heads, groups):
    assert_same(make_inputs(2, 130, 130, heads, groups, 64, HALF))


@on_gpu
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 100])
def test_nothing_behind_the_end_is_read(length):
    """Tensors at the very end of an allocation of NaN."""
    inputs = make_inputs(1, length, length, 2, 1, 64, HALF)
    expected = outputs_and_gradients(polar_attention, inputs)
    for i, x in enumerate(inputs):
        storage = torch.full((x.numel() + 4096,), float("nan"), dtype=x.dtype, device=DEVICE)
        inputs[i] = storage[-x.numel() :].view(x.shape).copy_(x.detach()).requires_grad_()
    for name, x in outputs_and_gradients(polar_attention, inputs).items():
        torch.testing.assert_close(x, expected[name], rtol=0, atol=0)


def last_rows(inputs, rows, weight, **options):
    """Direction and magnitude of the last rows, and what a loss on them gives query, key, value."""
    direction, magnitude = polar_attention(*inputs, **options)[:2]
    direction, magnitude = direction[:, -rows:], magnitude[:, -rows:]
    loss = (direction * weight).sum() + magnitude.sum()
    return direction, magnitude, *torch.autograd.grad(loss, inputs[:3])


@on_gpu
def test_a_million_tokens():
    """Every key counts: the last rows against the oracle, which takes those rows alone."""
    length, rows = 2**20 + 3, 3
    inputs = make_inputs(1, length, length, 1, 1, 16, HALF)
    inputs[5] = torch.full((1,), -5.0, device=DEVICE)  # a weak null
    weight = torch.randn(1, rows, 1, 16, device=DEVICE, dtype=HALF)
    direction, magnitude, *gradients = last_rows(inputs, rows, weight)
    reference = exact([inputs[0][:, -rows:], *inputs[1:]])
    expected = polar_attention_reference(*reference)
    loss = (expected.direction * weight).sum() + expected.magnitude.sum()
    wanted = torch.autograd.grad(loss, reference[:3])
    assert relative(direction, expected.direction) < 5e-3
    assert relative(magnitude, expected.magnitude) < 5e-3
    assert not gradients[0][:, :-rows].any()
    for x, y in zip((gradients[0][:, -rows:], *gradients[1:]), wanted, strict=True):
        assert relative(x, y) < 8e-3


@on_gpu
def test_more_than_2_31_elements():
    """With a window the last rows are those of a short run over the same slice."""
    length, heads, short, window = 2**20 + 77, 16, 400, 64
    generator = torch.Generator(DEVICE).manual_seed(0)
    query, key, value = (
        torch.randn(
            1, length, n, 128, device=DEVICE, dtype=HALF, generator=generator
        ).requires_grad_()
        for n in (heads, 1, 1)
    )
    assert query.numel() > 2**31
    parameters = make_inputs(1, 1, 1, heads, 1, 128)[3:]
    weight = torch.randn(1, short // 2, heads, 128, device=DEVICE, dtype=HALF)
    found = last_rows([query, key, value, *parameters], short // 2, weight, window=window)
    slices = [x.detach()[:, -short:].requires_grad_() for x in (query, key, value)]
    expected = last_rows([*slices, *parameters], short // 2, weight, window=window)
    for x, y in zip(found, expected, strict=True):
        assert relative(x[:, -y.shape[1] :], y) < 3e-3  # rows fall into other tiles


@on_gpu
@pytest.mark.parametrize("batch, stride", [(1, 2**25 + 8), (2, 2**31 + 64)])
def test_enormous_strides(batch, stride):
    """Rows or sequences so far apart that 32 bits do not count the elements between them."""
    plain = make_inputs(batch, 65, 65, 2, 1, 64, HALF)
    expected = outputs_and_gradients(polar_attention, plain)
    buffer = torch.empty(65 * (2**25 + 8), dtype=HALF, device=DEVICE)
    inputs = plain[:]
    for i, x in enumerate(plain[:3]):
        strides = (0, stride, 64, 1) if batch == 1 else (stride, 256, 64, 1)
        view = buffer.as_strided(x.shape, strides, 128 * i if batch == 1 else 2**16 * i)
        inputs[i] = view.copy_(x.detach()).requires_grad_()
    for name, x in outputs_and_gradients(polar_attention, inputs).items():
        torch.testing.assert_close(x, expected[name], rtol=0, atol=0)


@on_gpu
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_tile_of_the_table_is_deterministic(dim, size, monkeypatch):
    capability = torch.cuda.get_device_capability()
    known = {
        t for table in tiles.TILES.values() for c in table if c <= capability for t in table[c]
    }
    if (size, dim) not in known:
        pytest.skip("The table has no such tile for this device.")
    inputs = make_inputs(2, 300, 300, 4, 2, dim, {2: HALF, 4: torch.float32}[size])
    for long in (0, tiles.LONG):
        monkeypatch.setattr(tiles, "LONG", long)
        first = outputs_and_gradients(polar_attention, inputs)
        for _ in range(29):
            again = outputs_and_gradients(polar_attention, inputs)
            assert all(torch.equal(x, first[name]) for name, x in again.items())


@on_gpu
def test_threads_may_call_it_first_at_the_same_time():
    inputs = make_inputs(1, 100, 100, 2, 1, 104, HALF)  # a head size that no other test compiles

    def run(_):
        return outputs_and_gradients(polar_attention, [x.detach().requires_grad_() for x in inputs])

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(run, range(4))
    for other in others:
        assert all(torch.equal(x, first[name]) for name, x in other.items())
