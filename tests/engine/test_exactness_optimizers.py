"""Every way to step trains in a sweep as it does alone: optimizers, schedulers, clipping, accumulation, averages."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from company import check, fit, plainly, rows
from torch import Tensor, nn
from torch.optim import lr_scheduler

pytestmark = pytest.mark.engine

CROSS_ENTROPY = nn.CrossEntropyLoss()


def network(seed: int, dropout: float = 0.2) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 12),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(12, 12),
        nn.LayerNorm(12),
        nn.Tanh(),
        nn.Linear(12, 3),
    )


def optimizer_case(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Any:
    model = network(1)
    return fit(model, make(model.parameters()), CROSS_ENTROPY, rows(4), **options)


class CountingSgd(torch.optim.Optimizer):
    """Keeps its own count in its groups, and lowers its own rate: the script's values must not undo that."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "shrink": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            group["lr"] *= group["shrink"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / math.sqrt(group["count"]))


def own_groups_in_the_optimizer() -> Any:
    model = network(2)
    optimizer = CountingSgd(model.parameters(), lr=0.2)

    def turn_a_knob(trainer: Any, number: int) -> Any:
        if number == 3:
            optimizer.param_groups[0]["shrink"] = 0.5
        return trainer.optimizer_state_dict()["param_groups"][0]["count"]

    answer = fit(model, optimizer, CROSS_ENTROPY, rows(5), after_batch=turn_a_knob)
    assert answer["kept"] == [1, 2, 3, 4, 5]
    return answer


def several_groups() -> Any:
    """Parameters in another order than the model's, by group; one of the groups has nothing on some stages."""
    model = network(3)
    decayed = [p for p in reversed(list(model.parameters())) if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}, {"params": [], "lr": 1.0}], lr=0.01
    )
    return fit(model, optimizer, CROSS_ENTROPY, rows(4), clip_grad_norm=0.2)


def state_before_prepare() -> Any:
    """An optimizer that has stepped before it was handed over."""
    model = network(4, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    before = plainly(model, optimizer, CROSS_ENTROPY, rows(2, seed=8))
    return before["losses"], fit(model, optimizer, CROSS_ENTROPY, rows(3), microbatches=1)


# --- schedulers -------------------------------------------------------------------------------------------------------


def scheduled(make: Callable[[Any], Any], *, before: bool, **options: Any) -> Any:
    model = network(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.pop("lr", 0.1), momentum=0.9)
    early = make(optimizer) if before else None
    schedulers: list[Any] = []

    def advance(trainer: Any, number: int) -> Any:
        if not schedulers:
            schedulers.append(early or make(optimizer))
        schedulers[0].step()
        return float(optimizer.param_groups[0]["lr"])

    answer = fit(model, optimizer, CROSS_ENTROPY, rows(5), after_batch=advance, **options)
    assert len(set(answer["kept"])) > 1
    return answer


def rate_that_is_a_tensor() -> Any:
    """Schedulers change a tensor in place, while batches that were sent with the old one are still on their way."""
    model = network(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.05), foreach=False)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    return fit(model, optimizer, CROSS_ENTROPY, rows(5), after_batch=lambda trainer, number: scheduler.step())


