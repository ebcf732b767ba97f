# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
Every Triton kernel of the model compiles to machine code, on a machine without a GPU. The
interpreter, by which the other tests judge what kernels compute, accepts programs that the compiler
refuses.

The model runs on CPU tensors that claim to be on a GPU; launches compile, and launch nothing. What
the model then computes is noise, and nobody looks at it.
"""

import sys
import types

import pytest
import torch
from atma import AtmaConfig, AtmaForCausalLM
from atma.kernels.backend import INTERPRETED

triton = pytest.importorskip("triton")
compiler = pytest.importorskip("triton.backends.compiler")
jit = pytest.importorskip("triton.runtime.jit")

pytestmark = pytest.mark.skipif(
    INTERPRETED or torch.cuda.is_available(),
    reason="for machines without a GPU, outside the interpreter: a GPU compiles what it runs",
)

SHARED_MEMORY = {(8, 0): 166912, (9, 0): 232448}


@pytest.fixture
def compiled(monkeypatch, request):
    """Names of the kernels that were compiled for the capability that the test asks for."""
    capability = request.param
    target = compiler.GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    limits = {"max_shared_mem": SHARED_MEMORY[capability], "multiprocessor_count": 132}
    properties = types.SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
        shared_memory_per_block_optin=SHARED_MEMORY[capability],
    )
    device = types.SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda index: 0,
        get_current_target=lambda: target,
        utils=types.SimpleNamespace(get_device_properties=lambda index: limits),
    )
    names = set()
    run = jit.JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        names.add(self.__name__)
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        assert kernel.metadata.shared <= SHARED_MEMORY[capability], self.__name__
        return kernel

    monkeypatch.setattr(triton.runtime.driver, "_active", device)
    monkeypatch.setattr(jit.JITFunction, "run", compile_only)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    # A product that only a GPU has; what it computes does not matter here.
    addmm = torch.addmm
    monkeypatch.setattr(
        torch,
        "addmm",
        lambda *args, out_dtype=None, out=None: out if out_dtype else addmm(*args, out=out),
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index=None: properties)
    # CPU tensors have no index, by which these would choose the interpreter's tiles.
    for module in ("polar_attention_tiles", "polar_attention_triton"):
        monkeypatch.setattr(
            sys.modules[f"atma.kernels.{module}"],
            "device_limits",
            lambda index: (capability, SHARED_MEMORY[capability]),
        )
    forget_the_device()
    yield names
    forget_the_device()


def forget_the_device() -> None:
    """Drops what kernels and their files remember about the device that they ran on."""
    for name in [name for name in sys.modules if name.startswith("atma.kernels.")]:
        for value in vars(sys.modules[name]).values():
            if isinstance(value, jit.JITFunction):
                value.device_caches.clear()
            elif hasattr(value, "cache_clear"):
                value.cache_clear()


def launched_kernels() -> set[str]:
    """The names of all kernels: functions of the shipped files that are compiled and launched."""
    return {
        value.__name__
        for name, module in sys.modules.items()
        if name.startswith("atma.kernels.")
        for value in vars(module).values()
        if isinstance(value, jit.JITFunction) and value.__name__.endswith("_kernel")
    }


def use_everything(monkeypatch) -> None:
    """Training, packed training, prefill and decoding, with one and with several new tokens."""
    config = AtmaConfig(
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=2,
        layer_types=["conv", "hybrid"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        kernel_backend="triton",  # "auto" leaves small inputs to torch
        decode_graph=False,
        zero_init_residual=False,
    )
    model = AtmaForCausalLM(config).bfloat16()
    ids = torch.randint(1, 512, (2, 130))
    for fused in (False, True):
        model.config.fused_linear_cross_entropy = fused
        model.train()(ids, labels=ids, use_cache=False).loss.backward()
    document = torch.cat([torch.arange(70), torch.arange(190)])[None]
    model(ids.view(1, -1), position_ids=document, labels=ids.view(1, -1), use_cache=False)
    model.eval()
    with torch.no_grad():
        cache = model(ids).past_key_values
        for new in (1, 3, 40):
            model(ids[:, :new], past_key_values=cache)
        cache = model(ids[:1]).past_key_values
        model(ids[:1, :1], past_key_values=cache)  # one row: the fused step
        paged = sys.modules["atma.kernels.paged_polar_attention"]
        monkeypatch.setattr(paged, "_GATHER_FROM", (0, 0))
        model(ids[:1, :40], past_key_values=cache)  # as if it were a chunk of a long prompt


@pytest.mark.parametrize("compiled", [(9, 0), (8, 0)], indirect=True, ids=["sm_90", "sm_80"])
def test_every_kernel_compiles(compiled, monkeypatch):
    use_everything(monkeypatch)
    assert compiled == launched_kernels()
