# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Polar attention beside torch's FlashAttention and cuDNN backends: forward, backward, memory.

bf16, grouped heads, causal, random output gradients; medians of the device's time (replays of a
CUDA graph), and of calls from Python, which for short rows cost the host more than the device. The
gate: forward and gradients against the fp64 reference at an odd length.
"""

import torch
import torch.nn.functional as F
from atma.kernels.polar_attention import polar_attention, polar_attention_reference
from torch.nn.attention import SDPBackend, sdpa_kernel

from .common import conditions, print_row
from .kernels import (
    GROUPS,
    HEAD_DIM,
    HEADS,
    draw,
    extra_mib,
    graph_milliseconds,
    milliseconds,
    require,
    shape_of,
)

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
CASES = [
    "16x2048",
    "2x16384",
    "1x131072",
    "16x2048:dim=64",
    "16x2048:dim=256",
    "2x16384:window=1024",
    "1x32768:documents=16",
]


def add_arguments(parser) -> None:
    parser.add_argument(
        "--cases",
        nargs="+",
        default=CASES,
        help="batch x length, then :dim= (head size), :window= or :documents= (packed, equal)",
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=sorted(BACKENDS),
        default=["flash", "cudnn"],
        help="beside plain causal attention; they know neither windows nor documents",
    )


def case_of(text: str) -> tuple[int, int, int, dict]:
    """`2x16384:window=1024` as (batch, length, head size, options of polar_attention)."""
    shape, *words = text.split(":")
    numbers = {name: int(number) for name, number in (word.split("=") for word in words)}
    batch, length = shape_of(shape)
    dim, options = numbers.pop("dim", HEAD_DIM), {}
    if "window" in numbers:
        options["window"] = numbers.pop("window")
    if "documents" in numbers:
        ends = torch.linspace(0, length, numbers.pop("documents") + 1, device="cuda")
        options["cu_seqlens"] = ends.round().int()
    if numbers:
        raise SystemExit(f"{text}: a case knows dim, window and documents, not {list(numbers)}.")
    return batch, length, dim, options


def polar_inputs(batch: int, length: int, dim: int) -> list[torch.Tensor]:
    scalars = [draw(HEADS, scale=0.5) + offset for offset in (-1.0, 2.0, 0.5, -1.5)]
    inputs = [
        draw(batch, length, HEADS, dim),
        draw(batch, length, GROUPS, dim),
        draw(batch, length, GROUPS, dim),
        draw(HEADS, dim, scale=0.5),
        *scalars,
    ]
    return [x.requires_grad_() for x in inputs]


def check(batch: int, length: int, dim: int, options: dict) -> None:
    inputs = polar_inputs(batch, length, dim)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    gradient = draw(batch, length, HEADS, dim), draw(batch, length, HEADS)
    found = polar_attention(*inputs, **options)
    expected = polar_attention_reference(*exact, **options)
    require("direction", found.direction, expected.direction, 5e-3)
    require("magnitude", found.magnitude, expected.magnitude, 5e-3)
    grads = torch.autograd.grad(found[:2], inputs, gradient)
    wanted = torch.autograd.grad(expected[:2], exact, [x.double() for x in gradient])
    names = ("query", "key", "value", "null_value")
    for name, one, other in zip(names, grads, wanted, strict=False):
        require(f"the gradient of {name}", one, other, 8e-3)


def measure(name: str, case: str, forward, inputs, gradient) -> dict:
    def both():
        return torch.autograd.grad(forward(), inputs, gradient)

    with torch.no_grad():
        # The peers are launched from C++, ours from Python: so that both are seen, without and with
        # what a call costs the host. A graph of one call meets caches and clocks as a call does.
        called_ms = milliseconds(forward, budget=400)
        forward_ms = graph_milliseconds(forward, repeats=1, budget=400)
    both_called_ms = milliseconds(both, budget=500)
    row = {
        "kernel": name,
        "case": case,
        "forward_ms": round(forward_ms, 3),
        "forward_backward_ms": round(graph_milliseconds(both, repeats=1, budget=500), 3),
        "called_forward_ms": round(called_ms, 3),
        "called_forward_backward_ms": round(both_called_ms, 3),
        "extra_mib": round(extra_mib(both)),
    }
    print_row(**row)
    return row


def run(args) -> dict:
    for case in ("2x333", "1x333:dim=64", "1x333:dim=256", "1x333:window=50", "1x333:documents=4"):
        check(*case_of(case))
    rows = []
    for case in args.cases:
        batch, length, dim, options = case_of(case)
        inputs = polar_inputs(batch, length, dim)
        gradient = draw(batch, length, HEADS, dim), draw(batch, length, HEADS)

        def polar(inputs=inputs, options=options):
            return polar_attention(*inputs, **options)[:2]

        rows.append(measure("polar", case, polar, inputs, gradient))
        peers = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in inputs[:3]]
        gradient = draw(batch, HEADS, length, dim)
        for name in () if options else args.peers:

            def attention(peers=peers):
                return F.scaled_dot_product_attention(*peers, is_causal=True, enable_gqa=True)

            try:
                with sdpa_kernel(BACKENDS[name]):
                    rows.append(measure(name, case, attention, peers, gradient))
            except RuntimeError as error:
                print_row(kernel=name, case=case, refused=str(error).splitlines()[0])
    return {"conditions": conditions(), "rows": rows}


def plot(result: dict, path) -> None:
    """Bars of each time over the slowest one's, for the cases that the peers know."""
    import matplotlib.pyplot as plt

    rows = result["rows"]
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    cases = [case for case in dict.fromkeys(row["case"] for row in rows) if ":window" not in case]
    cases = [case for case in cases if ":documents" not in case]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    titles = {"forward_ms": "forward", "forward_backward_ms": "forward + backward"}
    for axis, (column, title) in zip(axes, titles.items(), strict=True):
        times = {(row["kernel"], row["case"]): row[column] for row in rows}
        slowest = {case: max(times.get((name, case), 0.0) for name in kernels) for case in cases}
        for i, kernel in enumerate(kernels):
            known = [case for case in cases if (kernel, case) in times]
            bars = axis.barh(
                [cases.index(case) + 0.27 * i for case in known],
                [times[kernel, case] / slowest[case] for case in known],
                0.25,
                label=kernel,
            )
            labels = [f"{times[kernel, case]:.3g} ms" for case in known]
            axis.bar_label(bars, labels, padding=2, fontsize=8)
        axis.set_yticks([i + 0.27 for i in range(len(cases))], cases)
        axis.set_xlim(0, 1.15)
        axis.set_xlabel("time, relative to the slowest")
        axis.set_title(title)
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    where = result["conditions"]
    figure.suptitle(
        f"{HEADS} query heads, {GROUPS} key/value heads, bf16, causal; {where['gpu']}, "
        f"torch {where['torch']}, triton {where['triton']}, {where['date']}",
        fontsize=9,
    )
    figure.savefig(path, dpi=120)
