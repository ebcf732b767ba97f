# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The chunked gated delta rule in Triton: the forward pass (ATMA paper, arXiv 2606.25156).

A chunk holds C consecutive tokens of one sequence. With unit keys k and queries q, g the sum of
log gamma from the chunk's start (kept in base 2) and M the state before the chunk, stored
transposed as [D (key), D (value)]:

    A = strict_tril(beta_i (k_i . k_j) e^(g_i - g_j))          T = (I + A)^-1
    u = T (beta v - beta e^g k M)                              what the chunk's tokens write
    M' = e^(g_C) M + (e^(g_C - g) k)^T u
    r = e^g q M + tril((q_i . k_j) e^(g_i - g_j)) u

Three kernels: `prepare` finds T and the gates, a program per chunk and group, so that k k^T is
computed once for the heads that share k; `scan` walks the chunks of a sequence, a program per head
and block of values; `read` computes r, a program per chunk and head. Keys and queries are scaled to
unit length by factors on the results, not on the operands: those are never rounded.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("The Triton path of the gated delta rule needs triton.") from error

__all__ = [
    "Layout",
    "addressable",
    "chunk_layout",
    "chunk_updates",
    "decay_between",
    "gated_delta_fwd",
    "inverse_length",
    "launch_options",
    "load_gates",
    "load_tile",
    "locate_chunk",
    "locate_scan",
    "new_buffers",
    "rows_of",
    "store_tile",
    "strides_of",
    "supports_gated_delta",
]

# Rows of the buffer of gates, all fp32: g in base 2 as a coarse and a fine part, beta, and
# 1 - gamma where the half-life cap lets gradients through, else 0.
_NUM_GATES = tl.constexpr(4)
# exp2 of this is zero in fp32; bounds the sums, so that multiples of 1/16 are summed exactly.
_LEAST_LOG2_GAMMA = tl.constexpr(-256.0)
_LOG2_E = tl.constexpr(math.log2(math.e))

# Columns of values per step, warps and stages of each kernel on compute capability 9.0, by
# (head_dim, bytes per element); the nearest larger head_dim serves the sizes between. Few
# sequences are scanned in narrow blocks of values, to fill the chip. Triton 3.6 gets products wrong
# on Hopper that it is not led around: the scans have two stages at least, because keys that are not
# staged would be transposed in registers, and the other kernels have no tiles of 32 columns in half
# precision. Entries that are changed have to pass the tests on a GPU.
_TUNED = {
    "prepare": {(128, 2): (0, 2, 1), (256, 2): (0, 4, 1), (256, 4): (0, 8, 1)},
    "scan": {(128, 2): (64, 4, 2), (256, 2): (32, 4, 2), (256, 4): (32, 8, 2)},
    "scan_few": {(128, 2): (16, 4, 3), (256, 2): (16, 4, 2), (256, 4): (16, 8, 2)},
    "read": {(128, 2): (64, 4, 1), (256, 2): (64, 4, 1), (256, 4): (32, 8, 1)},
    "start_bwd": {(128, 2): (64, 4, 1), (256, 2): (64, 4, 1), (256, 4): (32, 8, 1)},
    "scan_bwd": {(128, 2): (64, 4, 2), (256, 2): (32, 4, 2), (256, 4): (32, 8, 1)},
    "scan_bwd_few": {(128, 2): (16, 4, 2), (256, 2): (16, 4, 2), (256, 4): (16, 8, 1)},
    "finish_bwd": {(128, 2): (64, 8, 1), (256, 2): (64, 8, 1), (256, 4): (32, 8, 1)},
}


