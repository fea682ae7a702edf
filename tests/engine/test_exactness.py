"""Every member exactly as alone: for each kind of model and option, losses, norms and final parameters are equal bits.

The reference is the in-process Trainer with the same micro-batches and threads; beside it, plain torch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from array_harness import alone, same_bits, together
from torch import nn

import slurm_jap as jap

pytestmark = pytest.mark.engine


def mlp(dropout: float = 0.3) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def batches(count: int, rows: int = 8, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator))
        for _ in range(count)
    ]


MOMENTUM = functools.partial(torch.optim.SGD, momentum=0.9)


def train(
    build: Callable[[], nn.Module],
    *,
    lr: float = 0.05,
    seed: int = 0,
    steps: int = 4,
    rows: int = 8,
    optimizer: Callable[..., torch.optim.Optimizer] = MOMENTUM,
    loss: Callable[..., Any] | None = None,
    microbatches: int = 3,
    **options: Any,
) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = build()
    made = optimizer(model.parameters(), lr=lr)
    trainer = jap.prepare(model, made, loss or nn.CrossEntropyLoss(), microbatches=microbatches, **options)
    before = torch.get_rng_state()
    results = [trainer.step(x, target=y) for x, y in batches(steps, rows, seed + 1)]
    losses = [r.loss for r in results]
    norms = [r.grad_norm for r in results]
    state = trainer.state_dict()
    untouched = torch.equal(before, torch.get_rng_state())
    trainer.close()
    return {"losses": losses, "norms": norms, "state": state, "untouched": untouched}


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_members_of_a_sweep_equal_themselves_alone(stages: int) -> None:
    members = {
        i: functools.partial(train, mlp, lr=lr, seed=i, clip_grad_norm=clip)
        for i, (lr, clip) in enumerate(itertools.product([0.1, 0.01], [None, 0.1]))
    }
    outcome = together(members, stages=stages)
    assert outcome.code == 0, outcome
    for index, function in members.items():
        same_bits(outcome.answers[index], alone(function))
        assert outcome.answers[index]["untouched"]


def test_stages_and_members_on_two_nodes_equal_themselves_alone() -> None:
    """Between nodes everything goes over TCP, activations far larger than a socket's buffer included."""

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 40_000), nn.ReLU(), nn.Linear(40_000, 3))

    members = {i: functools.partial(train, wide, seed=i, rows=64, microbatches=2, steps=2) for i in range(3)}
    outcome = together(members, stages=2, nodes=2)
    assert outcome.code == 0, outcome
    for index, function in members.items():
        same_bits(outcome.answers[index], alone(function))
