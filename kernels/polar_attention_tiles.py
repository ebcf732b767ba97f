# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The tiles of polar attention's kernels: a static table, nothing is tuned at run time.

`scripts/tune_polar_attention.py` measures candidates on the device at hand and rewrites the table.
"""

import functools

import torch

__all__ = [
    "LONG",
    "TILES",
    "choose_tile",
    "device_limits",
    "runs_ahead",
    "set_tile",
    "shared_memory",
]

# By kernel, by compute capability, by (bytes of an element, BD): queries, keys, warps, stages.
# A device that is not listed takes the row of the closest older one.
TILES = {
    "forward": {
        (8, 0): {
            (2, 16): (128, 64, 4, 3),
            (2, 32): (128, 64, 4, 3),
            (2, 64): (128, 64, 4, 3),
            (2, 128): (128, 64, 8, 3),
            (2, 256): (128, 32, 8, 2),
            (4, 16): (64, 32, 4, 2),
            (4, 32): (64, 32, 4, 2),
            (4, 64): (64, 32, 4, 2),
            (4, 128): (32, 32, 4, 2),
            (4, 256): (32, 16, 4, 2),
        },
        (9, 0): {
            (2, 64): (64, 64, 4, 3),
            (2, 128): (64, 64, 4, 3),
            (2, 256): (128, 64, 8, 2),
        },
    },
    "long_forward": {
        (8, 0): {},
        (9, 0): {
            (2, 128): (128, 128, 8, 2),
        },
    },
    "query": {
        (8, 0): {
            (2, 16): (64, 64, 4, 2),
            (2, 32): (64, 64, 4, 2),
            (2, 64): (64, 64, 4, 2),
            (2, 128): (64, 64, 8, 2),
            (2, 256): (64, 32, 8, 1),
            (4, 16): (32, 32, 4, 2),
            (4, 32): (32, 32, 4, 2),
            (4, 64): (32, 32, 4, 2),
            (4, 128): (32, 32, 4, 2),
            (4, 256): (32, 16, 4, 1),
        },
        (9, 0): {
            (2, 64): (128, 64, 8, 3),
            (2, 128): (128, 64, 8, 3),
            (2, 256): (128, 32, 8, 2),
        },
    },
    "key": {
        (8, 0): {
            (2, 16): (64, 64, 4, 2),
            (2, 32): (64, 64, 4, 2),
            (2, 64): (64, 64, 4, 2),
            (2, 128): (32, 128, 8, 2),
            (2, 256): (32, 64, 8, 1),
            (4, 16): (32, 32, 4, 2),
            (4, 32): (32, 32, 4, 2),
            (4, 64): (32, 32, 4, 2),
            (4, 128): (32, 32, 4, 2),
            (4, 256): (16, 32, 4, 1),
        },
        (9, 0): {
            (2, 64): (64, 128, 8, 3),
            (2, 128): (64, 64, 4, 2),
            (2, 256): (32, 64, 8, 3),
        },
    },
}
# Rows of so many keys take "long_forward", where the table has one: few queries to a tile let two
# programs share a multiprocessor, many read the keys less often. So at most two forward kernels
# are compiled for all lengths.
LONG = 8192


@functools.lru_cache
def device_limits(index: int | None) -> tuple[tuple[int, int], int]:
    """Compute capability and the bytes of shared memory that one program may use."""
    if index is None:
        # The interpreter: small tiles, so that short rows take several.
        return (0, 0), 2**20
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor), properties.shared_memory_per_block_optin


def runs_ahead(capability: tuple[int, int], element_size: int, block_dim: int) -> bool:
    """Whether the forward computes the logits of a tile while it sums the values of the one before.

    Only where products run by themselves, as Hopper's do; for large heads registers do not suffice.
    The interpreter, (0, 0), does too, so that it can be tested.
    """
    return capability in ((9, 0), (0, 0)) and element_size == 2 and block_dim <= 128


def shared_memory(
    kernel: str, tile: tuple, element_size: int, block_dim: int, capability: tuple[int, int]
) -> int:
    """About the bytes of shared memory that a tile needs: what stays, and what streams by."""
    queries, keys, _, stages = tile
    # The first keys of a row come beside those that stream by.
    first_keys = keys if runs_ahead(capability, element_size, block_dim) else 0
    rows = {
        "forward": queries + 2 * stages * keys + first_keys,
        "long_forward": queries + 2 * stages * keys + first_keys,
        "query": 2 * queries + 2 * stages * keys,
        "key": 2 * keys + 2 * stages * queries,
    }
    return rows[kernel] * block_dim * element_size


@functools.lru_cache
def _tile(kernel: str, index: int | None, element_size: int, block_dim: int) -> tuple | None:
    capability, limit = device_limits(index)
    if capability == (0, 0):
        return (32, 32, 4, 1)
    tile, oldest = None, min(TILES[kernel])
    for known in sorted(TILES[kernel]):
        if known == oldest or known <= capability:
            tile = TILES[kernel][known].get((element_size, block_dim), tile)
    while (
        tile is not None
        and shared_memory(kernel, tile, element_size, block_dim, capability) > limit
    ):
        queries, keys, warps, stages = tile
        if stages > 1:
            tile = (queries, keys, warps, stages - 1)
        elif max(queries, keys) > 16:
            halves = (queries // 2, keys) if queries >= keys else (queries, keys // 2)
            tile = (*halves, warps, stages)
        else:
            break
    return tile


def choose_tile(
    kernel: str, x: torch.Tensor, block_dim: int, reach: int = 0
) -> tuple[int, int, int, int]:
    """The tile of a kernel for the device of `x`, smaller where its shared memory does not suffice.

    Args:
        kernel: "forward", "query" or "key".
        x: an input.
        block_dim: BD.
        reach: about the most keys that a query sees.

    Returns:
        (queries, keys, warps, stages).
    """
    key = (x.device.index if x.is_cuda else None, x.element_size(), block_dim)
    if kernel == "forward" and reach >= LONG:
        return _tile("long_forward", *key) or _tile(kernel, *key)
    return _tile(kernel, *key)


def set_tile(kernel: str, capability: tuple, size: tuple, tile: tuple | None) -> None:
    """Replaces a row of the table, (bytes of an element, BD), in this process; None removes it."""
    row = TILES[kernel].setdefault(capability, {})
    row.pop(size, None)
    if tile is not None:
        row[size] = tile
    _tile.cache_clear()
