# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Training throughput, beside Transformers' LFM2 at the same sizes.

Forward with labels, backward, fused AdamW in bf16; the mean of 5 steps after 3. The gate: the loss
of ATMA's first step is finite and near ln(vocabulary) or below.
"""

import time

import torch

from .common import MODELS, add_model_arguments, atma_model, conditions, print_row, synchronize

PEAK_FLOPS = 989e12  # dense bf16 of an H100/H200


def add_arguments(parser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"], default=["eager"])
    parser.add_argument("--without-memory", action="store_true", help="also ATMA without memory")


def flops_per_token(model, length: int) -> float:
    """6 N (without the embedding) and causal attention, forward and backward."""
    config = model.config
    parameters = sum(p.numel() for p in model.parameters())
    parameters -= model.get_input_embeddings().weight.numel()
    attention_layers = sum("conv" not in kind for kind in config.layer_types)
    width = config.num_attention_heads * getattr(config, "head_dim", 128)
    return 6 * parameters + 6 * attention_layers * width * length


def run(args) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    builders = {name: MODELS[name] for name in args.models}
    if args.without_memory:
        builders["atma without memory"] = lambda: atma_model(use_memory=False)
    rows = []
    for name, build in builders.items():
        for mode in args.modes:
            with torch.device(device):
                model = build().train()
            step_model = torch.compile(model, fullgraph=True) if mode == "compiled" else model
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
            ids = torch.randint(1, 50000, (args.batch, args.length), device=device)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()

            def step(step_model=step_model, optimizer=optimizer, ids=ids):
                loss = step_model(ids, labels=ids, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            loss = step()
            if not 0 < loss.item() < 20:
                raise SystemExit(f"The first loss of {name} is {loss.item()}: no timing.")
            step(), step()
            synchronize()
            start = time.perf_counter()
            for _ in range(5):
                step()
            synchronize()
            spent = (time.perf_counter() - start) / 5
            rate = args.batch * args.length / spent
            row = {
                "model": name,
                "mode": mode,
                "ms_per_step": round(1000 * spent, 1),
                "tokens_per_second": round(rate),
                "mfu_percent": round(
                    100 * rate * flops_per_token(model, args.length) / PEAK_FLOPS, 1
                ),
            }
            if device == "cuda":
                row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            rows.append(row)
            print_row(**row)
            del model, step_model, optimizer
    return {"conditions": conditions(), "rows": rows}
