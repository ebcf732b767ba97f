# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Padding anywhere leaves no trace: not in logits, not in gradients, not in caches."""

import pytest
import torch
from atma import AtmaCache

CORES = [
    {},
    {"attention_type": "nope"},
    {"attention_type": "rope"},
    {"use_memory": False},
    {"attention_window": 6},
    {"layer_types": ["conv", "conv"]},
    {"layer_types": ["hybrid", "conv"]},
]
CORE_IDS = ["polar", "nope", "rope", "no-memory", "window", "conv-only", "hybrid-first"]


def pad_rows(rows, width, side, pad):
    """Ids [B, width] and mask, each row padded on `side` with the id `pad`."""
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, where] = row
        mask[i, where] = 1
    return ids, mask


@pytest.mark.smoke
@pytest.mark.parametrize("overrides", CORES, ids=CORE_IDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(make_model, tokens, close, side, overrides):
    model = make_model(**overrides)
    rows = [tokens(20), tokens(27, seed=2), tokens(1, seed=3)]
    with torch.no_grad():
        ids, mask = pad_rows(rows, 27, side, 0)
        logits = model(ids, attention_mask=mask).logits
        assert torch.isfinite(logits).all()
        for i, row in enumerate(rows):
            close(logits[i][mask[i].bool()], model(row[None]).logits[0])


@pytest.mark.parametrize("pad", [0, 7, 100])
def test_the_pad_id_and_the_neighbours_do_not_matter(model, tokens, pad):
    row = tokens(20)
    with torch.no_grad():
        expected = None
        for neighbour in (tokens(27, seed=5), tokens(27, seed=6)):
            ids, mask = pad_rows([row, neighbour], 27, "left", pad)
            logits = model(ids, attention_mask=mask).logits[0, 7:]
            expected = logits if expected is None else expected
            assert torch.equal(logits, expected)
        ids, mask = pad_rows([row, tokens(27, seed=5)], 27, "left", 0)
        assert torch.equal(model(ids, attention_mask=mask).logits[0, 7:], expected)


def test_a_padded_row_alone_in_a_batch_is_masked(model, tokens, close):
    row = tokens(20)
    with torch.no_grad():
        expected = model(row[None]).logits
        ids, mask = pad_rows([row], 27, "left", 0)
        close(model(ids, attention_mask=mask).logits[:, 7:], expected)
        ones = model(row[None], attention_mask=torch.ones(1, 20, dtype=torch.long)).logits
        assert torch.equal(ones, expected)


def test_large_biases_do_not_turn_padding_into_a_signal(make_model, tokens, close):
    model = make_model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") and "lm_head" not in name:
                parameter.fill_(3.0 if "in_proj" in name else 1.0)
        row = tokens(20)
        ids, mask = pad_rows([row, tokens(27, seed=2)], 27, "left", 0)
        close(model(ids, attention_mask=mask).logits[0, 7:], model(row[None]).logits[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("core", ["polar", "nope", "rope"])
def test_rows_of_padding_alone_stay_finite(make_model, tokens, dtype, implementation, core):
    model = make_model(attention_type=core, dtype=dtype).train()
    model.set_attn_implementation(implementation)
    ids, mask = pad_rows([tokens(9), tokens(12, seed=2), tokens(0)], 12, "left", 0)
    labels = ids.masked_fill(mask == 0, -100)
    output = model(ids, attention_mask=mask, labels=labels)
    assert torch.isfinite(output.logits).all()
    output.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


def test_gradients_see_no_padding(make_model, tokens, close):
    """The embedding gradients of a padded batch are the sum of those of its rows alone."""
    rows = [tokens(11), tokens(17, seed=2)]
    for side in ("left", "right"):
        model = make_model()
        ids, mask = pad_rows(rows, 17, side, 3)
        logits = model(ids, attention_mask=mask).logits
        (logits[mask.bool()] ** 2).sum().backward()
        padded = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        sum((model(row[None]).logits ** 2).sum() for row in rows).backward()
        for name, parameter in model.named_parameters():
            scale = parameter.grad.norm().item()
            assert (padded[name] - parameter.grad).norm().item() <= 1e-4 * scale, name


def test_a_right_padded_prefill_leaves_a_good_cache(model, tokens, close):
    rows = [tokens(20), tokens(25, seed=2)]
    following = tokens(2, 3, seed=3)
    ids, mask = pad_rows(rows, 25, "right", 0)
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True).cache
        full_mask = torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], 1)
        logits = model(following, attention_mask=full_mask, cache=cache).logits
        for i, row in enumerate(rows):
            whole = torch.cat([row, following[i]])[None]
            close(logits[i], model(whole, use_cache=False).logits[0, -3:])
    assert cache.lengths.tolist() == [23, 28] and cache.get_seq_length() == 28


