# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Decoding on a GPU: kernels, decode graph and compiled steps agree with one forward."""

import gc
import os
import statistics
import subprocess
import sys
import time

import pytest
import torch
from atma import AtmaCache, AtmaForCausalLM
from atma.outputs_atma import CACHE_NAME
from transformers.generation import StoppingCriteria

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

GREEDY = {"do_sample": False, "eos_token_id": None}


def relative(actual, expected):
    assert torch.isfinite(actual).all()
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.fixture(scope="module")
def gpu_model(make_model):
    return make_model().cuda()


@pytest.fixture(scope="module")
def draw(tokens):
    return lambda *args, **kwargs: tokens(*args, **kwargs).cuda()


def left_padded(ids, *pads):
    """`ids` [B, T] with as many pads in front of each row as given, and the mask."""
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads):
        ids[row, :count] = mask[row, :count] = 0
    return ids, mask


def graph_of(cache):
    return None if cache.decode_graph is None else cache.decode_graph.graph


def decode(model, ids, mask, prompt, cache=None):
    """Logits of all columns from `prompt` on, one by one on top of a cache, and the cache."""
    cache = AtmaCache(model.config) if cache is None else cache
    with torch.no_grad():
        model(ids[:, :prompt], attention_mask=mask[:, :prompt], **{CACHE_NAME: cache})
        steps = [
            model(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], **{CACHE_NAME: cache}).logits
            for i in range(prompt, ids.shape[1])
        ]
    return torch.cat(steps, 1), cache


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 5e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("static", [False, True])
def test_512_steps_equal_one_forward_at_any_mixture_of_lengths(
    make_model, draw, static, dtype, limit
):
    model = make_model().to("cuda", dtype)
    ids, mask = left_padded(draw(4, 70 + 512), 0, 69, 6, 40)
    capacity = ids.shape[1] if static else None
    found, cache = decode(model, ids, mask, 70, AtmaCache(model.config, max_length=capacity))
    assert graph_of(cache) is not None
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits[:, 70:]
    for row in range(4):
        assert relative(found[row], expected[row]) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_graph_changes_no_token(make_model, draw, dtype):
    """200 greedy tokens, a second call and a third batch size included."""
    model = make_model().to("cuda", dtype)
    for batch in (2, 2, 1, 3):
        ids, mask = left_padded(draw(batch, 21), 9)
        found = []
        for use_graph in (True, False):
            model.config.decode_graph = use_graph
            output = model.generate(
                ids, attention_mask=mask, max_new_tokens=200, return_dict_in_generate=True, **GREEDY
            )
            found.append(output.sequences)
            assert (graph_of(getattr(output, CACHE_NAME)) is not None) is use_graph
        assert torch.equal(*found)


def test_no_step_stalls(gpu_model, draw):
    """No length compiles, captures or allocates anew: 300 tokens from an odd length on."""

    class Clock(StoppingCriteria):
        def __init__(self):
            self.times = []

        def __call__(self, input_ids, scores, **kwargs):
            torch.cuda.synchronize()
            self.times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    gpu_model.generate(draw(2, 40), max_new_tokens=8, **GREEDY)
    for length in (1003, 1017):
        clock = Clock()
        ids = draw(2, length)
        gpu_model.generate(ids, max_new_tokens=300, stopping_criteria=[clock], **GREEDY)
        steps = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
        assert max(steps[3:]) < 10 * statistics.median(steps)


def compiled_variants():
    """How many variants of the decode kernels exist in this process."""
    from atma.kernels import (
        decode_convolution_triton,
        decode_linear_triton,
        gated_delta_step_triton,
        paged_polar_attention_triton,
        pages_triton,
    )

    modules = (
        decode_convolution_triton,
        decode_linear_triton,
        gated_delta_step_triton,
        paged_polar_attention_triton,
        pages_triton,
    )
    kernels = [x for m in modules for x in vars(m).values() if hasattr(x, "device_caches")]
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


def test_no_length_compiles_a_kernel(gpu_model, draw):
    gpu_model.config.decode_graph = False

    def run(length, steps):
        ids = draw(1, length + steps)
        decode(gpu_model, ids, torch.ones_like(ids), length)

    run(100, 40)  # beyond its first pages: kernels have a variant for pools that have grown
    before = compiled_variants()
    for length in (1, 15, 16, 17, 32, 33, *range(1000, 1021)):
        run(length, 2)
    run(2000, 50)
    gpu_model.config.decode_graph = True
    assert compiled_variants() == before


