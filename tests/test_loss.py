# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The loss: from logits as Transformers computes it, and in chunks of tokens without them."""

import pytest
import torch
import torch.nn.functional as F
from atma import AtmaConfig, AtmaForCausalLM
from atma import loss_atma as module
from atma.plain_atma import is_plain_linear
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.loss.loss_utils import ForCausalLMLoss

FUSED = {"fused_linear_cross_entropy": True}
# The tiny vocabulary fits into one chunk; several are needed to see that they are summed.
CHUNK = 5


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    original = module.linear_cross_entropy
    monkeypatch.setattr(
        module, "linear_cross_entropy", lambda *a, **k: original(*a, **k, chunk_size=CHUNK)
    )
    monkeypatch.setattr(module, "MODULE_CHUNK", CHUNK)


def run(model, ids, **inputs):
    """The loss and all gradients by name."""
    model.train().zero_grad()
    torch.manual_seed(5)  # of distractor keys
    output = model(ids, **{"labels": ids, **inputs})
    output.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return output.loss.detach(), grads


def assert_same(one, other, tolerance=2e-5):
    (loss, grads), (expected, expected_grads) = one, other
    assert abs(loss - expected) <= tolerance * expected
    assert grads.keys() == expected_grads.keys()
    for name in grads:
        difference = (grads[name] - expected_grads[name]).norm()
        assert difference <= tolerance * expected_grads[name].norm() + 1e-7, name


def inputs_of(case, ids):
    labels = ids.clone()
    labels[0, :5] = -100
    return {
        "labels": {},
        "ignored labels": {"labels": labels},
        "another ignore_index": {"labels": labels.where(labels >= 0, 0), "ignore_index": 0},
        "num_items_in_batch": {"labels": labels, "num_items_in_batch": 77},
        "a tensor of items": {"labels": labels, "num_items_in_batch": torch.tensor(31)},
        "shift_labels": {"shift_labels": labels.roll(3, 1)},
        "packed": {"position_ids": (torch.arange(12) % 7).expand(2, -1)[:, :12]},
    }[case]


CASES = [
    "labels",
    "ignored labels",
    "another ignore_index",
    "num_items_in_batch",
    "a tensor of items",
    "shift_labels",
    "packed",
]


@pytest.mark.parametrize("case", CASES)
def test_both_losses_are_that_of_transformers(make_model, tokens, case):
    ids = tokens(2, 12)
    inputs = inputs_of(case, ids)
    model = make_model()
    found = run(model, ids, **inputs)
    model.config.fused_linear_cross_entropy = True
    assert_same(run(model, ids, **inputs), found)
    position_ids = inputs.pop("position_ids", None)
    logits = model(ids, position_ids=position_ids).logits
    inputs = {"labels": ids, **inputs}
    assert torch.allclose(found[0], ForCausalLMLoss(logits, vocab_size=101, **inputs), rtol=1e-5)


