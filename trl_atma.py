# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
Log-probabilities for TRL's trainers, with the soft cap.

TRL's `add_fused_lm_head` replaces `model.forward`: called with `fused_lm_head=True`, it takes the
weights of the head and computes log-probabilities from them, which for ATMA would leave out the
algebraic cap (TRL knows a tanh) and the distractor loss. Here the same question gets the answer
that the model's own logits give.
"""

import functools
import inspect
import types

import torch
from torch import nn

from .kernels.cross_entropy import soft_cap
from .loss_atma import IGNORE_INDEX, distractor_term, of_chunks


def with_soft_cap(model: nn.Module, forward):
    """
    What `model.forward` becomes when `forward` is assigned to it: TRL's own is replaced by one that
    respects the cap, any other is left as it is.

    Raises `ValueError` for a fused head whose settings cannot be read: it would train something
    else than the model.
    """
    function = getattr(forward, "__func__", forward)
    code = getattr(function, "__code__", None)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()
    if "fused_lm_head" not in names or function.__globals__ is globals():
        return forward
    settings = inspect.getclosurevars(function).nonlocals
    try:
        options = {
            "temperature": settings["temperature"],
            "fields": settings["outputs"],
            "in_fp32": settings["cast_lm_head_to_fp32"],
            "output_class": function.__globals__["FusedCausalLMOutput"],
        }
    except KeyError as error:
        raise ValueError(
            "This version of TRL computes log-probabilities from the weights of the head in a way "
            f"that ATMA does not know (no {error}), and would leave out the soft cap of the "
            "logits: use TRL 1.16, or Transformers' Trainer."
        ) from error

    # generate() validates its arguments against the signature.
    @functools.wraps(type(model).forward)
    def capped_forward(self, *args, fused_lm_head=False, **kwargs):
        if fused_lm_head:
            return _log_probabilities(self, args, kwargs, **options)
        return forward(*args, **kwargs)

    return types.MethodType(capped_forward, model)


def _log_probabilities(model, args, kwargs, *, temperature, fields, in_fp32, output_class):
    """
    TRL's `FusedCausalLMOutput`: `[B, T - 1]`, or `[B, T]` with `shift_labels`; 0 where a label is
    ignored.
    """
    labels, shift_labels = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
    given_count = kwargs.pop("num_items_in_batch", None)
    outputs = model.base_model(*args, **{**kwargs, "use_cache": False})
    hidden_states = outputs.last_hidden_state
    if shift_labels is None:
        hidden_states, shift_labels = hidden_states[:, :-1], labels[:, 1:]
    shift_labels = shift_labels.to(hidden_states.device)
    mask = shift_labels != IGNORE_INDEX
    fields = {"log_probs", *fields}
    score = functools.partial(
        _score, model, fields=fields, temperature=temperature, in_fp32=in_fp32
    )
    head = model.get_output_embeddings()
    chunks = of_chunks(head, score, hidden_states[mask], shift_labels[mask])
    scores = {name: _scatter(torch.cat([chunk[name] for chunk in chunks]), mask) for name in fields}
    count = mask.sum().clamp(min=1) if given_count is None else given_count
    loss = -scores["log_probs"].sum() / count
    if outputs.distractor_loss is not None:
        term = distractor_term(
            outputs.distractor_loss,
            shift_labels,
            shift_labels=shift_labels,
            num_items_in_batch=given_count,
        )
        loss = loss + model.config.distractor_loss_coef * term
    return output_class(loss=loss, label_mask=mask, **scores)


def _score(model, rows, targets, *, fields, temperature, in_fp32) -> dict[str, torch.Tensor]:
    """What the distribution after each of the rows `[N, C]` says of its target: `fields`, `[N]`."""
    head, device_type = model.get_output_embeddings(), rows.device.type
    with torch.autocast(
        device_type, enabled=torch.is_autocast_enabled(device_type) and not in_fp32
    ):
        logits = head(rows.float() if in_fp32 else rows)
    config = model.config
    z = soft_cap(logits.float(), float(config.logit_softcap), backend=config.kernel_backend)
    z = z / temperature
    log_p = z.log_softmax(-1)
    detached = log_p.detach()
    formulas = {
        "log_probs": lambda: log_p.gather(-1, targets[:, None])[:, 0],
        "entropy": lambda: -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": lambda: (2 * detached).logsumexp(-1),
        "mean_logits": lambda: z.detach().mean(-1),
        "is_top1": lambda: z.detach().argmax(-1) == targets,
    }
    return {name: formulas[name]() for name in fields}


def _scatter(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(mask.shape).masked_scatter(mask, x)


__all__ = ["with_soft_cap"]
