"""The stream scheduler: its quality where it is known, the same answer every time, golden schedules.

``python tests/unit/test_schedule_stream.py`` writes the golden files anew.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from unit import schedule_reference as reference

from slurm_jap.problem import MemberCost, Problem, caps_of, uniform
from slurm_jap.schedule import Schedule
from slurm_jap.simulate import evaluate
from slurm_jap.stream import stream
from slurm_jap.validate import validate

GOLDEN = Path(__file__).parent / "golden"


def different() -> Problem:
    """Three members with 1, 2 and 3 micro-batches of different size on 3 stages, limited in bytes."""
    members = tuple(
        MemberCost(
            forward=(0.01 * k, 0.02, 0.01), backward=(0.02 * k, 0.04, 0.02), step=(0.002,) * 3, microbatches=k,
            activation=(100 * k, 50, 10),
        )
        for k in (1, 2, 3)
    )  # fmt: skip
    return Problem(members=members, link=0.001, memory=(500, 200, 40))


INSTANCES = {
    "one-member": uniform(stages=4, members=1, microbatches=4, memory=1),
    "as-many-as-stages": uniform(stages=2, members=2, microbatches=2, step=0.2, link=0.05, memory=2),
    "fewer-than-stages": uniform(stages=4, members=2, microbatches=2, step=0.2, link=0.05, memory=2),
    "barrier": uniform(stages=3, members=2, microbatches=2, step=0.2, memory=2, barrier=True),
    "different": different(),
}


def golden_text(name: str) -> str:
    problem = INSTANCES[name]
    solution = stream(problem)
    return f"# {name}: period {solution.period:.6g} s, bound {solution.bound.period:.6g} s\n{solution.schedule}"


@pytest.mark.parametrize("name", INSTANCES)
def test_golden_schedules(name: str) -> None:
    text = (GOLDEN / f"schedule-{name}.txt").read_text()
    assert golden_text(name) == text
    validate(INSTANCES[name], Schedule.parse(text))


def test_the_golden_one_member_schedule_is_1f1b() -> None:
    schedule = Schedule.parse((GOLDEN / "schedule-one-member.txt").read_text())
    kinds = ["".join(str(action)[4] for action in order) for order in schedule.stages]
    assert kinds == ["FFFFBBBBS", "FFFBFBBBS", "FFBFBFBBS", "FBFBFBFBS"]


def test_the_same_problem_gives_the_same_schedule() -> None:
    problem = reference.uneven(4, 3, 4, 7, link=0.1, caps=caps_of(4, 1.5))
    assert stream(problem, work=50_000) == stream(problem, work=50_000)


@pytest.mark.parametrize(
    ("stages", "members", "microbatches", "link", "memory", "over_bound"),
    [
        # Stage load rules: the bound is met.
        (4, 4, 8, 0.05, 2, 1.001),
        (8, 16, 4, 0.3, 2, 1.001),
        (4, 8, 4, 0.05, 1, 1.01),
        # The members' own paths rule: even phases and spaced micro-batches.
        (4, 4, 1, 0.3, 2, 1.001),
        (16, 4, 4, 0.2, 1, 1.01),
        (16, 2, 8, 0.1, 1, 1.01),
        (32, 4, 4, 0.2, 1, 1.01),
    ],
)
def test_equal_members_come_near_the_bound(
    stages: int, members: int, microbatches: int, link: float, memory: float, over_bound: float
) -> None:
    problem = uniform(
        stages=stages, members=members, microbatches=microbatches, step=0.2, link=link, memory=memory
    )
    solution = stream(problem)
    assert solution.period <= over_bound * solution.bound.period
    assert evaluate(problem, solution.schedule).period == pytest.approx(solution.period, rel=1e-4)


@pytest.mark.parametrize(
    ("stages", "members", "microbatches", "memory"), [(12, 32, 4, 1), (4, 12, 8, 1.5), (8, 64, 2, 1)]
)
def test_unequal_members_come_near_the_bound(stages: int, members: int, microbatches: int, memory: float) -> None:
    problem = reference.uneven(stages, members, microbatches, 3, link=0.1, caps=caps_of(stages, memory))
    solution = stream(problem)
    validate(problem, solution.schedule)
    assert solution.gap <= 0.10


def test_more_work_never_gives_a_longer_period() -> None:
    problem = reference.uneven(6, 4, 3, 11, link=0.2, caps=caps_of(6, 1))
    periods = [stream(problem, work=work).period for work in (1, 20_000, 200_000)]
    assert periods == sorted(periods, reverse=True)
    assert periods[-1] < periods[0]


def test_the_search_beats_the_plain_rule_in_the_equal_memory_regime() -> None:
    problem = uniform(stages=8, members=2, microbatches=4, step=0.2, link=0.1, memory=1)
    plain, found = stream(problem, work=1), stream(problem, work=100_000)
    assert plain.method == "rule"
    assert found.period < 0.97 * plain.period
    assert found.gap < 0.01


def test_a_barrier_is_never_quicker() -> None:
    for seed in range(4):
        free = reference.uneven(3, 3, 2, seed, link=0.05, caps=caps_of(3, 2))
        barred = dataclasses.replace(free, barrier=True)
        assert stream(free).period <= stream(barred).period
        assert stream(barred).period >= stream(barred).bound.period


def test_members_without_any_time_are_scheduled() -> None:
    problem = uniform(stages=2, members=2, microbatches=2, forward=0, backward=0)
    solution = stream(problem)
    validate(problem, solution.schedule)
    assert (solution.period, solution.gap) == (0, 0)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for golden in INSTANCES:
        (GOLDEN / f"schedule-{golden}.txt").write_text(golden_text(golden))
