# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Time and memory of reading one long prompt, beside Transformers' LFM2 at the same sizes.

One forward with a cache and `logits_to_keep=1`, or one for each chunk of the prompt, on top of the
cache of those before; median. The gate: ATMA's last logits, read in chunks, are as near to fp32 as
those of the whole prompt.
"""

import copy
import functools

import torch

from .common import (
    MODELS,
    add_model_arguments,
    conditions,
    median_seconds,
    plot_bars,
    print_row,
)


def add_arguments(parser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--prompt", nargs="+", type=int, default=[2048, 16384, 65536, 131072])
    parser.add_argument(
        "--chunk", nargs="*", type=int, default=[16384], help="also read longer prompts in these"
    )


def check(model) -> None:
    """Chunks may be off from fp32 by what bf16 costs the whole prompt, not by more."""
    for length, chunk in ((5000, 1777), (9000, 4100)):
        ids = torch.randint(1, 50000, (1, length), device=model.device)
        exact = copy.deepcopy(model).float()(ids, logits_to_keep=1, use_cache=False).logits
        whole, parts = read(model, ids, length).logits, read(model, ids, chunk).logits
        error, limit = ((x.float() - exact).norm() / exact.norm() for x in (parts, whole))
        if not error < 2 * limit:
            raise SystemExit(f"Chunks are off by {error:.3g}, the whole by {limit:.3g}: no timing.")


def read(model, ids: torch.Tensor, chunk: int):
    """The output for the last chunk of `ids` `[1, T]`."""
    cache = None
    for part in ids.split(chunk, dim=1):
        output = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
    return output


@torch.no_grad()
def run(args) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for name in args.models:
        with torch.device(device):
            model = MODELS[name]().eval()
        if name == "atma":
            check(model)
        for prompt in args.prompt:
            ids = torch.randint(1, 50000, (1, prompt), device=device)
            for chunk in [prompt, *(chunk for chunk in args.chunk if chunk < prompt)]:
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                spent = median_seconds(functools.partial(read, model, ids, chunk))
                row = {"model": name, "prompt": prompt, "chunk": chunk}
                row["ms"] = round(1000 * spent, 2)
                if device == "cuda":
                    row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
                rows.append(row)
                print_row(**row)
        del model
    return {"conditions": conditions(), "rows": rows}


def plot(result: dict, path) -> None:
    rows = sorted(result["rows"], key=lambda row: (row["prompt"], -row["chunk"], row["model"]))
    labels = [
        f"{row['model']}, {row['prompt']}"
        + (f" in {row['chunk']}" if row["chunk"] < row["prompt"] else "")
        for row in rows
    ]
    plot_bars(labels, [row["ms"] for row in rows], "ms for the prompt", result, path)
