# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The scripts for measurements: long inputs read right, needles, grids, tables, fine-tuning."""

import copy
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPTS = REPOSITORY / "scripts"
# At the end, because scripts/evaluate.py has the name of a library.
sys.path.append(str(SCRIPTS))

from experiments import grid  # noqa: E402
from experiments.evaluation import Evaluation, EvaluationSettings  # noqa: E402
from experiments.files import write_json  # noqa: E402
from experiments.metrics import BitsPerByte, NeedleAccuracy  # noqa: E402
from experiments.needles import TASKS, Prompts, needle_scores  # noqa: E402
from experiments.plots import plot_all, report  # noqa: E402
from experiments.reading import Reader  # noqa: E402
from experiments.refusals import refuse_missing_path  # noqa: E402
from experiments.settings import RunSettings, build, load_run  # noqa: E402
from experiments.shards import Shards, token_dtype, write_shard  # noqa: E402
from experiments.tokenizer import train_tokenizer  # noqa: E402


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(f"script_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer():
    text = Path(grid.__file__).read_text()
    return train_tokenizer([text], 400)


@pytest.fixture(scope="module")
def shards(tmp_path_factory, tokenizer) -> Shards:
    """Three long documents, of which two are the same."""
    folder = tmp_path_factory.mktemp("shards")
    texts = [Path(f).read_text() for f in (grid.__file__, __file__, grid.__file__)]
    documents = [
        np.array(tokenizer(text, verbose=False).input_ids, token_dtype(400)) for text in texts
    ]
    index = [
        (len(d), len(t.encode()), hash(t) % 2**64) for d, t in zip(documents, texts, strict=True)
    ]
    write_shard(folder, "long-00000", documents, index)
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "meta.json").write_text(json.dumps({"dtype": "<u2"}))
    return Shards(folder, "long")


@pytest.fixture(scope="module")
def model(make_model):
    return make_model(vocab_size=400)


SETTINGS = EvaluationSettings(
    lengths=[128, 256],
    documents=2,
    min_documents=2,
    scored_tokens=40,
    depths=[0.0, 0.5],
    needles=3,
    generated=2,
    tokens_at_once=512,
    chunk=50,
)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "overrides",
    [{}, {"attention_type": "rope"}, {"attention_type": "nope", "attention_window": 20}],
    ids=["polar", "rope", "window"],
)
def test_chunks_through_the_cache_read_as_one_call_does(make_model, tokens, close, overrides):
    model, ids = make_model(**overrides), tokens(2, 101)
    with torch.no_grad():
        logits = model(ids).logits
    expected = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    for chunk in (0, 33, None):
        reader = Reader(model, chunk)
        close(reader.token_losses(ids), expected, 2e-3)
        close(reader.last_losses(ids, 40), expected[:, -40:], 2e-3)
        close(reader.logits(reader.last_hidden_states(ids, 7)), logits[:, -7:], 2e-3)
    cache = Reader(model, 33).fill(ids[:, :-1])
    assert cache.get_seq_length() == 100
    close(model(ids[:, -1:], past_key_values=cache).logits[:, -1], logits[:, -1], 2e-3)


@pytest.mark.parametrize("task", sorted(TASKS))
@pytest.mark.parametrize("depth", [0.0, 0.4, 1.0])
def test_a_prompt_has_its_length_and_its_needle_at_its_depth(tokenizer, task, depth):
    text = np.array(tokenizer("some real text without numbers\n" * 30).input_ids)
    prompts = Prompts(tokenizer, text, seed=1)
    prompt, answer = prompts.draw(task, 700, depth, 2)
    assert len(prompt) + len(answer) == 700
    words, wanted = tokenizer.decode(prompt), tokenizer.decode(answer).strip()
    place = words.find(wanted) / len(words)
    assert depth - 0.2 < place < depth + 0.2
    without, same = prompts.draw(task, 700, depth, 2, present=False)
    assert len(without) == len(prompt) and same.tolist() == answer.tolist()
    assert wanted not in tokenizer.decode(without)
    again = Prompts(tokenizer, text, seed=1).draw(task, 700, depth, 2)
    assert again[0].tolist() == prompt.tolist()
    assert prompts.draw(task, 700, depth, 3)[1].tolist() != answer.tolist()
    with pytest.raises(ValueError, match="no room"):
        prompts.draw(task, 20, depth, 0)