@pytest.mark.parametrize("overrides", CORES, ids=CORE_IDS)
def test_padding_in_the_middle_of_a_sequence_leaves_no_trace(make_model, tokens, close, overrides):
    """A second turn that is padded on its left, then steps in which some rows are padding."""
    model = make_model(**overrides)
    first = [tokens(9), tokens(14, seed=2)]
    second = [tokens(6, seed=3), tokens(2, seed=4)]
    ids, mask = pad_rows(first, 14, "left", 5)
    more, more_mask = pad_rows(second, 6, "left", 5)
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True).cache
        history = torch.cat([mask, more_mask], 1)
        logits = model(more, attention_mask=history, cache=cache).logits
        for i in range(2):
            whole = torch.cat([first[i], second[i]])[None]
            expected = model(whole, use_cache=False).logits[0, len(first[i]) :]
            close(logits[i][more_mask[i].bool()], expected)
        step = tokens(2, 1, seed=5)
        for alive in ([1, 0], [0, 1], [1, 1]):
            history = torch.cat([history, torch.tensor(alive)[:, None]], 1)
            logits = model(step, attention_mask=history, cache=cache).logits
            for i in range(2):
                if alive[i]:
                    second[i] = torch.cat([second[i], step[i]])
                    whole = torch.cat([first[i], second[i]])[None]
                    close(logits[i, -1], model(whole, use_cache=False).logits[0, -1])


def test_a_mask_of_the_new_tokens_alone_is_enough(model, tokens):
    ids = tokens(2, 12)
    with torch.no_grad():
        caches = [model(ids[:, :8]).cache for _ in range(2)]
        new = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
        full = torch.cat([torch.ones(2, 8, dtype=torch.long), new], 1)
        by_new = model(ids[:, 8:], attention_mask=new, cache=caches[0]).logits
        by_full = model(ids[:, 8:], attention_mask=full, cache=caches[1]).logits
    assert torch.equal(by_new, by_full)


def test_masks_that_cannot_be_honoured_are_refused(model, tokens):
    ids = tokens(2, 8)
    with pytest.raises(ValueError, match="two-dimensional attention_mask"):
        model(ids, attention_mask=torch.ones(2, 1, 8, 8))
    with pytest.raises(ValueError, match="two-dimensional attention_mask"):
        model(ids, attention_mask={"full_attention": None})
    with pytest.raises(ValueError, match="attention_mask has shape"):
        model(ids, attention_mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match="attention_mask has shape"):
        model(ids, attention_mask=torch.ones(1, 8))


def test_a_refused_mask_leaves_the_cache_as_it_was(model, tokens, close):
    ids = tokens(1, 12)
    cache = AtmaCache(model.config)
    with torch.no_grad():
        model(ids[:, :8], cache=cache)
        with pytest.raises(ValueError):
            model(ids[:, 8:], attention_mask=torch.ones(1, 2), cache=cache)
        logits = model(ids[:, 8:], cache=cache).logits
        close(logits, model(ids, use_cache=False).logits[:, 8:])
