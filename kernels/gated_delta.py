# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The gated delta rule, the memory of an attention layer (ATMA paper, arXiv 2606.25156).

Every query head h keeps a matrix M [D, D] that maps keys to values. With k and q scaled to unit
length, k and v taken from the group h // (H / G), gamma = sigmoid(retention) and
beta = sigmoid(write), each token does

    M <- gamma M;    u = beta (v - M k);    M <- M + u k^T;    r = M q

that is: forget, correct what M says about k towards v, read after the write. Three forms of it:
`gated_delta_reference`, the loop over tokens that defines the operation; `gated_delta`, which
computes whole chunks of tokens by matrix products; and `gated_delta_step`, which advances a state
in place by a few tokens.
"""

import math

import torch
import torch.nn.functional as F

from .backend import choose_backend, compute_dtype, without_autocast
from .documents import document_ids

try:
    from .gated_delta_triton import gated_delta_chunks, supports_gated_delta
except ImportError:  # no Triton here: the torch path serves every device
    gated_delta_chunks = None

try:
    from .gated_delta_step_triton import gated_delta_step_op
except ImportError:  # no Triton here: the torch path serves every device
    gated_delta_step_op = None

__all__ = ["gated_delta", "gated_delta_reference", "gated_delta_step", "log_retention"]

# Chunks whose matrix products are batched; more only costs memory.
_CHUNKS_AT_ONCE = 32


def log_retention(
    retention_logits: torch.Tensor,
    retention_bias: float = 0.0,
    max_half_life: float | None = None,
) -> torch.Tensor:
    """The logarithm of gamma, the share of the memory that one token leaves in place.

    Args:
        retention_logits: any shape and floating dtype.
        retention_bias: added to the logits.
        max_half_life: if given, gamma is at most 2^(-1 / max_half_life): no head remembers longer.

    Returns:
        log gamma <= 0, of the shape of the logits, in fp32 (fp64 for fp64 logits).
    """
    log_gamma = F.logsigmoid(retention_logits.to(compute_dtype(retention_logits)) + retention_bias)
    if max_half_life is not None:
        log_gamma = log_gamma.clamp(max=-math.log(2.0) / max_half_life)
    return log_gamma


def gated_delta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    retention_logits: torch.Tensor,
    write_logits: torch.Tensor,
    *,
    retention_bias: float = 0.0,
    write_bias: float = 0.0,
    max_half_life: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gated delta rule over whole sequences, in parallel within chunks. Differentiable.

    Args:
        query: [B, T, H, D]; scaled to unit length here.
        key: [B, T, G, D], G a divisor of H; scaled to unit length here.
        value: [B, T, G, D].
        retention_logits: [B, T, H], see `log_retention`.
        write_logits: [B, T, H]; beta = sigmoid(write_logits + write_bias).
        retention_bias, write_bias, max_half_life: of the gates.
        initial_state: [N, H, D (value), D (key)], zeros by default. N is B, or the number of
            documents.
        cu_seqlens: [N + 1] offsets of packed documents, which do not see each other; then B is 1.
            Tokens past the last offset are padding.
        lengths: [B]; the tokens of row b from lengths[b] on are padding: they leave the state as it
            is. What is read at padding means nothing, but is finite.
        output_final_state: whether to return the state after the last token.
        chunk_size: tokens per chunk of the torch path, at most.
        backend: "auto", "triton" or "torch".

    Returns:
        The read [B, T, H, D] in the query's dtype, and the final state [N, H, D, D] in fp32 (fp64
        for fp64 inputs) or None. The torch path computes everything in the dtype of the state; the
        Triton path multiplies matrices in the dtype of the inputs and sums in fp32.

    Raises:
        ValueError: if the shapes do not fit each other, if cu_seqlens comes with more than one row
            or with lengths, or if the backend cannot run.
    """
    _check_inputs(query, key, value, retention_logits, write_logits, cu_seqlens, lengths)
    has_triton = gated_delta_chunks is not None and supports_gated_delta(query, key, value)
    if choose_backend(backend, query, "gated_delta", has_triton) == "triton":
        return gated_delta_chunks(
            query,
            key,
            value,
            retention_logits,
            write_logits,
            retention_bias,
            write_bias,
            max_half_life,
            initial_state,
            cu_seqlens,
            lengths,
            output_final_state,
        )
    batch_size, num_tokens, num_heads, head_dim = query.shape
    dtype = compute_dtype(query, key, value)
    with without_autocast(query):
        log_gamma = log_retention(retention_logits, retention_bias, max_half_life).to(dtype)
        beta = torch.sigmoid(write_logits.to(dtype) + write_bias)
        if lengths is not None:
            padding = _is_padding(lengths, num_tokens)
            log_gamma = log_gamma.masked_fill(padding, 0.0)
            beta = beta.masked_fill(padding, 0.0)
        inputs = [_unit(query.to(dtype)), _unit(key.to(dtype)), value.to(dtype), log_gamma, beta]
        num_states = batch_size if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if initial_state is None:
            state = query.new_zeros(num_states, num_heads, head_dim, head_dim, dtype=dtype)
        else:
            state = initial_state.to(dtype)
        if cu_seqlens is None:
            read, state = _rows_in_chunks(inputs, state, chunk_size)
        else:
            read, state = _documents_in_chunks(
                inputs, state, cu_seqlens, chunk_size, output_final_state
            )
    return read.to(query.dtype), state if output_final_state else None