def test_induction_repeats_the_very_tokens_and_decides_digit_by_digit(tokenizer):
    prompts = Prompts(tokenizer, np.zeros(40, np.int64), seed=0)
    prompt, answer = prompts.draw("induction", 300, 0.0, 0)
    digits = prompts.digits(answer)
    assert len(digits) == 5
    assert all(tokenizer.decode(answer[i]).strip().isdigit() for i in digits)
    statement = prompt[: np.argmax(prompt == 0)]  # the needle; the gap follows
    n = len(answer)
    start = next(i for i in range(len(statement)) if list(statement[i : i + n]) == list(answer))
    assert prompt[-start:].tolist() == statement[:start].tolist()


def test_document_losses_are_those_of_nested_prefixes(model, tokenizer, shards, close):
    evaluation = Evaluation(model, tokenizer, shards, SETTINGS)
    *rows, last = evaluation.nested_losses()
    [expected] = evaluation.context_loss(256)
    assert last.pop("measure") == expected.pop("measure")
    assert last == pytest.approx(expected, rel=1e-4)
    measured = [options for name, options in evaluation.parts() if name == "context_loss"]
    assert measured == [{"length": 128}]
    assert [row["length"] for row in rows] == [128, 256]
    for row in rows:
        ids = torch.stack(
            [torch.from_numpy(shards.document(i)[: row["length"] + 1]) for i in (0, 1)]
        )
        with torch.no_grad():
            expected = model(ids, labels=ids).loss.item()
        assert row["documents"] == 2
        assert row["nats_per_token"] == pytest.approx(expected, abs=1e-3)
        size = sum(len(tokenizer.decode(x[1:]).encode()) for x in ids)
        bits = expected * 2 * row["length"] / np.log(2) / size
        assert row["bits_per_byte"] == pytest.approx(bits, rel=1e-3)


def test_the_same_tokens_are_scored_after_every_context(model, tokenizer, shards):
    evaluation = Evaluation(model, tokenizer, shards, SETTINGS)
    for length in SETTINGS.lengths:
        ids = torch.stack(
            [torch.from_numpy(shards.document(i)[256 - length : 257]) for i in (0, 1)]
        )
        with torch.no_grad():
            logits = model(ids).logits[:, -41:-1]
        expected = F.cross_entropy(logits.flatten(0, 1), ids[:, -40:].flatten()).item()
        [row] = evaluation.context_loss(length)
        assert row["nats_per_token"] == pytest.approx(expected, abs=1e-3)


def test_retrieval_is_what_the_model_would_say(model, tokenizer, shards, monkeypatch):
    """Answers that greedy generation gives count as right, teacher-forced and generated."""
    evaluation = Evaluation(model, tokenizer, shards, SETTINGS)
    draw = evaluation.prompts.draw

    def answered(task, length, depth, number, present=True):
        prompt, answer = draw(task, length, depth, number)
        ids = torch.from_numpy(prompt)[None]
        count = len(answer)
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        said = model.generate(ids, **options)[0, -count:].numpy()
        if number == 2:  # all wrong
            said = (said + 1) % 400
        return (prompt if present else np.roll(prompt, 1)), said

    monkeypatch.setattr(evaluation.prompts, "draw", answered)
    monkeypatch.setattr(evaluation.prompts, "digits", lambda answer: range(len(answer)))
    drawn = [draw("induction", 128, 0.5, i) for i in range(3)]
    whole = [np.concatenate(pair) for pair in drawn]
    pairs = [(ids[:-n], ids[-n:]) for ids, n in zip(whole, (1, 2, 1), strict=True)]
    answers = evaluation._generate(pairs, 128)
    for answer, (prompt, _), n in zip(answers, pairs, (1, 2, 1), strict=True):
        ids = torch.from_numpy(prompt)[None]
        assert answer == model.generate(ids, max_new_tokens=n, do_sample=False)[0, -n:].tolist()
    [row] = evaluation.retrieval("induction", 128, 0.5)
    assert row["needles"] == 3 and row["depth"] == 0.5
    assert row["exact_match"] == row["accuracy"] == pytest.approx(2 / 3)
    assert row["absent_accuracy"] < 2 / 3
    assert row["generate_exact_match"] == 1.0 and row["generated"] == 2


def test_retrieval_may_be_measured_alone(model, tokenizer, shards):
    settings = EvaluationSettings(lengths=[64], documents=0, tasks=["passkey"], depths=[0.0, 0.5])
    parts = list(Evaluation(model, tokenizer, shards, settings).parts())
    assert [name for name, _ in parts] == ["retrieval", "retrieval"]


