# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Training: gradients everywhere, losses that count right, checkpointing, Trainer."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from atma import AtmaConfig, AtmaForCausalLM
from datasets import Dataset
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from transformers import Trainer, TrainingArguments

CORES = ["polar", "nope", "rope"]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("tie", [False, True])
def test_every_parameter_gets_a_gradient_after_a_few_steps(core, tie):
    """From the default initialisation: zeros stand only where a gradient can move them."""
    torch.manual_seed(0)
    config = AtmaConfig.tiny(attention_type=core, tie_word_embeddings=tie)
    model = AtmaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(4):
        ids = torch.randint(0, config.vocab_size, (4, 32))
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_only_what_writes_to_the_residual_stream_starts_at_zero():
    model = AtmaForCausalLM(AtmaConfig.tiny())
    zero = {name for name, p in model.named_parameters() if "weight" in name and not p.any()}
    assert {name.rsplit(".", 2)[-2] for name in zero} == {
        "o_proj",
        "out_proj",
        "down_proj",
        "lm_head",
    }
    full = AtmaForCausalLM(AtmaConfig.tiny(zero_init_residual=False))
    assert all(p.any() for name, p in full.named_parameters() if name.endswith("weight"))


def test_initial_values_are_those_of_the_paper():
    mixer = AtmaForCausalLM(AtmaConfig.tiny()).model.layers[2].mixer
    for name, value in {
        "length_gain": -1.0,
        "null_base": 2.0,
        "null_slope": 0.5,
        "magnitude_gain": -1.5,
        "null_value": 0.0,
    }.items():
        assert (getattr(mixer, name) == value).all(), name


def test_the_loss_is_the_shifted_cross_entropy(make_model, tokens, close):
    model = make_model()
    ids = tokens(2, 12)
    labels = ids.clone()
    labels[0, :5] = -100
    output = model(ids, labels=labels)
    expected = F.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
    close(output.loss, expected, 1e-6)
    assert torch.equal(model(ids, labels=labels, return_dict=False)[0], output.loss)


@pytest.mark.parametrize("distractor_keys", [0, 5])
def test_accumulation_counts_labels_not_batches(make_model, tokens, distractor_keys, monkeypatch):
    """One batch of four unequal rows and four batches of one give the same loss and gradients."""
    model = make_model(distractor_keys=distractor_keys).train()
    if distractor_keys:  # the same random keys in every call
        fixed = torch.randn(distractor_keys, 64)
        monkeypatch.setattr(torch, "randn", lambda *size, **kwargs: fixed)
    ids = tokens(4, 12)
    labels = ids.clone()
    for row, masked in enumerate((1, 4, 7, 10)):
        labels[row, :masked] = -100
    items = (labels[:, 1:] != -100).sum()
    results = []
    for rows in ([0, 1, 2, 3], [0], [1], [2], [3]):
        model.zero_grad()
        output = model(ids[rows], labels=labels[rows], num_items_in_batch=items)
        output.loss.backward()
        results.append(
            (output.loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()})
        )
    if not distractor_keys:
        (whole, grads), parts = results[0], results[1:]
        assert torch.allclose(whole, sum(loss for loss, _ in parts), rtol=1e-5)
        for name in grads:
            summed = sum(part[name] for _, part in parts)
            assert (summed - grads[name]).norm() <= 1e-5 * grads[name].norm(), name
        logits = model(ids).logits
        total = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )
        assert torch.allclose(whole, total / items, rtol=1e-5)
    else:  # the mass is a mean over the rows of a call, weighed by the share of labels
        model.config.distractor_loss_coef = 0.0
        bare = [
            model(ids[rows], labels=labels[rows], num_items_in_batch=items).loss.detach()
            for rows in ([0, 1, 2, 3], [0], [1], [2], [3])
        ]
        terms = [loss - plain for (loss, _), plain in zip(results, bare, strict=True)]
        assert 0.5 < (sum(terms[1:]) / terms[0]).item() < 2.0


def test_forward_names_what_trainer_looks_for():
    names = inspect.signature(AtmaForCausalLM.forward).parameters
    for name in (
        "input_ids",
        "attention_mask",
        "position_ids",
        "labels",
        "inputs_embeds",
        "use_cache",
        "logits_to_keep",
    ):
        assert name in names
    assert any(p.kind is p.VAR_KEYWORD for p in names.values())


def test_labels_may_come_in_another_dtype(model, tokens):
    ids = tokens(2, 9)
    expected = model(ids, labels=ids).loss
    assert torch.equal(model(ids.int(), labels=ids).loss, expected)


def test_labels_with_logits_to_keep_are_refused(model, tokens):
    ids = tokens(1, 9)
    with pytest.raises(ValueError, match="leave logits_to_keep at 0"):
        model(ids, labels=ids, logits_to_keep=3)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(make_model, tokens, core, reentrant):
    ids = tokens(2, 19)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    grads = []
    for checkpointing in (False, True):
        model = make_model(attention_type=core, distractor_keys=3 if core == "polar" else 0).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(3)
        output = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        output.loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name in grads[0]:
        # The distractor keys are drawn anew by each forward; the recomputation restores the draw.
        assert (grads[0][name] - grads[1][name]).norm() <= 1e-5 * grads[0][name].norm(), name


