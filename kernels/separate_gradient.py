# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
Gradients that the compiler must not take for one.

Where the outputs of several linear layers are added, their biases have equal gradients. Inductor
computes these once, and returns one buffer for all of them (seen with torch 2.11 under autocast on
CUDA). Autograd keeps what it is given, so that the biases' `.grad` lie in one memory; the next
micro-batch is then added to it once for each bias.
"""

import torch

from .operators import define_operator

__all__ = ["separate_gradient"]


def separate_gradient(x: torch.Tensor, index: int) -> torch.Tensor:
    """`x`, whose gradient is copied by an operator that the compiler cannot see through.

    Under torch.compile only: eagerly every gradient has a memory of its own already, and nothing is
    done.

    Args:
        x: one of the summands, of any shape.
        index: another number for each summand, or the compiler would copy once for all of them.

    Returns:
        `x`, or a view of it.
    """
    if torch.compiler.is_compiling() and x.requires_grad:
        return SeparateGradientFunction.apply(x, index)
    return x


class SeparateGradientFunction(torch.autograd.Function):
    """The identity, and a copy of the gradient."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.index = index
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return _copy_op(gradient, ctx.index), None


_copy_op = define_operator(
    __name__,
    "copy_of_gradient(Tensor gradient, int index) -> Tensor",
    lambda gradient, index: gradient.clone(memory_format=torch.contiguous_format),
    lambda gradient, index: torch.empty_like(gradient, memory_format=torch.contiguous_format),
)
