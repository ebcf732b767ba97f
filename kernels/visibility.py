# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Which keys a query sees: causal, inside its document, inside its window. One rule for every core.

Query t of a row stands at position p. It sees the keys max(0, p - W + 1) <= j <= min(p, S - 1),
counted from the start of its row, or of its document when documents are packed.
"""

import torch

from .documents import positions_in_document

__all__ = ["Visibility", "check_shapes", "check_window"]


def check_shapes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
) -> None:
    """Refuses query [B, T, H, D] with key and value [B, S, G, D] that do not fit together."""
    batch, _, num_heads, head_dim = query.shape
    if key.shape != value.shape or key.shape[0] != batch or key.shape[3] != head_dim:
        raise ValueError(
            f"key {list(key.shape)} and value {list(value.shape)} must both be [B, S, G, D] for a "
            f"query [B, T, H, D] of {list(query.shape)}."
        )
    if num_heads % key.shape[2]:
        raise ValueError(
            f"The {num_heads} query heads must be a multiple of the {key.shape[2]} key/value heads."
        )
    if cu_seqlens is not None and batch != 1:
        raise ValueError(f"Packed documents (cu_seqlens) need a batch of 1, not {batch}.")


def check_window(window: int | None) -> None:
    """Refuses a window that does not hold the query itself."""
    if window is not None and window < 1:
        raise ValueError(f"The window must be at least 1 or None, not {window}.")


class Visibility:
    """The range of keys that each query sees.

    Args:
        num_queries: T.
        num_keys: S.
        device: where the tensors live.
        cu_seqlens: [N + 1] offsets of packed documents; then S = T.
        window: W, the most keys that a query sees, its own position included; None for all.
        query_start: [B] position of each row's first query among its keys; None stands for
            S - T: the queries are the last T of the S tokens.

    Attributes:
        first, last: [1 or B, T] int64, the first and the last visible key; the range is empty
            where last < first.
        count: [1 or B, T] int64, n = min(p + 1, W), or 0 for queries that stand before the first
            key.
        seen: [1 or B, T] bool, whether the query sees a key at all.

    Raises:
        ValueError: for `cu_seqlens` together with `query_start` or with S != T, and for a window
            below 1.
    """

    def __init__(
        self,
        num_queries: int,
        num_keys: int,
        device: torch.device,
        *,
        cu_seqlens: torch.Tensor | None = None,
        window: int | None = None,
        query_start: torch.Tensor | None = None,
    ):
        check_window(window)
        if cu_seqlens is not None and query_start is not None:
            raise ValueError("Packed documents (cu_seqlens) start at 0: leave query_start out.")
        if cu_seqlens is not None and num_queries != num_keys:
            raise ValueError(
                f"Packed documents (cu_seqlens) need as many keys as queries, not {num_keys} keys "
                f"for {num_queries} queries."
            )
        tokens = torch.arange(num_queries, device=device)
        # The position of query 0 where the host knows it, and whether all of it is known.
        self.offset = num_keys - num_queries if query_start is None else None
        self.window = window
        self.num_keys = num_keys
        self.packed = cu_seqlens is not None
        if query_start is not None:
            position = query_start[:, None].long() + tokens
            index = position
        elif cu_seqlens is not None:
            position = positions_in_document(cu_seqlens, num_queries)[None]
            index = tokens[None]
        else:
            position = tokens[None] + self.offset
            index = position
        reach = position if window is None else position.clamp(max=window - 1)
        self.first = index - reach
        self.last = index.clamp(max=num_keys - 1)
        self.count = (reach + 1).clamp(min=0)
        self.seen = self.last >= self.first

    def mask(self, queries: slice, keys: slice) -> torch.Tensor:
        """Whether each query of a block sees each key of a block, [1 or B, 1, TQ, SK] bool."""
        index = torch.arange(keys.start, keys.stop, device=self.first.device)
        first = self.first[:, None, queries, None]
        last = self.last[:, None, queries, None]
        return (first <= index) & (index <= last)

    def span(self, queries: slice) -> tuple[int, int]:
        """Bounds (start, stop) of the keys that a block of queries sees, as the host knows them."""
        if self.offset is None:
            return 0, self.num_keys
        stop = min(max(self.offset + queries.stop, 0), self.num_keys)
        if self.window is None:
            return 0, stop
        return min(max(self.offset + queries.start - self.window + 1, 0), stop), stop

    def is_full(self, queries: slice, keys: slice) -> bool:
        """Whether the host knows that each query of a block sees each key of a block."""
        if self.offset is None or self.packed:
            return False
        causal = keys.stop <= self.offset + queries.start + 1
        return causal and (
            self.window is None or keys.start > self.offset + queries.stop - 1 - self.window
        )
