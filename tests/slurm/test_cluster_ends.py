"""A test cluster ends completely: whatever its jobs do, and however its owner or its supervisor ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import slurm_cluster
from slurm_harness import SlurmCluster
from support import wait_until

STUBBORN = """#!/bin/bash
trap '' TERM INT HUP
# A process without a trace of the job: own session, empty environment, deaf to all that can be ignored.
setsid env -i /bin/bash -c 'trap "" TERM INT HUP; echo $$ >pid; while :; do sleep 1000 & wait; done' &
srun bash -c 'trap "" TERM; sleep 1000; sleep 1000' &
wait
wait
"""


def start(directory: Path, fence: bool = False, owner: int | None = None) -> SlurmCluster:
    settings = slurm_cluster.Settings(directory=str(directory), nodes=1, fence=fence, owner=owner)
    slurm_cluster.up(settings)
    return SlurmCluster(directory, slurm_cluster.USERS[0])


def run_stubborn_job(cluster: SlurmCluster) -> set[int]:
    """Start it, and return every process of the cluster."""
    folder = cluster.scratch / "job"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "job.sh").write_text(STUBBORN)
    cluster.sbatch("-o", "out", folder / "job.sh", cwd=folder)
    wait_until(lambda: (folder / "pid").exists() and (folder / "pid").read_text(), 30, "the job's start")
    found = {cluster.supervisor, *slurm_cluster.descendants(cluster.supervisor)}
    assert int((folder / "pid").read_text()) in found
    return found


def assert_nothing_is_left(cluster: SlurmCluster, processes: set[int]) -> None:
    assert sorted(pid for pid in processes if slurm_cluster.alive(pid)) == []
    assert sorted(path.name for path in cluster.directory.iterdir()) == ["etc", "home", "lock", "log", "scratch"]
    assert cluster.base == cluster.directory or not os.path.lexists(cluster.base.parent)
    for node in cluster.nodes if cluster.fenced else ():
        assert list(Path("/sys/fs/cgroup").glob(f"**/slurm_{node}")) == []


@pytest.fixture
def directory(test_root: Path, request: pytest.FixtureRequest) -> Path:
    """A folder whose name fits neither a socket nor slurm.conf."""
    return test_root / f"it's a long name with blanks, {request.node.name}"


@pytest.mark.fenced
def test_down_ends_stubborn_jobs_and_removes_control_groups(directory: Path) -> None:
    cluster = start(directory, fence=True)
    processes = run_stubborn_job(cluster)
    assert slurm_cluster.down(directory)
    assert_nothing_is_left(cluster, processes)
    assert not slurm_cluster.down(directory)


def test_it_ends_with_its_owner(directory: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    cluster = start(directory, owner=owner.pid)
    processes = run_stubborn_job(cluster)
    owner.kill()
    owner.wait()
    wait_until(lambda: not (directory / slurm_cluster.MARKER).exists(), 40, "the end of the cluster")
    wait_until(lambda: not slurm_cluster.alive(cluster.supervisor), 20, "the end of the supervisor")
    assert_nothing_is_left(cluster, processes)


def test_down_mends_the_loss_of_the_supervisor(directory: Path) -> None:
    cluster = start(directory)
    processes = run_stubborn_job(cluster)
    hidden = int((cluster.scratch / "job" / "pid").read_text())
    os.kill(cluster.supervisor, signal.SIGKILL)
    wait_until(lambda: not slurm_cluster.alive(cluster.supervisor), 20, "the end of the supervisor")
    assert slurm_cluster.down(directory)
    # A process that hid from the job and lost its supervisor cannot be told from any other of this machine.
    os.kill(hidden, signal.SIGKILL)
    wait_until(lambda: not slurm_cluster.alive(hidden), 20, "the end of the hidden process")
    left = {pid for pid in processes if slurm_cluster.alive(pid)}
    for pid in left:
        assert "sleep" in Path(f"/proc/{pid}/comm").read_text()
        os.kill(pid, signal.SIGKILL)
    assert_nothing_is_left(cluster, processes - left)


def test_a_cluster_that_cannot_come_up_leaves_nothing(directory: Path) -> None:
    broken = directory.parent / "broken"
    (broken / "etc").mkdir(parents=True)
    with pytest.raises(slurm_cluster.ClusterError, match="holds something else"):
        start(broken)
    (broken / "lock").touch()
    (broken / "mysql").write_text("a file, not a folder")
    with pytest.raises(slurm_cluster.ClusterError, match="mysql"):
        start(broken)
    assert not (broken / slurm_cluster.MARKER).exists()
    assert slurm_cluster.processes_of(f"{broken}/etc/slurm.conf") == set()


def test_the_command_line_says_what_to_export(directory: Path) -> None:
    script = slurm_cluster.REPOSITORY / "scripts" / "slurm_cluster.py"

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, script, *words, "--dir", directory], capture_output=True, text=True, timeout=120
        )

    up = command("up", "--nodes", "1")
    assert up.returncode == 0, up.stderr
    try:
        described = json.loads((directory / slurm_cluster.MARKER).read_text())
        shown = subprocess.run(
            ["bash", "-c", f"{command('env').stdout}\nsinfo -h -o %N"], capture_output=True, text=True, timeout=60
        )
        assert shown.stdout.split() == described["nodes"]
        again = command("up")
        assert again.returncode == 2
        assert (
            again.stderr == f"slurm_cluster: a cluster is up in {directory}: run down first, or choose another --dir\n"
        )
    finally:
        assert command("down").stdout == "down\n"
    assert command("env").returncode == 2
