# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Trainer's options on the tiny model."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

LENGTHS = (20, 13, 7, 16, 9, 11, 18, 5)


@pytest.fixture
def rows(tokens):
    ids = [tokens(n, seed=n).tolist() for n in LENGTHS]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def padded(features):
    width = max(len(f["input_ids"]) for f in features)
    pad = [width - len(f["input_ids"]) for f in features]
    both = list(zip(features, pad, strict=True))
    return {
        "input_ids": torch.tensor([f["input_ids"] + [0] * n for f, n in both]),
        "attention_mask": torch.tensor([[1] * len(f["input_ids"]) + [0] * n for f, n in both]),
        "labels": torch.tensor([f["labels"] + [-100] * n for f, n in both]),
    }


def make_trainer(model, rows, folder, collator=padded, callbacks=None, **options):
    fields = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "lr_scheduler_type": "linear",
    }
    arguments = TrainingArguments(**{**fields, **options})
    return Trainer(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=collator,
        callbacks=callbacks,
    )


def losses_of(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trained_losses(*args, **options) -> list[float]:
    trainer = make_trainer(*args, **options)
    trainer.train()
    return losses_of(trainer)


class ExactLosses(TrainerCallback):
    """Losses as they are, where the log rounds them."""

    def __init__(self, model):
        self.values = []
        model.register_forward_hook(lambda module, args, output: self.values.append(output.loss))


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(make_model, rows, tmp_path, lora):
    """Random numbers included: the distractor keys are drawn anew in each step."""

    def start():
        model = make_model(distractor_keys=4)
        if lora:
            torch.manual_seed(2)
            model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
        return model, ExactLosses(model)

    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    model, whole = start()
    make_trainer(model, rows, tmp_path, callbacks=[whole], **options).train()
    resumed_model, resumed = start()
    trainer = make_trainer(resumed_model, rows, tmp_path, callbacks=[resumed], **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert len(whole.values) == 6
    assert [x.item() for x in resumed.values] == [x.item() for x in whole.values[3:]]
    for (name, a), b in zip(model.named_parameters(), resumed_model.parameters(), strict=True):
        assert torch.equal(a, b), name


CHECKPOINTING = {
    "non-reentrant": {"activation_checkpointing": True},
    "reentrant": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": True},
    },
}


@pytest.mark.parametrize("kind", CHECKPOINTING)
def test_checkpointing_changes_no_loss(make_model, rows, tmp_path, kind):
    plain = trained_losses(make_model(), rows, tmp_path)
    losses = trained_losses(make_model(), rows, tmp_path, **CHECKPOINTING[kind])
    assert losses == pytest.approx(plain, abs=2e-4)


def test_compilation_changes_no_loss(make_model, rows, tmp_path):
    """Batches of one width: in plain PyTorch, every new width is a new graph."""

    def wide(features):
        return {
            name: F.pad(x, (0, 24 - x.shape[1]), value=-100 if name == "labels" else 0)
            for name, x in padded(features).items()
        }

    kinds = {"layer_types": ["conv", "hybrid"]}
    plain = trained_losses(make_model(**kinds), rows, tmp_path, wide)
    losses = trained_losses(
        make_model(**kinds),
        rows,
        tmp_path,
        wide,
        torch_compile=True,
        torch_compile_backend="aot_eager",
    )
    assert losses == pytest.approx(plain, abs=2e-4)


@pytest.mark.parametrize("collator", ["ids", "boundaries", "documents"])
def test_flattened_batches_train_as_padded_ones(make_model, rows, tmp_path, collator):
    flatten = DataCollatorWithFlattening(
        return_flash_attn_kwargs=collator == "boundaries",
        return_seq_idx=collator == "documents",
        return_position_ids=collator != "documents",
    )
    losses = trained_losses(make_model(), rows, tmp_path, flatten, remove_unused_columns=False)
    expected = trained_losses(make_model(), rows, tmp_path)
    assert losses == pytest.approx(expected, abs=2e-4)


def test_checkpointing_keeps_the_documents_apart(make_model, rows, tmp_path):
    flatten = DataCollatorWithFlattening()
    losses = trained_losses(make_model(), rows, tmp_path, flatten, activation_checkpointing=True)
    assert losses == pytest.approx(trained_losses(make_model(), rows, tmp_path), abs=2e-4)


def test_rows_of_like_length_come_together(make_model, rows, tmp_path):
    model = make_model()
    seen = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"].sum(1).tolist()),
        with_kwargs=True,
    )
    trainer = make_trainer(model, rows, tmp_path, train_sampling_strategy="group_by_length")
    trainer.train()
    assert sorted(n for batch in seen for n in batch) == sorted(LENGTHS)
    assert all(0 < loss < 20 for loss in losses_of(trainer))


