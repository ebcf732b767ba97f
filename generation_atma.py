# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""What generate() needs to know about ATMA: which cache it gets, and what it cannot do."""

import torch
from transformers.generation import GenerationMixin, MaxLengthCriteria

from .cache_atma import AtmaCache
from .outputs_atma import CACHE_NAME

NO_CONTINUOUS_BATCHING = (
    "Transformers' continuous batching knows attention layers only and cannot carry ATMA's "
    "convolution and memory states: "
    "call generate() on a padded batch instead."
)


def _record_limit(generation_config) -> int:
    """How many of the latest tokens assisted decoding may want to drop at once."""
    drafts = (generation_config.num_assistant_tokens, generation_config.prompt_lookup_num_tokens)
    return max([128, *(2 * n for n in drafts if n)])


class AtmaGenerationMixin(GenerationMixin):
    """`generate()` with an `AtmaCache`, made and sized without being asked."""

    @staticmethod
    def create_masks_for_generate(
        config, inputs_embeds, attention_mask, cache=None, *args, past_key_values=None, **kwargs
    ):
        """
        The padding mask of the new tokens, `[B, T]`: that is all the model needs, and its shape
        stays in decoding. So do its strides, as a copy: the view's would grow with every token, and
        the compiler records a CUDA graph for each value of a stride that changes.
        """
        if attention_mask is None or attention_mask.dim() != 2:
            return attention_mask
        new = attention_mask[:, -inputs_embeds.shape[1] :]
        return new.clone(memory_format=torch.contiguous_format)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic", "static"):
            raise ValueError(
                f"cache_implementation={kind!r} holds keys and values only and cannot carry "
                "ATMA's convolution and memory "
                "states: use the default, or 'static'."
            )
        if kind == "static" and generation_config.prompt_lookup_num_tokens and args:
            # The last drafts may reach beyond the last token that is kept.
            *others, max_cache_length = args
            args = (*others, max_cache_length + generation_config.prompt_lookup_num_tokens)
        given = model_kwargs.get(CACHE_NAME)
        if given is not None or generation_config.use_cache is False or kind == "static":
            return super()._prepare_cache_for_generation(
                generation_config, model_kwargs, *args, **kwargs
            )
        max_cache_length = kwargs.get("max_cache_length", args[-1] if args else 0)
        # Room for the prompt and a good while of answer; a longer answer grows by pages.
        mask = model_kwargs.get("attention_mask")
        prompt_length = 0 if mask is None else mask.shape[1]
        cache = AtmaCache(
            self.config,
            expected_length=min(max_cache_length, prompt_length + 4096),
            record_limit=_record_limit(generation_config),
        )
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs[CACHE_NAME] = cache

    def _prepare_static_cache(
        self, cache_implementation, batch_size, max_cache_len, prefill_chunk_size, model_kwargs
    ):
        # The largest capacity seen, so that a second call finds the same shapes and does not
        # compile again.
        longest = max(max_cache_len, getattr(self, "_previous_max_cache_length", -1))
        self._previous_max_cache_length = longest
        return AtmaCache(self.config, max_length=longest)

    # `max_position_embeddings` is the training length. No table ends there, and reading further is
    # what ATMA is for: it must not cut the default length, and is nothing to warn of.

    def _prepare_generated_length(
        self,
        generation_config,
        has_default_max_length,
        has_default_min_length,
        model_input_name,
        input_ids_length,
        inputs_tensor,
    ):
        default = generation_config.max_length
        prepared = super()._prepare_generated_length(
            generation_config,
            has_default_max_length,
            has_default_min_length,
            model_input_name,
            input_ids_length,
            inputs_tensor,
        )
        if has_default_max_length and generation_config.max_new_tokens is None:
            prepared.max_length = default + input_ids_length
        return prepared

    def _get_stopping_criteria(self, generation_config, stopping_criteria, *args, **kwargs):
        criteria = super()._get_stopping_criteria(
            generation_config, stopping_criteria, *args, **kwargs
        )
        for criterion in criteria:
            given = any(criterion is one for one in stopping_criteria or ())
            if isinstance(criterion, MaxLengthCriteria) and not given:
                criterion.max_position_embeddings = None
        return criteria

    def generate_batch(self, *args, **kwargs):
        raise NotImplementedError(NO_CONTINUOUS_BATCHING)

    def init_continuous_batching(self, *args, **kwargs):
        raise NotImplementedError(NO_CONTINUOUS_BATCHING)

    def continuous_batching_context_manager(self, *args, **kwargs):
        raise NotImplementedError(NO_CONTINUOUS_BATCHING)


__all__ = ["NO_CONTINUOUS_BATCHING", "AtmaGenerationMixin"]
