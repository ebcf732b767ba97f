# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""
Modules are read, or captured, instead of called only as long as that says the same. Whatever ends
this is noticed: by the fused step, by the fused loss, and by the decode graph.
"""

import copy
import functools

import peft
import pytest
import torch
from atma import AtmaCache, AtmaForCausalLM, modeling_atma, plain_atma
from atma.decode_graph_atma import _Watch
from atma.decode_layer_atma import can_fuse
from atma.layout_atma import TokenLayout
from atma.plain_atma import is_plain_linear, is_sharded_linear, plain_modules
from torch import nn
from torch.nn.modules import module as all_modules
from torch.nn.utils import parametrize

CPU = torch.device("cpu")


@pytest.fixture
def model(make_model):
    return make_model(layer_types=["conv", "hybrid"])


class Subclass(torch.Tensor):
    pass


class DerivedLinear(nn.Linear):
    pass


class Identity(nn.Module):
    def forward(self, x):
        return x


def nothing(*args):
    return None


# What may happen to a linear layer. Handles are given back, to be removed.
FAULTS = {
    "forward hook": lambda x: x.register_forward_hook(nothing),
    "forward pre-hook": lambda x: x.register_forward_pre_hook(nothing),
    "backward hook": lambda x: x.register_full_backward_hook(nothing),
    "backward pre-hook": lambda x: x.register_full_backward_pre_hook(nothing),
    "global forward hook": lambda x: all_modules.register_module_forward_hook(nothing),
    "global forward pre-hook": lambda x: all_modules.register_module_forward_pre_hook(nothing),
    "global backward hook": lambda x: all_modules.register_module_full_backward_hook(nothing),
    "global backward pre-hook": lambda x: all_modules.register_module_full_backward_pre_hook(
        nothing
    ),
    "parametrisation": lambda x: parametrize.register_parametrization(x, "weight", Identity()),
    "weight norm": nn.utils.weight_norm,
    "tensor subclass": lambda x: setattr(
        x, "weight", nn.Parameter(x.weight.data.as_subclass(Subclass))
    ),
    "weight that is no parameter": lambda x: x.__dict__.update(weight=x._parameters.pop("weight")),
    "forward of the instance": lambda x: setattr(x, "forward", lambda y: y),
    "derived class": lambda x: setattr(x, "__class__", DerivedLinear),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_layer_is_plain_until_something_is_done_to_it(model, fault):
    layer = model.model.layers[1]
    assert plain_modules((layer,), modeling_atma.__name__) is not None
    assert is_plain_linear(layer.mlp.up_proj, CPU)
    handle = FAULTS[fault](layer.mlp.up_proj)
    try:
        assert plain_modules((layer,), modeling_atma.__name__) is None
        assert not is_plain_linear(layer.mlp.up_proj, CPU)
        assert _Watch(model, AtmaForCausalLM).addresses(CPU) is None
    finally:
        if hasattr(handle, "remove"):
            handle.remove()
    if hasattr(handle, "remove"):
        assert plain_modules((layer,), modeling_atma.__name__) is not None


@pytest.mark.parametrize("kind", [nn.Linear, modeling_atma.AtmaMLP, modeling_atma.AtmaRMSNorm])
def test_a_class_that_was_patched_is_not_plain(model, monkeypatch, kind):
    layer = model.model.layers[0]
    monkeypatch.setattr(kind, "forward", lambda self, x: x)
    assert plain_modules((layer,), modeling_atma.__name__) is None


def test_own_taps_may_be_parametrised(model):
    """A parametrisation of a parameter that belongs to no layer of Torch."""
    layer = model.model.layers[0]
    parametrize.register_parametrization(layer.mixer, "conv_weight", Identity())
    assert plain_modules((layer,), modeling_atma.__name__) is None


def test_modules_and_parameters_are_all_there(model):
    layer = model.model.layers[1]
    layer.mixer.memory = None
    layer.mlp.up_proj.bias = None
    plain = plain_modules((layer,), modeling_atma.__name__)
    found = {id(x) for x in plain.modules if x is not None}
    assert found == {id(x) for x in layer.modules()}
    assert {id(x) for x in plain.parameters} == {id(x) for x in layer.parameters()}
    assert not is_plain_linear(layer.mlp.up_proj, torch.device("meta"))
    assert not is_plain_linear(model.model.embed_tokens, CPU)


def test_layers_derived_elsewhere_are_called(make_model):
    """Even if everything that a layer consists of was derived, in one file."""
    model = make_model(layer_types=["conv"], kernel_backend="triton")
    layer, cache = model.model.layers[0], AtmaCache(model.config)
    state = cache.layers[0]
    state.conv.current = torch.zeros(1, 2, 64)
    layout = TokenLayout((1, 1), start=torch.tensor([3]))
    step = (modeling_atma.__name__, torch.zeros(1, 1, 64), layout, state)
    with torch.no_grad():
        assert can_fuse(layer, *step)
        for module in list(layer.modules()):
            if type(module).__module__ == modeling_atma.__name__:
                forward = {"forward": lambda self, *args: args[0], "__module__": __name__}
                module.__class__ = type("Derived", (type(module),), forward)
        assert not can_fuse(layer, *step)


class WithValueHead(AtmaForCausalLM):
    """What people derive: a second head, and a forward around the model's."""

    def __init__(self, config):
        super().__init__(config)
        self.value_head = nn.Sequential(nn.Linear(config.hidden_size, 1), nn.Dropout())

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class WithOtherLogits(AtmaForCausalLM):
    def logits_of(self, hidden_states):
        return super().logits_of(hidden_states) / 2


