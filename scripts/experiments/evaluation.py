# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""What a checkpoint can do with length: losses of long documents, and retrieval."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from atma.outputs_atma import CACHE_NAME

from .needles import Prompts, needle_scores
from .reading import Reader
from .shards import Shards


@dataclass
class EvaluationSettings:
    """
    Attributes:
        lengths: context lengths in tokens, ascending.
        documents: number of held-out documents; those of at least `lengths[-1]` tokens, or of the
            longest length that `min_documents` reach. With 0 no losses are measured.
        scored_tokens: at the end of each document, read after contexts of each length.
        tasks: of `needles.TASKS`.
        depths: where needles stand; 0 is the start.
        needles: at each length and depth, at most as many as fill `needle_tokens` (but 4 at least).
        generated: needles of which generate() has to give the whole answer.
        give_up_below: share of answer tokens; where fewer are right at one length, longer ones (of
            the same task and depth) are not measured.
        tokens_at_once: rows of a batch times their length.
        chunk: tokens of one call; see `reading.Reader`.
    """

    lengths: list[int] = field(default_factory=lambda: [2**k for k in range(11, 19)])
    documents: int = 16
    min_documents: int = 4
    scored_tokens: int = 512
    tasks: list[str] = field(default_factory=lambda: ["induction", "passkey", "haystack"])
    depths: list[float] = field(default_factory=lambda: [0.0])
    needles: int = 64
    needle_tokens: int = 2**22
    generated: int = 4
    give_up_below: float = 0.0
    tokens_at_once: int = 2**18
    chunk: int | None = None
    seed: int = 0

    def __post_init__(self):
        if self.lengths != sorted(self.lengths):
            raise ValueError(f"lengths must ascend, got {self.lengths}.")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths are from 0 (the start) to 1, got {self.depths}.")
        if not 0 <= self.give_up_below <= 1:
            raise ValueError(f"give_up_below is a share from 0 to 1, got {self.give_up_below}.")

    def needles_at(self, length: int) -> int:
        return max(min(self.needles, self.needle_tokens // length), min(self.needles, 4))

    def rows_at(self, length: int) -> int:
        return max(self.tokens_at_once // length, 1)


class Evaluation:
    """Measures one model; every method returns rows of plain numbers for a JSON file."""

    def __init__(self, model, tokenizer, shards: Shards, settings: EvaluationSettings):
        self.tokenizer, self.shards, self.settings = tokenizer, shards, settings
        self.model, self.reader = model, Reader(model, settings.chunk)
        text = shards.read(0, min(shards.num_tokens, 2 * settings.lengths[-1] + 2**20))
        self.prompts = Prompts(tokenizer, text, settings.seed)

    def parts(self) -> Iterator[tuple[str, dict]]:
        """(name of the method, its arguments) of all that is to be measured."""
        if self.settings.documents:
            yield "nested_losses", {}
            _, longest = self.documents()
            for length in self.settings.lengths:
                if length < longest:
                    yield "context_loss", {"length": length}
        for task in self.settings.tasks:
            for length in self.settings.lengths:
                for depth in self.settings.depths:
                    yield "retrieval", {"task": task, "length": length, "depth": depth}

    def gives_up(self, options: dict, rows: list[dict]) -> bool:
        """Whether `rows` say that the task, at this depth, is lost at a shorter length."""
        return any(
            row["measure"] == options.get("task")
            and row["depth"] == options["depth"]
            and row["length"] < options["length"]
            and row["accuracy"] < self.settings.give_up_below
            for row in rows
        )

    def documents(self) -> tuple[list[np.ndarray], int]:
        """Held-out documents without copies, and to which length they are read."""
        records = self.shards.documents
        _, first = np.unique(records["hash"], return_index=True)
        for length in reversed(self.settings.lengths):
            chosen = [i for i in sorted(first) if records["tokens"][i] > length]
            if len(chosen) >= self.settings.min_documents:
                break
        else:
            raise ValueError(
                f"The split {self.shards.split!r} of {self.shards.folder} has fewer than "
                f"{self.settings.min_documents} documents of more than {length} tokens: prepare "
                "longer text, lower --min-documents, or leave losses out with --documents 0."
            )
        chosen = chosen[: self.settings.documents]
        return [self.shards.document(i)[: length + 1] for i in chosen], length

    def _batches(self, rows: list[np.ndarray], length: int) -> Iterator[torch.Tensor]:
        size = self.settings.rows_at(length)
        for start in range(0, len(rows), size):
            yield torch.from_numpy(np.stack(rows[start : start + size]))

    def num_bytes(self, ids: np.ndarray) -> int:
        """Bytes of the text; each part of a character that an end cuts in two counts as 3 or so."""
        return len(self.tokenizer.decode(ids, skip_special_tokens=True).encode())

    def nested_losses(self) -> list[dict]:
        """
        For each length the loss of the same documents up to there, nested prefixes of one reading:
        nats per token, bits per byte, and nats per token of the prefix's second half. At the end
        what `context_loss` would give for the longest length, which is the same reading.
        """
        documents, longest = self.documents()
        losses = torch.cat(
            [self.reader.token_losses(batch) for batch in self._batches(documents, longest)]
        ).double()
        rows, before, size = [], 0, 0
        for length in (n for n in self.settings.lengths if n <= longest):
            prefix = losses[:, :length]
            size += sum(self.num_bytes(document[before + 1 : length + 1]) for document in documents)
            before = length
            rows.append(
                {
                    "measure": "document_loss",
                    "length": length,
                    "documents": len(documents),
                    "nats_per_token": prefix.mean().item(),
                    "nats_per_token_second_half": prefix[:, length // 2 :].mean().item(),
                    "bits_per_byte": prefix.sum().item() / math.log(2) / size,
                }
            )
        return [*rows, self._context_row(longest, losses[:, -self.scored_tokens :])]

    @property
    def scored_tokens(self) -> int:
        return min(self.settings.scored_tokens, self.settings.lengths[0])

    def context_loss(self, length: int) -> list[dict]:
        """The loss of the same last tokens of the same documents after a context of `length`."""
        documents, longest = self.documents()
        rows = [document[longest - length :] for document in documents]
        losses = torch.cat(
            [
                self.reader.last_losses(batch, self.scored_tokens)
                for batch in self._batches(rows, length)
            ]
        )
        return [self._context_row(length, losses)]

    def _context_row(self, length: int, losses: torch.Tensor) -> dict:
        """Of the nats `[documents, scored tokens]`."""
        return {
            "measure": "context_loss",
            "length": length,
            "documents": losses.shape[0],
            "scored_tokens": losses.shape[1],
            "nats_per_token": losses.double().mean().item(),
            # Of the differences between documents, which all lengths share.
            "standard_deviation": losses.double().mean(1).std(correction=0).item(),
        }

    def _predict(self, prompts: list[tuple[np.ndarray, np.ndarray]], length: int):
        """Most likely ids of each answer token after the right ones before it; nats of digits."""
        predictions, nats = [], []
        widest = max(len(answer) for _, answer in prompts)
        whole = [np.concatenate(pair) for pair in prompts]
        answers = iter([answer for _, answer in prompts])
        for batch in self._batches(whole, length):
            hidden = self.reader.last_hidden_states(batch[:, :-1], widest)
            for row in self.reader.logits(hidden).cpu():
                answer = next(answers)
                row = row[-len(answer) :]
                predictions.append(row.argmax(-1).tolist())
                digits = self.prompts.digits(answer)
                target = torch.from_numpy(answer)[digits]
                nats.append(torch.nn.functional.cross_entropy(row[digits], target).item())
        return predictions, nats

    def _scores(self, predictions: list[list[int]], answers: list[np.ndarray]) -> dict[str, float]:
        digits = [self.prompts.digits(answer) for answer in answers]
        return needle_scores(
            [[p[i] for i in kept] for p, kept in zip(predictions, digits, strict=True)],
            [answer[kept].tolist() for answer, kept in zip(answers, digits, strict=True)],
        )

    @torch.no_grad()
    def _generate(self, prompts: list[tuple[np.ndarray, np.ndarray]], length: int) -> list[list]:
        """The ids that generate() gives for each answer."""
        said: dict[int, list[int]] = {}
        # Prompt and answer together have one length, so that prompts of one length end alike.
        for count in sorted({len(answer) for _, answer in prompts}):
            alike = [i for i, (_, answer) in enumerate(prompts) if len(answer) == count]
            rows = []
            for batch in self._batches([prompts[i][0] for i in alike], length):
                ids = batch.to(self.model.device)
                generated = self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    **{CACHE_NAME: self.reader.fill(ids[:, :-1])},
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                )
                rows += generated[:, -count:].tolist()
            said.update(zip(alike, rows, strict=True))
        return [said[i] for i in range(len(prompts))]

    def retrieval(self, task: str, length: int, depth: float) -> list[dict]:
        """
        Accuracy of the digits (each after the right ones before it), whole answers, digits without
        a needle, and whole answers by generate().
        """
        count = self.settings.needles_at(length)
        present, absent = (
            [self.prompts.draw(task, length, depth, i, present) for i in range(count)]
            for present in (True, False)
        )
        answers = [answer for _, answer in present]
        predictions, nats = self._predict(present, length)
        missing, _ = self._predict(absent, length)
        row = {
            "measure": task,
            "length": length,
            "depth": depth,
            "needles": count,
            **self._scores(predictions, answers),
            "nats_per_token": float(np.mean(nats)),
            "absent_accuracy": self._scores(missing, answers)["accuracy"],
        }
        if self.settings.generated:
            texts = self._generate(present[: self.settings.generated], length)
            row["generated"] = len(texts)
            scores = self._scores(texts, answers[: len(texts)])
            row["generate_exact_match"] = scores["exact_match"]
        return [row]


__all__ = ["Evaluation", "EvaluationSettings"]
