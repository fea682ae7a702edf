"""The first sizing rule.

Trials: https://github.com/NordicHPC/slurm2sql/issues/12, https://github.com/PrincetonUniversity/jobstats/pull/53,
https://github.com/radical-cybertools/radical.saga/pull/734 (what the spellings of a GPU request add up to)
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_jap.jap_options import JapOptions
from slurm_jap.resources import Limits, MemberRequest, NodeClass, Unclear, member_request, parse_minutes, plan


def nodes(count: int = 4, cpus: int = 32, memory_mb: int = 128_000, **gpus: int) -> NodeClass:
    return NodeClass(count=count, cpus=cpus, memory_mb=memory_mb, gpus=gpus or {"a100": 4})


LIMITS = Limits(partition="gpu", max_time_min=10_080, default_time_min=60, node_classes=(nodes(),))


@pytest.mark.parametrize(
    ("options", "gpus", "kind"),
    [
        ({}, 0, ""),
        ({"gres": "gpu"}, 1, ""),
        ({"gres": "gpu:2"}, 2, ""),
        ({"gres": "gpu:a100:2"}, 2, "a100"),
        ({"gres": "gpu:a100"}, 1, "a100"),
        ({"gres": "gres:gpu:2"}, 2, ""),
        ({"gres": "gres/gpu:a100:2"}, 2, "a100"),
        ({"gres": "gpu:a100:4(S:0-1)"}, 4, "a100"),
        ({"gres": "gpu:1g.5gb:2"}, 2, "1g.5gb"),
        ({"gres": "gpu:1,gpu:1"}, 2, ""),
        ({"gres": "none"}, 0, ""),
        ({"gres": "gpu:0"}, 0, ""),
        ({"gres": "gpu:2", "nodes": "2"}, 4, ""),
        ({"gpus": "3"}, 3, ""),
        ({"gpus": "a100:3", "nodes": "3"}, 3, "a100"),
        ({"gpus-per-node": "2", "nodes": "2-2"}, 4, ""),
        ({"gpus-per-task": "1", "ntasks": "4"}, 4, ""),
        ({"gpus-per-task": "a100:1", "ntasks-per-node": "2", "nodes": "2"}, 4, "a100"),
        ({"gpus-per-task": "2"}, 2, ""),
        ({"gres": "gpu:2", "ntasks": "4", "ntasks-per-node": "2"}, 4, ""),
        ({"tres-per-task": "cpu=10,gres/gpu:a100:2", "ntasks": "2"}, 4, "a100"),
        ({"tres-per-task": "gres/gpu=2"}, 2, ""),
        ({"gpus": "4", "gpus-per-node": "2", "nodes": "2"}, 4, ""),
    ],
)
def test_gpus_of_a_member(options: dict[str, str], gpus: int, kind: str) -> None:
    member = member_request(options)
    assert (member.gpus, member.gpu_type) == (gpus, kind)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"gres": "gpu:a:1,gpu:b:1"}, "several types"),
        ({"gres": "gpu:1,lustre:1"}, "not for GPUs alone"),
        ({"gres": "gpu:many:x"}, "not understood"),
        ({"gpus": "4", "gres": "gpu:2"}, "--gpus and --gres ask for different GPUs"),
        ({"gpus-per-socket": "1"}, "--gpus-per-socket"),
        ({"nodes": "1-4"}, "a range"),
        ({"nodes": "1k"}, "not understood"),
        ({"mem": "4G", "mem-per-cpu": "1G"}, "exclude each other"),
        ({"mem": "lots"}, "not understood"),
        ({"time": "soon"}, "not understood"),
        ({"overcommit": ""}, "--overcommit"),
    ],
)
def test_unclear_requests_say_why(options: dict[str, str], reason: str) -> None:
    with pytest.raises(Unclear, match=reason):
        member_request(options)


@pytest.mark.parametrize(
    ("options", "cpus", "memory"),
    [
        ({}, None, None),
        ({"cpus-per-task": "4", "mem": "8G"}, 4, 8192),
        ({"cpus-per-task": "4", "ntasks": "2", "mem-per-cpu": "1G"}, 8, 8192),
        ({"cpus-per-gpu": "6", "gres": "gpu:2", "mem-per-gpu": "10G"}, 12, 20480),
        ({"ntasks": "3", "mem-per-cpu": "100"}, 3, 300),
        ({"nodes": "2", "mem": "1G"}, None, 2048),
        ({"mincpus": "4"}, 4, None),
        ({"mem": "0"}, None, 0),
        ({"mem": "1500K"}, None, 2),
    ],
)
def test_cpus_and_memory_of_a_member(options: dict[str, str], cpus: int | None, memory: int | None) -> None:
    member = member_request(options)
    assert (member.cpus, member.memory_mb) == (cpus, memory)


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("30", 30),
        ("30:01", 31),
        ("1:00:00", 60),
        ("1-0", 1440),
        ("1-2:30", 1590),
        ("0:30", 1),
        ("UNLIMITED", None),
        ("0", None),
        ("-1", None),
        ("2-00:00:00", 2880),
    ],
)
def test_time_limits(text: str, minutes: int | None) -> None:
    assert parse_minutes(text) == minutes


def sized(
    member: dict[str, Any], members: int = 8, limits: Limits = LIMITS, throttle: int | None = None, **asked: Any
) -> Any:
    return plan(MemberRequest(**member), JapOptions(**asked), members, limits, throttle=throttle)


def test_stages_are_the_gpus_of_one_member() -> None:
    request = sized({"gpus": 4, "cpus": 2, "memory_mb": 4000})
    assert (request.stages, request.groups, request.nodes, request.gpus_per_node) == (4, 1, 1, 4)
    assert request.sbatch_words() == [
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=20",
        "--gres=gpu:4",
        "--mem=36000M",
        "--time=480",
    ]
    assert (request.at_once, request.member_cpus, request.member_memory_mb, request.member_time_min) == (
        8,
        2,
        4000,
        None,
    )


def test_groups_multiply_the_request_and_divide_the_time() -> None:
    request = sized({"gpus": 2, "gpu_type": "a100", "memory_mb": 1000}, groups=2)
    assert (request.gres, request.memory_per_node_mb, request.time_min) == ("gpu:a100:4", 10_000, 240)
    assert sized({"gpus": 2}, members=3, groups=2).time_min == 120


def test_what_is_asked_for_rules() -> None:
    assert sized({"gpus": 4}, stages=2).gpus_per_node == 2
    assert sized({"gpus": 0}, stages=2).gres == ""
    assert sized({"gpus": 4}, stages=2, groups=2).gpus_per_node == 4


def test_more_gpus_than_a_node_has_are_spread() -> None:
    request = sized({"gpus": 4}, groups=2)
    assert (request.nodes, request.gpus_per_node) == (2, 4)
    request = sized({"gpus": 2, "nodes": 2})
    assert (request.nodes, request.gpus_per_node, request.stages) == (2, 1, 2)
    request = sized({"gpus": 6})
    assert (request.nodes, request.gpus_per_node) == (2, 3)


def test_memory_limits_members_at_once() -> None:
    request = sized({"gpus": 1, "memory_mb": 32_000})
    assert (request.at_once, request.memory_per_node_mb) == (3, 128_000)
    assert request.member_time_min == 180
    assert "3 of 8 members at once" in request.notes[0]
    assert sized({"gpus": 1, "memory_mb": 32_000}, member_mem=4000).at_once == 8


def test_a_limit_per_cpu_limits_the_node() -> None:
    limits = Limits(max_memory_per_cpu_mb=1000, node_classes=(nodes(),))
    assert sized({"gpus": 1, "memory_mb": 8000}, limits=limits).at_once == 3


def test_a_member_that_needs_the_node_for_itself_stays_alone() -> None:
    with pytest.raises(Unclear, match="#JAP --member-mem"):
        sized({"gpus": 4, "memory_mb": 120_000})
    request = sized({"gpus": 4, "memory_mb": 0})
    assert (request.memory_per_node_mb, request.member_memory_mb, request.at_once) == (0, None, 8)


def test_cpus_are_shared_unless_kept_apart() -> None:
    request = sized({"gpus": 4, "cpus": 32, "memory_mb": 100})
    assert (request.cpus_per_node, request.at_once, request.member_cpus) == (32, 8, 32)
    request = sized({"gpus": 4, "cpus": 16, "memory_mb": 100}, member_cpus=4)
    assert (request.cpus_per_node, request.at_once) == (32, 4)


def test_the_throttle_is_honoured() -> None:
    request = sized({"gpus": 1, "memory_mb": 1000}, throttle=2)
    assert (request.at_once, request.memory_per_node_mb, request.time_min) == (2, 3000, 480)


def test_time_never_exceeds_the_partitions() -> None:
    with pytest.raises(Unclear, match="8 x 1440 minutes"):
        sized({"gpus": 1, "time_min": 1440})
    assert sized({"gpus": 1, "time_min": 1440}, groups=4).time_min == 2880
    with pytest.raises(Unclear, match="give --time"):
        sized({"gpus": 1, "unlimited": True})
    free = Limits(node_classes=(nodes(),))
    assert sized({"gpus": 1, "unlimited": True}, limits=free).unlimited
    assert sized({"gpus": 1}, limits=free).sbatch_words()[-1] == "--gres=gpu:1"
    with pytest.raises(Unclear, match="give --time"):
        sized({"gpus": 1}, limits=Limits(max_time_min=60))


def test_defaults_of_the_cluster_count_as_requests() -> None:
    limits = Limits(default_memory_per_cpu_mb=100, node_classes=(nodes(),))
    assert sized({"gpus": 1, "cpus": 2}, limits=limits).memory_per_node_mb == 1800
    limits = Limits(default_memory_per_gpu_mb=500, default_memory_per_cpu_mb=100, node_classes=(nodes(),))
    assert sized({"gpus": 2}, limits=limits).member_memory_mb == 1000
    assert sized({"gpus": 2}).memory_per_node_mb is None


def test_nodes_without_the_gpus_are_not_asked() -> None:
    small = NodeClass(count=100, cpus=8, memory_mb=2000)
    limits = Limits(node_classes=(small, nodes(count=2)))
    assert sized({"gpus": 4, "memory_mb": 1000}, limits=limits).memory_per_node_mb == 9000
    with pytest.raises(Unclear, match="no GPUs of type h100"):
        sized({"gpus": 1, "gpu_type": "h100"}, limits=limits)
    with pytest.raises(Unclear, match=r"3 node\(s\) with 4 GPU"):
        sized({"gpus": 12}, limits=limits)
    with pytest.raises(Unclear, match="the partition allows 1"):
        sized({"gpus": 8}, limits=Limits(max_nodes=1, node_classes=(nodes(),)))


@given(
    st.integers(0, 8),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(0, 50_000),
    st.integers(1, 64),
    st.none() | st.integers(1, 6),
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 8),
)
def test_a_plan_is_within_its_nodes_and_holds_its_engines(
    gpus: int,
    on: int,
    cpus: int,
    memory: int,
    members: int,
    stages: int | None,
    groups: int | None,
    throttle: int | None,
) -> None:
    try:
        request = sized(
            {"gpus": gpus, "nodes": on, "cpus": cpus, "memory_mb": memory},
            members,
            throttle=throttle,
            stages=stages,
            groups=groups,
        )
    except Unclear:
        return
    assert request.cpus_per_node <= 32
    assert (request.memory_per_node_mb or 0) <= 128_000
    assert 1 <= request.at_once <= min(members, throttle or members)
    if gpus:
        assert request.nodes * request.gpus_per_node >= request.stages * request.groups
        assert request.gpus_per_node <= 4
    if memory:
        per_node = -(-request.at_once // request.nodes)
        assert request.memory_per_node_mb >= per_node * request.member_memory_mb
