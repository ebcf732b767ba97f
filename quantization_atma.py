# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""What quantisation leaves alone unless told otherwise."""

import copy

from transformers.quantizers import AutoQuantizationConfig

# Never quantised, as patterns of names: the head, and the few numbers per token that steer the
# memory and the count. (Norms, taps and scalars are no projections and stay as they are anyhow.)
UNQUANTISED = ("lm_head", r".*\.retention_proj", r".*\.write_proj", r".*\.count_proj")


def spare_from_quantisation(quantization_config):
    """
    A copy of the configuration (or of the dictionary of one) that skips `UNQUANTISED` too: a list
    of its own would replace the protection that Transformers gives by default.
    """
    if isinstance(quantization_config, dict):
        quantization_config = AutoQuantizationConfig.from_dict(quantization_config)
    spared = copy.copy(quantization_config)
    for name in ("modules_to_not_convert", "llm_int8_skip_modules"):
        if hasattr(spared, name):
            setattr(spared, name, [*(getattr(spared, name) or ()), *UNQUANTISED])
    return spared


__all__ = ["UNQUANTISED", "spare_from_quantisation"]