@dataclass(frozen=True)
class Layout:
    """How tokens are cut into chunks, and the sizes that all kernels share."""

    num_rows: int
    num_tokens: int
    num_heads: int
    num_groups: int
    head_dim: int
    chunk_size: int
    chunks_per_row: int
    num_chunks: int
    num_states: int
    # [chunks, 2] first token and number of tokens, and [N + 1] first chunk of each document.
    chunk_table: torch.Tensor | None
    chunk_offsets: torch.Tensor | None
    lengths: torch.Tensor | None

    def padded_head_dim(self, dtype: torch.dtype) -> int:
        """Columns of a tile of whole rows; in half precision at least 64, see the table above."""
        return max(64 if dtype.itemsize == 2 else 16, triton.next_power_of_2(self.head_dim))

    def arguments(self, dtype: torch.dtype) -> dict:
        """What all kernels take, by their names: what places a chunk, sizes, and the precision."""
        return {
            "chunk_table": self.chunk_table,
            "lengths": self.lengths,
            "num_tokens": self.num_tokens,
            "chunks_per_row": self.chunks_per_row,
            "H": self.num_heads,
            "G": self.num_groups,
            "D": self.head_dim,
            "BD": self.padded_head_dim(dtype),
            "BT": self.chunk_size,
            "IS_PACKED": self.chunk_table is not None,
            "HAS_LENGTHS": self.lengths is not None,
            "PRECISION": "ieee",
        }