def plateau() -> Any:
    """A scheduler that reads the loss of each step."""
    model = network(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
    losses = []

    def look(trainer: Any, number: int) -> float:
        result = trainer.evaluate([(x, y) for (x,), _, y in rows(1, seed=3)], mean_loss)
        losses.append(result["loss"])
        scheduler.step(losses[-1])
        return float(optimizer.param_groups[0]["lr"])

    return fit(model, optimizer, CROSS_ENTROPY, rows(5), after_batch=look)


def mean_loss(output: Tensor, target: Tensor) -> dict[str, Any]:
    return {"loss": (nn.functional.cross_entropy(output, target, reduction="sum"), len(target))}


# --- clipping, accumulation, after_step -------------------------------------------------------------------------------


def mixed_dtypes() -> Any:
    """torch takes norms by dtype before it combines them."""
    torch.manual_seed(8)

    class Cast(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.dtype = dtype

        def forward(self, x: Tensor) -> Tensor:
            return x.to(self.dtype)

    model = nn.Sequential(
        nn.Linear(6, 8), Cast(torch.float64), nn.Linear(8, 8).double(), Cast(torch.float32), nn.Linear(8, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fit(model, optimizer, CROSS_ENTROPY, rows(4), clip_grad_norm=0.05)


def ema_closure() -> Any:
    model = network(9)
    average: dict[str, Tensor] = {}

    def update(parameters: dict[str, nn.Parameter], step: int) -> dict[str, Tensor]:
        for name, parameter in parameters.items():
            average[name] = parameter.clone() if step == 0 else average[name].lerp(parameter, 0.2)
        return average

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    answer = fit(model, optimizer, CROSS_ENTROPY, rows(6), after_step=update, accumulate=2)
    assert sorted(answer["after_step"]) == sorted(dict(model.named_parameters()))
    return answer


class Average:
    """The same as an object; it also draws its weights back, and reads a parameter's gradient never."""

    def __init__(self, decay: float) -> None:
        self.decay, self.values = decay, {}  # type: ignore[var-annotated]

    def __call__(self, parameters: dict[str, nn.Parameter], step: int) -> dict[str, Tensor]:
        for name, parameter in parameters.items():
            old = self.values.get(name, parameter)
            self.values[name] = old * self.decay + parameter * (1 - self.decay)
            parameter.clamp_(-0.4, 0.4)
        return self.values


def ema_object() -> Any:
    model = network(10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return fit(model, optimizer, CROSS_ENTROPY, rows(4), after_step=Average(0.9))


def accumulated(every: int, **options: Any) -> Any:
    model = network(11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    data = [*rows(4, batch=8), *rows(3, batch=5, seed=4)]
    return fit(model, optimizer, CROSS_ENTROPY, data, accumulate=every, **options)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    name: functools.partial(optimizer_case, functools.partial(make, lr=0.02, **options))
    for name, make, options in [
        ("adamw loop", torch.optim.AdamW, {"foreach": False}),
        ("adamw foreach", torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
        ("adamw fused", torch.optim.AdamW, {"fused": True}),
        ("sgd foreach nesterov", torch.optim.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True}),
        ("sgd fused", torch.optim.SGD, {"fused": True, "momentum": 0.5, "dampening": 0.1, "weight_decay": 0.01}),
        ("rmsprop", torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
        ("nadam", torch.optim.NAdam, {}),
        ("radam", torch.optim.RAdam, {}),
        ("adagrad", torch.optim.Adagrad, {}),
        ("asgd", torch.optim.ASGD, {}),
        ("rprop", torch.optim.Rprop, {}),
    ]
}
OPTIMIZERS |= {
    "own groups": own_groups_in_the_optimizer,
    "several groups": several_groups,
    "state before prepare": state_before_prepare,
}
if hasattr(torch.optim, "Adafactor"):
    OPTIMIZERS["adafactor"] = functools.partial(optimizer_case, torch.optim.Adafactor)

SCHEDULES: dict[str, Callable[[], Any]] = {
    "cosine": functools.partial(
        scheduled, functools.partial(lr_scheduler.CosineAnnealingLR, T_max=5), before=True, clip_grad_norm=0.1
    ),
    "cosine after": functools.partial(
        scheduled,
        functools.partial(lr_scheduler.CosineAnnealingLR, T_max=5),
        before=False,
        clip_grad_norm=(0.1, math.inf),
    ),
    "one cycle": functools.partial(
        scheduled, functools.partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=8), before=True
    ),
    "lambda after": functools.partial(
        scheduled, functools.partial(lr_scheduler.LambdaLR, lr_lambda=lambda n: 1 / (n + 1)), before=False
    ),
    "tensor": rate_that_is_a_tensor,
    "plateau": plateau,
    "mixed dtypes": mixed_dtypes,
    "clip by value": functools.partial(
        optimizer_case, functools.partial(torch.optim.SGD, lr=0.1), clip_grad_value=0.01
    ),
    "clip by both": functools.partial(
        optimizer_case, functools.partial(torch.optim.SGD, lr=0.1), clip_grad_value=0.01, clip_grad_norm=(0.05, 1.0)
    ),
    "ema closure": ema_closure,
    "ema object": ema_object,
    "accumulate 3": functools.partial(accumulated, 3, clip_grad_norm=0.1),
    "accumulate 2, one micro-batch": functools.partial(accumulated, 2, microbatches=1),
}


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_optimizers(stages: int) -> None:
    check(OPTIMIZERS, stages=stages)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_schedules_clipping_and_averages(stages: int) -> None:
    answers = check(SCHEDULES, stages=stages)
    norms = [answers[name]["norms"][0] for name in ("cosine", "cosine after", "mixed dtypes")]
    assert len({float(norm) for norm in norms}) == 3, "members must not share a norm"


# --- against plain torch ----------------------------------------------------------------------------------------------


def clip_by(kind: float) -> Callable[[list[nn.Parameter]], Tensor]:
    return lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1, norm_type=kind)


@pytest.mark.parametrize(
    ("options", "clip", "make"),
    [
        ({}, None, functools.partial(torch.optim.AdamW, lr=0.02)),
        ({"clip_grad_norm": 0.1}, clip_by(2.0), functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
        ({"clip_grad_norm": (0.1, math.inf)}, clip_by(math.inf), functools.partial(torch.optim.SGD, lr=0.1)),
        ({"clip_grad_norm": (0.1, 1)}, clip_by(1.0), functools.partial(torch.optim.AdamW, lr=0.1, fused=True)),
        (
            {"clip_grad_value": 0.01},
            lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01),
            functools.partial(torch.optim.RMSprop, lr=0.01),
        ),
    ],
    ids=["none", "norm 2", "norm inf", "norm 1", "value"],
)
def test_one_micro_batch_is_plain_torch(options: dict[str, Any], clip: Any, make: Any) -> None:
    model, twin = network(20, dropout=0.0), network(20, dropout=0.0)
    ours = fit(model, make(model.parameters()), CROSS_ENTROPY, rows(5), microbatches=1, **options)
    plain = plainly(twin, make(twin.parameters()), CROSS_ENTROPY, rows(5), clip=clip)
    for a, b in zip(ours["losses"], plain["losses"], strict=True):
        assert torch.equal(a, b)
    if "clip_grad_norm" in options:
        assert all(torch.equal(a, b) for a, b in zip(ours["norms"], plain["norms"], strict=True))
    for name, value in plain["state"].items():
        assert torch.equal(ours["state"][name], value), name


def test_mixed_dtypes_have_the_norm_that_torch_computes() -> None:
    torch.manual_seed(21)

    def build() -> nn.Sequential:
        torch.manual_seed(21)
        halves = [nn.Linear(6, 6).double(), nn.Linear(6, 6), nn.Linear(6, 6).double(), nn.Linear(6, 3)]
        casts = [torch.float64, torch.float32, torch.float64, torch.float32]
        return nn.Sequential(*(nn.Sequential(_Cast(c), layer) for c, layer in zip(casts, halves, strict=True)))

    model, twin = build(), build()
    ours = fit(
        model, torch.optim.SGD(model.parameters(), lr=0.1), CROSS_ENTROPY, rows(3), microbatches=1, clip_grad_norm=0.1
    )
    plain = plainly(twin, torch.optim.SGD(twin.parameters(), lr=0.1), CROSS_ENTROPY, rows(3), clip=clip_by(2.0))
    assert all(torch.equal(a, b) for a, b in zip(ours["norms"], plain["norms"], strict=True))
    assert all(torch.equal(ours["state"][name], value) for name, value in plain["state"].items())


class _Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)
