"""A model lies in one place: the member's own process keeps none of it, the engine keeps each once and lets it go."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from array_harness import together
from support import wait_until
from torch import nn

import slurm_jap as jap

pytestmark = pytest.mark.engine

WIDTH = 3000
MODEL = 2 * WIDTH * WIDTH * 4


def resident(pid: int | str) -> int:
    """Bytes of a process that lie in memory and are its own, or shared memory."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


def test_one_copy_of_each_model_in_the_engine_and_none_in_the_member(tmp_path: Path) -> None:
    def member(seed: int) -> Any:
        os.environ["JAP_RECOVERY"] = "0"
        before = resident("self")
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        trainer = jap.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), nn.MSELoss(), microbatches=1)
        built = resident("self")
        x = torch.ones(2, WIDTH)
        for _ in range(2):
            trainer.step(x, target=x)
            trainer.forward(x)  # after the step
        wait_until(lambda: resident("self") < before + MODEL // 4, 10, "the member's memory")
        (tmp_path / f"stepped_{seed}").touch()
        wait_until(lambda: (tmp_path / f"leave_{seed}").exists(), 60, "the word to leave")
        trainer.close()
        return built - before

    seen: dict[str, int] = {}

    def watch(launcher: Any, folder: Any) -> None:
        def engine() -> int:
            agent = launcher.agents[0].pid
            return int(Path(f"/proc/{agent}/task/{agent}/children").read_text().split()[0])

        wait_until(lambda: all((tmp_path / f"stepped_{i}").exists() for i in range(2)), 60, "the steps")
        time.sleep(0.2)
        seen["two"] = resident(engine())
        (tmp_path / "leave_0").touch()
        wait_until(lambda: resident(engine()) < seen["two"] - MODEL * 3 // 4, 10, "the engine's memory")
        seen["one"] = resident(engine())
        (tmp_path / "leave_1").touch()

    outcome = together({i: functools.partial(member, i) for i in range(2)}, stages=1, during=watch, seconds=90.0)
    assert outcome.code == 0, outcome
    assert all(answer > MODEL * 3 // 4 for answer in outcome.answers.values())  # it was there before
    assert abs(seen["two"] - seen["one"] - MODEL) < MODEL // 2
