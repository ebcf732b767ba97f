# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
ATMA, a hybrid language model (arXiv 2606.25156): gated short convolutions, and attention layers
that report a direction, a magnitude and a recurrent memory.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple, logging

from .cache_atma import AtmaCache, AtmaConvLayer, AtmaHybridLayer
from .configuration_atma import AtmaConfig
from .decode_graph_atma import replay_step
from .decode_layer_atma import can_fuse, fused_step
from .generation_atma import AtmaGenerationMixin
from .kernels.columns import place_after
from .kernels.cross_entropy import soft_cap
from .kernels.decode_convolution import canon_step, gated_causal_conv1d_step
from .kernels.gated_delta import gated_delta, gated_delta_step, log_retention
from .kernels.paged_polar_attention import paged_polar_attention
from .kernels.polar_attention import (
    PolarOutput,
    distractor_mass,
    polar_attention,
    polar_attention_reference,
)
from .kernels.rms_norm import add_rms_norm, gated_rms_norm, rms_norm, sigmoid_gate
from .kernels.separate_gradient import separate_gradient
from .kernels.short_convolution import canon_convolution, gated_causal_conv1d
from .kernels.softmax_attention import apply_rotary, softmax_attention
from .kernels.squared_relu import squared_relu_product
from .layout_atma import TokenLayout, build_layout, keep_positions, same_boundaries
from .loss_atma import distractor_term, loss_of_hidden_states, loss_of_logits
from .outputs_atma import (
    CACHE_NAME,
    AtmaCausalLMOutput,
    AtmaDiagnostics,
    AtmaModelOutput,
    kept_hidden_states,
)
from .parallel_atma import check_tensor_parallel, local_shard
from .plain_atma import is_plain_linear
from .quantization_atma import spare_from_quantisation
from .rollback_atma import RollbackState
from .trl_atma import with_soft_cap

logger = logging.get_logger(__name__)

# Up to this many tokens on top of a cache, states advance in place, token by token.
MAX_STEP_TOKENS = 8


def residual_projection(in_features: int, config: AtmaConfig) -> nn.Linear:
    """A projection that writes to the residual stream: it may start at zero (`_init_weights`)."""
    linear = nn.Linear(in_features, config.hidden_size, config.use_bias)
    linear.starts_at_zero = config.zero_init_residual
    return linear


