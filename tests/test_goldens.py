# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Original checkpoints convert, and the converted models compute what the originals did."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

REPOSITORY = Path(__file__).parents[1]
GOLDENS = REPOSITORY.parent / "shared" / "goldens"
NAMES = sorted(p.name for p in GOLDENS.glob("*/"))

needs_goldens = pytest.mark.skipif(
    not NAMES, reason="the original checkpoints are not in ../shared/goldens beside the repository"
)
each_golden = pytest.mark.parametrize("name", NAMES or ["none"])


@pytest.fixture(scope="module")
def converter():
    path = REPOSITORY / "scripts" / "convert_original_checkpoint.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def offline(converter, monkeypatch):
    """No tokenizer can be downloaded."""

    def refuse(name, **kwargs):
        raise OSError(f"cannot reach {name}")

    monkeypatch.setattr(converter.AutoTokenizer, "from_pretrained", refuse)


@pytest.fixture
def original(tmp_path):
    """A writable copy of an original checkpoint, and a function that edits its tensors."""
    folder = Path(shutil.copytree(GOLDENS / "polar_memory", tmp_path / "original"))
    for path in folder.iterdir():
        path.chmod(0o644)

    def edit(change):
        checkpoint = torch.load(folder / "weights.pt", weights_only=True)
        change(checkpoint["model"])
        torch.save(checkpoint, folder / "weights.pt")

    return folder, edit


@pytest.mark.smoke
@needs_goldens
@each_golden
def test_converted_checkpoint_gives_the_logits_and_tokens_of_the_original(
    name, converter, offline, tmp_path
):
    with pytest.warns(UserWarning, match="tokenizer 'gpt2' could not be loaded"):
        converter.convert(GOLDENS / name, tmp_path / name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / name, trust_remote_code=True).eval()
    expected = load_file(GOLDENS / name / "expected.safetensors")

    with torch.no_grad():
        logits = model(expected["input_ids"]).logits
    assert logits.dtype == torch.float32
    assert (logits - expected["logits"]).abs().max() <= 1e-4

    if "greedy_ids" in expected:
        prompt = expected["greedy_ids"][:, :-24]
        ids = model.generate(prompt, do_sample=False, max_new_tokens=24, pad_token_id=0)
        assert ids.tolist() == expected["greedy_ids"].tolist()


@needs_goldens
def test_every_faulty_tensor_is_named_and_nothing_is_written(
    converter, offline, original, tmp_path
):
    source, edit = original

    def spoil(state):
        del state["blocks.2.attn.canon_k.weight"]
        del state["norm.weight"]
        state["blocks.1.attn.wall.weight"] = torch.zeros(2)
        state["blocks.2.attn.q.weight"] = torch.zeros(64, 64)
        state["blocks.2.attn.k.weight"] = torch.zeros(24, 64)
        state["blocks.3.attn.conv.weight"] = torch.zeros(64, 3)

    edit(spoil)
    with pytest.raises(converter.ConversionError) as error:
        converter.convert(source, tmp_path / "output")
    assert str(error.value).splitlines()[1:] == [
        "  missing: norm.weight",
        "  missing: blocks.2.attn.canon_k.weight",
        "  left over: blocks.1.attn.wall.weight",
        "  wrong shape: blocks.2.attn.q.weight is [64, 64], expected [128, 64]",
        "  wrong shape: blocks.2.attn.k.weight is [24, 64], expected [16, 64]",
        "  wrong shape: blocks.3.attn.conv.weight is [64, 3], expected [64, 1, 3]",
    ]
    assert not (tmp_path / "output").exists()


@needs_goldens
def test_other_rotary_frequencies_are_refused_and_absent_ones_are_implied(converter):
    config, state = converter.read_original(GOLDENS / "rope_memory")
    name = "blocks.2.attn.rotary.angular_freq"
    frequencies = state.pop(name)
    converter.convert_model(config, state)
    with pytest.raises(converter.ConversionError, match=f"other frequencies: {name}"):
        converter.convert_model(config, {**state, name: frequencies * 1.01})


@needs_goldens
def test_a_field_without_counterpart_is_refused(converter, original, tmp_path):
    source, _ = original
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "wall_gate_bias": 1.0}))
    with pytest.raises(converter.ConversionError, match="wall_gate_bias"):
        converter.convert(source, tmp_path / "output")
    assert not (tmp_path / "output").exists()


@needs_goldens
def test_one_dtype_that_loses_nothing(converter):
    config, state = converter.read_original(GOLDENS / "polar_memory")
    state = {name: tensor.bfloat16() for name, tensor in state.items()}
    assert converter.convert_model(config, state).dtype == torch.bfloat16
    state["norm.weight"] = state["norm.weight"].float()
    model = converter.convert_model(config, state)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@needs_goldens
def test_the_source_folder_is_never_overwritten(converter, original):
    source, _ = original
    before = (source / "config.json").read_bytes()
    with pytest.raises(converter.ConversionError, match="another folder"):
        converter.convert(source, source)
    assert (source / "config.json").read_bytes() == before


def tokenizer_of_four_words():
    words = {"<end>": 0, "a": 1, "b": 2, "c": 3}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")),
        bos_token="<end>",
        eos_token="<end>",
    )


@needs_goldens
def test_a_tokenizer_that_can_be_had_is_saved_beside_the_model(
    converter, original, tmp_path, monkeypatch
):
    source, _ = original
    tokenizer = tokenizer_of_four_words()
    monkeypatch.setattr(converter.AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    model = converter.convert(source, tmp_path / "output")
    assert (tmp_path / "output" / "tokenizer.json").is_file()
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id

    with pytest.warns(UserWarning, match="has 4 tokens, the model 3"):
        assert converter.load_tokenizer(source, vocab_size=3) is None