@pytest.mark.parametrize("split", [1, 2, 3, 63, 64, 65, 127, 128])
def test_prefill_and_steps_equal_a_token_loop_in_fp64(make_model, draw, split):
    """Logits and states of the GPU against an fp64 loop over tokens on the CPU."""
    model, exact = make_model().cuda(), make_model(dtype=torch.float64)
    ids = draw(2, split + 4)
    mask = torch.ones_like(ids)
    found, cache = decode(model, ids, mask, split)
    expected, loop = decode(exact, ids.cpu(), mask.cpu(), 1)
    assert relative(found.cpu(), expected[:, split - 1 :]) < 1e-4
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[:, split:]
    assert relative(whole, found) < 1e-4
    for mine, theirs in zip(cache.states(), loop.states(), strict=True):
        assert relative(mine.current.cpu(), theirs.current) < 1e-4


def test_pieces_of_any_size_continue_a_cache(gpu_model, draw):
    ids, mask = left_padded(draw(2, 91), 0, 13)
    cache, found = AtmaCache(gpu_model.config), []
    with torch.no_grad():
        for piece, seen in zip(
            ids.split([1, 2, 3, 5, 16, 64], 1), mask.split([1, 2, 3, 5, 16, 64], 1), strict=True
        ):
            found.append(gpu_model(piece, attention_mask=seen, **{CACHE_NAME: cache}).logits)
        expected = gpu_model(ids, attention_mask=mask, use_cache=False).logits
    assert relative(torch.cat(found, 1)[mask.bool()], expected[mask.bool()]) < 1e-4


@pytest.mark.parametrize("beams", [3, 5])
def test_beams_share_pages_and_keep_their_own_states(gpu_model, draw, beams, close):
    ids, mask = left_padded(draw(2, 150), 60)
    options = {
        "attention_mask": mask,
        "num_beams": beams,
        "num_return_sequences": beams,
        "max_new_tokens": 40,
        "return_dict_in_generate": True,
        "output_scores": True,
        **GREEDY,
    }
    cached = gpu_model.generate(ids, **options)
    whole = gpu_model.generate(ids, use_cache=False, **options)
    assert torch.equal(cached.sequences, whole.sequences)
    close(cached.sequences_scores, whole.sequences_scores)
    pages = getattr(cached, CACHE_NAME).rows.pages
    first = [row[0] for row in pages]
    assert len(set(first[:beams])) == 1 and len(set(first)) == 2


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static", "quantized"])
def test_offloaded_and_quantised_caches_are_refused(gpu_model, draw, kind):
    with pytest.raises(ValueError, match="use the default, or 'static'"):
        gpu_model.generate(draw(1, 4), max_new_tokens=2, cache_implementation=kind, **GREEDY)


def changes():
    """What may happen to a model between two steps of one cache."""

    def in_place(model):
        model.lm_head.weight.data.mul_(1.5)

    def replaced(model):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data * 1.5)

    def moved(model):
        model.cpu(), model.lm_head.weight.data.mul_(1.5), model.cuda()

    def hooked(model):
        model.lm_head.register_forward_hook(lambda module, args, out: out * 1.5)

    def wrapped(model):
        model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Tanh())

    def switched(model):
        model.config.decode_graph = False

    def capped(model):
        model.config.logit_softcap = 3.0

    return [in_place, replaced, moved, hooked, wrapped, switched, capped]


def assert_notices(model, ids, changes):
    """A captured step goes on as an uncaptured one after each of the changes."""
    _, cache = decode(model, ids[:, :20], torch.ones_like(ids), 10)
    for change in changes:
        assert graph_of(cache) is not None
        change(model)
        expected_from = cache.fork()
        with torch.no_grad():
            for i in range(20, 30):
                found = model(ids[:, i : i + 1], **{CACHE_NAME: cache}).logits
                use_graph, model.config.decode_graph = model.config.decode_graph, False
                expected = model(ids[:, i : i + 1], **{CACHE_NAME: expected_from}).logits
                model.config.decode_graph = use_graph
                assert torch.equal(found, expected)
    return cache


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
def test_a_captured_step_notices_what_happens_to_the_model(make_model, draw, change):
    assert_notices(make_model().cuda(), draw(2, 30), [change])


