# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
Recurrent states that can be put back: the state before the latest tokens, and the inputs that led
on from there.
"""

from collections.abc import Callable

import torch

from .kernels.columns import gather_columns, place_after
from .paging_atma import mark_static


class Recording:
    """
    What is needed to drop the latest tokens again: for each call the padding mask of its columns,
    and how many real tokens the layers have recorded for each row.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.active = False
        self.clear()

    def clear(self) -> None:
        self.columns: list[tuple[int, torch.Tensor | None]] = []
        self.counts: torch.Tensor | None = None
        self.width = 0

    def extend(self, num_tokens: int, mask: torch.Tensor | None, added: torch.Tensor) -> None:
        self.columns.append((num_tokens, mask))
        self.counts = added if self.counts is None else self.counts + added
        self.width += num_tokens

    def real_tokens(self, num_tokens: int) -> torch.Tensor:
        """How many of the last `num_tokens` columns are real, `[B]`."""
        dropped = torch.zeros_like(self.counts)
        for width, mask in reversed(self.columns):
            take = min(width, num_tokens)
            dropped += take if mask is None else mask[:, width - take :].sum(1).to(dropped)
            num_tokens -= take
            if num_tokens == 0:
                return dropped
        raise RuntimeError(
            f"crop can drop at most the {sum(width for width, _ in self.columns)} tokens that "
            "were fed since "
            "activate_past_recording(); keep a fork() of the cache to go back further."
        )

    def forget(self, num_tokens: int) -> None:
        """Forgets the last `num_tokens` columns."""
        while num_tokens:
            width, mask = self.columns.pop()
            if width > num_tokens:
                keep = width - num_tokens
                self.columns.append((keep, None if mask is None else mask[:, :keep]))
            num_tokens -= min(width, num_tokens)


class RollbackState:
    """
    A recurrent state that can be put back: the state itself and, while past is recorded, the state
    `base` before the recorded tokens together with the inputs that led on from there.

    Args:
        static: whether the state's address is promised to stay.
        advance: `(state, inputs, lengths) -> state` after the first `lengths` `[B]` of the inputs
            `[B, T, ...]`.
    """

    def __init__(self, advance: Callable, recording: Recording, static: bool):
        self.advance = advance
        self.recording = recording
        self.static = static
        self.current: torch.Tensor | None = None
        self.base: torch.Tensor | None = None
        self.inputs: tuple[torch.Tensor, ...] | None = None

    def for_forward(self) -> torch.Tensor | None:
        """
        The state to start from. A copy under autograd, which must not see the update in place that
        follows.
        """
        if self.current is not None and torch.is_grad_enabled():
            return self.current.clone()
        return self.current

    def remember(self) -> None:
        """To be called before the state changes."""
        if self.recording.active and self.inputs is None:
            self.base = None if self.current is None else self.current.clone()

    def commit(self, new: torch.Tensor | None, inputs: tuple[torch.Tensor, ...]) -> None:
        """
        Stores the new state (`None`: it was updated in place) and records the inputs that led to
        it.
        """
        if new is not None:
            new = new.detach()
            if self.current is None:
                # A copy, so that the state never pins the tensors of a prefill.
                self.current = new.clone(memory_format=torch.contiguous_format)
                if self.static:
                    mark_static(self.current)
            else:
                self.current.copy_(new)
        if self.recording.active:
            inputs = tuple(x.detach() for x in inputs)
            if self.inputs is None:
                if self.base is None:
                    self.base = torch.zeros_like(self.current)
                self.inputs = tuple(x.clone() for x in inputs)
            else:
                counts = self.recording.counts.to(inputs[0].device)
                self.inputs = tuple(
                    place_after(old, x, counts) for old, x in zip(self.inputs, inputs, strict=True)
                )

    def put_back(self, counts: torch.Tensor) -> None:
        """Returns to the state after the first `counts` `[B]` recorded tokens."""
        if self.inputs is not None:
            self.current.copy_(self.advance(self.base, self.inputs, counts.to(self.current.device)))

    def fold(self, dropped: torch.Tensor, width: int) -> None:
        """Moves `base` over the first `dropped` `[B]` recorded tokens and keeps `width` columns."""
        if self.inputs is None:
            return
        dropped = dropped.to(self.base.device)
        self.base = self.advance(self.base, self.inputs, dropped)
        columns = dropped[:, None] + torch.arange(width, device=dropped.device)
        columns = columns.clamp(max=self.inputs[0].shape[1] - 1)
        self.inputs = tuple(gather_columns(x, columns) for x in self.inputs)

    def forget(self) -> None:
        self.base = self.inputs = None

    def select(self, index: torch.Tensor, in_place: bool) -> None:
        def take(x):
            return None if x is None else x.index_select(0, index.to(x.device))

        if in_place and self.current is not None:
            self.current.copy_(take(self.current))
        else:
            self.current = take(self.current)
        self.base = take(self.base)
        self.inputs = None if self.inputs is None else tuple(take(x) for x in self.inputs)

    def copy_from(self, other: "RollbackState") -> None:
        for name in ("current", "base"):
            value = getattr(other, name)
            setattr(self, name, None if value is None else value.clone())
        self.inputs = None if other.inputs is None else tuple(x.clone() for x in other.inputs)

    def zero(self) -> None:
        if self.current is not None:
            self.current.zero_()
        self.forget()


__all__ = ["Recording", "RollbackState"]