@pytest.mark.parametrize(
    "overrides",
    [
        {"tie_word_embeddings": True},
        {"use_bias": False},
        {"distractor_keys": 4},
        {"logit_softcap": 2.0},
    ],
    ids=str,
)
def test_the_fused_loss_fits_every_head(make_model, tokens, overrides):
    ids = tokens(2, 12)
    plain, fused = make_model(**overrides), make_model(**overrides, **FUSED)
    items = {"num_items_in_batch": 30}
    assert_same(run(fused, ids, **items), run(plain, ids, **items))


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_fused_loss_with_gradient_checkpointing(make_model, tokens, reentrant):
    ids = tokens(2, 12)
    model = make_model(**FUSED)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_same(run(model, ids), run(make_model(), ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_fused_loss_under_autocast(make_model, tokens, dtype):
    ids = tokens(2, 12)
    results = []
    for overrides in ({}, FUSED):
        with torch.autocast("cpu", dtype=dtype):
            results.append(run(make_model(**overrides), ids))
    assert_same(*results, tolerance=3e-2)
    assert all(g.dtype == torch.float32 for g in results[1][1].values())


class LargestTensor(TorchDispatchMode):
    """The most elements that any operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in torch.utils._pytree.tree_leaves(result) if torch.is_tensor(x)]
        self.elements = max([self.elements, *(x.numel() for x in tensors)])
        return result


@pytest.mark.parametrize("head", ["plain", "with a hook"])
def test_the_logits_of_a_batch_are_never_held(tokens, head):
    config = AtmaConfig.tiny(layer_types=["conv"], num_hidden_layers=1, **FUSED)
    ids = tokens(4, 40)
    elements = []
    for fused in (True, False):
        config.fused_linear_cross_entropy = fused
        model = AtmaForCausalLM(config).train()
        if head == "with a hook":
            model.lm_head.register_forward_hook(lambda *_: None)
        with LargestTensor() as largest:
            output = model(ids, labels=ids)
            output.loss.backward()
        assert (output.logits is None) == fused
        elements.append(largest.elements)
    assert elements[0] < ids.numel() * config.vocab_size <= elements[1]


def test_the_default_loss_keeps_the_logits_once(tokens):
    """What the loss keeps for the backward pass, on the kernels' path, is what the head gave."""
    logits = torch.randn(2, 6, 50, dtype=torch.bfloat16).requires_grad_()
    saved = []
    # The kernels' function without its kernels: what it saves is all that matters here.
    function = module.capped_cross_entropy.__globals__["CappedCrossEntropyFunction"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            function.forward.__globals__,
            "_cross_entropy_fwd_op",
            lambda logits, *rest: (logits.float().sum(), logits.clone()),
        )
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: saved.append(x.untyped_storage().data_ptr()) or x, lambda x: x
        ):
            function.apply(logits.flatten(0, 1), tokens(12), 15.0, -100, True)
    assert saved[0] == logits.untyped_storage().data_ptr() and len(saved) == 2


def test_heads_that_have_to_be_called_are_called(make_model, tokens):
    """Adapters, wrapped and quantised heads, hooks of offload: in chunks, exactly."""
    ids = tokens(2, 12)

    def with_adapter(model):
        adapted = get_peft_model(
            model,
            LoraConfig(target_modules=["lm_head"], init_lora_weights=False),
        )
        return adapted.base_model.model

    def with_hook(model):
        model.lm_head.register_forward_hook(lambda module, inputs, output: 2 * output)
        return model

    def with_another_forward(model):
        plain = model.lm_head.forward
        model.lm_head.forward = lambda x: plain(x) + 1
        return model

    def with_another_class(model):
        wrapped = nn.Sequential(model.lm_head, nn.Linear(101, 101))
        torch.manual_seed(1)
        nn.init.normal_(wrapped[1].weight, std=0.1)
        model.lm_head = wrapped
        return model

    cpu = torch.device("cpu")
    for change in (with_adapter, with_hook, with_another_forward, with_another_class):
        results = []
        for overrides in (FUSED, {}):
            torch.manual_seed(2)
            model = change(make_model(**overrides))
            assert not is_plain_linear(model.lm_head, cpu), change
            results.append(run(model, ids))
        assert_same(*results)
    assert is_plain_linear(make_model().lm_head, cpu)


def test_a_frozen_head_still_passes_the_gradient_on(make_model, tokens):
    ids = tokens(2, 12)
    results = []
    for overrides in (FUSED, {}):
        model = make_model(**overrides)
        model.lm_head.requires_grad_(False)
        results.append(run(model, ids))
    assert "lm_head.weight" not in results[0][1]
    assert_same(*results)


def test_evaluation_and_calls_without_labels_get_logits(make_model, tokens):
    ids = tokens(2, 12)
    model = make_model(**FUSED)
    expected = make_model()(ids, labels=ids)
    found = model.eval()(ids, labels=ids)
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.loss, expected.loss)
    assert torch.equal(model.train()(ids).logits, expected.logits)


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_batch_without_labels_leaves_no_gradient(make_model, tokens, is_fused):
    ids = tokens(2, 6)
    model = make_model(fused_linear_cross_entropy=is_fused)
    loss, grads = run(model, ids, labels=torch.full_like(ids, -100))
    assert loss.isnan() and not any(x.any() for x in grads.values())
    assert model(ids[:0], labels=ids[:0]).loss.isnan()


