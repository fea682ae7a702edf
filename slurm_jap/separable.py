"""Whether an optimizer treats each parameter by itself: only then can its steps be taken stage by stage.

It is tried on small stand-ins for a few of the parameters: stepped together and each alone, they must come out equal.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from slurm_jap.errors import UsageError

SIDE = 4
"""Largest size of a stand-in's dimensions."""
MOST = 4
"""Stand-ins."""
STEPS = 3


def check(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that mixes parameters. One that cannot be tried on stand-ins passes.

    Raises:
        UsageError: stepped together, parameters come out otherwise than each alone.
    """
    group = max(optimizer.param_groups, key=lambda g: len(g["params"]))
    values = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    stand_ins = _stand_ins(group["params"])
    if len(stand_ins) < 2:
        return
    try:
        with torch.enable_grad():
            together = _trained(optimizer, values, stand_ins)
            apart = [_trained(optimizer, values, [stand_in])[0] for stand_in in stand_ins]
    except Exception:
        return
    if not all(torch.equal(a, b) for a, b in zip(together, apart, strict=True)):
        raise UsageError(
            f"{type(optimizer).__name__} mixes parameters (a norm over all of them, for example), and a stage has only "
            "some of them; use an optimizer that treats each parameter by itself, and clip_grad_norm=... of prepare"
        )


def _stand_ins(parameters: list[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """Values and gradients for a few parameters, of as many kinds of shape as can be."""
    generator = torch.Generator().manual_seed(0)
    kinds: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.layout is torch.strided:
            kinds[parameter.dim(), parameter.dtype].append(parameter)
    chosen: list[Tensor] = []
    while kinds and len(chosen) < MOST:
        for kind in list(kinds):
            chosen.append(kinds[kind].pop(0))
            if not kinds[kind]:
                del kinds[kind]

    def draw(parameter: Tensor) -> Tensor:
        shape = [min(size, SIDE) for size in parameter.shape]
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(parameter.dtype)

    return [(draw(p), [draw(p) * 10.0**step for step in range(STEPS)]) for p in chosen[:MOST]]


def _trained(
    optimizer: torch.optim.Optimizer, values: dict[str, Any], stand_ins: list[tuple[Tensor, list[Tensor]]]
) -> list[Tensor]:
    parameters = [nn.Parameter(value.clone()) for value, _ in stand_ins]
    twin = type(optimizer).__new__(type(optimizer))
    kept = ("param_groups", "state", "step", "state_dict", "load_state_dict")
    plain = {k: v for k, v in optimizer.__dict__.items() if k not in kept and not k.endswith("_hooks")}
    twin.__dict__.update(copy.deepcopy(plain))
    groups = [{**copy.deepcopy(values), "params": parameters}]
    twin.__setstate__(
        {"defaults": copy.deepcopy(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups}
    )
    for name in ("step", "state_dict", "load_state_dict"):
        for moment in ("pre", "post"):
            twin.__dict__.setdefault(f"_optimizer_{name}_{moment}_hooks", {})
    for step in range(STEPS):
        for parameter, (_, gradients) in zip(parameters, stand_ins, strict=True):
            parameter.grad = gradients[step].clone()
        twin.step()
    return [parameter.detach() for parameter in parameters]
