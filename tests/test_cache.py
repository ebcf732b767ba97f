# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
The cache: continuing, going back, forking, reordering, saving. All of it exact, recurrent states
included.
"""

import copy
import pickle

import pytest
import torch
from atma import AtmaCache
from safetensors.torch import load_file, save_file

KINDS = [
    {},
    {"attention_type": "nope"},
    {"attention_type": "rope"},
    {"use_memory": False},
    {"attention_window": 5},
    {"memory_max_half_life": 3.0},
    {"layer_types": ["hybrid", "conv", "hybrid"]},
    {"layer_types": ["conv", "conv"]},
]
KIND_IDS = ["polar", "nope", "rope", "no-memory", "window", "half-life", "hybrid-last", "conv-only"]


def small_pages(model, **kwargs):
    """Pages of 4 tokens, so that every test crosses many of them."""
    return AtmaCache(model.config, page_size=4, **kwargs)


def feed(model, cache, ids, **kwargs):
    with torch.no_grad():
        return model(ids, cache=cache, **kwargs).logits


def states(cache):
    """Every tensor that a layer holds, by name; keys and values of real tokens only."""
    found = {"lengths": cache.lengths}
    for i, layer in enumerate(cache.layers):
        for name, state in layer.states.items():
            if state.current is not None:
                found[f"{i}.{name}"] = state.current
        if hasattr(layer, "past") and cache.has_content:
            for name, x in zip(("keys", "values"), layer.past(), strict=True):
                real = torch.arange(x.shape[1]) < cache.lengths[:, None]
                found[f"{i}.{name}"] = torch.where(real[..., None, None], x, 0)[
                    :, : int(cache.lengths.max())
                ]
    return found


def assert_same_states(one, other, close, tolerance=5e-5):
    one, other = states(one), states(other)
    assert one.keys() == other.keys()
    for name in one:
        close(one[name].float(), other[name].float(), tolerance)


@pytest.mark.smoke
@pytest.mark.parametrize("overrides", KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("max_length", [None, 80], ids=["growing", "fixed"])
def test_any_chunking_equals_the_whole(make_model, tokens, close, overrides, max_length):
    model = make_model(**overrides)
    ids = tokens(2, 75)
    whole = small_pages(model, max_length=max_length)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    close(feed(model, whole, ids), expected)
    for size in (1, 2, 3, 5, 16, 64):
        cache = small_pages(model, max_length=max_length)
        parts = [feed(model, cache, part) for part in ids.split(size, dim=1)]
        close(torch.cat(parts, 1), expected)
        assert_same_states(cache, whole, close)
        assert int(cache.get_seq_length()) == 75


@pytest.mark.parametrize("split", [1, 2, 3, 63, 64, 65, 127, 128])
def test_prefill_and_steps_equal_the_whole_around_the_chunk_size(model, tokens, close, split):
    ids = tokens(1, split + 4)
    cache = AtmaCache(model.config)
    logits = [feed(model, cache, ids[:, :split])]
    logits += [feed(model, cache, ids[:, i : i + 1]) for i in range(split, split + 4)]
    with torch.no_grad():
        close(torch.cat(logits, 1), model(ids, use_cache=False).logits)


def test_gradients_through_a_cached_call_equal_the_whole(make_model, tokens):
    """Under autograd, in one call, a cache changes nothing."""
    ids = tokens(2, 21)
    grads = []
    for use_cache in (False, True):
        model = make_model()
        (model(ids, use_cache=use_cache).logits ** 2).sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name in grads[0]:
        assert (grads[0][name] - grads[1][name]).norm() <= 1e-5 * grads[0][name].norm(), name


def test_continuing_under_autograd_is_right_and_can_run_backward(make_model, tokens, close):
    model = make_model()
    ids = tokens(2, 21)
    cache = model(ids[:, :9]).cache
    first = model(ids[:, 9:12], cache=cache).logits
    second = model(ids[:, 12:], cache=cache).logits
    close(torch.cat([first, second], 1), model(ids, use_cache=False).logits[:, 9:])
    second.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_wiping_any_one_state_would_be_noticed(model, tokens):
    """
    The fixture itself: each state of each layer moves the next logits by far more than the
    tolerances.
    """
    ids = tokens(1, 30)
    with torch.no_grad():
        base = model(ids[:, :29]).cache
        expected = model(ids[:, 29:], cache=base.fork()).logits
        for i, layer in enumerate(base.layers):
            for name in layer.states:
                broken = base.fork()
                broken.layers[i].states[name].current.zero_()
                moved = (model(ids[:, 29:], cache=broken).logits - expected).abs().max()
                assert moved > 0.01, (i, name, moved)


@pytest.mark.smoke
@pytest.mark.parametrize("overrides", KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("max_length", [None, 64], ids=["growing", "fixed"])
@pytest.mark.parametrize("dropped", [1, 5, 7])
def test_crop_is_as_if_the_tokens_had_never_been(
    make_model, tokens, close, overrides, max_length, dropped
):
    model = make_model(**overrides)
    ids, other = tokens(1, 27), tokens(1, 30, seed=7)
    cache = small_pages(model, max_length=max_length)
    cache.activate_past_recording()
    feed(model, cache, ids[:, :20])
    feed(model, cache, ids[:, 20:22])
    for i in range(22, 27):
        feed(model, cache, ids[:, i : i + 1])
    cache.crop(-dropped)
    never = small_pages(model, max_length=max_length)
    feed(model, never, ids[:, : 27 - dropped])
    assert int(cache.get_seq_length()) == 27 - dropped
    assert_same_states(cache, never, close)
    for part in (other[:, :1], other[:, 1:4], other[:, 4:20]):
        close(feed(model, cache, part), feed(model, never, part))
    cache.crop(-17)
    feed(model, cache, other[:, 20:])
    whole = torch.cat([ids[:, : 27 - dropped], other[:, :3], other[:, 20:]], 1)
    fresh = small_pages(model, max_length=max_length)
    feed(model, fresh, whole)
    assert_same_states(cache, fresh, close)


def test_crop_drops_columns_of_padded_rows(model, tokens, close):
    """The last columns hold different numbers of real tokens in each row."""
    ids = tokens(3, 12)
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[0, :5] = 0
    mask[1, 9:] = 0
    mask[2, [2, 8, 10]] = 0
    cache = small_pages(model)
    cache.activate_past_recording()
    feed(model, cache, ids[:, :7], attention_mask=mask[:, :7])
    feed(model, cache, ids[:, 7:], attention_mask=mask)
    cache.crop(-7)
    never = small_pages(model)
    feed(model, never, ids[:, :5], attention_mask=mask[:, :5])
    assert cache.lengths.tolist() == mask[:, :5].sum(1).tolist()
    assert_same_states(cache, never, close)


def test_a_long_recording_is_folded_and_still_exact(model, tokens, close):
    ids = tokens(2, 200)
    mask = (torch.rand(2, 200, generator=torch.Generator().manual_seed(3)) > 0.3).long()
    cache = small_pages(model, record_limit=8)
    cache.activate_past_recording()
    seen = 0
    for size in (90, 1, 1, 1, 14, 3, 20, 1, 1):
        feed(model, cache, ids[:, seen : seen + size], attention_mask=mask[:, : seen + size])
        seen += size
    assert cache.layers[1].memory.inputs[0].shape[1] <= 16
    cache.crop(-8)
    never = small_pages(model)
    feed(model, never, ids[:, : seen - 8], attention_mask=mask[:, : seen - 8])
    assert_same_states(cache, never, close)


def test_crop_that_cannot_be_exact_is_refused_before_anything_changes(model, tokens, close):
    ids = tokens(1, 30)
    cache = small_pages(model, record_limit=4)
    feed(model, cache, ids[:, :20])
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-2)
    cache.activate_past_recording()
    with pytest.raises(RuntimeError, match="none were fed"):
        cache.crop(-2)
    feed(model, cache, ids[:, 20:23])
    with pytest.raises(RuntimeError, match="at most the 3 tokens"):
        cache.crop(-4)
    for i in range(23, 29):
        feed(model, cache, ids[:, i : i + 1])
    with pytest.raises(RuntimeError, match="fork"):
        cache.crop(-28)
    with torch.no_grad():
        close(feed(model, cache, ids[:, 29:]), model(ids, use_cache=False).logits[:, -1:])


def test_crop_takes_a_length_to_keep_and_crop_zero_forgets(model, tokens, close):
    ids = tokens(1, 12)
    cache = small_pages(model)
    cache.activate_past_recording()
    feed(model, cache, ids)
    cache.crop(20)
    assert cache.get_seq_length() == 12
    cache.crop(9)
    assert cache.get_seq_length() == 9
    cache.crop(0)
    with pytest.raises(RuntimeError):
        cache.crop(-1)
    feed(model, cache, ids[:, 9:10])
    cache.crop(-1)
    with torch.no_grad():
        close(feed(model, cache, ids[:, 9:]), model(ids, use_cache=False).logits[:, 9:])


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 31, 33])
@pytest.mark.parametrize("max_length", [None, 64], ids=["growing", "fixed"])
def test_forks_go_their_own_ways(model, tokens, close, length, max_length):
    prefix, ends = tokens(2, length), tokens(3, 2, 9, seed=4)
    cache = small_pages(model, max_length=max_length)
    feed(model, cache, prefix)
    forks = [cache, cache.fork(), cache.fork()]
    for i in range(9):  # interleaved, so that a shared page that is written to would show
        for fork, end in zip(forks, ends, strict=True):
            last = feed(model, fork, end[:, i : i + 1])
            with torch.no_grad():
                whole = torch.cat([prefix, end[:, : i + 1]], 1)
                close(last, model(whole, use_cache=False).logits[:, -1:])


def test_a_fork_shares_full_pages_and_gives_them_back(model, tokens):
    cache = small_pages(model)
    feed(model, cache, tokens(1, 18))
    pool = cache.rows.pool
    used = len(pool.reference_counts) - 1 - len(pool.free_pages)
    fork = cache.fork()
    assert fork.rows.pages[0][:4] == cache.rows.pages[0][:4]
    assert fork.rows.pages[0][4] != cache.rows.pages[0][4]
    assert len(pool.reference_counts) - 1 - len(pool.free_pages) < 2 * used
    del fork
    assert len(pool.reference_counts) - 1 - len(pool.free_pages) == used
    assert all(
        count == 1 for page in cache.rows.pages[0] for count in [pool.reference_counts[page]]
    )


def test_cropping_a_fork_into_a_shared_page_leaves_the_other_alone(model, tokens, close):
    ids, other = tokens(1, 16), tokens(1, 12, seed=8)
    cache = small_pages(model)
    cache.activate_past_recording()
    feed(model, cache, ids)
    fork = cache.fork()
    fork.crop(-6)
    feed(model, fork, other)
    with torch.no_grad():
        expected = model(torch.cat([ids, other[:, :1]], 1), use_cache=False).logits[:, -1:]
        close(feed(model, cache, other[:, :1]), expected)
        whole = torch.cat([ids[:, :10], other, other[:, :1]], 1)
        close(feed(model, fork, other[:, :1]), model(whole, use_cache=False).logits[:, -1:])


@pytest.mark.parametrize("max_length", [None, 64], ids=["growing", "fixed"])
@pytest.mark.parametrize("recorded", [False, True])
def test_rows_can_be_reordered_repeated_and_selected(model, tokens, close, max_length, recorded):
    prompt, steps = tokens(3, 10), tokens(8, 6, seed=5)
    mask = torch.ones(3, 10, dtype=torch.long)
    mask[1, :4] = 0
    cache = small_pages(model, max_length=max_length)
    if recorded:
        cache.activate_past_recording()
    feed(model, cache, prompt, attention_mask=mask)
    histories = [prompt[i][mask[i].bool()] for i in range(3)]

    def step(i):
        nonlocal histories
        rows = len(histories)
        logits = feed(model, cache, steps[:rows, i : i + 1])
        histories = [torch.cat([h, steps[b, i : i + 1]]) for b, h in enumerate(histories)]
        with torch.no_grad():
            for b, history in enumerate(histories):
                close(logits[b], model(history[None], use_cache=False).logits[0, -1:])

    cache.reorder_cache(torch.tensor([1, 0, 2]))
    histories = [histories[i] for i in (1, 0, 2)]
    step(0)
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    histories = [histories[i] for i in (2, 2, 0)]
    step(1)
    cache.batch_repeat_interleave(2)
    histories = [histories[i] for i in (0, 0, 1, 1, 2, 2)]
    step(2)
    cache.batch_select_indices(torch.tensor([5, 1]))
    histories = [histories[i] for i in (5, 1)]
    step(3)
    cache.batch_select_indices(torch.tensor([False, True]))
    histories = histories[1:]
    step(4)
    if recorded:
        cache.crop(-2)
        histories = [h[:-2] for h in histories]
        step(5)


def test_reordering_swaps_every_state_of_every_layer(model, tokens, close):
    cache = small_pages(model)
    feed(model, cache, tokens(2, 11))
    before = {name: x.clone() for name, x in states(cache).items()}
    cache.reorder_cache(torch.tensor([1, 0]))
    for name, x in states(cache).items():
        assert torch.equal(x, before[name][[1, 0]]), name
        if name != "lengths":
            assert not torch.equal(x, before[name]), name


def test_repeated_rows_cost_page_table_entries_not_pages(model, tokens):
    cache = small_pages(model)
    feed(model, cache, tokens(1, 41))
    pool = cache.rows.pool
    before = len(pool.reference_counts) - len(pool.free_pages)
    cache.batch_repeat_interleave(8)
    rows = cache.rows.pages
    assert all(row[:10] == rows[0][:10] for row in rows)
    assert len({row[10] for row in rows}) == 8
    own = len(rows[0]) - 10
    assert len(pool.reference_counts) - len(pool.free_pages) == before + 7 * own


@pytest.mark.parametrize("max_length", [None, 40], ids=["growing", "fixed"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch", "file"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 33])
def test_copies_and_files_restore_the_cache(
    model, tokens, close, tmp_path, max_length, how, length
):
    ids = tokens(2, length + 4)
    mask = torch.ones(2, length + 4, dtype=torch.long)
    mask[0, : length // 2] = 0
    cache = AtmaCache(model.config, page_size=16, max_length=max_length)
    model(ids[:, :length], attention_mask=mask[:, :length], cache=cache)  # with gradients on
    if how == "deepcopy":
        copied = copy.deepcopy(cache)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(cache))
    elif how == "torch":
        torch.save(cache, tmp_path / "cache.pt")
        copied = torch.load(tmp_path / "cache.pt", weights_only=False)
    else:
        cache.save(tmp_path / "cache.safetensors")
        copied = AtmaCache.load(tmp_path / "cache.safetensors", model.config)
    mine, theirs = states(cache), states(copied)
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name
    pointers = {x.untyped_storage().data_ptr() for x in _storage(cache)}
    assert not pointers & {x.untyped_storage().data_ptr() for x in _storage(copied)}
    tail = {"attention_mask": mask}
    one = feed(model, cache, ids[:, length:], **tail)
    feed(model, cache, ids[:, :3])
    assert torch.equal(one, feed(model, copied, ids[:, length:], **tail))


def _storage(cache):
    yield cache.lengths
    yield cache.rows.page_table
    for layer in cache.layers:
        yield from (state.current for state in layer.states.values())
        if hasattr(layer, "slabs"):
            for slabs in layer.slabs():
                yield from slabs


def test_a_saved_cache_without_one_layers_state_is_refused(model, tokens, tmp_path):
    cache = small_pages(model)
    feed(model, cache, tokens(1, 9))
    cache.save(tmp_path / "cache.safetensors")
    whole = load_file(tmp_path / "cache.safetensors")
    from safetensors import safe_open

    with safe_open(tmp_path / "cache.safetensors", "pt") as file:
        metadata = file.metadata()
    for name in whole:
        part = {key: x for key, x in whole.items() if key != name}
        save_file(part, tmp_path / "part.safetensors", metadata)
        with pytest.raises(ValueError, match=f"missing \\['{name}'\\]"):
            AtmaCache.load(tmp_path / "part.safetensors", model.config)
    save_file(whole, tmp_path / "foreign.safetensors")
    with pytest.raises(ValueError, match="not a saved AtmaCache"):
        AtmaCache.load(tmp_path / "foreign.safetensors", model.config)


def test_a_cache_of_another_layer_pattern_is_refused(make_model, model, tokens, tmp_path):
    cache = small_pages(model)
    feed(model, cache, tokens(1, 9))
    cache.save(tmp_path / "cache.safetensors")
    other = make_model(layer_types=["hybrid", "conv", "conv", "hybrid", "conv"])
    with pytest.raises(ValueError, match="has layers"):
        AtmaCache.load(tmp_path / "cache.safetensors", other.config)


@pytest.mark.parametrize("max_length", [None, 40], ids=["growing", "fixed"])
def test_reset_forgets_everything(model, tokens, close, max_length):
    ids = tokens(1, 12)
    cache = small_pages(model, max_length=max_length)
    feed(model, cache, tokens(1, 21, seed=9))
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    parts = [feed(model, cache, ids[:, :5]), feed(model, cache, ids[:, 5:])]
    close(torch.cat(parts, 1), expected)


def test_growing_appends_pages_and_copies_no_key(model, tokens):
    cache = small_pages(model)
    feed(model, cache, tokens(2, 9))
    keys, values = cache.layers[1].slabs()
    addresses = [x.data_ptr() for x in (*keys, *values)]
    for seed in range(6):
        feed(model, cache, tokens(2, 17, seed=seed))
    keys_now, values_now = cache.layers[1].slabs()
    assert len(keys_now) > len(keys) or len(keys_now) > 1
    assert addresses[0] == keys_now[0].data_ptr()
    assert addresses[len(addresses) // 2] == values_now[0].data_ptr()


def test_a_fixed_cache_keeps_its_addresses(model, tokens):
    cache = small_pages(model, max_length=64)
    feed(model, cache, tokens(2, 9))
    before = [x.data_ptr() for x in _storage(cache)]
    feed(model, cache, tokens(2, 1))
    feed(model, cache, tokens(2, 20))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert before == [x.data_ptr() for x in _storage(cache)]


def test_a_full_fixed_cache_is_refused_before_anything_is_lost(model, tokens, close):
    ids = tokens(1, 20)
    cache = small_pages(model, max_length=18)
    feed(model, cache, ids[:, :17])
    with pytest.raises(ValueError, match="room for 18 tokens, 17 are stored and 3 more"):
        feed(model, cache, ids[:, 17:])
    with torch.no_grad():
        close(feed(model, cache, ids[:, 17:18]), model(ids[:, :18]).logits[:, -1:])


def test_another_batch_size_is_refused(model, tokens):
    cache = small_pages(model)
    feed(model, cache, tokens(2, 5))
    with pytest.raises(ValueError, match="holds 2 rows but the input has 3"):
        feed(model, cache, tokens(3, 1))


def test_states_own_their_storage(model, tokens):
    """No view that would pin a whole prefill."""
    cache = AtmaCache(model.config)
    feed(model, cache, tokens(1, 50))
    for layer in cache.layers:
        for state in layer.states.values():
            assert state.current.untyped_storage().nbytes() == state.current.nbytes
            assert not state.current.requires_grad


def test_nothing_is_left_on_modules(make_model, tokens):
    model = make_model()

    def attributes():
        return {
            (name, key)
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, torch.Tensor | AtmaCache)
        }

    before = attributes()
    model.generate(tokens(2, 5), max_new_tokens=4, eos_token_id=None)
    assert attributes() == before


def test_every_layer_sees_the_length_before_the_call(make_model, tokens, monkeypatch):
    """No layer moves the token counter for the others."""
    for kinds in (["hybrid", "conv", "hybrid"], ["conv", "hybrid", "hybrid"]):
        model = make_model(layer_types=kinds)
        cache = small_pages(model)
        feed(model, cache, tokens(1, 7))
        seen = []

        def look(module, args, kwargs, seen=seen):
            seen.append((int(kwargs["layout"].start[0]), kwargs["cache"].get_seq_length()))

        for layer in model.model.layers:
            layer.register_forward_pre_hook(look, with_kwargs=True)
        feed(model, cache, tokens(1, 3))
        assert seen == [(7, 7)] * 3
        assert cache.get_mask_sizes(4, 0) == (14, 0)


@pytest.mark.parametrize("unknown", ["kv_cache", "cache_params"])
def test_a_cache_under_an_unknown_name_is_an_error(model, tokens, unknown):
    with pytest.raises(TypeError, match=f"got a cache as '{unknown}'"):
        model(tokens(1, 3), **{unknown: AtmaCache(model.config)})


def test_both_names_of_the_cache_are_understood(model, tokens):
    ids = tokens(1, 9)
    with torch.no_grad():
        one = model(ids[:, :8], past_key_values=AtmaCache(model.config))
        two = model(ids[:, :8], cache=AtmaCache(model.config))
        assert one.cache is one.past_key_values
        last = [
            model(ids[:, 8:], past_key_values=one.past_key_values).logits,
            model(ids[:, 8:], cache=two.cache).logits,
        ]
    assert torch.equal(*last)
    with pytest.raises(ValueError, match="not two different"):
        model(ids, cache=AtmaCache(model.config), past_key_values=AtmaCache(model.config))


def test_foreign_caches_are_refused_in_one_sentence(model, tokens):
    from transformers import DynamicCache, StaticCache

    for foreign in (DynamicCache(), StaticCache(config=model.config, max_cache_len=8)):
        with pytest.raises(ValueError, match="pass an AtmaCache"):
            model(tokens(1, 3), cache=foreign)


def test_a_prefix_of_keys_and_values_is_taken_over_with_its_gradient(model, tokens, close):
    """As PEFT's prefix tuning passes it: keys and values of every layer in a DynamicCache."""
    from transformers import DynamicCache

    config, ids = model.config, tokens(2, 6)
    drawn = torch.randn(len(config.layer_types), 2, 2, 2, 3, 16).requires_grad_()

    def prefix():
        cache = DynamicCache()
        for i, (key, value) in enumerate(drawn):
            cache.update(key, value, i)
        return cache

    output = model(ids, past_key_values=prefix(), attention_mask=torch.ones(2, 9))
    (grad,) = torch.autograd.grad((output.logits**2).sum(), drawn)
    for i, kind in enumerate(config.layer_types):
        assert (grad[i].abs().sum() > 0) == (kind == "hybrid")
    assert output.cache.get_seq_length() == 9 and type(output.cache) is AtmaCache
    with torch.no_grad():
        whole = model(tokens(2, 6), past_key_values=prefix()).logits
        cache = model(ids[:, :2], past_key_values=prefix()).cache
        steps = [model(ids[:, i : i + 1], cache=cache).logits for i in range(2, 6)]
    close(torch.cat(steps, 1), whole[:, 2:])
    close(output.logits, whole)


