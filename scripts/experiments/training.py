# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Training by Transformers' Trainer: what it lacks for our recipe, and a run from its settings."""

import sys
import time
from pathlib import Path

import torch
from atma import AtmaConfig, AtmaForCausalLM
from atma.modeling_atma import AtmaShortConv
from benchmarks.training import PEAK_FLOPS, flops_per_token
from huggingface_hub.errors import StrictDataclassError
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoTokenizer, Trainer, TrainerCallback, TrainingArguments, set_seed

from .checkpoints import RUN_SETTINGS, last_checkpoint, refuse_other_run
from .files import write_json
from .optimizer import build_optimizer
from .refusals import refuse_unknown
from .rows import Rows, isolate_documents, stack_rows
from .settings import RunSettings
from .shards import Shards


class PretrainingTrainer(Trainer):
    """Trainer with the optimizer of `settings`, and throughput, MFU and time left in its logs."""

    def __init__(self, settings: RunSettings, **kwargs):
        self.settings = settings
        super().__init__(**kwargs)
        self._flops = flops_per_token(self.model, settings.sequence_length)
        self._mark: tuple[float, int] | None = None

    def create_accelerator_and_postprocess(self) -> None:
        """
        Under FSDP2 gradients are added up, and the loss is returned, in fp32, as with DDP: not in
        the 16 bits that accelerate fills in for whoever chose no policy.
        """
        super().create_accelerator_and_postprocess()
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        policy = getattr(plugin, "mixed_precision_policy", None)
        if isinstance(policy, MixedPrecisionPolicy):
            dtype = policy.param_dtype
            if policy == MixedPrecisionPolicy(dtype, dtype, dtype):
                plugin.mixed_precision_policy = MixedPrecisionPolicy(dtype, torch.float32)

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = build_optimizer(model or self.model, self.settings.optimizer)
        return self.optimizer

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Between two logs. The first counts from the end of the first step: it holds compilation.
        if "loss" in logs and self._mark is not None:
            logs |= self._speed(*self._mark)
        if "loss" in logs:
            self._mark = time.perf_counter(), self.state.global_step
            # Trainer subtracts what it logged: a loss that is not finite would stay in all sums.
            self._tr_loss.zero_()
        super().log(logs, start_time)

    def _speed(self, since: float, step: int) -> dict[str, float]:
        seconds = time.perf_counter() - since
        steps = self.state.global_step - step
        rate = steps * self.settings.tokens_per_step / seconds
        left = self.state.max_steps - self.state.global_step
        speed = {
            "tokens_per_second": round(rate),
            "minutes_left": round(left * seconds / steps / 60, 1),
        }
        peak = self.settings.peak_flops or peak_flops(self.args.device)
        if peak is not None:
            speed["mfu"] = round(rate * self._flops / (peak * self.args.world_size), 4)
        if self.args.device.type == "cuda":
            speed["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        return speed


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 of one device, where it is known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return PEAK_FLOPS if any(part in name for part in ("H100", "H200")) else None


class StopAfter(TrainerCallback):
    """
    Saves a checkpoint and stops after `deadline`, on all processes in one step (several processes
    agree at the steps that are logged).
    """

    def __init__(self, deadline: float):
        self.deadline = deadline

    def on_step_end(self, args, state, control, **kwargs):
        over = time.monotonic() > self.deadline
        if args.world_size > 1:
            # Where a log waits for the device anyway: launches have to run ahead of it.
            if state.global_step % state.logging_steps:
                return
            agreed = torch.tensor([over], device=args.device)
            torch.distributed.broadcast(agreed, src=0)
            over = agreed.item()
        if over and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True


class FirstLog(TrainerCallback):
    """Logs after the first step, from where on speed is measured."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            control.should_log = True


def build_model(settings: RunSettings, tokenizer) -> AtmaForCausalLM:
    """The model of a run, with the vocabulary of its data."""
    from_data = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "max_position_embeddings": settings.sequence_length,
    }
    config = AtmaConfig(**{**from_data, **settings.model})
    if config.vocab_size < len(tokenizer):
        raise ValueError(
            f"model.vocab_size is {config.vocab_size}, the data's tokenizer has {len(tokenizer)} "
            "tokens: leave it out, or make it larger."
        )
    set_seed(settings.seed)
    model = AtmaForCausalLM(config)
    if settings.zero_conv_in_proj:
        for module in model.modules():
            if isinstance(module, AtmaShortConv):
                torch.nn.init.zeros_(module.in_proj.weight)
    if settings.compile_layers:
        # Under DDP dynamo would cut each graph at the borders of gradient buckets, so that buckets
        # need not wait for the whole model. Layers are small enough, and faster in one piece.
        torch._dynamo.config.optimize_ddp = False
        for layer in model.model.layers:
            layer.compile(fullgraph=True)  # in place; layers of one kind share their code
    return model.to(getattr(torch, settings.weights))


def training_arguments(settings: RunSettings) -> TrainingArguments:
    optimizer = settings.optimizer
    decay = settings.steps - int(settings.steps * optimizer.constant_fraction)
    defaults = {
        "logging_steps": 10,
        # In every pass the filter would wait for the loss, and the GPU then for the next launches.
        "logging_nan_inf_filter": False,
        "save_steps": 100,
        "save_total_limit": 1,
        "report_to": "none",
        "disable_tqdm": not sys.stderr.isatty(),
        "dataloader_pin_memory": torch.cuda.is_available(),
        "prediction_loss_only": True,
        "ddp_find_unused_parameters": False,
    }
    refuse_unknown(settings.trainer, TrainingArguments.__dataclass_fields__, "TrainingArguments")
    # YAML reads a bare `no` as false.
    given = {
        name: "no" if value is False and name.endswith("_strategy") else value
        for name, value in settings.trainer.items()
    }
    if isinstance(given.setdefault("accelerator_config", {}), dict):  # or the path of a file
        # Rows are likewise copied without waiting.
        copies = {"non_blocking": torch.cuda.is_available()}
        given["accelerator_config"] = copies | given["accelerator_config"]
    arguments = TrainingArguments(
        **{**defaults, **given},
        output_dir=settings.output,
        seed=settings.seed,
        max_steps=settings.steps,
        per_device_train_batch_size=settings.rows_per_device,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": decay, "decay_type": "linear"},
        max_grad_norm=optimizer.max_grad_norm,
        train_sampling_strategy="sequential",  # `Rows` has its own order
        remove_unused_columns=False,
    )
    if settings.compile_layers and arguments.n_gpu > 1:
        # Trainer would copy the model to each GPU in every step, and the copies share their code.
        raise ValueError(
            f"One process sees {arguments.n_gpu} GPUs: start one for each, with `accelerate launch "
            f"--multi_gpu --num_processes {arguments.n_gpu} scripts/train.py ...`, or show it a "
            "single one with CUDA_VISIBLE_DEVICES=0."
        )
    arguments.gradient_accumulation_steps = settings.accumulation_steps(arguments.world_size)
    return arguments


def check_start(settings: RunSettings) -> None:
    """
    Raises `ValueError` if the folder of the run holds one with other settings or its model cannot
    be, and `FileNotFoundError` if the data are not there.
    """
    Shards(settings.data, "train")
    refuse_other_run(settings.output, settings.identity(), later=["data"])
    names = [name for name in dir(AtmaConfig) if not name.startswith("_")]
    fields = [name for name in names if not callable(getattr(AtmaConfig, name))]
    refuse_unknown(settings.model, fields, "AtmaConfig")
    try:
        AtmaConfig(**settings.model)
    except StrictDataclassError as error:  # of another type
        raise ValueError(f"{error}") from error


def build_trainer(settings: RunSettings, deadline: float | None = None) -> PretrainingTrainer:
    """
    The Trainer of a run, with its model and data; it stops at `deadline`, a time of
    `time.monotonic()`. Raises what `check_start` does.
    """
    check_start(settings)
    shards = Shards(settings.data, "train")
    tokenizer = AutoTokenizer.from_pretrained(Path(settings.data) / "tokenizer")
    arguments = training_arguments(settings)
    length = settings.sequence_length
    num_rows = settings.steps * (settings.tokens_per_step // length)
    validation_rows = None
    if settings.validation_rows and arguments.eval_strategy != "no":
        validation = Shards(settings.data, "validation")
        validation_rows = Rows(validation, length, settings.validation_rows)
    return PretrainingTrainer(
        settings,
        model=build_model(settings, tokenizer),
        args=arguments,
        train_dataset=Rows(shards, length, num_rows, settings.seed, settings.repeated_rows),
        eval_dataset=validation_rows,
        data_collator=isolate_documents if settings.document_boundaries else stack_rows,
        processing_class=tokenizer,
        callbacks=[FirstLog()] + ([] if deadline is None else [StopAfter(deadline)]),
    )


def train(trainer: PretrainingTrainer) -> dict | None:
    """
    Trains, from the last checkpoint in the run's folder if there is one, and saves the model.

    Returns what `result.json` holds, or `None` if the deadline ended it early.
    """
    settings = trainer.settings
    output = Path(settings.output)
    checkpoint = last_checkpoint(output)
    if trainer.is_world_process_zero():
        output.mkdir(parents=True, exist_ok=True)
        write_json(output / RUN_SETTINGS, settings.identity())
    trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.state.global_step < settings.steps:
        return None
    trainer.model.config.use_cache = True  # Trainer switches it off; the saved model wants it
    trainer.save_model(str(output / "model"))
    result = summarise(trainer)
    if trainer.is_world_process_zero():
        write_json(output / "result.json", result)
    return result


def summarise(trainer: PretrainingTrainer) -> dict:
    """Losses and speeds of a finished run."""
    settings, logs = trainer.settings, trainer.state.log_history
    losses = [entry for entry in logs if "loss" in entry]
    speeds = sorted(entry["tokens_per_second"] for entry in logs if "tokens_per_second" in entry)
    utilisation = sorted(entry["mfu"] for entry in logs if "mfu" in entry)
    return {
        "parameters": trainer.accelerator.unwrap_model(trainer.model).num_parameters(),
        "tokens": settings.steps * settings.tokens_per_step,
        "steps": settings.steps,
        "passes_over_the_text": round(
            len(trainer.train_dataset) / trainer.train_dataset.rows_in_stream, 3
        ),
        "loss": losses[-1]["loss"],
        "losses": [[entry["step"], entry["loss"]] for entry in losses],
        "validation_losses": [[e["step"], e["eval_loss"]] for e in logs if "eval_loss" in e],
        "tokens_per_second": speeds[len(speeds) // 2] if speeds else None,
        "mfu": utilisation[len(utilisation) // 2] if utilisation else None,
        "peak_gib": max((entry["peak_gib"] for entry in logs if "peak_gib" in entry), default=None),
        "devices": trainer.args.world_size,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }


__all__ = [
    "PretrainingTrainer",
    "build_model",
    "build_trainer",
    "check_start",
    "train",
    "training_arguments",
]
