# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Causal depthwise convolutions with a few taps (ATMA paper, arXiv 2606.25156).

Two places use them: the gated short convolution of the "conv" layers, after LFM2, and the canon
convolutions on the queries, keys and values of the attention layers, with a residual. With K taps
the state of a sequence is its last K - 1 inputs, kept by `shift_window`. Everything here is
differentiable.
"""

import torch
import torch.nn.functional as F

from .backend import choose_backend, compute_dtype
from .documents import positions_in_document

try:
    from .canon_convolution_triton import CanonConvolutionFunction
    from .short_convolution_triton import CausalConv1dFunction, supports_convolution
except ImportError:  # no Triton here: the torch path serves every device
    CausalConv1dFunction = None

__all__ = [
    "canon_convolution",
    "causal_conv1d",
    "causal_conv1d_reference",
    "gated_causal_conv1d",
    "gated_causal_conv1d_reference",
    "shift_window",
    "shift_window_reference",
]


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    residual: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """y_t = sum_i weight[:, K - 1 - i] x_{t - i}, each channel by itself.

    Args:
        x: [B, T, C].
        weight: [C, K]; the last tap multiplies the current input.
        initial_state: [B, K - 1, C], the inputs before the first, oldest first; zeros by default.
        cu_seqlens: [N + 1] offsets of packed documents, which do not see each other; then B is 1.
        residual: whether to add x to the result.
        backend: "auto", "triton" or "torch".

    Returns:
        y [B, T, C] in the dtype of x, summed in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: if the shapes do not fit each other, if cu_seqlens comes with more than one row
            or with an initial state, or if the backend cannot run.
    """
    _check_inputs(x, weight, initial_state, cu_seqlens)
    if choose_backend(backend, x, "causal_conv1d", _has_triton(x, weight)) == "triton":
        options = residual, False, False
        return CausalConv1dFunction.apply(x, weight, initial_state, cu_seqlens, *options)[0]
    return _convolve(x, weight, initial_state, cu_seqlens, residual).to(x.dtype)


def canon_convolution(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    value_weight: torch.Tensor,
    *,
    initial_states: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    cu_seqlens: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y + conv(y) of three streams at once: `causal_conv1d` of each, with the residual.

    Args:
        query, key, value: [B, T, C], each with its own number of channels.
        query_weight, key_weight, value_weight: [C, K].
        initial_states: of each stream, [B, K - 1, C].
        cu_seqlens, backend: as in `causal_conv1d`.

    Returns:
        Three tensors, each of the shape and dtype of its stream.

    Raises:
        ValueError: as `causal_conv1d`, and if the streams differ in rows, tokens or taps.
    """
    streams, weights = (query, key, value), (query_weight, key_weight, value_weight)
    states = (None,) * 3 if initial_states is None else initial_states
    for x, weight, state in zip(streams, weights, states, strict=True):
        _check_inputs(x, weight, state, cu_seqlens)
        if x.shape[:2] != query.shape[:2] or weight.shape[1] != query_weight.shape[1]:
            raise ValueError(
                "query, key and value must have the same rows and tokens, and their weights the "
                f"same taps, but got streams {[tuple(x.shape) for x in streams]} and weights "
                f"{[tuple(weight.shape) for weight in weights]}."
            )
    has_triton = all(_has_triton(x, weight) for x, weight in zip(streams, weights, strict=True))
    if choose_backend(backend, query, "canon_convolution", has_triton) == "triton":
        return CanonConvolutionFunction.apply(
            *streams, *weights, cu_seqlens, *(initial_states or ())
        )
    return tuple(
        _convolve(x, weight, state, cu_seqlens, residual=True).to(x.dtype)
        for x, weight, state in zip(streams, weights, states, strict=True)
    )


def causal_conv1d_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    residual: bool = False,
) -> torch.Tensor:
    """What `causal_conv1d` must return, term by term. Same arguments, results and errors."""
    _check_inputs(x, weight, initial_state, cu_seqlens)
    dtype = compute_dtype(x, weight)
    num_tokens, num_taps = x.shape[1], weight.shape[1]
    inputs = list(x.to(dtype).unbind(1))
    before = [] if initial_state is None else list(initial_state.to(dtype).unbind(1))
    offsets = [0] if cu_seqlens is None else cu_seqlens.tolist()
    outputs = []
    for t in range(num_tokens):
        start = max(offset for offset in offsets if offset <= t)
        y = inputs[t] if residual else torch.zeros_like(inputs[t])
        for i in range(num_taps):
            if t - i >= start:
                y = y + weight[:, num_taps - 1 - i] * inputs[t - i]
            elif t - i < 0 and before:
                y = y + weight[:, num_taps - 1 - i] * before[t - i]
        outputs.append(y)
    return torch.stack(outputs, dim=1).to(x.dtype)


