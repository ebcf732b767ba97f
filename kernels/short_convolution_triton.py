# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Causal depthwise convolutions in Triton (ATMA paper, arXiv 2606.25156).

A program holds a block of channels of a block of tokens and loads it once per tap, shifted: all
but the first load find their data in the cache, so that the operation costs one pass over its
inputs and outputs. The gated form multiplies by its two gates in the same pass. Backward, the
gradient of x_t collects dy_{t+i}, and the same shifted loads of dy, times x_t, are the gradient of
the taps; every program stores its own partial sum, which keeps the result the same in every run.
"""

import torch

from .operators import define_operator

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("The Triton path of the convolutions needs the package triton.") from error

__all__ = [
    "BACKWARD_TILES",
    "BLOCKS_PER_PROGRAM",
    "FORWARD_TILES",
    "CausalConv1dFunction",
    "bisection",
    "causal_conv1d_bwd_kernel",
    "causal_conv1d_fwd_kernel",
    "new_gradients",
    "split_program",
    "supports_convolution",
]

_MAX_TAPS = 4
# Tokens and channels per program, and warps.
FORWARD_TILES = {"BT": 16, "BC": 128, "num_warps": 4}
BACKWARD_TILES = {"BT": 16, "BC": 64, "num_warps": 2}
# Blocks of tokens that one program walks in the backward pass: fewer partial sums of the taps.
BLOCKS_PER_PROGRAM = 16


def supports_convolution(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernels serve these dtypes and this number of taps."""
    floats = (torch.float32, torch.bfloat16, torch.float16)
    return (
        x.dtype in floats
        and weight.dtype in floats
        and x.numel() > 0
        and 1 <= weight.shape[1] <= _MAX_TAPS
    )


@triton.jit
def _document_bounds(cu_seqlens, o_t, num_tokens, num_documents, num_steps):
    """First token of each token's document, and the first after it, by bisection.

    Tokens past the last offset are a last document. `num_steps` halves num_documents + 1 to one.
    """
    low = tl.zeros_like(o_t)
    high = low + num_documents + 1
    for _ in range(0, num_steps):
        middle = (low + high) // 2
        is_right = tl.load(cu_seqlens + tl.minimum(middle, num_documents)).to(tl.int64) <= o_t
        is_right = is_right & (middle <= num_documents)
        low = tl.where(is_right, middle, low)
        high = tl.where(is_right, high, middle)
    start = tl.load(cu_seqlens + low).to(tl.int64)
    end = tl.load(cu_seqlens + tl.minimum(low + 1, num_documents)).to(tl.int64)
    return start, tl.where(low < num_documents, end, num_tokens)


@triton.jit
def _load_block(x, row, o_t, m_t, stride_b, stride_t, o_c, m_c, UNIT: tl.constexpr):
    """Tokens o_t of a row as [BT, BC] in the dtype of x, zero where m_t is not. Strides come in
    units of UNIT elements."""
    pointers = x + (row * stride_b + o_t[:, None] * stride_t) * UNIT + o_c[None, :]
    return tl.load(pointers, mask=m_t[:, None] & m_c[None, :], other=0.0)


@triton.jit
def _load_gated(x, row, o_t, m_t, stride_b, stride_t, o_c, m_c, C, UNIT: tl.constexpr):
    """The input b * h of the gated convolution, rounded to the dtype of x, and b and h."""
    b_b = _load_block(x, row, o_t, m_t, stride_b, stride_t, o_c, m_c, UNIT).to(tl.float32)
    b_h = _load_block(x + 2 * C, row, o_t, m_t, stride_b, stride_t, o_c, m_c, UNIT).to(tl.float32)
    return (b_b * b_h).to(x.dtype.element_ty), b_b, b_h


@triton.jit
def split_program(NC, NT):
    """A program's block of channels (of NC), its block of tokens (of NT) and its row, int64."""
    pid = tl.program_id(0).to(tl.int64)
    return pid % NC, pid // NC % NT, pid // NC // NT


