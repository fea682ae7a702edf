"""The parts of the Slurm launcher that are decided without Slurm: texts, places, attempts, bad input."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_jap import carried, launch, launch_slurm, run
from slurm_jap.carried import Carried
from slurm_jap.errors import UsageError
from slurm_jap.launch import Ended, Job, Node, place_engines, place_members
from slurm_jap.launch_slurm import Cluster, SlurmLauncher, cpus_per_node, devices_in, verdict
from slurm_jap.store import SweepDir
from slurm_jap.sweep import MemberState

CONFIG = """Configuration data as of 2026-01-01T00:00:00
JobFileAppend           = 1
KillWait                = 45 sec
ProctrackType           = proctrack/linuxproc
SLURM_VERSION           = 22.05.8
TaskPlugin              = task/none
"""


def test_cluster_configuration() -> None:
    cluster = Cluster.parse(CONFIG)
    assert cluster == Cluster(
        version=(22, 5), kill_wait=45.0, signals_reach_children=True, binds_cpus=False, append=True
    )
    fenced = Cluster.parse(CONFIG.replace("linuxproc", "cgroup").replace("task/none", "task/cgroup,task/affinity"))
    assert (fenced.signals_reach_children, fenced.binds_cpus) == (False, True)
    assert Cluster.parse("") == Cluster()


@pytest.mark.parametrize(
    ("code", "lines", "state", "reason"),
    [
        (0, [], "COMPLETED", None),
        (3, ["srun: error: n1: task 0: Exited with exit code 3"], "FAILED", None),
        (139, ["srun: error: n1: task 0: Segmentation fault"], "FAILED", None),
        (1, ["srun: error: Unable to create step for job 7: Invalid"], "FAILED", "Unable to create step"),
        (1, ["jap: cannot open /x: No such file", "srun: error: n1: task 0: Exited with exit code 1"], "FAILED", "/x"),
        (137, ["slurmstepd: error: *** STEP 7.1 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***"], "CANCELLED", "STEP 7.1"),
        (
            143,
            ["slurmstepd: error: *** STEP 7.1 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***"],
            "TIMEOUT",
            "TIME LIMIT",
        ),
        (143, ["slurmstepd: error: *** STEP 7.1 ON n1 CANCELLED AT x DUE TO JOB REQUEUE ***"], "REQUEUED", "REQUEUE"),
        (143, ["srun: error: Node failure on n1"], "NODE_FAIL", "n1"),
        (0, ["slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.1."], "OUT_OF_MEMORY", "oom"),
        (1, ["srun: error: n1: task 0: Out Of Memory"], "OUT_OF_MEMORY", ""),
        (
            137,
            [
                "slurmstepd: error: *** STEP 7.3 ON n1 CANCELLED AT 2026-11-30T16:20:32 ***",
                "slurmstepd: error: StepId=7.3 exceeded memory limit (261877760 > 209715200), being killed",
            ],
            "OUT_OF_MEMORY",
            "exceeded",
        ),
    ],
)
def test_slurms_word_on_a_step(code: int, lines: list[str], state: str, reason: str | None) -> None:
    ended = verdict(code, lines)
    assert ended.state.value == state
    assert (ended.reason is None) if reason is None else reason in str(ended.reason)
    assert ended.code != 0 or state == "COMPLETED", "Slurm's word beats exit code 0"


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("", None), ("none", None), ("gpu", 1), ("gpu:4", 4), ("gpu:a100:2", 2), ("gpu:a:1,gpu:b:1", 2),
        ("lustre:1", None), ("gpu:a100:2(S:0-1)", 2), ("gres/gpu:3", 3), ("gpu:a100", 1),
    ],
)  # fmt: skip
def test_devices_in_gres(gres: str, count: int | None) -> None:
    # https://github.com/NordicHPC/slurm2sql/issues/12, https://github.com/PrincetonUniversity/jobstats/pull/53
    assert devices_in(gres) == count


def test_cpus_per_node() -> None:
    assert cpus_per_node("8(x2),4", 3) == [8, 8, 4]
    assert cpus_per_node("16", 1) == [16]
    assert cpus_per_node("", 2) == [1, 1]


nodes_strategy = st.lists(st.builds(lambda cpus: cpus, st.integers(1, 64)), min_size=1, max_size=6).map(
    lambda cpus: [Node(name=f"n{i}", cpus=c) for i, c in enumerate(cpus)]
)


@given(nodes_strategy, st.integers(0, 100))
def test_members_are_placed_in_proportion_to_cpus(nodes: list[Node], count: int) -> None:
    placed = place_members(count, nodes)
    assert len(placed) == count
    total = sum(n.cpus for n in nodes)
    for node in nodes:
        assert abs(placed.count(node) - count * node.cpus / total) <= len(nodes)


@given(st.integers(1, 6), st.integers(1, 5), st.lists(st.one_of(st.none(), st.integers(0, 8)), min_size=1, max_size=5))
def test_engines_are_placed_in_order(stages: int, groups: int, devices: list[int | None]) -> None:
    nodes = [Node(name=f"n{i}", cpus=1, devices=d) for i, d in enumerate(devices)]
    unlimited = any(d is None for d in devices)
    if not unlimited and sum(d or 0 for d in devices) < stages * groups:
        with pytest.raises(UsageError, match=f"need {stages * groups} GPUs"):
            place_engines(stages, groups, nodes)
        return
    if unlimited:  # a launcher knows the devices of every node, or of none
        nodes = [Node(name=n.name, cpus=1) for n in nodes]
    placed = place_engines(stages, groups, nodes)
    flat = [(e["group"], e["stage"]) for node in nodes for e in placed[node.name]]
    assert flat == [(g, s) for g in range(groups) for s in range(stages)]
    for node in nodes:
        numbers = [e["device"] for e in placed[node.name]]
        assert numbers == list(range(len(numbers)))
        assert node.devices is None or len(numbers) <= node.devices


def job(tmp_path: Path, attempt: int = 0) -> Job:
    return Job(job_id=62, name="x", user="u", work_dir=tmp_path, attempt=attempt)


def test_sweep_root(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for pattern, root in {
        "": tmp_path, "o_%a": tmp_path, "logs/%a": tmp_path / "logs", "logs/%A/%a": tmp_path / "logs",
        "/dev/null": tmp_path, "missing/%a": tmp_path,
    }.items():  # fmt: skip
        assert launch.sweep_root(pattern, tmp_path) == root


def ended(folder: SweepDir, **states: str) -> None:
    writer = folder.writer("run")
    for member, state in states.items():
        writer.write("member_ended", member=int(member[1:]), code=0 if state == "COMPLETED" else 1, state=state)
    writer.close()


def test_only_what_was_completed_is_not_run_again(tmp_path: Path) -> None:
    first, done = run.open_attempt(tmp_path, job(tmp_path))
    assert done == {}
    ended(first, m0="COMPLETED", m1="FAILED", m2="REQUEUED")
    second, done = run.open_attempt(tmp_path, job(tmp_path, 1))
    assert set(done) == {0}
    ended(second, m0="COMPLETED", m1="COMPLETED")
    third, done = run.open_attempt(tmp_path, job(tmp_path, 2))
    assert {i: (e.code, e.state) for i, e in done.items()} == {i: (0, MemberState.COMPLETED) for i in (0, 1)}
    assert [f.path.relative_to(tmp_path).as_posix() for f in (first, second, third)] == [
        ".jap/62/0", ".jap/62/1", ".jap/62/2"
    ]  # fmt: skip
    assert len({f.key_file.read_bytes() for f in (first, second, third)}) == 3


def test_a_reused_job_id_takes_nothing_over(tmp_path: Path) -> None:
    # https://github.com/facebookincubator/submitit/issues/1660
    first, _ = run.open_attempt(tmp_path, job(tmp_path))
    ended(first, m0="COMPLETED")
    _, done = run.open_attempt(tmp_path, job(tmp_path))
    assert done == {}
    _, done = run.open_attempt(tmp_path, job(tmp_path))
    assert sorted(p.name for p in (tmp_path / ".jap").iterdir()) == ["62", "62.old1", "62.old2"]


def launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: Carried, nodes: int = 1, **environment: str
) -> SlurmLauncher:
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name in ("srun", "scancel"):
        (bin_ / name).write_text("#!/bin/sh\n")
        (bin_ / name).chmod(0o755)
    return SlurmLauncher(
        facts, job(tmp_path), [Node(name=f"n{i}", cpus=4) for i in range(nodes)], tmp_path / "script", (),
        tmp_path / "engine.log", {"PATH": f"{bin_}:{os.environ['PATH']}"} | environment, Cluster(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("share", "environment", "expected"),
    [
        (None, {}, 0), (100, {}, 100), (500, {"SLURM_MEM_PER_NODE": "0"}, 500),
        (100, {"SLURM_MEM_PER_NODE": "400"}, 100), (400, {"SLURM_MEM_PER_NODE": "400"}, 0),
        (500, {"SLURM_MEM_PER_NODE": "400"}, 0), (500, {"SLURM_MEM_PER_CPU": "100"}, 0),
        (300, {"SLURM_MEM_PER_CPU": "100"}, 300),
    ],
)  # fmt: skip
def test_a_share_beyond_the_jobs_memory_would_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: int | None, environment: dict[str, str], expected: int
) -> None:
    made = launcher(tmp_path, monkeypatch, Carried(array="0", member_mem_mb=share), **environment)
    assert made._share_on(made.nodes[0]) == expected


FAKE_SRUN = """#!/bin/bash
# Fails as srun does when slurmctld is overrun, FAILURES times; then runs the task here.
echo "$@" >> "$LOG"
if [ "$(wc -l < "$LOG")" -le "$FAILURES" ]; then
    echo "srun: error: Unable to create step for job 62: $MESSAGE" >&2
    exit 1
