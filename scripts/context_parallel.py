# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Reads one long document over several processes: a prototype of context-parallel prefill.

    torchrun --nproc-per-node=2 scripts/context_parallel.py --tokens 1048576

Rank r of R holds the r-th contiguous share of the tokens, through all layers. What crosses between
shares is little, and each kind of state has its own way:

- Convolutions need the last inputs of the share before: a halo of 2 (gated) or 3 (canon) tokens,
  sent to the next rank.
- The memory state [B, H, D, D] is handed on from rank to rank, after the attention of the layer, so
  that a rank computes while it waits.
- Polar attention is causal, so later shares would work more. The block (queries of rank i, keys of
  rank j < i) is therefore cut in two: rank i takes the first half of its queries, rank j the second
  half, and sends back what its keys say (content, l1, l2). Every rank then computes R / 2 blocks,
  whatever R is, and the parts are merged by log-sum-exp with the null folded in once.

Afterwards the last rank holds the logits of the last token and an `AtmaCache` of the whole
document, from which `generate()` goes on. Tokens that do not divide by R are read there, through
that cache.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from atma import AtmaCache, AtmaConfig, AtmaForCausalLM
from atma.kernels.gated_delta import gated_delta
from atma.kernels.partial_polar_attention import (
    PolarPart,
    merge_polar_parts,
    partial_polar_attention,
)
from atma.kernels.polar_attention import PolarOutput
from atma.kernels.rms_norm import gated_rms_norm, sigmoid_gate
from atma.kernels.short_convolution import causal_conv1d, gated_causal_conv1d
from experiments.refusals import refuse_missing_path, without_traceback


def transfer(sends: list[tuple], receives: list[tuple]) -> None:
    """Point-to-point messages, (tensor, other rank) each; all at once, or two ranks would wait."""
    operations = [dist.P2POp(dist.isend, x.contiguous(), rank) for x, rank in sends]
    operations += [dist.P2POp(dist.irecv, x, rank) for x, rank in receives]
    if operations:
        for request in dist.batch_isend_irecv(operations):
            request.wait()