_LENGTHS = ["num_tokens", "stride_b", "dy_stride_b", "num_documents", "num_steps"]


@triton.jit(do_not_specialize=_LENGTHS)
def causal_conv1d_fwd_kernel(
    x,
    weight,
    initial_state,
    cu_seqlens,
    y,
    conv_input,
    num_tokens,
    num_documents,
    num_steps,
    stride_b,
    stride_t,
    C: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    UNIT: tl.constexpr,
    IS_GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    block=None,
):
    """`block` numbers the block of channels, the block of tokens and the row. A kernel of several
    convolutions calls this one with it."""
    if block is None:
        block = split_program((C + BC - 1) // BC, (num_tokens + BT - 1) // BT)
    i_c, i_t, row = block
    o_t = i_t * BT + tl.arange(0, BT)
    o_c = i_c * BC + tl.arange(0, BC)
    m_t, m_c = o_t < num_tokens, o_c < C
    start = tl.zeros_like(o_t)
    if cu_seqlens is not None:
        start, _ = _document_bounds(cu_seqlens, o_t, num_tokens, num_documents, num_steps)
    b_y = tl.zeros([BT, BC], dtype=tl.float32)
    for i in tl.static_range(K):
        o_s = o_t - i
        m_s = m_t & (o_s >= start)
        if IS_GATED:
            b_x, _, _ = _load_gated(x, row, o_s, m_s, stride_b, stride_t, o_c, m_c, C, UNIT)
        else:
            b_x = _load_block(x, row, o_s, m_s, stride_b, stride_t, o_c, m_c, UNIT)
        if i == 0:
            if conv_input is not None:
                p_input = conv_input + (row * num_tokens + o_t)[:, None] * C + o_c[None, :]
                tl.store(p_input, b_x, mask=m_t[:, None] & m_c[None, :])
            if RESIDUAL:
                b_y += b_x.to(tl.float32)
        b_x = b_x.to(tl.float32)
        if initial_state is not None and i > 0:
            p_before = initial_state + (row * (K - 1) + o_s + K - 1)[:, None] * C + o_c[None, :]
            m_before = (m_t & (o_s < 0))[:, None] & m_c[None, :]
            b_x += tl.load(p_before, mask=m_before, other=0.0).to(tl.float32)
        b_w = tl.load(weight + o_c * K + K - 1 - i, mask=m_c, other=0.0).to(tl.float32)
        b_y += b_w[None, :] * b_x
    if IS_GATED:
        b_gate = _load_block(x + C, row, o_t, m_t, stride_b, stride_t, o_c, m_c, UNIT)
        b_y *= b_gate.to(tl.float32)
    p_y = y + (row * num_tokens + o_t)[:, None] * C + o_c[None, :]
    tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_t[:, None] & m_c[None, :])


