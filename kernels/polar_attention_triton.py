# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Polar attention in Triton: the forward, and what forward and backward share.

ATMA paper, arXiv 2606.25156, section on polar attention; the formulas stand in the file of the
operation. Inside the kernels logits are base-2: with rate = temp log2(e) / sqrt(D) a row's logit is
rate (q . k), so that one fused multiply-add leads from a product to its exponential. The forward
keeps c (its own output), |s|, l1 (base 2) and log2 n_eff = 2 l1 - l2.

Tokens, heads and dimensions are named as everywhere: query [B, T, H, D], key and value
[B, S, G, D]. In kernels `b_` marks the values of a block, `o_` offsets, `p_` pointers, `m_` masks
and `i_` the index of a program; BM rows of queries, BN keys, BD the power of two that holds D.
"""

import torch

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError as error:
    raise ImportError("The Triton path of polar attention needs the package triton.") from error

from .operators import define_operator
from .polar_attention_tiles import choose_tile, device_limits, runs_ahead

__all__ = [
    "LN2",
    "LOG2E",
    "MIN_NORM",
    "NO_LIMIT",
    "PARTS",
    "Problem",
    "document_of",
    "key_range",
    "length_terms",
    "log1p",
    "partial_sums",
    "load_rows",
    "locate",
    "polar_fwd",
    "polar_fwd_op",
    "rows_contiguous",
    "serves",
    "softplus",
    "streamed",
]

# No window: wider than any row, and sums with positions stay far from overflow.
NO_WINDOW = 2**30
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
MIN_NORM = tl.constexpr(1e-6)
NO_LIMIT = tl.constexpr(2**31 - 1)
PARTS = tl.constexpr(8)


@triton.jit
def log1p(x):
    """ln(1 + x) for x in [0, 1], accurate for tiny x: 2 artanh(x / (2 + x)) as a series."""
    z = x / (2 + x)
    y = z * z
    series = 1.0 / 15
    for k in tl.static_range(7):
        series = series * y + 1.0 / (13 - 2 * k)
    return 2 * z * series


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def length_terms(count):
    """ln n and sqrt(ln(n + 1)); ln 0 is taken as 0."""
    log_count = tl.log(tl.maximum(count, 1).to(tl.float32))
    return log_count, tl.sqrt(tl.log((count + 1).to(tl.float32)))


@triton.jit
def document_of(p_cu_seqlens, num_documents, search_steps, o_t):
    """The index of each token's document: the last offset that is not past the token."""
    low = tl.zeros_like(o_t)
    high = low + num_documents
    for _ in range(0, search_steps):
        middle = (low + high + 1) // 2
        reached = tl.load(p_cu_seqlens + middle) <= o_t
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low


