# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Time and memory of reading one long prompt, beside Transformers' LFM2 at the same sizes.

One forward with a cache and `logits_to_keep=1`, median. The gate: ATMA's last logits agree with
those of the same prompt read in chunks.
"""

import torch

from .common import MODELS, add_model_arguments, conditions, median_seconds, print_row


def add_arguments(parser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--prompt", nargs="+", type=int, default=[2048, 16384, 65536, 131072])


def check(model) -> None:
    ids = torch.randint(1, 50000, (1, 5000), device=model.device)
    whole = model(ids, logits_to_keep=1).logits.float()
    cache = None
    for part in ids.split(1777, dim=1):
        output = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
    error = (output.logits.float() - whole).norm() / whole.norm()
    if not error < 2e-2:
        raise SystemExit(f"Chunked prefill is off by {error:.3g} relative: no timing.")


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
