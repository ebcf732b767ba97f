# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Trains a small ATMA on real text, saves it, loads it in a fresh process, generates and plots.

The text is what every Python brings along: its documentation topics and its standard library. Two
CPU cores need about two minutes for the training.

    python scripts/quickstart.py --steps 300 --prompt "class Reader:"
"""

import argparse
import os
import pydoc_data.topics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from atma import AtmaConfig, AtmaForCausalLM
from experiments.tokenizer import train_tokenizer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.utils.logging import disable_progress_bar

SCORED_TOKENS = 128
WINDOWS_PER_FILE = 2

# What a user of the saved folder writes, where the package cannot be imported.
FRESH_PROCESS = """
import sys
sys.modules["atma"] = None

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

folder, prompt, new_tokens, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
torch.manual_seed(seed)
model.generate(
    **tokenizer(prompt, return_tensors="pt"), max_new_tokens=new_tokens, do_sample=True,
    temperature=0.7, top_k=40, streamer=TextStreamer(tokenizer),
)
"""


def build_corpus() -> tuple[list[str], list[str]]:
    """(training texts, held-out texts): every fifth long file of the standard library is kept."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("*.py"))
    held_out = [path for path in files if path.stat().st_size > 60_000][::5]
    read = lambda paths: [p.read_text("utf-8", errors="replace") for p in paths]  # noqa: E731
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    return topics + read(p for p in files if p not in held_out), read(held_out)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[torch.Tensor]:
    """The token ids of each text, an end-of-text token after it."""
    return [
        torch.tensor(tokenizer(text, verbose=False).input_ids + [tokenizer.eos_token_id])
        for text in texts
    ]


def build_model(tokenizer: PreTrainedTokenizerFast, context: int) -> AtmaForCausalLM:
    """An ATMA with every layer kind, small enough for a CPU."""
    config = AtmaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AtmaForCausalLM(config)


