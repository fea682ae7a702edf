"""The planner: what it may ask for, what it picks for each goal, what it refuses and why, how it limits the time."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_jap import planner
from slurm_jap.cut import cut
from slurm_jap.jap_options import GOALS, JapOptions
from slurm_jap.planner import Candidate, Earlier, Plan
from slurm_jap.profile import BlockProfile, Profile, drift, merged, script_key
from slurm_jap.resources import Limits, MemberRequest, NodeClass, Unclear

GIB = 1 << 30
NODES = NodeClass(count=8, cpus=64, memory_mb=512 * 1024, gpus={"": 8})
LIMITS = Limits(partition="gpu", max_time_min=2880, max_nodes=8, node_classes=(NODES,))


def network(
    blocks: int = 24,
    *,
    forward: float = 0.01,
    microbatches: int = 8,
    state: float = 1.0,
    activation: float = 1 / 16,
    device: str = "NVIDIA H200",
    device_bytes: int | None = 80 * GIB,
    **others: Any,
) -> Profile:
    """Equal blocks; ``state`` and ``activation`` are GiB of one block."""
    size = int(state * GIB)
    block = BlockProfile(
        name="Block", forward=forward, backward=2 * forward, step=forward / 10, parameter_bytes=size // 4,
        gradient_bytes=size // 4, optimizer_bytes=size // 2, activation_bytes=int(activation * GIB),
        output_bytes=1 << 20,
    )  # fmt: skip
    loss = BlockProfile(name="Loss", forward=0.0, backward=0.0)
    values: dict[str, Any] = {"signature": "0" * 16, "measured": True, "iterations": 8, **others}
    return Profile(
        device=device,
        blocks=(block,) * blocks + (loss,),
        microbatches=microbatches,
        device_bytes=device_bytes,
        **values,
    )


def chosen(
    profile: Profile | None = None,
    *,
    gpus: int = 4,
    members: int = 8,
    limits: Limits = LIMITS,
    throttle: int | None = None,
    time_min: int | None = 300,
    **asked: Any,
) -> Plan:
    profile = profile or network()
    known = planner.known(range(members), Earlier(entries=[(profile, range(members))]), gpus > 0)
    assert known is not None
    member = MemberRequest(gpus=gpus, cpus=4, memory_mb=16000, time_min=time_min)
    return planner.choose(member, JapOptions(**asked), members, limits, known, throttle=throttle)


def of(plan: Plan, groups: int, stages: int) -> Candidate:
    return next(c for c in plan.candidates if (c.groups, c.stages) == (groups, stages))


# ------------------------------------------------------------------------------------------------------------ choice


def test_a_member_that_fits_a_device_gets_no_pipeline_and_the_plan_says_so() -> None:
    plan = chosen()
    assert (plan.request.groups, plan.request.stages) == (4, 1)
    assert plan.request.gres == "gpu:4"
    assert "a member fits one device, so no pipeline can gain" in plan.why
    # One member alone on 4 stages with 8 micro-batches idles 3 slots of 11.
    assert plan.chosen.gpu_hours == pytest.approx(8 / 11, rel=0.01)
    assert plan.chosen.pace == pytest.approx(2 * 4 * 8 / 11, rel=0.01)


def test_no_device_known_means_no_shallower_pipeline_than_asked_for() -> None:
    plan = chosen(network(device_bytes=None))
    assert (plan.request.groups, plan.request.stages) == (1, 4)
    assert min(c.stages for c in plan.candidates) == 4


def test_the_default_goal_stays_on_the_gpus_of_one_member_while_they_do() -> None:
    assert chosen().chosen.engines == 4
    assert chosen(members=64, time_min=30).chosen.engines == 4


def test_what_does_not_fit_at_once_trains_in_turn() -> None:
    plan = chosen(members=64, time_min=30)
    assert plan.chosen.memory <= plan.device_limit  # type: ignore[operator]
    assert plan.request.at_once == plan.chosen.at_once < 64
    assert any("members of a group at once" in note for note in plan.request.notes)


def test_finish_takes_what_all_members_ask_for_and_never_more() -> None:
    plan = chosen(goal="finish")
    assert plan.chosen.engines <= 32
    assert plan.chosen.pace < chosen().chosen.pace
    assert plan.chosen.pace == min(c.pace for c in plan.candidates if c.simulated and not c.refused)


def test_finish_with_a_throttle_takes_no_more_than_the_members_at_once_ask_for() -> None:
    assert chosen(goal="finish", throttle=2).chosen.engines <= 8
    assert all(c.engines <= 8 for c in chosen(goal="finish", throttle=2).candidates)


def test_gpu_hours_takes_the_fewest_devices_of_equals() -> None:
    plan = chosen(goal="gpu-hours", time_min=30)
    usable = [c for c in plan.candidates if not c.refused and c.simulated]
    least = min(c.gpu_hours for c in usable)
    assert plan.chosen.gpu_hours <= least * 1.02
    assert plan.chosen.engines == min(c.engines for c in usable if c.gpu_hours <= least * 1.02)


def test_deeper_pipelines_come_before_offload() -> None:
    # One member's 12 GiB x 24 blocks do not fit 4 devices of 72 GiB, nor 8 in any company.
    plan = chosen(network(state=12.0), gpus=4, members=8)
    assert plan.chosen.engines > 4
    assert plan.chosen.memory <= 72 * GIB
    assert plan.chosen.gpu_hours < 0.98
    refused = of(plan, 1, 2)
    assert "one member alone needs offload to host memory, which is not planned with" in refused.refused
    assert "offload" in plan.why


def test_where_no_pipeline_is_deep_enough_the_array_stays_plain_and_says_why() -> None:
    with pytest.raises(Unclear, match=r"1 group x 4 stages: one member alone needs offload .*: a device would hold "):
        chosen(network(blocks=4, state=100.0), gpus=4)


def test_a_limit_on_device_memory_rules_over_what_the_device_has() -> None:
    plan = chosen(memory_per_device=20 * 1024)
    assert plan.device_limit == 20 * GIB
    assert plan.chosen.memory <= 20 * GIB


def test_what_the_user_says_is_kept() -> None:
    plan = chosen(stages=6, groups=2)
    assert (plan.request.stages, plan.request.groups) == (6, 2)
    assert len(plan.candidates) == 1
    assert "as asked for" in plan.why
    assert chosen(stages=6).request.stages == 6
    assert chosen(groups=2).request.groups == 2


def test_more_stages_than_the_model_has_blocks_are_refused() -> None:
    with pytest.raises(Unclear, match="the model has 3 blocks; type --stages=3 or fewer"):
        chosen(network(blocks=3), stages=4, groups=1)


def test_more_than_the_partition_has_is_refused() -> None:
    small = dataclasses.replace(LIMITS, max_nodes=1)
    assert all(c.engines <= 8 for c in [chosen(goal="finish", limits=small).chosen])
    with pytest.raises(Unclear, match="the partition allows 1"):
        chosen(goal="finish", limits=small, stages=12, groups=1)


def test_where_every_pipeline_loses_the_array_stays_plain() -> None:
    # Everybody's devices are held as long as the heaviest member trains, and no time is left to train in turn.
    heavy, light = network(2, forward=0.1, signature="a"), network(2, forward=0.01, signature="b")
    known = planner.known(range(4), Earlier(entries=[(heavy, (0,)), (light, (1, 2, 3))]), True)
    assert known is not None
    short = dataclasses.replace(LIMITS, max_time_min=310)
    member = MemberRequest(gpus=2, cpus=4, memory_mb=16000, time_min=300)
    with pytest.raises(Unclear, match=r"nothing to gain: the best pipeline \(.*\) is predicted to need .* times"):
        planner.choose(member, JapOptions(memory_per_device=4 * 1024), 4, short, known)


def test_members_without_gpus_share_one_engine() -> None:
    plan = chosen(network(device="cpu", device_bytes=None), gpus=0)
    assert (plan.request.stages, plan.request.groups) == (1, 1)
    assert plan.request.gres == ""
    assert plan.chosen.pace == pytest.approx(8.0, rel=0.01)


@settings(max_examples=30)
@given(
    members=st.integers(1, 40),
    gpus=st.integers(1, 8),
    throttle=st.one_of(st.none(), st.integers(1, 8)),
    goal=st.sampled_from(GOALS),
    blocks=st.integers(1, 40),
    state=st.floats(0.01, 20.0),
    microbatches=st.integers(1, 8),
)
def test_never_more_than_was_asked_for_nor_than_the_partition_allows(
    members: int, gpus: int, throttle: int | None, goal: str, blocks: int, state: float, microbatches: int
) -> None:
    profile = network(blocks, state=state, microbatches=microbatches)
    try:
        plan = chosen(profile, gpus=gpus, members=members, throttle=throttle, goal=goal)
    except Unclear:
        return
    request, best = plan.request, plan.chosen
    at_once = min(members, throttle or members)
    assert request.stages * request.groups == best.engines <= at_once * gpus
    assert request.stages <= blocks
    assert request.nodes <= 8
    assert request.gpus_per_node <= 8
    assert request.nodes * request.gpus_per_node >= best.engines
    assert request.at_once <= at_once
    assert best.memory <= plan.device_limit  # type: ignore[operator]
    assert request.time_min is not None
    assert 300 <= request.time_min <= 2880
    assert best.period >= best.bound.period * 0.999
    assert not best.refused
    assert sum(c.chosen for c in plan.candidates) == 1


# ------------------------------------------------------------------------------------------------------------- time


def test_the_time_limit_is_the_prediction_with_a_margin() -> None:
    plan = chosen(members=4)
    pace = plan.chosen.pace
    assert pace == pytest.approx(4 * 8 / 11, rel=0.01)
    assert 300 * pace * 1.25 <= plan.request.time_min <= 300 * pace * 1.25 + 5  # type: ignore[operator]


def test_the_time_limit_is_never_below_one_members_own() -> None:
    plan = chosen(goal="finish", groups=8, stages=8)
    assert plan.chosen.pace < 1
    assert plan.request.time_min >= 300  # type: ignore[operator]


def test_an_estimate_gets_a_wider_margin() -> None:
    measured, estimated = chosen(stages=4, groups=1), chosen(network(measured=False), stages=4, groups=1)
    assert estimated.request.time_min > measured.request.time_min  # type: ignore[operator]
    assert not estimated.measured


def test_max_time_caps_the_margin_and_refuses_what_is_predicted_to_exceed_it() -> None:
    pace = chosen(stages=4, groups=1).chosen.pace
    just = dataclasses.replace(LIMITS, max_time_min=math.ceil(300 * pace) + 1)
    plan = chosen(stages=4, groups=1, limits=just)
    assert plan.request.time_min == just.max_time_min
    assert any("the time limit is the partition's longest" in note for note in plan.request.notes)
    short = dataclasses.replace(LIMITS, max_time_min=math.ceil(300 * pace) - 2)
    with pytest.raises(Unclear, match=r"are predicted .* the partition allows .* split the array into 2 or more"):
        chosen(stages=4, groups=1, limits=short)


def test_more_devices_than_one_members_where_the_time_limit_asks_for_it() -> None:
    short = dataclasses.replace(LIMITS, max_time_min=1000)
    plan = chosen(limits=short)
    assert plan.chosen.engines > 4
    assert plan.request.time_min <= 1000  # type: ignore[operator]
    assert "devices where one member asks for 4" in plan.why
    assert "are predicted" in plan.why


# -------------------------------------------------------------------------------------------------------- comparisons


def test_gpu_hours_against_the_plain_array_at_equal_memory() -> None:
    """The regime of deep pipelines: 2 members on 8 stages hold what one holds on 4, and gain what a bubble costs."""
    plan = chosen(network(microbatches=8, activation=0.0, device_bytes=None), members=2, stages=8, groups=1)
    found = plan.chosen
    assert found.memory == pytest.approx(6 * GIB, rel=0.01)
    assert found.gpu_hours_same_memory == pytest.approx(found.gpu_hours, rel=1e-9)
    assert 8 / 11 * 0.98 < found.gpu_hours < 1.0


def test_a_plain_array_with_as_much_memory_needs_no_pipeline_if_a_member_fits() -> None:
    found = chosen(network(device_bytes=None, activation=0.0), members=8, stages=4, groups=1).chosen
    assert found.memory == pytest.approx(8 * 6 * GIB, rel=0.01)
    assert found.gpu_hours < 0.75
    assert found.gpu_hours_same_memory == pytest.approx(1.0, abs=0.01)


def test_many_equal_members_are_predicted_from_fewer() -> None:
    model = planner.Model(planner.Known(profiles=(network(8),), of_member=(0,) * 64), planner.Assumptions())
    assert model.period([0] * 64, 4) == pytest.approx(64 * model.period([0] * 4, 4) / 4, rel=0.02)


# ------------------------------------------------------------------------------------------------------------- known


def test_without_a_profile_nothing_is_known() -> None:
    assert planner.known(range(3), Earlier(), True) is None


def test_each_member_has_its_own_profile_and_strangers_the_slowest() -> None:
    small, large = network(forward=0.01, signature="a"), network(forward=0.03, signature="b")
    found = planner.known([0, 1, 2, 7], Earlier(entries=[(small, (0, 1)), (large, (2,))]), True)
    assert found is not None
    assert [found.profiles[n].signature for n in found.of_member] == ["a", "a", "b", "b"]
    assert any("slowest" in note for note in found.notes)


def test_a_profile_of_another_device_tells_only_ratios() -> None:
    found = planner.known(range(2), Earlier(entries=[(network(device="cpu", device_bytes=None), (0, 1))]), True)
    assert found is not None
    assert not found.measured
    assert "the profile is of cpu" in found.notes[0]


def test_a_run_with_other_arguments_says_nothing_certain_of_what_fits_one_device() -> None:
    earlier = Earlier(entries=[(network(), range(8))], same_arguments=False)
    known = planner.known(range(8), earlier, True)
    assert known is not None
    assert "the profile is of a run with other arguments of the script" in known.notes
    member = MemberRequest(gpus=4, cpus=4, memory_mb=16000, time_min=60)
    plan = planner.choose(member, JapOptions(), 8, LIMITS, known)
    assert min(c.stages for c in plan.candidates) == 4


def test_the_newest_profile_of_a_member_counts() -> None:
    new, old = network(forward=0.01, signature="n"), network(forward=0.05, signature="o")
    found = planner.known(range(2), Earlier(entries=[(new, (0, 1)), (old, (0, 1))]), True)
    assert found is not None
    assert [profile.signature for profile in found.profiles] == ["n"]


def test_uneven_members_are_planned_as_they_are() -> None:
    light, heavy = network(forward=0.01, signature="a"), network(forward=0.02, signature="b")
    known = planner.known(range(4), Earlier(entries=[(light, (0, 1)), (heavy, (2, 3))]), True)
    assert known is not None
    member = MemberRequest(gpus=4, cpus=4, memory_mb=16000, time_min=300)
    plan = planner.choose(member, JapOptions(stages=4, groups=1), 4, LIMITS, known)
    assert len({cost.forward for cost in plan.problem.members}) == 2
    assert plan.chosen.bound.load == pytest.approx(
        sum(8 * 3 * 6 * f + 6 * f / 10 for f in (0.01, 0.01, 0.02, 0.02)), rel=1e-6
    )


def test_the_plan_is_json() -> None:
    told = json.loads(json.dumps(planner.as_json(chosen(network(blocks=3), stages=2))))
    assert told["candidates"]
    assert sum(row["chosen"] for row in told["candidates"]) == 1
    assert told["blocks_of_stages"] == [[0, 2], [2, 3]]


# ----------------------------------------------------------------------------------------------------------- profiles


def test_a_profile_survives_json() -> None:
    profile = network(5)
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2}, {"blocks": []}, {"blocks": [1, 2]}, {"microbatches": 0}, {"device_bytes": "much"},
        {"forward_overhead": float("nan")}, {"accumulate": True}, {"signature": None},
    ],
)  # fmt: skip
def test_what_is_no_profile_is_refused(change: dict[str, Any]) -> None:
    data = json.loads(json.dumps(network(2).to_json()))
    with pytest.raises(ValueError, match="profile"):
        Profile.from_json({**data, **change})


def test_members_are_merged_by_medians_and_measurements_beat_estimates() -> None:
    three = [network(2, forward=f) for f in (0.01, 0.02, 0.5)]
    assert merged(three).blocks[0].forward == 0.02
    assert merged([network(2, measured=False), network(2, forward=0.07)]).blocks[0].forward == 0.07


def test_costs_count_the_loss_with_the_last_block_and_drift_sees_shares() -> None:
    blocks = (
        BlockProfile(name="a", forward=1, backward=2),
        BlockProfile(name="b", forward=1, backward=1),
        BlockProfile(name="l", forward=0.5, backward=0.5),
    )
    assert dataclasses.replace(network(2), blocks=blocks).costs == (3, 3)
    assert drift((3, 3), (6, 6)) == 0
    assert drift((3, 3), (3, 4.5)) == pytest.approx(0.2)
    assert drift((1,), (1, 1)) == math.inf
    assert drift((0, 0), (0, 0)) == 0


def test_equal_texts_have_one_key() -> None:
    assert script_key(b"a") == script_key(b"a") != script_key(b"b")


# ---------------------------------------------------------------------------------------------------------------- cut


@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=9), data=st.data())
def test_a_cut_has_the_smallest_heaviest_stage(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    def least(first: int, left: int) -> int:
        if left == 1:
            return sum(costs[first:])
        return min(max(sum(costs[first:end]), least(end, left - 1)) for end in range(first + 1, len(costs) - left + 2))

    ranges = cut(costs, stages)
    assert [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])]
    assert ranges[-1][1] == len(costs)
    assert all(a < b for a, b in ranges)
    assert max(sum(costs[a:b]) for a, b in ranges) == least(0, stages)
