# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Retrieval tasks: something said once in a long text is asked for at its end."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PASSKEY_FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
# Names for what is hidden in the haystack.
SUBJECTS = (
    "amber anchor basil beacon candle canyon cedar comet copper coral dune ember falcon feather "
    "garnet glacier harbor hazel island ivory jasper juniper lagoon lantern maple marble meadow "
    "nectar oasis onyx opal orchid pepper pillar quartz raven river saffron sequoia sierra thistle "
    "tundra velvet violet walnut willow zephyr"
).split()


@dataclass(frozen=True)
class Needle:
    """What stands in the text, what is asked at its end, and the answer to that."""

    statement: str
    cue: str
    answer: str


def induction_needle(generator: np.random.Generator) -> Needle:
    """A random seven-digit key and five spaced digits; the cue repeats the words before them."""
    key = "".join(map(str, generator.integers(0, 10, 7)))
    answer = "".join(f" {digit}" for digit in generator.integers(0, 10, 5))
    cue = f"\nThe code of {key} is"
    return Needle(f"{cue}{answer}.\n", cue, answer)


def passkey_needle(generator: np.random.Generator) -> Needle:
    key = str(generator.integers(10_000, 100_000))
    return Needle(
        f"The pass key is {key}. Remember it. {key} is the pass key.\n",
        "What is the pass key? The pass key is",
        f" {key}",
    )


def haystack_needle(generator: np.random.Generator) -> Needle:
    """A fact in a sentence of its own; the question uses other words."""
    subject, number = generator.choice(SUBJECTS), generator.integers(10_000, 100_000)
    return Needle(
        f"\nOne of the special magic numbers for {subject} is: {number}.\n",
        f"\nWhat is the special magic number for {subject} mentioned in the text above? "
        f"The special magic number for {subject} mentioned in the text above is",
        f" {number}",
    )


TASKS: dict[str, Callable[[np.random.Generator], Needle]] = {
    "induction": induction_needle,
    "passkey": passkey_needle,
    "haystack": haystack_needle,
}


class Prompts:
    """
    Draws prompts of an exact length. Everything follows from the seed, the task, the length, the
    depth and the number of the prompt.

    Args:
        tokenizer: of the model.
        text: ids of real text `[N]` for the gap; where it is too short it is repeated.
    """

    def __init__(self, tokenizer, text: np.ndarray, seed: int = 0):
        self.tokenizer, self.text, self.seed = tokenizer, text, seed
        self._passkey_filler = self._encode(PASSKEY_FILLER)

    def _encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer(text, add_special_tokens=False).input_ids, np.int64)

    def _answer(self, text: str) -> np.ndarray:
        """Ids of an answer; spaced digits one by one, so that each is a decision of its own."""
        digits = text.split()
        if len(digits) == 1:
            return self._encode(text)
        return np.concatenate([self._encode(f" {digit}") for digit in digits])

    def digits(self, answer: np.ndarray) -> list[int]:
        """Which tokens of an answer count: those with a digit (some tokenizers split the space)."""
        return [
            i
            for i, token in enumerate(answer)
            if any(map(str.isdigit, self.tokenizer.decode(token)))
        ]

    def draw(
        self, task: str, length: int, depth: float, number: int, present: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        (prompt, answer) that together have `length` tokens; at `depth` 0 the needle stands at the
        start, at 1 right before the cue. If it is not `present`, more of the gap stands there.

        Raises `ValueError` where the needle and the cue alone are longer.
        """
        generator = np.random.default_rng(
            [self.seed, sorted(TASKS).index(task), length, round(depth * 1000), number]
        )
        needle = TASKS[task](generator)
        cue, answer = self._encode(needle.cue), self._answer(needle.answer)
        statement = np.empty(0, np.int64)
        if present:
            # As in the cue, token by token; the first mention is the one that is looked for.
            before, _, after = needle.statement.partition(needle.answer)
            statement = np.concatenate([self._encode(before), answer, self._encode(after)])
        gap_length = length - len(statement) - len(cue) - len(answer)
        if gap_length < 0:
            raise ValueError(f"A {task} prompt of {length} tokens has no room for its needle.")
        filler = self._passkey_filler if task == "passkey" else self.text
        start = 0 if task == "passkey" else int(generator.integers(len(filler)))
        gap = np.take(filler, np.arange(start, start + gap_length), mode="wrap")
        place = round(depth * gap_length)
        return np.concatenate([gap[:place], statement, gap[place:], cue]), answer


def needle_scores(predictions: list[list[int]], references: list[list[int]]) -> dict[str, float]:
    """
    `accuracy` over all answer tokens and `exact_match` over whole answers, of the most likely token
    ids beside the right ones.
    """
    pairs = list(zip(predictions, references, strict=True))
    hits = [[p == r for p, r in zip(*pair, strict=True)] for pair in pairs]
    return {
        "accuracy": sum(map(sum, hits)) / sum(map(len, hits)),
        "exact_match": sum(map(all, hits)) / len(hits),
    }


__all__ = ["TASKS", "Needle", "Prompts", "needle_scores"]
