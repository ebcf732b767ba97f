# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Pipelines, the evaluation harness, quantisation, compilation and export, offline loading."""

import json
import os
import subprocess
import sys

import pytest
import torch
from lm_eval import evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
from torchao.utils import TorchAOBaseTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig, pipeline
from transformers.generation import CompileConfig
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging


@pytest.fixture
def texts(text):
    return lambda *lengths: [text(n, n + k) for k, n in enumerate(lengths)]


# Pipelines.


def test_a_pipeline_writes_the_same_text_in_every_batch_size(saved, texts):
    prompts = texts(9, 4, 7, 12, 1)
    with CaptureLogger(logging.get_logger("transformers.pipelines.base")) as messages:
        write = pipeline("text-generation", str(saved))
    assert "not supported" not in messages.out
    options = {"max_new_tokens": 8, "do_sample": False}
    alone = [write(prompt, **options)[0]["generated_text"] for prompt in prompts]
    for size in (2, 5):
        found = write(prompts, batch_size=size, **options)
        assert [row[0]["generated_text"] for row in found] == alone


# The evaluation harness.


def harness(saved, tokenizer, batch_size):
    model = AutoModelForCausalLM.from_pretrained(saved)
    return HFLM(model, tokenizer=tokenizer, batch_size=batch_size, max_batch_size=4)


@pytest.mark.parametrize("batch_size", [4, "auto"])
def test_the_harness_gets_the_same_answers_in_every_batch_size(saved, tokenizer, texts, batch_size):
    def ask(kind, arguments):
        return [Instance(kind, {}, pair, i) for i, pair in enumerate(arguments)]

    contexts, answers = texts(9, 4, 7, 12, 3), texts(2, 5, 1, 3, 4)
    pairs = [(a, " " + b) for a, b in zip(contexts, answers, strict=True)]
    until = [(a, {"until": ["<end>"], "max_gen_toks": 6}) for a in contexts]
    one, many = harness(saved, tokenizer, 1), harness(saved, tokenizer, batch_size)
    expected = one.loglikelihood(ask("loglikelihood", pairs))
    found = many.loglikelihood(ask("loglikelihood", pairs))
    for (a, a_greedy), (b, b_greedy) in zip(expected, found, strict=True):
        assert abs(a - b) < 1e-3 and a_greedy == b_greedy
    assert one.generate_until(ask("generate_until", until)) == many.generate_until(
        ask("generate_until", until)
    )


def test_the_harness_runs_a_local_task_on_remote_code(saved, texts, tmp_path):
    rows = [
        {"question": q, "choices": texts(2, 3), "answer": i % 2}
        for i, q in enumerate(texts(9, 4, 7, 12))
    ]
    data = tmp_path / "rows.json"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    task = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    results = []
    for size in (1, 4):
        model = HFLM(str(saved), trust_remote_code=True, device="cpu", batch_size=size)
        results.append(
            evaluate(model, {"local": ConfigurableTask(config=task)}, bootstrap_iters=0)["samples"][
                "local"
            ]
        )
    for one, four in zip(*results, strict=True):
        for (a, _), (b, _) in zip(one["filtered_resps"], four["filtered_resps"], strict=True):
            assert abs(float(a) - float(b)) < 1e-3


# Quantisation.


QUANTISED = {
    "int8": (Int8WeightOnlyConfig(version=2), 0.05),
    "int4": (IntxWeightOnlyConfig(torch.int4, PerGroup(32)), 0.8),
}
SPARED = {"lm_head", "retention_proj", "write_proj", "count_proj"}


@pytest.mark.parametrize("skips", [None, [".*down_proj"]], ids=["default", "own list"])
@pytest.mark.parametrize("kind", QUANTISED)
def test_weight_only_quantisation_spares_what_is_small(
    saved, make_model, tokens, close, tmp_path, kind, skips
):
    """Head, small gates, norms, taps and scalars, whatever else is spared."""
    config, tolerance = QUANTISED[kind]
    model = AutoModelForCausalLM.from_pretrained(
        saved,
        quantization_config=TorchAoConfig(config, modules_to_not_convert=skips),
        device_map="cpu",
    )
    spared = SPARED | ({"down_proj"} if skips else set())
    for name, p in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        is_linear = leaf == "weight" and isinstance(model.get_submodule(module), nn.Linear)
        quantised = is_linear and module.rpartition(".")[-1] not in spared
        assert isinstance(p, TorchAOBaseTensor) == quantised, name
        assert quantised or p.dtype == torch.float32, name
    ids = tokens(2, 9)
    with torch.no_grad():
        logits, expected = model(ids).logits, make_model()(ids).logits
        assert (logits - expected).norm() < tolerance * expected.norm()
        assert model.generate(ids, max_new_tokens=4, eos_token_id=None).shape == (2, 13)
        model.save_pretrained(tmp_path / "quantised")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised", device_map="cpu")
        close(again(ids).logits, logits)