@pytest.mark.parametrize("how", ["fork", "repeat"])
def test_reset_leaves_shared_pages_to_the_others(model, tokens, close, how):
    ids, other = tokens(1, 18), tokens(2, 18, seed=5)
    cache = small_pages(model)
    feed(model, cache, ids)
    fork = cache.fork()
    if how == "repeat":
        cache.batch_repeat_interleave(2)
    cache.reset()
    rows = other[: cache.batch_size]
    with torch.no_grad():
        close(feed(model, cache, rows), model(rows, use_cache=False).logits)
        whole = torch.cat([ids, other[:1, :3]], 1)
        close(feed(model, fork, other[:1, :3]), model(whole, use_cache=False).logits[:, -3:])


@pytest.mark.smoke
def test_crop_takes_a_tensor_and_leaves_it_alone(model, tokens):
    cache = small_pages(model)
    cache.activate_past_recording()
    feed(model, cache, tokens(1, 12))
    drop = torch.tensor(-5)
    cache.crop(drop)
    assert drop == -5 and cache.get_seq_length() == 7 and cache.lengths.tolist() == [7]


def test_the_drafts_of_one_call_can_all_be_dropped(model, tokens, close):
    ids = tokens(1, 330)
    cache = small_pages(model, record_limit=8)
    cache.activate_past_recording()
    feed(model, cache, ids[:, :20])
    feed(model, cache, ids[:, 20:])
    cache.crop(-310)
    never = small_pages(model)
    feed(model, never, ids[:, :20])
    assert_same_states(cache, never, close)


