# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Converts a checkpoint of the original training code to a folder that Transformers loads.

The original folder holds `weights.pt` ({"model": state dict}), `config.json` and `tokenizer.json`
(the name of the tokenizer). All tensors are checked first: if one is missing, left over or of a
wrong shape, every such tensor is named and nothing is written.

    python scripts/convert_original_checkpoint.py --source original/ --output converted/
"""

import argparse
import functools
import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from atma import AtmaConfig, AtmaForCausalLM
from transformers import AutoTokenizer

# Original name -> ours. A rule says how the original tensor is made of ours:
#   same      as it is
#   taps      [C, K] with a middle axis of one, as the weight of an nn.Conv1d
#   halves    two of ours, one after the other
#   per_head  two of ours, alternating head by head: [H, 2D, ...]
SHARED = {
    "norm1.weight": ("same", "input_norm.weight"),
    "norm2.weight": ("same", "post_norm.weight"),
    "mlp.fc.weight": ("halves", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.fc.bias": ("halves", "mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "mlp.proj.weight": ("same", "mlp.down_proj.weight"),
    "mlp.proj.bias": ("same", "mlp.down_proj.bias"),
}
CONV = {
    "attn.in_proj.weight": ("same", "mixer.in_proj.weight"),
    "attn.in_proj.bias": ("same", "mixer.in_proj.bias"),
    "attn.conv.weight": ("taps", "mixer.conv_weight"),
    "attn.out_proj.weight": ("same", "mixer.out_proj.weight"),
    "attn.out_proj.bias": ("same", "mixer.out_proj.bias"),
}
HYBRID = {
    "attn.q.weight": ("per_head", "mixer.q_proj.weight", "mixer.gate_proj.weight"),
    "attn.q.bias": ("per_head", "mixer.q_proj.bias", "mixer.gate_proj.bias"),
    "attn.k.weight": ("same", "mixer.k_proj.weight"),
    "attn.k.bias": ("same", "mixer.k_proj.bias"),
    "attn.v.weight": ("same", "mixer.v_proj.weight"),
    "attn.v.bias": ("same", "mixer.v_proj.bias"),
    "attn.proj.weight": ("same", "mixer.o_proj.weight"),
    "attn.proj.bias": ("same", "mixer.o_proj.bias"),
}
CANON = {
    "attn.canon_q.weight": ("taps", "mixer.query_canon_weight"),
    "attn.canon_k.weight": ("taps", "mixer.key_canon_weight"),
    "attn.canon_v.weight": ("taps", "mixer.value_canon_weight"),
}
POLAR = {
    "attn.v_null": ("same", "mixer.null_value"),
    "attn.null_base": ("same", "mixer.null_base"),
    "attn.null_slope_raw": ("same", "mixer.null_slope"),
    "attn.len_gain_raw": ("same", "mixer.length_gain"),
    "attn.mag_beta_raw": ("same", "mixer.magnitude_gain"),
    "attn.mu_proj.weight": ("same", "mixer.count_proj.weight"),
    "attn.mu_proj.bias": ("same", "mixer.count_proj.bias"),
}
MEMORY = {
    "attn.mem.w_gamma.weight": ("same", "mixer.memory.retention_proj.weight"),
    "attn.mem.w_gamma.bias": ("same", "mixer.memory.retention_proj.bias"),
    "attn.mem.w_beta.weight": ("same", "mixer.memory.write_proj.weight"),
    "attn.mem.w_beta.bias": ("same", "mixer.memory.write_proj.bias"),
    "attn.mem.gate.weight": ("same", "mixer.memory.gate_proj.weight"),
    "attn.mem.gate.bias": ("same", "mixer.memory.gate_proj.bias"),
    "attn.mem.proj.weight": ("same", "mixer.memory.out_proj.weight"),
    "attn.mem.proj.bias": ("same", "mixer.memory.out_proj.bias"),
}
OUTSIDE = {
    "embed.weight": ("same", "model.embed_tokens.weight"),
    "norm.weight": ("same", "model.norm.weight"),
    "proj.weight": ("same", "lm_head.weight"),
    "proj.bias": ("same", "lm_head.bias"),
}

# Fields of the original configuration -> ours.
FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "conv_kernel_size": "conv_kernel_size",
    "attn_kernel_size": "canon_kernel_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "attn_type": "attention_type",
    "attn_window": "attention_window",
    "num_random_keys": "distractor_keys",
    "mem_enabled": "use_memory",
    "mem_gamma_bias": "memory_retention_bias",
    "mem_beta_bias": "memory_write_bias",
}
# Choices of the original implementation, which do not change the function that the weights define.
IMPLEMENTATION_FIELDS = {
    "attn_online", "attn_k_block", "attn_kernel", "mem_chunk", "mem_kernel", "dtype", "torch_dtype",
}  # fmt: skip


class ConversionError(ValueError):
    """The checkpoint cannot be converted; the message names each tensor or field at fault."""


@dataclass(frozen=True)
class Rule:
    """How one original tensor is made: its layout, our names, and the shape it must have."""

    layout: str
    targets: tuple[str, ...]
    shape: tuple[int, ...]


def convert_config(original: dict, state: dict[str, torch.Tensor]) -> AtmaConfig:
    """
    The original configuration as an `AtmaConfig`; sizes that it lacks are read off the tensors.

    Raises:
        ConversionError: a field that is set but has no counterpart here.
    """
    unknown = sorted(
        name
        for name, value in original.items()
        if name not in FIELDS and name not in IMPLEMENTATION_FIELDS and value is not None
    )
    if unknown:
        raise ConversionError(
            f"config.json sets fields that ATMA does not have: {', '.join(unknown)}."
        )
    absent = [
        name
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "head_dim")
        if name not in original
    ]
    if absent:
        raise ConversionError(f"config.json lacks {', '.join(absent)}.")
    fields = {FIELDS[name]: value for name, value in original.items() if name in FIELDS}
    head_dim = fields["head_dim"]
    num_heads = fields["num_attention_heads"] = fields["hidden_size"] // head_dim
    for name, tensor in state.items():
        # An impossible size stays at its default: the check of the shapes then names the tensor.
        groups = tensor.shape[0] // head_dim if name.endswith(".attn.k.weight") else 0
        if groups and num_heads % groups == 0:
            fields["num_key_value_heads"] = groups
        if name == "blocks.0.mlp.fc.weight" and len(tensor) > 1:
            fields["intermediate_size"] = len(tensor) // 2
    if head_dim < 16:  # no Triton path for heads this small
        fields["kernel_backend"] = "torch"
    try:
        return AtmaConfig(**fields)
    except ValueError as error:
        raise ConversionError(f"config.json: {error}") from error


def expected_tensors(config: AtmaConfig, shapes: dict[str, tuple[int, ...]]) -> dict[str, Rule]:
    """
    {original name: rule} for every tensor that a checkpoint of `config` must hold.

    Args:
        shapes: our parameters' names and shapes.
    """
    hybrid = {**HYBRID}
    if config.attention_type != "rope":
        hybrid.update(CANON)
    if config.attention_type == "polar":
        hybrid.update(POLAR)
    if config.use_memory:
        hybrid.update(MEMORY)
    names = dict(OUTSIDE)
    for i, layer_type in enumerate(config.layer_types):
        for name, (layout, *targets) in {
            **SHARED,
            **(hybrid if layer_type == "hybrid" else CONV),
        }.items():
            names[f"blocks.{i}.{name}"] = (layout, *(f"model.layers.{i}.{t}" for t in targets))

    rules = {}
    for name, (layout, *targets) in names.items():
        rows, *rest = shapes[targets[0]]
        if layout == "taps":
            rest = [1, *rest]
        rules[name] = Rule(layout, tuple(targets), (rows * len(targets), *rest))
    return rules


def rotary_frequencies(head_dim: int) -> torch.Tensor:
    """The frequencies [D / 2] of `attention_type="rope"`: 1 to 1/1024, then as many zeros."""
    turning = (1 / 1024) ** torch.linspace(0, 1, head_dim // 4)
    return torch.cat([turning, torch.zeros(head_dim // 4)])


def check_tensors(
    state: dict[str, torch.Tensor], rules: dict[str, Rule], config: AtmaConfig
) -> None:
    """
    Compares names and shapes with `rules`.

    Raises:
        ConversionError: names every tensor that is missing, left over or wrong.
    """
    buffers = {}
    if (
        config.attention_type == "rope"
    ):  # implied by the configuration: may be there, must then be ours
        hybrid = (i for i, layer_type in enumerate(config.layer_types) if layer_type == "hybrid")
        frequencies = rotary_frequencies(config.head_dim)
        buffers = {f"blocks.{i}.attn.rotary.angular_freq": frequencies for i in hybrid}

    faults = [f"missing: {name}" for name in rules if name not in state]
    faults += [f"left over: {name}" for name in state if name not in rules and name not in buffers]
    faults += [
        f"wrong shape: {name} is {list(state[name].shape)}, expected {list(rule.shape)}"
        for name, rule in rules.items()
        if name in state and tuple(state[name].shape) != rule.shape
    ]
    for name, frequencies in buffers.items():
        found = state.get(name, frequencies).float()
        if found.shape != frequencies.shape or not torch.allclose(found, frequencies, rtol=1e-4):
            faults.append(f"other frequencies: {name} is not 1 to 1/1024, then zeros")
    if faults:
        raise ConversionError(
            "The checkpoint does not fit its config.json:\n  " + "\n  ".join(faults)
        )


def split_tensor(tensor: torch.Tensor, rule: Rule, num_heads: int) -> list[torch.Tensor]:
    """The tensors, one for each of `rule.targets`, that one original tensor holds."""
    if rule.layout == "taps":
        return [tensor.squeeze(1)]
    if rule.layout == "halves":
        return list(tensor.chunk(2))
    if rule.layout == "per_head":
        return [half.flatten(0, 1) for half in tensor.unflatten(0, (num_heads, -1)).chunk(2, dim=1)]
    return [tensor]


def read_original(source: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """The configuration and the state dict of an original folder."""
    for name in ("config.json", "weights.pt"):
        if not (source / name).is_file():
            raise ConversionError(f"{source} has no {name}.")
    original = json.loads((source / "config.json").read_text("utf-8"))
    checkpoint = torch.load(source / "weights.pt", map_location="cpu", weights_only=True)
    if not isinstance(checkpoint, dict) or "model" not in checkpoint:
        raise ConversionError('weights.pt does not hold a dictionary with the entry "model".')
    return original, checkpoint["model"]


def convert_model(original: dict, state: dict[str, torch.Tensor]) -> AtmaForCausalLM:
    """
    The model of an original configuration and state dict.

    Raises:
        ConversionError: see `convert_config` and `check_tensors`.
    """
    config = convert_config(original, state)
    with torch.device("meta"):
        model = AtmaForCausalLM(config)
    rules = expected_tensors(
        config, {name: tuple(p.shape) for name, p in model.state_dict().items()}
    )
    check_tensors(state, rules, config)

    # One dtype for the whole model, and none of the tensors may lose precision.
    dtype = functools.reduce(torch.promote_types, (state[name].dtype for name in rules))
    converted = {}
    for name, rule in rules.items():
        parts = split_tensor(state[name].to(dtype), rule, config.num_attention_heads)
        converted.update(
            (target, part.contiguous()) for target, part in zip(rule.targets, parts, strict=True)
        )
    model.load_state_dict(converted, assign=True)
    model.tie_weights()
    return model.eval()


def load_tokenizer(source: Path, vocab_size: int):
    """The tokenizer that the folder names; None, with a warning, if it is not to be had or used."""
    path = source / "tokenizer.json"
    name = json.loads(path.read_text("utf-8")).get("tokenizer_name") if path.is_file() else None
    if name is None:
        warnings.warn(
            f"{source} names no tokenizer: save one beside the converted model.", stacklevel=2
        )
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        warnings.warn(
            f"The tokenizer {name!r} could not be loaded (offline?): save it beside the converted "
            "model, and set the end-of-text id in its generation_config.json.",
            stacklevel=2,
        )
        return None
    if len(tokenizer) > vocab_size:
        warnings.warn(
            f"The tokenizer {name!r} was not saved: it has {len(tokenizer)} tokens, the model "
            f"{vocab_size}.",
            stacklevel=2,
        )
        return None
    return tokenizer


def convert(source: Path, output: Path) -> AtmaForCausalLM:
    """
    Converts the folder `source` to the folder `output`, tokenizer included where it can be had.

    Raises:
        ConversionError: nothing was written.
    """
    if output.resolve() == source.resolve():
        raise ConversionError("--output must be another folder than --source.")
    original, state = read_original(source)
    model = convert_model(original, state)
    tokenizer = load_tokenizer(source, model.config.vocab_size)
    if tokenizer is not None:
        for name in ("bos_token_id", "eos_token_id"):
            setattr(model.config, name, getattr(tokenizer, name))
            setattr(model.generation_config, name, getattr(tokenizer, name))
        tokenizer.save_pretrained(output)
    model.save_pretrained(output)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--source",
        type=Path,
        required=True,
        default=argparse.SUPPRESS,
        help="folder of the original checkpoint",
    )
    parser.add_argument(
        "--output", type=Path, required=True, default=argparse.SUPPRESS, help="folder to write"
    )
    arguments = parser.parse_args()
    try:
        model = convert(arguments.source, arguments.output)
    except ConversionError as error:
        raise SystemExit(str(error)) from error
    print(f"{model.num_parameters():,} parameters in {model.dtype} written to {arguments.output}")


if __name__ == "__main__":
    main()
