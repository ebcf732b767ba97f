# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
The configuration of ATMA: typed fields, checked once, and the presets of the paper (arXiv
2606.25156).
"""

import importlib
import importlib.util
import math
import os

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig


@strict
class AtmaConfig(PreTrainedConfig):
    r"""
    Configuration of an ATMA model. The defaults are the 378M model of the paper.

    Args:
        vocab_size (`int`, defaults to 50304): Number of token ids.
        hidden_size (`int`, defaults to 1024): Width C of the residual stream.
        intermediate_size (`int`, *optional*): Inner width of the MLP; `None` means `4 *
            hidden_size`.
        num_hidden_layers (`int`, defaults to 16): Number of decoder layers.
        layer_types (`list[str]`, *optional*): `"conv"` or `"hybrid"` for each layer; `None` repeats
            conv, conv, hybrid, conv. A hybrid layer is polar (or softmax) attention with the memory
            beside it.
        num_attention_heads (`int`, defaults to 8): Number H of query heads.
        num_key_value_heads (`int`, defaults to 2): Number G of key/value heads; H is a multiple of
            G.
        head_dim (`int`, defaults to 128): Size D of a head: a multiple of 8 from 16 to 256. Heads
            of 8 run only with `kernel_backend="torch"`.
        conv_kernel_size (`int`, defaults to 3): Taps of the gated short convolutions.
        canon_kernel_size (`int`, defaults to 4): Taps of the canon convolutions of query, key and
            value.
        use_bias (`bool`, defaults to `True`): Whether the projections have a bias.
        rms_norm_eps (`float`, defaults to 1e-6): The eps of the norms that have a weight.
        logit_softcap (`float`, defaults to 15.0): Bound s of the logits, `s x / sqrt(x^2 + s^2)`.
        initializer_range (`float`, defaults to 0.02): Standard deviation of the initial weights.
        zero_init_residual (`bool`, defaults to `True`): Start the projections that write to the
            residual stream, and the head, at zero. Tests of caches need `False`: a silent mixer
            hides every fault.
        attention_type (`str`, defaults to `"polar"`): `"polar"`, or a softmax core for ablations:
            `"nope"`, `"rope"`.
        attention_window (`int`, *optional*): Number of keys that a query sees, its own included;
            `None` means all.
        use_memory (`bool`, defaults to `True`): Whether hybrid layers carry the gated-delta memory.
        memory_retention_bias (`float`, defaults to 3.9): Added to the retention logits.
        memory_write_bias (`float`, defaults to 0.0): Added to the write logits.
        memory_max_half_life (`float`, *optional*): Longest half-life, in tokens, that a memory head
            may have at run time; `None` leaves the trained retention as it is.
        distractor_keys (`int`, defaults to 0): Number R of random keys for the distractor loss in
            training.
        distractor_loss_coef (`float`, defaults to 0.01): Weight of that loss.
        max_position_embeddings (`int`, defaults to 2048): The training length. Informative: there
            is no positional table, and longer sequences are read as they are.
        fused_linear_cross_entropy (`bool`, defaults to `False`): Whether training computes the loss
            from the hidden states in chunks of tokens: the logits of a batch are never held, and
            not returned. Not in `eval()` mode, nor without `labels`.
        kernel_backend (`str`, defaults to `"auto"`): `"auto"`, `"triton"` or `"torch"`.
        decode_graph (`bool`, defaults to `True`): Whether decoding on a CUDA device is captured in
            a CUDA graph and replayed where that is possible.

    ```python
    >>> from atma import AtmaConfig, AtmaForCausalLM

    >>> model = AtmaForCausalLM(AtmaConfig.tiny())
    ```
    """

    model_type = "atma"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    # Heads are split over the devices, with their scalars, taps, pages and memory states; so is the
    # MLP. The gated convolutions multiply thirds of one projection, which are gathered for that.
    base_model_tp_plan = {
        "layers.*.mixer.q_proj": "colwise",
        "layers.*.mixer.k_proj": "colwise",
        "layers.*.mixer.v_proj": "colwise",
        "layers.*.mixer.gate_proj": "colwise",
        "layers.*.mixer.query_canon_weight": "colwise",
        "layers.*.mixer.key_canon_weight": "colwise",
        "layers.*.mixer.value_canon_weight": "colwise",
        "layers.*.mixer.null_value": "colwise",
        "layers.*.mixer.length_gain": "colwise",
        "layers.*.mixer.null_base": "colwise",
        "layers.*.mixer.null_slope": "colwise",
        "layers.*.mixer.magnitude_gain": "colwise",
        "layers.*.mixer.o_proj": "rowwise",
        "layers.*.mixer.count_proj": "rowwise",
        "layers.*.mixer.memory.retention_proj": "colwise",
        "layers.*.mixer.memory.write_proj": "colwise",
        "layers.*.mixer.memory.gate_proj": "colwise",
        "layers.*.mixer.memory.out_proj": "rowwise",
        "layers.*.mixer.in_proj": "colwise_gather_output",
        "layers.*.mixer.out_proj": "rowwise_split_input",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    vocab_size: int = 50304
    hidden_size: int = 1024
    intermediate_size: int | None = None
    num_hidden_layers: int = 16
    layer_types: list[str] | None = None
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 128
    conv_kernel_size: int = 3
    canon_kernel_size: int = 4
    use_bias: bool = True
    rms_norm_eps: float | int = 1e-6
    logit_softcap: float | int = 15.0
    initializer_range: float | int = 0.02
    zero_init_residual: bool = True
    attention_type: str = "polar"
    attention_window: int | None = None
    use_memory: bool = True
    memory_retention_bias: float | int = 3.9
    memory_write_bias: float | int = 0.0
    memory_max_half_life: float | int | None = None
    distractor_keys: int = 0
    distractor_loss_coef: float | int = 0.01
    max_position_embeddings: int = 2048
    fused_linear_cross_entropy: bool = False
    kernel_backend: str = "auto"
    decode_graph: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.layer_types is None:
            self.layer_types = [
                "hybrid" if i % 4 == 2 else "conv" for i in range(self.num_hidden_layers)
            ]
        # Configurations that other code saved with Transformers 5.17 may carry its newer name.
        self.layer_types = ["conv" if t == "linear_attention" else t for t in self.layer_types]
        self._check_fields()
        super().__post_init__(**kwargs)

    def validate_layer_type(self):
        """Replaces the stock check, which renames "conv" in Transformers 5.17."""
        self._check_fields()

    def _check_fields(self):
        """Refuses what the model cannot honour, with a plain `ValueError` of one sentence."""
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        unknown = sorted({t for t in self.layer_types if t not in ("conv", "hybrid")})
        if unknown:
            raise ValueError(
                f"layer_types may contain only 'conv' and 'hybrid', got {', '.join(unknown)}."
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers but num_hidden_layers is "
                f"{self.num_hidden_layers}: "
                "give one entry for each layer, or leave layer_types out."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                "num_key_value_heads "
                f"({self.num_key_value_heads})."
            )
        smallest_head = 8 if self.kernel_backend == "torch" else 16
        if self.head_dim % 8 or not smallest_head <= self.head_dim <= 256:
            raise ValueError(
                "head_dim must be a multiple of 8 from 16 to 256 (8 as well with "
                "kernel_backend='torch'), "
                f"got {self.head_dim}."
            )
        for name in ("conv_kernel_size", "canon_kernel_size"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2 taps, got {getattr(self, name)}.")
        if self.attention_type not in ("polar", "nope", "rope"):
            raise ValueError(
                f"attention_type must be 'polar', 'nope' or 'rope', got {self.attention_type!r}."
            )
        if self.kernel_backend not in ("auto", "triton", "torch"):
            raise ValueError(
                f"kernel_backend must be 'auto', 'triton' or 'torch', got {self.kernel_backend!r}."
            )
        if self.attention_window is not None and self.attention_window < 1:
            raise ValueError(
                "attention_window must be at least 1 key, or None for the full context, got "
                f"{self.attention_window}."
            )
        if self.memory_max_half_life is not None and not self.memory_max_half_life > 0:
            raise ValueError(
                "memory_max_half_life must be a positive number of tokens, or None, got "
                f"{self.memory_max_half_life}."
            )
        if self.distractor_keys < 0:
            raise ValueError(f"distractor_keys must be 0 or more, got {self.distractor_keys}.")
        if self.distractor_keys and self.attention_type != "polar":
            raise ValueError(
                f"distractor_keys needs attention_type='polar': the {self.attention_type!r} core "
                "has no null to take "
                "mass from; set distractor_keys=0."
            )
        for name in ("rms_norm_eps", "logit_softcap"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}.")
        for name in ("memory_retention_bias", "memory_write_bias"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite, got {getattr(self, name)}.")
        if self.initializer_range < 0 or self.distractor_loss_coef < 0:
            raise ValueError("initializer_range and distractor_loss_coef must not be negative.")

    @classmethod
    def paper_378m(cls, **overrides) -> "AtmaConfig":
        """
        The 378M model of the paper (its sizes are the defaults), with the GPT-2 end-of-text token.
        """
        return cls(**{"bos_token_id": 50256, "eos_token_id": 50256, **overrides})

    @classmethod
    def tiny(cls, **overrides) -> "AtmaConfig":
        """
        A model of 0.34M parameters that has every layer kind, for tests and first looks on a
        CPU.
        """
        fields = {
            "vocab_size": 512,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
        }
        return cls(**{**fields, **overrides})

    def save_pretrained(self, save_directory, push_to_hub=False, **kwargs):
        """
        Saves the configuration and, beside it, the code that loads it: a folder that the package
        saved loads with `trust_remote_code=True` in a process that never saw this package.
        """
        # Found at run time, because a remote copy of this file has no exporter beside it: there the
        # stock copier of Transformers saves the (already flat) files again. An import statement
        # would be followed by its loader.
        exporter = __package__ and importlib.util.find_spec(".hub_atma", __package__)
        if not exporter:
            return super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)
        importlib.import_module(exporter.name).export_code(self, save_directory)
        super().save_pretrained(save_directory)
        if push_to_hub:
            # The stock upload sends only what the stock method wrote: no code.
            repo_id = kwargs.pop("repo_id", os.path.basename(os.path.normpath(save_directory)))
            self.push_to_hub(repo_id, **kwargs)


__all__ = ["AtmaConfig"]