fi
while [ "${1#-}" != "$1" ]; do shift; done
exec "$@"
"""


def run_one_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, **environment: str) -> Ended:
    made = launcher(
        tmp_path, monkeypatch, Carried(array="3", output="o_%a", member_mem_mb=100, member_time_min=7),
        SLURM_JOB_ID="62", SLURM_NTASKS="9", SLURM_GPUS="4", LOG=str(tmp_path / "log"), **environment,
    )  # fmt: skip
    (tmp_path / "bin" / "srun").write_text(FAKE_SRUN)
    (tmp_path / "script").write_text(f"#!/bin/bash\n{script}\n")
    (tmp_path / "script").chmod(0o700)
    sweep, made.places, _ = launch.lay_out(
        Carried(array="3", output="o_%a"), (), job(tmp_path), made.nodes, "slurm", tmp_path / "script"
    )

    async def main() -> Ended:
        return await (await made.start_member(sweep.members[0], {"SLURM_ARRAY_TASK_ID": "3"})).wait()

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_a_member_is_one_small_overlapping_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "echo $SLURM_ARRAY_TASK_ID $SLURM_NTASKS [$SLURM_GPUS] $SLURM_OVERLAP; exit 4"
    ended = run_one_member(tmp_path, monkeypatch, script, FAILURES="0")
    assert (ended.code, ended.state, ended.reason) == (4, MemberState.FAILED, None)
    assert (tmp_path / "o_3").read_text() == "3 1 [] 1\n"
    options = (tmp_path / "log").read_text().split()
    for option in ("--overlap", "--job-name=member_3", "-n1", "--mem=100M", "--gres=none", "--time=7", "--export=ALL"):
        assert option in options
    assert not any(option.startswith(("-c", "--cpus")) for option in options), "-c1 pins every member to one core"


def test_a_step_that_slurm_was_too_busy_to_start_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_slurm, "RETRY_SECONDS", (0.05, 0.05, 0.05))
    message = "Socket timed out on send/recv operation"
    ended = run_one_member(tmp_path, monkeypatch, "echo x", FAILURES="3", MESSAGE=message)
    assert (ended.code, ended.state) == (0, MemberState.COMPLETED)
    assert (tmp_path / "o_3").read_text() == "x\n"
    assert len((tmp_path / "log").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("failures", "message", "tries"), [("99", "Socket timed out", 4), ("99", "Invalid account", 1)]
)
def test_tries_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: str, message: str, tries: int) -> None:
    monkeypatch.setattr(launch_slurm, "RETRY_SECONDS", (0.05, 0.05, 0.05))
    ended = run_one_member(tmp_path, monkeypatch, "echo x", FAILURES=failures, MESSAGE=message)
    assert (ended.code, ended.state) == (1, MemberState.FAILED)
    assert message in str(ended.reason)
    assert len((tmp_path / "log").read_text().splitlines()) == tries


def test_a_script_that_began_is_never_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_slurm, "RETRY_SECONDS", (0.05,))
    noise = "echo 'srun: error: Socket timed out' >&2; "
    monkeypatch.setitem(globals(), "FAKE_SRUN", FAKE_SRUN.replace("exec ", noise + "exec "))
    assert run_one_member(tmp_path, monkeypatch, "echo x; exit 1", FAILURES="0").code == 1
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_no_srun_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no srun in the PATH"):
        launch_slurm.find_command("srun", {"PATH": str(tmp_path)})


def call_run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "JAP_"))}
    return subprocess.run(
        [sys.executable, "-I", "-m", "slurm_jap.run", *arguments],
        env=kept | environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_bad_calls_are_one_line(tmp_path: Path) -> None:
    script = tmp_path / "s"
    script.write_text("#!/bin/bash\n")
    broken = tmp_path / "broken"
    broken.write_bytes(carried.build("/python", Carried(array="0-3"), b"#!/bin/bash\n").replace(b"array=", b"future="))
    for arguments, environment, words in (
        ((), {}, "jap-submit"),
        ((str(script),), {}, "not inside a Slurm job"),
        ((str(script),), {"SLURM_JOB_ID": "5"}, "submit with jap-submit"),
        ((str(tmp_path / "no"),), {"SLURM_JOB_ID": "5"}, "No such file"),
        ((str(broken),), {"SLURM_JOB_ID": "5"}, "future"),
    ):
        done = call_run(*arguments, **environment)
        assert done.returncode == 2, done
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith("jap: ")
        assert words in done.stderr


def test_the_launcher_never_loads_torch() -> None:
    text = (
        "import json, sys, slurm_jap.run, slurm_jap.launch_local\n"
        "print(json.dumps([m for m in sys.modules if m.startswith(('torch', 'rich', 'numpy'))]))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, timeout=60, check=True)
    assert json.loads(done.stdout) == []
