#!/usr/bin/env python3
"""Measure the engine against torch.distributed.pipelining, a barrier per array iteration, the simulation, the bound.

    scripts/bench_engine.py --quick               the rows that are held to a figure, under 3 minutes
    scripts/bench_engine.py --json FILE           all rows and every other part (about an hour)
    scripts/bench_engine.py --only costs charlm   some parts: rows memory finish costs trips crowd charlm

Stages sleep: a forward 10 ms, a backward 20 ms (on average where they are uneven), so that S stages need no S cores.
``over_1f1b``: seconds of the members one after another under 1F1B (GPipe for one micro-batch) over those together;
``over_barrier``: the same members when each waits for all others after every step, over together. The walls are from
the first step asked for to the last one done, of N iterations: filling and draining included, starting up excluded.
``f1b_over_simulated`` is what the machine costs the baseline: on a loaded machine neither side comes near 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import bench_models
import torch
from bench_baseline import Pipeline, Work
from bench_members import Meet, Session
from bench_models import ROWS, WIDTH, SleepBlock, SplitSleepBlock
from torch import nn

from slurm_jap.problem import MemberCost, Problem, lower_bound
from slurm_jap.schedule import activation_cap
from slurm_jap.simulate import Layout, run_rule
from slurm_jap.stream import plain_rule

FORWARD, BACKWARD = 0.010, 0.020
ITERATIONS = 16
ROUNDS = 5
MEMBER_SIZES = (0.6, 1.4, 0.8, 1.2)
STAGE_SIZES = (0.75, 1.25)
COLUMNS = (
    "stages", "members", "microbatches", "uneven", "wall", "spread", "over_1f1b", "over_best_other", "best_other",
    "over_barrier", "wall_over_simulated", "f1b_over_simulated", "wall_over_bound", "wall_over_busiest", "load",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One row."""

    stages: int
    members: int
    microbatches: int
    uneven: str = ""
    """``""``, ``members``, ``stages`` or ``both``."""

    def seconds(self, member: int, stage: int) -> tuple[float, float]:
        """Forward and backward of one micro-batch."""
        size = 1.0
        if self.uneven in ("members", "both"):
            size *= MEMBER_SIZES[member % len(MEMBER_SIZES)]
        if self.uneven in ("stages", "both"):
            size *= STAGE_SIZES[stage % len(STAGE_SIZES)]
        return FORWARD * size, BACKWARD * size

    def times(self, member: int) -> tuple[tuple[float, float], ...]:
        """The same per stage."""
        return tuple(self.seconds(member, stage) for stage in range(self.stages))

    @property
    def problem(self) -> Problem:
        """What the scheduler sees."""
        costs = [
            MemberCost(
                forward=tuple(f for f, _ in self.times(k)), backward=tuple(b for _, b in self.times(k)),
                step=(0.0,) * self.stages, microbatches=self.microbatches,
            )
            for k in range(self.members)
        ]  # fmt: skip
        caps = tuple(activation_cap(self.stages, stage) for stage in range(self.stages))
        return Problem(members=tuple(costs), caps=caps)


QUICK = [Case(2, 2, 1), Case(2, 2, 2), Case(2, 2, 4), Case(4, 4, 4), Case(2, 1, 4)]
ALL = [
    *(Case(s, k, m) for s in (2, 4) for k in (1, 2, 4, 8) for m in (1, 2, 4, 8)),
    *(Case(s, k, m, u) for s in (2, 4) for k in (2, 4) for m in (2, 4) for u in ("members", "stages", "both")),
]


def simulated(case: Case, iterations: int) -> float:
    """Seconds that the engine's rule takes for ``iterations`` iterations of every member, from empty to empty."""
    layout = Layout(case.problem)
    return run_rule(layout, plain_rule(layout), iterations).end * layout.tick


def simulated_alone(case: Case, iterations: int) -> float:
    """The same with every member alone, one after another: what 1F1B would take on a machine without any overhead."""
    layout = Layout(case.problem)
    return sum(
        run_rule(single, plain_rule(single), iterations).end * single.tick
        for single in map(layout.alone, range(case.members))
    )


