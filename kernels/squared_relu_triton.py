# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The product inside the MLP, relu(gate)^2 * up, in Triton: one pass over its tensors each way."""

import torch

from .pointwise_triton import flat_launch, flat_offsets, load_flat

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("The Triton path of the squared ReLU needs the package triton.") from error

__all__ = ["squared_relu_product_bwd", "squared_relu_product_fwd", "squared_relu_times"]


@triton.jit
def _relu(b_x):
    return tl.maximum(b_x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def squared_relu_times(b_gate, b_up):
    """relu(gate)^2 * up of blocks in fp32; NaN passes through."""
    b_gate = _relu(b_gate)
    return b_gate * b_gate * b_up


@triton.jit(do_not_specialize=["num_units"])
def squared_relu_product_fwd_kernel(
    gate, up, out, num_units, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    o_x, mask = flat_offsets(num_units, UNIT, BLOCK)
    b_out = squared_relu_times(load_flat(gate, o_x, mask), load_flat(up, o_x, mask))
    tl.store(out + o_x, b_out.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_units"])
def squared_relu_product_bwd_kernel(
    gate, up, gradient, d_gate, d_up, num_units, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    o_x, mask = flat_offsets(num_units, UNIT, BLOCK)
    b_gate = _relu(load_flat(gate, o_x, mask))
    b_gradient = load_flat(gradient, o_x, mask) * b_gate
    b_d_gate = 2.0 * b_gradient * load_flat(up, o_x, mask)
    tl.store(d_gate + o_x, b_d_gate.to(d_gate.dtype.element_ty), mask=mask)
    tl.store(d_up + o_x, (b_gradient * b_gate).to(d_up.dtype.element_ty), mask=mask)


def squared_relu_product_fwd(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The product of two tensors of one shape and dtype, contiguous."""
    out = gate.new_empty(gate.shape)
    grid, sizes = flat_launch(gate.numel())
    with torch.cuda.device_of(gate):
        squared_relu_product_fwd_kernel[grid](gate.contiguous(), up.contiguous(), out, **sizes)
    return out


def squared_relu_product_bwd(
    gate: torch.Tensor, up: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up from that of the product, contiguous."""
    d_gate, d_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    inputs = (x.contiguous() for x in (gate, up, gradient))
    grid, sizes = flat_launch(gate.numel())
    with torch.cuda.device_of(gate):
        squared_relu_product_bwd_kernel[grid](*inputs, d_gate, d_up, **sizes)
    return d_gate, d_up
