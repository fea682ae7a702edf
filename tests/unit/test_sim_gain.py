"""The model of the gain: the planner's bounds, the split of an array, uneven members."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_jap.errors import UsageError
from slurm_jap.gain import (
    NO_GAIN_ALONE,
    NO_GAIN_DEPTH,
    NO_GAIN_DEVICES,
    NO_GAIN_MEMBERS,
    NO_GAIN_ONE_STAGE,
    NO_GAIN_SMALL,
    Assumptions,
    busy_share,
    finish_times,
    gain,
    group_bound,
    group_period,
    plain_period,
    plan_array,
    split_devices,
)

NO_LINK = Assumptions(link=0.0, microbatches=4)
BOUND = {"periods": "bound"}


@pytest.mark.parametrize(
    ("microbatches", "depth", "expected"), [(4, 2, 1.27), (4, 4, 1.47), (4, 8, 1.60), (8, 2, 1.375)]
)
def test_gain_at_equal_memory(microbatches, depth, expected):
    """A member of 4 stages; depth members on one pipeline of depth x 4 stages, free links."""
    assert gain(depth, 4, Assumptions(link=0.0, microbatches=microbatches)) == pytest.approx(expected, abs=0.005)


@given(st.integers(1, 16), st.integers(1, 12), st.integers(1, 16), st.floats(0, 0.5))
def test_no_gain_above_the_limit(microbatches, depth, stages, link):
    """Sharing removes the fill and drain of the pipeline and its link delays, nothing more."""
    assumptions = Assumptions(microbatches=microbatches, link=link, **BOUND)
    slots = microbatches + stages - 1 + 2 * (stages - 1) * link / (1 + assumptions.backward)
    assert gain(depth, stages, assumptions) <= slots / microbatches + 1e-9
    assert 0 < busy_share(depth, depth, stages, assumptions) <= 1 + 1e-12


@given(st.integers(1, 16), st.integers(1, 4), st.integers(2, 8), st.floats(0, 0.3), st.data())
def test_the_bounds_in_closed_form(microbatches, depth, stages, link, data):
    """As docs/simulation.md writes them, where memory is no limit."""
    members = data.draw(st.integers(1, depth))
    found = group_bound(members, depth, stages, Assumptions(microbatches=microbatches, link=link, activations=100))
    slot, deep = 3 / depth, depth * stages
    assert found.load == pytest.approx(members * microbatches * slot)
    assert found.path == pytest.approx((microbatches + deep - 1) * slot + 2 * (deep - 1) * link)
    assert found.link == pytest.approx(members * microbatches * link)


@pytest.mark.parametrize("link", [0.0, 0.05])
@pytest.mark.parametrize(("microbatches", "depth", "stages"), [(8, 2, 2), (4, 2, 4), (8, 2, 4), (8, 3, 4), (8, 2, 8)])
def test_a_schedule_keeps_above_its_bound_and_below_the_gain_it_promises(microbatches, depth, stages, link):
    found = Assumptions(microbatches=microbatches, link=link)
    bound = Assumptions(microbatches=microbatches, link=link, **BOUND)
    assert group_period(depth, depth, stages, found) >= group_period(depth, depth, stages, bound) * (1 - 1e-6)
    assert 1 < gain(depth, stages, found) <= gain(depth, stages, bound) * (1 + 1e-6)
    for members in range(1, depth):
        assert group_period(members, depth, stages, found) <= group_period(depth, depth, stages, found)
    if link == 0:
        assert gain(depth, stages, found) == pytest.approx(gain(depth, stages, bound), rel=0.005)


def test_bounds_are_named():
    assert group_bound(8, 2, 4, NO_LINK).by.value == "load"
    assert group_bound(1, 2, 4, NO_LINK).by.value == "path"
    assert group_bound(8, 64, 2, Assumptions(link=0.9, microbatches=64, activations=100)).by.value == "link"


@pytest.mark.parametrize(
    ("gpus", "stages", "expected"), [(8, None, (8, 1)), (8, 4, (4, 2)), (12, 8, (6, 2)), (7, 4, (1, 7)), (1, 4, (1, 1))]
)
def test_stages_divide_the_devices(gpus, stages, expected):
    assert split_devices(gpus, Assumptions(stages=stages)) == expected


@pytest.mark.parametrize(
    ("members", "gpus", "cluster", "assumptions", "reason"),
    [
        (1, 4, 64, Assumptions(), NO_GAIN_ALONE),
        (8, 1, 64, Assumptions(), NO_GAIN_ONE_STAGE),
        (8, 4, 64, Assumptions(max_stages=7), NO_GAIN_DEPTH),
        (8, 4, 7, Assumptions(), NO_GAIN_DEVICES),
        (8, 4, 64, Assumptions(max_gpus=7), NO_GAIN_DEVICES),
        (8, 4, 64, Assumptions(max_members=1), NO_GAIN_MEMBERS),
        (8, 2, 64, Assumptions(microbatches=64), NO_GAIN_SMALL),
    ],
)
def test_why_an_array_stays_plain(members, gpus, cluster, assumptions, reason):
    plan = plan_array(members, gpus, cluster, assumptions)
    assert (plan.jobs, plan.plain, plan.reason) == ((), members, reason)


@given(
    st.integers(1, 150),
    st.integers(1, 16),
    st.integers(1, 200),
    st.integers(1, 16),
    st.integers(1, 4),
    st.integers(1, 64),
)
def test_a_plan_places_every_member_once_and_asks_for_no_more(members, gpus, cluster, microbatches, waves, max_members):
    assumptions = Assumptions(microbatches=microbatches, waves=waves, max_members=max_members, **BOUND)
    plan = plan_array(members, gpus, cluster, assumptions)
    assert sum(job.members for job in plan.jobs) + plan.plain == members
    assert (plan.reason == "") == (plan.plain == 0)
    for job in plan.jobs:
        places = job.groups * job.members_per_group
        assert job.gpus == places * gpus <= cluster
        assert job.members_per_group >= 2
        assert job.gain >= assumptions.min_gain
        assert job.stages <= assumptions.max_stages
        if waves == 1:
            assert job.members == places <= max_members


def test_an_odd_array_is_split_rather_than_left_with_a_single():
    assumptions = Assumptions(link=0.0, max_stages=8)  # two members of 4 stages at most
    plan = plan_array(5, 4, 64, assumptions)
    assert [(job.groups, job.members_per_group) for job in plan.jobs] == [(2, 2)]
    assert plan.plain == 1
    assumptions = Assumptions(link=0.0, max_stages=12)
    plan = plan_array(5, 4, 64, assumptions)
    assert sorted((job.groups, job.members_per_group) for job in plan.jobs) == [(1, 2), (1, 3)]


def test_equal_members_end_together_after_the_gain():
    ends = finish_times([1000] * 8, 2, 4, 4, NO_LINK)
    assert len(set(ends)) == 1
    assert 1000 / ends[0] == pytest.approx(gain(4, 4, NO_LINK), abs=0.002)


def test_survivors_go_on_at_the_period_of_fewer_members():
    alone = plain_period(4, NO_LINK)
    both, one = (group_period(count, 2, 4, NO_LINK) / alone for count in (2, 1))
    short, long = finish_times([1000, 3000], 1, 2, 4, NO_LINK)
    assert short == pytest.approx(1000 * both, abs=1)
    assert long == pytest.approx(1000 * both + 2000 * one, abs=1)


def test_a_waiting_member_takes_the_place_of_one_that_ends():
    # Two groups of two places, five members: the fifth joins the group whose member ends first.
    ends = finish_times([1000, 4000, 2000, 2000, 1000], 2, 2, 4, NO_LINK)
    pace = group_period(2, 2, 4, NO_LINK) / plain_period(4, NO_LINK)
    assert ends[0] == pytest.approx(1000 * pace, abs=1)
    assert ends[4] == pytest.approx(2000 * pace, abs=1)


@given(st.lists(st.integers(0, 10**9), min_size=2, max_size=9), st.integers(1, 3), st.integers(2, 4), st.integers(1, 8))
def test_no_member_ends_later_than_alone_nor_sooner_than_the_load_allows(durations, groups, depth, microbatches):
    assumptions = Assumptions(microbatches=microbatches, link=0.0, **BOUND)
    places = groups * depth
    ends = finish_times(durations, groups, depth, 4, assumptions)
    if len(durations) <= places:
        assert all(end <= duration + 1 for end, duration in zip(ends, durations, strict=True))
    work = sum(durations) * microbatches / (microbatches + 3)
    assert max(ends) * places >= work * (1 - 1e-9)


@pytest.mark.parametrize(
    "bad",
    [
        {"microbatches": 0},
        {"stages": 0},
        {"link": -0.1},
        {"link": float("nan")},
        {"min_gain": 0.5},
        {"waves": 0},
        {"activations": 0.5},
    ],
)
def test_senseless_assumptions_are_refused(bad):
    (name,) = bad
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} is .* at least"):
        Assumptions(**bad)
