# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Polar attention of a chunk of a prompt over its pages: the pages themselves, or a copy of them.

bf16, grouped heads, the last tokens of each row as queries; median of calls from Python, memory as
the peak above the inputs. The gate: both ways against the fp64 reference over gathered pages.
`kernels/paged_polar_attention.py` chooses between the two by the thresholds `_GATHER_FROM`, which
these times are for.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator

import torch
from atma.kernels.paged_polar_attention import paged_polar_attention

from .common import conditions, plot_bars, print_row
from .decode import check, paged_inputs
from .kernels import GROUPS, HEADS, extra_mib, milliseconds, shape_of

WAYS = {"pages": (2**62, 2**62), "copy": (0, 0)}
CASES = [
    "1x512:16384", "1x1024:16384", "1x2048:16384", "1x4096:65536", "1x16384:131072",
    "1x16384:262144", "4x1024:16384", "16x256:8192",
]  # fmt: skip


def add_arguments(parser) -> None:
    parser.add_argument("--cases", nargs="+", default=CASES, help="batch x queries : keys")
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])


@contextlib.contextmanager
def only(way: str) -> Iterator[None]:
    """All calls take one way, however many queries they have."""
    module = sys.modules[paged_polar_attention.__module__]
    before, module._GATHER_FROM = module._GATHER_FROM, WAYS[way]
    try:
        yield
    finally:
        module._GATHER_FROM = before


@torch.no_grad()
def run(args) -> dict:
    rows = []
    for dim in args.head_dims:
        for way in WAYS:
            with only(way):
                check(paged_inputs(3, 1000, dim=dim, num_queries=333))
        for case in args.cases:
            chunk, length = case.split(":")
            batch, num_queries = shape_of(chunk)
            length = int(length)
            inputs = paged_inputs(batch, length, dim=dim, num_queries=num_queries)
            attend = functools.partial(paged_polar_attention, *inputs)
            row = {"head_dim": dim, "case": case}
            row["queries_x_heads_of_a_group"] = num_queries * HEADS // GROUPS
            row["queries_x_heads"] = batch * num_queries * HEADS
            pairs = batch * num_queries * (length - (num_queries - 1) / 2)
            for way in WAYS:
                with only(way):
                    spent, memory = milliseconds(attend), extra_mib(attend)
                row[f"{way}_mib"] = round(memory)
                row[f"{way}_ms"] = round(spent, 3)
                row[f"{way}_tflops"] = round(4 * HEADS * dim * pairs / (spent * 1e9))
            rows.append(row)
            print_row(**row)
    return {"conditions": conditions(), "rows": rows}


def plot(result: dict, path) -> None:
    rows = [(row, way) for row in result["rows"] for way in WAYS]
    labels = [f"{way}, head size {row['head_dim']}, {row['case']}" for row, way in rows]
    plot_bars(labels, [row[f"{way}_ms"] for row, way in rows], "ms", result, path)
