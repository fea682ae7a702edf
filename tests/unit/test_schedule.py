"""Schedule and Action: the text form, completeness, and what a stage does over finitely many iterations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_jap.schedule import Action, Kind, Schedule, ScheduleError

ONE_F_ONE_B = """\
0: i0m0F0 i0m0F1 i0m0B0 i0m0F2 i0m0B1 i0m0B2 i0m0S
1: i0m0F0 i0m0B0 i0m0F1 i0m0B1 i0m0F2 i0m0B2 i0m0S
"""

STAGGERED = "0: i1m0F0 i0m1B0 i0m1S i1m1F0 i1m0B0 i1m0S\n"

actions = st.builds(
    Action,
    st.sampled_from(Kind),
    st.integers(-3, 3),
    st.integers(0, 1000),
    st.integers(0, 99),
).map(lambda action: action._replace(microbatch=0) if action.kind is Kind.STEP else action)


@given(actions)
def test_an_action_parses_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


@given(st.lists(st.lists(actions, min_size=1).map(tuple), min_size=1).map(tuple))
def test_a_schedule_parses_back(stages: tuple[tuple[Action, ...], ...]) -> None:
    assert Schedule.parse(str(Schedule(stages))) == Schedule(stages)


def test_text_form_is_the_documented_one() -> None:
    schedule = Schedule.parse("# one member\n\n" + ONE_F_ONE_B)
    assert str(schedule) == ONE_F_ONE_B
    assert schedule.stages[0][2] == Action(Kind.BACKWARD, 0, 0, 0)
    assert schedule.microbatches == (3,)
    schedule.check_complete((3,))


def test_order_of_actions_is_the_engines_rule() -> None:
    texts = ["i0m1F0", "i1m0F0", "i0m0F1", "i9m9B9", "i0m0B0", "i5m0S"]
    ordered = sorted(map(Action.parse, texts))
    assert list(map(str, ordered)) == ["i5m0S", "i0m0B0", "i9m9B9", "i0m0F1", "i0m1F0", "i1m0F0"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no stages"),
        ("0: i0m0F0\n2: i0m0F0\n", "line 2 .* begins with '2'.* write '1: '"),
        ("i0m0F0 i0m0B0", "line 1 .* write '0: '"),
        ("0: i0m0F0 i0m0X1", "line 1 .*'i0m0X1' is not an action; write i0m2F3"),
        ("0: i0m0S3", "'i0m0S3' is not an action"),
    ],
)
def test_bad_text_is_refused_with_line_and_remedy(text: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        Schedule.parse(text)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("0: i0m0F0 i0m0B0", "stage 0 never runs i0m0S"),
        ("0: i0m0F0 i0m0B0 i0m0S i1m0S", "stage 0 runs i1m0S twice"),
        ("0: i0m0B0 i0m0F0 i0m0S", "runs i0m0B0 before i0m0F0"),
        ("0: i0m0F0 i0m0S i0m0B0", "runs i0m0S before i0m0B0"),
        ("0: i0m0F1 i0m0F0 i0m0B0 i0m0B1 i0m0S", "runs i0m0F1 before i0m0F0"),
        ("0: i0m0F0 i0m0F1 i0m0B1 i0m0B0 i0m0S", "runs i0m0B1 before i0m0B0"),
        ("0: i1m0F0 i0m0B0 i0m0S", "runs i1m0F0 before i0m0S"),
        ("0: i0m0F0 i0m0B0 i0m0S i0m2F0", "never runs|micro-batches are"),
    ],
)
def test_incomplete_or_impossible_orders_are_refused(line: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        Schedule.parse(line).check_complete()


def test_an_action_beyond_the_members_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"runs i0m0F2, but the members' micro-batches are \(2,\)"):
        Schedule.parse(ONE_F_ONE_B).check_complete((2,))


def test_a_period_may_hold_parts_of_several_iterations() -> None:
    schedule = Schedule.parse(STAGGERED)
    schedule.check_complete((1, 1))
    ran = list(map(str, schedule.unrolled(0, 2)))
    assert ran == [
        "i0m0F0", "i0m1F0", "i0m0B0", "i0m0S",
        "i1m0F0", "i0m1B0", "i0m1S", "i1m1F0", "i1m0B0", "i1m0S",
        "i1m1B0", "i1m1S",
    ]  # fmt: skip


@given(st.integers(1, 5))
def test_unrolled_runs_every_action_of_every_iteration_once(iterations: int) -> None:
    schedule = Schedule.parse(STAGGERED)
    ran = list(schedule.unrolled(0, iterations))
    assert len(ran) == len(set(ran)) == 6 * iterations
    assert {action.iteration for action in ran} == set(range(iterations))


def test_places_give_the_schedules_order_to_a_stage_that_picks_among_ready_actions() -> None:
    schedule = Schedule.parse(STAGGERED)
    places = schedule.places(0)

    def key(action: Action) -> tuple[int, int]:
        offset, place = places[action.kind, action.member, action.microbatch]
        return action.iteration - offset, place

    ran = list(schedule.unrolled(0, 4))
    assert sorted(ran, key=key) == ran