def test_too_few_long_documents_are_refused(model, tokenizer, shards):
    settings = EvaluationSettings(lengths=[64], min_documents=3)
    with pytest.raises(ValueError, match="lower --min-documents"):
        Evaluation(model, tokenizer, shards, settings).nested_losses()


def test_the_metrics_of_the_evaluate_library_agree():
    predictions, references = [[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 6]]
    expected = {"accuracy": 0.8, "exact_match": 0.5}
    assert needle_scores(predictions, references) == pytest.approx(expected)
    metric = NeedleAccuracy()
    metric.add_batch(predictions=predictions[:1], references=references[:1])
    metric.add_batch(predictions=predictions[1:], references=references[1:])
    assert metric.compute() == pytest.approx(expected)
    found = BitsPerByte().compute(predictions=[np.log(2), np.log(8)], references=[1, 3])
    assert found == pytest.approx({"bits_per_byte": 1.0})


def test_the_evaluation_script_does_what_is_missing(
    model, tokenizer, shards, tmp_path, monkeypatch, capsys
):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    arguments = ["evaluate.py", str(tmp_path / "model"), "--data", str(shards.folder)]
    arguments += ["--output", str(tmp_path / "evaluation.json"), "--lengths", "128", "--tasks"]
    arguments += ["passkey", "--documents", "2", "--min-documents", "2", "--needles", "1"]
    arguments += ["--half-lives", "none", "4"]
    script = load_script("evaluate")
    monkeypatch.setattr(sys, "argv", [*arguments, "--stop-after", "-1"])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 75
    monkeypatch.setattr(sys, "argv", arguments)
    script.main()
    result = json.loads((tmp_path / "evaluation.json").read_text())
    rows = [row for part in result["parts"].values() for row in part["rows"]]
    by_limit = {row["half_life"]: row for row in rows if row["measure"] == "document_loss"}
    assert abs(by_limit[4.0]["nats_per_token"] - by_limit[None]["nats_per_token"]) > 1e-4
    capsys.readouterr()
    script.main()
    assert "measure" not in capsys.readouterr().out  # nothing was measured twice
    monkeypatch.setattr(sys, "argv", [*arguments, "--tasks", "passkey", "induction"])
    script.main()  # another task may come in
    assert capsys.readouterr().out.count("measure induction") == 2
    monkeypatch.setattr(sys, "argv", [*arguments, "--depths", "0.5"])
    script.main()  # and another depth
    assert capsys.readouterr().out.count("measure passkey") == 2
    both = json.loads((tmp_path / "evaluation.json").read_text())["settings"]
    assert both["tasks"] == ["passkey", "induction"] and both["depths"] == [0.0, 0.5]
    shutil.copytree(tmp_path / "model", tmp_path / "moved")
    monkeypatch.setattr(sys, "argv", [arguments[0], str(tmp_path / "moved"), *arguments[2:]])
    script.main()  # the same model elsewhere
    assert "measure" not in capsys.readouterr().out
    for changed, message in (
        (["--seed", "1"], "seed was 0, is 1"),
        (["--split", "train"], "split was 'long', is 'train'"),
        (["--give-up-below", "5"], "from 0 to 1"),
    ):
        monkeypatch.setattr(sys, "argv", [*arguments, *changed])
        if changed[1] == "train":
            for path in shards.folder.glob("long-*"):
                shutil.copy(path, path.with_name(path.name.replace("long", "train")))
        with pytest.raises(SystemExit, match=message):
            script.main()
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.parameters()).add_(1)
    other.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="fingerprints"):  # another model, by the same name
        script.main()
    model.save_pretrained(tmp_path / "model")
    # A file from before a setting existed, whose default keeps what was done.
    for name in ("give_up_below", "data", "split", "fingerprints"):
        (result["settings"] if name in result["settings"] else result).pop(name)
    (tmp_path / "evaluation.json").write_text(json.dumps(result))
    monkeypatch.setattr(sys, "argv", arguments)
    script.main()
    assert "measure" not in capsys.readouterr().out