class ContextParallel:
    """One rank's share of a prefill.

    Args:
        model: an `AtmaForCausalLM` with the polar core and no window; the same weights on every
            rank.

    Raises:
        ValueError: for another attention core or a window.
    """

    def __init__(self, model: AtmaForCausalLM):
        config = model.config
        if config.attention_type != "polar" or config.attention_window is not None:
            raise ValueError(
                "Context-parallel prefill reads polar attention without a window; this model has "
                f"attention_type={config.attention_type!r} and "
                f"attention_window={config.attention_window}: read it on one device."
            )
        self.model = model
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.backend = config.kernel_backend

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    @torch.no_grad()
    def prefill(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, AtmaCache] | None:
        """
        Reads `input_ids` `[B, T]`, the same on every rank. The last rank returns the logits of the
        last position `[B, 1, V]` and the filled cache, the others `None`.
        """
        B, T = input_ids.shape
        share = T // self.size
        halo = max(self.model.config.conv_kernel_size, self.model.config.canon_kernel_size) - 1
        if share < max(halo, 2):
            raise ValueError(
                f"{T} tokens are too few for {self.size} processes: each share must hold at least "
                f"{max(halo, 2)}; read them on one device."
            )
        cache = None
        if self.is_last:
            cache = AtmaCache(self.model.config, expected_length=T)
            cache.prepare(B, share * self.size, input_ids.device)
        self.position = self.rank * share
        model = self.model.model
        hidden_states = model.embed_tokens(input_ids[:, self.position : self.position + share])
        for i, layer in enumerate(model.layers):
            mixer = self._attention if layer.is_hybrid else self._short_conv
            state = cache.layers[i] if self.is_last else None
            hidden_states = hidden_states + mixer(
                layer.mixer, layer.input_norm(hidden_states), state
            )
            hidden_states = hidden_states + layer.mlp(layer.post_norm(hidden_states))
        if not self.is_last:
            return None
        cache.advance(share * self.size, None, None)
        rest = input_ids[:, share * self.size :]
        if rest.shape[1]:
            output = self.model(rest, past_key_values=cache, use_cache=True, logits_to_keep=1)
            return output.logits, cache
        return self.model.logits_of(model.norm(hidden_states[:, -1:])), cache

    def _halo(self, inputs: torch.Tensor, kernel_size: int) -> torch.Tensor | None:
        """The last `kernel_size - 1` convolution inputs of the share before, if there is one."""
        tail = inputs[:, -(kernel_size - 1) :].contiguous()
        before = torch.empty_like(tail) if self.rank else None
        transfer(
            [] if self.is_last else [(tail, self.rank + 1)],
            [(before, self.rank - 1)] if self.rank else [],
        )
        return before

    def _short_conv(self, mixer, hidden_states, state):
        projected = mixer.in_proj(hidden_states)
        b, _, h = projected.chunk(3, dim=-1)
        width = mixer.conv_weight.shape[1]
        tail = b[:, -(width - 1) :] * h[:, -(width - 1) :]
        y = gated_causal_conv1d(
            projected,
            mixer.conv_weight,
            initial_state=self._halo(tail, width),
            backend=self.backend,
        )[0]
        if state is not None:
            state.update_conv(tail, None)
        return mixer.out_proj(y)

    def _attention(self, mixer, hidden_states, state):
        streams = (
            mixer._normalise(mixer.q_proj(hidden_states)),
            mixer._normalise(mixer.k_proj(hidden_states)),
            mixer.v_proj(hidden_states),
        )
        weights = (mixer.query_canon_weight, mixer.key_canon_weight, mixer.value_canon_weight)
        width = weights[0].shape[1]
        tail = torch.cat([x[:, -(width - 1) :] for x in streams], dim=-1)
        halo = self._halo(tail, width)
        windows = [None] * 3 if halo is None else halo.split([x.shape[-1] for x in streams], -1)
        query, key, value = (
            mixer._heads(
                causal_conv1d(x, weight, initial_state=window, residual=True, backend=self.backend)
            )
            for x, weight, window in zip(streams, weights, windows, strict=True)
        )
        if state is not None:
            state.update_conv(tail, None)
        polar = self._polar(mixer, query, key, value, state)
        gate = mixer.gate_proj(hidden_states).view_as(query)
        content = sigmoid_gate(polar.direction, gate, backend=self.backend)
        output = mixer.o_proj(content.flatten(2))
        output = output + mixer.count_proj(polar.magnitude)
        if mixer.memory is not None:
            output = output + self._memory(mixer.memory, hidden_states, query, key, value, state)
        return output

    def _polar(self, mixer, query, key, value, state):
        half = query.shape[1] // 2
        scalars = mixer._null_and_scalars()
        keys_and_values = self._all_gather(torch.stack([key, value]))
        second_halves = self._all_gather(query[:, half:])

        def part(queries, position, block, is_causal):
            return partial_polar_attention(
                queries,
                *block,
                position,
                mixer.length_gain,
                is_causal=is_causal,
                backend=self.backend,
            )

        # What this rank's keys say to the second halves of later ranks; sent, while the others'
        # answers for our own second half arrive.
        share = query.shape[1]
        answers = [
            part(second_halves[i], i * share + half, (key, value), False)
            for i in range(self.rank + 1, self.size)
        ]
        own = part(query, self.position, (key, value), True)
        first, second = [rows_of(own, slice(half))], [rows_of(own, slice(half, None))]
        for j in range(self.rank):
            first.append(part(query[:, :half], self.position, keys_and_values[j], False))
            second.append(PolarPart(*map(torch.empty_like, second[0])))
        transfer(
            [(x, self.rank + 1 + i) for i, answer in enumerate(answers) for x in answer],
            [(x, j) for j in range(self.rank) for x in second[1 + j]],
        )
        outputs = [
            merge_polar_parts(parts, position, *scalars, dtype=query.dtype)
            for parts, position in ((first, self.position), (second, self.position + half))
        ]
        if state is not None:
            whole = torch.cat(keys_and_values, dim=2)
            start = torch.zeros(whole.shape[1], dtype=torch.int64, device=whole.device)
            state.write(whole[0], whole[1], start, None)
        return PolarOutput(
            torch.cat([x.direction for x in outputs], dim=1),
            torch.cat([x.magnitude for x in outputs], dim=1),
        )

    def _all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.contiguous()
        gathered = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(gathered, x)
        return gathered

    def _memory(self, memory, hidden_states, query, key, value, state):
        B, _, H, D = query.shape
        before = None
        if self.rank:
            before = torch.empty(B, H, D, D, dtype=torch.float32, device=query.device)
            transfer([], [(before, self.rank - 1)])
        inputs = (
            key,
            value,
            memory.retention_proj(hidden_states),
            memory.write_proj(hidden_states),
        )
        read, after = gated_delta(
            query, *inputs, **memory.rule, initial_state=before, output_final_state=True
        )
        if not self.is_last:
            transfer([(after, self.rank + 1)], [])
        if state is not None:
            state.memory.commit(after, inputs)
        gate = memory.gate_proj(hidden_states).view_as(read)
        return memory.out_proj(gated_rms_norm(read, gate, backend=self.backend).flatten(2))


def rows_of(part: PolarPart, rows: slice) -> PolarPart:
    """The part of some of its queries."""
    content, l1, l2 = part
    return PolarPart(*(x.contiguous() for x in (content[:, rows], l1[..., rows], l2[..., rows])))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a checkpoint; without one, the 378M model, random weights")
    parser.add_argument("--tokens", type=int, default=2**20, help="length (default: %(default)s)")
    parser.add_argument("--compare", action="store_true", help="also read it on one device")
    args = parser.parse_args()
    if args.model:
        with without_traceback():
            refuse_missing_path(args.model)
    if "RANK" not in os.environ:
        parser.error(
            "one process for each device: torchrun --nproc-per-node=2 scripts/context_parallel.py"
        )
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    if args.model:
        model = AtmaForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(device)
    else:
        with torch.device(device):
            model = AtmaForCausalLM(AtmaConfig.paper_378m(zero_init_residual=False)).bfloat16()
    model.eval()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, model.config.vocab_size, (1, args.tokens), generator=generator)
    ids = ids.to(device)
    reader = ContextParallel(model)
    reader.prefill(ids[:, : 64 * reader.size])  # compiles the kernels
    dist.barrier()
    start = time.perf_counter()
    result = reader.prefill(ids)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan")
    print(f"rank {rank}: {args.tokens} tokens in {seconds:.2f} s, peak {peak:.1f} GiB", flush=True)
    dist.barrier()
    if args.compare and result is not None:
        logits, cache = result
        del cache
        start = time.perf_counter()
        with torch.no_grad():
            whole = model(ids, use_cache=True, logits_to_keep=1).logits
        if on_gpu:
            torch.cuda.synchronize()
        alone = time.perf_counter() - start
        error = (logits.float() - whole.float()).norm() / whole.float().norm()
        print(f"one device: {alone:.2f} s; relative difference of the logits {error:.2e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
