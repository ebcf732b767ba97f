# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
The cache of ATMA: paged keys and values, convolution windows and memory states that can be put back
exactly.

One `AtmaCache` holds the state of all layers for a batch of rows. Which pages belong to which row,
and how many real tokens a row has seen, is shared by all layers (paging_atma); how recurrent states
go back is in rollback_atma. Padding is never stored.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.cache_utils import Cache, DynamicCache

from .kernels.gated_delta import gated_delta
from .kernels.pages import gather_pages, write_key_value_pages, write_pages
from .kernels.short_convolution import shift_window
from .paging_atma import PagedRows, PagePool, mark_static
from .rollback_atma import Recording, RollbackState

# As many of the tokens of one call can be dropped by `crop`, whatever `record_limit` says.
MAX_DRAFTS = 1024


class AtmaConvLayer:
    """
    State of a convolution layer: the last `kernel_size - 1` inputs of the convolution, oldest
    first.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: "AtmaCache", layer_idx: int, kernel_size: int):
        self.layer_idx = layer_idx
        self.kernel_size = kernel_size
        self.max_length = cache.max_length
        self.recording = cache.recording
        self.rows = cache.rows
        self.conv = RollbackState(_advance_window, self.recording, self.max_length is not None)

    @property
    def states(self) -> dict[str, RollbackState]:
        """The recurrent states by the names under which they are saved."""
        return {"conv_state": self.conv}

    @property
    def conv_state(self) -> torch.Tensor | None:
        """`[B, kernel_size - 1, channels]`, or `None` before the first token."""
        return self.conv.current

    def update_conv(self, inputs: torch.Tensor, lengths: torch.Tensor | None) -> None:
        """
        Moves the window over the convolution inputs `[B, T, channels]`, of which the first
        `lengths` are real.
        """
        self.conv.remember()
        window = self.conv.current
        if window is None:
            window = inputs.new_zeros(inputs.shape[0], self.kernel_size - 1, inputs.shape[2])
        new = shift_window(window, inputs.detach(), lengths)
        self.conv.commit(new, (inputs,))

    @property
    def record_past(self) -> bool:
        return self.recording.active

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.recording.active = value

    @property
    def is_compileable(self) -> bool:
        return self.max_length is not None and not self.recording.active

    @property
    def is_croppable(self) -> bool:
        return self.recording.active

    @property
    def is_initialized(self) -> bool:
        return self.conv.current is not None

    def get_seq_length(self) -> int | torch.Tensor:
        return self.rows.padded_length

    def get_max_length(self) -> int:
        return -1 if self.max_length is None else self.max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int | torch.Tensor, int]:
        if self.max_length is not None:
            return self.max_length, 0
        return self.rows.padded_length + query_length, 0


class AtmaHybridLayer(AtmaConvLayer):
    """
    State of a hybrid layer: paged keys and values, the window of canon inputs (query, key and value
    side by side in the channels) and the memory state `[B, H, D, D]` in fp32.
    """

    def __init__(self, cache: "AtmaCache", layer_idx: int, config):
        super().__init__(cache, layer_idx, config.canon_kernel_size)
        retention_bias = float(config.memory_retention_bias)
        write_bias = float(config.memory_write_bias)
        max_half_life, backend = config.memory_max_half_life, config.kernel_backend
        self.kernel_backend = backend

        def advance(state, inputs, lengths):
            key, value, retention_logits, write_logits = inputs
            heads = retention_logits.shape[2]
            # The read is not wanted here, so any query will do: the keys, of the right number of
            # heads.
            query = key.repeat_interleave(heads // key.shape[2], dim=2)
            return gated_delta(
                query,
                key,
                value,
                retention_logits,
                write_logits,
                retention_bias=retention_bias,
                write_bias=write_bias,
                max_half_life=max_half_life,
                initial_state=state,
                lengths=lengths,
                output_final_state=True,
                backend=backend,
            )[1]

        self.memory = RollbackState(advance, self.recording, self.max_length is not None)
        # Keys and values of a learned prefix, `[B, S, G, D]`, for the one call whose gradient must
        # reach them.
        self.live_prefix: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def states(self) -> dict[str, RollbackState]:
        return {"conv_state": self.conv, "memory_state": self.memory}

    @property
    def memory_state(self) -> torch.Tensor | None:
        """`[B, H, D, D]` in fp32 (value dimension first), or `None` before the first token."""
        return self.memory.current

    @property
    def is_initialized(self) -> bool:
        return self.layer_idx in self.rows.pool.slabs

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        start: torch.Tensor,
        lengths: torch.Tensor | None,
    ) -> None:
        """
        Stores `key` and `value` `[B, T, G, D]` from position `start` `[B]` on; the first `lengths`
        are real.
        """
        write_key_value_pages(
            *self.rows.pool.layer_slabs(self.layer_idx, key),
            self.rows.page_table.to(key.device),
            key.detach(),
            value.detach(),
            start,
            lengths,
            backend=self.kernel_backend,
        )

    def slabs(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return self.rows.pool.layer_slabs(self.layer_idx)

    def past(self) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Keys and values of the stored positions, `[B, S, G, D]` with S the columns seen, rounded up
        to pages; a learned prefix comes with its gradient.
        """
        if self.live_prefix is not None:
            return self.live_prefix
        keys, values = self.slabs()
        table = self.rows.visible_pages(0).to(keys[0].device)
        return gather_pages(keys, table), gather_pages(values, table)


