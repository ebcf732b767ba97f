# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""What only two GPUs can show: layers on several devices, kernels launched where their tensors are,
and training in two processes through NCCL."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from atma import AtmaForCausalLM
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

OPTIONS = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
# Heads that the Triton kernels take.
SIZES = {"head_dim": 32, "vocab_size": 102}


@pytest.fixture(scope="module")
def saved(make_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two-gpus") / "model"
    make_model(**SIZES).save_pretrained(folder)
    return folder


def padded_batch(tokens):
    ids = tokens(2, 33)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    return ids.to("cuda:0"), mask.to("cuda:0")


def layers_split_after(count: int, num_layers: int) -> dict[str, int]:
    ends = {"model.embed_tokens": 0, "model.norm": 1, "lm_head": 1}
    return ends | {f"model.layers.{i}": int(i >= count) for i in range(num_layers)}


@pytest.mark.parametrize("count", range(6))
def test_layers_may_be_split_anywhere(saved, tokens, count, close):
    """DIST-1: `count` layers on the first GPU, the rest and the head on the second."""
    ids, mask = padded_batch(tokens)
    alone = AtmaForCausalLM.from_pretrained(saved, device_map={"": 0})
    split = AtmaForCausalLM.from_pretrained(saved, device_map=layers_split_after(count, 5))
    expected = alone.generate(ids, attention_mask=mask, **OPTIONS)
    for _ in range(2):
        assert torch.equal(split.generate(ids, attention_mask=mask, **OPTIONS), expected)
    output = split(ids, attention_mask=mask, use_cache=True)
    for i, layer in enumerate(output.past_key_values.layers):
        for name, state in layer.states.items():
            assert state.current.device.index == int(i >= count), (i, name)
    loss = split(ids, attention_mask=mask, labels=ids).loss
    close(loss.cpu(), alone(ids, attention_mask=mask, labels=ids).loss.cpu(), 1e-5)
    loss.backward()
    assert all(p.grad is not None for p in split.parameters())


def test_kernels_run_on_the_device_of_their_tensors(saved, tokens, close):
    """KERN-2: everything on the second GPU while the first is current, forward and backward."""
    ids, mask = padded_batch(tokens)
    results = []
    for device in ("cuda:0", "cuda:1"):
        torch.cuda.set_device(0)
        model = AtmaForCausalLM.from_pretrained(saved).to(device)
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        text = model.generate(**inputs, **OPTIONS)
        loss = model(**inputs, labels=ids.to(device)).loss
        loss.backward()
        assert torch.cuda.current_device() == 0
        gradients = {n: p.grad.cpu() for n, p in model.named_parameters()}
        results.append({"text": text.cpu(), "loss": loss.detach().cpu(), **gradients})
    first, second = results
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_trainer_without_a_launcher_uses_both_gpus(saved, tokens, tmp_path):
    """TRAIN-5: `Trainer` wraps the model in `DataParallel`."""
    model = AtmaForCausalLM.from_pretrained(saved)
    rows = [{"input_ids": row, "labels": row} for row in tokens(16, 24).tolist()]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            tmp_path, max_steps=2, per_device_train_batch_size=4, report_to="none", logging_steps=1
        ),
        train_dataset=rows,
    )
    assert trainer.args.n_gpu == 2
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2 and all(0 < loss < 20 for loss in losses)


def train_sharded(folder: str) -> dict:
    """FSDP2 in bf16, with and without checkpointing, 2 steps each."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    found = {}
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 101, (4, 2048), generator=generator)[dist.get_rank() :: 2].cuda()
    for checkpointed in (False, True):
        model = AtmaForCausalLM.from_pretrained(folder).cuda().train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        model = fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        losses = torch.stack(losses)
        dist.all_reduce(losses)
        peak = torch.cuda.max_memory_allocated()
        found[checkpointed] = {"losses": losses.cpu() / 2, "peak": peak}
        del model, optimizer, loss
    return found


def sum_gradients(folder: str) -> dict:
    """
    DDP with compiled layers, autocast and the fused loss: the gradients of four batches, two for
    each process, and what the second process has; and those of one process.
    """
    torch._dynamo.config.optimize_ddp = False  # as scripts/train.py does
    found = {}
    generator = torch.Generator().manual_seed(3)
    batches = torch.randint(1, 101, (4, 2, 512), generator=generator).cuda()
    for kind in ("alone", "ddp"):
        model = AtmaForCausalLM.from_pretrained(folder, fused_linear_cross_entropy=True)
        model = model.cuda().train()
        for layer in model.model.layers:
            layer.compile(fullgraph=True)
        parameters, mine = dict(model.named_parameters()), batches
        if kind == "ddp":
            model, mine = DistributedDataParallel(model), batches[dist.get_rank() :: 2]
        for i, ids in enumerate(mine):
            last = i == len(mine) - 1
            with contextlib.nullcontext() if kind == "alone" or last else model.no_sync():
                with torch.autocast("cuda", torch.bfloat16):
                    loss = model(input_ids=ids, labels=ids).loss / len(mine)
                loss.backward()
        found[kind] = {name: p.grad for name, p in parameters.items()}
    second = {name: gradient.clone() for name, gradient in found["ddp"].items()}
    for gradient in second.values():
        dist.broadcast(gradient, src=1)
    found = {**found, "ddp, second": second}
    return {k: {name: g.cpu() for name, g in grads.items()} for k, grads in found.items()}


def main() -> None:
    """What each of two processes runs."""
    run, folder, out = sys.argv[1:]
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    found = {"train_sharded": train_sharded, "sum_gradients": sum_gradients}[run](folder)
    if dist.get_rank() == 0:
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()


def in_two_processes(run: str, folder, out) -> dict:
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        + [__file__, run, str(folder), str(out)],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return torch.load(out, weights_only=True)


def test_ddp_sums_the_gradients_of_one_process(saved, tmp_path, close):
    found = in_two_processes("sum_gradients", saved, tmp_path / "out")
    for name, expected in found["alone"].items():
        close(found["ddp"][name], expected, 1e-5)
        assert torch.equal(found["ddp"][name], found["ddp, second"][name]), name


def test_fsdp2_in_bf16_with_checkpointing_saves_memory_and_keeps_the_loss(saved, tmp_path):
    """DIST-6."""
    found = in_two_processes("train_sharded", saved, tmp_path / "out")
    assert torch.allclose(found[True]["losses"], found[False]["losses"], rtol=1e-3)
    assert found[True]["peak"] < 0.8 * found[False]["peak"]


if __name__ == "__main__":
    main()