def batch(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one iteration."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, ROWS * microbatches, WIDTH, generator=generator)
    return x[0], x[1]


# --- the members under one engine ------------------------------------------------------------------------------------


def join(
    kept: dict[str, Any], meet: Meet, *, blocks: list[Callable[[], nn.Module]], microbatches: int, warm: int
) -> None:
    """A member's job: hand a model over and warm it up."""
    import slurm_jap as jap

    leave(kept, meet)
    torch.manual_seed(0)
    model = nn.Sequential(*(make() for make in blocks))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kept["trainer"] = jap.prepare(model, optimizer, nn.functional.mse_loss, microbatches=microbatches)
    kept["batch"] = batch(microbatches)
    x, y = kept["batch"]
    for _ in range(warm):
        kept["trainer"].step(x, target=y)
    kept["trainer"].state_dict()


def leave(kept: dict[str, Any], meet: Meet) -> None:
    """A member's job: have the engine forget its model."""
    trainer = kept.pop("trainer", None)
    if trainer is not None:
        trainer.close()


def train(kept: dict[str, Any], meet: Meet, *, iterations: int, barrier: bool) -> tuple[float, float, list[float]]:
    """A member's job: begin, end, and with ``barrier`` the ends of all array iterations."""
    trainer, (x, y) = kept["trainer"], kept["batch"]
    meet()
    begin = time.monotonic()
    ends = []
    for _ in range(iterations):
        trainer.step(x, target=y)
        if barrier:
            trainer.state_dict()  # done on every stage: a loss is known before the backwards are
            meet()
            ends.append(time.monotonic())
    trainer.state_dict()
    return begin, time.monotonic(), ends


def span(answers: Mapping[int, tuple[float, float, list[float]]]) -> float:
    """From the first begin to the last end."""
    return max(end for _, end, _ in answers.values()) - min(begin for begin, _, _ in answers.values())


def per_iteration(answers: Mapping[int, tuple[float, float, list[float]]]) -> float:
    """The median time between the array iterations' ends."""
    ends = [max(times) for times in zip(*(ends for _, _, ends in answers.values()), strict=True)]
    return statistics.median(b - a for a, b in itertools.pairwise(ends))


class Ours:
    """The members of one case after another in one sweep."""

    def __init__(self, stages: int, members: int) -> None:
        self._session = Session(stages, members)
        self._case: Case | None = None

    def run(self, case: Case, iterations: int, *, barrier: bool = False) -> dict[int, Any]:
        """Answers of ``train``."""
        if case != self._case:
            self._session.call({k: leave for k in range(self._session.members)})
            jobs = {
                k: functools.partial(
                    join, blocks=[functools.partial(SleepBlock, *t) for t in case.times(k)],
                    microbatches=case.microbatches, warm=2,
                )
                for k in range(case.members)
            }  # fmt: skip
            self._session.call(jobs)
            self._case = case
        return self._session.call(
            {k: functools.partial(train, iterations=iterations, barrier=barrier) for k in range(case.members)}
        )

    def close(self) -> None:
        self._session.close()


# --- the baselines ---------------------------------------------------------------------------------------------------


class Theirs:
    """torch.distributed.pipelining; a schedule that fails is started afresh for the next case."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._pipeline: Pipeline | None = None
        self._folders: list[tempfile.TemporaryDirectory[str]] = []
        self._seen: set[Work] = set()

    def run(self, case: Case, iterations: int, schedule: str) -> float:
        """Seconds of every member's ``iterations`` iterations, one member after another.

        Equal members take the same time: one is measured and counted for all.
        """
        count = case.members if case.uneven in ("members", "both") else 1
        total = sum(self._member(case, k, iterations, schedule) for k in range(count))
        return total * case.members / count

    def _member(self, case: Case, member: int, iterations: int, schedule: str) -> float:
        chunks = 2 if schedule in ("Interleaved1F1B", "ZBVZeroBubble") else 1
        block = SplitSleepBlock if schedule == "ZBVZeroBubble" else SleepBlock
        times = case.times(member)
        if schedule == "ZBVZeroBubble":
            order = [*range(case.stages), *reversed(range(case.stages))]
        else:
            order = [*range(case.stages)] * chunks
        stages = tuple(functools.partial(block, times[s][0] / chunks, times[s][1] / chunks) for s in order)
        work = _work(stages, case.microbatches, schedule)
        if self._pipeline is None:
            self._folders.append(tempfile.TemporaryDirectory(prefix="jap-bench-"))
            self._pipeline = Pipeline(self._stages, self._folders[-1].name)
            self._seen.clear()
        try:
            taken = self._pipeline.run(work, iterations, warm=0 if work in self._seen else 3)
        except RuntimeError:
            self._pipeline.close()
            self._pipeline = None
            raise
        self._seen.add(work)
        return taken

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
        for folder in self._folders:
            folder.cleanup()


@functools.cache
def _work(stages: tuple[Any, ...], microbatches: int, schedule: str) -> Work:
    return Work(stages, functools.partial(batch, microbatches), microbatches, schedule=schedule)


# --- rows ------------------------------------------------------------------------------------------------------------


def measure_rows(cases: list[Case], say: Callable[[str], None], *, others: bool) -> list[dict[str, Any]]:
    """Every case, its rounds alternating between the ways."""
    rows = []
    for stages in sorted({case.stages for case in cases}):
        mine = [case for case in cases if case.stages == stages]
        ours, theirs = Ours(stages, max(case.members for case in mine)), Theirs(stages)
        try:
            for case in mine:
                row = measure(case, ours, theirs, others=others)
                rows.append(row)
                say(
                    f"S={case.stages} K={case.members} M={case.microbatches} {case.uneven or 'equal'}: "
                    f"over 1F1B {row['over_1f1b']:.3f}, over simulated {row['wall_over_simulated']:.3f}"
                )
        finally:
            ours.close()
            theirs.close()
    return rows


def measure(case: Case, ours: Ours, theirs: Theirs, *, others: bool) -> dict[str, Any]:
    """One row; seconds of ``ITERATIONS`` iterations of all members."""
    plain = "GPipe" if case.microbatches == 1 else "1F1B"
    walls, base = [], []
    theirs.run(case, 2, plain)
    ours.run(case, 2)
    # Array iterations behind a barrier repeat one another: each is a sample.
    barriered = ours.run(case, ITERATIONS + 1, barrier=True)
    for _ in range(ROUNDS):
        base.append(theirs.run(case, ITERATIONS, plain))
        walls.append(span(ours.run(case, ITERATIONS)))
    wall, f1b = statistics.median(walls), statistics.median(base)
    best: tuple[float, str] | None = None
    for schedule in ("Interleaved1F1B", "ZBVZeroBubble") if others else ():
        try:
            taken = statistics.median(theirs.run(case, ITERATIONS, schedule) for _ in range(3))
        except RuntimeError:
            continue
        best = min(best or (taken, schedule), (taken, schedule))
    problem = case.problem
    load = ITERATIONS * lower_bound(problem).load
    bound, ideal = ITERATIONS * lower_bound(problem).period, simulated(case, ITERATIONS)
    return {
        "stages": case.stages,
        "members": case.members,
        "microbatches": case.microbatches,
        "uneven": case.uneven or False,
        "iterations": ITERATIONS,
        "rounds": ROUNDS,
        "wall": wall,
        "spread": (max(walls) - min(walls)) / wall,
        "walls": walls,
        "f1b": f1b,
        "f1b_walls": base,
        "over_1f1b": f1b / wall,
        "f1b_over_simulated": f1b / simulated_alone(case, ITERATIONS),
        "best_other": best and best[1],
        "over_best_other": best and best[0] / wall,
        "over_barrier": per_iteration(barriered) * ITERATIONS / wall,
        "simulated": ideal,
        "wall_over_simulated": wall / ideal,
        "bound": bound,
        "wall_over_bound": wall / bound,
        "busiest": load,
        "wall_over_busiest": wall / load,
        "load": os.getloadavg()[0],
    }


def gates(rows: list[dict[str, Any]]) -> list[tuple[str, float, str, float]]:
    """What is asked of the rows: (what, measured, relation, limit)."""
    found = []
    floors = {(2, 1): 1.90, (2, 2): 1.45, (2, 4): 1.22}
    for row in rows:
        s, k, m = row["stages"], row["members"], row["microbatches"]
        if row["uneven"]:
            continue
        name = f"S={s} K={k} M={m}"
        if s == 2 and k >= 2 and (s, m) in floors:
            found.append((f"{name} over_1f1b", row["over_1f1b"], ">=", floors[s, m]))
        if (s, k, m) == (4, 4, 4):
            found.append((f"{name} over_1f1b", row["over_1f1b"], ">=", 1.68))
        if k == 1:
            found.append((f"{name} 1F1B's cost, over_1f1b", row["over_1f1b"], ">=", 1 / 1.02))
        found.append((f"{name} wall_over_simulated", row["wall_over_simulated"], "<=", 1.02 if s == 2 else 1.03))
        if s == 2 and k >= s:
            found.append((f"{name} wall_over_busiest", row["wall_over_busiest"], "<=", 1.05))
    return found


def passes(measured: float, relation: str, limit: float) -> bool:
    """Whether a figure meets its limit."""
    return measured >= limit if relation == ">=" else measured <= limit


# --- the report ------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Where this was measured."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return {
        "cpu": model, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
        "torch": torch.__version__, "kernel": platform.release(), "load": os.getloadavg(), "nice": os.nice(0),
    }  # fmt: skip


def text_of(value: Any) -> str:
    """A cell."""
    if value is None:
        return "-"
    if value is False:
        return "no"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def report(result: dict[str, Any]) -> None:
    """Print what was measured, for people."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)

    def table(title: str, columns: Iterable[str], rows: list[dict[str, Any]]) -> None:
        drawn = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
        for name in columns:
            drawn.add_column(name.replace("_", " "), justify="right", overflow="fold")
        for row in rows:
            drawn.add_row(*(text_of(row.get(name)) for name in columns))
        console.print(drawn)

    if result.get("rows"):
        table(
            f"{ITERATIONS} iterations of every member, seconds, medians of {ROUNDS} alternating rounds",
            COLUMNS, result["rows"],
        )  # fmt: skip
        drawn = Table(box=box.SIMPLE_HEAD)
        for name in ("asked of the rows", "measured", "limit", ""):
            drawn.add_column(name)
        for name, measured, relation, limit in gates(result["rows"]):
            verdict = "ok" if passes(measured, relation, limit) else "MISSED"
            drawn.add_row(name, f"{measured:.3f}", f"{relation} {limit:.3f}", verdict)
        console.print(drawn)
    for part in result.get("parts", []):
        table(part["title"], part["rows"][0].keys() if part["rows"] else (), part["rows"])
        if part.get("note"):
            console.print(part["note"] + "\n")
    console.print(f"machine: {json.dumps(result['machine'])}")


def main() -> int:
    """Measure and report."""
    import bench_parts

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the rows that are held to a figure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there too")
    parser.add_argument(
        "--only", nargs="+", choices=["rows", *bench_parts.PARTS], metavar="PART",
        help="some parts: rows " + " ".join(bench_parts.PARTS),
    )  # fmt: skip
    parser.add_argument("--case", metavar="S,K,M", help="of the rows, this one")
    options = parser.parse_args()
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: the folder does not exist; make it first")
    cases = QUICK if options.quick else ALL
    if options.case:
        cases = [case for case in ALL if f"{case.stages},{case.members},{case.microbatches}" == options.case]
        if not cases:
            parser.error(f"--case {options.case}: no such row; S is 2 or 4, K and M are 1, 2, 4 or 8, e.g. 2,4,1")
    bench_models.sleep_exactly()
    wanted = options.only or (["rows"] if options.quick or options.case else ["rows", *bench_parts.PARTS])

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    result: dict[str, Any] = {"machine": machine(), "rows": [], "parts": []}
    if "rows" in wanted:
        result["rows"] = measure_rows(cases, say, others=not options.quick)
    for name in wanted:
        if name != "rows":
            say(f"measuring {name}")
            result["parts"].append(bench_parts.PARTS[name]())
    result["machine"]["load_after"] = os.getloadavg()
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    report(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
