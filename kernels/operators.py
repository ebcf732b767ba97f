# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Operators that the compiler can see, for kernels without gradients."""

from collections.abc import Callable

import torch

__all__ = ["define_operator"]

# A library takes its operators along when it goes.
_LIBRARIES: dict[str, torch.library.Library] = {}


def define_operator(module: str, schema: str, function: Callable, fake: Callable) -> Callable:
    """Registers an operator in a namespace of its module.

    Two copies of this code may live in one process, the package and a checkpoint's own: their
    modules have different names, and so have their operators.

    Args:
        module: the `__name__` of the module.
        schema: `"name(Tensor x, Tensor(a!) state) -> Tensor"`; what is written in place is marked.
        function: the implementation.
        fake: returns tensors of the right shapes and strides, and computes nothing.

    Returns:
        The operator.
    """
    namespace = "".join(letter if letter.isalnum() else "_" for letter in module)
    name = schema.partition("(")[0]
    # A module that is executed again replaces its operators.
    _LIBRARIES.pop(f"{namespace}::{name}", None)
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(schema)
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    _LIBRARIES[f"{namespace}::{name}"] = library
    return getattr(getattr(torch.ops, namespace), name).default
