# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
A decoder layer's step over one token of one row, in few launches that read each weight once.

The order of operations is that of the layer's modules. Projections are not called here but read, so
only layers qualify whose modules are as they were made.
"""

import torch
from torch import nn

from .kernels.decode_convolution import gated_causal_conv1d_step
from .kernels.decode_linear import project_step, project_sum_step
from .kernels.gated_delta import gated_delta_step
from .plain_atma import plain_modules


def can_fuse(layer: nn.Module, own: str, hidden_states: torch.Tensor, layout, state) -> bool:
    """
    Whether `fused_step` may stand for a call of the layer: one token on top of a full state, and
    modules of the classes that the modelling module `own` defines.
    """
    if (
        state is None
        or layout.start is None
        or layout.shape != (1, 1)
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled(hidden_states.device.type)
    ):
        return False
    mixer = layer.mixer
    if mixer.kernel_backend == "torch" or not (
        hidden_states.is_cuda or mixer.kernel_backend == "triton"
    ):
        return False
    needed = [state.conv]
    if layer.is_hybrid:
        needed += [] if mixer.memory is None else [state.memory]
    if layer.is_hybrid and (
        not mixer.is_polar or (mixer.training and mixer.config.distractor_keys)
    ):
        return False
    if any(x.current is None for x in needed):
        return False
    plain = plain_modules((layer,), own)
    device, dtype = hidden_states.device, hidden_states.dtype
    return plain is not None and all(
        x.device == device and x.dtype == dtype and x.is_contiguous() for x in plain.parameters
    )


def fused_step(layer: nn.Module, hidden_states: torch.Tensor, layout, state) -> torch.Tensor:
    """
    What the layer makes of one token `[1, 1, C]`, on top of `state`, which advances. Allowed where
    `can_fuse` says so.
    """
    mix = _hybrid_step if layer.is_hybrid else _convolution_step
    hidden_states = mix(layer.mixer, layer.input_norm, hidden_states, layout, state)
    mlp = layer.mlp
    backend = layer.mixer.kernel_backend
    inner = _project(hidden_states, [mlp.gate_proj, mlp.up_proj], layer.post_norm, backend, True)
    return _project_sum([inner], [mlp.down_proj], hidden_states, backend)


def _convolution_step(mixer, norm, hidden_states, layout, state) -> torch.Tensor:
    projected = _project(hidden_states, [mixer.in_proj], norm, mixer.kernel_backend)
    state.conv.remember()
    y, conv_input = gated_causal_conv1d_step(
        projected,
        mixer.conv_weight,
        state.conv_state,
        lengths=layout.lengths,
        backend=mixer.kernel_backend,
    )
    state.conv.commit(None, (conv_input,))
    return _project_sum(
        [y], [mixer.out_proj], hidden_states, mixer.kernel_backend, real=layout.real
    )


def _hybrid_step(mixer, norm, hidden_states, layout, state) -> torch.Tensor:
    memory = mixer.memory
    linears = [mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.gate_proj]
    if memory is not None:
        linears += [memory.retention_proj, memory.write_proj, memory.gate_proj]
    projected = _project(hidden_states, linears, norm, mixer.kernel_backend)
    sizes = [linear.out_features for linear in linears]
    normed, *rest = projected.split([sizes[0] + sizes[1], *sizes[2:]], dim=-1)
    value, gate, *memory_inputs = rest
    query, key = mixer._normalise(normed).split(sizes[:2], dim=-1)
    query, key, value = map(mixer._heads, mixer._canon(query, key, value, layout, state))
    content, magnitude, _ = mixer._attend(query, key, value, layout, state, False, None)
    inputs, linears = [content.flatten(2), magnitude], [mixer.o_proj, mixer.count_proj]
    if memory is not None:
        retention_logits, write_logits, memory_gate = memory_inputs
        state.memory.remember()
        inputs_of_step = (key, value, retention_logits, write_logits)
        read = gated_delta_step(
            query,
            *inputs_of_step,
            state.memory.current,
            **memory.rule,
            lengths=layout.lengths,
            readout_gate=mixer._heads(memory_gate),
        )
        state.memory.commit(None, inputs_of_step)
        inputs.append(read.flatten(2))
        linears.append(memory.out_proj)
    return _project_sum(inputs, linears, hidden_states, mixer.kernel_backend, gate, layout.real)


def _project(x, linears, norm, backend, squared_relu=False) -> torch.Tensor:
    return project_step(
        x,
        [linear.weight for linear in linears],
        [linear.bias for linear in linears],
        norm_weight=norm.weight,
        norm_eps=norm.eps,
        squared_relu=squared_relu,
        backend=backend,
    )


def _project_sum(inputs, linears, residual, backend, gate=None, real=None) -> torch.Tensor:
    # Inductor (torch 2.11) prints the arguments of an operator that it meets for the first time,
    # and theirs, and theirs: over operators that follow one another directly it does not end.
    outside = torch.compiler.is_compiling()
    total = project_sum_step(
        inputs,
        [linear.weight for linear in linears],
        [linear.bias for linear in linears],
        torch.zeros_like(residual) if outside else residual,
        gate=gate,
        real=real,
        backend=backend,
    )
    return residual + total if outside else total


__all__ = ["can_fuse", "fused_step"]
