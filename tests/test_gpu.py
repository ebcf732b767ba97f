# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Training and long contexts on a GPU: the promises of the CPU tests, with the kernels in place."""

import copy

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

GREEDY = {"do_sample": False, "eos_token_id": None}
CORES = ["polar", "nope", "rope"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def relative(actual, expected) -> float:
    assert torch.isfinite(actual).all()
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def gradients(model) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same_gradients(found, expected, tolerance=5e-3):
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        difference = (gradient.double() - expected[name].double()).norm()
        assert difference <= tolerance * expected[name].double().norm(), name


@pytest.fixture(scope="module")
def build(make_model):
    return lambda **overrides: make_model(**overrides).cuda()


@pytest.fixture(scope="module")
def draw(tokens):
    return lambda *args, **kwargs: tokens(*args, **kwargs).cuda()


def padded_batch(draw):
    """A padded row, a whole row and a row of padding alone; ids, mask and labels."""
    ids = draw(3, 70)
    mask = torch.ones_like(ids)
    mask[0, :23] = mask[2] = 0
    return ids, mask, ids.masked_fill(mask == 0, -100)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("core", CORES)
def test_padding_alone_stays_finite_and_leaves_no_trace(build, draw, core, dtype):
    model = build(attention_type=core, dtype=dtype).train()
    ids, mask, labels = padded_batch(draw)
    output = model(ids, attention_mask=mask, labels=labels)
    assert torch.isfinite(output.logits).all()
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    assert relative(output.logits[0, 23:], model(ids[:1, 23:]).logits[0]) <= tolerance
    output.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_packed_documents_equal_documents_alone(build, draw, core, checkpointing):
    model = build(attention_type=core).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    docs = [draw(n, seed=i) for i, n in enumerate((13, 1, 2, 97))]
    ids = torch.cat(docs)[None]
    position_ids = torch.cat([torch.arange(len(d)) for d in docs])[None].cuda()
    logits = model(ids, position_ids=position_ids).logits
    logits.square().sum().backward()
    packed = gradients(model)
    alone = [model(d[None]).logits for d in docs]
    sum(x.square().sum() for x in alone).backward()
    assert relative(logits, torch.cat(alone, 1)) <= 1e-3
    assert_same_gradients(packed, gradients(model))
    changed = ids.clone()
    changed[0, 3] = changed[0, 3] % 100 + 1
    moved = model(changed, position_ids=position_ids).logits
    assert not torch.equal(moved[0, 3:13], logits[0, 3:13])
    assert torch.equal(moved[0, 13:], logits[0, 13:])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_gradient(build, draw, reentrant):
    ids, mask, labels = padded_batch(draw)
    found = []
    for checkpointing in (False, True):
        model = build(distractor_keys=3).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(3)
        model(ids, attention_mask=mask, labels=labels).loss.backward()
        found.append(gradients(model))
    assert_same_gradients(found[1], found[0], 1e-5)


@pytest.mark.parametrize("layers", [["conv"] * 6, ["hybrid"] * 6], ids=["conv", "hybrid"])
def test_checkpointing_saves_memory_in_every_kind_of_layer(build, draw, layers):
    peaks = []
    for checkpointing in (False, True):
        model = build(layer_types=layers).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        ids = draw(4, 2048)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model.model(ids).last_hidden_state.sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 0.6 * peaks[0], peaks


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_autocast_trains_fp32_weights(build, draw, dtype):
    """fp16 with a loss scaler, as Trainer uses it; gradients stay in the weights' dtype."""
    ids, mask, labels = padded_batch(draw)
    model = build().train()
    exact = model(ids, attention_mask=mask, labels=labels).loss
    exact.backward()
    expected = gradients(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    with torch.autocast("cuda", dtype=dtype):
        loss = model(ids, attention_mask=mask, labels=labels).loss
    assert abs(loss.item() - exact.item()) < 0.05
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all(), name
    whole, wanted = (
        torch.cat([g.flatten() for g in x])
        for x in ([p.grad for p in model.parameters()], expected.values())
    )
    assert relative(whole, wanted) <= 0.1
    before = copy.deepcopy(model.state_dict())
    scaler.step(optimizer)
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_labels_may_come_from_another_device(build, draw):
    model, ids = build(), draw(2, 19)
    expected = model(ids, labels=ids).loss
    assert torch.equal(model(ids, labels=ids.cpu()).loss, expected)
    assert torch.equal(model(ids.int(), labels=ids).loss, expected)


@pytest.mark.parametrize("core", CORES)
def test_training_compiles_as_one_graph_and_equals_eager(build, draw, core):
    """A first step, then ten more lengths, which cost at most two more graphs."""
    kinds = {"layer_types": ["conv", "hybrid"], "attention_type": core}
    plain, model = build(**kinds).train(), build(**kinds).train()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True)
    ids = draw(2, 130)
    for each in (plain, compiled):
        each(ids, labels=ids, use_cache=False).loss.backward()
    assert_same_gradients(gradients(model), gradients(plain), 2e-2)
    for length in range(100, 111):
        for each in (plain, compiled):
            each(ids[:, :length], labels=ids[:, :length], use_cache=False).loss.backward()
        assert_same_gradients(gradients(model), gradients(plain), 2e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize("core", CORES)
def test_compiled_micro_batches_add_up_under_autocast(build, draw, core):
    """Each once, for every parameter: see kernels/separate_gradient.py."""
    model = build(layer_types=["conv", "hybrid"], attention_type=core).train()
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(fullgraph=True)
    ids = draw(6, 130)

    def train_on(rows):
        for row in rows.split(1):
            with torch.autocast("cuda", torch.bfloat16):
                model(row, labels=row, use_cache=False).loss.backward()

    train_on(ids)
    memories = [p.grad.untyped_storage().data_ptr() for p in model.parameters()]
    assert len(set(memories)) == len(memories)
    together, alone = gradients(model), []
    for row in ids.split(1):
        train_on(row)
        alone.append(gradients(model))
    summed = {name: sum(each[name] for each in alone) for name in together}
    assert_same_gradients(together, summed, 1e-5)


LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 4095, 4096, 4097, 16385]


@pytest.mark.parametrize("window", [None, 512], ids=["full", "window"])
def test_kernels_follow_the_torch_paths_at_every_threshold(build, draw, window):
    """One token before and after each size at which an implementation changes."""
    fast = build(attention_window=window)
    plain = build(attention_window=window, kernel_backend="torch")
    ids = draw(1, LENGTHS[-1])
    with torch.no_grad():
        for length in LENGTHS:
            found = fast(ids[:, :length]).logits
            assert relative(found, plain(ids[:, :length]).logits) <= 2e-3, length
    for length in (1, 65, 1000):
        for each in (fast, plain):
            each(ids[:, :length]).logits.square().sum().backward()
        assert_same_gradients(gradients(fast), gradients(plain), 1e-2)


@pytest.mark.parametrize("window", [None, 512], ids=["full", "window"])
def test_a_context_of_131072_tokens_reads_the_same_in_pieces(build, draw, window):
    model = build(attention_window=window)
    ids = draw(1, 131072)
    with torch.no_grad():
        expected = model(ids, logits_to_keep=3, use_cache=False).logits
        cache = model(ids[:, :1], use_cache=True).past_key_values
        for piece in ids[:, 1:-3].split(40001, dim=1):
            model(piece, past_key_values=cache, logits_to_keep=1)
        found = model(ids[:, -3:], past_key_values=cache).logits
    assert relative(found, expected) <= 2e-3


def test_a_file_in_fp32_loads_on_the_gpu_in_bf16(build, draw, tmp_path):
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    from transformers import AutoModelForCausalLM

    model = build()
    model.save_pretrained(tmp_path)
    low = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, device_map={"": "cuda:0"}
    )
    assert {(p.dtype, p.device.type) for p in low.parameters()} == {(torch.bfloat16, "cuda")}
    ids = draw(2, 70)
    with torch.no_grad():
        assert relative(low(ids).logits, model(ids).logits) <= 0.1
        assert torch.equal(low(ids).logits, build(dtype=torch.bfloat16)(ids).logits)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_trainer_trains_in_mixed_precision(build, draw, tmp_path, precision):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": draw(24, seed=i).cpu()} for i in range(8)]
    rows = [{**row, "labels": row["input_ids"]} for row in rows]
    losses = []
    for options in ({}, {precision: True}):
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=4,
            logging_steps=1,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **options,
        )
        trainer = Trainer(build(), arguments, train_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] != losses[1] and losses[1] == pytest.approx(losses[0], abs=0.1)


@pytest.mark.parametrize("kind", ["8bit", "4bit"])
@pytest.mark.parametrize("skips", [None, ["down_proj"]], ids=["default", "own list"])
def test_bitsandbytes_spares_what_is_small(build, draw, tmp_path, kind, skips):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    plain = build()
    plain.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=BitsAndBytesConfig(
            **{f"load_in_{kind}": True}, llm_int8_skip_modules=skips
        ),
    )
    spared = {"lm_head", "retention_proj", "write_proj", "count_proj", *(skips or ())}
    quantised = (bitsandbytes.nn.Linear8bitLt, bitsandbytes.nn.Linear4bit)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert isinstance(module, quantised) == (name.rpartition(".")[2] not in spared), name
    ids = draw(2, 19)
    assert relative(model(ids).logits, plain(ids).logits) <= (0.1 if kind == "8bit" else 0.8)
    assert model.generate(ids, max_new_tokens=4, **GREEDY).shape == (2, 23)
