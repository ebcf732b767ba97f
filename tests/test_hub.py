# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Saved folders load and save again where the package is unknown; the package installs whole."""

import ast
import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch
from atma import AtmaConfig, AtmaForCausalLM, hub_atma
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    modeling_utils,
)
from transformers.dynamic_module_utils import check_imports, get_imports, get_relative_imports
from transformers.utils import hub

REPOSITORY = Path(__file__).parents[1]
WORDS = ["<end>", "the", "cat", "sat", "on", "a", "mat", "and", "slept"]
REQUIRED = {"torch", "transformers", "huggingface_hub", "safetensors"}

# The package is installed where the tests run: the fresh process must not see it.
PROLOGUE = """
import json, sys
for name in {blocked}:
    sys.modules[name] = None
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
folder, result = sys.argv[1], {{}}
ids = torch.arange(12)[None] % 9
"""


def run_python(script: str, folder: Path, scratch: Path, blocked=("atma",)) -> dict:
    """The `result` of `script`, run in an isolated Python with an empty module cache."""
    code = (
        PROLOGUE.format(blocked=blocked) + textwrap.dedent(script) + "\nprint(json.dumps(result))"
    )
    scratch.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(folder)],
        cwd=scratch,
        env={**os.environ, "HF_MODULES_CACHE": str(scratch / "modules"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def code_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.py")}


def auto_map_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / "config.json").read_text())["auto_map"]


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<end>", padding_side="left"
    )


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = AtmaConfig.tiny(
        vocab_size=len(WORDS), zero_init_residual=False, initializer_range=0.15
    )
    return AtmaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def saved(model, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "a-model.v1"  # a name that is no Python identifier
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flat")
    hub_atma.export_code(AtmaConfig.tiny(), folder)
    return folder


def expected_logits(model):
    with torch.no_grad():
        return model(torch.arange(12)[None] % 9).logits


@pytest.mark.smoke
def test_flat_files_differ_from_the_package_in_import_lines_only(flat):
    sources = {p.name: p for p in REPOSITORY.glob("*_atma.py")}
    sources |= {f"kernels_{p.name}": p for p in (REPOSITORY / "kernels").glob("*.py")}
    names = {p.name for p in flat.iterdir()}
    assert {"configuration_atma.py", "modeling_atma.py", "cache_atma.py"} < names < set(sources)
    for name in names:
        before = sources[name].read_text().splitlines()
        after = (flat / name).read_text().splitlines()
        assert len(before) == len(after)
        for old, new in zip(before, after, strict=True):
            if old != new:
                assert old.strip().startswith("from ."), (name, old)
                assert new.strip().startswith("from .kernels_"), (name, new)
                assert old.split()[2:] == new.split()[2:], (name, old, new)


@pytest.mark.smoke
def test_flat_files_import_only_siblings_and_required_packages(flat):
    for path in sorted(flat.glob("*.py")):
        foreign = set(get_imports(path)) - sys.stdlib_module_names
        assert foreign <= REQUIRED, (path.name, foreign)
        siblings = set(check_imports(path))
        assert all((flat / f"{name}.py").is_file() for name in siblings), (path.name, siblings)
        # The loader's regular expression and the grammar agree: none in a docstring.
        relative = [n for n in ast.walk(ast.parse(path.read_text())) if getattr(n, "level", 0)]
        assert siblings == set(get_relative_imports(path)) == {node.module for node in relative}


@pytest.mark.smoke
def test_config_alone_saves_the_code_and_keeps_other_entries_of_auto_map(tmp_path, flat):
    config = AtmaConfig.tiny()
    config.auto_map = {
        "AutoModelForSequenceClassification": "other.Model",
        "AutoModel": "old.Model",
    }
    config.save_pretrained(tmp_path)
    assert code_of(tmp_path) == code_of(flat)
    other = {"AutoModelForSequenceClassification": "other.Model"}
    assert auto_map_of(tmp_path) == {**hub_atma.AUTO_MAP, **other}


@pytest.mark.smoke
def test_saving_over_older_code_replaces_it(tmp_path, flat, model):
    (tmp_path / "modeling_atma.py").write_text("stale")
    model.save_pretrained(tmp_path)
    assert code_of(tmp_path) == code_of(flat)


class Uploads:
    """Stands in for the Hub's client: keeps the bytes that each commit would have sent."""

    def __init__(self):
        self.commits = []

    def create_repo(self, repo_id, **kwargs):
        return type("Repository", (), {"repo_id": repo_id})

    def create_commit(self, repo_id, operations, **kwargs):
        files = {o.path_in_repo: Path(o.path_or_fileobj).read_bytes() for o in operations}
        self.commits.append((repo_id, files))


@pytest.fixture
def uploads(monkeypatch):
    uploads = Uploads()
    monkeypatch.setattr(hub, "_hf_api", uploads)
    card = type("Card", (), {"save": lambda self, path: Path(path).write_text("card")})
    for module in (hub, modeling_utils):
        monkeypatch.setattr(module, "create_and_tag_model_card", lambda *args, **kwargs: card())
    return uploads


@pytest.mark.smoke
@pytest.mark.parametrize("how", ["push_to_hub", "save_pretrained"])
@pytest.mark.parametrize("what", ["model", "config"])
def test_uploads_hold_the_code_and_auto_map(what, how, model, uploads, flat, tmp_path):
    thing = model if what == "model" else AtmaConfig.tiny()
    if how == "push_to_hub":
        thing.push_to_hub("someone/atma")
    else:
        thing.save_pretrained(tmp_path / "local", push_to_hub=True, repo_id="someone/atma")
    ((repo_id, files),) = uploads.commits
    assert repo_id == "someone/atma"
    assert {name: data for name, data in files.items() if name.endswith(".py")} == code_of(flat)
    assert json.loads(files["config.json"])["auto_map"] == hub_atma.AUTO_MAP
    assert ("model.safetensors" in files) == (what == "model")


def test_auto_classes_and_pipeline_in_a_fresh_process(saved, model, tmp_path):
    result = run_python(
        """
        from transformers import pipeline
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        base = AutoModel.from_pretrained(folder, trust_remote_code=True)
        causal = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        built = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
        writer = pipeline("text-generation", folder, trust_remote_code=True)
        with torch.no_grad():
            result["logits"] = causal(ids).logits.tolist()
            result["hidden"] = list(base(ids).last_hidden_state.shape)
        result["classes"] = [type(x).__name__ for x in (config, base, causal, built, writer.model)]
        result["modules"] = [type(x).__module__.split(".")[0] for x in (config, base, causal)]
        texts = writer(["the cat", "a"], max_new_tokens=4, do_sample=False, batch_size=2)
        result["texts"] = [rows[0]["generated_text"] for rows in texts]
        """,
        saved,
        tmp_path,
    )
    assert result["classes"] == ["AtmaConfig", "AtmaModel"] + ["AtmaForCausalLM"] * 3
    assert result["modules"] == ["transformers_modules"] * 3
    assert result["hidden"] == [1, 12, 64]
    torch.testing.assert_close(torch.tensor(result["logits"]), expected_logits(model))
    assert [
        text.startswith(start)
        for text, start in zip(result["texts"], ["the cat", "a"], strict=True)
    ]


@pytest.mark.smoke
def test_three_rounds_of_load_and_save_change_nothing(saved, model, tmp_path):
    before = saved
    for i in range(3):
        after = tmp_path / f"round{i}" / "model"
        result = run_python(
            f"""
            model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
            result["logits"] = model(ids).logits.tolist()
            model.save_pretrained({str(after)!r})
            """,
            before,
            after.parent / "scratch",
        )
        torch.testing.assert_close(torch.tensor(result["logits"]), expected_logits(model))
        assert code_of(after) == code_of(saved)
        assert auto_map_of(after) == auto_map_of(saved) == hub_atma.AUTO_MAP
        before = after


def test_checkpoints_of_trainer_load_without_the_original_folder(model, tokenizer, tmp_path, flat):
    trainer = Trainer(
        model=AtmaForCausalLM(model.config),
        args=TrainingArguments(
            output_dir=tmp_path / "run",
            max_steps=1,
            save_steps=1,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[{"input_ids": torch.arange(9), "labels": torch.arange(9)}],
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(tmp_path / "final")
    for folder in (tmp_path / "run" / "checkpoint-1", tmp_path / "final"):
        assert code_of(folder) == code_of(flat)
        assert auto_map_of(folder) == hub_atma.AUTO_MAP
    result = run_python(
        """
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        result["logits"] = model(ids).logits.tolist()
        """,
        tmp_path / "final",
        tmp_path / "scratch",
    )
    trainer.model.eval()
    torch.testing.assert_close(
        torch.tensor(result["logits"]), expected_logits(trainer.model.cpu()), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("first", ["package", "copy"])
def test_package_and_copy_live_in_one_process(first, saved, tmp_path):
    script = """
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        def load_package():
            import atma
            return atma.AtmaForCausalLM.from_pretrained(folder)

        def load_copy():
            if "atma" not in sys.modules:
                return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
            # The Auto classes prefer the package once it is registered.
            name = "modeling_atma.AtmaForCausalLM"
            return get_class_from_dynamic_module(name, folder).from_pretrained(folder)

        loaders = [load_package, load_copy]
        models = [load() for load in (loaders if FIRST == "package" else loaders[::-1])]
        result["modules"] = sorted(type(model).__module__.split(".")[0] for model in models)
        ids = ids.repeat(1, 8)
        result["equal"] = torch.equal(*(model(ids).logits for model in models))
        tokens = [model.generate(ids, max_new_tokens=4, do_sample=False) for model in models]
        result["tokens"] = [t.tolist() for t in tokens]
        for i, model in enumerate(models):
            model(ids, labels=ids).loss.backward()
            model.save_pretrained(f"again{i}")
        """
    result = run_python(script.replace("FIRST", repr(first)), saved, tmp_path, blocked=())
    assert result["modules"] == ["atma", "transformers_modules"]
    assert result["equal"]
    assert result["tokens"][0] == result["tokens"][1]
    by_package = tmp_path / ("again0" if first == "package" else "again1")
    assert code_of(by_package) == code_of(saved)
    by_copy = tmp_path / ("again1" if first == "package" else "again0")
    if first == "copy":  # only the Auto classes mark a copy for the stock copier
        assert code_of(by_copy) == code_of(saved)


@pytest.mark.smoke
def test_everything_works_without_triton(saved, model, tmp_path):
    result = run_python(
        """
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        result["logits"] = model(ids).logits.tolist()
        model(ids, labels=ids).loss.backward()
        result["finite"] = all(p.grad.isfinite().all().item() for p in model.parameters())
        result["length"] = model.generate(ids, max_new_tokens=4, min_new_tokens=4).shape[1]
        """,
        saved,
        tmp_path,
        blocked=("atma", "triton"),
    )
    assert result["finite"] and result["length"] == 16
    torch.testing.assert_close(torch.tensor(result["logits"]), expected_logits(model))


class Float64Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Names the operators that make fp64 tensors: devices such as MPS have none."""

    def __init__(self):
        super().__init__()
        self.operators = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64:
                self.operators.add(str(func))
        return out


@pytest.mark.parametrize("attention_type", ["polar", "nope", "rope"])
def test_no_fp64_anywhere_in_training_or_generation(attention_type):
    model = AtmaForCausalLM(AtmaConfig.tiny(vocab_size=9, attention_type=attention_type))
    ids = torch.arange(12)[None] % 9
    with Float64Watch() as watch:
        model(ids, labels=ids).loss.backward()
        packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
        model(ids, position_ids=packed, labels=ids).loss.backward()
        model.eval().generate(ids, max_new_tokens=3)
    assert not watch.operators


def test_a_tensor_of_another_device_takes_the_torch_path():
    with torch.device("meta"):
        model = AtmaForCausalLM(AtmaConfig.tiny())
        loss = model(
            torch.zeros(1, 70, dtype=torch.long), labels=torch.zeros(1, 70, dtype=torch.long)
        )
    assert loss.loss.device.type == "meta" and loss.logits.shape == (1, 70, 512)


@pytest.mark.smoke
def test_the_auto_classes_prefer_the_installed_package(saved):
    for trust in (None, True):
        loaded = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=trust)
        assert type(loaded) is AtmaForCausalLM and type(loaded.config) is AtmaConfig


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy: a build folder in the checkout would go stale."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    (source / "kernels").mkdir(parents=True)
    for path in [*REPOSITORY.glob("*.*"), *REPOSITORY.glob("kernels/*.py")]:
        if path.is_file():
            shutil.copy(path, source / path.relative_to(REPOSITORY))
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        + ["--wheel-dir", str(folder), str(source)],
        check=True,
    )
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_the_package_with_its_kernels_and_nothing_else(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    root = {f"atma/{p.name}" for p in REPOSITORY.glob("*.py") if p.name != "setup.py"}
    kernels = {f"atma/kernels/{p.name}" for p in (REPOSITORY / "kernels").glob("*.py")}
    assert names == root | kernels


def test_an_installed_package_saves_loads_and_exports(wheel, tmp_path, flat):
    target = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        + ["--target", str(target), str(wheel)],
        check=True,
    )
    result = run_python(
        f"""
        sys.path.insert(0, {str(target)!r})
        import atma
        result["file"] = atma.__file__
        config = AutoConfig.for_model("atma", vocab_size=9, hidden_size=64, head_dim=16)
        config.save_pretrained("config")
        result["class"] = type(AutoModelForCausalLM.from_config(config)).__module__
        """,
        tmp_path,
        tmp_path / "scratch",
        blocked=(),
    )
    assert Path(result["file"]).is_relative_to(target)
    assert result["class"] == "atma.modeling_atma"
    assert code_of(tmp_path / "scratch" / "config") == code_of(flat)
