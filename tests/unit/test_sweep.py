"""Members, states and the manifest."""

from __future__ import annotations

import json
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_jap.sweep import MANIFEST_VERSION, Member, MemberState, Sweep, exit_code_of, state_of

text = st.text(st.characters(codec="utf-8"), max_size=20)
optional_count = st.none() | st.integers(0, 10**6)
members = st.builds(Member, index=st.integers(0, 4_000_000), output=text, error=st.none() | text)
sweeps = st.builds(
    Sweep,
    job_id=st.integers(1, 2**32),
    attempt=st.integers(0, 100),
    job_name=text,
    launcher=st.sampled_from(["slurm", "local"]),
    array=text,
    throttle=optional_count,
    members=st.lists(members, unique_by=lambda m: m.index, max_size=8).map(
        lambda found: tuple(sorted(found, key=lambda m: m.index))
    ),
    script=text,
    arguments=st.lists(text, max_size=4).map(tuple),
    work_dir=text,
    stages=st.integers(1, 64),
    groups=st.integers(1, 8),
    member_cpus=optional_count,
    member_memory_mb=optional_count,
    member_time_minutes=optional_count,
    version=st.just(MANIFEST_VERSION),
)


@given(sweep=sweeps)
def test_manifest_survives_json(sweep: Sweep) -> None:
    assert Sweep.from_json(json.loads(json.dumps(sweep.to_json()))) == sweep


@pytest.mark.parametrize("version", [0, 2, "1", None, [1]])
def test_another_version_is_refused(version: object) -> None:
    with pytest.raises(ValueError, match="use the slurm_jap that ran the sweep"):
        Sweep.from_json({"version": version})


@pytest.mark.parametrize(
    ("status", "code", "state"),
    [
        (0, 0, MemberState.COMPLETED),
        (3, 3, MemberState.FAILED),
        (255, 255, MemberState.FAILED),
        (-signal.SIGTERM, 143, MemberState.CANCELLED),
        (-signal.SIGINT, 130, MemberState.CANCELLED),
        (-signal.SIGKILL, 137, MemberState.FAILED),
        (-signal.SIGSEGV, 139, MemberState.FAILED),
    ],
)
def test_a_signal_counts_as_128_and_its_number(status: int, code: int, state: MemberState) -> None:
    assert exit_code_of(status) == code
    assert state_of(code) is state


def test_only_pending_running_and_unknown_can_change() -> None:
    open_states = {state for state in MemberState if not state.terminal}
    assert open_states == {MemberState.PENDING, MemberState.RUNNING, MemberState.UNKNOWN}