@pytest.mark.parametrize("skips", [None, ["down_proj"]], ids=["default", "own list"])
@pytest.mark.parametrize(("kind", "tolerance"), [("8bit", 0.1), ("4bit", 0.8)])
def test_bitsandbytes_spares_what_is_small(
    saved, make_model, tokens, close, tmp_path, kind, tolerance, skips
):
    """And a step of LoRA reaches every adapter on top of the quantised weights."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    options = {f"load_in_{kind}": True, "llm_int8_skip_modules": skips}
    model = AutoModelForCausalLM.from_pretrained(
        saved, quantization_config=BitsAndBytesConfig(**options), device_map="cpu"
    )
    quantised = (bitsandbytes.nn.Linear8bitLt, bitsandbytes.nn.Linear4bit)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            spared = name.rpartition(".")[2] in SPARED | set(skips or ())
            assert isinstance(module, quantised) != spared, name
        is_quantised = isinstance(module, quantised)
        for leaf, p in module.named_parameters(recurse=False):
            assert is_quantised or p.dtype == torch.float32, (name, leaf)
    ids = tokens(2, 9)
    with torch.no_grad():
        logits, expected = model(ids).logits, make_model()(ids).logits
        assert (logits - expected).norm() < tolerance * expected.norm()
        assert model.generate(ids, max_new_tokens=4, eos_token_id=None).shape == (2, 13)
        model.save_pretrained(tmp_path / "quantised")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised", device_map="cpu")
        close(again(ids).logits, logits)
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(prepare_model_for_kbit_training(again), config)
    adapted(ids, labels=ids).loss.backward()
    for name, p in adapted.named_parameters():
        assert not p.requires_grad or p.grad.abs().max() > 0, name


# Compilation and export.


def test_text_written_by_inductor_is_that_of_eager(make_model, tokens):
    """In code that inductor made for the CPU; of the second call too."""
    model, ids = make_model(layer_types=["hybrid"]), tokens(2, 9)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    config = CompileConfig(fullgraph=True, backend="inductor", mode=None, dynamic=None)
    config._compile_all_devices = True
    expected = model.generate(ids, **options)
    for _ in range(2):
        found = model.generate(ids, cache_implementation="static", compile_config=config, **options)
        assert torch.equal(found, expected)


def test_a_compiled_training_step_is_one_graph_and_equals_eager(make_model, tokens, close):
    kinds = {"layer_types": ["conv", "hybrid"], "distractor_keys": 0}
    ids = tokens(2, 19)
    plain, model = make_model(**kinds).train(), make_model(**kinds).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for each in (plain, compiled):
        each(ids, labels=ids, use_cache=False).loss.backward()
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 1e-4 * a.grad.norm(), name


def test_the_prefill_exports(make_model, tokens, close):
    """At a fixed shape: in plain PyTorch, the operations choose their blocks by the length."""
    model = make_model(layer_types=["conv", "hybrid"])
    ids = tokens(2, 19)
    with torch.no_grad():
        program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False})
        found = program.module()(input_ids=tokens(2, 19, seed=5), use_cache=False)
        close(found.logits, model(tokens(2, 19, seed=5)).logits)


# Offline.


def test_loading_by_the_older_option_changes_nothing(saved, make_model, tokens):
    """`low_cpu_mem_usage` is what Transformers now always does."""
    ids = tokens(2, 9)
    for value in (True, False):
        model = AutoModelForCausalLM.from_pretrained(saved, low_cpu_mem_usage=value)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, make_model()(ids).logits)


def test_revisions_load_offline_from_a_read_only_cache(saved, make_model, tokens, close, tmp_path):
    """The Hub's own layout of a cache: snapshots of two revisions."""
    repository = tmp_path / "hub" / "models--someone--atma"
    other = make_model(seed=1)
    (repository / "refs").mkdir(parents=True)
    (repository / "snapshots").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    saved.rename(repository / "snapshots" / ("a" * 40))
    (repository / "refs" / "v2").write_text("b" * 40)
    other.save_pretrained(repository / "snapshots" / ("b" * 40))
    script = """
import sys, torch
sys.modules["atma"] = None
from transformers import AutoModelForCausalLM
ids = torch.tensor([[int(x) for x in sys.argv[2].split()]])
found = []
for revision in ("main", "v2", "b" * 40):
    model = AutoModelForCausalLM.from_pretrained(
        "someone/atma", trust_remote_code=True, revision=revision, code_revision=revision
    )
    with torch.no_grad():
        found.append(model(ids).logits)
torch.save(found, sys.argv[1])
"""
    ids = tokens(1, 9)
    for folder, _, files in os.walk(repository):
        for path in (folder, *(os.path.join(folder, file) for file in files)):
            os.chmod(path, 0o555)
    done = subprocess.run(
        [sys.executable, "-I", "-c", script, str(tmp_path / "found")]
        + [" ".join(map(str, ids[0].tolist()))],
        env={
            **os.environ,
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": str(tmp_path / "modules"),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    main, v2, commit = torch.load(tmp_path / "found", weights_only=True)
    with torch.no_grad():
        close(main, make_model()(ids).logits)
        close(v2, other(ids).logits)
    assert torch.equal(commit, v2)