@triton.jit(do_not_specialize=_LENGTHS)
def causal_conv1d_bwd_kernel(
    x,
    weight,
    initial_state,
    cu_seqlens,
    dy,
    du,
    dx,
    d_taps,
    d_initial,
    num_tokens,
    num_documents,
    num_steps,
    stride_b,
    stride_t,
    dy_stride_b,
    dy_stride_t,
    C: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BLOCKS: tl.constexpr,
    UNIT: tl.constexpr,
    DY_UNIT: tl.constexpr,
    IS_GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    block=None,
):
    """du is the gradient of the gated convolution's input, as far as it was used elsewhere; `block`
    is as in the forward pass, of BLOCKS blocks of tokens."""
    WIDTH: tl.constexpr = 3 * C if IS_GATED else C
    num_programs = (num_tokens + BT * BLOCKS - 1) // (BT * BLOCKS)
    if block is None:
        block = split_program((C + BC - 1) // BC, num_programs)
    i_c, i_p, row = block
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < C
    # Gradients of the taps of x_t, x_{t-1} and so on, summed over tokens at the end only.
    b_tap0 = tl.zeros([BT, BC], dtype=tl.float32)
    b_tap1 = tl.zeros([BT, BC], dtype=tl.float32)
    b_tap2 = tl.zeros([BT, BC], dtype=tl.float32)
    b_tap3 = tl.zeros([BT, BC], dtype=tl.float32)
    for i_block in range(0, BLOCKS):
        o_t = (i_p * BLOCKS + i_block) * BT + tl.arange(0, BT)
        m_t = o_t < num_tokens
        start = tl.zeros_like(o_t)
        end = start + num_tokens
        if cu_seqlens is not None:
            start, end = _document_bounds(cu_seqlens, o_t, num_tokens, num_documents, num_steps)
        if IS_GATED:
            b_x, b_b, b_h = _load_gated(x, row, o_t, m_t, stride_b, stride_t, o_c, m_c, C, UNIT)
            # What the gate c multiplied: the convolution once more.
            b_y = tl.zeros([BT, BC], dtype=tl.float32)
        else:
            b_x = _load_block(x, row, o_t, m_t, stride_b, stride_t, o_c, m_c, UNIT)
        b_x = b_x.to(tl.float32)
        b_dx = tl.zeros([BT, BC], dtype=tl.float32)
        for i in tl.static_range(K):
            o_s = o_t + i
            m_s = m_t & (o_s < end)
            b_dy = _load_block(dy, row, o_s, m_s, dy_stride_b, dy_stride_t, o_c, m_c, DY_UNIT)
            b_dy = b_dy.to(tl.float32)
            b_w = tl.load(weight + o_c * K + K - 1 - i, mask=m_c, other=0.0).to(tl.float32)
            if IS_GATED:
                b_gate = _load_block(x + C, row, o_s, m_s, stride_b, stride_t, o_c, m_c, UNIT)
                o_e = o_t - i
                m_e = m_t & (o_e >= start)
                b_e, _, _ = _load_gated(x, row, o_e, m_e, stride_b, stride_t, o_c, m_c, C, UNIT)
                b_e = b_e.to(tl.float32)
                if initial_state is not None and i > 0:
                    p_before = initial_state + (row * (K - 1) + o_e + K - 1)[:, None] * C
                    m_before = (m_t & (o_e < 0))[:, None] & m_c[None, :]
                    b_e += tl.load(p_before + o_c[None, :], mask=m_before, other=0.0).to(tl.float32)
                b_y += b_w[None, :] * b_e
                if i == 0:
                    b_dgate = b_dy
                b_dy *= b_gate.to(tl.float32)
            if RESIDUAL and i == 0:
                b_dx += b_dy
            b_dx += b_w[None, :] * b_dy
            if i == 0:
                b_tap0 += b_x * b_dy
            elif i == 1:
                b_tap1 += b_x * b_dy
            elif i == 2:
                b_tap2 += b_x * b_dy
            else:
                b_tap3 += b_x * b_dy
        m_block = m_t[:, None] & m_c[None, :]
        p_dx = dx + (row * num_tokens + o_t)[:, None] * WIDTH + o_c[None, :]
        if IS_GATED:
            if du is not None:
                p_du = du + (row * num_tokens + o_t)[:, None] * C + o_c[None, :]
                b_dx += tl.load(p_du, mask=m_block, other=0.0).to(tl.float32)
            tl.store(p_dx + C, (b_dgate * b_y).to(dx.dtype.element_ty), mask=m_block)
            tl.store(p_dx + 2 * C, (b_dx * b_b).to(dx.dtype.element_ty), mask=m_block)
            b_dx *= b_h
        tl.store(p_dx, b_dx.to(dx.dtype.element_ty), mask=m_block)

    b_sum0 = tl.sum(b_tap0, axis=0)
    b_sum1 = tl.sum(b_tap1, axis=0)
    b_sum2 = tl.sum(b_tap2, axis=0)
    b_sum3 = tl.sum(b_tap3, axis=0)
    if initial_state is not None and i_p == 0:
        # The inputs before the first are K - 1 more tokens, -(K - 1) .. -1.
        o_t = tl.arange(0, 4).to(tl.int64) - (K - 1)
        m_t = o_t < 0
        p_before = (row * (K - 1) + o_t + K - 1)[:, None] * C + o_c[None, :]
        m_before = m_t[:, None] & m_c[None, :]
        b_x = tl.load(initial_state + p_before, mask=m_before, other=0.0).to(tl.float32)
        b_dx = tl.zeros([4, BC], dtype=tl.float32)
        for i in tl.static_range(1, K):
            o_s = o_t + i
            m_s = m_t & (o_s >= 0) & (o_s < num_tokens)
            b_dy = _load_block(dy, row, o_s, m_s, dy_stride_b, dy_stride_t, o_c, m_c, DY_UNIT)
            b_dy = b_dy.to(tl.float32)
            if IS_GATED:
                b_gate = _load_block(x + C, row, o_s, m_s, stride_b, stride_t, o_c, m_c, UNIT)
                b_dy *= b_gate.to(tl.float32)
            b_w = tl.load(weight + o_c * K + K - 1 - i, mask=m_c, other=0.0).to(tl.float32)
            b_dx += b_w[None, :] * b_dy
            if i == 1:
                b_sum1 += tl.sum(b_x * b_dy, axis=0)
            elif i == 2:
                b_sum2 += tl.sum(b_x * b_dy, axis=0)
            else:
                b_sum3 += tl.sum(b_x * b_dy, axis=0)
        tl.store(d_initial + p_before, b_dx.to(d_initial.dtype.element_ty), mask=m_before)

    # The current token's tap is the last.
    p_taps = d_taps + ((row * num_programs + i_p) * K + K - 1) * C + o_c
    tl.store(p_taps, b_sum0, mask=m_c)
    if K > 1:
        tl.store(p_taps - C, b_sum1, mask=m_c)
    if K > 2:
        tl.store(p_taps - 2 * C, b_sum2, mask=m_c)
    if K > 3:
        tl.store(p_taps - 3 * C, b_sum3, mask=m_c)


def causal_conv1d_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    residual: bool,
    is_gated: bool,
    return_input: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The convolution of x [B, T, C], or gated of [B, T, 3 C].

    Returns y [B, T, C] in the dtype of x, and the gated convolution's input b * h likewise, which
    is empty if it is not wanted. Other arguments as in `causal_conv1d`.
    """
    y, conv_input = _new_outputs(x, weight, return_input)
    batch_size, num_tokens, num_channels = y.shape
    x, stride_b, stride_t, unit = _strides(x)
    num_documents, num_steps = bisection(cu_seqlens)
    programs = triton.cdiv(num_channels, FORWARD_TILES["BC"]) * triton.cdiv(
        num_tokens, FORWARD_TILES["BT"]
    )
    with torch.cuda.device_of(x):
        causal_conv1d_fwd_kernel[(batch_size * programs,)](
            x,
            weight.contiguous(),
            _contiguous(initial_state),
            _contiguous(cu_seqlens),
            y,
            conv_input if return_input else None,
            num_tokens,
            num_documents,
            num_steps,
            stride_b,
            stride_t,
            C=num_channels,
            K=weight.shape[1],
            UNIT=unit,
            IS_GATED=is_gated,
            RESIDUAL=residual,
            **FORWARD_TILES,
        )
    return y, conv_input


def causal_conv1d_bwd(
    dy: torch.Tensor,
    du: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    residual: bool,
    is_gated: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, weight and initial_state (empty without one), in the dtypes of those.

    dy [B, T, C] is the gradient of y; du, if given, that of the gated convolution's input.
    """
    dx, d_weight, d_initial = new_gradients(x, weight, initial_state)
    batch_size, num_tokens, _ = x.shape
    num_channels, num_taps = weight.shape
    x, stride_b, stride_t, unit = _strides(x)
    dy, dy_stride_b, dy_stride_t, dy_unit = _strides(dy)
    du = _contiguous(du)
    num_documents, num_steps = bisection(cu_seqlens)
    programs = triton.cdiv(num_tokens, BACKWARD_TILES["BT"] * BLOCKS_PER_PROGRAM)
    d_taps = torch.empty(
        batch_size * programs, num_taps, num_channels, dtype=torch.float32, device=x.device
    )
    with torch.cuda.device_of(x):
        causal_conv1d_bwd_kernel[
            (batch_size * programs * triton.cdiv(num_channels, BACKWARD_TILES["BC"]),)
        ](
            x,
            weight.contiguous(),
            _contiguous(initial_state),
            _contiguous(cu_seqlens),
            dy,
            du,
            dx,
            d_taps,
            d_initial,
            num_tokens,
            num_documents,
            num_steps,
            stride_b,
            stride_t,
            dy_stride_b,
            dy_stride_t,
            C=num_channels,
            K=num_taps,
            BLOCKS=BLOCKS_PER_PROGRAM,
            UNIT=unit,
            DY_UNIT=dy_unit,
            IS_GATED=is_gated,
            RESIDUAL=residual,
            **BACKWARD_TILES,
        )
    d_weight.copy_(d_taps.sum(0).t())
    return dx, d_weight, d_initial


def _new_outputs(x, weight, return_input) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:2], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape if return_input else (0,))


