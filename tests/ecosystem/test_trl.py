# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""TRL's trainers, a few steps each; packed documents do not see each other."""

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.trainer.utils import add_fused_lm_head

LENGTHS = (20, 13, 7, 16, 9, 11, 18, 5)


OPTIONS = {
    "per_device_train_batch_size": 2,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
}


def trained(trainer):
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    parameters = dict(trainer.model.named_parameters())
    assert all(not torch.equal(parameters[name], value) for name, value in before.items())
    return [entry for entry in trainer.state.log_history if "loss" in entry]


PACKING = {
    "padded": {},
    "padding-free": {"padding_free": True, "max_length": None},
    "bfd": {"packing": True, "packing_strategy": "bfd"},
    "wrapped": {"packing": True, "packing_strategy": "wrapped"},
}


@pytest.mark.parametrize("kind", PACKING)
def test_sft_trains(make_model, text, tokenizer, tmp_path, kind):
    rows = Dataset.from_dict({"text": [text(n, n) for n in LENGTHS]})
    config = SFTConfig(str(tmp_path), **{"max_length": 32, **PACKING[kind], **OPTIONS})
    logs = trained(SFTTrainer(make_model(), config, train_dataset=rows, processing_class=tokenizer))
    assert len(logs) == 3 and all(0 < entry["loss"] < 20 for entry in logs)


FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def loud(make_model, **overrides):
    """A model whose logits go far beyond the cap."""
    model = make_model(**overrides)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model.train()


def test_trl_computes_the_loss_of_the_model(make_model, tokens):
    """Its fused head reads the head's weights: the soft cap and the distractor loss count too."""
    ids = tokens(2, 12)
    labels = ids.clone()
    labels[0, :5] = -100
    for overrides in ({}, {"distractor_keys": 3}):
        results = []
        for fused in (False, True):
            model = loud(make_model, **overrides)
            options = {}
            if fused:
                add_fused_lm_head(model)
                options = {"fused_lm_head": True}
            torch.manual_seed(0)
            loss = model(input_ids=ids, labels=labels, num_items_in_batch=9, **options).loss
            loss.backward()
            results.append((loss, [p.grad for p in model.parameters()]))
        assert results[0][0].item() == pytest.approx(results[1][0].item(), rel=1e-5)
        for one, other in zip(results[0][1], results[1][1], strict=True):
            assert (one - other).norm() <= 1e-4 * one.norm()


@pytest.mark.parametrize("shifted", [False, True])
def test_without_a_cap_all_its_fields_are_those_of_trl(make_model, tokens, shifted, monkeypatch):
    ids = tokens(2, 12)
    labels = ids.clone()
    labels[1, 7:] = -100
    key = "shift_labels" if shifted else "labels"
    results = []
    for is_own in (True, False):
        model = make_model(logit_softcap=1e6)
        if not is_own:
            monkeypatch.setattr("atma.modeling_atma.with_soft_cap", lambda model, value: value)
        add_fused_lm_head(model, temperature=0.7, outputs=FIELDS)
        results.append(model(input_ids=ids, fused_lm_head=True, **{key: labels}))
    for name in (*FIELDS, "loss", "label_mask"):
        one, other = results[0][name], results[1][name]
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_fused_head_of_unknown_make_is_refused(make_model):
    def forward(self, fused_lm_head=False):
        return None

    with pytest.raises(ValueError, match="would leave out the soft cap"):
        make_model().forward = forward


def test_packing_of_sft_keeps_documents_apart(make_model, text, tokenizer, tmp_path):
    """Its first batch gives the loss of the documents one by one."""
    rows = Dataset.from_dict({"text": [text(n, n) for n in LENGTHS]})
    config = SFTConfig(str(tmp_path), max_length=32, packing=True, **OPTIONS)
    model = make_model()
    trainer = SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    assert (batch["position_ids"] == 0).sum() > 1 and "attention_mask" not in batch
    batch = {name: x for name, x in batch.items() if isinstance(x, torch.Tensor)}
    found = model(**batch)
    starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    total = count = 0
    for start, end in zip(starts, [*starts[1:], batch["input_ids"].shape[1]], strict=True):
        ids, labels = (batch[name][:, start:end] for name in ("input_ids", "labels"))
        logits = make_model()(ids).logits
        assert (found.logits[:, start:end] - logits).abs().max() < 5e-4
        kept = labels[0, 1:] != -100
        total += F.cross_entropy(logits[0, :-1][kept], labels[0, 1:][kept], reduction="sum")
        count += kept.sum()
    assert torch.allclose(found.loss, total / count, atol=1e-4)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_dpo_trains(make_model, text, tokenizer, tmp_path, lora):
    rows = Dataset.from_dict(
        {
            "prompt": [text(n, n) for n in LENGTHS],
            "chosen": [" " + text(6, n + 30) for n in LENGTHS],
            "rejected": [" " + text(9, n + 60) for n in LENGTHS],
        }
    )
    model = make_model()
    trainer = DPOTrainer(
        model,
        None if lora else make_model(),
        DPOConfig(str(tmp_path), max_length=40, **OPTIONS),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=LoraConfig(target_modules="all-linear") if lora else None,
    )
    logs = trained(trainer)
    # The reference is the model itself before training: no preference yet.
    assert logs[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert logs[-1]["loss"] != logs[0]["loss"]


def test_grpo_trains_on_what_it_generates(make_model, text, tokenizer, tmp_path):
    rows = Dataset.from_dict({"prompt": [text(n, n) for n in LENGTHS]})
    options = {**OPTIONS, "per_device_train_batch_size": 4, "num_generations": 4}
    make_model(eos_token_id=1).save_pretrained(tmp_path / "model")
    trainer = GRPOTrainer(
        str(tmp_path / "model"),
        reward_funcs=lambda completions, **kwargs: [float(len(x) % 7) for x in completions],
        args=GRPOConfig(str(tmp_path), max_completion_length=6, beta=0.1, **options),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    logs = trained(trainer)
    # Before training, the policy is the reference.
    assert abs(logs[0]["kl"]) < 1e-5 and all(entry["reward_std"] >= 0 for entry in logs)