@torch.no_grad()
def test_hooks_of_the_head_see_its_logits_without_the_cap(make_model, tokens):
    model, seen = make_model().bfloat16().eval(), []
    model.lm_head.weight.mul_(100)
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    assert model(tokens(1, 6)).logits.abs().max() <= 15 < seen[0].abs().max()
    model.lm_head = nn.Identity()
    hidden = model(tokens(1, 6), output_hidden_states=True).hidden_states[-1]
    assert torch.equal(hidden, model.model(tokens(1, 6)).last_hidden_state)


def test_a_loss_function_of_the_users_own_is_used(make_model, tokens):
    ids = tokens(2, 12)
    model = make_model(dtype=torch.bfloat16)
    seen = []

    def loss_function(logits, labels, vocab_size, **kwargs):
        seen.append((logits.dtype, vocab_size, kwargs["num_items_in_batch"]))
        return logits.square().mean()

    model.loss_function = loss_function
    output = model(ids, labels=ids, num_items_in_batch=3)
    assert seen == [(torch.float32, 101, 3)] and output.logits.dtype == torch.bfloat16
    torch.testing.assert_close(
        output.loss, output.logits.float().square().mean(), rtol=1e-2, atol=0
    )
    model.config.fused_linear_cross_entropy = True
    with pytest.raises(ValueError, match="set config.fused_linear_cross_entropy = False"):
        model.train()(ids, labels=ids)


def test_the_loss_of_half_precision_logits_is_computed_in_single(make_model, tokens):
    """Rounded to bf16, capped logits up to 15 would be off by up to 0.03."""
    ids = tokens(2, 12)
    model = make_model(dtype=torch.bfloat16)
    output = model(ids, labels=ids)
    raw = model.lm_head(model.model(ids).last_hidden_state).double()
    exact = F.cross_entropy(
        (15 * raw / (raw.square() + 225).sqrt())[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )
    assert output.loss.dtype == torch.float32 and abs(output.loss - exact) < 1e-5 * exact


def test_the_whole_training_step_is_one_graph_compiled_once(make_model, tokens):
    """Loss and gradients are those of eager mode; another batch of the shape compiles nothing."""
    torch.compiler.reset()
    layers = {"layer_types": ["conv", "hybrid"]}
    compiled, graphs = make_model(**layers, **FUSED), []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    step, model = torch.compile(compiled, fullgraph=True, backend=backend), make_model(**layers)
    for seed in range(2):
        ids = tokens(2, 12, seed=seed)
        compiled.zero_grad()
        loss = step.train()(ids, labels=ids, use_cache=False).loss
        loss.backward()
        grads = {n: p.grad for n, p in compiled.named_parameters()}
        assert_same((loss, grads), run(model, ids, use_cache=False))
    assert len(graphs) == 1


def test_a_head_that_fsdp2_shards_is_called_once(monkeypatch):
    """It gathers weights for one call of a module in each pass; TRL's chunks are made here too."""
    rows, targets = torch.randn(2 * CHUNK + 1, 3), torch.arange(2 * CHUNK + 1)
    sizes = [len(rows), CHUNK, CHUNK, 1]
    found = []
    for sharded in (True, False):
        monkeypatch.setattr(module, "is_sharded", lambda head, sharded=sharded: sharded)
        found += module.of_chunks(nn.Linear(3, 5), lambda x, y: len(x) + 0 * len(y), rows, targets)
    assert found == sizes