def test_a_cache_filled_in_inference_mode_goes_on_without(model, tokens, close):
    ids = tokens(1, 14)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, 9:]
    for max_length in (None, 32):
        with torch.inference_mode():
            cache = small_pages(model, max_length=max_length)
            model(ids[:, :9], cache=cache)
        for continued in (cache.fork(), cache):
            close(feed(model, continued, ids[:, 9:]), expected)


def test_the_cache_of_another_model_is_refused(make_model, model, tokens):
    cache = small_pages(model)
    feed(model, cache, tokens(1, 5))
    for other in ({"layer_types": ["conv", "hybrid"]}, {"num_key_value_heads": 4}):
        with pytest.raises(ValueError, match="a cache of its own"):
            make_model(**other)(tokens(1, 1), cache=cache)


def test_copies_keep_what_was_recorded_and_whether(model, tokens, close):
    ids = tokens(1, 12)
    for empty in (True, False):
        cache = small_pages(model)
        cache.activate_past_recording()
        if not empty:
            feed(model, cache, ids)
        copies = [copy.deepcopy(cache), cache.fork(), pickle.loads(pickle.dumps(cache))]
        assert all(c.is_croppable for c in copies)
    never = small_pages(model)
    feed(model, never, ids[:, :8])
    for copied in copies[:2]:
        copied.crop(-4)
        assert_same_states(copied, never, close)


def test_files_hold_nothing_of_other_rows(model, tokens):
    """Pages in reserve, and the end of the last page, may hold what others left behind."""
    cache = small_pages(model, expected_length=64)
    feed(model, cache, tokens(1, 6))
    for slabs in cache.layers[1].slabs():
        unused = [p for p in range(len(slabs[0])) if p not in cache.rows.pages[0][:2]]
        slabs[0][unused] = 77.0
        slabs[0][cache.rows.pages[0][1], 2:] = 77.0
    metadata, tensors = cache._export()
    assert tensors["layers.1.keys"].shape[0] == 2
    assert not any((x == 77.0).any() for x in tensors.values())


def test_an_input_without_tokens_is_refused(model, tokens):
    with pytest.raises(ValueError, match="holds no tokens"):
        model(tokens(1, 3)[:, :0])
