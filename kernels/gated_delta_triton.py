# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The chunked gated delta rule in Triton as a differentiable operation of torch (ATMA paper, arXiv
2606.25156). The kernels, and what they compute, are in the files of the two passes."""

import torch
import torch.nn.functional as F

from .gated_delta_backward_triton import gated_delta_bwd, new_gradients
from .gated_delta_forward_triton import (
    chunk_layout,
    gated_delta_fwd,
    new_buffers,
    supports_gated_delta,
)
from .operators import define_operator

__all__ = ["gated_delta_chunks", "supports_gated_delta"]


def gated_delta_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    retention_logits: torch.Tensor,
    write_logits: torch.Tensor,
    retention_bias: float,
    write_bias: float,
    max_half_life: float | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    lengths: torch.Tensor | None,
    output_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`gated_delta` for inputs that `supports_gated_delta` accepts. Differentiable.

    Query, key and value are cast to one dtype: that of autocast where it is on. Matrix products
    take operands of that dtype; their sums, the gates and the state are fp32.
    """
    device_type = query.device.type
    # (Tensors without data know no autocast. The compiler of torch 2.11 cannot ask more than this.)
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    else:
        dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    inputs = [query, key]
    if dtype == torch.float16:
        # The factors that would bring a key of any length to unit length do not all exist in fp16.
        inputs = [F.normalize(x.float(), dim=-1, eps=1e-12) for x in inputs]
    read, final_state = GatedDeltaFunction.apply(
        *(x.to(dtype) for x in (*inputs, value)),
        retention_logits,
        write_logits,
        initial_state,
        cu_seqlens,
        lengths,
        retention_bias,
        write_bias,
        max_half_life,
        output_final_state,
    )
    return read.to(query.dtype), final_state if output_final_state else None


class GatedDeltaFunction(torch.autograd.Function):
    """Keeps the inputs, T and the states before the chunks; the rest is computed again."""

    @staticmethod
    def forward(
        ctx, query, key, value, retention, write, initial_state, cu_seqlens, lengths, *rest
    ):
        read, final_state, *kept = gated_delta_fwd_op(
            query, key, value, retention, write, initial_state, cu_seqlens, lengths, *rest
        )
        ctx.save_for_backward(query, key, value, cu_seqlens, lengths, *kept)
        ctx.initial_dtype = None if initial_state is None else initial_state.dtype
        ctx.gate_dtypes = retention.dtype, write.dtype
        ctx.has_final_state = rest[-1]
        ctx.set_materialize_grads(False)
        return read, final_state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, read_gradient, final_gradient):
        query, key, value, *rest = ctx.saved_tensors
        if read_gradient is None:
            read_gradient = torch.zeros_like(query)
        if not ctx.has_final_state:
            # An empty tensor, where the compiler made a gradient of what nobody used.
            final_gradient = None
        needs_initial = ctx.needs_input_grad[5]
        dq, dk, dv, d_retention, d_write, d_initial = gated_delta_bwd_op(
            query, key, value, read_gradient, final_gradient, *rest, needs_initial
        )
        retention_dtype, write_dtype = ctx.gate_dtypes
        return (
            dq,
            dk,
            dv,
            d_retention.to(retention_dtype),
            d_write.to(write_dtype),
            d_initial.to(ctx.initial_dtype) if needs_initial else None,
            *(None,) * 6,
        )


def _fake_fwd(query, key, value, retention, write, initial_state, cu_seqlens, lengths, *rest):
    layout = chunk_layout(query, key, cu_seqlens, lengths)
    inverse, states, gates, key_scale, final_state = new_buffers(query, layout, rest[-1])
    return query.new_empty(query.shape), final_state, inverse, states, gates, key_scale


def _fake_bwd(query, key, value, read_gradient, final_gradient, cu_seqlens, lengths, *rest):
    layout = chunk_layout(query, key, cu_seqlens, lengths)
    return new_gradients(query, key, value, layout, rest[-1])


gated_delta_fwd_op = define_operator(
    __name__,
    "gated_delta_fwd(Tensor query, Tensor key, Tensor value, Tensor retention_logits, "
    "Tensor write_logits, Tensor? initial_state, Tensor? cu_seqlens, Tensor? lengths, "
    "float retention_bias, float write_bias, float? max_half_life, bool output_final_state) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    gated_delta_fwd,
    _fake_fwd,
)
gated_delta_bwd_op = define_operator(
    __name__,
    "gated_delta_bwd(Tensor query, Tensor key, Tensor value, Tensor read_gradient, "
    "Tensor? final_gradient, Tensor? cu_seqlens, Tensor? lengths, Tensor inverse, Tensor states, "
    "Tensor gates, Tensor key_scale, bool needs_initial_gradient) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    gated_delta_bwd,
    _fake_bwd,
)
