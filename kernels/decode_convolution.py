# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Causal depthwise convolutions of a few tokens, which advance their window in place.

ATMA paper, arXiv 2606.25156; the whole-sequence forms and the equations stand in the file of
`causal_conv1d`. A window [B, K - 1, C] holds the last inputs so far, oldest first. No gradient is
recorded here.
"""

import torch

from .backend import choose_backend
from .short_convolution import causal_conv1d, gated_causal_conv1d, shift_window

try:
    from .decode_convolution_triton import (
        canon_step_op,
        causal_conv1d_step_op,
        gated_causal_conv1d_step_op,
    )
except ImportError:  # no Triton here: the torch path serves every device
    canon_step_op = causal_conv1d_step_op = gated_causal_conv1d_step_op = None

__all__ = ["canon_step", "causal_conv1d_step", "gated_causal_conv1d_step"]

_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def causal_conv1d_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    *,
    residual: bool = False,
    lengths: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """`causal_conv1d` on top of a window, and the window after it.

    Args:
        x: [B, T, C], T small.
        weight: [C, K]; the last tap multiplies the current input.
        window: [B, K - 1, C]; when this returns, the same storage holds the last inputs, x
            included.
        residual: whether to add x to the result.
        lengths: [B]; the tokens of row b from lengths[b] on are padding, which the window leaves
            out. Their results mean nothing.
        backend: "auto", "triton" or "torch".

    Returns:
        y [B, T, C] in the dtype of x, summed in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: if the shapes do not fit each other or the backend cannot run.
    """
    _check_shapes([x], [weight], window)
    has_triton = causal_conv1d_step_op is not None and _supports([x, weight], window)
    if choose_backend(backend, x, "causal_conv1d_step", has_triton) == "triton":
        return causal_conv1d_step_op(x, weight, window, lengths, residual)
    return _step([x], [weight], window, lengths, residual)[0]


@torch.no_grad()
def canon_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    value_weight: torch.Tensor,
    window: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The canon convolutions y + conv(y) of query, key and value in one go.

    Args:
        query, key, value: [B, T, Cq], [B, T, Ck], [B, T, Cv], heads flattened into channels.
        query_weight, key_weight, value_weight: [C, K] of each.
        window: [B, K - 1, Cq + Ck + Cv], the three side by side; updated in place.
        lengths, backend: as in `causal_conv1d_step`.

    Returns:
        The mixed query, key and value.

    Raises:
        ValueError: as `causal_conv1d_step`.
    """
    inputs, weights = [query, key, value], [query_weight, key_weight, value_weight]
    _check_shapes(inputs, weights, window)
    has_triton = canon_step_op is not None and _supports([*inputs, *weights], window)
    if choose_backend(backend, query, "canon_step", has_triton) == "triton":
        return canon_step_op(inputs, weights, window, lengths, True)
    return tuple(_step(inputs, weights, window, lengths, True))


@torch.no_grad()
def gated_causal_conv1d_step(
    projected: torch.Tensor,
    weight: torch.Tensor,
    window: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gated_causal_conv1d` on top of a window, and the window after it.

    Args:
        projected: [B, T, 3 C], the thirds b, c and h.
        weight, window, lengths, backend: as in `causal_conv1d_step`; the window holds earlier
            values of b * h.

    Returns:
        y = c * conv(b * h) and the convolution's input b * h, both [B, T, C].

    Raises:
        ValueError: as `causal_conv1d_step`.
    """
    b, c, h = projected.chunk(3, dim=-1)
    _check_shapes([h], [weight], window)
    has_triton = gated_causal_conv1d_step_op is not None and _supports([projected, weight], window)
    if choose_backend(backend, projected, "gated_causal_conv1d_step", has_triton) == "triton":
        return gated_causal_conv1d_step_op(projected, weight, window, lengths)
    y, conv_input = gated_causal_conv1d(projected, weight, initial_state=window, backend="torch")
    window.copy_(shift_window(window, conv_input, lengths))
    return y, conv_input


def _step(inputs, weights, window, lengths, residual) -> list[torch.Tensor]:
    """Streams side by side in one window, in plain torch."""
    windows = window.split([x.shape[2] for x in inputs], dim=2)
    outputs = [
        causal_conv1d(x, weight, initial_state=old, residual=residual, backend="torch")
        for x, weight, old in zip(inputs, weights, windows, strict=True)
    ]
    window.copy_(shift_window(window, torch.cat(inputs, dim=2), lengths))
    return outputs


def _check_shapes(inputs, weights, window) -> None:
    num_taps = weights[0].shape[-1]
    for x, weight in zip(inputs, weights, strict=True):
        if weight.shape != (x.shape[2], num_taps):
            raise ValueError(
                f"An input of {x.shape[2]} channels needs a weight of shape [{x.shape[2]}, taps], "
                f"the same taps in all, but got {tuple(weight.shape)}."
            )
    shape = (inputs[0].shape[0], num_taps - 1, sum(x.shape[2] for x in inputs))
    if window.shape != shape:
        raise ValueError(
            f"The window must have the shape [B, taps - 1, channels] = {shape}, "
            f"but has {tuple(window.shape)}."
        )


def _supports(tensors, window) -> bool:
    dtypes = {x.dtype for x in (*tensors, window)}
    return dtypes.issubset(_TRITON_DTYPES) and window.stride(2) == 1