class WithOtherCap(AtmaForCausalLM):
    def _cap(self, logits):
        return logits


def can_capture(model):
    return _Watch(model, AtmaForCausalLM).addresses(CPU) is not None


def test_derived_models_are_captured_unless_their_logits_differ(model):
    assert can_capture(model)
    assert can_capture(WithValueHead(model.config).eval())
    assert not can_capture(WithOtherLogits(model.config).eval())
    assert not can_capture(WithOtherCap(model.config).eval())
    model.model.__class__ = type("Derived", (type(model.model),), {})
    assert not can_capture(model)


def test_a_model_on_two_devices_is_not_captured(model):
    model.lm_head.to("meta")
    assert not can_capture(model)


def test_a_step_on_another_device_than_before_is_not_captured(model):
    """Though no weight has moved."""
    watch = _Watch(model, AtmaForCausalLM)
    assert watch.addresses(CPU) is not None
    assert watch.addresses(torch.device("meta")) is None
    assert watch.addresses(CPU) is not None


def test_hooks_of_the_whole_model_run_around_a_captured_step(model):
    model.register_forward_hook(nothing)
    assert can_capture(model)
    model.logits_of = lambda hidden_states: hidden_states
    assert not can_capture(model)


def exchange_norm(model):
    """Another norm of the same weight."""
    norm = copy.copy(model.model.norm)
    norm.eps = 0.1
    model.model.norm = norm


