# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Fine-tunes a checkpoint on texts or chats: all weights, or a LoRA that is saved as an adapter.

    python scripts/finetune.py runs/small/model --data chats.jsonl --lora-rank 16 \\
        --chat-template scripts/configs/chat_template.jinja --output runs/chat
    python scripts/finetune.py runs/small/model --data texts.parquet --output runs/tuned

A jsonl or parquet file or a Hub data set with a column `messages` (chats) or `text`. Examples are
packed without padding. The same command goes on from the last checkpoint.
"""

import argparse
import sys
from pathlib import Path

import atma  # noqa: F401, makes the model known to the Auto classes
import torch
from experiments.checkpoints import RUN_SETTINGS, last_checkpoint, refuse_other_run
from experiments.files import write_json
from experiments.finetuning import encode_examples, load_examples, set_chat_template
from experiments.refusals import (
    refuse_missing_path,
    refuse_unknown,
    without_traceback,
)
from experiments.settings import parse_override
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(name: str, default, text: str, **options) -> None:
        parser.add_argument(name, default=default, help=f"{text} (default: {default})", **options)

    parser.add_argument("model", help="folder or Hub repository of a checkpoint")
    parser.add_argument("--data", required=True, help="jsonl or parquet file, or Hub data set")
    parser.add_argument("--output", required=True, help="folder to write; the model in model/")
    add("--split", "train", "of a Hub data set")
    add("--column", "text", "of the text, where there are no messages")
    add("--chat-template", None, "file with a template, instead of the tokenizer's")
    parser.add_argument(
        "--whole-chats", action="store_true", help="learn what the user says, too (default: no)"
    )
    add("--max-length", 2048, "tokens of an example", type=int)
    add("--validation-fraction", 0.02, "share of the examples that is held out", type=float)
    add("--lora-rank", 0, "rank of a LoRA on all linear layers; 0 trains all weights", type=int)
    add("--lora-alpha", 32, "scale of the LoRA", type=int)
    parser.add_argument("--merge", action="store_true", help="save the LoRA merged into the model")
    add("--epochs", 1.0, "passes over the examples", type=float)
    add("--batch-size", 8, "examples of one forward pass on one device", type=int)
    add("--accumulation", 1, "forward passes of one step", type=int)
    add("--learning-rate", 1e-4, "peak", type=float)
    add("--seed", 0, "of the order and the adapter", type=int)
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE",
        help="other TrainingArguments, such as max_steps=100 (default: none)",
    )  # fmt: skip
    return parser.parse_args()


def training_arguments(arguments: argparse.Namespace) -> TrainingArguments:
    values = {
        "output_dir": arguments.output,
        "num_train_epochs": arguments.epochs,
        "per_device_train_batch_size": arguments.batch_size,
        "per_device_eval_batch_size": arguments.batch_size,
        "gradient_accumulation_steps": arguments.accumulation,
        "learning_rate": arguments.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.03,  # a share of all steps
        "logging_steps": 10,
        "save_total_limit": 1,
        "eval_strategy": "epoch" if arguments.validation_fraction else "no",
        "prediction_loss_only": True,
        "report_to": "none",
        "bf16": torch.cuda.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available(),
        "disable_tqdm": not sys.stderr.isatty(),
        "seed": arguments.seed,
    }
    for override in arguments.set:
        values |= parse_override(override)
    refuse_unknown(values, TrainingArguments.__dataclass_fields__, "TrainingArguments")
    return TrainingArguments(**values)


def main() -> None:
    arguments = parse_arguments()
    if arguments.merge and not arguments.lora_rank:
        raise SystemExit("--merge needs --lora-rank: there is nothing to merge without an adapter.")
    begun = {n: value for n, value in vars(arguments).items() if n not in ("output", "merge")}
    begun_with = Path(arguments.output) / RUN_SETTINGS
    folder = f"{arguments.output}/model"
    with without_traceback():
        refuse_missing_path(arguments.model)
        if Path(folder).resolve() == Path(arguments.model).resolve():
            raise ValueError(f"{folder} would be overwritten: choose another --output.")
        refuse_other_run(arguments.output, begun, dropped=["merge"])
        if (Path(arguments.model) / "adapter_config.json").exists():
            raise ValueError(
                f"{arguments.model} is an adapter, not a model: make it one with --merge, first."
            )
        settings = training_arguments(arguments)
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        examples = load_examples(arguments.data, arguments.split)
        if "messages" in examples.column_names:
            set_chat_template(tokenizer, arguments.chat_template)
        options = {
            "tokenizer": tokenizer,
            "max_length": arguments.max_length,
            "assistant_only": not arguments.whole_chats,
            "text_column": arguments.column,
        }
        validation = None
        if arguments.validation_fraction:
            parts = examples.train_test_split(arguments.validation_fraction, seed=arguments.seed)
            examples, validation = parts["train"], encode_examples(parts["test"], **options)
        examples = encode_examples(examples, **options)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    if arguments.lora_rank:
        from peft import LoraConfig, get_peft_model  # only for adapters

        lora = LoraConfig(
            task_type="CAUSAL_LM",
            target_modules="all-linear",
            r=arguments.lora_rank,
            lora_alpha=arguments.lora_alpha,
        )
        torch.manual_seed(arguments.seed)
        model = get_peft_model(model, lora)
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=examples,
        eval_dataset=validation,
        data_collator=DataCollatorWithFlattening(),
        processing_class=tokenizer,
    )
    if trainer.is_world_process_zero():
        begun_with.parent.mkdir(parents=True, exist_ok=True)
        write_json(begun_with, begun)
    trainer.train(resume_from_checkpoint=last_checkpoint(arguments.output))
    model = trainer.accelerator.unwrap_model(trainer.model)
    model.config.use_cache = True  # Trainer switches it off; the saved model wants it
    if arguments.lora_rank and arguments.merge:
        trainer.model = model.merge_and_unload()
    is_adapter = arguments.lora_rank and not arguments.merge
    if trainer.is_world_process_zero():
        # A whole model and an adapter in one folder would be taken for the adapter.
        for pattern in ["model*.safetensors*", "config.json"] if is_adapter else ["adapter_*"]:
            for path in Path(folder).glob(pattern):
                path.unlink()
    trainer.save_model(folder)
    if not trainer.is_world_process_zero():
        return
    print(f"Saved to {folder}")
    if is_adapter:
        print(
            f"It is an adapter of {arguments.model}: load it with its own tokenizer, as in "
            f"pipeline(..., {folder!r}, tokenizer={folder!r}), or call again with --merge."
        )


if __name__ == "__main__":
    main()
