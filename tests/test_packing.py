# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
Packed documents do not see each other: forward, backward, with and without a cache, however they
are described.
"""

import pytest
import torch
from transformers import DataCollatorWithFlattening

LENGTHS = [13, 1, 2, 17]
CORES = [
    {},
    {"attention_type": "nope"},
    {"attention_type": "rope"},
    {"attention_window": 4},
    {"use_memory": False},
]
CORE_IDS = ["polar", "nope", "rope", "window", "no-memory"]


def documents(tokens):
    return [tokens(n, seed=10 + i) for i, n in enumerate(LENGTHS)]


def described(docs, how):
    """Packed ids and the arguments that say where documents start."""
    ids = torch.cat(docs)[None]
    lengths = torch.tensor([len(d) for d in docs])
    if how == "position_ids":
        return ids, {"position_ids": torch.cat([torch.arange(len(d)) for d in docs])[None]}
    if how == "seq_idx":
        return ids, {"seq_idx": torch.repeat_interleave(torch.arange(len(docs)), lengths)[None]}
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    return ids, {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}


@pytest.mark.smoke
@pytest.mark.parametrize("overrides", CORES, ids=CORE_IDS)
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("how", ["position_ids", "cu_seqlens", "seq_idx"])
def test_packed_documents_equal_documents_alone(
    make_model, tokens, close, overrides, use_cache, how
):
    model = make_model(**overrides)
    docs = documents(tokens)
    ids, boundaries = described(docs, how)
    with torch.no_grad():
        logits = model(ids, use_cache=use_cache, **boundaries).logits[0]
        expected = torch.cat([model(d[None], use_cache=False).logits[0] for d in docs])
    close(logits, expected)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_gradients_equal_those_of_documents_alone(make_model, tokens, checkpointing):
    docs = documents(tokens)
    model = make_model().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, boundaries = described(docs, "position_ids")
    (model(ids, **boundaries).logits ** 2).sum().backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    sum((model(d[None]).logits ** 2).sum() for d in docs).backward()
    for name, parameter in model.named_parameters():
        error = (packed[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error <= 1e-4, (name, error)


def test_a_document_does_not_move_by_one_bit_when_its_neighbour_changes(model, tokens):
    docs = documents(tokens)
    with torch.no_grad():
        ids, boundaries = described(docs, "position_ids")
        before = model(ids, **boundaries).logits
        ids = ids.clone()
        ids[0, 3] = (ids[0, 3] + 1) % 100 + 1
        after = model(ids, **boundaries).logits
    assert not torch.equal(before[0, 3:13], after[0, 3:13])
    assert torch.equal(before[0, 13:], after[0, 13:])


def test_the_flattening_collator_isolates_documents(make_model, tokens, close):
    """What Trainer sends with padding-free batches: one row, no mask."""
    model = make_model().train()
    docs = documents(tokens)
    features = [{"input_ids": d.tolist()} for d in docs]
    for options in ({}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}):
        batch = DataCollatorWithFlattening(return_tensors="pt", **options)(features)
        loss = model(**batch).loss
        shifted = [(model(d[None]).logits[0, :-1], d[1:]) for d in docs if len(d) > 1]
        logits, labels = (torch.cat(x) for x in zip(*shifted, strict=True))
        close(loss, torch.nn.functional.cross_entropy(logits, labels), 1e-5)


def test_rows_of_a_batch_may_be_packed_each_in_its_own_way(model, tokens, close):
    ids = tokens(2, 12)
    position_ids = torch.tensor([[*range(5), *range(7)], [*range(12)]])
    with torch.no_grad():
        logits = model(ids, position_ids=position_ids).logits
        close(logits[0, :5], model(ids[:1, :5]).logits[0])
        close(logits[0, 5:], model(ids[:1, 5:]).logits[0])
        close(logits[1], model(ids[1:]).logits[0])


def test_a_cache_continues_the_last_packed_document(model, tokens, close):
    docs = documents(tokens)
    more = tokens(1, 5, seed=30)
    with torch.no_grad():
        for how in ("position_ids", "cu_seqlens"):
            ids, boundaries = described(docs, how)
            cache = model(ids, use_cache=True, **boundaries).cache
            assert cache.lengths.tolist() == [17] and cache.get_seq_length() == 33
            logits = model(more, cache=cache).logits
            whole = torch.cat([docs[-1], more[0]])[None]
            close(logits, model(whole, use_cache=False).logits[:, -5:])


@pytest.mark.parametrize(
    "position_ids",
    [[0, 0, 0, 1, 2, 3, 4, 5], [1, 1, 1, 0, 1, 2, 3, 4], [*range(100, 108)], [*range(8)]],
    ids=["left-padded-0", "left-padded-1", "starts-at-100", "plain"],
)
def test_position_ids_that_do_not_restart_are_no_packing(model, tokens, position_ids):
    ids = tokens(1, 8)
    with torch.no_grad():
        logits = model(ids, position_ids=torch.tensor([position_ids])).logits
        assert torch.equal(logits, model(ids).logits)


def test_boundaries_that_cannot_be_honoured_are_refused(model, tokens):
    ids = tokens(1, 8)
    boundaries = torch.tensor([0, 3, 8], dtype=torch.int32)
    seq_idx = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    for described in ({"cu_seq_lens_q": boundaries}, {"seq_idx": seq_idx}):
        with pytest.raises(ValueError, match="without attention_mask and an empty cache"):
            model(ids, attention_mask=torch.ones(1, 8), **described)
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
            with pytest.raises(ValueError, match="an empty cache"):
                model(ids, cache=cache, **described)
    with pytest.raises(ValueError, match="need one row"):
        model(tokens(2, 8), cu_seq_lens_q=boundaries)
    for other in (boundaries[:2], torch.tensor([0, 4, 8], dtype=torch.int32)):
        with pytest.raises(ValueError, match="must be the same"):
            model(ids, cu_seq_lens_q=boundaries, cu_seq_lens_k=other)
    for wrong in ([0, 4], [4, 8], [0, 6, 3, 8]):
        with pytest.raises(ValueError, match="must rise from 0 to the number of tokens"):
            model(ids, cu_seq_lens_q=torch.tensor(wrong))
    with pytest.raises(ValueError, match="position_ids has shape"):
        model(ids, position_ids=torch.arange(5)[None])
