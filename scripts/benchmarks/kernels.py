# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""What the kernel benchmarks share: random inputs of the 378M model's heads, and device timers."""

import torch

HEADS, GROUPS, HEAD_DIM = 8, 2, 128


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def shape_of(text: str) -> tuple[int, int]:
    """`16x2048` as (batch, length)."""
    batch, length = text.lower().split("x")
    return int(batch), int(length)


def milliseconds(function, budget: int = 300) -> float:
    """Median device time, by events, over `budget` milliseconds."""
    from triton.testing import do_bench

    return do_bench(function, warmup=50, rep=budget, return_mode="median")


def graph_milliseconds(function, repeats: int = 10, budget: int = 100) -> float:
    """
    Device time of an operation whose launches may take longer than its kernels, from replays of a
    CUDA graph of `repeats` calls, for `budget` milliseconds.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                function()
    return milliseconds(graph.replay, budget=budget) / repeats


def extra_mib(function) -> float:
    """Peak memory of a call above what was allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def require(name: str, found: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    """The gate: no speed is printed for a wrong result."""
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    if not error < limit:
        raise SystemExit(
            f"{name} is off by {error.item():.3g} relative (limit {limit:g}): no timing."
        )


__all__ = [
    "GROUPS",
    "HEADS",
    "HEAD_DIM",
    "draw",
    "extra_mib",
    "graph_milliseconds",
    "milliseconds",
    "require",
    "shape_of",
]
