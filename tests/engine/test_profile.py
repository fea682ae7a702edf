"""What engine and in-process Trainer measure of a network, where it is kept, and that the next cut follows it."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from array_harness import MemberFunction, same_bits, together
from torch import nn

import slurm_jap as jap
from slurm_jap import profile_cache
from slurm_jap.profile import Profile
from slurm_jap.profile_cache import Entry

pytestmark = pytest.mark.engine

FORWARD, BACKWARD = 0.004, 0.008


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD)
        return grad


class Layer(nn.Module):
    """A linear layer that tells which process runs it; ``slow`` ones sleep as well."""

    def __init__(self, number: int, width: int, slow: bool) -> None:
        super().__init__()
        self.number, self.slow = number, slow
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            sys.stdout.write(f"block {self.number} in {os.getpid()}\n")  # at once, as other stages write as well
        x = torch.relu(self.linear(x))
        return _Sleep.apply(x) if self.slow else x


def member(steps: int, *, seed: int = 0, slow: int = 3, width: int = 16) -> MemberFunction:
    def train() -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(*(Layer(number, width, slow=number == slow) for number in range(4)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        trainer = jap.prepare(model, optimizer, nn.MSELoss(), microbatches=2)
        losses = [trainer.step(torch.randn(8, width), target=torch.randn(8, width)).loss for _ in range(steps)]
        values = trainer.state_dict()
        trainer.close()
        return {"losses": losses, "state": values}

    return train


def kept(script: bytes) -> list[Entry]:
    return profile_cache.load(script)


def check(found: Profile, width: int = 16) -> None:
    parameters = (width * width + width) * 4
    assert [block.name for block in found.blocks] == ["Layer"] * 4 + ["MSELoss"]
    for number, block in enumerate(found.blocks[:-1]):
        assert block.parameter_bytes == block.gradient_bytes == parameters
        assert block.optimizer_bytes == 2 * parameters
        assert block.output_bytes == 4 * width * 4
        assert block.activation_bytes >= 4 * width * 4
        assert block.forward > (FORWARD if number == 3 else 0.0)
        assert block.backward > (BACKWARD if number == 3 else 0.0)
        assert block.step > 0
    assert found.measured
    assert found.device == "cpu"
    assert found.microbatches == 2
    assert found.iterations == 8


@pytest.mark.parametrize("stages", [1, 2])
def test_a_sweep_leaves_its_profile_for_the_next_one(stages: int) -> None:
    script = f"#!/bin/bash\n# {stages}\n".encode()
    outcome = together({0: member(11), 2: member(11, seed=1)}, stages=stages, script=script)
    assert outcome.codes == {0: 0, 2: 0}
    (entry,) = kept(script)
    assert entry.members == (0, 2)
    check(entry.profile)
    told = [event for event in outcome.events if event["kind"] == "profile"]
    assert {event["member"] for event in told} == {0, 2}
    assert {event["signature"] for event in told} == {entry.profile.signature}


def test_a_short_run_leaves_what_its_first_batch_told() -> None:
    script = b"#!/bin/bash\n# short\n"
    assert together({0: member(2)}, stages=2, script=script).code == 0
    (entry,) = kept(script)
    assert not entry.profile.measured
    assert [block.optimizer_bytes > 0 for block in entry.profile.blocks] == [True] * 4 + [False]
    costs = entry.profile.costs
    assert min(costs) > 0
    assert max(costs[:-1]) == pytest.approx(min(costs[:-1]))


def test_different_networks_are_kept_apart_and_an_estimate_replaces_no_measurement() -> None:
    script = b"#!/bin/bash\n# widths\n"
    assert together({0: member(11), 1: member(11, width=24)}, stages=2, script=script).code == 0
    assert sorted((entry.members, entry.profile.measured) for entry in kept(script)) == [((0,), True), ((1,), True)]
    assert together({0: member(1)}, stages=2, script=script).code == 0
    assert all(entry.profile.measured for entry in kept(script))


def places(log: str) -> list[int]:
    """Per block, which of the processes in order of appearance ran it."""
    pids = {int(line.split()[1]): line.split()[3] for line in log.splitlines() if line.startswith("block ")}
    order = list(dict.fromkeys(pids[block] for block in sorted(pids)))
    return [order.index(pids[block]) for block in sorted(pids)]


def test_the_next_run_is_cut_by_what_was_measured_and_no_bit_changes() -> None:
    script = b"#!/bin/bash\n# cut\n"
    first = together({0: member(11, slow=0)}, stages=2, script=script)
    assert places(first.logs[0]) == [0, 0, 1, 1]
    second = together({0: member(11, slow=0)}, stages=2, script=script)
    assert places(second.logs[0]) == [0, 1, 1, 1]
    same_bits(first.answers[0], second.answers[0])


def test_a_profile_of_another_network_changes_no_cut() -> None:
    script = b"#!/bin/bash\n# other\n"
    assert together({0: member(11, slow=0, width=24)}, stages=2, script=script).code == 0
    assert places(together({0: member(3, slow=0)}, stages=2, script=script).logs[0]) == [0, 0, 1, 1]


def test_a_broken_cache_costs_nothing(tmp_path: Path) -> None:
    script = b"#!/bin/bash\n# broken\n"
    assert together({0: member(11)}, stages=2, script=script).code == 0
    (path,) = (profile_cache.folder() / profile_cache.profile.script_key(script)).glob("*.json")
    path.write_text(path.read_text()[:100])
    assert kept(script) == []
    assert together({0: member(11)}, stages=2, script=script).code == 0
    check(kept(script)[0].profile)


def test_a_trainer_by_itself_writes_the_file_that_jap_profile_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(profile_cache.ENV_PROFILE, str(tmp_path / "p.json"))
    measured = member(11)()
    entry = profile_cache.read_named(str(tmp_path / "p.json"))
    check(dataclasses.replace(entry.profile))
    monkeypatch.delenv(profile_cache.ENV_PROFILE)
    same_bits(measured, member(11)())
