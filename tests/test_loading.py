# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Loading: what is in the file is what runs, and what is missing is initialised as designed."""

import pytest
import torch
from atma import AtmaConfig, AtmaForCausalLM, AtmaModel
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM


def patterned(model):
    """Every parameter a distinct pattern."""
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) * 1e-4 + i)
    return model


@pytest.mark.smoke
@pytest.mark.parametrize("core", ["polar", "nope", "rope"])
def test_loaded_weights_are_bitwise_those_of_the_file(make_model, tmp_path, core):
    model = patterned(make_model(attention_type=core))
    model.save_pretrained(tmp_path)
    for load in (AutoModelForCausalLM.from_pretrained, AtmaForCausalLM.from_pretrained):
        loaded, report = load(tmp_path, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        for name, parameter in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], parameter), name
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is AtmaModel
    for name, parameter in model.model.state_dict().items():
        assert torch.equal(base.state_dict()[name], parameter), name


@pytest.mark.parametrize(
    "dropped",
    [
        "model.layers.1.mixer.null_value",
        "model.layers.1.mixer.length_gain",
        "model.layers.0.mixer.conv_weight",
        "model.layers.1.mixer.key_canon_weight",
        "model.layers.1.mixer.memory.retention_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.norm.weight",
        "lm_head.bias",
    ],
)
def test_a_missing_tensor_is_listed_and_its_siblings_are_untouched(tmp_path, dropped):
    config = AtmaConfig.tiny(layer_types=["conv", "hybrid"], num_hidden_layers=2)
    model = patterned(AtmaForCausalLM(config))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(dropped)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, report = AtmaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == {dropped}
    fresh = AtmaForCausalLM(config).state_dict()[dropped]
    for name, parameter in loaded.state_dict().items():
        if name != dropped:
            assert torch.equal(parameter, model.state_dict()[name]), name
            continue
        assert torch.isfinite(parameter).all()
        if "length_gain" in name:
            assert (parameter == -1).all()
        elif fresh.std() == 0 or fresh.numel() == 1:
            assert torch.equal(parameter, fresh)
        else:
            assert 0.5 < (parameter.std() / fresh.std()).item() < 2


def test_loading_twice_over_a_dirty_allocator_gives_the_same_logits(make_model, tokens, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    ids = tokens(1, 12)
    with torch.no_grad():
        expected = model(ids).logits
        for _ in range(2):
            dirt = [torch.full((n,), float("nan")) for n in (64, 1024, 4096, 65536) * 4]
            del dirt
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
            assert torch.equal(loaded(ids).logits, expected)
            assert not any(x.is_meta for x in [*loaded.parameters(), *loaded.buffers()])


def test_a_model_on_meta_is_initialised_as_a_constructed_one():
    config = AtmaConfig.tiny(zero_init_residual=False)
    with torch.device("meta"):
        model = AtmaForCausalLM(config)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    for module in model.modules():
        module._is_hf_initialized = False
    model.init_weights()
    built = AtmaForCausalLM(config).state_dict()
    for name, parameter in model.state_dict().items():
        assert torch.isfinite(parameter).all(), name
        if built[name].std() > 0:
            assert 0.5 < (parameter.std() / built[name].std()).item() < 2, name
        else:
            assert torch.equal(parameter, built[name]), name


@pytest.mark.parametrize("tie", [False, True])
def test_tied_and_untied_heads_survive_saving_and_resizing(make_model, tokens, tmp_path, tie):
    model = make_model(tie_word_embeddings=tie)
    model.tie_weights()
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in stored) != tie or "model.embed_tokens.weight" not in stored
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)

    def is_tied(m):
        return m.lm_head.weight.data_ptr() == m.model.embed_tokens.weight.data_ptr()

    ids = tokens(1, 7)
    with torch.no_grad():
        assert is_tied(loaded) == tie
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        before = loaded(ids).logits
        loaded.resize_token_embeddings(120)
        assert is_tied(loaded) == tie and loaded.config.vocab_size == 120
        assert torch.allclose(loaded(ids).logits[..., :101], before, atol=1e-5)
        loaded(torch.tensor([[119]]), labels=torch.tensor([[119]]))
        loaded.resize_token_embeddings(101)
        assert torch.allclose(loaded(ids).logits, before, atol=1e-5)


@pytest.mark.smoke
def test_low_precision_loading_rounds_once_and_runs(make_model, tokens, tmp_path):
    """
    All parameters share one dtype, by choice: scalars are cast up where they are used. A file in
    fp32 stays in fp32 unless another dtype is asked for.
    """
    model = make_model()
    model.save_pretrained(tmp_path)
    low = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in low.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        assert torch.isfinite(low(tokens(1, 9)).logits).all()
    low.save_pretrained(tmp_path / "low")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "low", dtype="auto")
    for name, parameter in low.state_dict().items():
        assert torch.equal(again.state_dict()[name], parameter), name
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.float32


def test_sharded_files_load(make_model, tokens, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(loaded(tokens(1, 9)).logits, model(tokens(1, 9)).logits)


def test_cpu_offload_changes_nothing(make_model, tokens):
    """Projections are called, never read, so that offload hooks see them."""
    from accelerate import cpu_offload

    model, plain = make_model(), make_model()
    cpu_offload(model, execution_device=torch.device("cpu"))
    ids = tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(model(ids, labels=ids).loss, plain(ids, labels=ids).loss)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


@pytest.mark.parametrize(
    "field, value",
    [
        ("attention_type", "foo"),
        ("memory_max_half_life", -1.0),
        ("memory_max_half_life", float("nan")),
        ("logit_softcap", -3.0),
        ("distractor_keys", -2),
        ("attention_window", 0),
        ("num_hidden_layers", 9),
    ],
)
def test_fields_set_while_loading_are_checked(make_model, tmp_path, field, value):
    """Transformers sets them after the configuration has checked itself."""
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=field):
        AutoModelForCausalLM.from_pretrained(tmp_path, **{field: value})


def test_fewer_layers_are_the_first_ones(make_model, tmp_path):
    model = make_model(layer_types=["conv", "hybrid", "conv"])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=2)
    assert loaded.config.layer_types == ["conv", "hybrid"] and len(loaded.model.layers) == 2
    assert torch.equal(
        loaded.model.layers[1].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight
    )
