# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Two processes on the CPU train as one does; placement by accelerate changes nothing."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from accelerate import (
    Accelerator,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from atma import AtmaConfig, AtmaForCausalLM
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

KINDS = [
    "ddp",
    "fsdp2",
    "fsdp2 offload",
    "fsdp2 checkpointed",
    "fsdp2 checkpointed bf16",
]
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


def batches():
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        yield torch.randint(1, 101, (4, 17), generator=generator)


def shard(model, **options):
    """One unit for each decoder layer, as Transformers and accelerate wrap them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def prepare(model, kind: str):
    if kind == "ddp":
        return Accelerator(cpu=True).prepare(model)
    if "checkpointed" in kind:
        model.gradient_checkpointing_enable()
    options = {}
    if "offload" in kind:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if "bf16" in kind:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return shard(model, **options)


def train(model, rank: int = 0, world_size: int = 1) -> dict:
    """Two steps of SGD on every `world_size`-th row; gradients are means over the processes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for ids in batches():
        ids = ids[rank::world_size]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if world_size > 1:
        dist.all_reduce(losses)
    return {"losses": losses / world_size, **full_weights(model)}


def full_weights(model) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("module."): (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in model.named_parameters()
    }


def main():
    """What each process runs: every kind, one after the other."""
    folder, out = sys.argv[1:]
    dist.init_process_group("gloo")
    results = {}
    for kind in KINDS:
        model = AtmaForCausalLM.from_pretrained(folder).train()
        results[kind] = train(prepare(model, kind), dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        torch.save(results, out)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(make_model, tmp_path_factory):
    """The weights after training in two processes, and in this one."""
    folder = tmp_path_factory.mktemp("distributed")
    make_model().save_pretrained(folder / "model")
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        + [__file__, str(folder / "model"), str(folder / "results")],
        check=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found = torch.load(folder / "results", weights_only=True)
    alone = AtmaForCausalLM.from_pretrained(folder / "model").train()
    return {**found, "one process": train(alone)}


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_as_one(results, make_model, kind):
    start, expected, found = make_model().state_dict(), results["one process"], results[kind]
    assert set(found) == set(expected)
    names = sorted(set(expected) - {"losses"})
    if "bf16" in kind:  # as a whole: some gradients are mostly rounding
        groups, tolerance = [names], 0.2
    else:
        groups, tolerance = [[name] for name in names], 2e-4
    assert torch.allclose(found["losses"], expected["losses"], rtol=tolerance)
    for group in groups:
        moved = torch.cat([(expected[name] - start[name]).flatten() for name in group])
        off = torch.cat([(found[name] - expected[name]).flatten() for name in group])
        assert off.norm() <= tolerance * moved.norm() + 1e-7, group


def same_as_plain(model, make_model, tokens):
    """Loss and text of a placed model are those of a plain one."""
    ids, plain = tokens(2, 9), make_model()
    with torch.no_grad():
        assert torch.equal(model(ids, labels=ids).loss, plain(ids, labels=ids).loss)
    assert torch.equal(model.generate(ids, **OPTIONS), plain.generate(ids, **OPTIONS))


@pytest.mark.parametrize("how", ["cpu", "disk"])
def test_offload_changes_nothing(make_model, tokens, tmp_path, how):
    device = torch.device("cpu")
    if how == "cpu":
        model = cpu_offload(make_model(), execution_device=device)
    else:
        model = disk_offload(make_model(), str(tmp_path), execution_device=device)
    same_as_plain(model, make_model, tokens)


def layers_on_disk() -> dict[str, str]:
    ends = dict.fromkeys(("model.embed_tokens", "model.norm", "lm_head"), "cpu")
    return ends | {f"model.layers.{i}": "cpu" if i < 1 else "disk" for i in range(5)}


@pytest.mark.parametrize(("device_map", "tie"), [("auto", False), ("layers on disk", True)])
def test_checkpoints_are_dispatched_into_empty_models(
    make_model, tokens, tmp_path, device_map, tie
):
    saved = make_model(tie_word_embeddings=tie)
    saved.save_pretrained(tmp_path, max_shard_size="300KB")
    with init_empty_weights():
        model = AtmaForCausalLM(saved.config)
    model.tie_weights()
    model = load_checkpoint_and_dispatch(
        model,
        tmp_path,
        device_map="auto" if device_map == "auto" else layers_on_disk(),
        no_split_module_classes=model._no_split_modules,
        offload_folder=str(tmp_path / "offload"),
    ).eval()
    ids = tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, saved(ids).logits)


@pytest.mark.parametrize("device_map", ["auto", "cpu", "layers on disk"])
def test_from_pretrained_places_the_layers(make_model, tokens, tmp_path, device_map):
    make_model().save_pretrained(tmp_path / "model")
    if device_map == "layers on disk":
        device_map = layers_on_disk()
    model = AtmaForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=str(tmp_path / "offload")
    )
    same_as_plain(model, make_model, tokens)
    if isinstance(device_map, dict):
        model.save_pretrained(tmp_path / "again")
        again = AtmaForCausalLM.from_pretrained(tmp_path / "again")
        for name, value in make_model().state_dict().items():
            assert torch.equal(again.state_dict()[name], value), name


def test_a_dispatched_model_can_be_trained(make_model, tokens):
    ids = tokens(2, 9)
    model = dispatch_model(make_model(), {"": "cpu"}, force_hooks=True)
    plain = make_model()
    for each in (model, plain):
        each(ids, labels=ids).loss.backward()
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_initialisation_never_reads_a_parameter():
    """ZeRO-3 hands empty parameters to `_init_weights`: it may write them, and ask for nothing."""

    class Empty(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            name = getattr(function, "__name__", str(function))
            writes = name.endswith("_") or name in ("__get__", "__set__")
            assert writes, f"_init_weights calls {name} on a parameter"
            return super().__torch_function__(function, types, args, kwargs or {})

    model = AtmaForCausalLM(AtmaConfig.tiny())
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, Empty(parameter.data.new_empty(0)))
    for module in model.modules():
        model._init_weights(module)


if __name__ == "__main__":
    main()