def test_a_captured_step_notices_what_happens_to_its_adapters(make_model, draw):
    peft = pytest.importorskip("peft")
    model, config = make_model().cuda(), peft.LoraConfig(target_modules="all-linear")
    adapted = peft.get_peft_model(model, config)
    adapted.add_adapter("other", peft.LoraConfig(target_modules="all-linear"))
    for name, parameter in adapted.eval().named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    layers = [x for x in model.modules() if hasattr(x, "lora_A") and hasattr(x, "scaling")]
    cache = assert_notices(
        model,
        draw(2, 30),
        [
            lambda _: adapted.set_adapter("other"),
            lambda _: layers[0].scaling.update(other=5.0),
            lambda _: adapted.base_model.disable_adapter_layers(),
            lambda _: adapted.base_model.enable_adapter_layers(),
            lambda _: adapted.merge_adapter(),
            lambda _: adapted.unmerge_adapter(),
            lambda _: adapted.merge_and_unload(),
        ],
    )
    assert graph_of(cache) is not None


class DerivedModel(AtmaForCausalLM):
    """Its forward does something of its own around the model's."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * self.factor
        return outputs


def test_a_derived_model_decodes_as_a_graph(make_model, draw):
    model = make_model().cuda()
    model.__class__, model.factor = DerivedModel, 2.0
    cache = assert_notices(model, draw(2, 30), [lambda x: setattr(x, "factor", 3.0)])
    assert graph_of(cache) is not None


def test_a_captured_step_notices_what_happens_to_its_cache(gpu_model, draw):
    """The cache grows, rows are selected, tokens are dropped, everything is forgotten."""
    ids = draw(2, 400)
    mask = torch.ones_like(ids)
    with torch.no_grad():
        expected = gpu_model(ids, use_cache=False).logits
        found, cache = decode(gpu_model, ids, mask, 10)  # from one page to seven
        assert relative(found, expected[:, 10:]) < 1e-4
        cache.reset()
        found, cache = decode(gpu_model, ids[:, :40], mask, 10, cache)
        assert relative(found, expected[:, 10:40]) < 1e-4
        cache.reorder_cache(torch.tensor([1, 0], device="cuda"))
        for i in range(40, 50):
            step = gpu_model(ids.flip(0)[:, i : i + 1], **{CACHE_NAME: cache}).logits
            assert relative(step, expected.flip(0)[:, i : i + 1]) < 1e-4
        cache.activate_past_recording()
        gpu_model(ids[:, :5], **{CACHE_NAME: cache})
        cache.crop(-5)
        for i in range(50, 60):
            step = gpu_model(ids.flip(0)[:, i : i + 1], **{CACHE_NAME: cache}).logits
            assert relative(step, expected.flip(0)[:, i : i + 1]) < 1e-4


def test_adapters_decode_right(make_model, draw):
    peft = pytest.importorskip("peft")
    ids = draw(2, 12)
    model = make_model().cuda()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear")).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    with_adapter = adapted.generate(input_ids=ids, max_new_tokens=30, **GREEDY)
    whole = adapted.generate(input_ids=ids, max_new_tokens=30, use_cache=False, **GREEDY)
    assert torch.equal(with_adapter, whole)
    with adapted.disable_adapter():
        plain = adapted.generate(input_ids=ids, max_new_tokens=30, **GREEDY)
    assert torch.equal(plain, make_model().cuda().generate(ids, max_new_tokens=30, **GREEDY))
    assert not torch.equal(plain, with_adapter)


def test_a_graph_dies_with_its_cache(gpu_model, draw):
    ids = draw(2, 600)

    def run():
        gpu_model.generate(ids, max_new_tokens=8, **GREEDY)
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    run()
    before = run()
    after = [run() for _ in range(3)]
    assert max(after) <= before, (before, after)


@pytest.mark.parametrize("core", ["nope", "rope"])
def test_softmax_cores_decode_right(make_model, draw, core):
    model = make_model(attention_type=core).cuda()
    ids, mask = left_padded(draw(2, 21), 9)
    options = {"attention_mask": mask, "max_new_tokens": 30, **GREEDY}
    whole = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, **options), whole)


def test_a_static_cache_compiles_once(gpu_model, draw):
    """Fullgraph; nothing compiles from the third step on, and a second call compiles nothing."""
    torch._dynamo.reset()
    frames = torch._dynamo.utils.counters["stats"]
    ids, mask = left_padded(draw(2, 33), 5)

    def run(ids, mask, count):
        return gpu_model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=count,
            cache_implementation="static",
            **GREEDY,
        )

    run(ids, mask, 60)
    before = frames["unique_graphs"]
    assert 0 < before <= 2 and not torch._dynamo.utils.counters["graph_break"]
    found = [run(ids, mask, count) for count in (60, 40)]
    assert frames["unique_graphs"] == before
    for tokens_, count in zip(found, (60, 40), strict=True):
        expected = gpu_model.generate(ids, attention_mask=mask, max_new_tokens=count, **GREEDY)
        assert torch.equal(tokens_, expected)


def test_compiled_steps_keep_what_they_returned(gpu_model, draw):
    """CUDA graphs of the compiler reuse their buffers: a state or logit must not be overwritten."""
    torch._dynamo.reset()
    ids = draw(2, 32)
    mask = torch.ones_like(ids)
    expected, _ = decode(gpu_model, ids, mask, 12)
    cache = AtmaCache(gpu_model.config, max_length=64)
    step = torch.compile(gpu_model, mode="reduce-overhead", fullgraph=True)
    found = []
    with torch.no_grad():
        gpu_model(ids[:, :12], **{CACHE_NAME: cache})
        for i in range(12, 32):
            torch.compiler.cudagraph_mark_step_begin()
            found.append(step(ids[:, i : i + 1], **{CACHE_NAME: cache}).logits.clone())
    assert relative(torch.cat(found, 1), expected) < 1e-4


def test_the_last_pages_of_a_huge_pool_are_reached():
    """Addresses beyond 2^31 elements."""
    from atma.kernels.paged_polar_attention import paged_polar_attention
    from atma.kernels.pages import write_key_value_pages

    shape, dtype = (64, 2, 128), torch.bfloat16
    pages = 2**31 // (64 * 2 * 128) + 40
    huge = [[torch.empty(pages, *shape, dtype=dtype, device="cuda")] for _ in "kv"]
    small = [[torch.zeros(41, *shape, dtype=dtype, device="cuda")] for _ in "kv"]
    generator = torch.Generator("cuda").manual_seed(0)
    key, value = (
        torch.randn(2, 1200, 2, 128, device="cuda", dtype=dtype, generator=generator) for _ in "kv"
    )
    query = torch.randn(2, 1, 8, 128, device="cuda", dtype=dtype, generator=generator)
    scalars = [torch.ones(8, device="cuda")] * 4
    start, last = (torch.full((2,), x, device="cuda") for x in (0, 1199))
    outputs = []
    for slabs, first in ((huge, pages - 40), (small, 1)):
        table = (first + torch.arange(40, device="cuda").flip(0)).view(2, 20).int()
        write_key_value_pages(*slabs, table, key, value, start)
        null = torch.zeros(8, 128, device="cuda")
        outputs.append(paged_polar_attention(query, *slabs, table, last, null, *scalars))
    assert torch.equal(outputs[0].direction, outputs[1].direction)
    assert torch.equal(outputs[0].magnitude, outputs[1].magnitude)


def test_the_same_step_gives_the_same_bits(make_model, draw):
    model = make_model(dtype=torch.bfloat16).cuda()
    ids, mask = left_padded(draw(3, 700), 100)
    _, cache = decode(model, ids, mask, 698)
    for use_graph in (True, False):
        model.config.decode_graph = use_graph
        runs = []
        for _ in range(30):
            fork = cache.fork()
            with torch.no_grad():
                logits = [model(ids[:, :1], **{CACHE_NAME: fork}).logits for _ in range(3)]
            runs.append([*logits, *(x.current for x in fork.states())])
        for run in runs[1:]:
            assert all(torch.equal(x, y) for x, y in zip(runs[0], run, strict=True))


FRESH = """
import hashlib, threading, torch
from atma import AtmaConfig, AtmaForCausalLM
torch.manual_seed(0)
config = AtmaConfig.tiny(zero_init_residual=False)
model = AtmaForCausalLM(config).to("cuda", torch.bfloat16).eval()
ids = torch.randint(1, config.vocab_size, (2, 70)).cuda()
found = [None] * 4

def run(i):
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        steps = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(8)]
    found[i] = torch.cat(steps, 1)

threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert all(torch.equal(found[0], x) for x in found)
print(hashlib.sha256(found[0].float().cpu().numpy().tobytes()).hexdigest())
"""


def test_threads_and_fresh_processes_agree_in_every_bit(tmp_path):
    """Four threads on cold kernels at once; three processes, each compiling anew."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", FRESH],
            env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path / str(i))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(3)
    ]
    hashes = set()
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, errors[-2000:]
        hashes.add(output.split()[-1])
    assert len(hashes) == 1
