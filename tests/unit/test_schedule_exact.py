"""The exact scheduler against enumeration, and what it says when it cannot answer."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from unit import schedule_reference as reference

from slurm_jap import exact as exact_module
from slurm_jap.event_graph import Graph, Orders, fits, solve
from slurm_jap.exact import exact
from slurm_jap.layout import Layout
from slurm_jap.problem import MemberCost, Problem, caps_of, lower_bound, uniform
from slurm_jap.simulate import evaluate
from slurm_jap.stream import stream
from slurm_jap.validate import validate


def best_of_all(problem: Problem) -> float:
    """The least period over every cyclic order of two members with one micro-batch on two stages."""
    layout = Layout(problem)
    floor = int(lower_bound(layout.problem).period)

    def orders() -> list[list[int]]:
        """Member 0 as F B S; member 1 begins at any of its three and lies anywhere between."""
        found = []
        for rotation in ([3, 4, 5], [4, 5, 3], [5, 3, 4]):
            for places in itertools.combinations(range(1, 6), 2):
                rest = iter(rotation)
                own = iter([1, 2])
                found.append([0, *(next(own) if place in places else next(rest) for place in range(1, 6))])
        return found

    def offsets(order: list[int], shift: int) -> list[int]:
        """Member 1's iteration, counted from ``shift``, grows where its step has passed."""
        values = [0] * 6
        iteration = shift
        for slot in order:
            if slot >= 3:
                values[slot] = iteration
                iteration += slot == 5
        return values

    best = float("inf")
    for upper, lower in itertools.product(orders(), repeat=2):
        for zero, one in itertools.product((0, 1), (-1, 0, 1)):
            # Stage 1 may lag by a period, and see member 1 an iteration earlier or later against member 0.
            below = [value - zero for value in offsets(lower, one)]
            candidate = Orders([upper, lower], offsets(upper, 0) + below)
            if all(fits(layout, candidate, stage) for stage in range(2)):
                steady = solve(Graph(layout, candidate), floor, range(12), int(min(best, 1e15)))
                best = min(best, steady.period if steady else best)
    return best * layout.tick


@pytest.mark.parametrize("seed", range(10))
def test_the_optimum_is_that_of_enumeration(seed: int) -> None:
    draw = random.Random(seed)

    def time() -> float:
        return draw.randint(1, 20) / 10

    members = tuple(
        MemberCost(forward=(time(), time()), backward=(time(), time()), step=(time(), time()), microbatches=1)
        for _ in range(2)
    )
    problem = Problem(
        members=members,
        link=draw.choice((0.0, 0.3)),
        switch=(seed % 2) * 0.2,
        caps=draw.choice((None, (1, 1))),
    )
    solution = exact(problem, seconds=20, start=stream(problem, work=1))
    validate(problem, solution.schedule)
    assert solution.period == pytest.approx(best_of_all(problem), rel=1e-3)
    assert solution.lower <= solution.period * (1 + 1e-9)


@pytest.mark.parametrize(
    ("stages", "members", "microbatches", "link", "memory", "least"),
    [
        # Nothing reaches the bound, and that is proven.
        (4, 3, 2, 0.3, 1.5, 1.06),
        # The path bound is met although the plain rule misses it by 17%.
        (4, 4, 1, 0.3, 2, 1.0),
    ],
)
def test_proofs(stages: int, members: int, microbatches: int, link: float, memory: float, least: float) -> None:
    problem = uniform(stages=stages, members=members, microbatches=microbatches, link=link, memory=memory)
    solution = exact(problem, seconds=30, start=stream(problem, work=20_000))
    validate(problem, solution.schedule)
    assert evaluate(problem, solution.schedule).period == pytest.approx(solution.period, rel=1e-4)
    assert least * solution.bound.period <= solution.lower * (1 + 1e-4) <= solution.period * (1 + 2e-4)
    assert solution.gap < 0.005


@pytest.mark.parametrize("barrier", [False, True])
def test_bytes_and_barrier_bind_the_exact_scheduler_too(barrier: bool) -> None:
    members = tuple(
        MemberCost(
            forward=(1.0, 0.8), backward=(2.0, 1.5), step=(0.1, 0.1), microbatches=2, activation=(size, 1)
        )
        for size in (3, 5)
    )
    problem = Problem(members=members, link=0.1, memory=(8, 2), barrier=barrier)
    solution = exact(problem, seconds=10, start=stream(problem, work=1))
    validate(problem, solution.schedule)
    assert solution.lower <= solution.period <= stream(problem, work=1).period


def test_queueing_links_bind_the_exact_scheduler_too() -> None:
    cost = MemberCost(forward=(0.5, 0.5), backward=(0.5, 0.5), step=(0.1, 0.1), microbatches=2)
    problem = Problem(members=(cost,) * 2, link=0.8)
    solution = exact(problem, seconds=10)
    validate(problem, solution.schedule)
    assert solution.period == pytest.approx(reference.period(problem, solution.schedule), rel=1e-3)
    assert solution.lower <= solution.period


@given(reference.problems(most_stages=3, most_members=3, most_microbatches=2))
@settings(max_examples=40, deadline=None)
def test_no_proof_contradicts_a_schedule(problem: Problem) -> None:
    """The proven bound is below every schedule that anything finds, the answer is never worse than stream's."""
    quick = stream(problem, work=1)
    solution = exact(problem, seconds=0.5, start=quick)
    validate(problem, solution.schedule)
    assert evaluate(problem, solution.schedule).period == pytest.approx(solution.period, rel=1e-3, abs=1e-4)
    best = min(quick.period, stream(problem, work=20_000).period)
    assert solution.lower <= best * (1 + 1e-6)
    assert solution.period <= quick.period * (1 + 1e-6)


def test_it_ends_when_its_time_is_up() -> None:
    problem = reference.uneven(6, 5, 4, 2, link=0.1, caps=caps_of(6, 1))
    start = stream(problem, work=1)
    solution = exact(problem, seconds=0.2, start=start)
    assert solution.lower <= solution.period <= start.period


def test_without_or_tools_stream_answers_and_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_module, "available", lambda: False)
    problem = uniform(stages=4, members=2, microbatches=4, link=0.3, memory=2)
    solution = exact(problem, start=stream(problem, work=1000))
    assert solution.note is not None
    assert "\n" not in solution.note
    assert "pip install 'slurm-jap[exact]'" in solution.note
    assert solution.schedule == stream(problem, work=1000).schedule


def test_too_large_a_problem_is_left_to_stream() -> None:
    problem = uniform(stages=8, members=32, microbatches=8, link=0.05, memory=1)
    solution = exact(problem, start=stream(problem, work=1))
    assert solution.optimal or (solution.note is not None and "too many" in solution.note)
