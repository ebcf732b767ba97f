# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The configuration: defaults, presets, and one sentence for each bad combination."""

import pytest
import torch
from atma import AtmaConfig, AtmaForCausalLM


def count(config: AtmaConfig) -> int:
    with torch.device("meta"):
        model = AtmaForCausalLM(config)
    return sum(p.numel() for p in model.parameters())


def test_paper_model_has_378_million_parameters():
    assert count(AtmaConfig.paper_378m()) == 378_220_864
    assert count(AtmaConfig.paper_378m(use_memory=False)) == 369_758_464


def test_paper_model_has_global_layers_2_6_10_14():
    config = AtmaConfig.paper_378m()
    assert [i for i, kind in enumerate(config.layer_types) if kind == "hybrid"] == [2, 6, 10, 14]
    assert config.intermediate_size == 4096


def test_layer_types_survive_saving(tmp_path):
    config = AtmaConfig.tiny(layer_types=["hybrid", "conv", "conv", "hybrid"])
    config.save_pretrained(tmp_path)
    assert AtmaConfig.from_pretrained(tmp_path).layer_types == ["hybrid", "conv", "conv", "hybrid"]


def test_the_older_name_of_a_convolution_layer_is_understood():
    config = AtmaConfig.tiny(layer_types=["linear_attention", "hybrid"], num_hidden_layers=2)
    assert config.layer_types == ["conv", "hybrid"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_attention_heads": 5}, "multiple of num_key_value_heads"),
        ({"head_dim": 8}, "head_dim must be a multiple of 8 from 16 to 256"),
        ({"head_dim": 20}, "head_dim must be a multiple of 8"),
        ({"head_dim": 264}, "head_dim must be a multiple of 8"),
        ({"attention_type": "linear"}, "attention_type must be"),
        ({"layer_types": ["conv", "hybrid"]}, "names 2 layers but num_hidden_layers is 4"),
        ({"layer_types": ["conv", "mamba", "hybrid", "conv"]}, "only 'conv' and 'hybrid'"),
        ({"attention_window": 0}, "attention_window must be at least 1"),
        ({"memory_max_half_life": 0}, "memory_max_half_life must be a positive"),
        ({"kernel_backend": "cuda"}, "kernel_backend must be"),
        ({"distractor_keys": -1}, "distractor_keys must be 0 or more"),
        ({"distractor_keys": 4, "attention_type": "nope"}, "distractor_keys needs"),
        ({"conv_kernel_size": 1}, "conv_kernel_size must be at least 2"),
        ({"canon_kernel_size": 1}, "canon_kernel_size must be at least 2"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"logit_softcap": 0}, "logit_softcap must be positive"),
        ({"initializer_range": -0.1}, "must not be negative"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_combinations_are_refused_in_one_sentence(fields, words):
    with pytest.raises(ValueError, match=words) as error:
        AtmaConfig.tiny(**fields)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_heads_of_8_need_the_torch_backend():
    assert AtmaConfig.tiny(head_dim=8, kernel_backend="torch").head_dim == 8


def test_wrong_types_are_refused():
    with pytest.raises(Exception, match="hidden_size"):
        AtmaConfig(hidden_size="wide")


def test_whole_numbers_are_fine_where_floats_are_meant():
    config = AtmaConfig.tiny(logit_softcap=30, initializer_range=0, memory_max_half_life=64)
    assert config.logit_softcap == 30
