# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
Moving columns of `[B, T, ...]` tensors about, row by row, with shapes that do not depend on the
data.
"""

import torch


def gather_columns(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """`x[b, columns[b, t]]` for `x` `[B, S, ...]` and `columns` `[B, T]`: `[B, T, ...]`."""
    index = columns.reshape(*columns.shape, *[1] * (x.dim() - 2))
    return x.gather(1, index.expand(*columns.shape, *x.shape[2:]))


def place_after(old: torch.Tensor, new: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """
    `[B, S + T, ...]`: the first `counts[b]` columns of `old` `[B, S, ...]`, followed by `new` `[B,
    T, ...]`. Columns after these hold nothing of use. Differentiable.
    """
    room = new.new_zeros(new.shape)
    columns = counts[:, None] + torch.arange(new.shape[1], device=counts.device)
    index = columns.reshape(*columns.shape, *[1] * (new.dim() - 2)).expand(new.shape)
    return torch.cat([old.to(new.dtype), room], 1).scatter(1, index, new)


__all__ = ["gather_columns", "place_after"]
