# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Time per token of generate(), beside Transformers' LFM2 at the same sizes.

Greedy; (time of 136 tokens - time of 8) / 128, the best of three each, after one warm call. The
gate: the first tokens of ATMA with and without its decode graph are the same.
"""

import torch

from .common import MODELS, add_model_arguments, conditions, print_row, seconds

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def add_arguments(parser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--prompt", nargs="+", type=int, default=[2048], help="prompt lengths")
    parser.add_argument("--static", action="store_true", help="also the static cache, compiled")
    parser.add_argument("--eager", action="store_true", help="also ATMA without its decode graph")


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
    long, short = seconds(lambda: run(136), warmup=0)[0], seconds(lambda: run(8), warmup=0)[0]
    return (long - short) / 128


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


def bare_graph(model, prompt: int) -> dict:
    """The captured step alone, and the time of reading each weight once at the copy bandwidth."""
    ids = torch.randint(1, 50000, (1, prompt), device=model.device)
    output = model.generate(ids, max_new_tokens=64, return_dict_in_generate=True, **GREEDY)
    graph = output.past_key_values.decode_graph.graph
    replay = seconds(lambda: [graph.replay() for _ in range(20)])[0] / 20
    source = torch.empty(2**30, dtype=torch.uint8, device=model.device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / seconds(lambda: target.copy_(source))[0]
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    weights -= model.get_input_embeddings().weight.numel() * 2
    return {
        "model": "atma",
        "mode": "bare graph",
        "batch": 1,
        "prompt": prompt,
        "ms_per_token": round(1000 * replay, 3),
        "ms_weights_once": round(1000 * weights / bandwidth, 3),
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
        modes = [("generate()", {})]
        if args.static:
            modes.append(("static", {"cache_implementation": "static"}))
        if args.eager and name == "atma":
            modes.append(("no graph", {}))
        for prompt in args.prompt:
            for batch in args.batch:
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
            rows.append(bare_graph(model, args.prompt[0]))
            print_row(**rows[-1])
        del model
    return {"conditions": conditions(), "rows": rows}
