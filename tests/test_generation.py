# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""generate(): every way of decoding tells the same story as running the model without a cache."""

import inspect

import pytest
import torch
import transformers
from atma import AtmaCache
from atma.outputs_atma import CACHE_NAME
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TextStreamer
from transformers.generation import CompileConfig, MaxLengthCriteria

GREEDY = {"do_sample": False, "eos_token_id": None}
CORES = [{}, {"attention_type": "nope"}, {"attention_type": "rope"}, {"attention_window": 6}]
CORE_IDS = ["polar", "nope", "rope", "window"]


def left_padded(tokens):
    ids = tokens(2, 17)
    mask = torch.ones_like(ids)
    ids[0, :7], mask[0, :7] = 0, 0
    return ids, mask


def greedy_without_cache(model, ids, steps, mask=None):
    """An own loop over whole forwards: nothing of generate() and nothing of the cache."""
    mask = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad():
        for _ in range(steps):
            logits = model(ids, attention_mask=mask, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return ids


@pytest.mark.smoke
@pytest.mark.parametrize("overrides", CORES, ids=CORE_IDS)
@pytest.mark.parametrize("padded", [False, True])
def test_greedy_equals_a_loop_without_cache(make_model, tokens, overrides, padded):
    model = make_model(**overrides)
    ids, mask = left_padded(tokens) if padded else (tokens(2, 17), None)
    expected = greedy_without_cache(model, ids, 40, mask)
    options = {"attention_mask": mask, "max_new_tokens": 40, **GREEDY}
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)


@pytest.mark.smoke
@pytest.mark.parametrize("overrides", [{}, {"attention_type": "rope"}], ids=["polar", "rope"])
def test_the_training_length_is_no_limit(make_model, tokens, monkeypatch, overrides):
    """By `max_position_embeddings` generate() would cut its default length, refuse, or warn."""
    warnings = []
    logger = transformers.generation.stopping_criteria.logger
    monkeypatch.setattr(logger, "warning_once", warnings.append)
    model = make_model(max_position_embeddings=16, **overrides)
    for length in (10, 17):
        ids = tokens(1, length)
        assert torch.equal(model.generate(ids, **GREEDY), greedy_without_cache(model, ids, 20))
        assert model.generate(ids, max_new_tokens=3, **GREEDY).shape == (1, length + 3)
        assert model.generate(ids, max_length=length + 2, **GREEDY).shape == (1, length + 2)
        embeds = model.get_input_embeddings()(ids)
        assert model.generate(inputs_embeds=embeds, **GREEDY).shape == (1, 20)
    given = MaxLengthCriteria(19, max_position_embeddings=18)
    assert model.generate(ids, stopping_criteria=[given], **GREEDY).shape == (1, 19)
    assert given.max_position_embeddings == 18  # the caller's own stays as it is
    model.generation_config.max_length = 22
    assert model.generate(ids, **GREEDY).shape == (1, 22)
    assert not warnings


@pytest.mark.smoke
def test_each_step_of_generate_sees_one_token_and_the_cache(make_model, tokens):
    model = make_model()
    seen = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(
            (kwargs["input_ids"].shape[1], kwargs["cache"] or kwargs["past_key_values"])
        ),
        with_kwargs=True,
    )
    output = model.generate(tokens(2, 9), max_new_tokens=4, return_dict_in_generate=True, **GREEDY)
    assert [width for width, _ in seen] == [9, 1, 1, 1]
    caches = [cache for _, cache in seen]
    assert all(type(cache) is AtmaCache and cache is caches[0] for cache in caches)
    assert getattr(output, CACHE_NAME) is caches[0]
    assert caches[0].get_seq_length() == 12


def test_prefill_computes_the_logits_of_one_position(make_model, tokens):
    model = make_model()
    widths = []
    model.lm_head.register_forward_hook(lambda m, args, out: widths.append(out.shape[1]))
    model.generate(tokens(2, 9), max_new_tokens=3, **GREEDY)
    assert widths == [1, 1, 1]
    assert "logits_to_keep" in inspect.signature(model.forward).parameters


@pytest.mark.parametrize("beams", [3, 5])
@pytest.mark.parametrize("padded", [False, True])
def test_beams_keep_their_own_states(model, tokens, beams, padded, close):
    ids, mask = left_padded(tokens) if padded else (tokens(2, 17), None)
    options = {
        "attention_mask": mask,
        "num_beams": beams,
        "num_return_sequences": beams,
        "max_new_tokens": 12,
        "return_dict_in_generate": True,
        "output_scores": True,
        **GREEDY,
    }
    cached = model.generate(ids, **options)
    whole = model.generate(ids, use_cache=False, **options)
    static = model.generate(ids, cache_implementation="static", **options)
    for other in (whole, static):
        assert torch.equal(cached.sequences, other.sequences)
        close(cached.sequences_scores, other.sequences_scores)