def test_longer_contexts_are_left_out_once_answers_are_lost(
    model, tokenizer, shards, tmp_path, monkeypatch
):
    """Of that task at that depth; not of another one, and not where answers are right."""
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    script = load_script("evaluate")
    right = {"passkey": {0.0: 200, 0.5: 100}, "induction": {0.0: 400, 0.5: 100}}

    def reach(limit, task, depth):
        return right[task][depth] if limit is None else 200

    def retrieval(self, task, length, depth):
        limit = self.model.config.memory_max_half_life
        accuracy = 0.9 if length <= reach(limit, task, depth) else 0.1
        return [{"measure": task, "length": length, "depth": depth, "accuracy": accuracy}]

    monkeypatch.setattr(script.Evaluation, "retrieval", retrieval)
    arguments = ["evaluate.py", str(tmp_path / "model"), "--data", str(shards.folder)]
    arguments += ["--output", str(tmp_path / "evaluation.json"), "--documents", "0"]
    arguments += ["--lengths", "100", "200", "300", "400", "--depths", "0", "0.5", "--tasks"]
    arguments += ["passkey", "induction", "--give-up-below", "0.5", "--half-lives", "none", "4"]
    monkeypatch.setattr(sys, "argv", arguments)
    script.main()
    result = json.loads((tmp_path / "evaluation.json").read_text())
    rows = [row for part in result["parts"].values() for row in part["rows"]]
    for limit in (None, 4.0):
        for task, depth in ((t, d) for t in right for d in right[t]):
            key = limit, task, depth
            longest = min(reach(*key) + 100, 400)  # the first that is lost is measured
            lengths = [
                row["length"]
                for row in rows
                if (row["half_life"], row["measure"], row["depth"]) == key
            ]
            assert lengths == list(range(100, longest + 1, 100))


GRID = {
    "base": "base.yaml",
    "output": "unused",
    "changes": {"steps": 7},
    "evaluation": ["--lengths", "2K"],
    "cells": {"special": {"zero_conv_in_proj": True, "evaluation": {"deep": ["--depths", 0.5]}}},
    "factors": {
        "core": {"polar": None, "nope": {"model": {"attention_type": "nope"}}},
        "memory": {"memory": None, "bare": {"model": {"use_memory": False}}},
    },
}


@pytest.fixture
def cells(tmp_path):
    (tmp_path / "base.yaml").write_text("data: d\noutput: o\nmodel: {hidden_size: 32}\n")
    (tmp_path / "grid.yaml").write_text(json.dumps(GRID))
    return grid.read_grid(tmp_path / "grid.yaml", "data", str(tmp_path / "out"))


def test_a_grid_is_the_product_of_its_factors(cells, tmp_path):
    by_name = {cell.name: cell for cell in cells}
    names = ["special", "polar-memory", "polar-bare", "nope-memory", "nope-bare"]
    assert list(by_name) == names
    assert by_name["nope-bare"].run["model"] == {
        "hidden_size": 32, "attention_type": "nope", "use_memory": False,
    }  # fmt: skip
    assert by_name["special"].run["zero_conv_in_proj"] and by_name["special"].run["steps"] == 7
    assert by_name["special"].evaluations == {"evaluation-deep.json": ("--depths", "0.5")}
    assert by_name["polar-bare"].evaluations == {"evaluation.json": ("--lengths", "2K")}
    assert by_name["polar-bare"].run["output"] == str(tmp_path / "out" / "polar-bare")
    (tmp_path / "grid.yaml").write_text(json.dumps(GRID | {"changes": {"stepz": 7}}))
    with pytest.raises(ValueError, match="Cell special .* stepz"):
        grid.read_grid(tmp_path / "grid.yaml")


def test_the_runs_of_the_repository_can_be_read():
    for name in ("tiny", "small", "paper"):
        load_run(SCRIPTS / "configs" / f"{name}.yaml")


@pytest.mark.parametrize("name", ["long_context", "grid"])
def test_the_grids_of_the_repository_can_be_read(name):
    from atma import AtmaConfig

    cells = grid.read_grid(SCRIPTS / "configs" / f"{name}.yaml")
    assert len(cells) == {"long_context": 7, "grid": 16}[name]
    for cell in cells:
        AtmaConfig(**cell.run["model"])