def test_layers_may_be_recomputed_by_a_wrapper(make_model, tokens):
    """As FSDP's and accelerate's checkpointing do, of which the model knows nothing."""
    ids = tokens(2, 19)
    plain, model = make_model().train(), make_model().train()
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    for each in (plain, model):
        each(ids, labels=ids).loss.backward()
    for (name, p), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, other.grad), name
    with pytest.raises(RuntimeError, match="pass use_cache=False"):
        model(ids, labels=ids, use_cache=True).loss.backward()


def test_a_filled_cache_with_checkpointing_is_refused(make_model, tokens):
    model = make_model().train()
    model.gradient_checkpointing_enable()
    cache = model.eval()(tokens(1, 5), use_cache=True).cache
    model.train()
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        model(tokens(1, 3), cache=cache)


def test_generate_works_while_checkpointing_is_on(make_model, tokens):
    model = make_model()
    ids = tokens(2, 7)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    model.train().gradient_checkpointing_enable()
    found = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(found, expected)


def test_the_distractor_loss_needs_training_and_flows_to_the_null(make_model, tokens):
    model = make_model(distractor_keys=6)
    ids = tokens(2, 12)
    assert model(ids, labels=ids).distractor_loss is None
    model.train()
    output = model(ids, labels=ids)
    assert 0 < output.distractor_loss < 1
    plain = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert torch.allclose(output.loss, plain + 0.01 * output.distractor_loss)
    mixer = model.model.layers[1].mixer
    (grad,) = torch.autograd.grad(output.distractor_loss, mixer.null_base)
    assert (grad < 0).all()  # a stronger null loses less mass


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_trains_fp32_weights(make_model, tokens, dtype):
    model = make_model().train()
    ids = tokens(2, 12)
    with torch.autocast("cpu", dtype=dtype):
        loss = model(ids, labels=ids).loss
    loss.backward()
    exact = make_model().train()(ids, labels=ids).loss
    assert abs(loss.item() - exact.item()) < 0.05
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all(), name


@pytest.fixture
def texts(tokens):
    rows = [tokens(n, seed=n).tolist() for n in (20, 13, 7, 16, 9, 11, 18)]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def collate(features):
    width = max(len(f["input_ids"]) for f in features)
    pad = [width - len(f["input_ids"]) for f in features]
    rows = list(zip(features, pad, strict=True))
    return {
        "input_ids": torch.tensor([f["input_ids"] + [0] * n for f, n in rows]),
        "attention_mask": torch.tensor([[1] * len(f["input_ids"]) + [0] * n for f, n in rows]),
        "labels": torch.tensor([f["labels"] + [-100] * n for f, n in rows]),
    }


def arguments(folder, **kwargs) -> TrainingArguments:
    fields = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    return TrainingArguments(**{**fields, **kwargs})


def test_trainer_trains_evaluates_and_keeps_no_cache(make_model, texts, tmp_path):
    model = make_model()
    shapes = []

    def metrics(prediction):
        shapes.append(prediction.predictions.shape)
        return {"rows": len(prediction.predictions)}

    trainer = Trainer(
        model,
        arguments(tmp_path),
        train_dataset=texts,
        eval_dataset=texts,
        data_collator=collate,
        compute_metrics=metrics,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4 and all(0 < loss < 20 for loss in losses)
    result = trainer.evaluate()
    assert result["eval_rows"] == 7 and shapes[0][0] == 7 and shapes[0][2] == 101
    assert trainer.predict(texts).predictions.shape[0] == 7


def test_trainer_accumulation_equals_one_large_batch(make_model, texts, tmp_path):
    weights = []
    for batch, steps in ((4, 1), (1, 4)):
        model = make_model()
        options = {
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": steps,
            "max_steps": 1,
            "optim": "sgd",
            "max_grad_norm": 0,
        }
        trainer = Trainer(
            model,
            arguments(tmp_path, **options),
            train_dataset=texts,
            data_collator=collate,
        )
        trainer.train()
        weights.append(model.lm_head.weight.detach())
    moved = (weights[0] - make_model().lm_head.weight).norm()
    assert (weights[0] - weights[1]).norm() <= 1e-4 * moved


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_no_two_gradients_are_one_expression_to_the_compiler(core, autocast):
    """It would compute both once and return one buffer, to which the next micro-batch is then added
    twice: see kernels/separate_gradient.py."""
    graphs = []

    def record(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph)

    model = AtmaForCausalLM(AtmaConfig.tiny(attention_type=core)).train()
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=record)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=backend)
    ids = torch.randint(0, 64, (1, 16))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(ids, labels=ids).loss.backward()
    assert len(graphs) == 2  # a convolution and a hybrid layer
    for graph in graphs:
        gradients = expressions_returned(graph.graph)
        assert len(gradients) > 10 and len(set(gradients)) == len(gradients)


def expressions_returned(graph: torch.fx.Graph) -> list[int]:
    """A number for each output: equal ones for equal operations on equal arguments."""
    numbers: dict[tuple, int] = {}
    numbers_of: dict[torch.fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "output":
            return [numbers_of[each] for each in node.args[0] if each is not None]
        arguments = torch.fx.map_arg((node.args, node.kwargs), numbers_of.__getitem__)
        key = (node.name if node.op == "placeholder" else str(node.target), str(arguments))
        numbers_of[node] = numbers.setdefault(key, len(numbers))
    raise AssertionError("a graph ends with its output")
