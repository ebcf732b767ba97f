# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Tokenizers: trained here, or taken from the Hub or a folder."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, show_progress: bool = False
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with one special token, the end of a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_input_names=["input_ids", "attention_mask"],
    )


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """
    The tokenizer of a Hub repository or a folder. Raises `ValueError` where documents could not be
    packed with it.
    """
    tokenizer = AutoTokenizer.from_pretrained(name)
    if not tokenizer.is_fast:
        raise ValueError(f"{name} has no fast tokenizer (tokenizer.json): choose one that has.")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{name} has no end-of-text token to put between documents: set one.")
    return tokenizer


__all__ = ["END_OF_TEXT", "load_tokenizer", "train_tokenizer"]
