# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
Which modules do nothing but what their classes say.

A fused decoding step reads the weights of a layer's projections instead of calling them, a captured
one does not call its modules again, and the fused loss multiplies by the head's weight: all of them
ask here first. The answer holds for the moment: asking is cheap, so it is asked at every step, and
nothing is remembered that could have changed. A head that FSDP2 has sharded, and that is nothing
more than that, may run something else in the place of its forward.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

try:
    from torch.distributed.fsdp import FSDPModule
except ImportError:  # Torch was built without torch.distributed
    FSDPModule = ()

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


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 gathers parameters of the module, or of one inside, when they are called."""
    return any(isinstance(x, FSDPModule) for x in module.modules())


def is_sharded_linear(linear: nn.Module) -> bool:
    """Whether `linear` would be a plain linear layer, had FSDP2 not sharded it."""
    hooks = (*linear._forward_pre_hooks.values(), *linear._forward_hooks.values())
    return (
        isinstance(linear, FSDPModule)
        and isinstance(linear, nn.Linear)
        and type(linear).forward is nn.Linear.forward
        and "forward" not in vars(linear)
        and all(hook.__module__.startswith("torch.distributed.fsdp") for hook in hooks)
        and not (linear._backward_hooks or linear._backward_pre_hooks)
        and not nn.modules.module._has_any_global_hook()
    )


def run_as_forward(module: nn.Module, function: Callable, x: torch.Tensor) -> torch.Tensor:
    """
    `function(x)` in the place of the module's forward, so that whatever gathers its parameters for
    a call, and again for the backward pass, does so. Hooks see the result but cannot round it.
    """
    found = []

    def forward(inner: torch.Tensor) -> torch.Tensor:
        found.append(function(inner))
        return found[0]

    module.forward = forward
    try:
        module(x)
    finally:
        del module.forward
    return found[0]


__all__ = [
    "PlainModules",
    "is_plain_linear",
    "is_sharded",
    "is_sharded_linear",
    "plain_modules",
    "run_as_forward",
]
