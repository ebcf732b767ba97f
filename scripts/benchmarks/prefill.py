# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Time and memory of reading one long prompt, beside Transformers' LFM2 at the same sizes.

One forward with a cache and `logits_to_keep=1`, median. The gate: ATMA's last logits, read in
chunks, are as near to fp32 as those of the whole prompt.
"""

import copy

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


def check(model) -> None:
    """Chunks may be off from fp32 by what bf16 costs the whole prompt, not by more."""
    ids = torch.randint(1, 50000, (1, 5000), device=model.device)
    exact = copy.deepcopy(model).float()(ids, logits_to_keep=1, use_cache=False).logits
    whole = model(ids, logits_to_keep=1, use_cache=False).logits
    cache = None
    for part in ids.split(1777, dim=1):
        output = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
    error, limit = ((x.float() - exact).norm() / exact.norm() for x in (output.logits, whole))
    if not error < 2 * limit:
        raise SystemExit(f"Chunks are off by {error:.3g}, the whole by {limit:.3g}: no timing.")


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
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()

            def read(model=model, ids=ids):
                return model(ids, logits_to_keep=1, use_cache=True)

            spent = median_seconds(read)
            row = {"model": name, "prompt": prompt, "ms": round(1000 * spent, 2)}
            if device == "cuda":
                row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            rows.append(row)
            print_row(**row)
        del model
    return {"conditions": conditions(), "rows": rows}


def plot(result: dict, path) -> None:
    rows = sorted(result["rows"], key=lambda row: (row["prompt"], row["model"]))
    labels = [f"{row['model']}, {row['prompt']}" for row in rows]
    plot_bars(labels, [row["ms"] for row in rows], "ms for the prompt", result, path)
