# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The gated delta rule: chunked forward and backward for training, and the decoding step.

bf16, grouped heads; gates, normalisation and biases inside. The gate: outputs and gradients against
the fp64 chunked form, which the tests hold to the token loop.
"""

import torch
from atma.kernels.gated_delta import gated_delta, gated_delta_step

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

RULE = {"retention_bias": 3.9}


def add_arguments(parser) -> None:
    parser.add_argument("--shapes", nargs="+", default=["16x2048", "2x16384", "1x65536"])
    parser.add_argument("--step", nargs="+", type=int, default=[1, 64, 512], help="sequences")


def delta_inputs(batch: int, length: int) -> list[torch.Tensor]:
    inputs = [draw(batch, length, heads, HEAD_DIM) for heads in (HEADS, GROUPS, GROUPS)]
    return [x.requires_grad_() for x in [*inputs, *(draw(batch, length, HEADS) for _ in "rw")]]


def check() -> None:
    inputs = delta_inputs(2, 333)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    gradient = draw(2, 333, HEADS, HEAD_DIM)
    found = gated_delta(*inputs, **RULE)[0]
    expected = gated_delta(*exact, **RULE, backend="torch")[0]
    require("the read", found, expected, 5e-3)
    grads = torch.autograd.grad(found, inputs, gradient)
    wanted = torch.autograd.grad(expected, exact, gradient.double())
    for name, one, other in zip("q k v retention write".split(), grads, wanted, strict=True):
        require(f"the gradient of {name}", one, other, 2e-2 if name == "retention" else 8e-3)


def run(args) -> dict:
    check()
    rows = []
    for batch, length in map(shape_of, args.shapes):
        inputs = delta_inputs(batch, length)
        gradient = draw(batch, length, HEADS, HEAD_DIM)

        def forward(inputs=inputs):
            return gated_delta(*inputs, **RULE)[0]

        def both(forward=forward, inputs=inputs, gradient=gradient):
            return torch.autograd.grad(forward(), inputs, gradient)

        with torch.no_grad():
            forward_ms = milliseconds(forward)
        row = {
            "kernel": "gated_delta",
            "shape": f"{batch}x{length}",
            "forward_ms": round(forward_ms, 3),
            "forward_backward_ms": round(milliseconds(both), 3),
            "extra_mib": round(extra_mib(both)),
        }
        rows.append(row)
        print_row(**row)
    for batch in args.step:
        with torch.no_grad():
            inputs = [x.detach() for x in delta_inputs(batch, 1)]
            gate = draw(batch, 1, HEADS, HEAD_DIM)
            state = draw(batch, HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float32)

            def step(inputs=inputs, state=state, gate=gate):
                return gated_delta_step(*inputs, state, **RULE, readout_gate=gate)

            spent = graph_milliseconds(step)
        moved = 2 * state.numel() * 4 / (spent * 1e-3) / 1e12
        row = {"kernel": "gated_delta_step", "shape": f"{batch}x1", "ms": round(spent, 4)}
        rows.append({**row, "state_tb_per_second": round(moved, 2)})
        print_row(**rows[-1])
    return {"conditions": conditions(), "rows": rows}
