# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The canon convolutions of queries, keys and values in one launch each way, in Triton (ATMA paper,
arXiv 2606.25156). What a program computes is in the file of the short convolutions."""

from itertools import accumulate

import torch

from .operators import define_operator
from .short_convolution_triton import (
    BACKWARD_TILES,
    BLOCKS_PER_PROGRAM,
    FORWARD_TILES,
    bisection,
    causal_conv1d_bwd_kernel,
    causal_conv1d_fwd_kernel,
    new_gradients,
    split_program,
)

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("The Triton path of the convolutions needs the package triton.") from error

__all__ = ["CanonConvolutionFunction"]

_LENGTHS = ["num_tokens", "num_documents", "num_steps"]


@triton.jit(do_not_specialize=_LENGTHS)
def canon_convolution_fwd_kernel(
    streams,
    weights,
    initial_states,
    cu_seqlens,
    outputs,
    num_tokens,
    num_documents,
    num_steps,
    CHANNELS: tl.constexpr,
    FIRST: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """All tensors but cu_seqlens are tuples of one for each stream, contiguous. FIRST numbers the
    first block of channels of each stream, and ends with their number."""
    i_c, i_t, row = split_program(FIRST[3], (num_tokens + BT - 1) // BT)
    for s in tl.static_range(3):
        if (i_c >= FIRST[s]) & (i_c < FIRST[s + 1]):
            causal_conv1d_fwd_kernel(
                streams[s],
                weights[s],
                initial_states[s],
                cu_seqlens,
                outputs[s],
                None,
                num_tokens,
                num_documents,
                num_steps,
                num_tokens * CHANNELS[s],
                CHANNELS[s],
                CHANNELS[s],
                K,
                BT,
                BC,
                1,
                False,
                True,
                (i_c - FIRST[s], i_t, row),
            )


@triton.jit(do_not_specialize=_LENGTHS)
def canon_convolution_bwd_kernel(
    streams,
    weights,
    initial_states,
    cu_seqlens,
    gradients,
    d_streams,
    d_taps,
    d_initial_states,
    num_tokens,
    num_documents,
    num_steps,
    CHANNELS: tl.constexpr,
    FIRST: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    num_programs = (num_tokens + BT * BLOCKS - 1) // (BT * BLOCKS)
    i_c, i_p, row = split_program(FIRST[3], num_programs)
    for s in tl.static_range(3):
        if (i_c >= FIRST[s]) & (i_c < FIRST[s + 1]):
            causal_conv1d_bwd_kernel(
                streams[s],
                weights[s],
                initial_states[s],
                cu_seqlens,
                gradients[s],
                None,
                d_streams[s],
                d_taps[s],
                d_initial_states[s],
                num_tokens,
                num_documents,
                num_steps,
                num_tokens * CHANNELS[s],
                CHANNELS[s],
                num_tokens * CHANNELS[s],
                CHANNELS[s],
                CHANNELS[s],
                K,
                BT,
                BC,
                BLOCKS,
                1,
                1,
                False,
                True,
                (i_c - FIRST[s], i_p, row),
            )


def canon_convolution_fwd(
    streams: list[torch.Tensor],
    weights: list[torch.Tensor],
    initial_states: list[torch.Tensor],
    cu_seqlens: torch.Tensor | None,
) -> list[torch.Tensor]:
    """y + conv(y) of three streams [B, T, C], in the dtype of each; no initial states or three."""
    outputs = [x.new_empty(x.shape) for x in streams]
    batch_size, num_tokens, _ = streams[0].shape
    num_blocks = batch_size * triton.cdiv(num_tokens, FORWARD_TILES["BT"])
    num_documents, num_steps = bisection(cu_seqlens)
    first = _first_blocks(weights, FORWARD_TILES)
    with torch.cuda.device_of(streams[0]):
        canon_convolution_fwd_kernel[(num_blocks * first[3],)](
            _contiguous(streams),
            _contiguous(weights),
            _contiguous(initial_states or [None] * 3),
            None if cu_seqlens is None else cu_seqlens.contiguous(),
            tuple(outputs),
            num_tokens,
            num_documents,
            num_steps,
            CHANNELS=tuple(weight.shape[0] for weight in weights),
            FIRST=first,
            K=weights[0].shape[1],
            **FORWARD_TILES,
        )
    return outputs


def canon_convolution_bwd(
    gradients: list[torch.Tensor],
    streams: list[torch.Tensor],
    weights: list[torch.Tensor],
    initial_states: list[torch.Tensor],
    cu_seqlens: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Gradients of the streams, then of the weights, then of the initial states (empty without)."""
    results = _new_gradients(gradients, streams, weights, initial_states, cu_seqlens)
    d_streams, d_weights, d_initial_states = results[:3], results[3:6], results[6:]
    batch_size, num_tokens, _ = streams[0].shape
    tokens_per_program = BACKWARD_TILES["BT"] * BLOCKS_PER_PROGRAM
    num_programs = batch_size * triton.cdiv(num_tokens, tokens_per_program)
    d_taps = [
        weight.new_empty(num_programs, *weight.shape[::-1], dtype=torch.float32)
        for weight in weights
    ]
    num_documents, num_steps = bisection(cu_seqlens)
    first = _first_blocks(weights, BACKWARD_TILES)
    with torch.cuda.device_of(streams[0]):
        canon_convolution_bwd_kernel[(num_programs * first[3],)](
            _contiguous(streams),
            _contiguous(weights),
            _contiguous(initial_states or [None] * 3),
            None if cu_seqlens is None else cu_seqlens.contiguous(),
            _contiguous(gradients),
            tuple(d_streams),
            tuple(d_taps),
            tuple(d_initial_states),
            num_tokens,
            num_documents,
            num_steps,
            CHANNELS=tuple(weight.shape[0] for weight in weights),
            FIRST=first,
            K=weights[0].shape[1],
            BLOCKS=BLOCKS_PER_PROGRAM,
            **BACKWARD_TILES,
        )
    for d_weight, taps in zip(d_weights, d_taps, strict=True):
        d_weight.copy_(taps.sum(0).t())
    return results


