# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The measures of evaluate.py as metrics of Hugging Face's `evaluate` library."""

import math

import datasets
import evaluate

from .needles import needle_scores


class NeedleAccuracy(evaluate.Metric):
    """`accuracy` and `exact_match` of answers given as lists of token ids."""

    def _info(self) -> evaluate.MetricInfo:
        ids = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=NeedleAccuracy.__doc__,
            citation="",
            inputs_description="predictions and references: lists of token ids, as long as each "
            "other",
            features=datasets.Features({"predictions": ids, "references": ids}),
        )

    def _compute(self, predictions, references) -> dict[str, float]:
        return needle_scores(predictions, references)


class BitsPerByte(evaluate.Metric):
    """`bits_per_byte` of texts: the nats that a model spent on each, over their bytes."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=BitsPerByte.__doc__,
            citation="",
            inputs_description="predictions: nats of each text; references: its bytes",
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references) -> dict[str, float]:
        return {"bits_per_byte": sum(predictions) / math.log(2) / sum(references)}


__all__ = ["BitsPerByte", "NeedleAccuracy"]
