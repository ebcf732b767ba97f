# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""What the models return."""

from dataclasses import dataclass, fields

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

# Transformers 5.24 renamed the cache from `past_key_values` to `cache`, in the outputs as in
# generate().
CACHE_NAME = (
    "cache" if "cache" in {f.name for f in fields(BaseModelOutputWithPast)} else "past_key_values"
)


class _BothCacheNames:
    """Lets an output be asked for `cache` where Transformers still calls it `past_key_values`."""

    if CACHE_NAME == "past_key_values":
        cache = property(lambda self: self.past_key_values)


@dataclass
class AtmaDiagnostics:
    """
    What the three streams of a hybrid layer did. Detached; entries at padding mean nothing.

    Attributes:
        n_eff (`[B, T, H]`, fp32): effective number of keys, `1 / sum p^2` over real keys. `None`
            for softmax cores.
        magnitude (`[B, T, H]`): the magnitude stream, in [0, 1). `None` for softmax cores.
        null_weight (`[B, T, H]`, fp32): the weight that the null took. `None` for softmax cores.
        half_life (`[B, T, H]`, fp32): tokens until the memory has halved, `-ln 2 / ln gamma`.
            `None` without memory.
        memory_norm (`[rows, H]`, fp32): Frobenius norm of the memory state after the call; one row
            for each row of the batch, or for each packed document. `None` without memory.
    """

    n_eff: torch.Tensor | None = None
    magnitude: torch.Tensor | None = None
    null_weight: torch.Tensor | None = None
    half_life: torch.Tensor | None = None
    memory_norm: torch.Tensor | None = None


@dataclass
class AtmaModelOutput(_BothCacheNames, BaseModelOutputWithPast):
    """
    Output of `AtmaModel`, with two entries more than Transformers' own:

    distractor_loss (scalar, only in training with `distractor_keys`): mean mass that random keys
        take from the null, averaged over the hybrid layers, without its coefficient.
    diagnostics (one `AtmaDiagnostics` for each hybrid layer, with `output_diagnostics=True`).
    """

    distractor_loss: torch.Tensor | None = None
    diagnostics: tuple[AtmaDiagnostics, ...] | None = None


@dataclass
class AtmaCausalLMOutput(_BothCacheNames, CausalLMOutputWithPast):
    """
    Output of `AtmaForCausalLM`; `distractor_loss` and `diagnostics` as in `AtmaModelOutput`. `loss`
    contains `distractor_loss_coef * distractor_loss`.
    """

    distractor_loss: torch.Tensor | None = None
    diagnostics: tuple[AtmaDiagnostics, ...] | None = None


def kept_hidden_states(request: bool | int | list[int] | None, count: int) -> set[int]:
    """Which of `count` hidden states `output_hidden_states` asks for: all, none, or by index."""
    if request is None or isinstance(request, bool):
        return set(range(count)) if request else set()
    indices = [request] if isinstance(request, int) else list(request)
    return {i % count for i in indices if -count <= i < count}


__all__ = [
    "CACHE_NAME",
    "AtmaCausalLMOutput",
    "AtmaDiagnostics",
    "AtmaModelOutput",
    "kept_hidden_states",
]
