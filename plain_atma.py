# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
Which modules do nothing but what their classes say.

A fused decoding step reads the weights of a layer's projections instead of calling them, a captured
one does not call its modules again, and the fused loss multiplies by the head's weight: all of them
ask here first. The answer holds for the moment. Asking costs less than half a microsecond a module,
so it is asked at every step, and nothing is remembered that could have changed.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

_LAYERS = (nn.Linear, nn.Embedding, nn.ModuleList)
_TENSORS = {nn.Parameter, torch.Tensor, type(None)}


class PlainModules(NamedTuple):
    """Modules with all that they contain, in a fixed order, and their parameters."""

    modules: list[nn.Module | None]
    parameters: list[torch.Tensor]


def plain_modules(
    roots: Iterable[nn.Module], own: str | None = None, others: Iterable[str] = ()
) -> PlainModules | None:
    """
    The modules below and including `roots`, or `None` if one of them is not plain: it has another
    class than those of Torch that ATMA is made of, as adapters, quantisation, parametrisations and
    sharding give it; it, or all modules, have hooks; offloading or a patch has replaced a forward;
    or a weight is a tensor subclass, or none of the module's parameters.

    Args:
        own: the module (of Python) whose classes are plain as well, as they were defined.
        others: further classes, as `"module.Class"`.
    """
    if nn.modules.module._has_any_global_hook():
        return None
    pending, modules, parameters, kinds = list(roots), [], [], {type(None)}
    while pending:
        module = pending.pop()
        modules.append(module)
        kind = type(module)
        if kind not in kinds:
            if not _is_plain(kind, own, others):
                return None
            kinds.add(kind)
        if module is None:  # a child that was taken out
            continue
        fields = module.__dict__
        if (
            fields["_forward_hooks"]
            or fields["_forward_pre_hooks"]
            or fields["_backward_hooks"]
            or fields["_backward_pre_hooks"]
            or "forward" in fields
            or "weight" in fields
        ):
            return None
        if children := fields["_modules"]:
            pending += children.values()
        if tensors := fields["_parameters"]:
            parameters += tensors.values()
    if not set(map(type, parameters)) <= _TENSORS:
        return None
    return PlainModules(modules, [x for x in parameters if x is not None])


def _is_plain(kind: type, own: str | None, others: Iterable[str]) -> bool:
    is_known = kind in _LAYERS or kind.__module__ == own
    if not is_known and f"{kind.__module__}.{kind.__qualname__}" not in others:
        return False
    # Containers have the forward of all modules.
    return kind.forward.__module__ in (kind.__module__, nn.Module.__module__)


def is_plain_linear(linear: nn.Module, device: torch.device) -> bool:
    """Whether calling `linear` does nothing but multiply by its weight, on this device, and add its
    bias."""
    return (
        type(linear) is nn.Linear
        and plain_modules((linear,)) is not None
        and linear.weight.device == device
    )


__all__ = ["PlainModules", "is_plain_linear", "plain_modules"]