def supports_gated_delta(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernels serve these shapes and dtypes."""
    floats = (torch.float32, torch.bfloat16, torch.float16)
    head_dim = query.shape[-1]
    return (
        all(x.dtype in floats for x in (query, key, value))
        and query.numel() > 0
        and 16 <= head_dim <= 256
        and head_dim % 8 == 0
    )


def chunk_size_of(head_dim: int, dtype: torch.dtype) -> int:
    """Tokens per chunk: fewer where 64 rows of fp32 would not fit into shared memory."""
    if dtype != torch.float32:
        return 64
    return 32 if head_dim <= 128 else 16


def chunk_layout(query, key, cu_seqlens, lengths) -> Layout:
    """The layout of a call; on packed rows its tables are computed on the device."""
    num_rows, num_tokens, num_heads, head_dim = query.shape
    chunk_size = chunk_size_of(head_dim, query.dtype)
    chunk_table = chunk_offsets = None
    if cu_seqlens is None:
        num_states = num_rows
        chunks_per_row = -(-num_tokens // chunk_size)
        num_chunks = num_rows * chunks_per_row
    else:
        # Full chunks and one more per document; those that are left over hold no token.
        num_states = cu_seqlens.shape[0] - 1
        chunks_per_row = num_chunks = num_tokens // chunk_size + num_states
        cu_seqlens = cu_seqlens.long()
        starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
        chunk_ends = ((ends - starts + chunk_size - 1) // chunk_size).cumsum(0)
        chunk_offsets = F.pad(chunk_ends, (1, 0))
        chunks = torch.arange(num_chunks, device=query.device)
        document = torch.searchsorted(chunk_ends, chunks, right=True).clamp_(max=num_states - 1)
        first = starts[document] + (chunks - chunk_offsets[document]) * chunk_size
        chunk_table = torch.stack([first, (ends[document] - first).clamp_(0, chunk_size)], dim=1)
    return Layout(
        num_rows=num_rows,
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_groups=key.shape[2],
        head_dim=head_dim,
        chunk_size=chunk_size,
        chunks_per_row=chunks_per_row,
        num_chunks=num_chunks,
        num_states=num_states,
        chunk_table=chunk_table,
        chunk_offsets=chunk_offsets,
        lengths=lengths,
    )


def launch_options(kernel: str, layout: Layout, tensor: torch.Tensor) -> dict:
    """BV, num_warps and num_stages of a kernel for the dtype and device of `tensor`."""
    size, head_dim, is_scan = tensor.dtype.itemsize, layout.head_dim, kernel.startswith("scan")

    def tuned(name):
        table = _TUNED[name]
        return table[min(k for k in table if k[0] >= head_dim and k[1] == size)]

    block, num_warps, num_stages = tuned(kernel)
    if kernel == "prepare":
        return {"num_warps": num_warps, "num_stages": num_stages}
    sequences = layout.num_states * layout.num_heads
    if is_scan and (head_dim <= 32 or sequences * triton.cdiv(head_dim, block) < 128):
        block, num_warps, num_stages = tuned(f"{kernel}_few")
    BD, BT = layout.padded_head_dim(tensor.dtype), layout.chunk_size
    block = min(block, BD)

    def shared_memory():
        """A bound of the tiles that are staged, and of the operands that are not loaded."""
        if is_scan:
            tensors = 2 if kernel == "scan_bwd" else 1
            staged = BT * (tensors * (BD + block) + BT)
            return size * (num_stages * staged + (BD + BT) * block) + 1024
        return size * (2 * BT * BD + (2 * BD + 3 * BT) * block) + 1024

    if tensor.is_cuda:
        limit = torch.cuda.get_device_properties(tensor.device).shared_memory_per_block_optin
        while shared_memory() > limit and (num_stages > 1 or block > 16):
            if num_stages > 1:
                num_stages -= 1
            else:
                block //= 2
    return {"BV": block, "num_warps": num_warps, "num_stages": num_stages}


def strides_of(x: torch.Tensor) -> tuple[int, int]:
    """Strides of token and head, which no length changes: kernels may be specialised on them."""
    return x.stride(1), x.stride(2)


def addressable(x: torch.Tensor) -> torch.Tensor:
    """x itself if its rows follow each other as its tokens do, else a contiguous copy."""
    follow = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    # 64 tokens must be within reach of 32-bit offsets.
    follow = follow and (x.dim() == 3 or (x.stride(3) == 1 and x.stride(1) < 2**24))
    return x if follow else x.contiguous()


@triton.jit
def locate_chunk(
    i_chunk,
    chunk_table,
    lengths,
    num_tokens,
    chunks_per_row,
    BT: tl.constexpr,
    IS_PACKED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    """A chunk's first token, counted through all rows, its number of tokens, and how many of them
    are not padding. All int64, as `i_chunk` is."""
    if IS_PACKED:
        token = tl.load(chunk_table + 2 * i_chunk)
        count = tl.load(chunk_table + 2 * i_chunk + 1)
        real = count
    else:
        row = i_chunk // chunks_per_row
        start = (i_chunk % chunks_per_row) * BT
        token = row * num_tokens + start
        count = tl.minimum(num_tokens - start, BT)
        real = count
        if HAS_LENGTHS:
            real = tl.minimum(count, tl.load(lengths + row).to(tl.int64) - start)
    return token, count, real


@triton.jit
def locate_scan(
    chunk_offsets,
    chunks_per_row,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BV: tl.constexpr,
    IS_PACKED: tl.constexpr,
):
    """What a program of a scan walks: its sequence, head, group and first column of values, and the
    sequence's first chunk and the one after its last. All int64."""
    NV: tl.constexpr = (D + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_n, i_h, i_v = pid // (NV * H), (pid // NV) % H, (pid % NV) * BV
    i_g = i_h // (H // G)
    if IS_PACKED:
        first = tl.load(chunk_offsets + i_n)
        last = tl.load(chunk_offsets + i_n + 1)
    else:
        first = i_n * chunks_per_row
        last = first + chunks_per_row
    return i_n, i_h, i_g, i_v, first, last


@triton.jit
def load_tile(p, rows, stride, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr):
    """[ROWS, COLUMNS] from `column` on of the rows that begin at p, zero past `rows` and past D.

    p is one address; offsets from it are 32 bits wide. Tiles of 64-bit addresses would fill the
    registers.
    """
    o_r = tl.arange(0, ROWS)
    o_c = tl.arange(0, COLUMNS)
    mask = (o_r < rows)[:, None] & (column + o_c < D)[None, :]
    return tl.load(p + column + (o_r[:, None] * stride + o_c[None, :]), mask=mask, other=0.0)


@triton.jit
def store_tile(p, b_x, rows, stride, column, D: tl.constexpr):
    """Writes what `load_tile` reads."""
    o_r = tl.arange(0, b_x.shape[0])
    o_c = tl.arange(0, b_x.shape[1])
    mask = (o_r < rows)[:, None] & (column + o_c < D)[None, :]
    pointers = p + column + (o_r[:, None] * stride + o_c[None, :])
    tl.store(pointers, b_x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def rows_of(x, token, head, strides):
    """The address of a token's row of a head."""
    return x + (token * strides[0] + head * strides[1])


@triton.jit
def inverse_length(b_x):
    """1 / max(|x|, eps) of every row. In fp16, where 1e12 does not exist, rows come with |x| = 1
    or 0: see `gated_delta`."""
    EPS: tl.constexpr = 0.5 if b_x.dtype == tl.float16 else 1e-12
    b_x = b_x.to(tl.float32)
    return 1.0 / tl.maximum(tl.sqrt(tl.sum(b_x * b_x, axis=1)), EPS)


@triton.jit
def load_gates(gates, i_chunk_head, BT: tl.constexpr):
    """Of a chunk: g as coarse and fine part, beta, e^g, e^(g_C - g), and the scalar e^(g_C)."""
    o_t = tl.arange(0, BT)
    base = gates + i_chunk_head * _NUM_GATES * BT
    coarse = tl.load(base + o_t)
    fine = tl.load(base + BT + o_t)
    beta = tl.load(base + 2 * BT + o_t)
    coarse_end = tl.load(base + BT - 1)
    fine_end = tl.load(base + 2 * BT - 1)
    from_start = tl.exp2(coarse + fine)
    to_end = tl.exp2((coarse_end - coarse) + (fine_end - fine))
    return coarse, fine, beta, from_start, to_end, tl.exp2(coarse_end + fine_end)


@triton.jit
def decay_between(coarse, fine, mask):
    """e^(g_i - g_j) where mask [i, j], else 0. Masked before the exponential."""
    between = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    return tl.exp2(tl.where(mask, between, float("-inf")))


@triton.jit
def chunk_updates(b_k, b_m, b_v, b_inv, b_beta, b_start, b_scale, PRECISION: tl.constexpr):
    """u = T (beta v - beta e^g k M), some columns of it. b_start is e^g; the keys are as long as
    they came, which b_scale makes good; M [BD, BV] has their dtype."""
    b_x = tl.dot(b_k, b_m, input_precision=PRECISION)
    b_x = b_beta[:, None] * (b_v.to(tl.float32) - (b_start * b_scale)[:, None] * b_x)
    return tl.dot(b_inv, b_x.to(b_inv.dtype), input_precision=PRECISION)


@triton.jit
def _log1p_exp(x):
    """log(1 + e^x) for x <= 0: the series of 2 atanh(e / (2 + e)), exact in fp32 for tiny e^x."""
    e = tl.exp(x)
    s = e / (2.0 + e)
    s2 = s * s
    series = 1.0 / 13 + s2 * (1.0 / 15)
    series = 1.0 / 11 + s2 * series
    series = 1.0 / 9 + s2 * series
    series = 1.0 / 7 + s2 * series
    series = 1.0 / 5 + s2 * series
    series = 1.0 / 3 + s2 * series
    return 2.0 * s * (1.0 + s2 * series)


@triton.jit
def _unit_lower_inverse(b_a, BT: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A [BT, BT], BT 16, 32 or 64.

    The diagonal blocks of 16 by forward substitution, all at once. With D their inverse and L the
    blocks below them, (I + A)^-1 = (I + D L)^-1 D, and D L is nilpotent after BT / 16 powers.
    """
    NB: tl.constexpr = BT // 16
    o_b = tl.arange(0, NB)
    o_i = tl.arange(0, 16)
    on_diagonal = o_b[:, None, None, None] == o_b[None, None, :, None]
    b_blocks = tl.reshape(b_a, [NB, 16, NB, 16])
    b_d = tl.sum(tl.where(on_diagonal, b_blocks, 0.0), axis=2)
    b_inv = tl.where((o_i[:, None] == o_i[None, :])[None], 1.0, 0.0) + tl.zeros_like(b_d)
    for i in range(1, 16):
        is_row = (o_i == i)[None, :, None]
        b_row = tl.sum(tl.where(is_row, b_d, 0.0), axis=1)
        b_new = tl.sum(b_row[:, :, None] * b_inv, axis=1)
        b_inv = tl.where(is_row, b_inv - b_new[:, None, :], b_inv)
    if NB == 1:
        return tl.reshape(b_inv, [16, 16])
    b_inv = tl.where(on_diagonal, tl.reshape(b_inv, [NB, 16, 1, 16]), 0.0)
    b_inv = tl.reshape(b_inv, [BT, BT])
    b_below = tl.reshape(tl.where(on_diagonal, 0.0, b_blocks), [BT, BT])
    b_n = -tl.dot(b_inv, b_below, input_precision=PRECISION)
    if NB > 2:
        b_n2 = tl.dot(b_n, b_n, input_precision=PRECISION)
        b_n = b_n + b_n2 + tl.dot(b_n2, b_n, input_precision=PRECISION)
    return b_inv + tl.dot(b_n, b_inv, input_precision=PRECISION)


_LENGTHS = ["num_tokens", "chunks_per_row"]


@triton.jit(do_not_specialize=_LENGTHS)
def gated_delta_prepare_kernel(
    k,
    retention,
    write,
    inverse,
    gates,
    key_scale,
    k_strides,
    retention_strides,
    write_strides,
    retention_bias,
    write_bias,
    greatest_log_gamma,
    chunk_table,
    lengths,
    num_tokens,
    chunks_per_row,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    IS_PACKED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    PRECISION: tl.constexpr,
    MERGE_PRECISION: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    i_chunk, i_g = pid // G, pid % G
    token, count, real = locate_chunk(
        i_chunk, chunk_table, lengths, num_tokens, chunks_per_row, BT, IS_PACKED, HAS_LENGTHS
    )
    if count <= 0:
        return
    o_t = tl.arange(0, BT)
    b_k = load_tile(rows_of(k, token, i_g, k_strides), count, k_strides[0], 0, BT, BD, D)
    b_scale = inverse_length(b_k)
    tl.store(key_scale + (i_chunk * G + i_g) * BT + o_t, b_scale)
    b_kk = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_kk = b_kk * b_scale[:, None] * b_scale[None, :]

    m_real = o_t < real
    m_before = o_t[:, None] > o_t[None, :]
    o_token = token + o_t.to(tl.int64)
    for i_h in range(i_g * (H // G), (i_g + 1) * (H // G)):
        p_retention = retention + o_token * retention_strides[0] + i_h * retention_strides[1]
        b_x = tl.load(p_retention, mask=m_real, other=0.0)
        b_x = b_x.to(tl.float32) + retention_bias
        b_tail = _log1p_exp(-tl.abs(b_x))
        b_log_gamma = tl.minimum(b_x, 0.0) - b_tail
        # 1 - gamma = sigmoid(-x), the slope of log gamma; none where the cap decides.
        b_slope = tl.exp(tl.minimum(-b_x, 0.0) - b_tail)
        b_slope = tl.where(m_real & (b_log_gamma <= greatest_log_gamma), b_slope, 0.0)
        b_log_gamma = tl.minimum(b_log_gamma, greatest_log_gamma) * _LOG2_E
        b_log_gamma = tl.where(m_real, tl.maximum(b_log_gamma, _LEAST_LOG2_GAMMA), 0.0)
        b_coarse = tl.floor(b_log_gamma * 16.0 + 0.5) * 0.0625
        b_fine = tl.cumsum(b_log_gamma - b_coarse, axis=0)
        b_coarse = tl.cumsum(b_coarse, axis=0)

        p_write = write + o_token * write_strides[0] + i_h * write_strides[1]
        b_w = tl.load(p_write, mask=m_real, other=0.0)
        b_beta = tl.where(m_real, tl.sigmoid(b_w.to(tl.float32) + write_bias), 0.0)

        p_gates = gates + (i_chunk * H + i_h) * _NUM_GATES * BT + o_t
        tl.store(p_gates, b_coarse)
        tl.store(p_gates + BT, b_fine)
        tl.store(p_gates + 2 * BT, b_beta)
        tl.store(p_gates + 3 * BT, b_slope)

        b_a = b_beta[:, None] * b_kk * decay_between(b_coarse, b_fine, m_before)
        b_inv = _unit_lower_inverse(b_a, BT, MERGE_PRECISION)
        store_tile(inverse + (i_chunk * H + i_h) * BT * BT, b_inv, BT, BT, 0, BT)


@triton.jit(do_not_specialize=_LENGTHS)
def gated_delta_scan_kernel(
    k,
    v,
    inverse,
    gates,
    key_scale,
    initial_state,
    states,
    updates,
    final_state,
    chunk_offsets,
    k_strides,
    v_strides,
    chunk_table,
    lengths,
    num_tokens,
    chunks_per_row,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    IS_PACKED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_n, i_h, i_g, i_v, first, last = locate_scan(
        chunk_offsets, chunks_per_row, H, G, D, BV, IS_PACKED
    )
    o_t = tl.arange(0, BT)

    b_m = tl.zeros([BD, BV], dtype=tl.float32)
    if initial_state is not None:
        p_initial = initial_state + (i_n * H + i_h) * D * D + i_v * D
        b_m += tl.trans(load_tile(p_initial, D - i_v, D, 0, BV, BD, D)).to(tl.float32)
    for i_chunk in range(first, last):
        token, count, real = locate_chunk(
            i_chunk, chunk_table, lengths, num_tokens, chunks_per_row, BT, IS_PACKED, HAS_LENGTHS
        )
        i_ch = i_chunk * H + i_h
        b_k = load_tile(rows_of(k, token, i_g, k_strides), count, k_strides[0], 0, BT, BD, D)
        b_v = load_tile(rows_of(v, token, i_g, v_strides), count, v_strides[0], i_v, BT, BV, D)
        b_inv = load_tile(inverse + i_ch * BT * BT, BT, BT, 0, BT, BT, BT)
        b_scale = tl.load(key_scale + (i_chunk * G + i_g) * BT + o_t)
        _, _, b_beta, b_start, b_end, b_total = load_gates(gates, i_ch, BT)

        b_m16 = b_m.to(k.dtype.element_ty)
        store_tile(states + i_ch * D * D, b_m16, D, D, i_v, D)
        b_u = chunk_updates(b_k, b_m16, b_v, b_inv, b_beta, b_start, b_scale, PRECISION)
        store_tile(updates + i_ch * BT * D, b_u, BT, D, i_v, D)
        b_u = (b_u * (b_end * b_scale)[:, None]).to(b_k.dtype)
        b_m = b_m * b_total + tl.dot(tl.trans(b_k), b_u, input_precision=PRECISION)
    if final_state is not None:
        p_final = final_state + (i_n * H + i_h) * D * D + i_v * D
        store_tile(p_final, tl.trans(b_m), D - i_v, D, 0, D)


@triton.jit(do_not_specialize=_LENGTHS)
def gated_delta_read_kernel(
    q,
    k,
    gates,
    key_scale,
    states,
    updates,
    read,
    q_strides,
    k_strides,
    chunk_table,
    lengths,
    num_tokens,
    chunks_per_row,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    IS_PACKED: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    i_chunk, i_h = pid // H, pid % H
    i_g = i_h // (H // G)
    token, count, real = locate_chunk(
        i_chunk, chunk_table, lengths, num_tokens, chunks_per_row, BT, IS_PACKED, HAS_LENGTHS
    )
    if count <= 0:
        return
    o_t = tl.arange(0, BT)
    b_q = load_tile(rows_of(q, token, i_h, q_strides), count, q_strides[0], 0, BT, BD, D)
    b_k = load_tile(rows_of(k, token, i_g, k_strides), count, k_strides[0], 0, BT, BD, D)
    b_q_scale = inverse_length(b_q)
    b_k_scale = tl.load(key_scale + (i_chunk * G + i_g) * BT + o_t)
    b_coarse, b_fine, _, b_start, _, _ = load_gates(gates, pid, BT)

    m_seen = o_t[:, None] >= o_t[None, :]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_s = b_s * b_q_scale[:, None] * b_k_scale[None, :] * decay_between(b_coarse, b_fine, m_seen)
    b_s = b_s.to(b_k.dtype)
    for i_v in tl.static_range(0, D, BV):
        b_m = load_tile(states + pid * D * D, D, D, i_v, BD, BV, D)
        b_u = load_tile(updates + pid * BT * D, BT, D, i_v, BT, BV, D)
        b_r = tl.dot(b_q, b_m, input_precision=PRECISION) * (b_start * b_q_scale)[:, None]
        b_r += tl.dot(b_s, b_u, input_precision=PRECISION)
        store_tile(read + (token * H + i_h) * D, b_r, count, H * D, i_v, D)


def gated_delta_fwd(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    retention_logits: torch.Tensor,
    write_logits: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    lengths: torch.Tensor | None,
    retention_bias: float,
    write_bias: float,
    max_half_life: float | None,
    output_final_state: bool,
) -> tuple[torch.Tensor, ...]:
    """The forward pass on tensors of one dtype; the arguments are those of `gated_delta`.

    Returns the read [B, T, H, D] and the final state [N, H, D, D] in fp32, or an empty tensor; and
    what the backward pass needs: T [chunks, H, C, C] and the transposed states before every chunk
    [chunks, H, D, D] in the dtype of the inputs, the gates [chunks, H, 4, C] and the inverse
    lengths of the keys [chunks, G, C] in fp32.
    """
    layout = chunk_layout(query, key, cu_seqlens, lengths)
    H, G, D, C = layout.num_heads, layout.num_groups, layout.head_dim, layout.chunk_size
    dtype = query.dtype
    inverse, states, gates, key_scale, final_state = new_buffers(query, layout, output_final_state)
    updates = query.new_empty(layout.num_chunks, H, C, D)
    # Tokens past the last document belong to no chunk.
    new_read = torch.zeros if layout.chunk_table is not None else torch.empty
    read = new_read(query.shape, dtype=dtype, device=query.device)
    query, key, value = addressable(query), addressable(key), addressable(value)
    retention_logits, write_logits = addressable(retention_logits), addressable(write_logits)
    scan, sizes = launch_options("scan", layout, query), layout.arguments(dtype)
    cap = math.inf if max_half_life is None else -math.log(2.0) / max_half_life
    with torch.cuda.device_of(query):
        gated_delta_prepare_kernel[(layout.num_chunks * G,)](
            key,
            retention_logits,
            write_logits,
            inverse,
            gates,
            key_scale,
            strides_of(key),
            strides_of(retention_logits),
            strides_of(write_logits),
            retention_bias,
            write_bias,
            cap,
            **sizes,
            MERGE_PRECISION="ieee" if dtype == torch.float32 else "tf32",
            **launch_options("prepare", layout, query),
        )
        gated_delta_scan_kernel[(layout.num_states * H * triton.cdiv(D, scan["BV"]),)](
            key,
            value,
            inverse,
            gates,
            key_scale,
            None if initial_state is None else initial_state.contiguous(),
            states,
            updates,
            final_state if output_final_state else None,
            layout.chunk_offsets,
            strides_of(key),
            strides_of(value),
            **sizes,
            **scan,
        )
        gated_delta_read_kernel[(layout.num_chunks * H,)](
            query,
            key,
            gates,
            key_scale,
            states,
            updates,
            read,
            strides_of(query),
            strides_of(key),
            **sizes,
            **launch_options("read", layout, query),
        )
    return read, final_state, inverse, states, gates, key_scale


def new_buffers(query, layout: Layout, output_final_state: bool) -> tuple[torch.Tensor, ...]:
    """Buffers for T, states, gates, key scales and the final state (empty if not wanted)."""
    chunks, H, G = layout.num_chunks, layout.num_heads, layout.num_groups
    C, D = layout.chunk_size, layout.head_dim
    num_final = layout.num_states if output_final_state else 0
    return (
        query.new_empty(chunks, H, C, C),
        query.new_empty(chunks, H, D, D),
        query.new_empty(chunks, H, _NUM_GATES.value, C, dtype=torch.float32),
        query.new_empty(chunks, G, C, dtype=torch.float32),
        query.new_empty(num_final, H, D, D, dtype=torch.float32),
    )
