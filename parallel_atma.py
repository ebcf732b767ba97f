# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Tensor parallelism (`AtmaConfig.base_model_tp_plan`): what a device holds, what is refused."""

import torch


def local_shard(parameter: torch.Tensor) -> torch.Tensor:
    """What this device holds of a parameter that tensor parallelism splits over the heads."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def check_tensor_parallel(config, num_devices: int) -> None:
    """Refuses a split over devices (`config.base_model_tp_plan`) that heads or losses forbid."""
    if num_devices == 1:
        return
    if config.num_key_value_heads % num_devices:
        raise ValueError(
            f"Tensor parallelism gives each device whole heads: {config.num_key_value_heads} "
            f"key/value heads cannot be split over {num_devices} devices. Use a number of devices "
            "that divides them."
        )
    if config.distractor_keys:
        raise ValueError(
            "The distractor loss is a mean over all heads, which tensor parallelism splits: set "
            "distractor_keys=0, or train with data parallelism."
        )


__all__ = ["check_tensor_parallel", "local_shard"]