def test_cells_run_on_every_device_and_go_on_after_a_stop(cells, tmp_path, monkeypatch):
    """With scripts that write down what they were called with."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    log = tmp_path / "calls"
    header = f"import os, pathlib, sys\nlog = open({str(log)!r}, 'a')\n"
    header += "print(sys.argv[0][-11:], os.environ['CUDA_VISIBLE_DEVICES'], file=log)\n"
    train = header + "folder = pathlib.Path(sys.argv[1]).parent\n"
    train += f"stopped = {str(tmp_path)!r} + '/stopped'\n"
    train += "if folder.name == 'polar-memory' and not os.path.exists(stopped):\n"
    train += "    open(stopped, 'w')\n"
    train += "    sys.exit(0)\n"
    train += "sys.exit(1) if folder.name == 'nope-bare' else (folder / 'model').mkdir()\n"
    train += "(folder / 'result.json').touch()\n"
    (scripts / "train.py").write_text(train)
    (scripts / "evaluate.py").write_text(header)
    monkeypatch.setattr(grid, "SCRIPTS", scripts)
    states = grid.Scheduler(cells, [0, 1]).run()
    assert states == {
        "special": "done",
        "polar-memory": "stopped in training",
        "polar-bare": "done",
        "nope-memory": "done",
        "nope-bare": "failed in training",
    }
    assert {line.split()[-1] for line in log.read_text().splitlines()} == {"0", "1"}
    log.unlink()
    states = grid.Scheduler(cells[:4], [5]).run()
    assert set(states.values()) == {"done"}
    assert log.read_text().splitlines() == ["ts/train.py 5", "evaluate.py 5"]
    log.unlink()
    states = grid.Scheduler(cells, [0], stop_after=1e-9).run()
    assert states["nope-bare"] == "waiting" and not log.exists()
    # Results that came without their model: trained anew, and nothing of the old model stays.
    for name in ("result.json", "evaluation.json"):
        (cells[-1].folder / name).write_text("old")
    assert grid.Scheduler(cells, [0]).run()["nope-bare"] == "failed in training"
    assert not list(cells[-1].folder.glob("*.json"))
    # A run with other settings is neither taken for this one nor thrown away.
    changes = {"data": "elsewhere", "trainer": {"save_steps": 3}}
    other = build(RunSettings, cells[0].run | changes).identity()
    write_json(cells[0].folder / "run_settings.json", other)
    grid.Scheduler(cells, [0])
    write_json(cells[0].folder / "run_settings.json", other | {"steps": 70})
    with pytest.raises(ValueError, match="steps was 70, is 7"):
        grid.Scheduler(cells, [0])
    (cells[0].folder / "run_settings.json").unlink()
    # A folder that cannot be written is this cell's failure alone.
    shutil.rmtree(cells[-1].folder)
    cells[-1].folder.write_text("in the way")
    states = grid.Scheduler(cells, [0]).run()
    assert states["nope-bare"].startswith("failed: ") and states["special"] == "done"


def test_tables_hold_the_cells_of_earlier_calls(cells, tmp_path, monkeypatch, capsys):
    (tmp_path / "d").mkdir()
    for split in ("train-00000", "long-00000"):
        write_shard(tmp_path / "d", split, [np.zeros(4, "<u2")], [(4, 4, 0)])
    (tmp_path / "d" / "meta.json").write_text('{"dtype": "<u2"}')
    arguments = [str(tmp_path / "grid.yaml"), "--output", str(tmp_path / "out")]
    arguments += ["--data", str(tmp_path / "d"), "--only"]
    for cell in cells[:2]:
        cell.folder.mkdir(parents=True)
        write_json(cell.result, fake_results()[0]["training"])
        cell.done.touch()
        monkeypatch.setattr(sys, "argv", ["ablate", *arguments, cell.name])
        load_script("ablate").main()
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [result["name"] for result in results] == ["special", "polar-memory"]
    # What no cell could do in the end is said at its beginning.
    (tmp_path / "grid.yaml").write_text(json.dumps(GRID | {"evaluation": ["--nedles", "2"]}))
    with pytest.raises(SystemExit) as refused:
        load_script("ablate").main()
    assert refused.value.code == 2 and "--nedles" in capsys.readouterr().err
    (tmp_path / "grid.yaml").write_text(
        json.dumps(GRID | {"evaluation": ["--split", "validation"]})
    )
    with pytest.raises(SystemExit, match="'validation' of .* is empty"):
        load_script("ablate").main()
    (tmp_path / "grid.yaml").write_text(json.dumps(GRID))
    # What was measured with other arguments is not taken for what the grid says now.
    changed = json.dumps(GRID | {"evaluation": ["--lengths", "4K"]})
    write_json(cells[1].done, cells[1].evaluations)
    load_script("ablate").main()
    (tmp_path / "grid.yaml").write_text(changed)
    with pytest.raises(SystemExit, match="polar-memory was measured with other arguments"):
        load_script("ablate").main()
    (tmp_path / "grid.yaml").write_text(json.dumps(GRID))
    # Not those of a folder that holds another run.
    write_json(cells[0].folder / "run_settings.json", {"steps": 70})
    with pytest.raises(SystemExit, match="special was begun with other settings"):
        load_script("ablate").main()


def fake_results() -> list[dict]:
    training = {
        "parameters": 5e7,
        "tokens": 3e8,
        "loss": 2.5,
        "tokens_per_second": 9e5,
        "mfu": 0.31,
    }
    results = []
    for i, name in enumerate(("polar-memory", "nope")):
        rows = [
            {"half_life": limit, "measure": "document_loss", "length": n,
             "nats_per_token": 2.0 + i, "bits_per_byte": 1.25}
            for limit in ((None, 256.0) if i == 0 else (None,))
            for n in (2048, 4096)
        ]  # fmt: skip
        rows += [
            {"half_life": None, "measure": "induction", "length": n, "depth": depth,
             "accuracy": 0.9 - 0.5 * i, "exact_match": 0.5, "absent_accuracy": 0.1}
            for n in (2048, 4096) for depth in (0.0, 0.5)
        ]  # fmt: skip
        run = {"sequence_length": 2048}
        results.append({"name": name, "run": run, "training": training, "rows": rows})
    return results


def test_tables_and_plots_show_every_run_and_length(tmp_path):
    text = report(fake_results())
    assert "| polar-memory | 50.0M | 300M | 2.500 | 900,000 | 31.0% |" in text
    assert "| run | 2K | 4K |" in text
    assert "| polar-memory, half-life 256 | 2.000 | 2.000 |" in text
    assert "| nope | 40.0% | 40.0% |" in text
    assert "| nope | 1.250 | 1.250 |" in text and "| depth | 2K | 4K |\n" in text
    assert "| 0.5 | 40.0% | 40.0% |" in text and "generate()" not in text
    results = fake_results()
    results[0]["rows"][-2]["generate_exact_match"] = 0.5  # one run has it, at one length
    assert "| polar-memory |  | 50.0% |" in report(results)
    written = {path.name for path in plot_all(fake_results(), tmp_path)}
    assert written == {path.name for path in tmp_path.glob("*.png")}
    assert {"document_loss.png", "induction.png", "induction_map.png"} <= written
    assert "induction_depths_nope.png" in written
    # The half-life of 256 has losses alone: no empty rows of it.
    retrieval = text[text.index("Retrieval") :]
    assert "half-life" not in retrieval and "half-life 256" in text


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 0.0, 1e9])
def test_odd_losses_are_plotted(tmp_path, loss):
    results = fake_results()
    for row in results[0]["rows"]:
        if "nats_per_token" in row:
            row["nats_per_token"] = loss
    assert plot_all(results[:1], tmp_path / "one") and plot_all(results, tmp_path / "all")
    assert plot_all([results[0] | {"name": f"run {i}"} for i in range(40)], tmp_path / "many")


def test_needles_at_other_depths_alone_are_shown(tmp_path):
    results = fake_results()
    for result in results:
        kept = [row for row in result["rows"] if row.get("depth") == 0.5]
        result["rows"] = kept
    text = report(results)
    assert "| 0.5 | 40.0% | 40.0% |" in text and "answers that are right\n" not in text
    written = {path.name for path in plot_all(results, tmp_path)}
    assert written == {"induction_depths_nope.png", "induction_depths_polar-memory.png"}
    assert written == {path.name for path in tmp_path.glob("*.png")}


def test_a_model_card_takes_the_tables_once(tmp_path, monkeypatch):
    (tmp_path / "results.json").write_text(json.dumps(fake_results()))
    card = tmp_path / "README.md"
    card.write_text("# A model\n")
    arguments = ["plot_results.py", str(tmp_path / "results.json"), "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--model-card", str(card)])
    script = load_script("plot_results")
    script.main()
    once = card.read_text()
    assert once.startswith("# A model\n") and "| nope | 40.0% | 40.0% |" in once
    script.main()
    assert card.read_text() == once


CHAT = [
    {"role": "user", "content": "Say one."},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "And two."},
    {"role": "assistant", "content": "two"},
]


def test_only_what_the_assistant_says_is_learnt():
    from experiments.finetuning import encode_chat, set_chat_template

    tokenizer = train_tokenizer([Path(__file__).read_text()], 400)
    with pytest.raises(ValueError, match="--chat-template"):
        set_chat_template(tokenizer, None)
    set_chat_template(tokenizer, SCRIPTS / "configs" / "chat_template.jinja")
    encoded = encode_chat(CHAT, tokenizer, 512, assistant_only=True)
    learnt = [i for i in encoded["labels"] if i != -100]
    end = tokenizer.eos_token
    assert tokenizer.decode(learnt) == f"one{end}two{end}"
    assert tokenizer.decode(encoded["input_ids"]).startswith("### user\nSay one.\n### assistant\n")
    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(encoded["input_ids"]).startswith(prompt + "one")
    whole = encode_chat(CHAT, tokenizer, 512, assistant_only=False)
    assert whole["labels"] == whole["input_ids"] == encoded["input_ids"]
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ValueError, match="does not mark"):
        encode_chat(CHAT, tokenizer, 512, assistant_only=True)


@pytest.mark.parametrize("what", ["chats, LoRA merged", "texts"])
def test_a_checkpoint_is_finetuned(model, tokenizer, tmp_path, monkeypatch, what):
    from atma import AtmaForCausalLM

    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    lines = [{"text": "a b c " * 40}] * 8 if what == "texts" else [{"messages": CHAT}] * 8
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = ["finetune.py", str(tmp_path / "model"), "--data", str(tmp_path / "data.jsonl")]
    arguments += ["--output", str(tmp_path / "out"), "--batch-size", "4", "--max-length", "64"]
    arguments += ["--validation-fraction", "0.25", "--learning-rate", "1e-2", "--set"]
    arguments += ["use_cpu=true", "max_steps=2", "logging_steps=1", "save_strategy='no'"]
    if what != "texts":
        arguments += ["--lora-rank", "2", "--merge", "--chat-template"]
        arguments += [str(SCRIPTS / "configs" / "chat_template.jinja")]
    monkeypatch.setattr(sys, "argv", arguments)
    load_script("finetune").main()
    begun = json.loads((tmp_path / "out" / "run_settings.json").read_text())
    write_json(tmp_path / "out" / "run_settings.json", begun | {"merge": True})  # once so
    monkeypatch.setattr(sys, "argv", [*arguments, "--learning-rate", "1"])
    with pytest.raises(SystemExit, match="learning_rate was 0.01, is 1.0"):
        load_script("finetune").main()
    tuned = AtmaForCausalLM.from_pretrained(tmp_path / "out" / "model")
    name = "model.layers.1.mixer.q_proj.weight"
    assert not torch.equal(tuned.state_dict()[name], model.state_dict()[name])
    assert tuned.config.use_cache
    monkeypatch.setattr(
        sys, "argv", ["finetune.py", str(tmp_path / "out" / "model"), *arguments[2:]]
    )
    with pytest.raises(SystemExit, match="would be overwritten"):
        load_script("finetune").main()
    if what != "texts":
        # An adapter and a merged model take each other's place.
        kept = [argument for argument in arguments if argument != "--merge"]
        for asked, found in (
            (kept, {"adapter_model.safetensors"}),
            (arguments, {"model.safetensors"}),
        ):
            monkeypatch.setattr(sys, "argv", asked)
            load_script("finetune").main()
            saved = {path.name for path in (tmp_path / "out" / "model").glob("*.safetensors")}
            assert saved == found
        assert not (tmp_path / "out" / "model" / "adapter_config.json").exists()
        write_json(tmp_path / "model" / "adapter_config.json", {})
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit, match="is an adapter"):
            load_script("finetune").main()


SMALL = str(SCRIPTS / "configs" / "small.yaml")
MISTAKES = {
    "no settings": ("train", ["gone.yaml"], "gone.yaml"),
    "a setting's name": ("train", [SMALL, "--set", "stepps=1"], "Unknown setting stepps"),
    "no data": ("train", [SMALL, "--set", "data=gone"], "gone holds no finished data"),
    "no grid": ("ablate", ["gone.yaml"], "gone.yaml"),
    "no text": ("prepare_data", ["--source", "./gone", "--output", "out"], "folder ./gone"),
    "no tokenizer": (
        "prepare_data", ["--source", ".", "--tokenizer", "/gone", "--output", "out"], "folder /gone"
    ),
    "no model": ("evaluate", ["./gone", "--data", "gone", "--output", "out.json"], "folder ./gone"),
    "an empty vocabulary": (
        "prepare_data", ["--source", "/usr", "--vocab-size", "9", "--output", "out"], "256"
    ),
    "no steps": ("train", [SMALL, "--set", "steps=0"], "steps must be 1 or more"),
    "no model to tune": ("finetune", ["/gone", "--data", "x.jsonl", "--output", "out"], "er /gone"),
    "a second text": (
        "prepare_data", ["--source", "/usr", "./gone", "--output", "out"], "folder ./gone"
    ),
    "no table": ("prepare_data", ["--source", "gone.parquet", "--output", "out"], "gone.parquet"),
    "no folder": (
        "prepare_data", ["--source", "gone", "--format", "text", "--output", "out"], "folder gone"
    ),
    "no data for a grid": (
        "ablate", [str(SCRIPTS / "configs" / "grid.yaml"), "--data", "gone", "--output", "out"],
        "gone holds no finished data",
    ),
    "a folder as settings": ("train", ["."], "directory"),
    "an argument's name": (
        "finetune", ["/usr", "--data", "x", "--output", "out", "--set", "stepps=1"], "'stepps'"
    ),
    "no results": ("plot_results", ["gone.json", "--output", "out"], "gone.json"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_the_user_got_wrong_is_one_sentence(mistake, tmp_path, monkeypatch):
    """Without a traceback, and before anything is written."""
    name, arguments, message = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit, match=message):
        load_script(name).main()
    assert not list(tmp_path.iterdir())


def test_names_of_the_hub_are_no_missing_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "Qwen/Qwen2.5-0.5B", "HuggingFaceFW/fineweb-edu"):
        refuse_missing_path(name)
    (tmp_path / "text.txt").touch()
    refuse_missing_path("text.txt")
    for name in ("hf://datasets/owner/name/a.parquet", "owner/corpus.txt"):
        refuse_missing_path(name)
    (tmp_path / "runs").mkdir()
    for name in ("./gpt2", "/gone", "~user/gone", ".gone/x", "runs/small/model", "runs/gone"):
        with pytest.raises(FileNotFoundError, match=name):
            refuse_missing_path(name)


def test_data_of_another_tokenizer_are_refused(model, shards, tmp_path, monkeypatch):
    model.save_pretrained(tmp_path / "model")
    train_tokenizer(["something else"], 300).save_pretrained(tmp_path / "model")
    arguments = [str(tmp_path / "model"), "--data", str(shards.folder)]
    arguments += ["--output", str(tmp_path / "evaluation.json")]
    monkeypatch.setattr(sys, "argv", ["evaluate", *arguments])
    with pytest.raises(SystemExit, match="another tokenizer"):
        load_script("evaluate").main()


def test_a_tokenizer_may_have_grown_since(model, tokenizer, shards, tmp_path, monkeypatch):
    model.save_pretrained(tmp_path / "model")
    grown = copy.deepcopy(tokenizer)
    grown.add_tokens(["<|user|>"])
    grown.save_pretrained(tmp_path / "model")
    arguments = [str(tmp_path / "model"), "--data", str(shards.folder), "--lengths", "128"]
    arguments += ["--output", str(tmp_path / "evaluation.json"), "--min-documents", "1"]
    monkeypatch.setattr(sys, "argv", ["evaluate", *arguments, "--tasks", "--documents", "1"])
    load_script("evaluate").main()
    assert (tmp_path / "evaluation.json").exists()


def test_files_that_are_something_else_are_named(tmp_path, monkeypatch):
    path = tmp_path / "file"
    monkeypatch.setattr(sys, "argv", ["plot_results", str(path), "--output", str(tmp_path / "out")])
    for content, message in (('{"a": 1', "file is no JSON file"), ("{}", "file is neither")):
        path.write_text(content)
        with pytest.raises(SystemExit, match=message):
            load_script("plot_results").main()
    path.write_text("a: [1")
    monkeypatch.setattr(sys, "argv", ["train", str(path)])
    with pytest.raises(SystemExit, match="file is no YAML file"):
        load_script("train").main()


@pytest.mark.parametrize("name", ["prepare_data", "train", "ablate", "plot_results"])
def test_help_names_every_option_with_its_default(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        load_script(name).main()
    assert end.value.code == 0
    assert "default" in capsys.readouterr().out
