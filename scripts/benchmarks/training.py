# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Training throughput, beside Transformers' LFM2 at the same sizes.

Forward with labels, backward, fused AdamW in bf16; the mean of 5 steps after 3. MFU is 6 N and
causal attention over 989 TFLOP/s; the memory's own products are not counted as useful. The gate:
the first loss is finite and near ln(vocabulary) or below, and fused and plain loss agree.
"""

import time

import torch

from .common import MODELS, add_model_arguments, atma_model, conditions, print_row, synchronize

PEAK_FLOPS = 989e12  # dense bf16 of an H100/H200
# Which kernels, by a part of their names, make up a share of the step; the first that fits.
GROUPS = {
    "memory": ("gated_delta",),
    "attention": ("polar_attention", "flash", "fmha", "sdpa"),
    "convolutions": ("causal_conv1d", "canon_conv", "conv_depthwise", "cudnn"),
    "loss": ("cross_entropy", "soft_cap", "SoftMax", "softmax"),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK"),
    "optimizer": ("multi_tensor",),
}
REST = "norms, gates, sums"


def add_arguments(parser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled"], default=["eager"])
    parser.add_argument(
        "--fused-loss", action="store_true", help="also ATMA with fused_linear_cross_entropy"
    )
    parser.add_argument("--without-memory", action="store_true", help="also ATMA without memory")


def flops_per_token(model, length: int) -> float:
    """6 N (without the embedding) and causal attention, forward and backward."""
    config = model.config
    parameters = sum(p.numel() for p in model.parameters())
    parameters -= model.get_input_embeddings().weight.numel()
    attention_layers = sum("conv" not in kind for kind in config.layer_types)
    width = config.num_attention_heads * getattr(config, "head_dim", 128)
    return 6 * parameters + 6 * attention_layers * width * length


def shares(step) -> dict[str, float]:
    """Percent of a step's time on the device, by group of kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        synchronize()
    times = dict.fromkeys([*GROUPS, REST], 0.0)
    for event in profiler.key_averages():
        fitting = (group for group, parts in GROUPS.items() if any(p in event.key for p in parts))
        times[next(fitting, REST)] += event.device_time_total
    total = sum(times.values())
    return {group: round(100 * spent / total, 1) for group, spent in times.items()}


def measure(name: str, mode: str, build, args, device: str) -> dict:
    torch.compiler.reset()
    with torch.device(device):
        model = build().train()
        ids = torch.randint(1, 50000, (args.batch, args.length))
    step_model = torch.compile(model, fullgraph=True) if mode == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")

    def step():
        loss = step_model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    loss = step().item()
    if not 0 < loss < 20:
        raise SystemExit(f"The first loss of {name} is {loss}: no timing.")
    step(), step()
    synchronize()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(5):
        step()
    synchronize()
    spent = (time.perf_counter() - start) / 5
    rate = args.batch * args.length / spent
    useful = rate * flops_per_token(model, args.length)
    row = {
        "model": name,
        "mode": mode,
        "ms_per_step": round(1000 * spent, 1),
        "tokens_per_second": round(rate),
        "mfu_percent": round(100 * useful / PEAK_FLOPS, 1),
        "first_loss": round(loss, 3),
    }
    if device == "cuda":
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        row["shares_percent"] = shares(step)
    return row


def run(args) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    builders = {name: MODELS[name] for name in args.models}
    if args.fused_loss:
        builders["atma, fused loss"] = lambda: atma_model(fused_linear_cross_entropy=True)
    if args.without_memory:
        builders["atma without memory"] = lambda: atma_model(use_memory=False)
    rows = []
    for mode in args.modes:
        for name, build in builders.items():
            torch.manual_seed(0)
            rows.append(measure(name, mode, build, args, device))
            print_row(**rows[-1])
    losses = [row["first_loss"] for row in rows if row["model"] in ("atma", "atma, fused loss")]
    if losses and max(losses) - min(losses) > 0.02:
        raise SystemExit(f"Fused, plain, compiled and eager losses disagree: {losses}.")
    return {"conditions": conditions(), "rows": rows}


def plot(result: dict, path) -> None:
    import matplotlib.pyplot as plt

    rows = result["rows"]
    labels = [f"{row['model']}, {row['mode']}" for row in rows]
    figure, axes = plt.subplots(1, 2, figsize=(12, 0.45 * len(rows) + 1.6), layout="constrained")
    columns = (
        ("tokens_per_second", "tokens per second", "{:,.0f}"),
        ("peak_gib", "peak memory, GiB", "{:.1f}"),
    )
    for axis, (column, title, form) in zip(axes, columns, strict=True):
        colors = ["tab:gray" if row["model"] == "lfm2" else "tab:blue" for row in rows]
        bars = axis.barh(labels, [row.get(column, 0) for row in rows], color=colors)
        axis.bar_label(bars, fmt=form, padding=3, fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.2)
        axis.set_title(title)
    axes[1].set_yticks([])
    where = result["conditions"]
    figure.suptitle(
        f"one training step, bf16; {where['gpu']}, torch {where['torch']}, "
        f"triton {where['triton']}, transformers {where['transformers']}, {where['date']}",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)
