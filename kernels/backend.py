# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""What all operations share: which implementation runs, and in which precision it computes."""

import warnings

import torch

try:
    import triton
except ImportError:  # the torch paths need none
    triton, INTERPRETED = None, False
else:
    # Triton's interpreter runs kernels on the host; a kernel is bound to it when it is decorated.
    INTERPRETED = triton.knobs.runtime.interpret

__all__ = ["BACKENDS", "WORTH_A_KERNEL", "choose_backend", "compute_dtype", "without_autocast"]

BACKENDS = ("auto", "triton", "torch")
# Elements from which on "auto" takes a kernel where torch has one or two of its own: below, the
# launch from Python costs more than the passes over memory that it saves.
WORTH_A_KERNEL = 2**24


def choose_backend(
    backend: str, tensor: torch.Tensor, operation: str, has_triton: bool = False
) -> str:
    """Decides once, for every public operation, which implementation runs.

    Args:
        backend: `"auto"` takes the fastest that serves this device, the others insist.
        tensor: an input of the operation; its device decides.
        operation: the operation's name, for the error.
        has_triton: whether the operation has a Triton implementation for these inputs.

    Returns:
        `"triton"` or `"torch"`.

    Raises:
        ValueError: for an unknown name, and for `"triton"` where it cannot run.

    Warns once if a CUDA device has to do without Triton.
    """
    if backend not in BACKENDS:
        names = ", ".join(repr(name) for name in BACKENDS)
        raise ValueError(f"Unknown backend {backend!r} for {operation}: use one of {names}.")
    if backend != "torch" and has_triton and tensor.is_cuda:
        return "triton"
    if backend == "triton":
        if has_triton and INTERPRETED and tensor.device.type == "cpu":
            return "triton"
        reason = "does not exist for these inputs, or Triton is not installed"
        if has_triton:
            reason = f"cannot run on the device {tensor.device}"
        raise ValueError(
            f"The Triton implementation of {operation} {reason}: use backend (in a model: "
            "kernel_backend) 'auto' or 'torch'."
        )
    is_slow = backend == "auto" and tensor.is_cuda and triton is None
    if is_slow and not torch.compiler.is_compiling():
        warnings.warn(
            "Triton is not installed: ATMA's operations run in plain PyTorch on the GPU, many "
            "times slower. Install the package triton, or set kernel_backend='torch' if meant.",
            stacklevel=1,  # of this line, so that it is said once for all operations
        )
    return "torch"


def compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """The dtype to compute in: fp64 if an input is fp64, else fp32."""
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        return torch.float64
    return torch.float32


def without_autocast(tensor: torch.Tensor) -> torch.autocast:
    """A context in which matrix products keep the dtype that the operation chose for them."""
    # The meta device has no autocast to switch off; any valid name will do. (To ask torch whether a
    # device has one would break the graphs of torch 2.11's compiler.)
    device_type = "cpu" if tensor.is_meta else tensor.device.type
    return torch.autocast(device_type, enabled=False)
