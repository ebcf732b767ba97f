# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Norms and output gates of rows (ATMA paper, arXiv 2606.25156).

    RMSNorm(x) = x / sqrt(mean(x^2) + eps) * weight

over the last dimension: in front of mixers and MLP, where the sum with the residual stream comes
along; without a weight on the heads of queries and keys; and, times the sigmoid of a gate, on what
is read from the memory. The direction of an attention head is gated without a norm.
"""

import torch
import torch.nn.functional as F

from .backend import WORTH_A_KERNEL, choose_backend
from .operators import define_operator

try:
    from .rms_norm_triton import (
        new_gradients,
        new_outputs,
        norm_gate_bwd,
        norm_gate_fwd,
        supports_norm,
    )
except ImportError:  # no Triton here: the torch path serves every device
    norm_gate_fwd = None

__all__ = [
    "UNWEIGHTED_NORM_EPS",
    "add_rms_norm",
    "gated_rms_norm",
    "rms_norm",
    "sigmoid_gate",
]

# Norms without a weight use the spacing of fp32 at 1.
UNWEIGHTED_NORM_EPS = 2.0**-23


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = UNWEIGHTED_NORM_EPS,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """RMSNorm over the last dimension. Differentiable.

    Args:
        x: [..., D].
        weight: [D] or None.
        eps: added to the mean of the squares.
        backend: "auto", "triton" or "torch". "auto" takes the kernels for large inputs on a GPU,
            and under torch.compile leaves the formula to the compiler, as all functions here do.

    Returns:
        [..., D] in the dtype to which those of x and weight promote, computed in fp32 (fp64 for
        fp64 inputs).

    Raises:
        ValueError: if the shapes do not fit each other or the backend cannot run.
    """
    if _runs_triton("rms_norm", backend, x, None, weight, None):
        return NormGateFunction.apply(x, None, weight, None, eps, True)[0]
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def add_rms_norm(
    x: torch.Tensor,
    update: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of x + update, and that sum. Differentiable.

    Args:
        x, update: [..., D].
        weight, eps, backend: as in `rms_norm`.

    Returns:
        The norm as in `rms_norm`, and x + update in the dtype to which theirs promote.

    Raises:
        ValueError: as `rms_norm`.
    """
    if _runs_triton("add_rms_norm", backend, x, update, weight, None):
        return NormGateFunction.apply(x, update, weight, None, eps, True)
    total = x + update
    return F.rms_norm(total, x.shape[-1:], weight, eps), total


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    eps: float = UNWEIGHTED_NORM_EPS,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """RMSNorm(x) * sigmoid(gate), without a weight. x and gate are [..., D]; else as `rms_norm`."""
    if _runs_triton("gated_rms_norm", backend, x, None, None, gate):
        return NormGateFunction.apply(x, None, None, gate, eps, True)[0]
    return F.rms_norm(x, x.shape[-1:], None, eps) * torch.sigmoid(gate)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """x * sigmoid(gate). x and gate are [..., D]; else as `rms_norm`."""
    if _runs_triton("sigmoid_gate", backend, x, None, None, gate):
        return NormGateFunction.apply(x, None, None, gate, 0.0, False)[0]
    return x * torch.sigmoid(gate)


def _runs_triton(operation, backend, x, update, weight, gate) -> bool:
    for name, other in (("update", update), ("gate", gate)):
        if other is not None and other.shape != x.shape:
            raise ValueError(
                f"{name} must have the shape of the input, {tuple(x.shape)}, "
                f"but has {tuple(other.shape)}."
            )
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight must have the shape [D] = [{x.shape[-1]}], but has {tuple(weight.shape)}."
        )
    if backend == "auto" and (torch.compiler.is_compiling() or x.numel() < WORTH_A_KERNEL):
        backend = "torch"
    has_triton = norm_gate_fwd is not None and supports_norm(x, update, weight, gate)
    return choose_backend(backend, x, operation, has_triton) == "triton"


class NormGateFunction(torch.autograd.Function):
    """`norm_gate_fwd` with its gradients; keeps the sum x + update (else x), weight and gate."""

    @staticmethod
    def forward(ctx, x, update, weight, gate, eps, normalise):
        y, total = _fwd_op(x, update, weight, gate, eps, normalise)
        ctx.save_for_backward(x if update is None else total, weight, gate)
        ctx.options = eps, normalise
        ctx.dtypes = x.dtype, None if update is None else update.dtype
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, d_total):
        x, weight, gate = ctx.saved_tensors
        x_dtype, update_dtype = ctx.dtypes
        if update_dtype is None:
            d_total = None  # an empty tensor, if the compiler made one
        if dy is None:
            dy = torch.zeros_like(x)
        dx, d_gate, d_weight = _bwd_op(x, weight, gate, dy, d_total, *ctx.options)
        return (
            dx.to(x_dtype),
            None if update_dtype is None else dx.to(update_dtype),
            None if weight is None else d_weight,
            None if gate is None else d_gate,
            None,
            None,
        )


def _fake_fwd(x, update, weight, gate, eps, normalise):
    total, y = new_outputs(x, update, weight, gate)
    return y, total


if norm_gate_fwd is not None:
    _fwd_op = define_operator(
        __name__,
        "norm_gate_fwd(Tensor x, Tensor? update, Tensor? weight, Tensor? gate, float eps, "
        "bool normalise) -> (Tensor, Tensor)",
        norm_gate_fwd,
        _fake_fwd,
    )
    _bwd_op = define_operator(
        __name__,
        "norm_gate_bwd(Tensor x, Tensor? weight, Tensor? gate, Tensor dy, Tensor? d_total, "
        "float eps, bool normalise) -> (Tensor, Tensor, Tensor)",
        norm_gate_bwd,
        lambda x, weight, gate, *rest: new_gradients(x, weight, gate),
    )
