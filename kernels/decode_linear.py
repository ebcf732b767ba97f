# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Projections around a decoding step: the norm before, the activation or the residual after.

One token is far too little work for the many launches that a layer's projections are. Here all
projections of the same input are one operation that reads each weight once. No gradient is
recorded.
"""

import torch
import torch.nn.functional as F

from .backend import choose_backend
from .rms_norm import rms_norm, sigmoid_gate
from .squared_relu import squared_relu_product

try:
    from .decode_linear_triton import project_step_op, project_sum_step_op
except ImportError:  # no Triton here: the torch path serves every device
    project_step_op = project_sum_step_op = None

__all__ = ["project_step", "project_sum_step"]

_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _supports(x: torch.Tensor, tensors: list[torch.Tensor], biases: list[torch.Tensor | None]):
    """One token, and everything of one dtype and contiguous."""
    given = [bias for bias in biases if bias is not None]
    return (
        project_step_op is not None
        and x.dtype in _TRITON_DTYPES
        and x.numel() == x.shape[-1]
        and all(y.dtype == x.dtype and y.is_contiguous() for y in (*tensors, *given))
    )


def _all_or_none(
    weights: list[torch.Tensor], biases: list[torch.Tensor | None]
) -> list[torch.Tensor]:
    """The biases as the kernels take them: none, or one for each weight, zeros where none is."""
    if all(bias is None for bias in biases):
        return []
    return [
        weight.new_zeros(weight.shape[0]) if bias is None else bias
        for weight, bias in zip(weights, biases, strict=True)
    ]


@torch.no_grad()
def project_step(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    squared_relu: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """The projections x W_i^T + b_i of the same tokens, side by side.

    Args:
        x: [B, T, K].
        weights, biases: [N_i, K] and [N_i] or None of each projection.
        norm_weight, norm_eps: [K]; if given, x is RMS-normalised first.
        squared_relu: of two projections of one size, return relu(first)^2 * second.
        backend: "auto", "triton" or "torch". Triton serves one token; several are matrix products.

    Returns:
        [B, T, sum of N_i], with `squared_relu` [B, T, N], in the dtype of x.

    Raises:
        ValueError: if the backend cannot run.
    """
    norms = [] if norm_weight is None else [norm_weight]
    has_triton = _supports(x, [*weights, *norms], biases)
    if choose_backend(backend, x, "project_step", has_triton) == "triton":
        biases = _all_or_none(weights, biases)
        return project_step_op(x, weights, biases, norm_weight, norm_eps, squared_relu)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, norm_eps, backend="torch")
    projected = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    if squared_relu:
        gate, up = projected
        return squared_relu_product(gate, up, backend="torch")
    return torch.cat(projected, dim=-1)


@torch.no_grad()
def project_sum_step(
    inputs: list[torch.Tensor],
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    residual: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    real: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """residual + sum_i (x_i W_i^T + b_i), the sum 0 at padding.

    Args:
        inputs: [B, T, K_i] of each projection.
        weights, biases: [N, K_i] and [N] or None of each.
        residual: [B, T, N].
        gate: [B, T, K_0]; if given, the first input is multiplied by sigmoid(gate).
        real: [B, T], bool; false at padding. None if there is none.
        backend: as in `project_step`.

    Returns:
        [B, T, N] in the dtype of the residual.

    Raises:
        ValueError: if the backend cannot run.
    """
    gates = [] if gate is None else [gate]
    has_triton = _supports(residual, [*weights, *inputs, *gates], biases)
    if choose_backend(backend, residual, "project_sum_step", has_triton) == "triton":
        biases = _all_or_none(weights, biases)
        return project_sum_step_op(inputs, weights, biases, residual, gate, real)
    if gate is not None:
        inputs = [sigmoid_gate(inputs[0], gate, backend="torch"), *inputs[1:]]
    terms = zip(inputs, weights, biases, strict=True)
    total = sum(F.linear(x, weight, bias) for x, weight, bias in terms)
    if real is not None:
        total = total.masked_fill(~real[..., None], 0)
    return residual + total
