# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Fine-tuning with Transformers' Trainer, of all weights or of a LoRA, on texts or chats."""

from pathlib import Path

from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerBase

from .preparation import kind_of


def load_examples(source: str, split: str = "train") -> Dataset:
    """A local jsonl or parquet file, or a Hub data set."""
    kind = kind_of(source)
    if kind == "hub":
        return load_dataset(source, split=split)
    if kind == "text":
        raise ValueError(f"{source} is a folder: give a jsonl or parquet file, or a Hub data set.")
    return load_dataset(kind, data_files=source, split="train")


def set_chat_template(tokenizer: PreTrainedTokenizerBase, path: str | None) -> None:
    """Takes the template of a file, or requires that the tokenizer brings one."""
    if path is not None:
        tokenizer.chat_template = Path(path).read_text()
    if tokenizer.chat_template is None:
        raise ValueError(
            "The tokenizer has no chat template: give one with --chat-template "
            "(scripts/configs/chat_template.jinja is a plain one)."
        )


def encode_chat(
    messages: list[dict], tokenizer: PreTrainedTokenizerBase, max_length: int, assistant_only: bool
) -> dict[str, list[int]]:
    """`input_ids` and `labels` of one chat, cut at `max_length`."""
    if assistant_only and "{% generation %}" not in tokenizer.chat_template:
        raise ValueError(
            "The chat template does not mark what the assistant says ({% generation %}): use "
            "another, or train on whole chats with --whole-chats."
        )
    encoded = tokenizer.apply_chat_template(
        messages,
        return_dict=True,
        return_assistant_tokens_mask=assistant_only,
        truncation=True,
        max_length=max_length,
    )
    ids = encoded["input_ids"]
    spoken = encoded["assistant_masks"] if assistant_only else [1] * len(ids)
    labels = [i if said else -100 for i, said in zip(ids, spoken, strict=True)]
    return {"input_ids": ids, "labels": labels}


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[dict]:
    """`input_ids` and `labels` of the pieces of one text, none longer than `max_length`."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    ids = ids + [tokenizer.eos_token_id]
    pieces = [ids[i : i + max_length] for i in range(0, len(ids), max_length)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces if len(piece) > 1]


def encode_examples(
    examples: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    assistant_only: bool = True,
    text_column: str = "text",
) -> Dataset:
    """
    Token ids and labels. Chats are in a column `messages` of `{"role", "content"}`; texts in
    `text_column`. Raises `ValueError` if there is neither.
    """
    if "messages" not in examples.column_names and text_column not in examples.column_names:
        raise ValueError(
            f"The data has neither 'messages' nor {text_column!r}, but "
            f"{', '.join(examples.column_names)}: name the column with --column."
        )

    def encode(batch: dict) -> dict[str, list]:
        if "messages" in batch:
            rows = [
                encode_chat(chat, tokenizer, max_length, assistant_only)
                for chat in batch["messages"]
            ]
        else:
            rows = [
                row
                for text in batch[text_column]
                for row in encode_text(text, tokenizer, max_length)
            ]
        # What the assistant says may lie beyond the cut: nothing to learn there.
        rows = [row for row in rows if any(label != -100 for label in row["labels"][1:])]
        return {name: [row[name] for row in rows] for name in ("input_ids", "labels")}

    encoded = examples.map(encode, batched=True, remove_columns=examples.column_names)
    if not len(encoded):
        raise ValueError("Nothing is left to train on: is --max-length too short?")
    return encoded


__all__ = ["encode_chat", "encode_examples", "encode_text", "load_examples", "set_chat_template"]
