# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Paged polar decode beside torch's attention over the same, contiguous keys.

bf16, grouped heads, one new token for each row; device time from replays of a CUDA graph. The gate:
the fp64 reference over gathered pages.
"""

import torch
import torch.nn.functional as F
from atma.kernels.paged_polar_attention import paged_polar_attention
from atma.kernels.pages import gather_pages
from atma.kernels.polar_attention import polar_attention_reference

from .common import conditions, plot_bars, print_row
from .kernels import (
    GROUPS,
    HEAD_DIM,
    HEADS,
    draw,
    graph_milliseconds,
    require,
    shape_of,
)

PAGE_SIZE = 64


def add_arguments(parser) -> None:
    parser.add_argument("--shapes", nargs="+", default=["1x2048", "1x131072", "64x32768"])


def paged_inputs(
    batch: int, length: int, groups: int = GROUPS, dim: int = HEAD_DIM, num_queries: int = 1
) -> tuple:
    """The last queries of each row, slabs of keys and of values in shuffled pages, the scalars."""
    pages = -(-length // PAGE_SIZE)
    count = batch * pages + 1
    table = (torch.randperm(batch * pages, device="cuda") + 1).view(batch, pages).int()
    slabs = [[draw(count, PAGE_SIZE, groups, dim)] for _ in "kv"]
    start = torch.full((batch,), length - num_queries, device="cuda")
    scalars = [draw(HEADS, scale=0.5) + offset for offset in (-1.0, 2.0, 0.5, -1.5)]
    null_value = draw(HEADS, dim, scale=0.5)
    query = draw(batch, num_queries, HEADS, dim)
    return query, *slabs, table, start, null_value, *scalars


def check(inputs: tuple) -> None:
    query, keys, values, table, start, *rest = inputs
    found = paged_polar_attention(query, keys, values, table, start, *rest)
    gathered = [gather_pages(slabs, table).double() for slabs in (keys, values)]
    exact = [x.double() for x in rest]
    expected = polar_attention_reference(query.double(), *gathered, *exact, query_start=start)
    require("direction", found.direction, expected.direction, 5e-3)
    require("magnitude", found.magnitude, expected.magnitude, 5e-3)


@torch.no_grad()
def run(args) -> dict:
    check(paged_inputs(3, 1000))
    rows = []
    for batch, length in map(shape_of, args.shapes):
        inputs = paged_inputs(batch, length)
        spent = graph_milliseconds(lambda inputs=inputs: paged_polar_attention(*inputs))
        moved = 2 * batch * length * GROUPS * HEAD_DIM * 2
        query = inputs[0].transpose(1, 2).contiguous()
        key, value = (draw(batch, GROUPS, length, HEAD_DIM) for _ in "kv")

        def attention(query=query, key=key, value=value):
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

        row = {
            "shape": f"{batch}x{length}",
            "polar_ms": round(spent, 4),
            "sdpa_ms": round(graph_milliseconds(attention), 4),
            "keys_tb_per_second": round(moved / (spent * 1e-3) / 1e12, 2),
        }
        rows.append(row)
        print_row(**row)
    return {"conditions": conditions(), "rows": rows}


def plot(result: dict, path) -> None:
    rows = [(row, kind) for row in result["rows"] for kind in ("polar", "sdpa")]
    labels = [f"{kind}, {row['shape']}" for row, kind in rows]
    plot_bars(labels, [row[f"{kind}_ms"] for row, kind in rows], "ms", result, path)
