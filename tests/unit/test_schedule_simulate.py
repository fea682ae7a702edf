"""The simulator against a second implementation, against numbers known in closed form, and its verdicts."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit import schedule_reference as reference

from slurm_jap.errors import UsageError
from slurm_jap.event_graph import Orders, fits
from slurm_jap.layout import Layout
from slurm_jap.problem import BoundBy, MemberCost, Problem, lower_bound, uniform
from slurm_jap.schedule import Action, Schedule, ScheduleError
from slurm_jap.simulate import Rule, evaluate, run_rule, timeline
from slurm_jap.stream import plain_rule, stream
from slurm_jap.validate import validate


def rule_period(problem: Problem, rule: Rule | None = None, iterations: int = 24) -> float:
    """The mean period of the engine's rule once it has settled."""
    layout = Layout(problem)
    run = run_rule(layout, rule or plain_rule(layout), iterations)
    ends = [max(starts) for starts in run.start]
    return (ends[-3] - ends[7]) / (len(ends) - 10) * layout.tick


@given(reference.problems())
@settings(max_examples=60, deadline=None)
def test_period_and_timeline_equal_the_second_implementation(problem: Problem) -> None:
    schedule = stream(problem, work=3000).schedule
    found = evaluate(problem, schedule).period
    assert found == pytest.approx(reference.period(problem, schedule), abs=2e-4)
    known = reference.times(problem, schedule, 3)
    bars = timeline(problem, schedule, 3)
    assert len(bars) == len(known)
    for bar in bars:
        begin, end = known[bar.stage, bar.action]
        assert (bar.start, bar.end) == pytest.approx((float(begin), float(end)), abs=1e-4)


@given(reference.problems())
@settings(max_examples=80, deadline=None)
def test_no_schedule_beats_a_lower_bound_and_each_is_accepted(problem: Problem) -> None:
    solution = stream(problem, work=8000)
    bound = lower_bound(problem)
    found = evaluate(problem, solution.schedule).period
    assert found >= bound.period * (1 - 1e-4)
    assert solution.period >= bound.period
    assert solution.period == pytest.approx(found, rel=1e-3, abs=2e-4)
    validate(problem, solution.schedule)
    for stage in range(problem.stages):
        if problem.caps is not None:
            ones = [1] * len(problem.members)
            assert reference.held(solution.schedule, stage, 6, ones) <= problem.caps[stage]
        if problem.memory is not None:
            sizes = [member.activation[stage] for member in problem.members]
            assert reference.held(solution.schedule, stage, 6, sizes) <= problem.memory[stage]


def test_the_validators_memory_is_that_of_the_longest_run() -> None:
    """The peak that the orders alone give is reached by a run, not only bounded by it."""
    problem = uniform(stages=3, members=3, microbatches=4, link=0.1)
    schedule = stream(problem).schedule
    layout = Layout(problem)
    orders = Orders.read(layout, schedule)
    for stage in range(3):
        most = reference.held(schedule, stage, 8, [1, 1, 1])
        for cap, verdict in ((most, True), (most - 1, False)):
            caps = [99, 99, 99]
            caps[stage] = max(1, cap)
            if cap >= 1:
                limited = Problem(members=problem.members, link=0.1, caps=tuple(caps))
                assert fits(Layout(limited), orders, stage) is verdict


@pytest.mark.parametrize(
    ("stages", "members", "microbatches", "link"), [(4, 4, 4, 0.0), (4, 8, 4, 0.05), (8, 8, 2, 0.05), (8, 64, 8, 0.05)]
)
def test_the_rule_is_near_the_bound_where_members_are_as_many_as_stages(
    stages: int, members: int, microbatches: int, link: float
) -> None:
    problem = uniform(stages=stages, members=members, microbatches=microbatches, link=link, memory=2)
    assert rule_period(problem) == pytest.approx(lower_bound(problem).period, rel=4e-3)


def test_one_pipelines_memory_costs_two_and_a_half_percent_at_a_small_link_delay() -> None:
    tight = uniform(stages=4, members=8, microbatches=4, link=0.05, memory=1)
    assert lower_bound(tight).load == 8 * 4 * 3
    assert lower_bound(tight).by is BoundBy.MEMORY
    assert rule_period(tight) / lower_bound(tight).load == pytest.approx(1.025, abs=1e-3)


@pytest.mark.parametrize(("plain_stages", "microbatches", "grouped", "gain"), [
    (4, 8, 2, 1.375), (4, 8, 4, 1.375), (4, 4, 2, 1.273), (4, 4, 4, 1.474), (4, 4, 8, 1.6),
])  # fmt: skip
def test_gain_of_deeper_pipelines_at_equal_memory(
    plain_stages: int, microbatches: int, grouped: int, gain: float
) -> None:
    """g members on g times as many stages, each 1/g of the work, against each alone on its own pipeline."""
    plain = uniform(
        stages=plain_stages, members=1, microbatches=microbatches, forward=1.0 * grouped, backward=2.0 * grouped
    )
    deep = uniform(stages=plain_stages * grouped, members=grouped, microbatches=microbatches, memory=2)
    assert rule_period(plain) / rule_period(deep) == pytest.approx(gain, abs=2e-3)


