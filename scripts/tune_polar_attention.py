# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Tunes the tiles of polar attention's kernels on the GPU at hand, and can rewrite their table.

Each candidate first has to agree with the fp64 reference at an odd length; then forward or backward
are timed with it, everything else as it was. The fastest is printed as a row of the table in
kernels/polar_attention_tiles.py.
"""

import argparse
import itertools
import re
from pathlib import Path

import torch
from atma.kernels import polar_attention_tiles as tiles
from atma.kernels.polar_attention import polar_attention, polar_attention_reference
from tqdm import tqdm
from triton.testing import do_bench

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LIMITS = {torch.bfloat16: 8e-3, torch.float16: 8e-3, torch.float32: 1e-5}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--kernels", nargs="+", choices=list(tiles.TILES), default=list(tiles.TILES)
    )
    parser.add_argument(
        "--head-dims", nargs="+", type=int, default=[64, 128, 256], help="powers of 2"
    )
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["bf16"])
    parser.add_argument("--heads", type=int, default=8, help="query heads")
    parser.add_argument("--groups", type=int, default=2, help="key/value heads")
    parser.add_argument("--shape", default="16x2048", help="batch x length")
    parser.add_argument("--long-shape", default="2x16384", help="the same for long_forward")
    parser.add_argument("--queries", nargs="+", type=int, default=[32, 64, 128])
    parser.add_argument("--keys", nargs="+", type=int, default=[32, 64, 128])
    parser.add_argument("--warps", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--write", action="store_true", help="rewrite the table in its file")
    return parser.parse_args()


def make_inputs(args, batch: int, length: int, dim: int, dtype) -> list[torch.Tensor]:
    def draw(*shape):
        return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()

    H, G = args.heads, args.groups
    offsets = (-1.0, 2.0, 0.5, -1.5)
    scalars = [torch.full((H,), x, device="cuda", requires_grad=True) for x in offsets]
    sizes = ((batch, length, H, dim), (batch, length, G, dim), (batch, length, G, dim), (H, dim))
    return [*(draw(*size) for size in sizes), *scalars]


class Task:
    """One kernel, one head size, one dtype: what is checked, and what is timed."""

    def __init__(self, args, kernel: str, dim: int, dtype):
        self.kernel, self.size = kernel, (dtype.itemsize, dim)
        self.limit, self.is_forward = LIMITS[dtype], kernel.endswith("forward")
        self.small = make_inputs(args, 1, 333, dim, dtype)
        exact = [x.detach().double().requires_grad_() for x in self.small]
        output = polar_attention_reference(*exact)
        self.expected = (*output[:2], *torch.autograd.grad(self.loss(output), exact[:3]))
        shape = args.long_shape if kernel == "long_forward" else args.shape
        self.inputs = make_inputs(args, *map(int, shape.split("x")), dim, dtype)
        self.gradients = [torch.randn_like(x) for x in (self.inputs[0], self.inputs[0][..., 0])]

    @staticmethod
    def loss(output):
        return output.direction.double().sum() + output.magnitude.double().sum()

    def check(self) -> bool:
        output = polar_attention(*self.small)
        found = (*output[:2], *torch.autograd.grad(self.loss(output), self.small[:3]))
        return all(
            (x.double() - y).norm() < self.limit * y.norm()
            for x, y in zip(found, self.expected, strict=True)
        )

    def milliseconds(self) -> float:
        if self.is_forward:
            inputs = [x.detach() for x in self.inputs]
            return do_bench(lambda: polar_attention(*inputs), rep=100, return_mode="median")
        output = polar_attention(*self.inputs)[:2]
        return do_bench(
            lambda: torch.autograd.grad(output, self.inputs, self.gradients, retain_graph=True),
            rep=100,
            return_mode="median",
        )


def tune(task: Task, candidates: list, capability: tuple, limit: int) -> tuple | None:
    """The fastest tile that is right, or None."""
    best, best_ms = None, float("inf")
    progress = tqdm(candidates, desc=f"{task.kernel} {task.size}")
    for tile in progress:
        if tiles.shared_memory(task.kernel, tile, *task.size, capability) > limit:
            continue
        tiles.set_tile(task.kernel, capability, task.size, tile)
        try:
            is_right = task.check()
            spent = task.milliseconds() if is_right else float("inf")
        except Exception as error:  # whatever a compiler may say of a tile that does not work
            tqdm.write(f"{task.kernel} {tile}: {type(error).__name__}")
            continue
        tqdm.write(f"{task.kernel} {task.size} {tile}: {spent:.4f} ms" + " wrong" * (not is_right))
        if spent < best_ms:
            best, best_ms = tile, spent
            progress.set_postfix_str(f"{best} {best_ms:.3f} ms")
    return best


def write_table(path: Path) -> None:
    """Puts `TILES` as it now is into its file."""
    lines = ["TILES = {"]
    for kernel, table in tiles.TILES.items():
        lines.append(f'    "{kernel}": {{')
        for capability in sorted(table):
            rows = [f"            {k}: {table[capability][k]}," for k in sorted(table[capability])]
            if rows:
                lines += [f"        {capability}: {{", *rows, "        },"]
            else:
                lines.append(f"        {capability}: {{}},")
        lines.append("    },")
    text, count = re.subn(
        r"^TILES = \{.*?^\}$",
        "\n".join([*lines, "}"]),
        path.read_text(),
        count=1,
        flags=re.DOTALL | re.MULTILINE,
    )
    if count != 1:
        raise SystemExit(f"{path} has no table TILES to rewrite.")
    path.write_text(text)
    print(f"wrote {path}")


def main() -> None:
    args = parse_arguments()
    if not torch.cuda.is_available():
        raise SystemExit("Tuning measures on a GPU, and there is none here.")
    torch.manual_seed(0)
    capability, limit = tiles.device_limits(torch.cuda.current_device())
    candidates = list(itertools.product(args.queries, args.keys, args.warps, args.stages))
    for dtype, dim, kernel in itertools.product(args.dtypes, args.head_dims, args.kernels):
        task = Task(args, kernel, dim, DTYPES[dtype])
        before = tiles.TILES[kernel].get(capability, {}).get(task.size)
        long = tiles.LONG
        if kernel == "long_forward":
            tiles.LONG = 0  # so that the short check takes it too
        best = tune(task, candidates, capability, limit) or before
        tiles.LONG = long
        if kernel == "long_forward" and best == tiles.TILES["forward"][capability].get(task.size):
            best = None  # one tile serves all lengths
        tiles.set_tile(kernel, capability, task.size, best)
        print(f"{kernel} {capability} {task.size}: {best} (was {before})")
    if args.write:
        write_table(Path(tiles.__file__))


if __name__ == "__main__":
    main()
