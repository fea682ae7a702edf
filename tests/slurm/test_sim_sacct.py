"""The documented sacct command, run on a real Slurm, gives a trace that jap-sim reads."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from slurm_harness import SlurmCluster
from support import wait_until

from slurm_jap.sim import main
from slurm_jap.traces import RULE_NEVER_RAN, RULE_NO_GPU, SACCT_COMMAND, read_trace, siblings_by_array

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "simulation.md"


def test_the_documented_command_is_the_one_in_messages() -> None:
    assert SACCT_COMMAND in DOCUMENT.read_text()


@pytest.mark.parametrize("times", [{}, {"SLURM_TIME_FORMAT": "%s"}], ids=["iso", "epoch"])
def test_sacct_of_a_real_array(cluster: SlurmCluster, workdir: Path, capsys, times: dict[str, str]) -> None:
    script = workdir / "a.sh"
    script.write_text("#!/bin/bash\nsleep $((SLURM_ARRAY_TASK_ID + 1))\nexit $SLURM_ARRAY_TASK_ID\n")
    name = "sw|eep"
    array = cluster.sbatch("--array=0-3", "--gres=gpu:2", "-J", name, "-o", "/dev/null", script, cwd=workdir)
    pair = cluster.sbatch("-N2", "--gres=gpu:1", "-t", "7", "-J", "pair", "--wrap", "sleep 1", "-o", "/dev/null")
    without_gpu = cluster.sbatch("--wrap", "sleep 1", "-o", "/dev/null")
    never = cluster.sbatch("--begin=now+1hour", "--gres=gpu:1", "--wrap", "true", "-o", "/dev/null")
    never.cancel()
    for job in (array, pair, without_gpu):
        job.wait()
        cluster.sacct_rows(job.id, fields=("JobID", "State"))  # the name holds the delimiter
    command = shlex.split(re.sub(r"-S \S+ -E \S+", "-S now-1hour -E now+1hour", SACCT_COMMAND))

    def dump() -> str:
        return cluster.run(*command, user="root", env=times).stdout

    wait_until(lambda: f"\n{never.id}|" in dump(), 60, "the cancelled job in sacct", every=0.5)
    trace_file = workdir / "trace.txt"
    trace_file.write_text(dump())

    with open(trace_file) as lines:
        trace = read_trace(lines, "trace.txt")
    tasks = [job for job in trace.jobs if job.array == str(array.id)]
    assert sorted(job.job for job in tasks) == [f"{array.id}_{index}" for index in range(4)]
    assert {(job.gpus, job.name, job.user, job.partition) for job in tasks} == {(2, name, cluster.user, "normal")}
    lengths = {job.job.partition("_")[2]: job.duration for job in tasks}
    assert all(1000 * (int(index) + 1) <= length <= 30_000 for index, length in lengths.items())
    (two,) = [job for job in trace.jobs if job.job == str(pair.id)]
    assert (two.gpus, two.nodes, two.limit, two.name) == (2, 2, 7 * 60_000, "pair")
    assert {job.job for job in trace.jobs}.isdisjoint({str(without_gpu.id), str(never.id)})
    assert {RULE_NO_GPU, RULE_NEVER_RAN} <= set(trace.skipped.by_rule)
    arrays = [[trace.jobs[index].job for index in members] for members in siblings_by_array(trace).arrays]
    assert sorted(job.job for job in tasks) in [sorted(members) for members in arrays]

    assert main([str(trace_file), "--nodes", "4", "--gpus-per-node", "4", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["coalescing"]["members"] >= 4
    assert not result["trace"]["siblings"]["over_counts"]
