# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The scripts for data and training: exact tokens, one order, one recipe, runs that go on."""

import gc
import json
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from atma import AtmaForCausalLM
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPTS = REPOSITORY / "scripts"
# At the end, because scripts/evaluate.py has the name of a library.
sys.path.append(str(SCRIPTS))

from benchmarks.scaling import first_gpus  # noqa: E402
from experiments import training  # noqa: E402
from experiments.checkpoints import last_checkpoint  # noqa: E402
from experiments.optimizer import (  # noqa: E402
    MuonWithAdamW,
    build_optimizer,
    parameter_groups,
    step_muon,
)
from experiments.preparation import Records, Split, TextTree, prepare  # noqa: E402
from experiments.rows import Rows, isolate_documents, repeat_passage, stack_rows  # noqa: E402
from experiments.settings import (  # noqa: E402
    OptimizerSettings,
    RunSettings,
    build,
    load_run,
    merge,
    parse_override,
)
from experiments.shards import Shards  # noqa: E402
from experiments.tokenizer import load_tokenizer, train_tokenizer  # noqa: E402

SPLIT = Split(validation_fraction=0.15, long_tokens=9000, long_fraction=1.0)
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Sources of this very Python, one of them long, and an empty file."""
    library = Path(os.__file__).parent
    names = "abc bisect calendar cmd colorsys contextlib copy csv fnmatch gzip hashlib heapq"
    names += " imaplib json/decoder keyword nturl2path posixpath queue random runpy sched"
    found = {name: (library / f"{name}.py").read_text() for name in names.split()}
    return found | {"empty": ""}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, texts) -> Path:
    """Prepared data: text files, a tokenizer, shards."""
    root = tmp_path_factory.mktemp("experiments")
    for name, text in texts.items():
        path = root / "texts" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "texts" / "binary.py").write_bytes(b"\xff\xfe\x00")
    (root / "texts" / "other.xyz").write_text("not asked for")
    tokenizer = train_tokenizer(list(texts.values())[:6], 400)
    tokenizer.save_pretrained(root / "data" / "tokenizer")
    write(TextTree([str(root / "texts")], ["*.py"], 2**20), root / "data")
    return root


def write(source, folder: Path, **options) -> dict:
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    options = {"block_bytes": 40_000, **options}
    return prepare(source, folder, len(tokenizer), tokenizer.eos_token_id, SPLIT, {}, **options)


def new_folder(folder: Path, name: str) -> Path:
    new = folder / name
    shutil.copytree(folder / "data" / "tokenizer", new / "tokenizer")
    return new


def contents(folder: Path) -> dict[str, bytes]:
    names = [*folder.glob("*.bin"), *folder.glob("*.npy"), folder / "meta.json"]
    return {path.name: path.read_bytes() for path in names}


def all_documents(folder: Path) -> dict[str, list[str]]:
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    found = {}
    for split in ("train", "validation", "long"):
        shards = Shards(folder, split)
        ids = [shards.document(i) for i in range(len(shards.documents))]
        assert all(document[-1] == tokenizer.eos_token_id for document in ids)
        found[split] = [tokenizer.decode(document[:-1]) for document in ids]
    return found


def test_every_text_is_in_one_split_whole_and_counted(folder, texts):
    found = all_documents(folder / "data")
    assert sorted(sum(found.values(), [])) == sorted(text for text in texts.values() if text)
    meta = json.loads((folder / "data" / "meta.json").read_text())
    assert meta["skipped_documents"] == 1  # the binary one
    for split, documents in found.items():
        shards = Shards(folder / "data", split)
        assert documents, split
        assert meta["splits"][split] == {
            "documents": len(documents),
            "tokens": shards.num_tokens,
            "bytes": sum(len(text.encode()) for text in documents),
        }
        is_long = shards.documents["tokens"] >= SPLIT.long_tokens
        assert is_long.all() if split == "long" else not is_long.any()


@pytest.mark.parametrize("kind", ["text", "json", "parquet"])
def test_an_interrupted_preparation_goes_on_where_it_stopped(folder, texts, kind):
    from datasets import Dataset

    kept = [text for text in texts.values() if text]
    if kind == "text":
        source = TextTree([str(folder / "texts")], ["*.py"], 2**20)
    else:
        path = folder / f"texts.{kind}"
        records = Dataset.from_dict({"text": kept})
        records.to_json(path) if kind == "json" else records.to_parquet(path)
        source = Records(str(path), kind, None, "train", "text")

    def fail_after_two(totals, seen=[]):  # noqa: B006
        seen.append(totals)
        if len(seen) > 2:
            raise KeyboardInterrupt

    whole, parts = new_folder(folder, f"whole-{kind}"), new_folder(folder, f"parts-{kind}")
    write(source, whole)
    with pytest.raises(KeyboardInterrupt):
        write(source, parts, on_block=fail_after_two)
    with pytest.raises(FileNotFoundError, match="goes on"):
        Shards(parts, "train")
    with (parts / "progress.jsonl").open("a") as file:
        file.write('{"block": 2, "sta')  # as a machine that went down leaves it
    write(source, parts)
    assert contents(parts) == contents(whole)
    assert sorted(sum(all_documents(parts).values(), [])) == sorted(kept)
    with pytest.raises(ValueError, match="block_bytes"):
        write(source, parts, block_bytes=50_000)


def test_a_limit_ends_after_the_same_block_for_any_number_of_workers(folder):
    source = TextTree([str(folder / "texts")], ["*.py"], 2**20)
    one, two = new_folder(folder, "one"), new_folder(folder, "two")
    limits = {"max_tokens": 20_000, "block_bytes": 10_000}
    for each, workers in ((one, 1), (two, 2)):
        meta = write(source, each, workers=workers, **limits)
        assert 20_000 <= meta["splits"]["train"]["tokens"] < 40_000
    assert contents(one) == contents(two)


def test_rows_are_the_stream_in_an_order_of_the_seed(folder):
    shards = Shards(folder / "data", "train")
    stream = shards.read(0, shards.num_tokens)
    assert len(shards._ids) > 1  # rows cross the borders of shards
    length = 96
    plain = Rows(shards, length, None)
    for i in (0, 7, len(plain) - 1):
        assert plain[i]["input_ids"].tolist() == stream[i * length : (i + 1) * length].tolist()
    count = shards.num_tokens // length
    rows = Rows(shards, length, 2 * count, seed=3)
    passes = [
        [tuple(rows[i + e * count]["input_ids"].tolist()) for i in range(count)] for e in (0, 1)
    ]
    expected = sorted(tuple(plain[i]["input_ids"].tolist()) for i in range(count))
    assert sorted(passes[0]) == sorted(passes[1]) == expected
    assert passes[0] != passes[1]
    again = Rows(Shards(folder / "data", "train"), length, 5, seed=3)
    assert [tuple(again[i]["input_ids"].tolist()) for i in range(5)] == passes[0][:5]
    with pytest.raises(ValueError, match="more text"):
        Rows(shards, shards.num_tokens + 1, None)


def test_a_passage_stands_twice_in_a_share_of_the_rows(folder):
    shards = Shards(folder / "data", "train")
    length = 96
    plain = Rows(shards, length, 200, seed=3)
    rows = Rows(shards, length, 200, seed=3, repeated_rows=0.25)
    places, copies = [], []
    for i in range(200):
        before, after = (x[i]["input_ids"].numpy() for x in (plain, rows))
        assert torch.equal(plain[i]["starts"], rows[i]["starts"])
        changed = np.flatnonzero(before != after)
        if len(changed):
            second, stop = changed[0], changed[-1] + 1
            copied = after[second:stop].tolist()
            copies.append(copied)
            starts = range(0, second - len(copied) + 1)
            places += [s for s in starts if after[s : s + len(copied)].tolist() == copied][:1]
            assert len(copied) <= length // 2
    # Every change is a copy of what stands before it, in about a quarter of the rows.
    changed = sum(not torch.equal(plain[i]["input_ids"], rows[i]["input_ids"]) for i in range(200))
    assert len(places) == changed and 30 < changed < 70 and len(set(places)) > 10
    assert len({len(copy) for copy in copies}) > 10
    with pytest.raises(ValueError, match="seed"):
        Rows(shards, length, 200, repeated_rows=0.25)
    again = Rows(shards, length, 200, seed=3, repeated_rows=0.25)
    assert all(torch.equal(again[i]["input_ids"], rows[i]["input_ids"]) for i in (199, 3, 50))


@pytest.mark.parametrize("total", [1, 2, 5, 33, 64])
def test_passages_of_short_rows_fit(total):
    for seed in range(50):
        ids = np.arange(total)
        repeat_passage(ids, np.random.default_rng(seed))
        assert len(ids) == total and (ids <= np.arange(total)).all()


def test_isolated_documents_are_each_read_alone(folder):
    shards = Shards(folder / "data", "train")
    rows = Rows(shards, 512, None)
    first = int(shards.document_starts[1]) // 512
    batch = isolate_documents([rows[first], rows[first + 1]])
    boundaries = sorted(set(batch["cu_seq_lens_q"].tolist()))
    assert int(shards.document_starts[1]) - first * 512 in boundaries and 512 in boundaries
    torch.manual_seed(0)
    settings = run_settings(folder, "isolated", model=TINY | {"zero_init_residual": False})
    model = training.build_model(settings, load_tokenizer(str(folder / "data/tokenizer"))).eval()
    total, count = 0.0, 0
    for start, stop in zip(boundaries[:-1], boundaries[1:], strict=True):
        if stop - start > 1:
            ids = batch["input_ids"][:, start:stop]
            total += model(ids, labels=ids).loss.item() * (stop - start - 1)
            count += stop - start - 1
    assert model(**batch).loss.item() == pytest.approx(total / count, rel=1e-5)
    ids = stack_rows([rows[first], rows[first + 1]])["input_ids"]
    assert torch.equal(ids.view(1, -1), batch["input_ids"])


def run_settings(folder: Path, name: str, **changes) -> RunSettings:
    values = {
        "data": str(folder / "data"),
        "output": str(folder / name),
        "model": TINY,
        "sequence_length": 48,
        "tokens_per_step": 48 * 8,
        "steps": 6,
        "rows_per_device": 2,
        "trainer": {"use_cpu": True, "logging_steps": 1, "save_steps": 3, "save_total_limit": None},
    }
    return build(RunSettings, merge(values, changes))


def train(settings: RunSettings, deadline: float | None = None) -> dict | None:
    return training.train(training.build_trainer(settings, deadline))


def test_every_parameter_has_its_place_in_the_recipe():
    from atma import AtmaConfig

    model = AtmaForCausalLM(AtmaConfig.tiny())
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = {
        group: {names[parameter] for parameter in parameters}
        for group, parameters in parameter_groups(model).items()
    }
    assert groups["embedding"] == {"model.embed_tokens.weight"}
    assert groups["head"] == {"lm_head.weight"}
    assert all(name.endswith("proj.weight") for name in groups["matrices"])
    assert "model.layers.2.mixer.memory.out_proj.weight" in groups["matrices"]
    assert {"model.layers.2.mixer.null_value", "lm_head.bias"} <= groups["other"]
    assert sum(map(len, groups.values())) == len(names)
    rates = {g["name"]: g["lr"] for g in build_optimizer(model, OptimizerSettings()).param_groups}
    assert rates == {"matrices": 0.02, "embedding": 0.3, "head": 1 / 320, "other": 0.01}
    tied = AtmaForCausalLM(AtmaConfig.tiny(tie_word_embeddings=True))
    assert len(parameter_groups(tied)["embedding"]) == 1 and not parameter_groups(tied)["head"]


def test_one_optimizer_steps_as_muon_and_adamw_do_and_goes_on_from_its_state():
    def parameters():
        torch.manual_seed(1)
        return [torch.nn.Parameter(torch.randn(*shape)) for shape in ((6, 4), (5, 6), (7,), (3, 3))]

    def step(optimizers, parameters, seed):
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()

    def both(parameters):
        muon = {"params": parameters[:2], "lr": 0.02, "weight_decay": 0.01, "momentum": 0.9}
        adamw = [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(parameters[2:])]
        return MuonWithAdamW([muon], adamw, betas=(0.8, 0.95), weight_decay=0.0)

    ours, theirs = parameters(), parameters()
    optimizer = both(ours)
    separate = [
        torch.optim.Muon(theirs[:2], lr=0.02, weight_decay=0.01, momentum=0.9),
        torch.optim.AdamW(theirs[2:3], lr=0.1, betas=(0.8, 0.95), weight_decay=0.0),
        torch.optim.AdamW(theirs[3:], lr=0.2, betas=(0.8, 0.95), weight_decay=0.0),
    ]
    for seed in (1, 2):
        step([optimizer], ours, seed)
        step(separate, theirs, seed)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

    restored = both(ours)
    restored.load_state_dict(optimizer.state_dict())
    for group in restored.param_groups:
        group["lr"] *= 0.5  # what a schedule does
    for group in separate:
        group.param_groups[0]["lr"] *= 0.5
    step([restored], ours, 3)
    step(separate, theirs, 3)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def straight(folder) -> tuple[Path, dict]:
    """A run of six steps in one process, from start to end."""
    torch.manual_seed(0)
    settings = run_settings(folder, "straight")
    return Path(settings.output), train(settings)


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


@pytest.mark.smoke
def test_a_run_keeps_the_recipe_and_says_what_it_did(straight):
    output, result = straight
    state = json.loads((output / "checkpoint-6" / "trainer_state.json").read_text())
    logs = [entry for entry in state["log_history"] if "loss" in entry]
    # Constant for 30% of six steps, whole steps: 1; then down to zero, reached after the last.
    rates = [entry["learning_rate"] for entry in logs]
    assert rates == pytest.approx([0.02 * x for x in (1, 1, 0.8, 0.6, 0.4, 0.2)])
    assert all(entry["tokens_per_second"] > 0 for entry in logs[1:])
    assert result["losses"][0][1] == pytest.approx(np.log(400), abs=0.01)  # the head starts at 0
    assert result["losses"][-1][1] < result["losses"][0][1] - 0.2
    assert result["tokens"] == 6 * 48 * 8
    model = AtmaForCausalLM.from_pretrained(output / "model")
    assert model.config.use_cache and model.config.vocab_size == 400
    assert len(load_tokenizer(str(output / "model"))) == 400


def test_the_trainer_reads_the_rows_in_their_order(folder):
    trainer = training.build_trainer(run_settings(folder, "unused", repeated_rows=0.5))
    rows = Rows(Shards(folder / "data", "train"), 48, 6 * 8, seed=0, repeated_rows=0.5)
    for i, batch in zip(range(3), trainer.get_train_dataloader(), strict=False):
        expected = stack_rows([rows[2 * i], rows[2 * i + 1]])
        assert torch.equal(batch["input_ids"], expected["input_ids"])


class ReadsOfTheHost(TorchDispatchMode):
    """Where values are read back from tensors, outside of optimizers (which do it on the CPU)."""

    def __init__(self):
        super().__init__()
        self.places = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten._local_scalar_dense.default:
            stack = traceback.extract_stack()
            if not any("torch/optim" in frame.filename for frame in stack):
                self.places += [f"{frame.filename}:{frame.lineno}" for frame in stack[-6:-1]]
        return operator(*args, **(kwargs or {}))


def test_no_step_waits_for_the_device(folder):
    """A deadline is set; between logs nothing is read back, so that launches run ahead of a GPU."""
    on_gpu = torch.cuda.is_available()
    trainer = {"use_cpu": not on_gpu, "logging_steps": 100, "save_steps": 100}
    settings = run_settings(folder, "ahead", trainer=trainer)
    watched = ReadsOfTheHost()

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                watched.__enter__()
                if on_gpu:
                    torch.cuda.set_sync_debug_mode("error")

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                watched.__exit__(None, None, None)
                if on_gpu:
                    torch.cuda.set_sync_debug_mode("default")

    run = training.build_trainer(settings, deadline=float("inf"))
    run.add_callback(Watch())
    run.train()
    assert run.state.global_step == 6 and not watched.places


def test_one_loss_that_is_not_finite_stays_in_its_own_log(folder, monkeypatch):
    run = training.build_trainer(run_settings(folder, "infinite", trainer={"save_steps": 100}))
    step = run.training_step

    def training_step(*args, **kwargs):
        loss = step(*args, **kwargs)
        return loss * float("inf") if run.state.global_step == 2 else loss

    monkeypatch.setattr(run, "training_step", training_step)
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert [bool(np.isfinite(loss)) for loss in losses] == [True, True, False, True, True, True]


def test_a_setting_of_accelerate_keeps_the_others(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for given in ({}, {"accelerator_config": {"even_batches": False}}):
        arguments = training.training_arguments(run_settings(folder, "unused", trainer=given))
        assert arguments.accelerator_config.non_blocking
        assert arguments.accelerator_config.even_batches == (not given)


def test_a_folder_of_another_run_is_refused_before_anything_is_lost(folder):
    train(run_settings(folder, "first", steps=2))
    before = (folder / "first" / "result.json").read_bytes()
    for changes, name in (({"steps": 3}, "steps was 2, is 3"), ({"seed": 1}, "seed was 0, is 1")):
        with pytest.raises(ValueError, match=name):
            train(run_settings(folder, "first", **{"steps": 2} | changes))
    assert (folder / "first" / "result.json").read_bytes() == before
    # What an earlier version wrote down, which did not know the data, is no other run.
    begun = folder / "first" / "run_settings.json"
    settings = json.loads(begun.read_text())
    begun.write_text(json.dumps({n: v for n, v in settings.items() if n != "data"}))
    train(run_settings(folder, "first", steps=2))
    # Neither may the data, wherever they lie; but a folder in which nothing was done is free.
    shutil.copytree(folder / "data", folder / "moved")
    train(run_settings(folder, "first", steps=2, data=str(folder / "moved")))
    train_tokenizer(["other text"], 400).save_pretrained(folder / "moved" / "tokenizer")
    with pytest.raises(ValueError, match="settings .data; "):
        train(run_settings(folder, "first", steps=2, data=str(folder / "moved")))
    (folder / "begun").mkdir()
    shutil.copy(folder / "first" / "run_settings.json", folder / "begun")
    training.check_start(run_settings(folder, "begun", steps=3))
    # How it is run may change.
    changes = {"steps": 2, "rows_per_device": 4, "trainer": {"save_steps": 50}}
    train(run_settings(folder, "first", **changes))


def test_a_run_that_was_stopped_goes_on_bitwise(folder):
    changes = {"steps": 4, "model": {"distractor_keys": 3}, "trainer": {"save_steps": 10}}
    settings = run_settings(folder, "stopped", **changes)
    assert train(settings, deadline=0.0) is None  # after the first step
    assert (folder / "stopped" / "checkpoint-1").is_dir()
    assert not (folder / "stopped" / "result.json").exists()
    train(settings)
    train(run_settings(folder, "whole", **changes))
    expected = weights(folder / "whole")
    for name, weight in weights(folder / "stopped").items():
        assert torch.equal(weight, expected[name]), name


def test_workers_that_tokenise_start_without_torch():
    """There is one for each core, and importing torch and Transformers takes seconds."""
    code = "import sys, experiments.preparation; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=SCRIPTS, capture_output=True, text=True
    )
    assert found.stdout == "False\n", found.stderr


def test_a_checkpoint_that_was_cut_short_is_passed_over(tmp_path):
    assert last_checkpoint(tmp_path / "nothing") is None
    for step in (9, 10, 11):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if step < 11:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def test_two_processes_train_as_one_and_one_goes_on_for_them(folder, straight, together):
    """With DDP, the same rows in every step; then a resume in one process."""
    expected = np.array(straight[1]["losses"])
    found = json.loads((folder / "two" / "result.json").read_text())
    assert found["devices"] == 2
    assert np.allclose(np.array(found["losses"]), expected, rtol=1e-3)
    shutil.copytree(folder / "two" / "checkpoint-3", folder / "resumed" / "checkpoint-3")
    resumed = train(run_settings(folder, "resumed"))
    assert np.allclose(np.array(resumed["losses"]), expected, rtol=1e-3)


def test_sharded_matrices_are_orthogonalised_whole(together):
    """FSDP2: Muon on DTensors, put into an optimizer that was made before, as accelerate does."""
    alone, model = sharded_start()
    assert together["losses"] == pytest.approx(sharded_training(model, alone), rel=1e-3)
    moved = [together["weights"][name] - p for name, p in sharded_start()[1].named_parameters()]
    off = [together["weights"][name] - p for name, p in model.named_parameters()]
    assert sum(x.norm() ** 2 for x in off) ** 0.5 < 0.005 * sum(x.norm() ** 2 for x in moved) ** 0.5


def test_sharded_matrices_are_stepped_as_whole_ones(together):
    """As `torch.optim.Muon` does in one process, also beside matrices that are not sharded."""
    muon, stepped = steps_of_muon(lambda x: x)
    for found, expected in zip(together["stepped"], stepped, strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-6)
    for found, parameter in zip(together["momenta"], muon.param_groups[0]["params"], strict=True):
        assert torch.equal(found, muon.state[parameter]["momentum_buffer"])


def steps_of_muon(shard):
    """Three steps on matrices that `shard` takes, with changing rates, and one that stays whole."""
    generator = torch.Generator().manual_seed(7)
    sizes = ((7, 5), (1, 6), (3, 16), (4, 4))
    start = [torch.randn(*size, generator=generator) for size in sizes]
    parameters = [torch.nn.Parameter(shard(x)) for x in start[:-1]]
    parameters.append(torch.nn.Parameter(start[-1]))
    muon = torch.optim.Muon(parameters, momentum=0.9, weight_decay=0.1)
    for rate in (0.1, 0.3, 0.2):
        for i, (parameter, size) in enumerate(zip(parameters, sizes, strict=True)):
            gradient = torch.randn(*size, generator=generator)
            parameter.grad = shard(gradient) if i < len(sizes) - 1 else gradient
        parameters[0].grad = None if rate == 0.3 else parameters[0].grad
        muon.param_groups[0]["lr"] = rate
        with torch.no_grad():
            step_muon(muon)
    return muon, [whole(parameter) for parameter in parameters]


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def test_gathered_matrices_do_not_wait_for_the_collector(one_process_group):
    mesh = init_device_mesh("cpu", (1,))
    gc.collect()
    gc.disable()
    try:
        steps_of_muon(lambda x: distribute_tensor(x, mesh, [Shard(0)]))
        sizes = [tuple(x.shape) for x in gc.get_objects() if type(x) is torch.nn.Parameter]
        assert (3, 16) not in sizes
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def together(folder) -> dict:
    """What two processes found; see `main`."""
    settings = run_settings(folder, "two")
    values = {**vars(settings), "optimizer": {}}
    (folder / "two.json").write_text(json.dumps(values))
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        + [__file__, str(folder / "two.json"), str(folder / "two.pt")],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return torch.load(folder / "two.pt", weights_only=True)


def sharded_start():
    from atma import AtmaConfig

    torch.manual_seed(0)
    model = AtmaForCausalLM(AtmaConfig.tiny(**TINY, vocab_size=101, zero_init_residual=False))
    return build_optimizer(model, OptimizerSettings()), model


def sharded_training(model, optimizer, rank: int = 0, world_size: int = 1) -> list[float]:
    generator, losses = torch.Generator().manual_seed(5), []
    for _ in range(3):
        ids = torch.randint(101, (4, 64), generator=generator)[rank::world_size]
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if world_size > 1:
        torch.distributed.all_reduce(losses)
    return (losses / world_size).tolist()


def main() -> None:
    """In each of two processes: a run with DDP, and steps with FSDP2."""
    from torch.distributed.fsdp import fully_shard

    settings, out = sys.argv[1:]
    train(build(RunSettings, json.loads(Path(settings).read_text())))
    optimizer, model = sharded_start()
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = dict(model.named_parameters())
    for group, members in zip(optimizer.param_groups, order, strict=True):
        group["params"] = [sharded[name] for name in members]
    losses = sharded_training(model, optimizer, torch.distributed.get_rank(), 2)
    found = {name: whole(parameter) for name, parameter in sharded.items()}
    muon, stepped = steps_of_muon(lambda x: distribute_tensor(x, mesh, [Shard(0)]))
    momenta = [whole(muon.state[p]["momentum_buffer"]) for p in muon.param_groups[0]["params"]]
    if torch.distributed.get_rank() == 0:
        results = {"losses": losses, "weights": found, "stepped": stepped, "momenta": momenta}
        torch.save(results, out)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_the_original_start_leaves_the_convolutions_dead(folder):
    tokenizer = load_tokenizer(str(folder / "data/tokenizer"))
    batch = stack_rows([Rows(Shards(folder / "data", "train"), 48, 1)[0]])
    for zero in (False, True):
        settings = run_settings(folder, "unused", zero_conv_in_proj=zero)
        model = training.build_model(settings, tokenizer)
        with torch.no_grad():  # the head passes gradients on
            model.lm_head.weight.normal_(std=0.1)
        model(**batch).loss.backward()
        alive = [
            p.grad.any() for n, p in model.named_parameters() if "0.mixer" in n and "weight" in n
        ]
        assert any(alive) is not zero


def test_layers_are_compiled_in_place(folder):
    tokenizer = load_tokenizer(str(folder / "data/tokenizer"))
    plain, compiled = (
        training.build_model(run_settings(folder, "unused", compile_layers=compiled), tokenizer)
        for compiled in (False, True)
    )
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert all(layer._compiled_call_impl is not None for layer in compiled.model.layers)


@pytest.fixture
def one_process_group(tmp_path):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_layers_stay_whole_graphs_under_ddp(folder, monkeypatch, one_process_group):
    """Weights of a layer that fill several gradient buckets, of 1 MiB the first, are one graph."""
    tokenizer = load_tokenizer(str(folder / "data/tokenizer"))
    settings = run_settings(
        folder, "unused", compile_layers=True, model={"hidden_size": 256, "num_hidden_layers": 1}
    )
    batch = stack_rows([Rows(Shards(folder / "data", "train"), 48, 1)[0]])
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_layer = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **kw: compile_layer(self, backend=backend, **kw)
    )
    with torch._dynamo.config.patch(optimize_ddp=True):
        model = DistributedDataParallel(training.build_model(settings, tokenizer))
        model(**batch).loss.backward()
    assert len(graphs) == 1


@pytest.mark.parametrize("given", ["nothing", "a policy"])
def test_fsdp2_adds_up_gradients_in_fp32(folder, given, monkeypatch):
    """By the plugin that accelerate would make on GPUs; a policy that someone chose stays."""
    chosen = MixedPrecisionPolicy(torch.bfloat16, torch.float16)
    policy = "bf16" if given == "nothing" else chosen
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=policy)
    create = Trainer.create_accelerator_and_postprocess

    def create_with_plugin(self):
        create(self)
        self.accelerator.state.fsdp_plugin = plugin

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", create_with_plugin)
    training.build_trainer(run_settings(folder, "unused"))
    expected = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    assert plugin.mixed_precision_policy == (expected if given == "nothing" else chosen)


def test_a_benchmark_takes_no_gpu_that_it_was_not_given(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert first_gpus(2) == "0,1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,GPU-8a")
    assert first_gpus(2) == "5,3" and first_gpus(3) == "5,3,GPU-8a"


def test_compiled_layers_are_not_copied_to_several_gpus(folder, monkeypatch):
    """One process that sees two GPUs: `Trainer` would wrap the model in `DataParallel`."""
    monkeypatch.setattr(training.TrainingArguments, "n_gpu", property(lambda self: 2))
    training.training_arguments(run_settings(folder, "unused"))
    with pytest.raises(ValueError, match="accelerate launch"):
        training.training_arguments(run_settings(folder, "unused", compile_layers=True))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stepz": 3}, "Unknown setting stepz"),
        ({"optimizer": {"lr": 3}}, "Unknown setting optimizer.lr"),
        ({"steps": "many"}, "steps must be of type"),
        ({"trainer": {"max_steps": 3}}, "follows from steps"),
        ({"optimizer": {"matrices": "sgd"}}, "muon or adamw"),
        ({"weights": "int8"}, "weights must be"),
        ({"repeated_rows": 1.5}, "from 0 to 1"),
        ({"repeated_rows": 0.5, "document_boundaries": True}, "set one of them"),
    ],
)
def test_settings_that_mean_nothing_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        build(RunSettings, {"data": "a", "output": "b", **values})


def test_settings_that_do_not_fit_are_refused(folder):
    with pytest.raises(ValueError, match="Incomplete"):
        build(RunSettings, {"data": "a"})
    with pytest.raises(ValueError, match="rows_per_device"):
        run_settings(folder, "unused").accumulation_steps(3)
    for model, message in (
        ({"hidden": 3}, "no field 'hidden'"),
        ({"from_pretrained": 3}, "no field 'from_pretrained'"),
        ({"vocab_size": 100}, "has 400 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            training.build_trainer(run_settings(folder, "unused", model=model))


def test_overrides_reach_into_the_yaml_file(tmp_path):
    assert parse_override("model.layer_types=[conv, hybrid]") == {
        "model": {"layer_types": ["conv", "hybrid"]}
    }
    changes = ["model.use_memory=false", "optimizer.head_lr=1e-3", "data=/x"]
    settings = load_run(SCRIPTS / "configs" / "small.yaml", changes)
    assert settings.data == "/x" and settings.optimizer.head_lr == 1e-3
    assert settings.model["use_memory"] is False and settings.model["hidden_size"] == 512


if __name__ == "__main__":
    main()