@triton.jit
def locate(
    o_t, i_b, p_cu_seqlens, p_query_start, num_documents, search_steps, offset, window, S,
    PACKED: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """The first and last key that queries `o_t` see, and their counts n."""
    if PACKED:
        index = document_of(p_cu_seqlens, num_documents, search_steps, o_t)
        position = o_t - tl.load(p_cu_seqlens + index).to(tl.int32)
        place = o_t
    elif STARTS:
        position = o_t + tl.load(p_query_start + i_b).to(tl.int32)
        place = position
    else:
        position = o_t + offset
        place = position
    reach = tl.minimum(position, window - 1)
    return place - reach, tl.minimum(place, S - 1), tl.maximum(reach + 1, 0)


@triton.jit
def key_range(b_first, b_last, o_t, T):
    """The keys [start, stop) that some row of the tile sees, and [full_start, full_stop), which all
    of them see. Both ends grow with the row."""
    m_t = o_t < T
    start = tl.maximum(tl.min(tl.where(m_t, b_first, NO_LIMIT)), 0)
    full_start = tl.max(tl.where(m_t, b_first, 0))
    stop = tl.max(tl.where(m_t, b_last, -1)) + 1
    full_stop = tl.min(tl.where(m_t, b_last, NO_LIMIT)) + 1
    return start, stop, full_start, full_stop


@triton.jit
def load_rows(
    x, i_b, i_h, row, length, s_b, s_t, s_h,
    ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ALIGN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows [row, row + ROWS) of one head of x [B, length, heads, D], zeros past its end.

    `x` is a descriptor if TMA, else a pointer. The result is [ROWS, BD].
    """
    if TMA:
        b_x = x.load([i_b, row, i_h, 0]).reshape(ROWS, BD)
    else:
        o_t = row + tl.arange(0, ROWS)
        o_d = tl.arange(0, BD)
        base = tl.multiple_of(i_b.to(tl.int64) * s_b + i_h.to(tl.int64) * s_h, ALIGN)
        offsets = o_t[:, None] * tl.multiple_of(s_t.to(tl.int64), ALIGN) + o_d[None, :]
        mask = (o_t < length)[:, None]
        if D != BD:
            mask &= (o_d < D)[None, :]
        b_x = tl.load(x + base + offsets, mask, 0.0)
    return b_x


@triton.jit
def partial_sums(b_x):
    """Sums of every PARTS-th column, [BM, PARTS]: as the threads hold the result of a product."""
    shape: tl.constexpr = [b_x.shape[0], b_x.shape[1] // PARTS, PARTS]
    return tl.sum(tl.reshape(b_x, shape), 1)


@triton.jit(do_not_specialize=[
    "B", "T", "S", "num_documents", "search_steps", "offset", "window",
    "s_qb", "s_qt", "s_qh", "s_kb", "s_kt", "s_kh", "s_vb", "s_vt", "s_vh",
])  # fmt: skip
def polar_attention_fwd_kernel(
    p_q, p_k, p_v, p_null, p_gain, p_base, p_slope, p_magnitude_gain, p_cu_seqlens, p_query_start,
    p_c, p_rest, p_magnitude, p_norm, p_l1, p_log_n_eff,
    B, T, S, num_documents, search_steps, offset, window, scale,
    s_qb, s_qt, s_qh, s_kb, s_kt, s_kh, s_vb, s_vt, s_vh,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ALIGN: tl.constexpr,
    PACKED: tl.constexpr, STARTS: tl.constexpr, REST: tl.constexpr, TMA: tl.constexpr,
    AHEAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    # The last tiles of causal rows are the longest: they start first.
    i_bh = tl.program_id(0) % (B * H)
    i_t = tl.cdiv(T, BM) - 1 - tl.program_id(0) // (B * H)
    i_b, i_h = i_bh // H, i_bh % H
    i_g = i_h // (H // G)
    o_t = i_t * BM + tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    m_t, m_d = o_t < T, o_d < D
    # Queries and the first keys are asked for early: what follows is done while they come.
    b_q = load_rows(p_q, i_b, i_h, i_t * BM, T, s_qb, s_qt, s_qh, BM, D, BD, ALIGN, False)
    b_first, b_last, b_count = locate(
        o_t, i_b, p_cu_seqlens, p_query_start, num_documents, search_steps, offset, window, S,
        PACKED, STARTS,
    )  # fmt: skip
    if PACKED:
        start, stop, full_start, full_stop = key_range(b_first, b_last, o_t, T)
    else:
        # Without a search, the ends of the tile are found faster by themselves.
        start, full_stop, _ = locate(
            i_t * BM, i_b, p_cu_seqlens, p_query_start, num_documents, search_steps, offset,
            window, S, PACKED, STARTS,
        )  # fmt: skip
        full_start, stop, _ = locate(
            tl.minimum(i_t * BM + BM, T) - 1, i_b, p_cu_seqlens, p_query_start, num_documents,
            search_steps, offset, window, S, PACKED, STARTS,
        )  # fmt: skip
        start, stop, full_stop = tl.maximum(start, 0), stop + 1, full_stop + 1
    if AHEAD:
        b_k = load_rows(p_k, i_b, i_g, start, S, s_kb, s_kt, s_kh, BN, D, BD, ALIGN, TMA)

    log_count, root = length_terms(b_count)
    temp = 1 + softplus(tl.load(p_gain + i_h).to(tl.float32)) * log_count
    b_rate = temp * (scale * LOG2E)

    if AHEAD and BM <= 64:
        # Not straight from memory, so that the compiler keeps the queries in registers: products
        # then read only the keys from shared memory. More queries leave no registers for it.
        b_q = tl.where(m_t[:, None], b_q, 0.0)
    b_acc = tl.zeros([BM, BD], tl.float32)
    b_max = tl.full([BM], float("-inf"), tl.float32)
    # Sums over a row stay in PARTS parts, which saves an exchange between threads in every step.
    b_sum = tl.zeros([BM, PARTS], tl.float32)
    b_squares = tl.zeros([BM, PARTS], tl.float32)
    # AHEAD, the logits are one tile ahead of the sums: the tensor cores sum a tile's values, which
    # nothing waits for, while the weights of the next tile are computed.
    if AHEAD:
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    for j in range(start, stop, BN):
        if not AHEAD:
            b_k = load_rows(p_k, i_b, i_g, j, S, s_kb, s_kt, s_kh, BN, D, BD, ALIGN, TMA)
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        if (j < full_start) | (j + BN > full_stop):
            o_n = j + tl.arange(0, BN)
            m_s = (b_first[:, None] <= o_n[None, :]) & (o_n[None, :] <= b_last[:, None])
            b_s = tl.where(m_s, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1) * b_rate)
        # Nothing seen so far: any finite shift turns the -inf logits into zero weights.
        shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s * b_rate[:, None] - shift[:, None])
        decay = tl.exp2(b_max - shift)
        b_sum = b_sum * decay[:, None] + partial_sums(b_p)
        b_squares = b_squares * (decay * decay)[:, None] + partial_sums(b_p * b_p)
        b_max = b_new
        b_p = b_p.to(b_q.dtype)
        if AHEAD:
            # The last one is too many, which costs less than a tile outside of the loop.
            b_k = load_rows(p_k, i_b, i_g, j + BN, S, s_kb, s_kt, s_kh, BN, D, BD, ALIGN, TMA)
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_v = load_rows(p_v, i_b, i_g, j, S, s_vb, s_vt, s_vh, BN, D, BD, ALIGN, TMA)
        b_acc = tl.dot(b_p, b_v, b_acc * decay[:, None], input_precision="ieee")

    m_seen = b_last >= b_first
    b_sum = tl.where(m_seen, tl.sum(b_sum, 1), 1.0)
    log_sum = tl.log2(b_sum)
    b_l1 = tl.where(m_seen, b_max + log_sum, 0.0)
    b_log_n_eff = 2 * log_sum - tl.log2(tl.where(m_seen, tl.sum(b_squares, 1), 1.0))
    null = tl.load(p_base + i_h).to(tl.float32)
    null += softplus(tl.load(p_slope + i_h).to(tl.float32)) * root
    # Against the null: the real keys' share is sigmoid(l1 - a_0).
    gap = b_l1 * LN2 - temp * null
    real = tl.where(m_seen, tl.sigmoid(gap), 0.0)
    null_weight = tl.where(m_seen, tl.sigmoid(-gap), 1.0)
    b_null = tl.load(p_null + i_h * D + o_d, m_d, 0.0).to(tl.float32)
    b_acc = b_acc * (real / b_sum)[:, None] + null_weight[:, None] * b_null[None, :]
    b_norm = tl.sqrt(tl.sum(b_acc * b_acc, 1))
    b_acc *= (1 / tl.maximum(b_norm, MIN_NORM))[:, None]
    # tanh(gain ln(1 + m_eff)) with ln(1 + m_eff) = softplus(ln m_eff)
    log_m_eff = tl.where(m_seen, b_log_n_eff * LN2 - softplus(-gap), float("-inf"))
    gain = softplus(tl.load(p_magnitude_gain + i_h).to(tl.float32))
    b_magnitude = tanh(gain * softplus(log_m_eff))

    b64 = i_b.to(tl.int64)
    rows = (b64 * T + o_t) * H + i_h
    m_td = m_t[:, None] & m_d[None, :]
    o_td = rows[:, None] * D + o_d[None, :]
    b_c = b_acc.to(p_c.dtype.element_ty)
    tl.store(p_c + o_td, b_c, m_td)
    if REST:
        # The next 8 bits of the mantissa. The two never differ in sign, so integers can tell.
        rest = b_acc.to(tl.int32, bitcast=True) - b_c.to(tl.float32).to(tl.int32, bitcast=True)
        rest = tl.minimum((rest + 128) >> 8, 127)
        tl.store(p_rest + o_td, rest.to(tl.int8), m_td)
    tl.store(p_magnitude + rows, b_magnitude, m_t)
    heads_first = (b64 * H + i_h) * T + o_t
    tl.store(p_norm + heads_first, b_norm, m_t)
    tl.store(p_l1 + heads_first, b_l1, m_t)
    tl.store(p_log_n_eff + heads_first, b_log_n_eff, m_t)


@triton.jit
def tanh(x):
    """tanh of x >= 0, also accurate for tiny x."""
    y = x * x
    small = x * (1 + y * (-1.0 / 3 + y * (2.0 / 15 - y * (17.0 / 315))))
    e = tl.exp(-2 * x)
    return tl.where(x < 0.1, small, (1 - e) / (1 + e))


def serves(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernels take this head size and this dtype of query, key and value."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return 16 <= head_dim <= 256 and head_dim % 8 == 0 and dtype in dtypes


class Problem:
    """The sizes and the visibility of one call, as the kernels take them."""

    def __init__(self, query, key, cu_seqlens, query_start, window):
        self.B, self.T, self.H, self.D = query.shape
        _, self.S, self.G, _ = key.shape
        self.BD = max(triton.next_power_of_2(self.D), 16)
        self.cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
        self.query_start = None if query_start is None else query_start.contiguous()
        self.num_documents = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.offset = 0 if cu_seqlens is not None else self.S - self.T
        self.window = NO_WINDOW if window is None else min(window, NO_WINDOW)

    @property
    def reach(self) -> int:
        """About the most keys that a query sees."""
        return min(self.S // max(self.num_documents, 1), self.window)

    def sizes(self) -> tuple:
        """B, T, S, num_documents, search_steps, offset, window."""
        return (
            self.B,
            self.T,
            self.S,
            self.num_documents,
            self.num_documents.bit_length(),
            self.offset,
            self.window,
        )

    def constants(self, *strides: int) -> dict:
        """What kernels are compiled for; the strides are multiples of ALIGN."""
        return {
            "H": self.H,
            "G": self.G,
            "D": self.D,
            "BD": self.BD,
            "ALIGN": 1 if any([s % 8 for s in strides]) else 8,
            "PACKED": self.cu_seqlens is not None,
            "STARTS": self.query_start is not None,
        }


def streamed(tensors: list[torch.Tensor], rows: int, block_dim: int) -> tuple[list, bool]:
    """What kernels read tensors [B, T, heads, D] through, `rows` at a time.

    Returns:
        Descriptors and True, where the copy engine of the device (from Hopper on) takes them all;
        else the tensors and False.
    """
    if not tensors[0].is_cuda or device_limits(tensors[0].device.index)[0] < (9, 0):
        return tensors, False
    block, descriptors = [1, rows, 1, block_dim], []
    for x in tensors:
        shape, strides, aligned = x.shape, [], 16 // x.element_size()
        for n, s in zip(shape[:3], x.stride(), strict=False):
            if n == 1:  # this stride does not matter, but has to be well-formed
                s = aligned
            elif n == 0 or s <= 0 or s % aligned:
                return tensors, False
            strides.append(s)
        if x.data_ptr() % 16:
            return tensors, False
        descriptors.append(TensorDescriptor(x, list(shape), [*strides, 1], block))
    return descriptors, True


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """`x` [B, T, heads, D], copied only if its last dimension is not dense."""
    return x if x.stride(3) == 1 else x.contiguous()


def polar_fwd(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    null_value: torch.Tensor,
    length_gain: torch.Tensor,
    null_base: torch.Tensor,
    null_slope: torch.Tensor,
    magnitude_gain: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    query_start: torch.Tensor | None,
    window: int | None,
    for_backward: bool,
) -> tuple[torch.Tensor, ...]:
    """The forward: arguments as in `polar_attention`; query, key and value share one dtype.

    Returns:
        direction [B, T, H, D] and magnitude [B, T, H] in the dtype of the query; in fp32 [B, H, T]
        the norm |s|, l1 in base 2, and log2 n_eff; and `rest`, int8: if `for_backward` in bf16,
        what rounding took from the direction, [B, T, H, D], else empty.
    """
    outputs = _empty_outputs(query, for_backward)
    direction, magnitude, norm, l1, log_n_eff, rest = outputs
    if direction.numel() == 0:
        return outputs
    query, key, value = rows_contiguous(query), rows_contiguous(key), rows_contiguous(value)
    problem = Problem(query, key, cu_seqlens, query_start, window)
    BM, BN, warps, stages = choose_tile("forward", query, problem.BD, problem.reach)
    (keys, values), tma = streamed([key, value], BN, problem.BD)
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3])
    device = query.device.index if query.is_cuda else None
    ahead = runs_ahead(device_limits(device)[0], query.element_size(), problem.BD)
    ahead = ahead and (tma or device is None)  # without the copy engine registers do not suffice
    with torch.cuda.device_of(query):
        polar_attention_fwd_kernel[(triton.cdiv(problem.T, BM) * problem.B * problem.H,)](
            query, keys, values, null_value.contiguous(), length_gain.contiguous(),
            null_base.contiguous(), null_slope.contiguous(), magnitude_gain.contiguous(),
            problem.cu_seqlens, problem.query_start,
            direction, rest, magnitude, norm, l1, log_n_eff,
            *problem.sizes(), problem.D**-0.5, *strides, **problem.constants(*strides),
            REST=rest.numel() > 0, TMA=tma, AHEAD=ahead, BM=BM, BN=BN,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return outputs


def _empty_outputs(query: torch.Tensor, for_backward: bool) -> tuple[torch.Tensor, ...]:
    B, T, H, _ = query.shape
    has_rest = for_backward and query.dtype == torch.bfloat16
    return (
        query.new_empty(query.shape),
        query.new_empty(B, T, H),
        query.new_empty(B, H, T, dtype=torch.float32),
        query.new_empty(B, H, T, dtype=torch.float32),
        query.new_empty(B, H, T, dtype=torch.float32),
        query.new_empty(query.shape if has_rest else 0, dtype=torch.int8),
    )


def _fake_polar_fwd(query, *rest):
    """Empty tensors like those of `polar_fwd`."""
    return _empty_outputs(query, rest[-1])


polar_fwd_op = define_operator(
    __name__,
    "polar_attention_fwd(Tensor query, Tensor key, Tensor value, Tensor null_value, "
    "Tensor length_gain, Tensor null_base, Tensor null_slope, Tensor magnitude_gain, "
    "Tensor? cu_seqlens, Tensor? query_start, int? window, bool for_backward) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    polar_fwd,
    _fake_polar_fwd,
)