def gated_delta_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    retention_logits: torch.Tensor,
    write_logits: torch.Tensor,
    *,
    retention_bias: float = 0.0,
    write_bias: float = 0.0,
    max_half_life: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `gated_delta` must return, token by token. Same arguments, results and errors."""
    _check_inputs(query, key, value, retention_logits, write_logits, cu_seqlens, lengths)
    if cu_seqlens is not None:
        offsets = cu_seqlens.tolist()
        reads, states = [], []
        # The tokens past the last offset are a last document, whose state nobody asks for.
        for n, (start, end) in enumerate(zip(offsets, offsets[1:] + [query.shape[1]], strict=True)):
            is_document = n + 1 < len(offsets)
            read, state = gated_delta_reference(
                *(x[:, start:end] for x in (query, key, value, retention_logits, write_logits)),
                retention_bias=retention_bias,
                write_bias=write_bias,
                max_half_life=max_half_life,
                initial_state=initial_state[n : n + 1]
                if initial_state is not None and is_document
                else None,
                output_final_state=True,
            )
            reads.append(read)
            if is_document:
                states.append(state)
        return torch.cat(reads, dim=1), torch.cat(states) if output_final_state else None

    batch_size, num_tokens, num_heads, head_dim = query.shape
    dtype = compute_dtype(query, key, value)
    if initial_state is None:
        state = query.new_zeros(batch_size, num_heads, head_dim, head_dim, dtype=dtype)
    else:
        state = initial_state.to(dtype, copy=True)
    with without_autocast(query):
        read, state = _token_loop(
            query,
            key,
            value,
            log_retention(retention_logits, retention_bias, max_half_life).to(dtype),
            torch.sigmoid(write_logits.to(dtype) + write_bias),
            state,
            lengths,
        )
    return read, state if output_final_state else None


@torch.no_grad()
def gated_delta_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    retention_logits: torch.Tensor,
    write_logits: torch.Tensor,
    state: torch.Tensor,
    *,
    retention_bias: float = 0.0,
    write_bias: float = 0.0,
    max_half_life: float | None = None,
    lengths: torch.Tensor | None = None,
    readout_gate: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Advances a memory by a few tokens, in place. No gradient is recorded.

    Args:
        query, key, value, retention_logits, write_logits: as in `gated_delta`, with a small T.
        state: [B, H, D (value), D (key)] in fp32; when this returns, the same storage holds the
            state after the last token.
        retention_bias, write_bias, max_half_life: of the gates.
        lengths: [B]; the tokens of row b from lengths[b] on are padding: they leave its state as it
            is, bit for bit.
        readout_gate: [B, T, H, D]; if given, what is read leaves as RMSNorm(read) * sigmoid(gate),
            normalised over each head without a weight.
        backend: "auto", "triton" or "torch".

    Returns:
        The read [B, T, H, D] in the query's dtype.

    Raises:
        ValueError: if the shapes do not fit each other or the backend cannot run.
    """
    _check_inputs(query, key, value, retention_logits, write_logits, None, lengths)
    if readout_gate is not None and readout_gate.shape != query.shape:
        raise ValueError(
            f"readout_gate must have the shape of the queries, {tuple(query.shape)}, "
            f"but has {tuple(readout_gate.shape)}."
        )
    dtype = compute_dtype(query, key, value)
    has_triton = (
        gated_delta_step_op is not None
        and dtype == state.dtype == torch.float32
        and state.is_contiguous()
        and query.shape[3] <= 256
    )
    if choose_backend(backend, query, "gated_delta_step", has_triton) == "triton":
        max_gamma = 1.0 if max_half_life is None else 2 ** (-1 / max_half_life)
        return gated_delta_step_op(
            query,
            key,
            value,
            retention_logits,
            write_logits,
            readout_gate,
            lengths,
            state,
            retention_bias,
            write_bias,
            max_gamma,
        )
    with without_autocast(query):
        read, last_state = _token_loop(
            query.to(dtype),
            key,
            value,
            log_retention(retention_logits, retention_bias, max_half_life).to(dtype),
            torch.sigmoid(write_logits.to(dtype) + write_bias),
            state.to(dtype),
            lengths,
        )
        if readout_gate is not None:
            read = F.rms_norm(read, read.shape[-1:], eps=2.0**-23)
            read = read * torch.sigmoid(readout_gate.to(dtype))
    state.copy_(last_state)
    return read.to(query.dtype)


