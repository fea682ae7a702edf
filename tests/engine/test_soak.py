"""Members join, fail, are killed, stop, leave, and end engines, in random order, in one long-lived sweep after another.

Nothing may hang, no healthy member may change by one bit, and the engine may keep nothing of those who have left:
descriptors, memory and shared memory stay flat. By default a part of the events; ``JAP_TEST_SOAK=1000`` plays all,
``JAP_TEST_SOAK_SEED`` repeats a run (the seed is printed).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from array_harness import alone, same_bits, together
from torch import nn

import slurm_jap as jap

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

EVENTS = int(os.environ.get("JAP_TEST_SOAK") or 120)
SEED = int(os.environ.get("JAP_TEST_SOAK_SEED") or random.SystemRandom().randrange(10**6))
MEMBERS = 5
"""Processes of one sweep; each joins and leaves many times, unless it is killed."""
PLANS = 4
"""Healthy training runs, whose results are known."""
MEMORY = 48 << 20
"""Bytes that an engine may grow while members come and go: what one of the trainings holds is a thousandth of it."""


class Bad(nn.Module):
    """Raises in the given direction of its third micro-batch."""

    def __init__(self, where: str, error: type[BaseException]) -> None:
        super().__init__()
        self.where, self.error, self.calls = where, error, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            if self.calls == 3 and self.where == "forward":
                raise self.error("soaked")
            if self.calls == 3 and self.where == "backward":
                x = x.clone()
                x.register_hook(self.fail)
        return x.clone()

    def fail(self, grad: torch.Tensor) -> None:
        raise self.error("soaked")


def prepare(seed: int, extra: nn.Module | None = None) -> jap.Trainer:
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(6, 16), nn.Dropout(0.2), extra or nn.Identity(), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3)
    )
    return jap.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=0.01), nn.CrossEntropyLoss(), microbatches=1 + seed % 3,
        clip_grad_norm=1.0 if seed % 2 else None,
    )  # fmt: skip


def batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = 4 + int(torch.randint(4, (), generator=generator))
        yield torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def healthy(seed: int) -> Any:
    """A training that ends well; its losses and parameters."""
    trainer = prepare(seed)
    losses = [trainer.step(x, target=y).loss for _, (x, y) in zip(range(3 + seed), batches(seed), strict=False)]
    state = trainer.state_dict()
    trainer.close()
    return {"losses": losses, "state": state}


def abandoned(seed: int) -> None:
    """Leaves in the middle: two batches are still on their way."""
    trainer = prepare(seed)
    for _, (x, y) in zip(range(1 + seed), batches(seed), strict=False):
        trainer.step(x, target=y)
    trainer.abandon()


def failing(seed: int, where: str, error: type[BaseException]) -> str:
    """Its model raises in the engine; what arrived here."""
    trainer = prepare(seed, Bad(where, error))
    try:
        for _, (x, y) in zip(range(8), batches(seed), strict=False):
            trainer.step(x, target=y).loss  # noqa: B018
        trainer.state_dict()
    except error as caught:
        return str(caught)
    finally:
        trainer.abandon()
    return "nothing was raised"


def life(index: int, stages: int, seed: int, events: int, results: dict[int, Any]) -> int:
    """One member process: random events until ``events`` have happened; how many bits of the healthy ones differed."""
    draw = random.Random(f"{seed}/{stages}/{index}")
    for _ in range(events):
        kind = draw.choice(("healthy", "healthy", "abandoned", "failing", "failing", "pause"))
        plan = draw.randrange(PLANS)
        print("event", kind, plan, flush=True)
        if kind == "healthy":
            same_bits(healthy(plan), results[plan])
        elif kind == "abandoned":
            abandoned(plan)
        elif kind == "failing":
            where = draw.choice(("forward", "backward"))
            error = draw.choice((ValueError, SystemExit, KeyboardInterrupt))
            said = failing(plan, where, error)
            assert said == "soaked", f"{where} {error.__name__}: {said}"
        else:
            time.sleep(draw.random() * 0.05)
    return events


def doomed(index: int, stages: int, seed: int) -> None:
    """One member process that is killed by its own hand in the middle of training."""
    draw = random.Random(f"{seed}/{stages}/doomed/{index}")
    trainer = prepare(draw.randrange(PLANS))
    print("event killed", flush=True)
    for number, (x, y) in enumerate(batches(0)):
        trainer.step(x, target=y)
        if number == draw.randrange(6) or number == 6:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclasses.dataclass
class Held:
    """What an engine process holds."""

    descriptors: int
    memory: int
    """Private and shared bytes in use."""
    shared_files: int
    """memfds and files in /dev/shm, open or mapped."""


def held_by(pid: int) -> Held:
    descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    memory = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    mapped = {line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:" in line}
    opened = 0
    for descriptor in descriptors:
        try:
            opened += "memfd:" in os.readlink(descriptor)
        except OSError:
            continue
    return Held(len(descriptors), memory, opened + len(mapped))


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def shared_memory() -> int:
    return len(list(Path("/dev/shm").iterdir()))


def watch(samples: dict[int, list[Held]]) -> Callable[[Any, Any], None]:
    """Samples every engine until the members have ended."""

    def during(launcher: Any, sweep_dir: Any) -> None:
        while not any(event["kind"] == "sweep_ended" for event in sweep_dir.events("run")):
            for agent in list(launcher.agents):
                try:
                    for pid in children_of(agent.pid):
                        samples.setdefault(pid, []).append(held_by(pid))
                except (OSError, ValueError):
                    continue
            if launcher.members and not any(alive(forked.pid) for forked in launcher.members.values()):
                return
            time.sleep(0.25)

    return during


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def results() -> dict[int, Any]:
    return {plan: alone(functools.partial(healthy, plan)) for plan in range(PLANS)}


def check_flat(samples: dict[int, list[Held]]) -> None:
    """Nothing grows from the time when every member has been there to the end."""
    assert samples
    for taken in samples.values():
        if len(taken) < 8:
            continue
        early, late = taken[len(taken) // 4 : len(taken) // 2], taken[-(len(taken) // 4) :]
        for name, room in (("descriptors", 2 * MEMBERS), ("memory", MEMORY), ("shared_files", 2 * MEMBERS)):
            before = max(getattr(held, name) for held in early)
            after = min(getattr(held, name) for held in late)
            assert after <= before + room, f"{name} of an engine grew from {before} to {after}"


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_members_come_and_go(stages: int, results: dict[int, Any]) -> None:
    print(f"JAP_TEST_SOAK={EVENTS} JAP_TEST_SOAK_SEED={SEED}")
    each = max(1, EVENTS // 4 // MEMBERS)
    samples: dict[int, list[Held]] = {}
    before = shared_memory()
    stay = {k: functools.partial(life, k, stages, SEED, each, results) for k in range(MEMBERS)}
    die = {k: functools.partial(doomed, k, stages, SEED) for k in range(MEMBERS, MEMBERS + 2)}
    outcome = together({**stay, **die}, stages=stages, during=watch(samples), seconds=120 + 6 * EVENTS)
    logs = "\n".join(f"--- {k}\n{text[-1500:]}" for k, text in outcome.logs.items())
    assert [outcome.codes[k] for k in stay] == [0] * MEMBERS, f"{outcome.said}\n{outcome.engine_log}\n{logs}"
    assert [outcome.codes[k] for k in die] == [128 + signal.SIGKILL] * len(die), outcome.said
    assert sum(event["kind"] == "engine_started" for event in outcome.events) == 1, outcome.said
    check_flat(samples)
    assert shared_memory() <= before


@pytest.mark.parametrize("stages", [1, 3])
def test_engines_that_are_killed_meanwhile(stages: int, results: dict[int, Any]) -> None:
    """Every set that dies is replaced, and nobody's numbers change; the sweep gives up only after several deaths."""
    draw = random.Random(f"{SEED}/{stages}/engines")
    print(f"JAP_TEST_SOAK={EVENTS} JAP_TEST_SOAK_SEED={SEED}")

    def slowly(plan: int) -> Any:
        trainer = prepare(plan)
        losses = []
        for _, (x, y) in zip(range(3 + plan), batches(plan), strict=False):
            losses.append(trainer.step(x, target=y).loss)
            time.sleep(0.3)
        state = trainer.state_dict()
        trainer.close()
        return {"losses": losses, "state": state}

    def kill_two(launcher: Any, sweep_dir: Any) -> None:
        killed: set[int] = set()
        deadline = time.monotonic() + 60
        while len(killed) < 2 and time.monotonic() < deadline:
            time.sleep(0.2 + draw.random())
            agent = launcher.agents[0].pid if launcher.agents else None
            joined = any(event["kind"] == "joined" for event in sweep_dir.events("member_3"))
            if agent is None or agent in killed or not joined:
                continue
            try:
                victims = children_of(agent)
                if len(victims) == stages:
                    os.kill(draw.choice(victims), signal.SIGKILL)
                    killed.add(agent)
            except OSError:
                continue

    plans = {k: functools.partial(slowly, k % PLANS) for k in range(4)}
    outcome = together(plans, stages=stages, during=kill_two, seconds=180)
    assert outcome.code == 0, f"{outcome.said}\n{outcome.engine_log}\n{outcome.logs}"
    for k in plans:
        same_bits(outcome.answers[k], results[k % PLANS])