# What may happen to a model between two steps, and what its graph has to notice.
CHANGES = {
    "weight": lambda x: setattr(x.lm_head, "weight", nn.Parameter(x.lm_head.weight * 2)),
    "data": lambda x: setattr(x.lm_head.weight, "data", x.lm_head.weight.data * 2),
    "layers": lambda x: x.model.layers.pop(0),
    "order": lambda x: x.model.layers.append(x.model.layers.pop(0)),
    "memory": lambda x: setattr(x.model.layers[1].mixer, "memory", None),
    "norm": exchange_norm,
    "inner hook": lambda x: x.model.register_forward_hook(nothing),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_graph_notices_what_happens_to_its_model(model, change):
    watch = _Watch(model, AtmaForCausalLM)
    before = watch.addresses(CPU)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert watch.addresses(CPU) == before is not None
    CHANGES[change](model)
    assert watch.addresses(CPU) != before


def adapted(model, **options):
    options = {"target_modules": "all-linear", "lora_dropout": 0.1, **options}
    config = peft.LoraConfig(**options)
    adapted = peft.get_peft_model(model, copy.deepcopy(config))
    adapted.add_adapter("other", copy.deepcopy(config))
    return adapted.eval()


def lora_layers(adapted):
    return [x for x in adapted.modules() if hasattr(x, "lora_A") and hasattr(x, "scaling")]


def unload(adapted):
    adapted.merge_and_unload()


def rescale(adapted):
    with peft.helpers.rescale_adapter_scale(adapted, 0.5):
        yield


def mix(adapted):
    """A batch whose rows have different adapters."""
    with adapted.base_model._enable_peft_forward_hooks(adapter_names=["default", "other"]):
        yield


def disable(adapted):
    with adapted.disable_adapter():
        yield


def keep_dtypes(adapted):
    with peft.helpers.disable_input_dtype_casting(adapted):
        yield


SWITCHES = {
    "another": lambda x: x.set_adapter("other"),
    "both": lambda x: x.base_model.set_adapter(["default", "other"]),
    "merge": lambda x: x.merge_adapter(),
    "scale of one layer": lambda x: lora_layers(x)[3].set_scale("default", 3.0),
    "scale in place": lambda x: lora_layers(x)[3].scaling.update(default=3.0),
    "delete": lambda x: x.delete_adapter("other"),
    "add": lambda x: x.add_adapter("third", peft.LoraConfig(target_modules="all-linear")),
    "weights": lambda x: setattr(lora_layers(x)[0].lora_A["default"].weight, "data", torch.ones(1)),
    "dropout": lambda x: lora_layers(x)[0].lora_dropout["default"].train(),
    "hook": lambda x: lora_layers(x)[0].lora_B["default"].register_forward_hook(nothing),
    "unload": unload,
    "rescale": rescale,
    "mix": mix,
    "disable": disable,
    "keep dtypes": keep_dtypes,
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_graph_notices_what_happens_to_its_adapters(model, switch):
    """Switches that are generators are taken back, and the graph would be right again."""
    both = adapted(model)
    watch = _Watch(model, AtmaForCausalLM)
    before = watch.addresses(CPU)
    assert before is not None and watch.addresses(CPU) == before
    switched = SWITCHES[switch](both)
    if hasattr(switched, "send"):
        next(switched)
        assert watch.addresses(CPU) != before
        assert next(switched, None) is None
        assert watch.addresses(CPU) == before
    else:
        assert watch.addresses(CPU) != before


def test_switched_adapters_are_captured_anew(model):
    both = adapted(model)
    for switch in ("another", "both", "merge", "unload"):
        SWITCHES[switch](both)
        assert can_capture(model)


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(target_modules="all-linear", use_dora=True),
        peft.LoraConfig(target_modules=["up_proj"], modules_to_save=["lm_head"]),
        peft.LoraConfig(target_modules=["embed_tokens"]),
        peft.IA3Config(target_modules=["up_proj"], feedforward_modules=["up_proj"]),
        peft.LoHaConfig(target_modules=["up_proj"]),
    ],
    ids=["DoRA", "another head", "embedding", "IA3", "LoHa"],
)
def test_adapters_with_switches_of_their_own_are_not_captured(model, config):
    peft.get_peft_model(model, config).eval()
    assert not can_capture(model)


def test_dropouts_that_draw_are_not_captured(model):
    SWITCHES["dropout"](adapted(model))
    assert not can_capture(model)


def test_a_scale_that_is_a_tensor_is_not_captured(model):
    """As PEFT makes it for compiled models, to change it in place."""
    both = adapted(model)
    lora_layers(both)[0].scaling["default"] = torch.tensor(1.0)
    assert not can_capture(model)


def gathers(module, *args):
    """As a hook of FSDP2, by where it says that it was defined."""


gathers.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_state"
SHARDED_CHANGES = {
    "hook": lambda head: head.register_forward_hook(nothing),
    "hook before": lambda head: head.register_forward_pre_hook(nothing),
    "backward hook": lambda head: head.register_full_backward_hook(nothing),
    "backward hook before": lambda head: head.register_full_backward_pre_hook(nothing),
    "forward": lambda head: setattr(head, "forward", functools.partial(nn.Linear.forward, head)),
}


@pytest.mark.parametrize("change", SHARDED_CHANGES)
def test_a_sharded_linear_layer_is_nothing_more_than_that(monkeypatch, change):
    """FSDP2 gives a module a class of its own, and hooks."""
    sharding = type("FSDPModule", (), {})
    monkeypatch.setattr(plain_atma, "FSDPModule", sharding)
    head = type("FSDPLinear", (sharding, nn.Linear), {})(3, 5)
    head.register_forward_pre_hook(gathers)
    head.register_forward_hook(gathers)
    assert is_sharded_linear(head) and not is_sharded_linear(nn.Linear(3, 5))
    SHARDED_CHANGES[change](head)
    assert not is_sharded_linear(head)
