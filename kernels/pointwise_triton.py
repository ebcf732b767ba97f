# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""What the pointwise kernels in Triton share: one flat walk over contiguous tensors."""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("The pointwise kernels need the package triton.") from error

__all__ = ["flat_launch", "flat_offsets", "load_flat"]

_BLOCK = 2048


@triton.jit
def flat_offsets(num_units, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """The elements of this program, int64, and which of them exist."""
    o_x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return o_x, o_x < num_units.to(tl.int64) * UNIT


@triton.jit
def load_flat(x, o_x, mask):
    return tl.load(x + o_x, mask=mask, other=0.0).to(tl.float32)


def flat_launch(num_elements: int) -> tuple[tuple[int], dict]:
    """The grid and the arguments of `flat_offsets`.

    The number of elements comes in units of 8 where it can: the compiler then knows that the masks
    do not cut through wide loads, and needs no new kernel for another number.
    """
    unit = 8 if num_elements % 8 == 0 else 1
    sizes = {"num_units": num_elements // unit, "UNIT": unit, "BLOCK": _BLOCK, "num_warps": 4}
    return (triton.cdiv(num_elements, _BLOCK),), sizes