class AtmaCache(Cache):
    """
    The cache of an ATMA model. `generate()` makes one by itself.

    Args:
        config (`AtmaConfig`): the model's configuration.
        max_length (`int`, *optional*): fixed capacity in tokens, padding included, with fixed
            addresses, for compiled
            decoding (`cache_implementation="static"`). `None` grows by pages.
        expected_length (`int`, *optional*): how many tokens to make room for at the first call of a
            growing cache.
        page_size (`int`, defaults to 64): tokens in a page.
        record_limit (`int`, defaults to 128): while past is recorded, at least this many of the
            latest real tokens of each row can be dropped by `crop`.

    A batch has B rows. Rows hold their real tokens only; `get_seq_length()` counts columns, padding
    included, as `generate()` needs it. The cache stores values, not graphs: gradients do not flow
    into earlier calls.
    """

    def __init__(
        self,
        config,
        max_length: int | None = None,
        expected_length: int | None = None,
        page_size: int = 64,
        record_limit: int = 128,
    ):
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length must be at least 1 token, got {max_length}.")
        if page_size < 1 or record_limit < 1:
            raise ValueError(
                f"page_size and record_limit must be at least 1, got {page_size} and "
                f"{record_limit}."
            )
        self.config = config
        self.max_length = max_length
        self.page_size = page_size
        self.recording = Recording(record_limit)
        self.rows = PagedRows(
            PagePool(page_size, static=max_length is not None), max_length, expected_length
        )
        # The captured decoding step of this cache, if there is one; it is never copied.
        self.decode_graph = None
        self.in_call = False
        super().__init__(
            layers=[
                AtmaHybridLayer(self, i, config)
                if kind == "hybrid"
                else AtmaConvLayer(self, i, config.conv_kernel_size)
                for i, kind in enumerate(config.layer_types)
            ]
        )

    # What the model calls, in the order of a forward pass.

    def prepare(self, batch_size: int, num_tokens: int, device: torch.device) -> None:
        """
        Makes room for `num_tokens` more columns. Raises `ValueError` for another batch size or a
        full cache.
        """
        self._leave_inference_mode()
        self.rows.prepare(batch_size, num_tokens, device)
        self.in_call = True

    def states_for(self, layer_idx: int) -> "AtmaConvLayer | AtmaHybridLayer":
        """
        The states of a layer, for the call in progress. Raises `RuntimeError` after it: what runs a
        layer again is recomputation, which would feed its tokens twice.
        """
        if not self.in_call:
            raise RuntimeError(
                "A decoder layer was run again after its call had ended, as activation "
                "checkpointing by a wrapper does, and would store its tokens twice in the cache: "
                "pass use_cache=False."
            )
        return self.layers[layer_idx]

    def _leave_inference_mode(self) -> None:
        """Copies what was filled under `torch.inference_mode()`, which nothing else may update."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return

        def normal(x):
            return x.clone() if isinstance(x, torch.Tensor) and x.is_inference() else x

        rows = self.rows
        rows.lengths, rows.padded_length = normal(rows.lengths), normal(rows.padded_length)
        for pools in rows.pool.slabs.values():
            for slabs in pools:
                slabs[:] = [normal(x) for x in slabs]
        for state in self.states():
            state.current, state.base = normal(state.current), normal(state.base)

    def fits(self, config) -> bool:
        """Whether this cache was made for a model of the same layers and heads."""
        return _shape_of(config) == _shape_of(self.config)

    def advance(
        self, num_tokens: int, mask: torch.Tensor | None, lengths: torch.Tensor | None
    ) -> None:
        """
        Counts the columns of a call after all layers have stored them. `mask` `[B, T]` says which
        are real, in the caller's order, and `lengths` `[B]` how many.
        """
        self.in_call = False
        self.rows.advance(num_tokens, lengths)
        for layer in self.layers:
            if isinstance(layer, AtmaHybridLayer):
                layer.live_prefix = None
        recording = self.recording
        if not recording.active:
            return
        added = torch.full_like(self.rows.lengths, num_tokens) if lengths is None else lengths
        recording.extend(num_tokens, mask, added.to(self.rows.lengths))
        # The drafts of one call can all be dropped, however many (within reason: a prompt is fed in
        # one call too).
        kept = max(recording.limit, min(num_tokens, MAX_DRAFTS))
        if recording.width > 2 * kept:
            dropped = (recording.counts - kept).clamp(min=0)
            for state in self.states():
                state.fold(dropped, kept)
            recording.counts = recording.counts - dropped
            recording.width = kept
            self._forget_old_columns()

    def _forget_old_columns(self) -> None:
        """Keeps the masks of as many calls as may hold the recorded tokens of every row."""
        columns, kept = self.recording.columns, []
        found = torch.zeros_like(self.recording.counts)
        while columns and bool((found < self.recording.counts).any()):
            width, mask = columns.pop()
            kept.insert(0, (width, mask))
            found += width if mask is None else mask.sum(1).to(found)
        self.recording.columns = kept

    # Lengths and sizes, as Transformers asks for them.

    @property
    def has_content(self) -> bool:
        """Whether any column was stored. Known on the host."""
        return self.rows.has_content

    @property
    def lengths(self) -> torch.Tensor | None:
        """Number of real tokens of each row, `[B]`, or `None` before the first call."""
        return self.rows.lengths

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:
        """Number of columns seen, padding included."""
        return self.rows.padded_length

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.Tensor:
        return self.rows.padded_length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Capacity in tokens, or -1 for a cache that grows."""
        return -1 if self.max_length is None else self.max_length

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.get_max_length()

    @property
    def max_cache_len(self) -> int:
        return self.get_max_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0):
        return self.layers[layer_idx].get_mask_sizes(query_length)

    @property
    def batch_size(self) -> int:
        return -1 if self.rows.batch_size is None else self.rows.batch_size

    @property
    def max_batch_size(self) -> int:
        return self.batch_size

    @property
    def is_initialized(self) -> bool:
        return self.has_content

    @property
    def is_compileable(self) -> bool:
        return self.max_length is not None and not self.recording.active

    @property
    def is_croppable(self) -> bool:
        return self.recording.active

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        return self.recording.active

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return self.has_content

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        raise NotImplementedError(
            "AtmaCache is filled by ATMA's own layers only: update() of another model's attention "
            "cannot be honoured."
        )

    # Rows: beams, several sequences, selections.

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """
        Continues row `beam_idx[i]` as row `i`. Full pages are shared, the last page and the states
        are copied.
        """
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row `repeats` times, one after the other."""
        if self.rows.lengths is not None:
            index = torch.arange(self.batch_size, device=self.rows.lengths.device)
            self.batch_select_indices(index.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows `indices` (a mask or ids), in that order; rows may repeat."""
        if self.rows.lengths is None:
            return
        self._leave_inference_mode()
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        indices = indices.to(device=self.rows.lengths.device, dtype=torch.int64)
        same_size = indices.shape[0] == self.batch_size
        if self.max_length is None:
            old = self.rows
            self._use_rows(old.take(indices.tolist(), hand_over=True))
            old.free()
        else:
            rows = self.rows
            if not same_size:
                rows = PagedRows(PagePool(self.page_size, static=True), self.max_length, None)
            self._copy_fixed(indices, self, rows)
        for state in self.states():
            state.select(indices, in_place=self.max_length is not None and same_size)
        recording = self.recording
        if recording.counts is not None:
            recording.counts = recording.counts[indices]
            recording.columns = [
                (width, None if mask is None else mask[indices.to(mask.device)])
                for width, mask in recording.columns
            ]

    def _copy_fixed(self, indices: torch.Tensor, target: "AtmaCache", rows: PagedRows) -> None:
        """
        Fixed capacity: every row owns its pages, so those of the rows `indices` are copied to
        `rows`, from now on the rows of `target`. May be this cache's own, whose addresses stay.
        """
        old = self.rows
        content = {}
        for layer_idx in old.pool.slabs:
            content[layer_idx] = []
            for slabs in old.pool.layer_slabs(layer_idx):
                ids = old.page_table.to(slabs[0].device)[indices.to(slabs[0].device)]
                content[layer_idx].append(gather_pages(slabs, ids))
        lengths = old.lengths[indices]
        rows.prepare(indices.shape[0], 0, lengths.device)
        rows.lengths.copy_(lengths)
        rows.padded_length.copy_(old.padded_length)
        rows.has_content = old.has_content
        target._use_rows(rows)
        start = torch.zeros_like(lengths)
        for layer_idx, (keys, values) in content.items():
            target.layers[layer_idx].write(keys, values, start.to(keys.device), None)

    def _use_rows(self, rows: PagedRows) -> None:
        self.rows = rows
        for layer in self.layers:
            layer.rows = rows

    def states(self) -> list[RollbackState]:
        """The recurrent states of all layers."""
        return [state for layer in self.layers for state in layer.states.values()]

    # Going back, copies, files.

    def activate_past_recording(self) -> None:
        """
        From now on keep what `crop` needs to drop the latest tokens exactly, recurrent state
        included.
        """
        self.recording.active = True

    def crop(self, tokens_to_remove: int) -> None:
        """
        Drops the last `-tokens_to_remove` columns; afterwards the cache is as if they had never
        been fed. `crop(0)` drops nothing and forgets what was recorded. A positive number is the
        number of columns to keep.

        Raises `RuntimeError`, before anything changes, if past was not recorded
        (`activate_past_recording()`) or if the tokens to drop go back further than what was
        recorded.
        """
        tokens_to_remove = int(tokens_to_remove)  # generate() may pass a tensor
        self._leave_inference_mode()
        if tokens_to_remove > 0:
            num_tokens = max(int(self.rows.padded_length) - tokens_to_remove, 0)
        else:
            num_tokens = -tokens_to_remove
        recording = self.recording
        if not recording.active and num_tokens:
            raise RuntimeError(
                "crop needs the recurrent states before the dropped tokens: call "
                "activate_past_recording() on the cache "
                "before feeding tokens that may have to be dropped, or keep a fork() of it."
            )
        if num_tokens:
            if recording.counts is None:
                raise RuntimeError(
                    f"crop was asked to drop {num_tokens} tokens, but none were fed since "
                    "activate_past_recording()."
                )
            dropped = recording.real_tokens(num_tokens)
            if bool((dropped > recording.counts).any()):
                raise RuntimeError(
                    f"crop was asked to drop {num_tokens} tokens, more than were recorded: make "
                    "the cache with a larger "
                    f"record_limit (now {recording.limit}), or keep a fork() of it."
                )
            kept = recording.counts - dropped
            for state in self.states():
                state.put_back(kept)
            recording.counts = kept
            recording.forget(num_tokens)
            self.rows.drop(num_tokens, dropped)
        elif tokens_to_remove == 0:
            for state in self.states():
                state.forget()
            recording.clear()

    def reset(self) -> None:
        """Forgets all tokens and keeps the storage, except pages that others share."""
        self._leave_inference_mode()
        for state in self.states():
            state.zero()
        self.recording.clear()
        self.rows.reset()

    def fork(self) -> "AtmaCache":
        """
        An independent copy that continues from here. Full pages are shared, so a prompt prefix is
        stored once however many continuations it has; the last page and the recurrent states are
        copied. (A cache of fixed capacity is copied whole.)
        """
        other = AtmaCache(self.config, self.max_length, None, self.page_size, self.recording.limit)
        other.recording.active = self.recording.active
        if self.rows.lengths is None:
            return other
        self._leave_inference_mode()
        if self.max_length is None:
            other._use_rows(self.rows.take(list(range(self.batch_size)), hand_over=False))
        else:
            index = torch.arange(self.batch_size, device=self.rows.lengths.device)
            self._copy_fixed(index, other, other.rows)
        other._copy_recurrent(self)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if isinstance(mine, AtmaHybridLayer):
                theirs.live_prefix = mine.live_prefix
        return other

    def _copy_recurrent(self, other: "AtmaCache") -> None:
        """Takes over the recurrent states of another cache, and what it has recorded."""
        mine, theirs = self.recording, other.recording
        mine.active, mine.width, mine.counts = theirs.active, theirs.width, theirs.counts
        mine.columns = list(theirs.columns)
        for state, source in zip(self.states(), other.states(), strict=True):
            state.copy_from(source)

    def _export(self) -> tuple[dict, dict[str, torch.Tensor]]:
        """Everything but what was recorded for `crop`, as plain metadata and named tensors."""
        rows = self.rows
        metadata = {
            "format": "atma-cache-1",
            "layer_types": [
                "hybrid" if isinstance(x, AtmaHybridLayer) else "conv" for x in self.layers
            ],
            "page_size": self.page_size,
            "max_length": self.max_length,
            "record_limit": self.recording.limit,
            "padded_length": int(rows.padded_length),
            "recording": self.recording.active,
            "initialized": rows.lengths is not None,
        }
        tensors = {}
        if rows.lengths is None:
            return metadata, tensors
        # Only what the rows have stored: pages in reserve may hold what others left behind.
        size, lengths = self.page_size, rows.lengths.tolist()
        stored = [
            pages[: -(-length // size)] for pages, length in zip(rows.pages, lengths, strict=True)
        ]
        used = sorted({page for pages in stored for page in pages})
        number = {page: i for i, page in enumerate(used)}
        width = max(len(pages) for pages in stored)
        table = [[number[page] for page in p] + [-1] * (width - len(p)) for p in stored]
        tensors["lengths"] = rows.lengths.clone()
        tensors["page_table"] = torch.tensor(table, dtype=torch.int32).reshape(len(table), width)
        tails = [
            (number[p[-1]], n % size) for p, n in zip(stored, lengths, strict=True) if n % size
        ]
        for i, layer in enumerate(self.layers):
            if i in rows.pool.slabs:
                for name, slabs in zip(("keys", "values"), layer.slabs(), strict=True):
                    content = rows.pool.read(slabs, used)
                    for page, filled in tails:
                        content[page, filled:] = 0
                    tensors[f"layers.{i}.{name}"] = content
            for name, state in layer.states.items():
                if state.current is not None:
                    tensors[f"layers.{i}.{name}"] = state.current.clone()
        metadata["tensors"] = sorted(tensors)
        return metadata, tensors

    @classmethod
    def _import(
        cls, config, metadata: dict, tensors: dict[str, torch.Tensor], device=None
    ) -> "AtmaCache":
        """
        The inverse of `_export`. Raises `ValueError` if a tensor of a layer is missing, left over
        or does not fit.
        """
        if metadata.get("format") != "atma-cache-1":
            raise ValueError(
                f"This is not a saved AtmaCache: its format is {metadata.get('format')!r}."
            )
        cache = cls(
            config,
            metadata["max_length"],
            page_size=metadata["page_size"],
            record_limit=metadata["record_limit"],
        )
        kinds = ["hybrid" if kind == "hybrid" else "conv" for kind in config.layer_types]
        if metadata["layer_types"] != kinds:
            raise ValueError(
                f"The saved cache has layers {metadata['layer_types']}, the configuration has "
                f"{kinds}."
            )
        expected = set(metadata.get("tensors", ()))
        if set(tensors) != expected:
            missing, extra = sorted(expected - set(tensors)), sorted(set(tensors) - expected)
            raise ValueError(f"The saved cache does not fit: missing {missing}, left over {extra}.")
        cache.recording.active = metadata["recording"]
        if not metadata["initialized"]:
            return cache
        rows = cache.rows
        table = tensors["page_table"].tolist()
        fresh = rows.pool.allocate(1 + max((i for row in table for i in row), default=-1))
        if cache.max_length is None:
            pages_per_row = max(1, tensors["page_table"].shape[1])
        else:
            pages_per_row = -(-cache.max_length // cache.page_size)
        rows.pool.release(fresh)  # each row takes its own reference
        rows.pages = []
        for row in table:
            pages = [fresh[i] for i in row if i >= 0]
            rows.pool.retain(pages)
            rows.pages.append(pages)
        rows.pool.free_pages = [p for p in rows.pool.free_pages if p not in set(fresh)]
        for pages in rows.pages:
            pages.extend(rows.pool.allocate(pages_per_row - len(pages)))
        device = tensors["lengths"].device if device is None else device
        rows.lengths = tensors["lengths"].to(device, copy=True)
        rows._publish(rows.lengths.device)
        rows.padded_length = metadata["padded_length"]
        rows.has_content = rows.padded_length > 0
        if cache.max_length is not None:
            rows.padded_length = torch.tensor(rows.padded_length, device=rows.lengths.device)
            mark_static(rows.lengths, rows.padded_length, rows.page_table)
        for i, layer in enumerate(cache.layers):
            if f"layers.{i}.keys" in tensors:
                stored = [tensors[f"layers.{i}.{name}"].to(device) for name in ("keys", "values")]
                layer.rows.pool.layer_slabs(i, stored[0])
                table = torch.tensor([fresh], dtype=torch.int64, device=stored[0].device)
                start = torch.zeros(1, dtype=torch.int64, device=stored[0].device)
                for slabs, content in zip(layer.slabs(), stored, strict=True):
                    write_pages(slabs, table, content.flatten(0, 1)[None], start, None)
            for name, state in layer.states.items():
                key = f"layers.{i}.{name}"
                if key in tensors:
                    state.current = tensors[key].to(device, copy=True)
        return cache

    def save(self, path: str | Path) -> None:
        """Writes the cache to one safetensors file. What was recorded for `crop` is not saved."""
        metadata, tensors = self._export()
        tensors = {name: x.cpu().contiguous() for name, x in tensors.items()}
        save_file(tensors, str(path), metadata={"atma_cache": json.dumps(metadata)})

    @classmethod
    def load(cls, path: str | Path, config, device="cpu") -> "AtmaCache":
        """
        Reads a cache written by `save` for a model of this configuration. Raises `ValueError` if a
        layer's state is missing or the layers do not fit the configuration.
        """
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            metadata = json.loads((file.metadata() or {}).get("atma_cache", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        return cls._import(config, metadata, tensors, device)

    def __deepcopy__(self, memo) -> "AtmaCache":
        copy = self._import(self.config, *self._export())
        copy._copy_recurrent(self)
        return copy

    def __reduce__(self):
        return _unpickle_cache, (self.config, *self._export())

    @classmethod
    def from_prefix(cls, config, prefix: DynamicCache) -> "AtmaCache":
        """
        Takes over a `DynamicCache` that holds only keys and values, as PEFT's prefix tuning passes
        it. The gradient of the first call reaches the prefix. Raises `ValueError` for a cache
        without keys and values in every hybrid layer, or with states of other kinds.
        """
        cache = cls(config)
        for i, layer in enumerate(cache.layers):
            source = prefix.layers[i] if i < len(prefix.layers) else None
            states = getattr(source, "is_conv_states_initialized", {}) or {}
            if any(states.values()) or not isinstance(getattr(source, "keys", None), torch.Tensor):
                if isinstance(layer, AtmaConvLayer) and not isinstance(layer, AtmaHybridLayer):
                    continue
                raise ValueError(
                    "A DynamicCache can be taken over only as a prefix, with keys and values in "
                    "every attention layer: "
                    "pass an AtmaCache, or no cache and use_cache=True."
                )
            if not isinstance(layer, AtmaHybridLayer):
                continue
            key, value = source.keys.transpose(1, 2), source.values.transpose(1, 2)
            if cache.rows.lengths is None:
                cache.rows.prepare(key.shape[0], key.shape[1], key.device)
            layer.write(key, value, cache.rows.lengths.to(key.device), None)
            if key.requires_grad or value.requires_grad:
                layer.live_prefix = (key, value)
        if cache.rows.lengths is not None:
            cache.rows.advance(int(prefix.get_seq_length()), None)
        return cache


def _unpickle_cache(config, metadata, tensors) -> AtmaCache:
    return AtmaCache._import(config, metadata, tensors)


def _advance_window(state, inputs, lengths):
    return shift_window(state, inputs[0], lengths)


def _shape_of(config) -> tuple:
    """What two configurations must agree in for one cache to serve both."""
    return (
        tuple(kind == "hybrid" for kind in config.layer_types),
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.conv_kernel_size,
        config.canon_kernel_size,
        config.use_memory,
        config.attention_type == "rope",
    )


__all__ = ["AtmaCache", "AtmaConvLayer", "AtmaHybridLayer"]