@pytest.mark.parametrize(("stages", "members"), [(4, 2), (4, 4), (3, 5)])
def test_a_barrier_costs_the_fill_of_the_pipeline(stages: int, members: int) -> None:
    free = uniform(stages=stages, members=members, microbatches=1)
    barred = uniform(stages=stages, members=members, microbatches=1, barrier=True)
    assert stream(barred).period == pytest.approx((members + stages - 1) * 3)
    assert stream(free).period == pytest.approx(max(members, stages) * 3)


@given(reference.problems(), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_the_rules_run_respects_data_caps_and_the_stage(problem: Problem, seed: int) -> None:
    """Whatever the priorities, phases and pace."""
    layout = Layout(problem)
    draw = random.Random(seed)
    shuffled = draw.sample(range(len(problem.members)), len(problem.members))
    rule = plain_rule(layout, shuffled)
    rule.merged = draw.random() < 0.5
    if draw.random() < 0.5:
        rule.pace, rule.phase = 50, [draw.randrange(50) for _ in shuffled]
        rule.spacing = [draw.randrange(9) for _ in shuffled]
    iterations = 1 if problem.barrier else 3
    run = run_rule(layout, rule, iterations)
    slots = layout.slots
    for stage in range(problem.stages):
        spans, holds = [], []
        for iteration in range(iterations):
            start = run.start[iteration]
            for slot in range(slots):
                begin, action = start[stage * slots + slot], layout.action(slot)
                assert begin >= 0, "an action never ran"
                spans.append((begin, begin + layout.duration[stage][slot]))
                if action.kind is action.kind.FORWARD:
                    back = slot + problem.members[action.member].microbatches
                    release = start[stage * slots + back] + layout.duration[stage][back]
                    holds.append((begin, release, action.member))
                    if stage:
                        above = start[(stage - 1) * slots + slot] + layout.duration[stage - 1][slot]
                        assert begin >= above + layout.link
        spans.sort()
        assert all(one[1] <= two[0] for one, two in pairwise(spans))
        for moment, _, _ in holds:
            now = [hold for hold in holds if hold[0] <= moment < hold[1]]
            assert problem.caps is None or len(now) <= problem.caps[stage]
            if problem.memory is not None:
                assert sum(problem.members[m].activation[stage] for _, _, m in now) <= problem.memory[stage]


def test_a_switch_costs_its_time() -> None:
    members = uniform(stages=1, members=2, microbatches=2).members
    problem = Problem(members=members, switch=0.5)
    apart = Schedule.parse("0: i0m0F0 i0m0B0 i0m0F1 i0m0B1 i0m0S i0m1F0 i0m1B0 i0m1F1 i0m1B1 i0m1S\n")
    mixed = Schedule.parse("0: i0m0F0 i0m1F0 i0m0B0 i0m1B0 i0m0F1 i0m1F1 i0m0B1 i0m1B1 i0m0S i0m1S\n")
    assert evaluate(problem, apart).period == pytest.approx(12 + 2 * 0.5) == lower_bound(problem).period
    assert evaluate(problem, mixed).period == pytest.approx(12 + 10 * 0.5)


def test_critical_cycle_names_stages_and_actions() -> None:
    problem = uniform(stages=2, members=1, microbatches=1, step=1)
    evaluation = evaluate(problem, Schedule.parse("0: i0m0F0 i0m0B0 i0m0S\n1: i0m0F0 i0m0B0 i0m0S\n"))
    assert evaluation.period == pytest.approx(7)
    ring = [f"{stage} {action}" for stage, action in evaluation.critical]
    at = ring.index("0 i0m0F0")
    assert ring[at:] + ring[:at] == ["0 i0m0F0", "1 i0m0F0", "1 i0m0B0", "0 i0m0B0", "0 i0m0S"]


def test_a_slow_link_carries_one_message_at_a_time() -> None:
    cost = MemberCost(forward=(1.0, 1.0), backward=(1.0, 1.0), step=(0.0, 0.0), microbatches=4)
    problem = Problem(members=(cost,) * 4, link=3.0)
    assert lower_bound(problem).link == 16 * 3
    solution = stream(problem)
    assert solution.period == pytest.approx(reference.period(problem, solution.schedule))
    assert solution.period >= 48


def test_a_deadlock_is_refused_with_the_table() -> None:
    problem = uniform(stages=2, members=1, microbatches=2)
    crossed = Schedule.parse("0: i0m0F0 i0m0B0 i0m0F1 i0m0B1 i0m0S\n1: i0m0F0 i0m0F1 i0m0B0 i0m0B1 i0m0S\n")
    for judge in (validate, evaluate):
        with pytest.raises(ScheduleError) as caught:
            judge(problem, crossed)
        first, *table = str(caught.value).splitlines()
        assert "stage 0 waits for i0m0B0 from stage 1; stage 1 waits for i0m0F1 from stage 0" in first
        assert table[0].split() == ["step", "stage", "0", "stage", "1"]
        assert table[2].split() == ["1", ">i0m0B0", ">i0m0F1"]


def test_a_deadlock_is_seen_even_if_nothing_takes_time() -> None:
    problem = uniform(stages=2, members=1, microbatches=2, forward=0, backward=0)
    crossed = Schedule.parse("0: i0m0F0 i0m0B0 i0m0F1 i0m0B1 i0m0S\n1: i0m0F0 i0m0F1 i0m0B0 i0m0B1 i0m0S\n")
    with pytest.raises(ScheduleError, match="deadlocks"):
        validate(problem, crossed)


def test_too_much_memory_is_refused() -> None:
    problem = uniform(stages=1, members=1, microbatches=2, memory=1)
    greedy = Schedule.parse("0: i0m0F0 i0m0F1 i0m0B0 i0m0B1 i0m0S\n")
    with pytest.raises(ScheduleError, match="stage 0 holds 2 micro-batches' activations at once, its cap is 1"):
        validate(problem, greedy)
    cost = MemberCost(forward=(1.0,), backward=(1.0,), step=(0.0,), microbatches=2, activation=(30,))
    with pytest.raises(ScheduleError, match=r"stage 0 holds 60 bytes .* limit is 59"):
        validate(Problem(members=(cost,), memory=(59,)), greedy)
    validate(Problem(members=(cost,), memory=(60,)), greedy)


def test_a_schedule_of_another_problem_is_refused() -> None:
    schedule = Schedule.parse("0: i0m0F0 i0m0B0 i0m0S\n")
    with pytest.raises(ScheduleError, match="has 1 stages and the problem 2"):
        validate(uniform(stages=2, members=1, microbatches=1), schedule)
    with pytest.raises(ScheduleError, match="never runs i0m0B1"):
        validate(uniform(stages=1, members=1, microbatches=2), schedule)
    with pytest.raises(ScheduleError, match="write i0 in every action"):
        validate(
            uniform(stages=1, members=1, microbatches=1, barrier=True), Schedule.parse("0: i1m0F0 i1m0B0 i1m0S\n")
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"members": ()}, "without members"),
        ({"link": -1.0}, "link time -1.0 is not"),
        ({"switch": math.nan}, "switch time nan is not"),
        ({"caps": (1,)}, r"caps \(1,\) must be 2 counts"),
        ({"caps": (0, 1)}, r"caps \(0, 1\) must be 2 counts"),
        ({"memory": (9, 9)}, "0 activation sizes for 2 stages"),
    ],
)
def test_bad_problems_are_refused(change: dict[str, object], words: str) -> None:
    members = uniform(stages=2, members=1, microbatches=1).members
    with pytest.raises(UsageError, match=words):
        Problem(**{"members": members, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"forward": (1.0,)}, "member 0 has 1 forward times for 2 stages|2 backward times for 1 stages"),
        ({"backward": (1.0, -2.0)}, "backward time that is not"),
        ({"microbatches": 0}, "0 micro-batches"),
    ],
)
def test_bad_members_are_refused(change: dict[str, object], words: str) -> None:
    base = {"forward": (1.0, 1.0), "backward": (1.0, 1.0), "step": (0.0, 0.0), "microbatches": 1}
    with pytest.raises(UsageError, match=words):
        Problem(members=(MemberCost(**{**base, **change}),))  # type: ignore[arg-type]


def test_a_micro_batch_that_never_fits_is_refused() -> None:
    cost = MemberCost(forward=(1.0,), backward=(1.0,), step=(0.0,), microbatches=1, activation=(10,))
    with pytest.raises(UsageError, match="holds 10 bytes on stage 0, whose limit is 9; use more micro-batches"):
        Problem(members=(cost,), memory=(9,))


def test_bounds_by_hand() -> None:
    """S=3, K=2, M=2, F=1, B=2, step 0.5, link 0.1."""
    problem = uniform(stages=3, members=2, microbatches=2, step=0.5, link=0.1, memory=1)
    bound = lower_bound(problem)
    assert bound.load == pytest.approx(2 * (2 * 3 + 0.5))
    assert bound.path == pytest.approx(2 * (3 + 0.2) + 2 * 3 + 0.5)
    assert bound.link == pytest.approx(4 * 0.1)
    assert bound.memory == pytest.approx(4 * (3 * 3 + 4 * 0.1) / 3)
    assert (bound.period, bound.by) == (bound.load, BoundBy.LOAD)
    assert str(Action.parse("i0m0S")) == "i0m0S"
