# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Polar attention beside torch's FlashAttention and cuDNN backends: forward, backward, memory.

bf16, grouped heads, causal, random output gradients. The gate: forward and gradients against the
fp64 reference at an odd length.
"""

import torch
import torch.nn.functional as F
from atma.kernels.polar_attention import polar_attention, polar_attention_reference
from torch.nn.attention import SDPBackend, sdpa_kernel

from .common import conditions, print_row
from .kernels import GROUPS, HEAD_DIM, HEADS, draw, extra_mib, milliseconds, require, shape_of

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def add_arguments(parser) -> None:
    parser.add_argument(
        "--shapes", nargs="+", default=["16x2048", "2x16384"], help="batch x length"
    )
    parser.add_argument("--peers", nargs="*", choices=sorted(BACKENDS), default=["flash", "cudnn"])


def polar_inputs(batch: int, length: int) -> list[torch.Tensor]:
    scalars = [draw(HEADS, scale=0.5) + offset for offset in (-1.0, 2.0, 0.5, -1.5)]
    inputs = [
        draw(batch, length, HEADS, HEAD_DIM),
        draw(batch, length, GROUPS, HEAD_DIM),
        draw(batch, length, GROUPS, HEAD_DIM),
        draw(HEADS, HEAD_DIM, scale=0.5),
        *scalars,
    ]
    return [x.requires_grad_() for x in inputs]


def check() -> None:
    inputs = polar_inputs(2, 333)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    gradient = draw(2, 333, HEADS, HEAD_DIM), draw(2, 333, HEADS)
    found, expected = polar_attention(*inputs), polar_attention_reference(*exact)
    require("direction", found.direction, expected.direction, 5e-3)
    require("magnitude", found.magnitude, expected.magnitude, 5e-3)
    grads = torch.autograd.grad(found[:2], inputs, gradient)
    wanted = torch.autograd.grad(expected[:2], exact, [x.double() for x in gradient])
    names = ("query", "key", "value", "null_value")
    for name, one, other in zip(names, grads, wanted, strict=False):
        require(f"the gradient of {name}", one, other, 8e-3)


def measure(name: str, batch: int, length: int, forward, inputs, gradient) -> dict:
    def both():
        return torch.autograd.grad(forward(), inputs, gradient)

    with torch.no_grad():
        forward_ms = milliseconds(forward)
    row = {
        "kernel": name,
        "shape": f"{batch}x{length}",
        "forward_ms": round(forward_ms, 3),
        "forward_backward_ms": round(milliseconds(both), 3),
        "extra_mib": round(extra_mib(both)),
    }
    print_row(**row)
    return row


def run(args) -> dict:
    check()
    rows = []
    for batch, length in map(shape_of, args.shapes):
        inputs = polar_inputs(batch, length)
        gradient = draw(batch, length, HEADS, HEAD_DIM), draw(batch, length, HEADS)

        def polar(inputs=inputs):
            return polar_attention(*inputs)[:2]

        rows.append(measure("polar", batch, length, polar, inputs, gradient))
        peers = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in inputs[:3]]
        gradient = draw(batch, HEADS, length, HEAD_DIM)
        for name in args.peers:

            def attention(peers=peers):
                return F.scaled_dot_product_attention(*peers, is_causal=True, enable_gqa=True)

            with sdpa_kernel(BACKENDS[name]):
                rows.append(measure(name, batch, length, attention, peers, gradient))
    return {"conditions": conditions(), "rows": rows}
