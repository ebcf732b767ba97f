# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Time per token of generate(), beside Transformers' LFM2 at the same sizes.

Greedy; (time of 136 tokens - time of 8) / 128, the best of five each, taken in turn, after one
warm call. The gate: the first tokens of ATMA with and without its decode graph are the same.
"""

import torch

from .common import (
    MODELS,
    add_model_arguments,
    conditions,
    plot_bars,
    print_row,
    seconds,
)
from .kernels import shape_of

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def add_arguments(parser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--shapes", nargs="+", default=["1x2048", "64x2048", "1x131072"], help="batch x prompt"
    )
    parser.add_argument(
        "--static", action="store_true", help="also the static cache, compiled, at the first shape"
    )
    parser.add_argument(
        "--eager", action="store_true", help="also ATMA without its decode graph, at the first"
    )


def per_token(model, ids, **options) -> float:
    """Seconds per token of one decoding run."""
    mask = torch.ones_like(ids)

    def run(count: int):
        model.generate(
            ids,
            attention_mask=mask,
            min_new_tokens=count,
            max_new_tokens=count,
            **GREEDY,
            **options,
        )

    run(136)
    # In turn, so that both meet the same clocks: after a long prompt the prefill is most of it.
    times = {136: [], 8: []}
    for _ in range(5):
        for count in times:
            times[count] += seconds(lambda count=count: run(count), repeats=1, warmup=0)
    return (min(times[136]) - min(times[8])) / 128


def check(model) -> None:
    """Greedy tokens with and without the graph agree, over two batch sizes."""
    for batch in (1, 3):
        ids = torch.randint(1, 50000, (batch, 33), device=model.device)
        found = []
        for graph in (True, False):
            model.config.decode_graph = graph
            found.append(model.generate(ids, max_new_tokens=200, **GREEDY))
        model.config.decode_graph = True
        if not torch.equal(*found):
            raise SystemExit("generate() with and without the decode graph disagree: no timing.")


def copy_bandwidth(device) -> float:
    """Bytes per second of a large copy, read and written."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))[0]


def bare_graph(model, batch: int, prompt: int) -> dict:
    """
    The captured step alone, and the time of reading each weight and the cache once (and writing the
    states, which are all replaced) at the copy bandwidth.
    """
    ids = torch.randint(1, 50000, (batch, prompt), device=model.device)
    output = model.generate(ids, max_new_tokens=64, return_dict_in_generate=True, **GREEDY)
    cache = output.past_key_values
    replay = cache.decode_graph.graph.replay
    spent = seconds(lambda: [replay() for _ in range(20)])[0] / 20
    weights = [p for p in model.parameters() if p is not model.get_input_embeddings().weight]
    moved = sum(x.numel() * x.element_size() for x in weights)
    moved += 2 * sum(x.current.numel() * x.current.element_size() for x in cache.states())
    config, hybrid = model.config, model.config.layer_types.count("hybrid")
    width = 2 * config.num_key_value_heads * config.head_dim * weights[0].element_size()
    moved += int(cache.lengths.sum()) * hybrid * width
    bandwidth = copy_bandwidth(model.device)
    return {
        "model": "atma",
        "mode": "bare graph",
        "batch": batch,
        "prompt": prompt,
        "ms_per_token": round(1000 * spent, 3),
        "ms_weights_and_cache_once": round(1000 * moved / bandwidth, 3),
        "copy_tb_per_second": round(bandwidth / 1e12, 2),
    }


@torch.no_grad()
def run(args) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for name in args.models:
        with torch.device(device):
            model = MODELS[name]().eval()
        if name == "atma":
            check(model)
        for i, (batch, prompt) in enumerate(map(shape_of, args.shapes)):
            modes = [("generate()", {})]
            if args.static and i == 0:
                modes.append(("static", {"cache_implementation": "static"}))
            if args.eager and i == 0 and name == "atma":
                modes.append(("no graph", {}))
            ids = torch.randint(1, 50000, (batch, prompt), device=device)
            for mode, options in modes:
                if name == "atma":
                    model.config.decode_graph = mode != "no graph"
                spent = per_token(model, ids, **options)
                row = {
                    "model": name,
                    "mode": mode,
                    "batch": batch,
                    "prompt": prompt,
                    "ms_per_token": round(1000 * spent, 3),
                    "tokens_per_second": round(batch / spent),
                }
                rows.append(row)
                print_row(**row)
            if name == "atma" and device == "cuda":
                model.config.decode_graph = True
                rows.append(bare_graph(model, batch, prompt))
                print_row(**rows[-1])
        del model
    return {"conditions": conditions(), "rows": rows}


def plot(result: dict, path) -> None:
    rows = result["rows"]
    labels = [f"{r['model']}, {r['mode']}, {r['batch']} x {r['prompt']}" for r in rows]
    plot_bars(labels, [r["ms_per_token"] for r in rows], "ms per token", result, path)
