# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""The paper's optimizer: Muon for the matrices, AdamW for all else, as one optimizer."""

from collections import defaultdict

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from .settings import OptimizerSettings


def parameter_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """
    `matrices` (weights of the linear layers inside the decoder layers), `embedding`, `head` and
    `other` (biases, norms, taps of convolutions, the scalars and the null of polar attention). A
    tied head counts as embedding.
    """
    embedding = model.get_input_embeddings().weight
    head_module = model.get_output_embeddings()
    head = head_module.weight
    matrices = {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not head_module
    }
    groups: dict[str, list[nn.Parameter]] = {
        name: [] for name in ("matrices", "embedding", "head", "other")
    }
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter is embedding:
            groups["embedding"].append(parameter)
        elif parameter is head:
            groups["head"].append(parameter)
        else:
            groups["matrices" if parameter in matrices else "other"].append(parameter)
    return groups


def step_muon(muon: "torch.optim.Muon") -> None:
    """
    A step of Muon. Where FSDP2 or tensor parallelism sharded the matrices (DTensors), each process
    keeps its share of weight and momentum, and orthogonalises the whole update.

    Muon on the DTensors themselves would send each of its fifteen products between the processes.
    """
    # One for all of them: what an optimizer is made with stays until garbage is collected.
    helper, groups = torch.optim.Muon([torch.empty(0, 0)]), muon.param_groups
    for group in groups:
        for parameter in group["params"]:
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                step_sharded(parameter, muon.state[parameter], group, helper)
    muon.param_groups = [
        group | {"params": [p for p in group["params"] if not isinstance(p, DTensor)]}
        for group in groups
    ]
    muon.step()
    muon.param_groups = groups


def step_sharded(parameter: DTensor, state: dict, group: dict, helper: "torch.optim.Muon") -> None:
    """A step of Muon for one matrix, with its state and group; `helper` orthogonalises."""
    mesh, placements, weight = parameter.device_mesh, parameter.placements, parameter.to_local()
    gradient = parameter.grad.redistribute(placements=placements)
    if not state:
        state["momentum_buffer"] = torch.zeros_like(gradient)
    gradient, momentum = gradient.to_local(), state["momentum_buffer"].to_local()
    momentum.lerp_(gradient, 1 - group["momentum"])
    update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    # Muon computes in bf16. `from_local` moves what was offloaded to the device of the mesh.
    update = DTensor.from_local(
        update.bfloat16(), mesh, placements, shape=parameter.shape, stride=parameter.stride()
    ).full_tensor()
    whole = nn.Parameter(torch.zeros_like(update, dtype=parameter.dtype))
    whole.grad = update.to(parameter.dtype)
    alone = {"params": [whole], "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
    helper.param_groups, helper.state = [group | alone], defaultdict(dict)
    helper.step()
    change = DTensor.from_local(whole.detach(), mesh, [Replicate()] * mesh.ndim)
    change = change.redistribute(placements=placements).to_local()
    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(change.to(weight.device))


class MuonWithAdamW(torch.optim.Optimizer):
    """
    `torch.optim.Muon` and `torch.optim.AdamW` behind one list of groups and one state, so that
    schedulers, Trainer and accelerate see an ordinary optimizer.

    Weights that FSDP2 sharded (DTensors) are orthogonalised as whole matrices.
    """

    def __init__(self, muon_groups: list[dict], adamw_groups: list[dict], **adamw_options):
        if not hasattr(torch.optim, "Muon"):
            raise RuntimeError(
                f"torch {torch.__version__} has no torch.optim.Muon: install torch 2.9 or newer, "
                "or set optimizer.matrices to adamw."
            )
        muon = torch.optim.Muon(muon_groups)
        adamw = torch.optim.AdamW(adamw_groups, **adamw_options)
        self._optimizers, self._num_muon_groups = (muon, adamw), len(muon.param_groups)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        """The two optimizers work on the groups and the state of this one."""
        muon, adamw = self._optimizers
        muon.param_groups = self.param_groups[: self._num_muon_groups]
        adamw.param_groups = self.param_groups[self._num_muon_groups :]
        muon.state = adamw.state = self.state

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        muon, adamw = self._optimizers
        step_muon(muon)
        adamw.step()
        return loss


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimizer of a run. Groups carry their `name`."""
    groups = parameter_groups(model)
    options = {
        "betas": tuple(settings.betas),
        "eps": settings.eps,
        "fused": groups["other"][0].is_cuda,
    }
    rates = {
        "embedding": settings.embedding_lr,
        "head": settings.head_lr,
        "other": settings.other_lr,
    }
    adamw = [
        {"name": name, "params": groups[name], "lr": rate, "weight_decay": settings.weight_decay}
        for name, rate in rates.items()
        if groups[name]
    ]
    matrices = {
        "name": "matrices",
        "params": groups["matrices"],
        "lr": settings.matrix_lr,
        "weight_decay": settings.matrix_weight_decay,
    }
    if settings.matrices == "adamw":
        return torch.optim.AdamW([matrices, *adamw], **options)
    return MuonWithAdamW([matrices | {"momentum": settings.momentum}], adamw, **options)


__all__ = ["MuonWithAdamW", "build_optimizer", "parameter_groups", "step_muon"]
