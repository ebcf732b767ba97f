# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The short convolutions in training, beside torch's conv1d with the products around it.

bf16; the gated convolution of a conv layer (3 taps) and the canon convolutions of an attention
layer (4 taps; queries, keys and values with the residual). The device's time, from replays of CUDA
graphs. Traffic counts every input once and every output once, and stands beside that of a copy. The
gate: outputs and gradients against the reference in fp64.
"""

import torch
import torch.nn.functional as F
from atma.kernels.short_convolution import (
    canon_convolution,
    causal_conv1d_reference,
    gated_causal_conv1d,
    gated_causal_conv1d_reference,
)

from .common import conditions, print_row
from .kernels import (
    GROUPS,
    HEAD_DIM,
    HEADS,
    draw,
    graph_milliseconds,
    milliseconds,
    require,
    shape_of,
)

WIDTH = HEADS * HEAD_DIM
STREAMS = (WIDTH, GROUPS * HEAD_DIM, GROUPS * HEAD_DIM)


def add_arguments(parser) -> None:
    parser.add_argument("--shapes", nargs="+", default=["16x2048", "2x16384"])


def gated(projected, weight):
    return [gated_causal_conv1d(projected, weight, return_input=False)[0]]


def canon(*inputs):
    return canon_convolution(*inputs)


def conv1d(x, weight):
    y = F.conv1d(x.mT, weight[:, None], padding=weight.shape[1] - 1, groups=weight.shape[0])
    return y[..., : x.shape[1]].mT


def gated_of_torch(projected, weight):
    b, c, h = projected.chunk(3, dim=-1)
    return [c * conv1d(b * h, weight)]


def canon_of_torch(*inputs):
    return [x + conv1d(x, weight) for x, weight in zip(inputs[:3], inputs[3:], strict=True)]


def gated_inputs(batch: int, length: int) -> list[torch.Tensor]:
    return [draw(batch, length, 3 * WIDTH).requires_grad_(), draw(WIDTH, 3).requires_grad_()]


def canon_inputs(batch: int, length: int) -> list[torch.Tensor]:
    inputs = [draw(batch, length, width) for width in STREAMS]
    return [x.requires_grad_() for x in [*inputs, *(draw(width, 4) for width in STREAMS)]]


OPERATIONS = {
    "gated": (gated_inputs, {"atma": gated, "torch conv1d": gated_of_torch}),
    "canon q|k|v": (canon_inputs, {"atma": canon, "torch conv1d": canon_of_torch}),
}


def check() -> None:
    for name, (make_inputs, kernels) in OPERATIONS.items():
        inputs = make_inputs(2, 67)
        exact = [x.detach().double().requires_grad_() for x in inputs]
        if name == "gated":
            expected = [gated_causal_conv1d_reference(*exact)[0]]
        else:
            pairs = zip(exact[:3], exact[3:], strict=True)
            expected = [causal_conv1d_reference(x, w, residual=True) for x, w in pairs]
        gradients = [draw(*y.shape) for y in expected]
        wanted = torch.autograd.grad(expected, exact, [g.double() for g in gradients])
        found = kernels["atma"](*inputs)
        results = zip(found, expected, strict=True)
        grads = zip(torch.autograd.grad(found, inputs, gradients), wanted, strict=True)
        for one, other in [*results, *grads]:
            require(name, one, other, 6e-3)


def run(args) -> dict:
    check()
    buffer = draw(2**28)
    copied = 2 * buffer.nbytes / milliseconds(buffer.clone) / 1e9
    rows = []
    for batch, length in map(shape_of, args.shapes):
        for name, (make_inputs, kernels) in OPERATIONS.items():
            inputs = make_inputs(batch, length)
            for kernel, function in kernels.items():
                # Without a graph of its own, which would tie the leaves to this stream.
                with torch.no_grad():
                    outputs = function(*inputs)
                gradients = [draw(*y.shape) for y in outputs]

                def forward(function=function, inputs=inputs):
                    return function(*inputs)

                def both(forward=forward, inputs=inputs, gradients=gradients):
                    return torch.autograd.grad(forward(), inputs, gradients)

                with torch.no_grad():
                    forward_ms = graph_milliseconds(forward)
                both_ms = graph_milliseconds(both)
                size_in = sum(x.nbytes for x in inputs)
                size_out = sum(y.nbytes for y in outputs)
                row = {
                    "operation": name,
                    "kernel": kernel,
                    "shape": f"{batch}x{length}",
                    "forward_ms": round(forward_ms, 4),
                    "forward_backward_ms": round(both_ms, 4),
                    "forward_tb_per_second": round((size_in + size_out) / forward_ms / 1e9, 2),
                    "forward_backward_tb_per_second": round(
                        (3 * size_in + 2 * size_out) / both_ms / 1e9, 2
                    ),
                }
                rows.append(row)
                print_row(**row)
                del outputs, gradients
    print_row(copy_tb_per_second=round(copied, 2))
    return {"conditions": conditions(), "copy_tb_per_second": round(copied, 2), "rows": rows}


def plot(result: dict, path) -> None:
    import matplotlib.pyplot as plt

    rows = result["rows"]
    labels = list(dict.fromkeys(f"{row['operation']}\n{row['shape']}" for row in rows))
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    titles = {"forward": "forward", "forward_backward": "forward + backward"}
    for axis, (column, title) in zip(axes, titles.items(), strict=True):
        for i, kernel in enumerate(kernels):
            values = [row[f"{column}_tb_per_second"] for row in rows if row["kernel"] == kernel]
            bars = axis.bar([x + 0.4 * i for x in range(len(labels))], values, 0.38, label=kernel)
            axis.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
        axis.axhline(result["copy_tb_per_second"], color="gray", linestyle="--", label="copy")
        axis.set_xticks([x + 0.2 for x in range(len(labels))], labels)
        axis.set_ylabel("TB/s")
        axis.set_ylim(0, 1.15 * result["copy_tb_per_second"])
        axis.set_title(title)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    where = result["conditions"]
    figure.suptitle(
        f"bf16, {WIDTH} channels; {where['gpu']}, torch {where['torch']}, "
        f"triton {where['triton']}, {where['date']}",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)
