# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The end of the model in training: projection, algebraic soft cap, cross entropy (ATMA paper,
arXiv 2606.25156).

    x = hidden weight^T + bias        z = cap x / sqrt(x^2 + cap^2)        loss = sum_t -log p_t

with p_t the share of e^z that the label of token t gets. The vocabulary makes the logits by far the
largest tensor of a step. `capped_cross_entropy` takes them as they are and keeps nothing else;
`linear_cross_entropy` never holds more than those of a chunk of tokens: it computes the gradients
along with the loss, chunk by chunk (an idea known from Liger-Kernel, arXiv 2410.10989).
"""

import torch
import torch.nn.functional as F

from .backend import choose_backend, compute_dtype, without_autocast
from .operators import define_operator

try:
    from .cross_entropy_triton import cross_entropy_rows, soft_cap_bwd, soft_cap_fwd
except ImportError:  # no Triton here: the torch path serves every device
    cross_entropy_rows = None

__all__ = [
    "capped_cross_entropy",
    "capped_cross_entropy_reference",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "soft_cap",
    "soft_cap_reference",
]

# Logits that `linear_cross_entropy` holds at a time.
_ELEMENTS_PER_CHUNK = 2**28


def soft_cap(logits: torch.Tensor, cap: float, *, backend: str = "auto") -> torch.Tensor:
    """The algebraic soft cap `cap x / sqrt(x^2 + cap^2)`. (It is not a tanh.)

    Args:
        logits: any shape and floating dtype.
        cap: bound of the result.
        backend: "auto", "triton" or "torch".

    Returns:
        Shape and dtype of `logits`; computed in fp32 (fp64 for fp64 logits).

    Raises:
        ValueError: if the backend cannot run.
    """
    if choose_backend(backend, logits, "soft_cap", _has_triton(logits)) == "triton":
        return SoftCapFunction.apply(logits, cap)
    return soft_cap_reference(logits, cap)


def soft_cap_reference(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """What `soft_cap` must return. Same arguments and results."""
    return _capped(logits, cap).to(logits.dtype)


def capped_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    cap: float,
    *,
    ignore_index: int = -100,
    return_capped: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The sum over tokens of the cross entropy of `soft_cap(logits)`. Differentiable.

    Args:
        logits: [N, V], before the cap; all that is kept for the backward pass.
        labels: [N] integers, in 0..V-1 or `ignore_index`.
        cap: bound of the logits.
        ignore_index: label of tokens that do not count.
        return_capped: whether to return `soft_cap(logits)` too, from the same pass over the logits;
            both gradients meet in one pass as well.
        backend: "auto", "triton" or "torch".

    Returns:
        A scalar in fp32 (fp64 for fp64 logits); with `return_capped` also [N, V] in the dtype of
        the logits.

    Raises:
        ValueError: if the shapes do not fit each other or the backend cannot run. Labels out of
            range fail as in `torch.nn.functional.cross_entropy`.
    """
    _check_labels(logits, labels)
    if choose_backend(backend, logits, "capped_cross_entropy", _has_triton(logits)) == "triton":
        loss, capped = CappedCrossEntropyFunction.apply(
            logits, labels, cap, ignore_index, return_capped
        )
        return (loss, capped) if return_capped else loss
    loss = capped_cross_entropy_reference(logits, labels, cap, ignore_index=ignore_index)
    return (loss, soft_cap_reference(logits, cap)) if return_capped else loss


