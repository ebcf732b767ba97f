# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Reading long inputs in chunks through the cache, so that only its keys grow with the context."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from atma.outputs_atma import CACHE_NAME
from transformers import PreTrainedModel

LOGITS_AT_ONCE = 4096  # positions


def default_chunk(config) -> int | None:
    """
    Tokens of one call; `None` reads the whole input in one call.

    Polar attention reads chunks on top of pages. The softmax cores of the ablations would build a
    mask of chunk x context for them, but know plain causal attention over a whole input; with a
    window they always need a mask, so the chunks are small.
    """
    if getattr(config, "attention_type", "polar") == "polar":
        return 16384
    return None if config.attention_window is None else 2048


class Reader:
    """
    Reads token ids `[B, L]` with a causal language model.

    Args:
        model: any model with a decoder, a cache and a head; in evaluation mode.
        chunk: tokens of one call, 0 for all at once; `None` chooses by `default_chunk`.
    """

    def __init__(self, model: PreTrainedModel, chunk: int | None = None):
        self.model = model
        self.chunk = default_chunk(model.config) if chunk is None else chunk

    @torch.no_grad()
    def _read(self, ids: torch.Tensor, use_cache: bool) -> Iterator[tuple[torch.Tensor, object]]:
        """(final hidden states, cache) after each chunk."""
        decoder, cache = self.model.get_decoder(), None
        for part in ids.split(self.chunk or ids.shape[1], dim=1):
            output = decoder(
                input_ids=part.to(self.model.device), past_key_values=cache, use_cache=use_cache
            )
            cache = getattr(output, CACHE_NAME) if use_cache else None
            yield output.last_hidden_state, cache

    def hidden_states(self, ids: torch.Tensor) -> Iterator[torch.Tensor]:
        """The final hidden states of chunk after chunk, `[B, chunk, C]`."""
        several = bool(self.chunk) and self.chunk < ids.shape[1]
        for hidden, _ in self._read(ids, use_cache=several):
            yield hidden

    def fill(self, ids: torch.Tensor):
        """The cache after `ids`."""
        for _, cache in self._read(ids, use_cache=True):
            last = cache
        return last

    def last_hidden_states(self, ids: torch.Tensor, count: int) -> torch.Tensor:
        """The final hidden states of the last `count` positions, `[B, count, C]`."""
        last = None
        for hidden in self.hidden_states(ids):
            last = hidden if last is None else torch.cat([last, hidden[:, -count:]], dim=1)
            last = last[:, -count:].clone()
        return last

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[..., V]` in fp32 of hidden states `[..., C]`."""
        head = getattr(self.model, "logits_of", None) or self.model.get_output_embeddings()
        return head(hidden).float()

    def _nats(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Minus the log probabilities `[B, T]` of `targets` `[B, T]` after `hidden` `[B, T, C]`."""
        parts = [
            F.cross_entropy(self.logits(h).transpose(1, 2), t.to(h.device), reduction="none")
            for h, t in zip(
                hidden.split(LOGITS_AT_ONCE, dim=1),
                targets.split(LOGITS_AT_ONCE, dim=1),
                strict=True,
            )
        ]
        return torch.cat(parts, dim=1).cpu()

    def token_losses(self, ids: torch.Tensor) -> torch.Tensor:
        """Nats `[B, L - 1]` of every token of `ids` `[B, L]` but the first."""
        losses, start = [], 0
        for hidden in self.hidden_states(ids[:, :-1]):
            stop = start + hidden.shape[1]
            losses.append(self._nats(hidden, ids[:, start + 1 : stop + 1]))
            start = stop
        return torch.cat(losses, dim=1)

    def last_losses(self, ids: torch.Tensor, count: int) -> torch.Tensor:
        """Nats `[B, count]` of the last `count` tokens of `ids` `[B, L]`."""
        return self._nats(self.last_hidden_states(ids[:, :-1], count), ids[:, -count:])


__all__ = ["Reader", "default_chunk"]
