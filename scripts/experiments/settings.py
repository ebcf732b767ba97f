# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""What a YAML file may say about a run: typed fields with defaults; unknown names are refused."""

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from .shards import fingerprint

# Fields of `TrainingArguments` that follow from fields of `RunSettings`.
DERIVED = {
    "output_dir": "output",
    "seed": "seed",
    "max_steps": "steps",
    "num_train_epochs": "steps",
    "per_device_train_batch_size": "rows_per_device",
    "gradient_accumulation_steps": "tokens_per_step",
    "learning_rate": "optimizer",
    "weight_decay": "optimizer",
    "optim": "optimizer",
    "max_grad_norm": "optimizer.max_grad_norm",
    "lr_scheduler_type": "optimizer.constant_fraction",
    "lr_scheduler_kwargs": "optimizer.constant_fraction",
    "warmup_steps": "optimizer.constant_fraction",
}


@dataclass
class OptimizerSettings:
    """
    The recipe of the paper. `matrices` are the weights of the linear layers inside the decoder
    layers.

    Attributes:
        matrices: "muon" or "adamw".
        matrix_lr, matrix_weight_decay, momentum: of the matrices.
        embedding_lr, head_lr, other_lr, betas, eps, weight_decay: AdamW for all else. (Its weight
            decay is 0: the paper names none, and 0.01 at a learning rate of 0.3 would shrink the
            embedding by 0.3% a step.)
        constant_fraction: share of the steps at the full learning rate; then linear to zero.
        max_grad_norm: gradients are clipped to it.
    """

    matrices: str = "muon"
    matrix_lr: float = 0.02
    matrix_weight_decay: float = 0.01
    momentum: float = 0.95
    embedding_lr: float = 0.3
    head_lr: float = 1 / 320
    other_lr: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.8, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    constant_fraction: float = 0.3
    max_grad_norm: float = 1.0

    def __post_init__(self):
        if self.matrices not in ("muon", "adamw"):
            raise ValueError(f"optimizer.matrices must be muon or adamw, got {self.matrices!r}.")
        if not 0 <= self.constant_fraction <= 1:
            raise ValueError("optimizer.constant_fraction must be from 0 to 1.")


@dataclass
class RunSettings:
    """
    One training run.

    Attributes:
        data: folder that `prepare_data.py` wrote.
        output: folder of checkpoints, logs, `model/` and `result.json`.
        model: fields of `AtmaConfig`; vocabulary and special tokens are those of the data.
        zero_conv_in_proj: start `in_proj` of the short convolutions at zero, as the original
            training script does. (With `out_proj` at zero, too, these layers then never learn.)
        sequence_length, tokens_per_step, steps: what is read.
        rows_per_device: sequences of one forward pass on one device; accumulation makes up
            `tokens_per_step` on any number of processes.
        document_boundaries: whether documents in a row are kept apart. The default is rows cut from
            one stream, in which documents see what stands before them: nothing is padded, every row
            has one shape, and the model meets changes of topic, as a long context does.
        repeated_rows: share of the training rows in which a passage stands twice; see
            `rows.repeat_passage`. Without `document_boundaries` only.
        weights: "float32" (bfloat16 is then a matter of `trainer: {bf16: true}`) or "bfloat16".
        compile_layers: compile each kind of decoder layer, once, instead of the whole model (which
            `trainer: {torch_compile: true}` does): far less to compile for nearly the same speed.
        validation_rows: rows of the validation split for evaluations during the training.
        seed: of weights and of the order of the data, which depends on nothing else.
        optimizer: see `OptimizerSettings`.
        peak_flops: of one device, for MFU; known by itself for H100 and H200.
        trainer: other fields of Transformers' `TrainingArguments`.
    """

    data: str
    output: str
    model: dict = field(default_factory=dict)
    zero_conv_in_proj: bool = False
    sequence_length: int = 2048
    tokens_per_step: int = 524288
    steps: int = 1900
    rows_per_device: int = 16
    document_boundaries: bool = False
    repeated_rows: float = 0.0
    weights: str = "float32"
    compile_layers: bool = False
    validation_rows: int = 64
    seed: int = 0
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    peak_flops: float | None = None
    trainer: dict = field(default_factory=dict)

    def __post_init__(self):
        if isinstance(self.optimizer, dict):
            self.optimizer = build(OptimizerSettings, self.optimizer, "optimizer.")
        if self.weights not in ("float32", "bfloat16"):
            raise ValueError(f"weights must be float32 or bfloat16, got {self.weights!r}.")
        if not 0 <= self.repeated_rows <= 1:
            raise ValueError("repeated_rows must be from 0 to 1.")
        if self.repeated_rows and self.document_boundaries:
            raise ValueError(
                "document_boundaries part a passage from its copy, so that repeated_rows would do "
                "nothing: set one of them."
            )
        for name in ("sequence_length", "tokens_per_step", "steps", "rows_per_device"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}.")
        for name in sorted(set(self.trainer) & set(DERIVED)):
            raise ValueError(f"trainer.{name} follows from {DERIVED[name]}: set that instead.")

    def identity(self) -> dict:
        """What the model of a run follows from; not where it runs, nor what it writes when."""
        places = ("data", "output", "rows_per_device", "compile_layers", "peak_flops")
        aside = ("save_", "logging_", "eval_", "dataloader_", "report_to", "disable_", "use_cpu")
        values = dataclasses.asdict(self)
        values["trainer"] = {n: v for n, v in self.trainer.items() if not n.startswith(aside)}
        values = {n: v for n, v in values.items() if n not in (*places, "validation_rows")}
        return values | {"data": fingerprint(self.data)}  # wherever they lie

    def accumulation_steps(self, num_processes: int) -> int:
        """Forward passes of one step on each process. Raises `ValueError` if they do not add up."""
        at_once = self.sequence_length * self.rows_per_device * num_processes
        if self.tokens_per_step % at_once:
            raise ValueError(
                f"tokens_per_step ({self.tokens_per_step}) must be a multiple of sequence_length x "
                f"rows_per_device x processes ({self.sequence_length} x {self.rows_per_device} x "
                f"{num_processes}): change rows_per_device."
            )
        return self.tokens_per_step // at_once