def _check_inputs(query, key, value, retention_logits, write_logits, cu_seqlens, lengths) -> None:
    batch_size, num_tokens, num_heads, head_dim = query.shape
    num_groups = key.shape[2]
    if key.shape != value.shape or key.shape != (batch_size, num_tokens, num_groups, head_dim):
        raise ValueError(
            f"Queries of shape {tuple(query.shape)} need keys and values of shape [B, T, G, D], "
            f"but got {tuple(key.shape)} and {tuple(value.shape)}."
        )
    if num_heads % num_groups != 0:
        raise ValueError(
            f"The {num_heads} query heads must be a multiple of the {num_groups} key/value heads."
        )
    for name, logits in (("retention_logits", retention_logits), ("write_logits", write_logits)):
        if logits.shape != query.shape[:3]:
            raise ValueError(
                f"{name} must have the shape [B, T, H] of the queries, {tuple(query.shape[:3])}, "
                f"but has {tuple(logits.shape)}."
            )
    if cu_seqlens is not None and batch_size != 1:
        raise ValueError(
            f"cu_seqlens describes one packed row, but the batch has {batch_size} rows."
        )
    if cu_seqlens is not None and lengths is not None:
        raise ValueError("Pass either cu_seqlens or lengths: packed documents have no padding.")


def _unit(x: torch.Tensor) -> torch.Tensor:
    return F.normalize(x, dim=-1, eps=1e-12)


