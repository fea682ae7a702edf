"""Members' states move between host and device within a bound: no bit changes, and nobody waits for ever.

The device is the CPU here; what is moved, and when, is the same.
"""

from __future__ import annotations

import functools
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from array_harness import alone, same_bits, together
from support import wait_until
from torch import nn

import slurm_jap as jap
from slurm_jap.environment import ENV_DEVICE_MEMORY

pytestmark = pytest.mark.engine

MEMBERS = 6
WIDTH = 64


class Net(nn.Module):
    """Four like blocks with a buffer that is written in forward, so that any cut has stages of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Tanh()) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def metric(output: torch.Tensor, target: torch.Tensor) -> dict[str, tuple[float, int]]:
    return {"error": (float((output - target).abs().sum()), len(target))}


def batches(count: int, seed: int, rows: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator))
        for _ in range(count)
    ]


@pytest.mark.filterwarnings("ignore:jap. BatchNorm")
def train(
    seed: int, *, steps: int = 5, mixed: bool = True, accumulate: int = 1, memory: bool = False
) -> dict[str, Any]:
    """AdamW, clipped by norm; evaluations, state pulls, a load and a late unfreezing between the steps."""
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01 * (seed + 1))
    trainer = jap.prepare(net, optimizer, loss_fn, microbatches=3, clip_grad_norm=1.0, accumulate=accumulate)
    seen: dict[str, Any] = {"losses": [], "metrics": [], "states": []}
    results = []
    for number, (x, y) in enumerate(batches(steps * accumulate, seed)):
        results.append(trainer.step(x, target=y))
        if mixed and number % 2 == seed % 2:
            seen["metrics"].append(trainer.evaluate(batches(2, 100 + seed, rows=5), metric))
        if mixed and number % 3 == seed % 3:
            seen["states"].append(trainer.state_dict())
        if mixed and number == 2:
            trainer.load_state_dict(
                {k: v * 0.5 if v.is_floating_point() else v for k, v in trainer.state_dict().items()}
            )
    seen["losses"] = [result.loss for result in results]
    seen["norms"] = [result.grad_norm for result in results]
    seen["states"].append(trainer.state_dict())
    seen["optimizer"] = trainer.optimizer_state_dict()
    if memory:
        seen["memory"] = trainer._backend.pull("memory")
    trainer.close()
    return seen


def state_bytes(stages: int) -> int:
    """What one member takes on the largest stage: parameters, gradients, AdamW's two, buffers."""
    layers = -(-6 // stages)
    parameters = layers * (WIDTH * WIDTH + 3 * WIDTH) * 4
    buffers = layers * (2 * WIDTH * 4 + 8)
    return 4 * parameters + buffers


@functools.cache
def by_itself(seed: int, **options: Any) -> Any:
    return alone(functools.partial(train, seed, **options))


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("fit", [1, 2, 3])
def test_members_that_take_turns_on_the_device_equal_themselves_alone(stages: int, fit: int) -> None:
    members = {i: functools.partial(train, i) for i in range(MEMBERS)}
    bound = fit * state_bytes(stages) + 4096
    outcome = together(members, stages=stages, engine_variables={ENV_DEVICE_MEMORY: str(bound)}, seconds=90.0)
    assert outcome.code == 0, outcome
    for index in members:
        same_bits(outcome.answers[index], by_itself(index))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_uneven_members_in_any_order_equal_themselves_alone(seed: int) -> None:
    """Sizes, micro-batches (up to more than the cap of activations), commands and the bound at random."""

    def uneven(width: int, microbatches: int, calls: list[str], member: int) -> Any:
        torch.manual_seed(member)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6)))
        trainer = jap.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01), loss_fn, microbatches=microbatches)
        seen: list[Any] = []
        x = torch.randn(2 * microbatches, width)
        for call in calls:
            if call == "step":
                seen.append(trainer.step(x, target=x))
            elif call == "evaluate":
                seen.append(trainer.evaluate([(x, x)] * 5, metric))
            else:
                seen.append(trainer.state_dict())
        return [value.loss if isinstance(value, jap.StepResult) else value for value in seen]

    draw = random.Random(seed)
    print("seed", seed)
    stages = draw.choice([2, 3])
    widths = [draw.choice([16, 32, 48]) for _ in range(5)]
    members = {
        i: functools.partial(
            uneven, width, draw.choice([1, 3, 12]), draw.choices(["step", "evaluate", "state"], [6, 2, 1], k=10), i
        )
        for i, width in enumerate(widths)
    }
    largest = 4 * 4 * (6 // stages) * max(width * width + width for width in widths)
    bound = int(largest * draw.choice([1.0, 1.5, 2.2])) + 1024
    outcome = together(members, stages=stages, engine_variables={ENV_DEVICE_MEMORY: str(bound)}, seconds=90.0)
    assert outcome.code == 0, outcome
    for index, function in members.items():
        same_bits(outcome.answers[index], alone(function))


@pytest.mark.parametrize("stages", [1, 2])
def test_gradients_that_are_accumulated_move_too(stages: int) -> None:
    members = {i: functools.partial(train, i, steps=2, accumulate=3) for i in range(3)}
    bound = state_bytes(stages) + 4096
    outcome = together(members, stages=stages, engine_variables={ENV_DEVICE_MEMORY: str(bound)}, seconds=90.0)
    assert outcome.code == 0, outcome
    for index, function in members.items():
        same_bits(outcome.answers[index], alone(function))


def test_what_lies_on_the_device_stays_within_the_bound_and_moves_are_counted(tmp_path: Path) -> None:
    count = 4

    def together_with_all(index: int, folder: str) -> Any:
        Path(folder, str(index)).touch()  # who trains while nobody else is there need not make room
        wait_until(lambda: len(os.listdir(folder)) == count, 60, every=0.01)
        return train(index, memory=True)

    members = {i: functools.partial(together_with_all, i, str(tmp_path)) for i in range(count)}
    bound = 2 * state_bytes(1) + 4096
    outcome = together(members, stages=1, engine_variables={ENV_DEVICE_MEMORY: str(bound)}, seconds=90.0)
    assert outcome.code == 0, outcome
    for answer in outcome.answers.values():
        report = answer["memory"]["0"]
        assert 0 < report["held_bytes"] <= bound == report["bound"]
        assert report["bytes_in"] <= report["bytes_out"]
        assert 0 <= report["waited_us"] <= report["moving_us"] * 2
    assert any(answer["memory"]["0"]["switches"] > 0 for answer in outcome.answers.values())


def test_a_member_that_can_never_fit_is_refused_and_its_siblings_go_on() -> None:
    def large(seed: int) -> Any:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(WIDTH, 600), nn.Linear(600, 600), nn.Linear(600, WIDTH))
        trainer = jap.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loss_fn, microbatches=2)
        for x, y in batches(2, seed):
            trainer.step(x, target=y)
        return trainer.state_dict()

    def grows(seed: int) -> Any:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(WIDTH, 360), nn.Linear(360, WIDTH))
        trainer = jap.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1), loss_fn, microbatches=2)
        for x, y in batches(4, seed):
            _ = trainer.step(x, target=y).loss
        return trainer.state_dict()

    members: dict[int, Any] = {i: functools.partial(train, i) for i in range(2)}
    members[2], members[3] = functools.partial(large, 2), functools.partial(grows, 3)
    bound = state_bytes(1) + 4096
    outcome = together(members, stages=1, engine_variables={ENV_DEVICE_MEMORY: str(bound)}, seconds=90.0)
    assert outcome.codes[0] == outcome.codes[1] == 0, outcome
    for index in (0, 1):
        same_bits(outcome.answers[index], by_itself(index))
    for index in (2, 3):
        assert outcome.codes[index] != 0
        assert "\n" not in outcome.errors[index]
        assert f"member {index} needs " in outcome.errors[index]
        assert "type --jap-memory-per-device=" in outcome.errors[index]
    assert "4 MiB" not in outcome.errors[3]


