# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Plain softmax attention and rotary positions: the cores that ATMA is compared with.

ATMA paper, arXiv 2606.25156, section on the baselines. Queries see the same keys as in polar
attention.
"""

import torch
import torch.nn.functional as F

from .backend import compute_dtype, without_autocast
from .visibility import Visibility, check_shapes

__all__ = ["apply_rotary", "softmax_attention"]

IMPLEMENTATIONS = ("sdpa", "eager")


def softmax_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    cu_seqlens: torch.Tensor | None = None,
    window: int | None = None,
    query_start: torch.Tensor | None = None,
    implementation: str = "sdpa",
    return_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """softmax(scale q . k) v over the keys that each query sees.

    Args:
        query: [B, T, H, D]; the results take its dtype.
        key, value: [B, S, G, D]; G divides H, query head h reads group h // (H / G).
        scale: of the dot products.
        cu_seqlens, window, query_start: which keys are seen, as in `polar_attention`.
        implementation: "sdpa" calls torch's fused attention, "eager" materialises the weights and
            computes in fp32 (fp64 for fp64 inputs).
        return_weights: adds the weights; "eager" only.

    Returns:
        output [B, T, H, D], zero for queries that see nothing; weights [B, H, T, S] or None.

    Raises:
        ValueError: for shapes or arguments that do not fit together.
    """
    check_shapes(query, key, value, cu_seqlens)
    if implementation not in IMPLEMENTATIONS:
        names = " or ".join(repr(name) for name in IMPLEMENTATIONS)
        raise ValueError(f"Unknown attention implementation {implementation!r}: use {names}.")
    if return_weights and implementation != "eager":
        raise ValueError("Attention weights exist in the eager implementation only: use 'eager'.")
    num_queries, num_keys, num_groups = query.shape[1], key.shape[1], key.shape[2]
    whole = cu_seqlens is None and window is None and query_start is None
    if implementation == "sdpa" and whole and num_queries == 1:
        # A single query at the end sees all keys; as many queries as keys are plainly causal.
        return _sdpa(query, key, value, scale, None, False), None
    if implementation == "sdpa" and whole and num_queries == num_keys:
        return _sdpa(query, key, value, scale, None, True), None

    visibility = Visibility(
        num_queries,
        num_keys,
        query.device,
        cu_seqlens=cu_seqlens,
        window=window,
        query_start=query_start,
    )
    # Queries that see nothing read everything, so that all stays finite, and are erased after.
    unseen = ~visibility.seen
    mask = visibility.mask(slice(0, num_queries), slice(0, num_keys)) | unseen[:, None, :, None]
    if implementation == "sdpa":
        output = _sdpa(query, key, value, scale, mask, False)
        return output.masked_fill(unseen[..., None, None], 0.0), None

    dtype = compute_dtype(query, key, value)
    with without_autocast(query):
        grouped = query.to(dtype).unflatten(2, (num_groups, -1))
        logits = torch.einsum("btgrd,bsgd->bgrts", grouped, key.to(dtype)).flatten(1, 2) * scale
        weights = logits.masked_fill(~mask, float("-inf")).softmax(-1)
        weights = weights.masked_fill(unseen[:, None, :, None], 0.0)
        output = torch.einsum(
            "bgrts,bsgd->btgrd", weights.unflatten(1, (num_groups, -1)), value.to(dtype)
        ).flatten(2, 3)
    return output.to(query.dtype), weights.to(query.dtype) if return_weights else None


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    is_causal: bool,
) -> torch.Tensor:
    """torch's attention in our layout, [B, T, H, D], for inputs of mixed dtypes too."""
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    query_heads, key_heads, value_heads = (x.transpose(1, 2).to(dtype) for x in (query, key, value))
    output = F.scaled_dot_product_attention(
        query_heads,
        key_heads,
        value_heads,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return output.transpose(1, 2).to(query.dtype)


def apply_rotary(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotates half of each head's channel pairs by angles that grow with the position.

    Of the D/2 frequencies the first D/4 run geometrically from 1 to 1/1024, both included, and the
    others are 0. With the halves (x1, x2) of a head: (x1 cos + x2 sin, x2 cos - x1 sin).

    Args:
        x: [B, T, heads, D], D a multiple of 4.
        positions: [T] or [B, T] integers. The angles are made from them here, in fp32 (fp64 for
            fp64 inputs); there is no table, so no position is too large for one.

    Returns:
        [B, T, heads, D] in the dtype of x.
    """
    dtype = compute_dtype(x)
    count = x.shape[-1] // 4
    steps = torch.arange(count, device=x.device, dtype=dtype) / max(count - 1, 1)
    frequencies = F.pad(torch.exp2(-10 * steps), (0, count))
    angles = (positions.to(dtype)[..., None] * frequencies)[..., None, :]
    cos, sin = angles.cos(), angles.sin()
    x1, x2 = x.to(dtype).chunk(2, dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1).to(x.dtype)