def test_the_batch_size_is_found(make_model, rows, tmp_path):
    model = make_model()
    sizes = []

    def small_machine(module, args, kwargs):
        sizes.append(len(kwargs["input_ids"]))
        if sizes[-1] > 7:
            raise RuntimeError("CUDA out of memory.")

    model.register_forward_pre_hook(small_machine, with_kwargs=True)
    trainer = make_trainer(
        model, rows, tmp_path, per_device_train_batch_size=8, auto_find_batch_size=True
    )
    trainer.train()
    assert sizes[0] == 8 and max(sizes[1:]) < 8 and len(losses_of(trainer)) == 4


def test_label_smoothing_shifts_the_labels(make_model, rows, tmp_path):
    """Trainer shifts only for the classes that it knows as causal language models."""
    amount, batch = 0.2, padded(rows.to_list()[:2])
    trainer = make_trainer(make_model(), rows, tmp_path, label_smoothing_factor=amount)
    found = trainer.compute_loss(make_model(), dict(batch))
    log_p = make_model()(batch["input_ids"], attention_mask=batch["attention_mask"])
    log_p = log_p.logits[:, :-1].log_softmax(-1)
    labels = batch["labels"][:, 1:]
    hard = F.nll_loss(log_p.flatten(0, 1), labels.flatten())
    soft = -log_p.mean(-1)[labels != -100].mean()
    assert torch.allclose(found, (1 - amount) * hard + amount * soft, atol=1e-5)


def test_noise_on_the_embeddings_is_for_training_only(make_model, rows, tmp_path, tokens):
    losses = trained_losses(make_model(), rows, tmp_path, neftune_noise_alpha=20.0)
    plain = trained_losses(make_model(), rows, tmp_path)
    assert abs(losses[0] - plain[0]) > 1e-3
    model = make_model()
    make_trainer(model, rows, tmp_path, neftune_noise_alpha=20.0, learning_rate=0.0).train()
    ids = tokens(1, 9)
    assert torch.equal(model.eval()(ids).logits, make_model()(ids).logits)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_bf16_trains(make_model, rows, tmp_path, weights):
    model = make_model(dtype=getattr(torch, weights))
    losses = trained_losses(model, rows, tmp_path, bf16=True)
    plain = trained_losses(make_model(), rows, tmp_path)
    assert losses != plain and losses == pytest.approx(plain, abs=0.1)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, weights)}


def test_fp16_trains(make_model, rows, tmp_path):
    """accelerate leaves fp16 to GPUs and computes in fp32 here; test_gpu.py has it for real."""
    losses = trained_losses(make_model(), rows, tmp_path, fp16=True)
    assert losses == pytest.approx(trained_losses(make_model(), rows, tmp_path), abs=0.1)


def test_evaluation_counts_every_row_once(make_model, rows, tmp_path):
    model = make_model()
    trainer = make_trainer(
        model,
        rows,
        tmp_path,
        per_device_eval_batch_size=3,
        eval_strategy="steps",
        eval_steps=2,
        batch_eval_metrics=True,
        load_best_model_at_end=True,
        save_strategy="steps",
        save_steps=2,
    )
    seen = []

    def metrics(prediction, compute_result):
        seen.append(prediction.predictions.shape)
        return {"rows": sum(shape[0] for shape in seen)} if compute_result else {}

    trainer.compute_metrics = metrics
    trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 2 and evaluations[0]["eval_rows"] == len(LENGTHS)
    assert all(math.isfinite(entry["eval_loss"]) for entry in evaluations)


def test_a_user_loss_and_a_frozen_part_are_honoured(make_model, rows, tmp_path):
    model = make_model()
    for parameter in model.model.layers[:2].parameters():
        parameter.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    trainer = make_trainer(model, rows, tmp_path)
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: F.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    trainer.train()
    for name, value in model.state_dict().items():
        frozen = name.startswith(("model.layers.0.", "model.layers.1."))
        assert torch.equal(value, before[name]) == frozen, name


def test_targets_that_are_already_shifted_count_as_they_are(make_model, tokens):
    """As context parallelism hands them over: the last token of a shard has a target too."""
    model, ids = make_model(distractor_keys=4).train(), tokens(2, 9)
    targets = F.pad(ids[:, 1:], (0, 1), value=7)
    losses = []
    for labels, extra in ((ids, {}), (ids, {"num_items_in_batch": 18})):
        torch.manual_seed(4)
        losses.append(model(ids, labels=labels, shift_labels=targets, **extra).loss)
    assert torch.allclose(*losses, rtol=1e-5)
