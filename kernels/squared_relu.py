# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The product inside the MLP, relu(gate)^2 * up (ATMA paper, arXiv 2606.25156)."""

import torch

from .backend import WORTH_A_KERNEL, choose_backend
from .operators import define_operator

try:
    from .squared_relu_triton import squared_relu_product_bwd, squared_relu_product_fwd
except ImportError:  # no Triton here: the torch path serves every device
    squared_relu_product_fwd = None

__all__ = ["squared_relu_product", "squared_relu_product_reference"]


def squared_relu_product(
    gate: torch.Tensor, up: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """relu(gate)^2 * up. Differentiable; nothing but gate and up is kept for that.

    Args:
        gate, up: one shape.
        backend: "auto", "triton" or "torch". "auto" takes the kernels for large inputs on a GPU,
            and under torch.compile leaves the formula to the compiler.

    Returns:
        The product, in the dtype to which those of the inputs promote.

    Raises:
        ValueError: if shapes differ or the backend cannot run.
    """
    _check_inputs(gate, up)
    if backend == "auto" and (torch.compiler.is_compiling() or gate.numel() < WORTH_A_KERNEL):
        backend = "torch"
    floats = (torch.float32, torch.bfloat16, torch.float16)
    has_triton = (
        squared_relu_product_fwd is not None
        and gate.dtype == up.dtype
        and gate.dtype in floats
        and gate.numel() > 0
    )
    if choose_backend(backend, gate, "squared_relu_product", has_triton) == "triton":
        return SquaredReluProductFunction.apply(gate, up)
    return squared_relu_product_reference(gate, up)


def squared_relu_product_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What `squared_relu_product` must return. Same arguments, results and errors."""
    _check_inputs(gate, up)
    return torch.relu(gate).square() * up


def _check_inputs(gate, up) -> None:
    if gate.shape != up.shape:
        raise ValueError(
            f"gate and up must have one shape, but have {tuple(gate.shape)} and {tuple(up.shape)}."
        )


class SquaredReluProductFunction(torch.autograd.Function):
    """`squared_relu_product_fwd` with its gradients."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return _fwd_op(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return _bwd_op(*ctx.saved_tensors, gradient)


if squared_relu_product_fwd is not None:
    _fwd_op = define_operator(
        __name__,
        "squared_relu_product_fwd(Tensor gate, Tensor up) -> Tensor",
        squared_relu_product_fwd,
        lambda gate, up: gate.new_empty(gate.shape),
    )
    _bwd_op = define_operator(
        __name__,
        "squared_relu_product_bwd(Tensor gate, Tensor up, Tensor gradient) -> (Tensor, Tensor)",
        squared_relu_product_bwd,
        lambda gate, up, gradient: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
    )