class AtmaRMSNorm(nn.Module):
    """RMSNorm with a weight."""

    def __init__(self, config: AtmaConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.eps = config.rms_norm_eps
        self.kernel_backend = config.kernel_backend

    def forward(self, hidden_states: torch.Tensor, update: torch.Tensor | None = None):
        """The norm of `hidden_states`; with an `update`, that of the sum, and the sum."""
        if update is None:
            return rms_norm(hidden_states, self.weight, self.eps, backend=self.kernel_backend)
        return add_rms_norm(
            hidden_states, update, self.weight, self.eps, backend=self.kernel_backend
        )

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class AtmaMLP(nn.Module):
    """`down( relu(gate(x))^2 * up(x) )`."""

    def __init__(self, config: AtmaConfig):
        super().__init__()
        self.kernel_backend = config.kernel_backend
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, config.use_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, config.use_bias)
        self.down_proj = residual_projection(config.intermediate_size, config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
        return self.down_proj(squared_relu_product(gate, up, backend=self.kernel_backend))


def can_step(layout: TokenLayout, state: RollbackState | None) -> bool:
    """
    Whether a state advances in place over the tokens of a call: it exists, they are few and of one
    document, and no gradient needs the state before.
    """
    return (
        state is not None
        and state.current is not None
        and layout.shape[1] <= MAX_STEP_TOKENS
        and layout.cu_seqlens is None
        and not torch.is_grad_enabled()
    )


class AtmaShortConv(nn.Module):
    """The gated convolution of LFM2: `b, c, h = in_proj(x)`, `out_proj( c * conv(b * h) )`."""

    def __init__(self, config: AtmaConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.kernel_backend = config.kernel_backend
        self.in_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size, config.use_bias)
        self.out_proj = residual_projection(config.hidden_size, config)
        # Taps of a depthwise convolution, the current token's last. A bare parameter, so that
        # offload hooks see its use.
        self.conv_weight = nn.Parameter(torch.empty(config.hidden_size, config.conv_kernel_size))

    def forward(
        self, hidden_states: torch.Tensor, layout: TokenLayout, state: AtmaConvLayer | None
    ) -> torch.Tensor:
        projected = self.in_proj(layout.gather(hidden_states))
        if can_step(layout, state and state.conv):
            state.conv.remember()
            y, conv_input = gated_causal_conv1d_step(
                projected,
                self.conv_weight,
                state.conv_state,
                lengths=layout.lengths,
                backend=self.kernel_backend,
            )
            state.conv.commit(None, (conv_input,))
            return layout.scatter(self.out_proj(y))
        y, conv_input = gated_causal_conv1d(
            projected,
            self.conv_weight,
            initial_state=None if state is None else state.conv.for_forward(),
            cu_seqlens=layout.cu_seqlens,
            return_input=state is not None,
            backend=self.kernel_backend,
        )
        if state is not None:
            state.update_conv(layout.rows(conv_input), layout.state_lengths)
        return layout.scatter(self.out_proj(y))


class AtmaMemory(nn.Module):
    """The recurrent memory: a gated delta rule on the attention's own query, key and value."""

    def __init__(self, config: AtmaConfig):
        super().__init__()
        heads, width = config.num_attention_heads, config.num_attention_heads * config.head_dim
        self.retention_proj = nn.Linear(config.hidden_size, heads, config.use_bias)
        self.write_proj = nn.Linear(config.hidden_size, heads, config.use_bias)
        self.gate_proj = nn.Linear(config.hidden_size, width, config.use_bias)
        self.out_proj = residual_projection(width, config)
        self.rule = {
            "retention_bias": float(config.memory_retention_bias),
            "write_bias": float(config.memory_write_bias),
            "max_half_life": config.memory_max_half_life,
            "backend": config.kernel_backend,
        }

    def forward(
        self,
        hidden_states: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: TokenLayout,
        state: AtmaHybridLayer | None,
        diagnostics: AtmaDiagnostics | None,
    ) -> torch.Tensor:
        """
        `hidden_states` `[B, T, C]`, `query` `[B, T, H, D]`, `key` and `value` `[B, T, G, D]`, all
        in the mixers' order; returns `[B, T, C]`.
        """
        retention_logits = self.retention_proj(hidden_states)
        write_logits = self.write_proj(hidden_states)
        gate = self.gate_proj(hidden_states).view(query.shape)
        inputs = (key, value, retention_logits, write_logits)
        memory = state and state.memory
        if can_step(layout, memory):
            memory.remember()
            read = gated_delta_step(
                query,
                *inputs,
                memory.current,
                **self.rule,
                lengths=layout.lengths,
                readout_gate=gate,
            )
            memory.commit(None, inputs)
            final_state = memory.current
        else:
            read, final_state = self._read(
                query, inputs, layout, memory, want_state=diagnostics is not None
            )
            read = gated_rms_norm(read, gate, backend=self.rule["backend"])
        if diagnostics is not None:
            log_gamma = log_retention(
                retention_logits.detach(), self.rule["retention_bias"], self.rule["max_half_life"]
            )
            diagnostics.half_life = layout.scatter(-math.log(2) / log_gamma)
            diagnostics.memory_norm = final_state.detach().flatten(2).norm(dim=2)
        return self.out_proj(read.flatten(2))

    def _read(self, query, inputs, layout: TokenLayout, memory: RollbackState | None, want_state):
        """The read `[B, T, H, D]` of a whole sequence and the state after it; stores the state."""
        if memory is None:
            return gated_delta(
                query,
                *inputs,
                **self.rule,
                cu_seqlens=layout.cu_seqlens,
                output_final_state=want_state,
            )
        memory.remember()
        if layout.cu_seqlens is not None:
            read, _ = gated_delta(query, *inputs, **self.rule, cu_seqlens=layout.cu_seqlens)
            query, *inputs = (layout.rows(x) for x in (query, *inputs))
            _, final_state = gated_delta(
                query, *inputs, **self.rule, lengths=layout.state_lengths, output_final_state=True
            )
        else:
            read, final_state = gated_delta(
                query,
                *inputs,
                **self.rule,
                initial_state=memory.for_forward(),
                lengths=layout.lengths,
                output_final_state=True,
            )
        memory.commit(final_state, tuple(inputs))
        return read, final_state


class AtmaAttention(nn.Module):
    """
    The mixer of a hybrid layer: `out = content + count + memory`.

    content is what attention found (polar: a unit direction; softmax cores: the weighted mean),
    times an output gate; count is the magnitude stream, projected; memory is the gated-delta read.
    """

    def __init__(self, config: AtmaConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.window = config.attention_window
        self.kernel_backend = config.kernel_backend
        self.is_polar = config.attention_type == "polar"
        self.is_rotary = config.attention_type == "rope"
        heads, groups, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        C, bias = config.hidden_size, config.use_bias
        self.q_proj = nn.Linear(C, heads * D, bias)
        self.gate_proj = nn.Linear(C, heads * D, bias)
        self.k_proj = nn.Linear(C, groups * D, bias)
        self.v_proj = nn.Linear(C, groups * D, bias)
        self.o_proj = residual_projection(heads * D, config)
        if not self.is_rotary:
            self.query_canon_weight = nn.Parameter(torch.empty(heads * D, config.canon_kernel_size))
            self.key_canon_weight = nn.Parameter(torch.empty(groups * D, config.canon_kernel_size))
            self.value_canon_weight = nn.Parameter(
                torch.empty(groups * D, config.canon_kernel_size)
            )
        if self.is_polar:
            self.count_proj = nn.Linear(heads, C, bias)
            self.null_value = nn.Parameter(torch.empty(heads, D))
            self.length_gain = nn.Parameter(torch.empty(heads))
            self.null_base = nn.Parameter(torch.empty(heads))
            self.null_slope = nn.Parameter(torch.empty(heads))
            self.magnitude_gain = nn.Parameter(torch.empty(heads))
        self.memory = AtmaMemory(config) if config.use_memory else None

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        """Queries or keys, RMS-normalised per head; heads are flattened into channels."""
        return rms_norm(self._heads(x), backend=self.kernel_backend).flatten(2)

    def _canon(self, query, key, value, layout: TokenLayout, state: AtmaHybridLayer | None):
        """`y + conv(y)` on query, key and value, whose heads are flattened into channels."""
        streams = (query, key, value)
        weights = tuple(
            local_shard(x)
            for x in (self.query_canon_weight, self.key_canon_weight, self.value_canon_weight)
        )
        if can_step(layout, state and state.conv):
            state.conv.remember()
            mixed = canon_step(
                *streams,
                *weights,
                state.conv_state,
                lengths=layout.lengths,
                backend=self.kernel_backend,
            )
            if state.record_past:
                state.conv.commit(None, (torch.cat(streams, dim=-1),))
            return mixed
        windows = None
        if state is not None and (window := state.conv.for_forward()) is not None:
            windows = window.split([x.shape[-1] for x in streams], dim=-1)
        mixed = canon_convolution(
            *streams,
            *weights,
            initial_states=windows,
            cu_seqlens=layout.cu_seqlens,
            backend=self.kernel_backend,
        )
        if state is not None:
            state.update_conv(layout.rows(torch.cat(streams, dim=-1)), layout.state_lengths)
        return mixed

    def _positions(self, query: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        if layout.positions is not None:
            return layout.positions
        positions = torch.arange(query.shape[1], device=query.device)
        if layout.cu_seqlens is not None:
            document = torch.searchsorted(layout.cu_seqlens.long(), positions, right=True) - 1
            return positions - layout.cu_seqlens.long()[document]
        return positions if layout.start is None else positions + layout.start[:, None]

    def _attend(self, query, key, value, layout, state, output_attentions, diagnostics):
        """
        Attention of the new queries over everything visible. Returns the direction (or weighted
        mean) `[B, T, H, D]`, the magnitude `[B, T, H]` (`None` for softmax cores) and, on request,
        the real-key weights `[B, H, T, S]`.
        """
        if state is not None:
            new_key, new_value = layout.rows(key), layout.rows(value)
            start = layout.start
            if start is None:
                start = torch.zeros(new_key.shape[0], dtype=torch.int64, device=key.device)
            state.write(new_key, new_value, start, layout.state_lengths)
        has_past = layout.start is not None
        if self.is_polar and has_past and not output_attentions and not torch.is_grad_enabled():
            output = paged_polar_attention(
                query,
                *state.slabs(),
                self._pages(state, query),
                layout.start,
                *self._null_and_scalars(),
                window=self.window,
                return_statistics=diagnostics is not None,
                backend=self.kernel_backend,
            )
            return self._report(output, layout, diagnostics)

        if has_past:
            past_key, past_value = state.past()
            key = place_after(past_key, key, layout.start)
            value = place_after(past_value, value, layout.start)
        visible = {
            "cu_seqlens": layout.cu_seqlens,
            "window": self.window,
            "query_start": layout.start,
        }
        if not self.is_polar:
            implementation = self.config._attn_implementation or "sdpa"
            content, weights = softmax_attention(
                query,
                key,
                value,
                scale=0.12 if self.is_rotary else self.head_dim**-0.5,
                implementation="eager" if output_attentions else implementation,
                return_weights=output_attentions,
                **visible,
            )
            return content, None, weights
        inputs = (query, key, value, *self._null_and_scalars())
        want_statistics = diagnostics is not None
        if output_attentions:
            output = polar_attention_reference(
                *inputs, return_statistics=want_statistics, return_weights=True, **visible
            )
        else:
            output = polar_attention(
                *inputs, return_statistics=want_statistics, backend=self.kernel_backend, **visible
            )
        return self._report(output, layout, diagnostics)

    def _pages(self, state: AtmaHybridLayer, query: torch.Tensor) -> torch.Tensor:
        # On a GPU the whole table: kernels stop at a row's length, and a captured step needs one
        # shape.
        rows = state.rows
        table = rows.page_table if query.is_cuda else rows.visible_pages(query.shape[1])
        return table.to(query.device)

    def _null_and_scalars(self) -> tuple[torch.Tensor, ...]:
        parameters = (
            self.null_value,
            self.length_gain,
            self.null_base,
            self.null_slope,
            self.magnitude_gain,
        )
        return tuple(local_shard(x) for x in parameters)

    def _report(self, output: PolarOutput, layout: TokenLayout, diagnostics):
        if diagnostics is not None:
            diagnostics.n_eff = layout.scatter(output.statistics.n_eff)
            diagnostics.null_weight = layout.scatter(output.statistics.null_weight)
            diagnostics.magnitude = layout.scatter(output.magnitude.detach())
        return output.direction, output.magnitude, output.weights

    def _weights_of_columns(self, weights, layout: TokenLayout, state) -> torch.Tensor:
        """
        Attention weights in the caller's columns. Without stored keys `[B, H, T, T]`; on top of a
        cache `[B, H, T, columns seen]`, where a row's keys are its real tokens in order, then
        zeros.
        """
        B, T = layout.shape
        if layout.cu_seqlens is not None:
            heads = weights.shape[1]
            blocks = weights.view(heads, B, T, B, T).diagonal(dim1=1, dim2=3)
            return blocks.permute(3, 0, 1, 2)
        if layout.inverse is not None:
            rows = layout.inverse[:, None, :, None].expand(
                -1, weights.shape[1], -1, weights.shape[3]
            )
            weights = weights.gather(2, rows)
            if layout.start is None:
                columns = layout.inverse[:, None, None, :].expand(*weights.shape[:3], -1)
                weights = weights.gather(3, columns)
                real = layout.lengths[:, None] > layout.inverse
                weights = weights * real[:, None, None, :]
        if layout.start is not None:
            width = int(state.rows.padded_length) + T
            weights = F.pad(weights, (0, max(width - weights.shape[3], 0)))[..., :width]
        return weights

    def _distractor_mass(self, hidden_states, query, layout: TokenLayout) -> torch.Tensor:
        """Mean mass that random inputs, as detached keys, take from the null."""
        noise = torch.randn(
            self.config.distractor_keys,
            hidden_states.shape[-1],
            dtype=hidden_states.dtype,
            device=hidden_states.device,
        )
        with torch.no_grad():
            distractor_key = rms_norm(self._heads(self.k_proj(noise)))
        return distractor_mass(
            query,
            distractor_key,
            self.length_gain,
            self.null_base,
            self.null_slope,
            cu_seqlens=layout.cu_seqlens,
            window=self.window,
            query_start=layout.start,
            lengths=layout.lengths,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: TokenLayout,
        state: AtmaHybridLayer | None,
        output_attentions: bool = False,
        diagnostics: AtmaDiagnostics | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """
        `hidden_states` `[B, T, C]` in the caller's columns. Returns the same shape, the attention
        weights and the distractor mass (each `None` unless wanted), and fills `diagnostics`.
        """
        hidden_states = layout.gather(hidden_states)
        query = self._normalise(self.q_proj(hidden_states))
        key = self._normalise(self.k_proj(hidden_states))
        value = self.v_proj(hidden_states)
        if not self.is_rotary:
            query, key, value = self._canon(query, key, value, layout, state)
        query, key, value = self._heads(query), self._heads(key), self._heads(value)

        memory = None
        if self.memory is not None:
            memory = self.memory(hidden_states, query, key, value, layout, state, diagnostics)
        if self.is_rotary:
            positions = self._positions(query, layout)
            query, key = apply_rotary(query, positions), apply_rotary(key, positions)

        content, magnitude, weights = self._attend(
            query, key, value, layout, state, output_attentions, diagnostics
        )
        gate = self.gate_proj(hidden_states).view_as(content)
        content = sigmoid_gate(content, gate, backend=self.kernel_backend)
        output = self.o_proj(content.flatten(2))
        # The biases of these projections have equal gradients.
        if self.is_polar:
            output = output + separate_gradient(self.count_proj(magnitude), 0)
        if memory is not None:
            output = output + separate_gradient(memory, 1)

        mass = None
        if self.training and self.config.distractor_keys:
            mass = self._distractor_mass(hidden_states, query, layout)
        if weights is not None:
            weights = self._weights_of_columns(weights, layout, state)
        return layout.scatter(output), weights, mass


class AtmaDecoderLayer(GradientCheckpointingLayer):
    """`x = x + mixer(norm1(x)); x = x + mlp(norm2(x))`."""

    def __init__(self, config: AtmaConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.is_hybrid = config.layer_types[layer_idx] == "hybrid"
        self.mixer = (
            AtmaAttention(config, layer_idx) if self.is_hybrid else AtmaShortConv(config, layer_idx)
        )
        self.mlp = AtmaMLP(config)
        self.input_norm = AtmaRMSNorm(config)
        self.post_norm = AtmaRMSNorm(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: TokenLayout,
        cache: AtmaCache | None = None,
        output_attentions: bool = False,
        output_diagnostics: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, AtmaDiagnostics | None]:
        layout = layout.to(hidden_states.device)
        state = None if cache is None else cache.states_for(self.layer_idx)
        if not (output_attentions or output_diagnostics) and can_fuse(
            self, __name__, hidden_states, layout, state
        ):
            return fused_step(self, hidden_states, layout, state), None, None, None
        mixed, weights, mass, diagnostics = self.input_norm(hidden_states), None, None, None
        if self.is_hybrid:
            diagnostics = AtmaDiagnostics() if output_diagnostics else None
            mixed, weights, mass = self.mixer(mixed, layout, state, output_attentions, diagnostics)
        else:
            mixed = self.mixer(mixed, layout, state)
        normalised, hidden_states = self.post_norm(hidden_states, mixed)
        hidden_states = hidden_states + self.mlp(normalised)
        return hidden_states, weights, mass, diagnostics


class AtmaPreTrainedModel(PreTrainedModel):
    config_class = AtmaConfig
    config: AtmaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["AtmaDecoderLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _is_stateful = False

    @classmethod
    def from_pretrained(cls, *args, quantization_config=None, **kwargs):
        """As in Transformers. A `quantization_config` is completed by `UNQUANTISED`."""
        if quantization_config is not None:
            kwargs["quantization_config"] = spare_from_quantisation(quantization_config)
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        check_tensor_parallel(model.config, model.tp_size or 1)
        return loaded

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # Transformers looks for its own attention interface in the source to decide this.
        return True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """
        Starts at zero only what writes to the residual stream (and the head). A zero inside a
        product would have no gradient for ever.
        """
        config = self.config
        std = config.initializer_range
        if isinstance(module, nn.Linear):
            if getattr(module, "starts_at_zero", False):
                init.zeros_(module.weight)
            else:
                init.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, AtmaRMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, AtmaShortConv):
            init_taps(module.conv_weight, config.conv_kernel_size)
        elif isinstance(module, AtmaAttention):
            if not module.is_rotary:
                init_taps(module.query_canon_weight, config.canon_kernel_size)
                init_taps(module.key_canon_weight, config.canon_kernel_size)
                init_taps(module.value_canon_weight, config.canon_kernel_size)
            if module.is_polar:
                init.zeros_(module.null_value)
                init.constant_(module.length_gain, -1.0)
                init.constant_(module.null_base, 2.0)
                init.constant_(module.null_slope, 0.5)
                init.constant_(module.magnitude_gain, -1.5)


def init_taps(weight: torch.Tensor, kernel_size: int) -> None:
    """Uniform with the bound `1 / sqrt(taps)`, as depthwise convolutions usually start."""
    bound = kernel_size**-0.5
    init.uniform_(weight, -bound, bound)


class AtmaModel(AtmaPreTrainedModel):
    """The decoder: embeddings, decoder layers, final norm."""

    def __init__(self, config: AtmaConfig):
        # from_pretrained(..., field=value) sets fields that nobody has looked at; fewer layers are
        # the first ones.
        config.layer_types = config.layer_types[: config.num_hidden_layers]
        config.validate_layer_type()
        super().__init__(config)
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            AtmaDecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = AtmaRMSNorm(config)
        self.gradient_checkpointing = False
        self.post_init()

    def _resolve_cache(self, cache, past_key_values, use_cache, kwargs) -> AtmaCache | None:
        """The cache of this call, under whichever of its names it came, or `None`."""
        for name, value in kwargs.items():
            if isinstance(value, Cache):
                raise TypeError(
                    f"forward() got a cache as {name!r}: pass it as 'cache' or 'past_key_values'."
                )
        if cache is not None and past_key_values is not None and cache is not past_key_values:
            raise ValueError("Pass either cache or past_key_values, not two different caches.")
        cache = past_key_values if cache is None else cache
        if cache is not None and not use_cache:
            # Llama reads a cache that it was given even with use_cache=False; so do we.
            use_cache = True
        recomputes = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if recomputes:
            if cache is not None and cache.get_seq_length() > 0:
                raise ValueError(
                    "A filled cache cannot be used in training with gradient checkpointing, which "
                    "would feed its tokens "
                    "twice: call gradient_checkpointing_disable(), or train without a cache."
                )
            if use_cache:
                logger.warning_once(
                    "Gradient checkpointing recomputes the layers: use_cache is off for it."
                )
            return None
        if cache is None:
            return AtmaCache(self.config) if use_cache else None
        # By name, not by class: a checkpoint's own copy of this code has its own AtmaCache.
        if type(cache).__name__ == "AtmaCache":
            if not cache.fits(self.config):
                raise ValueError(
                    "This AtmaCache was made for a model of other layers or heads: each model "
                    "needs a cache of its own, AtmaCache(model.config)."
                )
            return cache
        if type(cache) is DynamicCache and cache.get_seq_length() > 0:
            return AtmaCache.from_prefix(self.config, cache)
        raise ValueError(
            "ATMA keeps convolution and memory states beside keys and values, which "
            f"{type(cache).__name__} cannot hold: "
            "pass an AtmaCache(model.config), or no cache and use_cache=True."
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        output_diagnostics: bool = False,
        cu_seq_lens_q: torch.Tensor | None = None,
        cu_seq_lens_k: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        **kwargs,
    ) -> AtmaModelOutput:
        """
        Args:
            input_ids (`[B, T]`) or inputs_embeds (`[B, T, C]`): exactly one of them.
            attention_mask (`[B, T]` or `[B, columns seen + T]`): 1 at real tokens, 0 at padding,
                which may stand anywhere.
            position_ids (`[B, T]`): rotary positions for `attention_type="rope"`. Without a mask
                and a filled cache, ids that restart at 0 mark packed documents, which do not see
                each other.
            cache, past_key_values: an `AtmaCache` to continue and fill (either name).
            use_cache: whether to return a cache. Defaults to `config.use_cache`, and to `False` in
                a training step.
            output_hidden_states (`bool`, `int` or `list[int]`): whether to return the input of
                every layer and the output of the final norm, or which of them (others are `None`).
            output_diagnostics: whether to return an `AtmaDiagnostics` for each hybrid layer.
            cu_seq_lens_q (`[N + 1]`): boundaries of packed documents in one row, instead of
                `position_ids`. `cu_seq_lens_k` must be the same. `seq_idx` (`[B, T]`): the document
                of each token, instead of either.

        Raises `ValueError` where an argument cannot be honoured.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        if cu_seq_lens_k is not None and not same_boundaries(cu_seq_lens_q, cu_seq_lens_k):
            raise ValueError(
                "cu_seq_lens_q and cu_seq_lens_k must be the same: queries and keys are the same "
                "tokens."
            )
        config = self.config
        if use_cache is None:  # a training step has no use for one
            use_cache = config.use_cache and not (self.training and torch.is_grad_enabled())
        output_attentions = (
            config.output_attentions if output_attentions is None else output_attentions
        )
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        kept = kept_hidden_states(output_hidden_states, len(self.layers) + 1)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        B, T = inputs_embeds.shape[:2]
        device = inputs_embeds.device
        cache = self._resolve_cache(cache, past_key_values, use_cache, kwargs)
        if T == 0 and (cache is None or not cache.has_content):
            raise ValueError("The input holds no tokens: give at least one.")
        layout = build_layout(
            (B, T), device, attention_mask, position_ids, cu_seq_lens_q, seq_idx, cache
        )
        if cache is not None:
            cache.prepare(B, T, device)

        hidden_states = inputs_embeds
        all_hidden_states, all_weights, masses, diagnostics = [], [], [], []
        for i, layer in enumerate(self.layers):
            all_hidden_states.append(hidden_states if i in kept else None)
            hidden_states, weights, mass, layer_diagnostics = layer(
                hidden_states,
                layout=layout,
                cache=cache,
                output_attentions=bool(output_attentions),
                output_diagnostics=output_diagnostics,
            )
            if layer.is_hybrid:
                all_weights.append(weights)
                diagnostics.append(layer_diagnostics)
            if mass is not None:
                masses.append(mass)
        hidden_states = self.norm(hidden_states)
        all_hidden_states.append(hidden_states if len(self.layers) in kept else None)
        if cache is not None:
            mask = None
            if layout.cu_seqlens is not None:
                mask = torch.zeros(B, T, dtype=torch.bool, device=device)
                column = torch.arange(T, device=device)
                mask = column >= T - layout.tail_lengths[:, None]
            elif attention_mask is not None:
                mask = attention_mask[:, -T:].bool()
            cache.advance(T, mask, layout.state_lengths)
        return AtmaModelOutput(
            last_hidden_state=hidden_states,
            hidden_states=tuple(all_hidden_states) if kept else None,
            attentions=tuple(all_weights) if output_attentions else None,
            distractor_loss=torch.stack([m.to(device) for m in masses]).mean() if masses else None,
            diagnostics=tuple(diagnostics) if output_diagnostics else None,
            **{CACHE_NAME: cache},
        )


class AtmaForCausalLM(AtmaPreTrainedModel, AtmaGenerationMixin):
    """ATMA with its language-model head and the algebraic soft cap on the logits."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: AtmaConfig):
        super().__init__(config)
        self.vocab_size = config.vocab_size
        self.model = AtmaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, config.use_bias)
        # Tied, it is the embedding, which must not start at zero.
        self.lm_head.starts_at_zero = config.zero_init_residual and not config.tie_word_embeddings
        self.post_init()

    def __setattr__(self, name: str, value) -> None:
        # TRL puts a forward here that would read the head's weights, past the soft cap.
        super().__setattr__(name, with_soft_cap(self, value) if name == "forward" else value)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        past_key_values: Cache | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        output_diagnostics: bool = False,
        **kwargs,
    ) -> AtmaCausalLMOutput:
        """
        Arguments as in `AtmaModel.forward`, and:

            labels (`[B, T]`): token ids to predict, shifted inside; -100 is ignored.
            logits_to_keep: how many of the last positions get logits (0: all), or which: a 1-D
                tensor of positions, a 2-D integer tensor of positions for each row, or a boolean
                mask. Not together with `labels`.
            num_items_in_batch (keyword): number of labels over which the loss is averaged, as
                `Trainer` passes it.

        Logits come in the dtype of the head; the loss is computed in fp32. With
        `config.fused_linear_cross_entropy`, a call in training mode with labels returns the loss
        alone: `logits` is `None`. (Label smoothing and `compute_loss_func` of `Trainer` are not
        affected: they take the labels away and get logits.)
        """
        given = past_key_values if cache is None else cache
        extras = {
            "inputs_embeds": inputs_embeds,
            "labels": labels,
            "output_attentions": output_attentions or self.config.output_attentions,
            "output_hidden_states": output_hidden_states or self.config.output_hidden_states,
            "output_diagnostics": output_diagnostics,
            "positions": isinstance(logits_to_keep, torch.Tensor),
            **{name: value for name, value in kwargs.items() if name != "return_dict"},
        }
        logits = replay_step(self, AtmaForCausalLM, given, input_ids, attention_mask, extras)
        if logits is not None:
            return AtmaCausalLMOutput(logits=logits, **{CACHE_NAME: given})
        by_default = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if labels is not None and not by_default:
            raise ValueError("labels need the logits of all positions: leave logits_to_keep at 0.")
        outputs: AtmaModelOutput = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            past_key_values=past_key_values,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            output_diagnostics=output_diagnostics,
            return_dict=True,
            **{name: value for name, value in kwargs.items() if name != "return_dict"},
        )
        hidden_states = keep_positions(outputs.last_hidden_state, logits_to_keep)
        if labels is None:
            loss, logits = None, self.logits_of(hidden_states)
        else:
            loss, logits = self._loss(hidden_states, labels, kwargs)
            if outputs.distractor_loss is not None:
                loss = loss + self.config.distractor_loss_coef * distractor_term(
                    outputs.distractor_loss, labels, **kwargs
                )
        return AtmaCausalLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            distractor_loss=outputs.distractor_loss,
            diagnostics=outputs.diagnostics,
            **{CACHE_NAME: getattr(outputs, CACHE_NAME)},
        )

    def logits_of(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The capped logits `[..., V]` of final hidden states `[..., C]`, in the head's dtype."""
        return self._cap(self.lm_head(hidden_states))

    def _cap(self, logits: torch.Tensor) -> torch.Tensor:
        """`soft_cap`, in place where neither a gradient nor a hook of the head needs the logits."""
        cap, backend = float(self.config.logit_softcap), self.config.kernel_backend
        is_needed = torch.is_grad_enabled() or not is_plain_linear(self.lm_head, logits.device)
        if is_needed or logits.dtype not in (torch.bfloat16, torch.float16):
            return soft_cap(logits, cap, backend=backend)
        # In slices, so that a long evaluation never holds a second copy of all its logits.
        for part in logits.view(-1, logits.shape[-1]).split(4096):
            part.copy_(soft_cap(part, cap, backend=backend))
        return logits

    def _loss(self, hidden_states, labels, kwargs: dict):
        """The loss without the distractor term, and the logits, if they are there."""
        config = self.config
        common = {
            **kwargs,
            "labels": labels,
            "cap": float(config.logit_softcap),
            "backend": config.kernel_backend,
        }
        is_stock = self.loss_function is ForCausalLMLoss
        if config.fused_linear_cross_entropy and self.training:
            if not is_stock:
                raise ValueError(
                    "fused_linear_cross_entropy computes the cross entropy without logits, which "
                    "another loss_function needs: set config.fused_linear_cross_entropy = False."
                )
            return loss_of_hidden_states(self.lm_head, hidden_states, **common), None
        logits = self.lm_head(hidden_states)
        if is_stock:
            if torch.is_grad_enabled():
                return loss_of_logits(logits, return_capped=True, **common)
            return loss_of_logits(logits, **common), self._cap(logits)
        exact = soft_cap(logits.float(), common["cap"], backend=common["backend"])
        loss = self.loss_function(
            logits=exact, labels=labels, vocab_size=config.vocab_size, **kwargs
        )
        return loss, exact.to(logits.dtype)


# By this table Trainer knows that label smoothing has to shift the labels (it would train on the
# tokens themselves otherwise), and pipelines and servers that the model writes text.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(AtmaConfig.model_type, AtmaForCausalLM.__name__)

__all__ = ["AtmaForCausalLM", "AtmaModel", "AtmaPreTrainedModel"]