def capped_cross_entropy_reference(
    logits: torch.Tensor, labels: torch.Tensor, cap: float, *, ignore_index: int = -100
) -> torch.Tensor:
    """What `capped_cross_entropy` must return. Same arguments, results and errors."""
    _check_labels(logits, labels)
    z = _capped(logits, cap)
    return F.cross_entropy(z, labels.long(), ignore_index=ignore_index, reduction="sum")


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    cap: float,
    *,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """The sum over tokens of the cross entropy of `soft_cap(hidden weight^T + bias)`.

    Differentiable once in hidden, weight and bias. The logits of a chunk of tokens are the most
    that is ever held. Products take operands in the dtype of `hidden`, or of autocast where it is
    on; gradients of weight and bias are summed over chunks in fp32 (each chunk's product is rounded
    before it is added where a CPU multiplies in half precision).

    Args:
        hidden: [N, C].
        weight: [V, C].
        bias: [V] or None.
        labels: [N] integers, in 0..V-1 or `ignore_index`.
        cap, ignore_index, backend: as in `capped_cross_entropy`.
        chunk_size: tokens per chunk; by default as many as have 2^28 logits.

    Returns:
        A scalar in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: as `capped_cross_entropy`, and if hidden and weight differ in dtype where
            autocast is off.
    """
    num_tokens, hidden_size = hidden.shape
    vocab_size = weight.shape[0]
    if weight.shape != (vocab_size, hidden_size) or (
        bias is not None and bias.shape != (vocab_size,)
    ):
        raise ValueError(
            f"Hidden states of {hidden_size} channels need a weight [V, {hidden_size}] and a bias "
            f"[V], but got {tuple(weight.shape)} and {None if bias is None else tuple(bias.shape)}."
        )
    _check_labels(hidden, labels)
    dtype = _product_dtype(hidden, weight)
    has_triton = cross_entropy_rows is not None and dtype != torch.float64 and num_tokens > 0
    backend = choose_backend(backend, hidden, "linear_cross_entropy", has_triton)
    if chunk_size is None:
        # In multiples of 128, as tiles of matrix products like it.
        most = max(_ELEMENTS_PER_CHUNK // vocab_size // 128 * 128, 128)
        num_chunks = max(-(-num_tokens // most), 1)
        chunk_size = min(max(-(-num_tokens // num_chunks // 128), 1) * 128, most)
    is_wanted = [
        torch.is_grad_enabled() and x is not None and x.requires_grad
        for x in (hidden, weight, bias)
    ]
    return LinearCrossEntropyFunction.apply(
        hidden, weight, bias, labels, cap, ignore_index, dtype, chunk_size, backend, is_wanted
    )


def linear_cross_entropy_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    cap: float,
    *,
    ignore_index: int = -100,
) -> torch.Tensor:
    """What `linear_cross_entropy` must return, from all logits at once."""
    logits = F.linear(hidden, weight, bias)
    return capped_cross_entropy_reference(logits, labels, cap, ignore_index=ignore_index)


def _capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    x = logits.to(compute_dtype(logits))
    return x * _slope(x, cap)


def _slope(x: torch.Tensor, cap: float) -> torch.Tensor:
    """What caps x, and whose cube is the derivative of the capped x."""
    return torch.rsqrt(1 + (x / cap).square())


def _has_triton(logits: torch.Tensor) -> bool:
    floats = (torch.float32, torch.bfloat16, torch.float16)
    return cross_entropy_rows is not None and logits.dtype in floats and logits.numel() > 0


def _check_labels(rows: torch.Tensor, labels: torch.Tensor) -> None:
    if labels.shape != rows.shape[:1]:
        raise ValueError(
            f"labels must have the shape [N] = {tuple(rows.shape[:1])}, "
            f"but have {tuple(labels.shape)}."
        )


def _product_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """The dtype in which a linear layer would multiply the two."""
    device_type = hidden.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        if hidden.dtype != torch.float64:
            return torch.get_autocast_dtype(device_type)
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"The hidden states are {hidden.dtype} and the weight of the head is {weight.dtype}: "
            "cast one of them, or use autocast."
        )
    return hidden.dtype


def _valid_labels(labels: torch.Tensor, vocab_size: int, ignore_index: int) -> torch.Tensor:
    """labels in int64, contiguous; fails, on a GPU when it gets there, if one is out of range."""
    labels = labels.long().contiguous()
    is_valid = ((labels >= 0) & (labels < vocab_size)) | (labels == ignore_index)
    torch._assert_async(is_valid.all(), f"A label is not in 0..{vocab_size - 1}, nor ignored.")
    return labels


class SoftCapFunction(torch.autograd.Function):
    """Keeps the logits as they came."""

    @staticmethod
    def forward(ctx, logits, cap):
        ctx.save_for_backward(logits)
        ctx.cap = cap
        return _soft_cap_fwd_op(logits, cap)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        (logits,) = ctx.saved_tensors
        return _soft_cap_bwd_op(logits, gradient, ctx.cap), None


def _refuse_second_derivative() -> None:
    # once_differentiable would not notice: the gradient of a loss, 1, depends on nothing.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "The gradient of this loss has no derivative (create_graph=True): use "
            "capped_cross_entropy with backend='torch', which has all of them."
        )


class CappedCrossEntropyFunction(torch.autograd.Function):
    """Keeps the logits as they came; the backward pass finds the softmax again."""

    @staticmethod
    def forward(ctx, logits, labels, cap, ignore_index, return_capped):
        ctx.save_for_backward(logits, labels)
        ctx.options = cap, ignore_index
        ctx.set_materialize_grads(False)
        loss, capped = _cross_entropy_fwd_op(logits, labels, cap, ignore_index, return_capped)
        return loss, capped if return_capped else None

    @staticmethod
    def backward(ctx, gradient, d_capped):
        _refuse_second_derivative()
        logits, labels = ctx.saved_tensors
        if gradient is None and d_capped is None:
            d_logits = None
        elif gradient is None:
            d_logits = _soft_cap_bwd_op(logits, d_capped, ctx.options[0])
        else:
            d_logits = _cross_entropy_bwd_op(logits, labels, gradient, d_capped, *ctx.options)
        return d_logits, None, None, None, None


class LinearCrossEntropyFunction(torch.autograd.Function):
    """Keeps the gradients of a loss of weight one."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, cap, ignore_index, *rest):
        inputs = hidden, weight, bias
        loss, *gradients = _linear_cross_entropy_op(*inputs, labels, cap, ignore_index, *rest)
        ctx.dtypes = [
            x.dtype if is_wanted else None for x, is_wanted in zip(inputs, rest[-1], strict=True)
        ]
        ctx.save_for_backward((labels != ignore_index).any(), *gradients)
        return loss

    @staticmethod
    def backward(ctx, gradient):
        _refuse_second_derivative()
        has_labels, *unscaled = ctx.saved_tensors
        # A mean over no labels is 0 / 0, and still passes on no gradient, as torch's does.
        gradient = gradient.where(has_labels, 0.0)
        gradients = (
            None if dtype is None else (gradient * x).to(dtype)
            for x, dtype in zip(unscaled, ctx.dtypes, strict=True)
        )
        return *gradients, *(None,) * 7


def _cross_entropy_fwd(logits, labels, cap, ignore_index, return_capped):
    labels = _valid_labels(labels, logits.shape[1], ignore_index)
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    capped = logits.new_empty(logits.shape if return_capped else (0,))
    losses = cross_entropy_rows(
        rows, labels, cap, ignore_index, gradient=None, capped=capped if return_capped else None
    )
    return losses.sum(), capped


def _cross_entropy_bwd(logits, labels, gradient, d_capped, cap, ignore_index):
    rows = logits if logits.stride(1) == 1 else logits.contiguous()
    d_logits = logits.new_empty(logits.shape)
    labels = labels.long().contiguous()
    if d_capped is not None:
        d_capped = d_capped.contiguous()
    cross_entropy_rows(
        rows, labels, cap, ignore_index, gradient=d_logits, scale=gradient, d_capped=d_capped
    )
    return d_logits


def _row_gradients(logits, labels, cap, ignore_index, backend):
    """The losses of tokens, summed, and their gradient [N, V], for which `logits` may be
    overwritten."""
    if backend == "triton":
        losses = cross_entropy_rows(logits, labels, cap, ignore_index, gradient=logits)
        return losses.sum(), logits
    x = logits.to(compute_dtype(logits))
    slope = _slope(x, cap)
    log_p = (x * slope).log_softmax(-1)
    is_counted = (labels != ignore_index)[:, None]
    targets = labels[:, None].where(is_counted, 0)
    loss = -log_p.gather(1, targets).masked_fill(~is_counted, 0.0).sum()
    gradient = log_p.exp_().scatter_add_(1, targets, -torch.ones_like(x[:, :1]))
    gradient = (gradient * slope.pow(3)).masked_fill(~is_counted, 0.0)
    return loss, gradient.to(logits.dtype)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds left @ right to `total`, which may be wider."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _linear_cross_entropy(
    hidden,
    weight,
    bias,
    labels,
    cap,
    ignore_index,
    dtype,
    chunk_size,
    backend,
    is_wanted,
):
    labels = _valid_labels(labels, weight.shape[0], ignore_index)
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    wants_hidden, wants_weight, wants_bias = is_wanted
    loss = torch.zeros((), dtype=sums, device=hidden.device)
    d_hidden = hidden.new_empty(hidden.shape if wants_hidden else (0,))
    d_weight = weight.new_zeros(weight.shape if wants_weight else (0,), dtype=sums)
    d_bias = weight.new_zeros(weight.shape[0] if wants_bias else 0, dtype=sums)
    with without_autocast(hidden), torch.no_grad():
        matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        for start in range(0, hidden.shape[0], chunk_size):
            chunk = slice(start, start + chunk_size)
            rows = hidden[chunk].to(dtype)
            logits = F.linear(rows, matrix, offset)
            chunk_loss, d_logits = _row_gradients(logits, labels[chunk], cap, ignore_index, backend)
            loss += chunk_loss
            if wants_hidden:
                d_hidden[chunk] = d_logits @ matrix
            if wants_weight:
                _add_product(d_weight, d_logits.t(), rows)
            if wants_bias:
                d_bias += d_logits.sum(0, dtype=sums)
    bias_dtype = weight.dtype if bias is None else bias.dtype
    d_weight, d_bias = d_weight.to(_sum_dtype(weight.dtype)), d_bias.to(_sum_dtype(bias_dtype))
    return loss, d_hidden, d_weight, d_bias


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which sums over all tokens wait for their weight: fp16 would overflow until then."""
    return torch.float32 if dtype == torch.float16 else dtype


def _fake_linear_cross_entropy(hidden, weight, bias, labels, cap, ignore_index, dtype, *rest):
    wants_hidden, wants_weight, wants_bias = rest[-1]
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    bias_dtype = weight.dtype if bias is None else bias.dtype
    return (
        hidden.new_empty((), dtype=sums),
        hidden.new_empty(hidden.shape if wants_hidden else (0,)),
        weight.new_empty(weight.shape if wants_weight else (0,), dtype=_sum_dtype(weight.dtype)),
        weight.new_empty(weight.shape[0] if wants_bias else 0, dtype=_sum_dtype(bias_dtype)),
    )


_linear_cross_entropy_op = define_operator(
    __name__,
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, float cap, "
    "int ignore_index, ScalarType dtype, SymInt chunk_size, str backend, bool[] is_wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _linear_cross_entropy,
    _fake_linear_cross_entropy,
)
if cross_entropy_rows is not None:
    _soft_cap_fwd_op = define_operator(
        __name__,
        "soft_cap_fwd(Tensor x, float cap) -> Tensor",
        soft_cap_fwd,
        lambda x, cap: x.new_empty(x.shape),
    )
    _soft_cap_bwd_op = define_operator(
        __name__,
        "soft_cap_bwd(Tensor x, Tensor dz, float cap) -> Tensor",
        soft_cap_bwd,
        lambda x, dz, cap: x.new_empty(x.shape),
    )
    _cross_entropy_fwd_op = define_operator(
        __name__,
        "cross_entropy_fwd(Tensor logits, Tensor labels, float cap, int ignore_index, "
        "bool return_capped) -> (Tensor, Tensor)",
        _cross_entropy_fwd,
        lambda logits, *rest: (
            logits.new_empty((), dtype=torch.float32),
            logits.new_empty(logits.shape if rest[-1] else (0,)),
        ),
    )
    _cross_entropy_bwd_op = define_operator(
        __name__,
        "cross_entropy_bwd(Tensor logits, Tensor labels, Tensor gradient, Tensor? d_capped, "
        "float cap, int ignore_index) -> Tensor",
        _cross_entropy_bwd,
        lambda logits, *rest: logits.new_empty(logits.shape),
    )