def test_a_member_that_fails_or_leaves_in_its_turn_makes_room() -> None:
    def fails(seed: int) -> Any:
        class Raise(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(WIDTH))
                self.calls = 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls += self.training
                if self.calls == 5:
                    raise ValueError("in the middle of a batch")
                return x * self.weight

        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Raise(), nn.Linear(WIDTH, WIDTH))
        trainer = jap.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1), loss_fn, microbatches=3)
        for x, y in batches(6, seed):
            _ = trainer.step(x, target=y).loss
        return trainer.state_dict()

    def leaves(seed: int) -> Any:
        torch.manual_seed(seed)
        net = Net()
        trainer = jap.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1), loss_fn, microbatches=3)
        for x, y in batches(2, seed):
            trainer.step(x, target=y)
        trainer.close()

    members: dict[int, Any] = {i: functools.partial(train, i) for i in range(2)}
    members.update({2: functools.partial(fails, 2), 3: functools.partial(leaves, 3), 4: functools.partial(fails, 4)})
    for stages in (1, 2):
        bound = state_bytes(stages) + 4096
        outcome = together(members, stages=stages, engine_variables={ENV_DEVICE_MEMORY: str(bound)}, seconds=90.0)
        assert [outcome.codes[i] for i in range(5)] == [0, 0, 1, 0, 1], outcome
        for index in (0, 1):
            same_bits(outcome.answers[index], by_itself(index))
        assert outcome.errors[2] == outcome.errors[4] == "ValueError: in the middle of a batch"