def gated_causal_conv1d(
    projected: torch.Tensor,
    weight: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    return_input: bool = True,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The core of the gated short convolution: y = c * conv(b * h), with b, c, h = projected.

    Args:
        projected: [B, T, 3 C], the thirds b, c and h.
        weight, initial_state, cu_seqlens, backend: as in `causal_conv1d`; the state holds earlier
            values of b * h.
        return_input: whether the input of the convolution is wanted.

    Returns:
        y and the convolution's input b * h (or None), [B, T, C] in the dtype of `projected`. The
        input is rounded to that dtype before the convolution, as a state in that dtype will be.

    Raises:
        ValueError: as `causal_conv1d`.
    """
    b, c, h = projected.chunk(3, dim=-1)
    _check_inputs(b, weight, initial_state, cu_seqlens)
    has_triton = _has_triton(projected, weight)
    if choose_backend(backend, projected, "gated_causal_conv1d", has_triton) == "triton":
        y, conv_input = CausalConv1dFunction.apply(
            projected, weight, initial_state, cu_seqlens, False, True, return_input
        )
        return y, conv_input if return_input else None
    conv_input = b * h
    y = c * _convolve(conv_input, weight, initial_state, cu_seqlens, residual=False)
    return y.to(projected.dtype), conv_input if return_input else None


def gated_causal_conv1d_reference(
    projected: torch.Tensor,
    weight: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `gated_causal_conv1d` must return. Same arguments, results and errors."""
    b, c, h = projected.chunk(3, dim=-1)
    conv_input = b * h
    # Promoted so that the gate multiplies a sum that is not rounded yet.
    promoted = conv_input.to(compute_dtype(conv_input, weight))
    y = c * causal_conv1d_reference(
        promoted, weight, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    return y.to(projected.dtype), conv_input


def shift_window(
    window: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """The last W inputs of each row, after x: the state that the next call continues from.

    Args:
        window: [B, W, C], the last inputs so far, oldest first.
        x: [B, T, C], the inputs that follow them.
        lengths: [B]; of row b only the first lengths[b] inputs are real; all of them by default.

    Returns:
        [B, W, C] in the dtype of `window`, oldest first, in new storage.
    """
    joined = torch.cat([window, x.to(window.dtype)], dim=1)
    num_kept = window.shape[1]
    if lengths is None:
        return joined[:, joined.shape[1] - num_kept :].clone()
    places = lengths.long()[:, None] + torch.arange(num_kept, device=joined.device)
    return joined.gather(1, places[..., None].expand(-1, -1, joined.shape[2]))


def shift_window_reference(
    window: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """What `shift_window` must return, row by row."""
    lengths = [x.shape[1]] * x.shape[0] if lengths is None else lengths.tolist()
    rows = []
    for old, new, length in zip(window, x.to(window.dtype), lengths, strict=True):
        row = torch.cat([old, new[:length]])
        rows.append(row[row.shape[0] - old.shape[0] :])
    return torch.stack(rows)


def _has_triton(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return CausalConv1dFunction is not None and supports_convolution(x, weight)


def _check_inputs(x, weight, initial_state, cu_seqlens) -> None:
    batch_size, _, num_channels = x.shape
    if weight.dim() != 2 or weight.shape[0] != num_channels:
        raise ValueError(
            f"An input of {num_channels} channels needs a weight of shape [{num_channels}, taps], "
            f"but got {tuple(weight.shape)}."
        )
    state_shape = (batch_size, weight.shape[1] - 1, num_channels)
    if initial_state is not None and initial_state.shape != state_shape:
        raise ValueError(
            f"The initial state must have the shape [B, taps - 1, C] = {state_shape}, "
            f"but has {tuple(initial_state.shape)}."
        )
    if cu_seqlens is not None and batch_size != 1:
        raise ValueError(f"cu_seqlens describes one packed row, but the batch has {batch_size}.")
    if cu_seqlens is not None and initial_state is not None:
        raise ValueError(
            "Pass either cu_seqlens or initial_state: packed documents begin with nothing before."
        )


def _convolve(x, weight, initial_state, cu_seqlens, residual) -> torch.Tensor:
    """The convolution as K shifted products, in the dtype of computation."""
    dtype = compute_dtype(x, weight)
    num_tokens, num_taps = x.shape[1], weight.shape[1]
    x, weight = x.to(dtype), weight.to(dtype)
    if initial_state is None:
        padded = F.pad(x, (0, 0, num_taps - 1, 0))
    else:
        padded = torch.cat([initial_state.to(dtype), x], dim=1)
    positions = None if cu_seqlens is None else positions_in_document(cu_seqlens, num_tokens)
    y = x * weight[:, -1]
    for i in range(1, num_taps):
        earlier = padded[:, num_taps - 1 - i : num_taps - 1 - i + num_tokens]
        if positions is not None:
            earlier = earlier.masked_fill((positions < i)[:, None], 0.0)
        y = torch.addcmul(y, earlier, weight[:, num_taps - 1 - i])
    return x + y if residual else y
