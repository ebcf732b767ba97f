# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""PEFT: adapters reach every layer kind, merge exactly, and live beside each other."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from torch import nn

# As the README names them: convolutions, attention, memory and MLP of every layer.
TARGETS = ["in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS += ["gate_proj", "up_proj", "down_proj"]
CAUSAL = {"task_type": "CAUSAL_LM"}
KINDS = {
    "lora": LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, **CAUSAL),
    "all-linear": LoraConfig(
        r=4, target_modules="all-linear", init_lora_weights=False, use_rslora=True, **CAUSAL
    ),
    "dora": LoraConfig(
        r=4, target_modules=TARGETS, use_dora=True, init_lora_weights=False, **CAUSAL
    ),
    "ia3": IA3Config(
        target_modules=["k_proj", "v_proj", "in_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=False,
        **CAUSAL,
    ),
    "loha": LoHaConfig(r=4, target_modules=TARGETS, init_weights=False, **CAUSAL),
    "lokr": LoKrConfig(r=4, target_modules=TARGETS, init_weights=False, **CAUSAL),
    "oft": OFTConfig(
        oft_block_size=8, target_modules=["q_proj", "in_proj"], init_weights=False, **CAUSAL
    ),
    "vera": VeraConfig(r=4, target_modules=["in_proj"], init_weights=False, **CAUSAL),
    "adalora": AdaLoraConfig(
        init_r=4, target_modules=TARGETS, init_lora_weights=False, total_step=10, **CAUSAL
    ),
}


def adapted(model, kind="lora", **changes):
    config = copy.deepcopy(KINDS[kind])
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(1)
    return get_peft_model(model, config)


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def test_the_documented_targets_reach_every_layer_kind(make_model):
    model = adapted(make_model())
    names = [n for n, m in model.named_modules() if hasattr(m, "lora_A") and hasattr(m, "r")]
    assert {name.rsplit(".", 1)[-1] for name in names} == set(TARGETS)
    kinds = {name.split("layers.", 1)[1].split(".", 1)[1] for name in names}
    assert {"mixer.in_proj", "mixer.q_proj", "mixer.memory.out_proj", "mlp.up_proj"} <= kinds
    for layer in range(5):
        assert sum(f"layers.{layer}." in name for name in names) >= 5


def test_all_linear_is_every_linear_but_the_head(make_model):
    plain, model = make_model(), adapted(make_model(), "all-linear")
    linear = {n for n, m in plain.named_modules() if isinstance(m, nn.Linear)} - {"lm_head"}
    found = {
        n.removeprefix("base_model.model.") for n, m in model.named_modules() if hasattr(m, "r")
    }
    assert found & {n for n, _ in plain.named_modules()} == linear


@pytest.mark.parametrize("kind", KINDS)
def test_every_adapter_is_used_and_merges_exactly(make_model, tokens, close, kind):
    ids, plain = tokens(2, 11), make_model()
    model = adapted(make_model(), kind)
    model.eval()
    before = model(ids, labels=ids)
    assert (before.logits - plain(ids).logits).abs().max() > 1e-2
    model.train()
    training = model(ids, labels=ids)
    close(training.logits, before.logits)
    training.loss.backward()
    for name, parameter in trained(model).items():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    model.eval()
    merged = model.merge_and_unload()
    close(merged(ids).logits, before.logits)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    adapter_text = adapted(make_model(), kind).eval().generate(input_ids=ids, **options)
    assert torch.equal(merged.generate(ids, **options), adapter_text)


def test_a_convolution_can_be_a_target_parameter(make_model, tokens, close):
    """Taps are a bare parameter: PEFT adapts those by `target_parameters`."""
    ids = tokens(2, 11)
    config = LoraConfig(
        r=2,
        target_modules=[],
        target_parameters=["mixer.conv_weight"],
        init_lora_weights=False,
        **CAUSAL,
    )
    model = get_peft_model(make_model(), config).eval()
    logits = model(ids, labels=ids)
    assert (logits.logits - make_model()(ids).logits).abs().max() > 1e-2
    logits.loss.backward()
    for name, parameter in trained(model).items():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    close(model.merge_and_unload()(ids).logits, logits.logits)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_modules_to_save_are_trained_and_come_back(make_model, tokens, tmp_path, module, tie):
    ids = tokens(2, 9)
    model = adapted(
        make_model(tie_word_embeddings=tie),
        modules_to_save=[module],
        ensure_weight_tying=tie,
    )
    optimizer = torch.optim.SGD(trained(model).values(), lr=0.1)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    model.eval()
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(make_model(tie_word_embeddings=tie), tmp_path).eval()
    assert torch.equal(again(ids).logits, expected)


def test_adapters_live_beside_each_other(make_model, tokens, close, tmp_path):
    ids = tokens(2, 9)
    plain = make_model()(ids).logits
    model = adapted(make_model())
    torch.manual_seed(5)
    model.add_adapter("second", copy.deepcopy(KINDS["lora"]))
    model.eval()
    first = model(ids).logits
    model.set_adapter("second")
    second = model(ids).logits
    assert (first - second).abs().max() > 1e-2
    with model.disable_adapter():
        assert torch.equal(model(ids).logits, plain)
    mixed = model(ids, adapter_names=["default", "second"]).logits
    close(mixed, torch.stack([first[0], second[1]]))
    model.add_weighted_adapter(["default", "second"], [0.7, 0.3], "both", combination_type="cat")
    model.set_adapter("both")
    assert torch.isfinite(model(ids).logits).all()
    model.delete_adapter("both")
    model.set_adapter("default")
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(make_model(), tmp_path)
    again.load_adapter(tmp_path / "second", "second")
    again.eval()
    assert torch.equal(again(ids).logits, first)
    again.set_adapter("second")
    assert torch.equal(again(ids).logits, second)


def test_adapters_load_on_remote_code_in_a_fresh_process(make_model, tokens, tmp_path):
    ids = tokens(1, 9)
    make_model().save_pretrained(tmp_path / "base")
    model = adapted(make_model()).eval()
    expected = model(ids).logits
    model.save_pretrained(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": str(tmp_path / "base")})
    )
    script = """
import sys, torch
sys.modules["atma"] = None
from peft import AutoPeftModelForCausalLM
folder, ids = sys.argv[1], torch.tensor([[int(x) for x in sys.argv[2].split()]])
model = AutoPeftModelForCausalLM.from_pretrained(folder + "/adapter", trust_remote_code=True)
merged = model.eval().merge_and_unload()
merged.save_pretrained(folder + "/merged")
torch.save(merged(ids).logits, folder + "/logits")
"""
    text = " ".join(map(str, ids[0].tolist()))
    done = subprocess.run(
        [sys.executable, "-I", "-c", script, str(tmp_path), text],
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "merged" / "modeling_atma.py").exists()
    found = torch.load(tmp_path / "logits", weights_only=True)
    assert (found - expected).abs().max() < 5e-4


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", [PromptTuningConfig, PromptEncoderConfig])
def test_a_learned_prompt_is_embeddings_in_front(make_model, tokens, close, kind, padded):
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    if padded:
        mask[0, :3] = 0
    config = kind(num_virtual_tokens=4, **CAUSAL)
    model = get_peft_model(make_model(), config).eval()
    output = model(ids, attention_mask=mask, labels=ids)
    base = make_model()
    prompt = model.get_prompt(2)
    embeds = torch.cat([prompt, base.model.embed_tokens(ids)], dim=1)
    wide = torch.cat([torch.ones(2, 4, dtype=torch.long), mask], dim=1)
    close(output.logits, base(inputs_embeds=embeds, attention_mask=wide).logits)
    output.loss.backward()
    assert all(p.grad.abs().max() > 0 for p in trained(model).values())


@pytest.mark.parametrize("core", ["polar", "nope", "rope"])
def test_a_learned_prefix_is_keys_and_values(make_model, tokens, core):
    ids = tokens(2, 9)
    plain = make_model(attention_type=core)
    config = PrefixTuningConfig(num_virtual_tokens=5, **CAUSAL)
    model = get_peft_model(make_model(attention_type=core), config)
    output = model(ids, attention_mask=torch.ones_like(ids), labels=ids)
    assert (output.logits - plain(ids).logits).abs().max() > 1e-2
    output.loss.backward()
    (prefix,) = trained(model).values()
    hybrid = prefix.grad.view(5, 5, 2, -1).abs().amax((0, 2, 3)) > 0
    assert hybrid.tolist() == [False, True, False, True, False]


def test_a_learned_prompt_generates_without_a_cache(make_model, tokens):
    """With a cache, PEFT 0.21 adds the prompt anew at each step, for every model of Transformers:
    it knows the cache of generate() by its old name only."""
    ids = tokens(2, 7)
    model = get_peft_model(make_model(), PromptTuningConfig(num_virtual_tokens=4, **CAUSAL)).eval()
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    found = model.generate(input_ids=ids, use_cache=False, **options)
    expected = ids
    for _ in range(5):
        step = model(expected).logits[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, step], dim=1)
    assert torch.equal(found, expected)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with pytest.raises(ValueError, match="5 new tokens after 11"):
        model.generate(input_ids=ids, attention_mask=mask, **options)


def test_generation_with_a_learned_prefix_is_refused(make_model, tokens):
    """For the same reason: the prefix comes again beside the cache that already holds it."""
    model = get_peft_model(make_model(), PrefixTuningConfig(num_virtual_tokens=4, **CAUSAL)).eval()
    with pytest.raises(ValueError, match="two different caches"):
        model.generate(input_ids=tokens(2, 7), max_new_tokens=3)