def _is_padding(lengths: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[B, T, 1], True from lengths[b] on."""
    tokens = torch.arange(num_tokens, device=lengths.device)
    return (tokens >= lengths[:, None])[..., None]


def _token_loop(query, key, value, log_gamma, beta, state, lengths):
    """The rule as it is written above, one token after the other; M k is computed as k M^T.

    Shapes are those of `gated_delta`, log_gamma and beta are [B, T, H]. Returns the read
    [B, T, H, D] and the last state [B, H, D, D].
    """
    group_size = query.shape[2] // key.shape[2]
    q = _unit(query.to(state.dtype))
    k = _unit(key.to(state.dtype)).repeat_interleave(group_size, dim=2)
    v = value.to(state.dtype).repeat_interleave(group_size, dim=2)
    gamma = log_gamma.exp()
    padding = None if lengths is None else _is_padding(lengths, query.shape[1])
    read = []
    for t in range(query.shape[1]):
        decayed = gamma[:, t, :, None, None] * state
        recalled = (k[:, t, :, None] @ decayed.mT).squeeze(-2)
        update = beta[:, t, :, None] * (v[:, t] - recalled)
        written = decayed + update[..., :, None] * k[:, t, :, None, :]
        if padding is not None:
            written = torch.where(padding[:, t, :, None, None], state, written)
        state = written
        read.append((q[:, t, :, None] @ state.mT).squeeze(-2))
    return torch.stack(read, dim=1).to(query.dtype) if read else torch.zeros_like(query), state


def _rows_in_chunks(inputs, state, chunk_size):
    """Cuts every row [B, T, ...] into chunks [chunks, B, C, ...] of equal length and runs them."""
    batch_size, num_tokens = inputs[0].shape[:2]
    num_chunks = max(1, -(-num_tokens // chunk_size))
    # The shortest chunks that this number of them allows: little of the last one is filling.
    chunk = max(1, -(-num_tokens // num_chunks))
    filling = num_chunks * chunk - num_tokens

    def cut(x):
        # A token of zeros forgets nothing and writes nothing.
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, filling))
        return x.unflatten(1, (num_chunks, chunk)).transpose(0, 1)

    read, states = _run_chunks([cut(x) for x in inputs], state)
    return read.transpose(0, 1).flatten(1, 2)[:, :num_tokens], states[-1]


def _documents_in_chunks(inputs, state, cu_seqlens, chunk_size, output_final_state):
    """Cuts a packed row [1, T, ...] into chunks that never span two documents, and runs them.

    There are at most T // C full chunks and one more per document, which bounds their number
    without a look at the lengths; the chunks that are left over hold nothing but filling.
    """
    num_tokens = inputs[0].shape[1]
    num_documents = cu_seqlens.shape[0] - 1
    chunk = min(chunk_size, num_tokens)
    num_chunks = num_tokens // chunk + num_documents
    cu_seqlens = cu_seqlens.long()
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    chunk_ends = ((ends - starts + chunk - 1) // chunk).cumsum(0)
    chunk_starts = F.pad(chunk_ends[:-1], (1, 0))

    chunks = torch.arange(num_chunks, device=cu_seqlens.device)
    # The first document that ends after the chunk begins: this steps over empty documents.
    document = torch.searchsorted(chunk_ends, chunks, right=True).clamp(max=num_documents - 1)
    first_token = starts[document] + (chunks - chunk_starts[document]) * chunk
    token = first_token[:, None] + torch.arange(chunk, device=cu_seqlens.device)
    filling = (token >= ends[document, None])[:, None, :, None]
    token = token.clamp(max=num_tokens - 1).flatten()
    query, key, value, log_gamma, beta = [
        x[0].index_select(0, token).unflatten(0, (num_chunks, 1, chunk)) for x in inputs
    ]
    chunked = [query, key, value, log_gamma.masked_fill(filling, 0), beta.masked_fill(filling, 0)]
    is_first = chunks == chunk_starts[document]
    read, states = _run_chunks(chunked, state, is_first, document, output_final_state)

    document = document_ids(cu_seqlens, num_tokens).clamp(max=num_documents - 1)
    position = torch.arange(num_tokens, device=cu_seqlens.device) - starts[document]
    read = read.flatten(0, 2).index_select(0, chunk_starts[document] * chunk + position)[None]
    if output_final_state:
        last_states = torch.cat(states).index_select(0, (chunk_ends - 1).clamp(min=0))
        state = torch.where((starts == ends)[:, None, None, None], state, last_states)
    return read, state


def _run_chunks(inputs, state, is_first=None, document=None, keep_states=False):
    """Runs chunks [chunks, B, C, ...] one after the other.

    Args:
        inputs: unit queries [chunks, B, C, H, D], unit keys and values [chunks, B, C, G, D],
            log gamma and beta [chunks, B, C, H].
        state: the states before the rows or documents, [N, H, D, D].
        is_first, document: [chunks], for one packed row: which chunks begin a document, and the
            document of each chunk.
        keep_states: whether the state after every chunk is wanted, or only the last.

    Returns:
        What is read, [chunks, B, C, H, D], and a list of states [B, H, D, D].
    """
    initial_states = state
    reads, states = [], []
    index = 0
    for batch in zip(*(x.split(_CHUNKS_AT_ONCE) for x in inputs), strict=True):
        query, erase, write, key_to_end, total, scores = _prepare_chunks(*batch)
        from_state, updates = [], []
        steps = zip(*(x.unbind(0) for x in (query, erase, write, key_to_end, total)), strict=True)
        for q, w, u, k, decay in steps:
            if document is not None:
                initial = initial_states.index_select(0, document[index : index + 1])
                state = torch.where(is_first[index], initial, state) if index else initial
            update = u - w @ state.mT
            from_state.append(q @ state.mT)
            updates.append(update)
            state = decay * state + update.mT @ k
            if keep_states:
                states.append(state)
            index += 1
        read = torch.stack(from_state) + scores @ torch.stack(updates)
        reads.append(read.transpose(2, 3))
    return torch.cat(reads), states or [state]


def _prepare_chunks(query, key, value, log_gamma, beta):
    """All that can be known of the chunks [chunks, B, C, ...] before their states are.

    With g the sum of log gamma from the chunk's start, A = strict_tril(beta_i (k_i . k_j)
    e^(g_i - g_j)) and S the state before the chunk, the updates u of the chunk's tokens are the
    rows of (I + A)^-1 (beta v - beta e^g k S^T). Returns, each [chunks, B, H, ...]: the decayed
    queries e^g q [C, D]; (I + A)^-1 beta e^g k and (I + A)^-1 beta v [C, D]; the keys decayed to
    the chunk's end [C, D]; the decay of the whole chunk [1, 1]; tril((q_i . k_j) e^(g_i - g_j)).
    """
    chunk, num_groups = key.shape[2:4]

    def by_head(x):
        """[chunks, B, C, heads, ...] to [chunks, B, G, heads / G, C, ...]."""
        x = x.unflatten(3, (num_groups, x.shape[3] // num_groups))
        return x.movedim(2, 4)

    query, key, value = by_head(query), by_head(key), by_head(value)
    log_gamma, beta = by_head(log_gamma), by_head(beta)[..., None]

    identity = torch.eye(chunk, dtype=query.dtype, device=query.device)
    not_before = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu()
    # The ones of the diagonal are added after: their gradients, which cancel, would otherwise
    # swallow those of strongly decayed pairs.
    decay = _sums_between(log_gamma).masked_fill(not_before, -math.inf).exp() + identity
    from_start = log_gamma.cumsum(-1).exp()[..., None]
    to_end = decay[..., -1, :, None]

    # The heads of a group share its key: they are further rows of one product.
    shared_key = key.squeeze(3)
    scores = (query.flatten(3, 4) @ shared_key.mT).unflatten(3, query.shape[3:5]) * decay
    # The solver takes the diagonal for ones and never reads it, nor what is above.
    system = beta * decay * (shared_key @ shared_key.mT)[:, :, :, None]
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    erase = inverse @ (beta * from_start * key)
    write = inverse @ (beta * value)
    results = (
        from_start * query,
        erase,
        write,
        to_end * key,
        from_start[..., -1:, :],
        scores,
    )
    return [x.flatten(2, 3) for x in results]


def _sums_between(log_gamma: torch.Tensor) -> torch.Tensor:
    """Sums of log_gamma [..., C] over j < l <= i, as differences of cumulative sums [..., i, j].

    One token that forgets everything (-1e4) would cost all later differences their small digits in
    fp32. So multiples of 1/16, whose sums are exact, and the remainders are summed apart.
    """
    # e^-1e4 is zero in every dtype. The bound keeps the sums of multiples below 2^24 / 16.
    log_gamma = log_gamma.clamp(min=-1e4)
    coarse = (log_gamma.detach() * 16).round() / 16
    coarse_sum = coarse.cumsum(-1)
    fine_sum = (log_gamma - coarse).cumsum(-1)
    return (coarse_sum[..., :, None] - coarse_sum[..., None, :]) + (
        fine_sum[..., :, None] - fine_sum[..., None, :]
    )