def new_gradients(x, weight, initial_state) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Buffers for the gradients of the three; an empty one without an initial state."""
    d_initial = (
        weight.new_empty(0)
        if initial_state is None
        else initial_state.new_empty(initial_state.shape)
    )
    return x.new_empty(x.shape), weight.new_empty(weight.shape), d_initial


def _strides(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """x with adjacent channels, its strides of batch and token in units, and the unit.

    In units of 8 the compiler knows that the loads are aligned, whatever the length.
    """
    if x.stride(2) != 1:
        x = x.contiguous()
    unit = 8 if x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0 else 1
    return x, x.stride(0) // unit, x.stride(1) // unit, unit


def bisection(cu_seqlens: torch.Tensor | None) -> tuple[int, int]:
    """The number of documents, and the steps in which `_document_bounds` finds one of them."""
    num_documents = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return num_documents, (num_documents + 1).bit_length()


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


def _fake_fwd(x, weight, initial_state, cu_seqlens, residual, is_gated, return_input):
    return _new_outputs(x, weight, return_input)


def _fake_bwd(dy, du, x, weight, initial_state, cu_seqlens, residual, is_gated):
    return new_gradients(x, weight, initial_state)


causal_conv1d_fwd_op = define_operator(
    __name__,
    "causal_conv1d_fwd(Tensor x, Tensor weight, Tensor? initial_state, Tensor? cu_seqlens, "
    "bool residual, bool is_gated, bool return_input) -> (Tensor, Tensor)",
    causal_conv1d_fwd,
    _fake_fwd,
)
causal_conv1d_bwd_op = define_operator(
    __name__,
    "causal_conv1d_bwd(Tensor dy, Tensor? du, Tensor x, Tensor weight, Tensor? initial_state, "
    "Tensor? cu_seqlens, bool residual, bool is_gated) -> (Tensor, Tensor, Tensor)",
    causal_conv1d_bwd,
    _fake_bwd,
)


class CausalConv1dFunction(torch.autograd.Function):
    """`causal_conv1d_fwd` with its gradients."""

    @staticmethod
    def forward(ctx, x, weight, initial_state, cu_seqlens, *options):
        ctx.save_for_backward(x, weight, initial_state, cu_seqlens)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return causal_conv1d_fwd_op(x, weight, initial_state, cu_seqlens, *options)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, du):
        x, weight, initial_state, cu_seqlens = ctx.saved_tensors
        residual, is_gated, return_input = ctx.options
        if dy is None:
            dy = x.new_zeros(*x.shape[:2], weight.shape[0])
        dx, d_weight, d_initial = causal_conv1d_bwd_op(
            dy,
            du if return_input else None,
            x,
            weight,
            initial_state,
            cu_seqlens,
            residual,
            is_gated,
        )
        return dx, d_weight, None if initial_state is None else d_initial, *(None,) * 4