def _new_gradients(gradients, streams, weights, initial_states, cu_seqlens):
    states = initial_states or [None] * 3
    each = [new_gradients(*tensors) for tensors in zip(streams, weights, states, strict=True)]
    return [tensor for kind in zip(*each, strict=True) for tensor in kind]


def _contiguous(tensors):
    return tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)


def _first_blocks(weights, tiles) -> tuple[int, int, int, int]:
    counts = (triton.cdiv(weight.shape[0], tiles["BC"]) for weight in weights)
    return tuple(accumulate(counts, initial=0))


canon_convolution_fwd_op = define_operator(
    __name__,
    "canon_convolution_fwd(Tensor[] streams, Tensor[] weights, Tensor[] initial_states, "
    "Tensor? cu_seqlens) -> Tensor[]",
    canon_convolution_fwd,
    lambda streams, *rest: [x.new_empty(x.shape) for x in streams],
)
canon_convolution_bwd_op = define_operator(
    __name__,
    "canon_convolution_bwd(Tensor[] gradients, Tensor[] streams, Tensor[] weights, "
    "Tensor[] initial_states, Tensor? cu_seqlens) -> Tensor[]",
    canon_convolution_bwd,
    _new_gradients,
)


class CanonConvolutionFunction(torch.autograd.Function):
    """Three streams, their weights, cu_seqlens, and no initial states or three."""

    @staticmethod
    def forward(ctx, query, key, value, query_weight, key_weight, value_weight, *rest):
        cu_seqlens, *initial_states = rest
        streams, weights = [query, key, value], [query_weight, key_weight, value_weight]
        ctx.save_for_backward(*streams, *weights, cu_seqlens, *initial_states)
        return tuple(canon_convolution_fwd_op(streams, weights, initial_states, cu_seqlens))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        saved = ctx.saved_tensors
        streams, weights, initial_states = saved[:3], saved[3:6], list(saved[7:])
        results = canon_convolution_bwd_op(gradients, streams, weights, initial_states, saved[6])
        return *results[:6], None, *(results[6:] if initial_states else ())
