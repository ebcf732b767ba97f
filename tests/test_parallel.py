# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
One model over two processes answers as one process does: tensor parallel (training too), and the
context-parallel prefill of scripts/context_parallel.py. On two GPUs where there are two, else on
the CPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from atma import AtmaForCausalLM
from transformers.distributed import DistributedConfig

PROCESSES = 2
ON_GPUS = torch.cuda.device_count() >= PROCESSES
ROOT = Path(__file__).parent.parent
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def draw_ids() -> torch.Tensor:
    # An odd length: the shares of a context do not divide it.
    return torch.randint(1, 101, (2, 53), generator=torch.Generator().manual_seed(5))


def split_over_heads(folder: str, **options) -> AtmaForCausalLM:
    """The model with its heads split over all processes."""
    config = DistributedConfig(tp_size=dist.get_world_size())
    return AtmaForCausalLM.from_pretrained(folder, distributed_config=config, **options)


def answers(model) -> dict:
    """Logits of a padded batch, text, the loss and all gradients."""
    ids = draw_ids().to(model.device)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    model.eval()
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
    text = model.generate(ids, attention_mask=mask, **OPTIONS)
    model.train()
    loss = model(ids, labels=ids).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    gradients = {
        n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients.items()
    }
    found = {"logits": logits[mask.bool()], "text": text, "loss": loss.detach(), **gradients}
    return {name: x.cpu() for name, x in found.items()}


def continuation(model, result) -> dict:
    """From the logits and the cache of a prefill: both, and the logits of a further token."""
    logits, cache = result
    states = {
        f"{i} {name}": state.current.clone()
        for i, layer in enumerate(cache.layers)
        for name, state in layer.states.items()
    }
    with torch.no_grad():
        more = model(logits.argmax(-1), past_key_values=cache).logits
    found = {"logits": logits, "more": more, **states}
    return {name: x.cpu() for name, x in found.items()}


def main() -> None:
    """What each process runs."""
    folder, out = sys.argv[1:]
    sys.path.insert(0, str(ROOT / "scripts"))
    from context_parallel import ContextParallel

    dist.init_process_group("nccl" if ON_GPUS else "gloo")
    device = torch.device("cpu")
    if ON_GPUS:
        device = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(device)
    model = split_over_heads(folder)
    with torch.no_grad():
        cache = model(draw_ids().to(model.device), use_cache=True).past_key_values
    shapes = {(n, tuple(x.current.shape)) for y in cache.layers for n, x in y.states.items()}
    found = {"tensor": answers(model), "shapes": sorted(shapes)}
    model = AtmaForCausalLM.from_pretrained(folder).to(device).eval()
    result = ContextParallel(model).prefill(draw_ids().to(device))
    found["context"] = None if result is None else continuation(model, result)
    refusals = [folder + "-three-groups", folder + "-distractors"]
    found["refusals"] = []
    for other in refusals:
        try:
            split_over_heads(other)
        except ValueError as error:
            found["refusals"].append(str(error))
    if dist.get_rank() == dist.get_world_size() - 1:
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def alone(make_model):
    """Builds what one device holds."""
    return lambda: make_model(vocab_size=102).to("cuda" if ON_GPUS else "cpu")


@pytest.fixture(scope="module")
def plain(alone):
    return alone()


@pytest.fixture(scope="module")
def found(plain, make_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    plain.save_pretrained(folder / "model")
    make_model(vocab_size=102, num_attention_heads=3, num_key_value_heads=3).save_pretrained(
        folder / "model-three-groups"
    )
    make_model(vocab_size=102, distractor_keys=4).save_pretrained(folder / "model-distractors")
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        + [f"--nproc-per-node={PROCESSES}", __file__, str(folder / "model"), str(folder / "out")],
        check=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return torch.load(folder / "out", weights_only=True)


def test_tensor_parallel_answers_and_trains_as_one_device_does(found, alone, close):
    expected, actual = answers(alone()), found["tensor"]
    assert set(actual) == set(expected)
    assert torch.equal(actual.pop("text"), expected["text"])
    close(actual.pop("logits"), expected["logits"], 5e-5)
    for name, gradient in actual.items():
        off = (gradient - expected[name]).norm()
        assert off <= 1e-3 * expected[name].norm() + 1e-6, name


def test_each_device_holds_the_memory_of_its_heads(found, plain):
    heads, size = plain.config.num_attention_heads // PROCESSES, plain.config.head_dim
    assert ("memory_state", (2, heads, size, size)) in found["shapes"]
    assert sum(name == "memory_state" for name, _ in found["shapes"]) == 1


def test_tensor_parallel_refuses_what_it_cannot_split(found):
    first, second = found["refusals"]
    assert "3 key/value heads" in first and "2 devices" in first
    assert "distractor" in second


def test_a_context_read_in_shares_leaves_the_same_cache(found, plain, close):
    ids = draw_ids().to(plain.device)
    with torch.no_grad():
        whole = plain(ids, use_cache=True, logits_to_keep=1)
    expected = continuation(plain, (whole.logits, whole.past_key_values))
    actual = found["context"]
    assert set(actual) == set(expected)
    for name in expected:
        close(actual[name], expected[name], 5e-5)


if __name__ == "__main__":
    main()
