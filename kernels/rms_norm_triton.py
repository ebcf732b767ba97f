# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Norms and gates of rows in Triton, forward and backward in one pass each.

With x = input + update, r = 1 / sqrt(mean(x^2) + eps), n = x r and s = sigmoid(gate):

    y = n weight s          dx = r (a - n mean(a n)) with a = dy weight s          plus dx as given
    d_gate = dy n weight s (1 - s)          d_weight = sum over rows of dy n s

Every factor may be absent; without the norm n is x and dx is a. In the backward pass a program
walks over many rows and stores its own sum for the weight: the result is the same in every run.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("The Triton path of the norms needs the package triton.") from error

__all__ = ["new_gradients", "new_outputs", "norm_gate_bwd", "norm_gate_fwd", "supports_norm"]

_ELEMENTS_PER_TILE = 4096
_WIDEST_ROW = 16384
# Sums for the weight's gradient, at most.
_MAX_PROGRAMS = 512


def supports_norm(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether the kernels serve rows of this width in these dtypes."""
    floats = (torch.float32, torch.bfloat16, torch.float16)
    dtypes = [tensor.dtype for tensor in (x, *others) if tensor is not None]
    return all(d in floats for d in dtypes) and x.numel() > 0 and x.shape[-1] <= _WIDEST_ROW


@triton.jit
def _load_rows(x, row, num_rows, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """[BR, BD] in fp32 from `row` (int64) on, zero past the rows and past D."""
    o_r, o_d = tl.arange(0, BR), tl.arange(0, BD)
    mask = (row + o_r < num_rows)[:, None] & (o_d < D)[None, :]
    pointers = x + row * D + (o_r[:, None] * D + o_d[None, :])
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(x, b_x, row, num_rows, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    o_r, o_d = tl.arange(0, BR), tl.arange(0, BD)
    mask = (row + o_r < num_rows)[:, None] & (o_d < D)[None, :]
    pointers = x + row * D + (o_r[:, None] * D + o_d[None, :])
    tl.store(pointers, b_x.to(x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def norm_gate_fwd_kernel(
    x,
    update,
    weight,
    gate,
    total,
    y,
    eps,
    num_rows,
    NORMALISE: tl.constexpr,
    D: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BR
    b_y = _load_rows(x, row, num_rows, D, BR, BD)
    if update is not None:
        b_y += _load_rows(update, row, num_rows, D, BR, BD)
        # As it is stored, because the backward pass starts from that.
        b_y = b_y.to(total.dtype.element_ty).to(tl.float32)
        _store_rows(total, b_y, row, num_rows, D, BR, BD)
    if NORMALISE:
        b_y *= tl.rsqrt(tl.sum(b_y * b_y, axis=1) / D + eps)[:, None]
    if weight is not None:
        o_d = tl.arange(0, BD)
        b_y *= tl.load(weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
    if gate is not None:
        b_y *= tl.sigmoid(_load_rows(gate, row, num_rows, D, BR, BD))
    _store_rows(y, b_y, row, num_rows, D, BR, BD)


@triton.jit(do_not_specialize=["num_rows", "tiles_per_program"])
def norm_gate_bwd_kernel(
    x,
    weight,
    gate,
    dy,
    d_total,
    dx,
    d_gate,
    d_weight,
    eps,
    num_rows,
    tiles_per_program,
    NORMALISE: tl.constexpr,
    D: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    if weight is not None:
        b_weight = tl.load(weight + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
        b_sum = tl.zeros([BR, BD], dtype=tl.float32)
    for i in range(0, tiles_per_program):
        row = (pid * tiles_per_program + i) * BR
        b_n = _load_rows(x, row, num_rows, D, BR, BD)
        b_dy = _load_rows(dy, row, num_rows, D, BR, BD)
        if NORMALISE:
            b_r = tl.rsqrt(tl.sum(b_n * b_n, axis=1) / D + eps)[:, None]
            b_n *= b_r
        if gate is not None:
            b_s = tl.sigmoid(_load_rows(gate, row, num_rows, D, BR, BD))
            b_d_gate = b_dy * b_n * b_s * (1.0 - b_s)
            b_dy *= b_s
            if weight is not None:
                b_d_gate *= b_weight
            _store_rows(d_gate, b_d_gate, row, num_rows, D, BR, BD)
        if weight is not None:
            b_sum += b_dy * b_n
            b_dy *= b_weight
        if NORMALISE:
            b_dy = (b_dy - b_n * (tl.sum(b_dy * b_n, axis=1) / D)[:, None]) * b_r
        if d_total is not None:
            b_dy += _load_rows(d_total, row, num_rows, D, BR, BD)
        _store_rows(dx, b_dy, row, num_rows, D, BR, BD)
    if weight is not None:
        tl.store(d_weight + pid * D + o_d, tl.sum(b_sum, axis=0), mask=m_d)


def norm_gate_fwd(
    x: torch.Tensor,
    update: torch.Tensor | None,
    weight: torch.Tensor | None,
    gate: torch.Tensor | None,
    eps: float,
    normalise: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and x + update (empty without update), each [..., D] contiguous."""
    total, y = new_outputs(x, update, weight, gate)
    rows_per_tile, sizes = _tile(x.shape[-1])
    num_rows = x.numel() // x.shape[-1]
    with torch.cuda.device_of(x):
        norm_gate_fwd_kernel[(triton.cdiv(num_rows, rows_per_tile),)](
            *(_contiguous(tensor) for tensor in (x, update, weight, gate)),
            total,
            y,
            eps,
            num_rows,
            NORMALISE=normalise,
            **sizes,
        )
    return y, total


def norm_gate_bwd(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    gate: torch.Tensor | None,
    dy: torch.Tensor,
    d_total: torch.Tensor | None,
    eps: float,
    normalise: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x (the sum, where something was added), gate and weight (empty without)."""
    dx, d_gate, d_weight = new_gradients(x, weight, gate)
    rows_per_tile, sizes = _tile(x.shape[-1])
    num_rows = x.numel() // x.shape[-1]
    num_tiles = triton.cdiv(num_rows, rows_per_tile)
    tiles_per_program = 1 if weight is None else triton.cdiv(num_tiles, _MAX_PROGRAMS)
    num_programs = triton.cdiv(num_tiles, tiles_per_program)
    sums = x.new_empty(0 if weight is None else (num_programs, x.shape[-1]), dtype=torch.float32)
    with torch.cuda.device_of(x):
        norm_gate_bwd_kernel[(num_programs,)](
            *(_contiguous(tensor) for tensor in (x, weight, gate, dy, d_total)),
            dx,
            d_gate,
            sums,
            eps,
            num_rows,
            tiles_per_program,
            NORMALISE=normalise,
            **sizes,
        )
    if weight is not None:
        d_weight.copy_(sums.sum(0))
    return dx, d_gate, d_weight


def new_outputs(x, update, weight, gate) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers for x + update and y."""
    dtype = x.dtype if update is None else torch.promote_types(x.dtype, update.dtype)
    total = x.new_empty(0 if update is None else x.shape, dtype=dtype)
    for factor in (weight, gate):
        if factor is not None:
            dtype = torch.promote_types(dtype, factor.dtype)
    return total, x.new_empty(x.shape, dtype=dtype)


def new_gradients(x, weight, gate) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Buffers for what `norm_gate_bwd` returns."""
    return (
        x.new_empty(x.shape),
        x.new_empty(0) if gate is None else gate.new_empty(gate.shape),
        x.new_empty(0) if weight is None else weight.new_empty(weight.shape),
    )


def _tile(width: int) -> tuple[int, dict]:
    BD = triton.next_power_of_2(width)
    BR = max(_ELEMENTS_PER_TILE // BD, 1)
    return BR, {"D": width, "BR": BR, "BD": BD, "num_warps": 8 if BD > 4096 else 4}


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()