def build(cls: type, values: dict, prefix: str = ""):
    """
    A settings object from a dictionary. YAML reads `1e-3` as text, so numbers are converted.
    Raises `ValueError` for names that do not exist, and what is missing or of a wrong type.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if unknown := sorted(set(values) - set(fields)):
        raise ValueError(
            f"Unknown setting {prefix}{unknown[0]}: choose from {', '.join(sorted(fields))}."
        )
    hints = typing.get_type_hints(cls)
    converted = {
        name: _convert(prefix + name, value, hints[name]) for name, value in values.items()
    }
    try:
        return cls(**converted)
    except TypeError as error:
        raise ValueError(f"Incomplete settings: {error}.") from error


def _convert(name: str, value, hint):
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    kind = kinds[0]
    try:
        if kind in (int, float) and not isinstance(value, bool):
            if float(value) == kind(float(value)):
                return kind(float(value))
        elif kind is str and isinstance(value, str | Path):
            return str(value)
        elif kind not in (int, float, str):
            origin = typing.get_origin(kind) or kind
            if isinstance(value, (origin, dict) if dataclasses.is_dataclass(origin) else origin):
                return [float(x) for x in value] if origin is list else value
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{name} must be of type {hint}, got {value!r}.")


def merge(base: dict, changes: dict) -> dict:
    """`base` with `changes`, dictionaries inside merged as well."""
    merged = dict(base)
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = merge(merged[name], value) if both else value
    return merged


def read_yaml(path: str | Path) -> dict:
    try:
        values = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML file: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold names and values.")
    return values


def parse_override(text: str) -> dict:
    """`model.hidden_size=64` as a nested dictionary; the value is read as YAML."""
    name, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"An override is name=value, got {text!r}.")
    nested = yaml.safe_load(value)
    for part in reversed(name.split(".")):
        nested = {part: nested}
    return nested


def load_run(path: str | Path, overrides: list[str] = ()) -> RunSettings:
    values = read_yaml(path)
    for override in overrides:
        values = merge(values, parse_override(override))
    return build(RunSettings, values)


__all__ = ["OptimizerSettings", "RunSettings", "load_run", "merge", "parse_override", "read_yaml"]