class ProgressBar(TrainerCallback):
    """One line: steps, loss, time left."""

    def __init__(self, console: Console):
        columns = [BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")]
        self.progress = Progress(*columns, TimeRemainingColumn(), console=console)

    def on_train_begin(self, args, state, control, **kwargs):
        self.task = self.progress.add_task("loss ...", total=state.max_steps)
        self.progress.start()

    def on_step_end(self, args, state, control, **kwargs):
        self.progress.update(self.task, completed=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.progress.update(self.task, description=f"loss {float(logs['loss']):.2f}")

    def on_train_end(self, args, state, control, **kwargs):
        self.progress.stop()


def train(
    model: AtmaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    tokens: torch.Tensor,
    arguments: argparse.Namespace,
    console: Console,
) -> Trainer:
    """Trains on chunks of `arguments.context` tokens with the stock Trainer."""
    chunks = tokens[: len(tokens) // arguments.context * arguments.context].view(
        -1, arguments.context
    )
    settings = TrainingArguments(
        output_dir=str(arguments.output / "trainer"),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=arguments.steps // 20,
        weight_decay=0.1,
        adam_beta2=0.95,
        logging_steps=min(5, arguments.steps),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=arguments.seed,
    )
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=[{"input_ids": chunk, "labels": chunk} for chunk in chunks],
        processing_class=tokenizer,
        callbacks=[ProgressBar(console)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer


@torch.no_grad()
def loss_by_context(
    model: AtmaForCausalLM, documents: list[torch.Tensor], contexts: list[int]
) -> dict[int, float]:
    """
    {context length: mean loss of the last `SCORED_TOKENS` tokens of each window}.

    The scored tokens are the same for every length; only how far the model may look back differs.
    """
    longest = max(contexts) + 1
    windows = [
        window
        for document in documents
        for window in document.unfold(0, longest, longest)[:WINDOWS_PER_FILE]
    ]
    model.eval()
    losses = {}
    for context in contexts:
        total = 0.0
        for window in windows:
            ids = window[-context - 1 :].to(model.device)
            logits = model(ids[None, :-1], use_cache=False, logits_to_keep=SCORED_TOKENS).logits
            total += torch.nn.functional.cross_entropy(
                logits[0].float(), ids[-SCORED_TOKENS:]
            ).item()
        losses[context] = total / len(windows)
    return losses


def plot(
    history: list[tuple[int, float]], losses: dict[int, float], context: int, title: str, path: Path
):
    """Writes the PNG: training loss on the left, loss against context length on the right."""
    blue, orange, grey = "#2a5caa", "#d2691e", "#777777"
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    figure.suptitle(title)

    steps, values = zip(*history, strict=True)
    left.plot(steps, values, color=blue, linewidth=1.6)
    left.set(
        title="Training", xlabel="step", ylabel="loss (nats per token)", xlim=(steps[0], steps[-1])
    )

    right.plot(losses.keys(), losses.values(), color=orange, marker="o", linewidth=1.6)
    right.axvline(context, color=grey, linestyle="--", linewidth=1)
    right.annotate(
        "training length", (context, 1), xycoords=("data", "axes fraction"), xytext=(5, -10),
        textcoords="offset points", color=grey, fontsize=9,
    )  # fmt: skip
    right.set_xscale("log", base=2)
    right.set_xticks(list(losses), [f"{length:,}" for length in losses])
    right.set(
        title="Held-out files",
        xlabel=f"context length (tokens; the last {SCORED_TOKENS} are scored, always the same)",
        ylabel="loss (nats per token)",
    )
    margin = max(0.1, max(losses.values()) - min(losses.values()))
    right.set_ylim(min(losses.values()) - margin, max(losses.values()) + margin)
    for axes in (left, right):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def generate_in_fresh_process(folder: Path, arguments: argparse.Namespace) -> None:
    """Streams a completion from a Python with an empty module cache and without the package."""
    with tempfile.TemporaryDirectory() as elsewhere:
        subprocess.run(
            [sys.executable, "-I", "-c", FRESH_PROCESS, str(folder.resolve()), arguments.prompt]
            + [str(arguments.new_tokens), str(arguments.seed)],
            cwd=elsewhere,
            env={
                **os.environ,
                "HF_MODULES_CACHE": elsewhere,
                "HF_HUB_OFFLINE": "1",
                "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            },
            check=True,
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/quickstart"), help="folder to write"
    )
    parser.add_argument("--steps", type=int, default=600, help="training steps")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences in a step")
    parser.add_argument("--context", type=int, default=256, help="training length in tokens")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[256 * 2**i for i in range(6)],
        help="lengths, 128 or more, at which the held-out loss is measured",
    )  # fmt: skip
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--vocab-size", type=int, default=2048, help="size of the BPE vocabulary")
    parser.add_argument("--prompt", default="def read_file(path", help="start of the completion")
    parser.add_argument("--new-tokens", type=int, default=120, help="length of the completion")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches and sampling")
    arguments = parser.parse_args()
    if min(arguments.contexts) < 128 or arguments.steps < 1:
        parser.error("--contexts must be 128 or more, --steps 1 or more")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    console = Console(highlight=False, soft_wrap=True)
    disable_progress_bar()  # of reading and writing files
    torch.manual_seed(arguments.seed)
    folder = arguments.output / "model"

    training_texts, held_out_texts = build_corpus()
    tokenizer = train_tokenizer(training_texts, arguments.vocab_size)
    tokens = torch.cat(encode(tokenizer, training_texts))
    model = build_model(tokenizer, arguments.context)
    size = f"{model.num_parameters() / 1e6:.1f}M parameters"
    console.print(
        f"ATMA, {size}, on {len(tokens) / 1e6:.1f}M tokens of Python documentation and source"
    )

    start = time.perf_counter()
    trainer = train(model, tokenizer, tokens, arguments, console)
    seconds = time.perf_counter() - start
    model.config.use_cache = (
        True  # Trainer switched it off for the training; the saved model wants it
    )
    trainer.save_model(str(folder))
    console.print(f"Trained in {seconds:.0f} s, saved to {folder}")

    losses = loss_by_context(model, encode(tokenizer, held_out_texts), arguments.contexts)
    history = [
        (entry["step"], float(entry["loss"]))
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    shape = f"{arguments.steps} steps of {arguments.batch_size} x {arguments.context} tokens"
    picture = arguments.output / "quickstart.png"
    plot(history, losses, arguments.context, f"ATMA, {size}, {shape}", picture)
    console.print(
        "Held-out loss by context: " + ", ".join(f"{n}: {v:.3f}" for n, v in losses.items())
    )
    console.print(f"Plotted to {picture}")

    console.print("\nA fresh process loads the folder with trust_remote_code=True and continues:\n")
    generate_in_fresh_process(folder, arguments)


if __name__ == "__main__":
    main()
