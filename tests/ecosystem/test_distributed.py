# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Two processes on the CPU train as one does; placement by accelerate changes nothing."""

import functools
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from accelerate import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from atma import AtmaConfig, AtmaForCausalLM, loss_atma
from atma.modeling_atma import AtmaDecoderLayer
from atma.plain_atma import is_sharded, is_sharded_linear
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_available

KINDS = [
    "ddp",
    "fsdp1",
    "fsdp1 bf16 weights",
    "accelerate's fsdp2",
    "accelerate's fsdp2 with its checkpointing",
    "accelerate's fsdp2, fused loss, in parts",
    "fsdp2",
    "fsdp2 offload",
    "fsdp2 checkpointed",
    "fsdp2 checkpointed bf16",
    "fsdp2, norm and head apart, fused loss, in parts",
    "fsdp2, norm and hooked head apart, fused loss, in parts",
]
HEAD_CALLS = []
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


def batches():
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        yield torch.randint(1, 101, (4, 17), generator=generator)


def shard(model, apart=False, **options):
    """One unit for each decoder layer, as Transformers and accelerate wrap them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    if apart:
        tail = [model.model.norm, model.lm_head]
        fully_shard(tail, mesh=mesh, reshard_after_forward=False, **options)
    return fully_shard(model, mesh=mesh, **options)


def shard_by_fsdp1(model):
    """Flat parameters need one dtype in a unit, as all our parameters have."""
    policy = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={AtmaDecoderLayer}
    )
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )


def shard_by_accelerate(model, **options):
    """As `accelerate launch` and Trainer do on GPUs; on CPUs accelerate itself takes DDP."""
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **options
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # it asks for one
    return accelerator.prepare(model, optimizer)[0]


def prepare(model, kind: str):
    # Fewer tokens than a row has: heads that are called in parts are called more than once.
    loss_atma.MODULE_CHUNK = 7
    model.config.fused_linear_cross_entropy = "fused loss" in kind
    if kind == "ddp":
        return Accelerator(cpu=True).prepare(model)
    if "fsdp1" in kind:
        return shard_by_fsdp1(model.bfloat16() if "bf16" in kind else model)
    if "accelerate" in kind:
        return shard_by_accelerate(model, activation_checkpointing="checkpointing" in kind)
    if "checkpointed" in kind:
        model.gradient_checkpointing_enable()
    if "hooked" in kind:
        model.lm_head.register_forward_hook(lambda *_: HEAD_CALLS.append(None))
    options = {"apart": "apart" in kind}
    if "offload" in kind:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if "bf16" in kind:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return shard(model, **options)


def train(model, rank: int = 0, world_size: int = 1, rows: int = 4) -> dict:
    """
    Two steps of SGD on every `world_size`-th row, at most `rows` of them at a time; gradients are
    means over the processes.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for ids in batches():
        parts, loss = ids[rank::world_size].split(rows), 0.0
        for i, part in enumerate(parts):
            if len(parts) > 1:
                model.set_requires_gradient_sync(i == len(parts) - 1)
            part_loss = model(input_ids=part, labels=part).loss / len(parts)
            part_loss.backward()
            loss = loss + part_loss
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if world_size > 1:
        dist.all_reduce(losses)
    return {"losses": losses / world_size, **full_weights(model)}


WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module.")