def test_sampling_and_several_sequences_equal_the_uncached_run(model, tokens):
    ids, mask = left_padded(tokens)
    runs = []
    for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        torch.manual_seed(5)
        runs.append(
            model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                top_k=20,
                num_return_sequences=3,
                max_new_tokens=15,
                eos_token_id=None,
                **options,
            )
        )
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
    assert len({tuple(row.tolist()) for row in runs[0]}) == 6


@pytest.mark.smoke
def test_prompt_lookup_equals_greedy(model, tokens):
    piece = tokens(1, 9)
    ids = torch.cat([piece, piece, piece[:, :4]], 1)
    expected = model.generate(ids, max_new_tokens=60, **GREEDY)
    for drafts in (2, 10, 300):
        output = model.generate(
            ids,
            max_new_tokens=60,
            prompt_lookup_num_tokens=drafts,
            return_dict_in_generate=True,
            **GREEDY,
        )
        assert torch.equal(output.sequences, expected)
        assert getattr(output, CACHE_NAME).get_seq_length() == expected.shape[1] - 1


@pytest.mark.smoke
@pytest.mark.parametrize("overrides", CORES, ids=CORE_IDS)
def test_assisted_decoding_equals_greedy(make_model, tokens, overrides):
    model = make_model(**overrides)
    ids = tokens(1, 11)
    expected = model.generate(ids, max_new_tokens=40, **GREEDY)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=101,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            eos_token_id=None,
        )
    ).eval()
    assistants = {"another": make_model(seed=1, **overrides), "itself": model, "llama": llama}
    # An assistant that is nearly the model: some drafts are kept, some are dropped.
    near = make_model(**overrides)
    with torch.no_grad():
        near.lm_head.weight += 0.03 * torch.randn_like(near.lm_head.weight)
    assistants["near"] = near
    for name, assistant in assistants.items():
        found = model.generate(ids, assistant_model=assistant, max_new_tokens=40, **GREEDY)
        assert torch.equal(found, expected), name


def test_a_model_can_assist_llama(make_model, tokens):
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=101,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    ).eval()
    ids = tokens(1, 11)
    expected = llama.generate(ids, max_new_tokens=20, **GREEDY)
    found = llama.generate(ids, assistant_model=make_model(), max_new_tokens=20, **GREEDY)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("count", [5, 20, 43])
def test_speculation_on_a_static_cache_equals_greedy_or_is_refused(make_model, tokens, count):
    """To the last token, and the text repeats, so that drafts reach beyond it."""
    model, ids = make_model(), tokens(1, 4).repeat(1, 4)
    expected = model.generate(ids, max_new_tokens=count, **GREEDY)
    options = {"prompt_lookup_num_tokens": 4, "cache_implementation": "static"}
    try:
        found = model.generate(ids, max_new_tokens=count, **options, **GREEDY)
    except ValueError as error:  # Transformers 5.17 refuses the combination itself
        assert "not supported with Static cache" in str(error)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("padded", [False, True])
def test_inputs_embeds_generate_the_same_text(model, tokens, padded):
    ids, mask = left_padded(tokens) if padded else (tokens(2, 17), torch.ones(2, 17).long())
    embeds = model.get_input_embeddings()(ids)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=8, **GREEDY)[:, 17:]
    found = model.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=8, **GREEDY)
    assert torch.equal(found, expected)
    for options in ({}, {"input_ids": ids, "inputs_embeds": embeds}):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model(**options)


@pytest.mark.parametrize("chunk", [1, 2, 5, 16])
@pytest.mark.parametrize("cache_implementation", [None, "static"])
def test_chunked_prefill_changes_nothing(model, tokens, chunk, cache_implementation):
    ids, mask = left_padded(tokens)
    options = {"attention_mask": mask, "max_new_tokens": 10, **GREEDY}
    expected = model.generate(ids, **options)
    found = model.generate(
        ids, prefill_chunk_size=chunk, cache_implementation=cache_implementation, **options
    )
    assert torch.equal(found, expected)


