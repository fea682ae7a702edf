#!/usr/bin/env python3
"""Compare the planner's predicted time per iteration with the real engine's, on blocks that sleep.

    scripts/bench_planner.py [--quick] [--json FILE]

A network of 4 blocks (forward 10 ms, backward 20 ms; uneven: 5, 10, 15, 10 and twice that) is profiled by a Trainer
alone in its process. From that profile alone the planner predicts each row; then the row is run by the real
coordinator, engines and member processes. ``error`` is prediction over reality, minus 1; the gate is 5% on a quiet
machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "engine"))

import array_harness
import torch
from torch import nn

import slurm_jap as jap
from slurm_jap import planner, profile_cache
from slurm_jap.problem import lower_bound
from slurm_jap.profile import Profile

GATE = 0.05
EQUAL = (0.010, 0.010, 0.010, 0.010)
UNEVEN = (0.005, 0.010, 0.015, 0.010)
WIDTH, ROWS = 32, 2
WARM, MEASURED = 4, 14
CASES = [
    # stages, members, micro-batches, blocks
    (1, 1, 4, EQUAL),
    (1, 3, 2, EQUAL),
    (2, 1, 4, EQUAL),
    (2, 2, 1, EQUAL),
    (2, 2, 4, EQUAL),
    (2, 4, 2, EQUAL),
    (4, 1, 4, EQUAL),
    (4, 2, 4, EQUAL),
    (4, 4, 2, EQUAL),
    (4, 8, 2, EQUAL),
    (2, 3, 4, UNEVEN),
    (4, 3, 4, UNEVEN),
]
QUICK = [CASES[2], CASES[4], CASES[7], CASES[8], CASES[11]]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


class SleepBlock(nn.Module):
    """Takes ``seconds`` forward and twice that backward; in eval mode it only computes."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return _Sleep.apply(x, self.seconds) if self.training else x


def train(blocks: tuple[float, ...], microbatches: int, iterations: int) -> float:
    """Train one member; seconds per iteration after the warm-up."""
    torch.manual_seed(0)
    model = nn.Sequential(*map(SleepBlock, blocks))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = jap.prepare(model, optimizer, nn.MSELoss(), microbatches=microbatches)
    x = torch.randn(ROWS * microbatches, WIDTH)
    results = []
    begun = 0.0
    for number in range(iterations):
        results.append(trainer.step(x, target=x))
        if number >= 2:  # as far ahead as a script may be
            float(results[number - 2].loss)
            if number - 2 == WARM:
                begun = time.perf_counter()
    known = iterations - 3 - WARM
    seconds = time.perf_counter() - begun
    trainer.close()
    return seconds / known


def profile_of(blocks: tuple[float, ...], microbatches: int) -> Profile:
    """What a Trainer alone measures."""
    with tempfile.TemporaryDirectory(prefix="jap-bench-") as folder:
        path = os.path.join(folder, "profile.json")

        def alone() -> float:
            os.environ[profile_cache.ENV_PROFILE] = path
            return train(blocks, microbatches, 10)

        array_harness.alone(alone)
        return profile_cache.read_named(path).profile


def measure(stages: int, members: int, microbatches: int, blocks: tuple[float, ...]) -> dict[str, Any]:
    """One row."""
    known = planner.Known(profiles=(profile_of(blocks, microbatches),), of_member=(0,) * members)
    model = planner.Model(known, planner.Assumptions())
    predicted = model.period([0] * members, stages)

    def member() -> float:
        return train(blocks, microbatches, WARM + MEASURED + 3)

    outcome = array_harness.together(dict.fromkeys(range(members), member), stages=stages, seconds=300.0)
    if outcome.code != 0:
        raise SystemExit(f"the sweep failed: {outcome.errors} {outcome.said[-3:]} {outcome.engine_log[-2000:]}")
    real = sum(outcome.answers.values()) / members
    return {
        "stages": stages,
        "members": members,
        "microbatches": microbatches,
        "equal": len(set(blocks)) == 1,
        "predicted": predicted,
        "real": real,
        "error": predicted / real - 1,
        "bound": lower_bound(model.problem([0] * members, stages)).period,
    }


def main() -> int:
    """Measure, print, and say whether the gate holds."""
    parser = argparse.ArgumentParser(description="Compare the planner's predictions with the real engine.")
    parser.add_argument("--quick", action="store_true", help="fewer rows")
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK: sleeps end when they are due
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} CPUs, load average {load:.1f}{'' if load < 0.7 else ': the machine is not quiet'}")
    print(f"{'S':>2} {'K':>2} {'M':>2} {'blocks':>7} {'predicted':>10} {'real':>10} {'error':>7} {'bound':>10}")
    rows = []
    for case in QUICK if arguments.quick else CASES:
        row = measure(*case)
        rows.append(row)
        kind = "equal" if row["equal"] else "uneven"
        print(
            f"{row['stages']:>2} {row['members']:>2} {row['microbatches']:>2} {kind:>7} "
            f"{row['predicted'] * 1e3:>7.1f} ms {row['real'] * 1e3:>7.1f} ms {row['error']:>+7.1%} "
            f"{row['bound'] * 1e3:>7.1f} ms",
            flush=True,
        )
    worst = max(abs(row["error"]) for row in rows)
    print(f"largest error {worst:.1%}, gate {GATE:.0%}: {'holds' if worst <= GATE else 'MISSED'}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"load": load, "gate": GATE, "rows": rows}, indent=2) + "\n")
    return int(worst > GATE)


if __name__ == "__main__":
    sys.exit(main())