def full_weights(model) -> dict[str, torch.Tensor]:
    """The weights from all processes, by their own names."""
    found = {}
    with FullyShardedDataParallel.summon_full_params(model):
        for name, p in model.named_parameters():
            for wrapper in WRAPPERS:
                name = name.replace(wrapper, "")
            found[name] = (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
    return found


ZERO3 = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def train_by_zero3(folder: str, rank: int, world_size: int) -> dict:
    """
    Initialisation, loading, generation and two steps under ZeRO-3, which leaves parameters empty
    outside of the modules that use them, also for a loss that would rather read the head.
    """
    import deepspeed

    deepspeed.init_distributed("gloo")
    keep = HfDeepSpeedConfig(ZERO3)  # by it, Transformers knows what is to come

    def gathered(model) -> dict[str, torch.Tensor]:
        found = {}
        for name, p in model.named_parameters():
            with deepspeed.zero.GatheredParameters([p]):
                found[name] = p.detach().clone()
        return found

    torch.manual_seed(0)
    fresh = AtmaForCausalLM._from_config(AtmaConfig.tiny(zero_init_residual=False))
    model = AtmaForCausalLM.from_pretrained(folder, fused_linear_cross_entropy=True).train()
    results = {"empty": {len(p) for p in (*fresh.parameters(), *model.parameters())} == {0}}
    results |= {"fresh": gathered(fresh), "loaded": gathered(model)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=keep.config)[0]
    results["text"] = model.generate(next(batches()), synced_gpus=True, **OPTIONS)
    losses = []
    for ids in batches():
        ids = ids[rank::world_size]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    return {**results, "trained": {"losses": losses / world_size, **gathered(model)}}


def main():
    """What each process runs: every kind, one after the other."""
    folder, out = sys.argv[1:]
    dist.init_process_group("gloo")
    sharded_heads: list[str] = []
    results = {"sharded heads": sharded_heads}
    for kind in KINDS:
        model = AtmaForCausalLM.from_pretrained(folder).train()
        rows = 1 if "in parts" in kind else 4
        model = prepare(model, kind)
        if is_sharded(model) and is_sharded_linear(model.lm_head):
            sharded_heads.append(kind)
        results[kind] = train(model, dist.get_rank(), dist.get_world_size(), rows)
    results["head calls"] = len(HEAD_CALLS)
    if is_deepspeed_available():
        zero3 = train_by_zero3(folder, dist.get_rank(), dist.get_world_size())
        results |= {"zero3": zero3.pop("trained"), "zero3 parts": zero3}
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
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )
    found = torch.load(folder / "results", weights_only=True)
    alone = AtmaForCausalLM.from_pretrained(folder / "model").train()
    return {**found, "one process": train(alone)}


NEEDS_DEEPSPEED = pytest.mark.skipif(
    not is_deepspeed_available(), reason="DeepSpeed is not installed"
)


def test_a_sharded_head_is_called_once_in_each_pass(results):
    """Two steps of two parts each, forward and again in the backward pass: FSDP2 of torch 2.11
    gathers the parameters for one call only."""
    assert results["head calls"] == 8


def test_the_fused_loss_knows_the_heads_that_it_may_read(results):
    assert results["sharded heads"] == [
        "accelerate's fsdp2",
        "accelerate's fsdp2 with its checkpointing",
        "accelerate's fsdp2, fused loss, in parts",
        "fsdp2, norm and head apart, fused loss, in parts",
    ]


@pytest.mark.parametrize("kind", [*KINDS, pytest.param("zero3", marks=NEEDS_DEEPSPEED)])
def test_two_processes_train_as_one(results, make_model, kind):
    start, expected, found = make_model().state_dict(), results["one process"], results[kind]
    assert set(found) == set(expected)
    names = sorted(set(expected) - {"losses"})
    if "weights" in kind:  # steps are as small as the rounding of the weights themselves
        groups, tolerance = [], 0.01
    elif "bf16" in kind:  # as a whole: some gradients are mostly rounding
        groups, tolerance = [names], 0.2
    else:
        groups, tolerance = [[name] for name in names], 2e-4
    assert torch.allclose(found["losses"], expected["losses"], rtol=tolerance)
    for group in groups:
        moved = torch.cat([(expected[name] - start[name]).flatten() for name in group])
        off = torch.cat([(found[name] - expected[name]).flatten() for name in group])
        assert off.norm() <= tolerance * moved.norm() + 1e-7, group


@NEEDS_DEEPSPEED
def test_zero3_initialises_and_loads_what_is_meant(results, make_model):
    parts, designed = results["zero3 parts"], AtmaConfig.tiny(zero_init_residual=False)
    assert parts["empty"]
    for name, built in AtmaForCausalLM(designed).state_dict().items():
        found = parts["fresh"][name]
        assert found.shape == built.shape, name
        if built.std() > 0:
            assert 0.5 < (found.std() / built.std()).item() < 2, name
        else:
            assert torch.equal(found, built), name
    for name, value in make_model().state_dict().items():
        assert torch.equal(parts["loaded"][name], value), name
    assert torch.equal(parts["text"], make_model().generate(next(batches()), **OPTIONS))


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
