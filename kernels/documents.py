# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Packed documents: where each token stands, from the offsets `cu_seqlens` of the documents.

`cu_seqlens` is [N + 1], int32 or int64, from 0 to the number of tokens. Empty documents are legal.
All shapes depend on T and N only, so nothing here waits for the device or breaks a graph.
"""

import torch

__all__ = ["document_ids", "positions_in_document"]


def document_ids(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The index of each token's document.

    Args:
        cu_seqlens: [N + 1] offsets of the documents.
        num_tokens: T.

    Returns:
        [T] int64, values in 0..N-1; tokens past the last offset, if any, get N: their own document.
    """
    tokens = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    # The last offset that is not past the token: this steps over empty documents.
    return torch.searchsorted(cu_seqlens.contiguous(), tokens, right=True) - 1


def positions_in_document(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The position of each token in its document, [T] int64, counted from 0."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    return tokens - cu_seqlens[document_ids(cu_seqlens, num_tokens)]