@pytest.mark.smoke
@pytest.mark.parametrize("padded", [False, True])
def test_a_second_turn_continues_the_returned_cache(model, tokens, padded):
    ids, mask = left_padded(tokens) if padded else (tokens(2, 17), torch.ones(2, 17).long())
    first = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, return_dict_in_generate=True, **GREEDY
    )
    turn = torch.cat([first.sequences, tokens(2, 5, seed=4)], 1)
    turn_mask = torch.cat([mask, torch.ones(2, 11, dtype=torch.long)], 1)
    expected = model.generate(turn, attention_mask=turn_mask, max_new_tokens=10, **GREEDY)
    cache = getattr(first, CACHE_NAME)
    found = model.generate(
        turn, attention_mask=turn_mask, max_new_tokens=10, **{CACHE_NAME: cache}, **GREEDY
    )
    assert torch.equal(found, expected)
    assert cache.get_seq_length() == turn.shape[1] + 9


def test_a_prompt_computed_once_serves_many_questions(model, tokens):
    prefix = tokens(1, 23)
    with torch.no_grad():
        prompt = model(prefix, use_cache=True).cache
    for seed in range(3):
        question = torch.cat([prefix, tokens(1, 4, seed=seed)], 1)
        expected = model.generate(question, max_new_tokens=8, **GREEDY)
        found = model.generate(question, max_new_tokens=8, **{CACHE_NAME: prompt.fork()}, **GREEDY)
        assert torch.equal(found, expected)
    assert prompt.get_seq_length() == 23


def test_text_can_be_streamed(model, tokens):
    class Digits:
        def decode(self, ids, **kwargs):
            return "".join(f"{i} " for i in ids)

    class Collector(TextStreamer):
        text = ""

        def on_finalized_text(self, text, stream_end=False):
            self.text += text

    streamer = Collector(Digits())
    ids = tokens(1, 5)
    found = model.generate(ids, max_new_tokens=7, streamer=streamer, **GREEDY)
    assert streamer.text.split() == [str(i) for i in found[0].tolist()]


def test_scores_hidden_states_and_attentions_come_along(make_model, tokens):
    model = make_model()
    model.set_attn_implementation("eager")
    output = model.generate(
        tokens(2, 6),
        max_new_tokens=3,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        output_hidden_states=True,
        output_attentions=True,
        **GREEDY,
    )
    assert [x[0].shape for x in output.attentions] == [(2, 4, 6, 6), (2, 4, 1, 7), (2, 4, 1, 8)]
    assert len(output.hidden_states[0]) == 6 and output.logits[0].shape == (2, 101)


@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static", "quantized", "paged"])
def test_caches_that_hold_only_keys_and_values_are_refused(model, tokens, kind):
    refusal = "use the default, or 'static'|call generate\\(\\) on a padded batch"
    with pytest.raises((ValueError, NotImplementedError), match=refusal):
        model.generate(tokens(1, 4), max_new_tokens=2, cache_implementation=kind, **GREEDY)


def test_continuous_batching_is_refused_at_once(model, tokens):
    for call in (
        lambda: model.generate_batch(inputs=[[1, 2, 3]]),
        lambda: model.init_continuous_batching(),
        lambda: model.continuous_batching_context_manager(),
    ):
        with pytest.raises(NotImplementedError, match="call generate"):
            call()
    with torch.no_grad():  # and the model is not left in a broken state
        model(tokens(1, 3))


def test_attention_implementations_that_cannot_be_honoured_are_refused(make_model):
    config = make_model().config
    for name in ("flash_attention_2", "flex_attention"):
        with pytest.raises((ValueError, ImportError)):
            AutoModelForCausalLM.from_config(config, attn_implementation=name)


@pytest.mark.smoke
def test_a_static_cache_decodes_in_one_compiled_graph(make_model, tokens):
    """
    Transformers' own compilation, fullgraph: equal tokens, second call and third batch size
    included, and nothing compiles after the first step of a batch size.
    """
    model = make_model()
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    config = CompileConfig(fullgraph=True, backend=counting, mode=None, dynamic=None)
    config._compile_all_devices = True
    for batch in (2, 2, 1):
        ids = tokens(batch, 9)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        options = {"attention_mask": mask, "max_new_tokens": 12, **GREEDY}
        expected = model.generate(ids, **options)
        before = len(graphs)
        found = model.generate(ids, cache_implementation="static", compile_config=config, **options)
        assert torch.equal(found, expected)
        assert len(graphs) - before <= 1
        assert len(graphs) > 0
    again = len(graphs)
    model.generate(
        tokens(2, 9),
        cache_implementation="static",
        compile_config=config,
        max_new_tokens=12,
        **GREEDY,
    )
    assert len(graphs) - again <= 1
