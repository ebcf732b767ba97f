# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
Faults that models of this kind have had, put in on purpose: the promises must notice every one of
them. (The common test suites of Transformers miss most: see how little a default initialisation
moves.)
"""

import pytest
import torch
from atma import AtmaCache, layout_atma, modeling_atma
from atma.rollback_atma import RollbackState


@torch.no_grad()
def tell_the_story(model, tokens, close):
    """Every way of feeding the same tokens, once each."""
    ids, other = tokens(2, 24), tokens(2, 9, seed=3)
    whole = model(ids, use_cache=False).logits
    cache = AtmaCache(model.config, page_size=4)
    cache.activate_past_recording()
    # Filled with something else and emptied again; then in pieces, with drafts that are dropped.
    model(other, cache=cache)
    cache.reset()
    close(model(ids[:, :12], cache=cache).logits, whole[:, :12])
    model(other[:, :5], cache=cache)
    cache.crop(-5)
    close(model(ids[:, 12:13], cache=cache).logits, whole[:, 12:13])
    close(model(ids[:, 13:22], cache=cache).logits, whole[:, 13:22])
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped = model(ids[[1, 0], 22:23], cache=cache).logits
    close(swapped[[1, 0]], whole[:, 22:23])
    # Padding before, between and after.
    wide = torch.zeros(2, 30, dtype=torch.long)
    mask = torch.zeros_like(wide)
    for row, columns in enumerate(([*range(6, 30)], [*range(3, 10), *range(11, 28)])):
        wide[row, columns], mask[row, columns] = ids[row], 1
    padded = model(wide, attention_mask=mask, use_cache=True)
    close(padded.logits[mask.bool()].view_as(whole), whole)
    step = model(other[:, :1], cache=padded.cache).logits
    close(step, model(torch.cat([ids, other[:, :1]], 1), use_cache=False).logits[:, -1:])
    # Packed.
    position_ids = torch.arange(24).repeat(2)[None]
    close(model(ids.view(1, 48), position_ids=position_ids).logits.view_as(whole), whole)


def without_lengths(function):
    return lambda *args, **kwargs: function(*args, **{**kwargs, "lengths": None})


def without_state(function, name="initial_state"):
    return lambda *args, **kwargs: function(*args, **{**kwargs, name: None})


def only_for(is_memory, replacement, original):
    """Applies to memory states, or to convolution windows, alone."""
    return lambda self, *args, **kwargs: (
        replacement if (self.current.dim() == 4) == is_memory else original
    )(self, *args, **kwargs)


def nothing(*args, **kwargs):
    return None


FAULTS = {
    "recurrent rollback does nothing": lambda m: m.setattr(
        RollbackState, "put_back", only_for(True, nothing, RollbackState.put_back)
    ),
    "convolution rollback does nothing": lambda m: m.setattr(
        RollbackState, "put_back", only_for(False, nothing, RollbackState.put_back)
    ),
    "padding is not masked": lambda m: m.setattr(
        modeling_atma,
        "build_layout",
        lambda shape, device, mask, *rest: layout_atma.build_layout(shape, device, None, *rest),
    ),
    "padding moves the memory": lambda m: m.setattr(
        modeling_atma, "gated_delta", without_lengths(modeling_atma.gated_delta)
    ),
    "beams do not reorder states": lambda m: m.setattr(RollbackState, "select", nothing),
    "reset keeps states": lambda m: m.setattr(RollbackState, "zero", RollbackState.forget),
    "packing is ignored": lambda m: m.setattr(layout_atma, "packed_documents", nothing),
    "the old memory is ignored": lambda m: (
        m.setattr(modeling_atma, "gated_delta", without_state(modeling_atma.gated_delta)),
        m.setattr(modeling_atma, "MAX_STEP_TOKENS", 0),
    ),
    "convolutions have no history": lambda m: m.setattr(
        modeling_atma, "gated_causal_conv1d", without_state(modeling_atma.gated_causal_conv1d)
    ),
    "canon convolutions have no history": lambda m: m.setattr(
        modeling_atma,
        "canon_convolution",
        without_state(modeling_atma.canon_convolution, "initial_states"),
    ),
}


def test_the_story_holds(model, tokens, close):
    tell_the_story(model, tokens, close)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(model, tokens, close, monkeypatch, fault):
    FAULTS[fault](monkeypatch)
    with pytest.raises(AssertionError, match="max difference"):
        tell_the_story(model, tokens, close)
