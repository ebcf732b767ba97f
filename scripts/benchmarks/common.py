# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""What the benchmarks share: conditions, timers, and the two models that are compared."""

import datetime
import platform
import statistics
import sys
import time

import torch
import transformers
from atma import AtmaConfig, AtmaForCausalLM
from transformers import Lfm2Config, Lfm2ForCausalLM


def conditions() -> dict:
    """Machine, versions, date and command, to stand beside every number."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    triton = sys.modules.get("triton")
    return {
        "command": " ".join(sys.argv),
        "date": datetime.date.today().isoformat(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "triton": getattr(triton, "__version__", "none"),
    }


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(function, repeats: int = 3, warmup: int = 1) -> list[float]:
    """Wall-clock times of `function`, sorted, device work included."""
    for _ in range(warmup):
        function()
    times = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        function()
        synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)


def median_seconds(function, repeats: int = 5, warmup: int = 1) -> float:
    return statistics.median(seconds(function, repeats, warmup))


def atma_model(**overrides) -> AtmaForCausalLM:
    """The paper's 378M model with random weights in bf16 on the default device."""
    torch.manual_seed(0)
    return AtmaForCausalLM(AtmaConfig.paper_378m(zero_init_residual=False, **overrides)).bfloat16()


def lfm2_model() -> Lfm2ForCausalLM:
    """Transformers' LFM2 at the same sizes."""
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=50304,
        hidden_size=1024,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=4096,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "conv", "full_attention", "conv"] * 4,
        tie_word_embeddings=False,
    )
    return Lfm2ForCausalLM(config).bfloat16()


MODELS = {"lfm2": lfm2_model, "atma": atma_model}


def add_model_arguments(parser) -> None:
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["lfm2", "atma"])


def print_row(**cells) -> None:
    print("  ".join(f"{name} {value}" for name, value in cells.items()), flush=True)


def plot_bars(
    labels: list[str], values: list[float], unit: str, result: dict, path, scale: str = "log"
) -> None:
    """One bar for each label, on a "log" or "linear" axis, with the conditions of the run below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1 + 0.35 * len(labels)), layout="constrained")
    axes = figure.subplots()
    colors = ["tab:orange" if "lfm2" in x or "sdpa" in x else "tab:blue" for x in labels]
    bars = axes.barh(labels[::-1], values[::-1], color=colors[::-1])
    axes.bar_label(bars, padding=3)
    axes.set_xscale(scale)
    axes.margins(x=0.2)
    at = result["conditions"]
    where = f"{at['gpu']}, torch {at['torch']}, triton {at['triton']}, {at['date']}"
    axes.set_xlabel(f"{unit} ({where})")
    figure.savefig(path, dpi=150)


__all__ = [
    "MODELS",
    "add_model_arguments",
    "atma_model",
    "conditions",
    "lfm2_model",
    "median_seconds",
    "plot_bars",
    "print_row",
    "seconds",
    "synchronize",
]
