"""Which pipeline a member joins: the one with the fewest members, so that no device holds more than was planned."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from array_harness import MemberFunction, together
from torch import nn

import slurm_jap as jap

pytestmark = pytest.mark.engine


class Telling(nn.Linear):
    """Says which process trains it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            sys.stdout.write(f"in {os.getpid()}\n")
        return super().forward(x)


def member(*, until: Path | None = None, leaves: Path | None = None) -> MemberFunction:
    """Trains one step, or on and on until a file is there; leaves a file behind."""

    def train() -> Any:
        model = nn.Sequential(Telling(4, 4))
        with jap.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), microbatches=1) as trainer:
            deadline = time.monotonic() + 60
            while True:
                trainer.step(torch.ones(2, 4), target=torch.ones(2, 4)).loss.item()
                if until is None or until.exists() or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        if leaves is not None:
            leaves.touch()
        return time.monotonic() < deadline

    return train


def test_a_newcomer_takes_the_place_of_the_member_that_has_left(tmp_path: Path) -> None:
    last = tmp_path / "last"
    functions = {0: member(until=last), 1: member(), 2: member(), 3: member(leaves=last)}
    outcome = together(functions, stages=1, groups=2, throttle=2)
    assert outcome.codes == dict.fromkeys(range(4), 0)
    assert outcome.answers[0]
    engine = {
        index: {line for line in log.splitlines() if line.startswith("in ")} for index, log in outcome.logs.items()
    }
    assert engine[1] == engine[2] == engine[3] != engine[0]
    assert len(engine[0]) == len(engine[1]) == 1
