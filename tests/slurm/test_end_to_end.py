"""The whole path on a real cluster: an array submitted as users submit it trains coalesced, each member as alone.

examples/digits is the sweep. Alone means its batch script run by bash, where the script trains in its own process.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from slurm_harness import Job, SlurmCluster
from support import wait_until

from slurm_jap import store

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"
MEMBERS = range(8)
SHORT = ("--epochs", "1")
SLEEP = '__import__("time").sleep(600)'
SIZES = ("--gres=gpu:2", "--cpus-per-task=1", "--mem=700M", "--time=20")


def digits(cluster: SlurmCluster, folder: Path, extra: str = "") -> Path:
    """A copy of the example in ``folder`` that runs the cluster's interpreter; ``extra`` goes before training."""
    (folder / "train.py").write_bytes((DIGITS / "train.py").read_bytes())
    script = folder / "sweep.sh"
    text = (DIGITS / "sweep.sh").read_text().replace("python train.py", f"{extra}exec {cluster.python} train.py")
    script.write_text(text)
    return script


@pytest.fixture(scope="session")
def alone(cluster: SlurmCluster, test_root: Path) -> dict[int, tuple[str, dict[str, torch.Tensor]]]:
    """Log and parameters of every member, trained by itself."""
    folder = test_root / "digits_alone"
    folder.mkdir()
    shutil.chown(folder, cluster.user)
    script = digits(cluster, folder)
    results = {}
    for index in MEMBERS:
        env = {"SLURM_ARRAY_TASK_ID": str(index)}
        done = cluster.run("bash", script, *SHORT, cwd=folder, env=env, timeout=120)
        results[index] = done.stdout, torch.load(folder / f"digits_{index}.pt", weights_only=True)
    return results


def check(folder: Path, job: Job, index: int, alone: dict[int, tuple[str, dict[str, torch.Tensor]]]) -> None:
    """One member's output file and parameters are those of itself alone."""
    log, parameters = alone[index]
    assert (folder / f"digits_{job.id}_{index}.out").read_text() == log
    found = torch.load(folder / f"digits_{index}.pt", weights_only=True)
    assert list(found) == list(parameters)
    assert all(torch.equal(found[name], parameters[name]) for name in parameters)


def check_whole(
    cluster: SlurmCluster, folder: Path, job: Job, alone: dict[int, tuple[str, dict[str, torch.Tensor]]]
) -> None:
    """One job of named steps, eight output files, each member as alone."""
    assert job.wait(timeout=280) == 0, (folder / f"jap-{job.id}.out").read_text()
    assert sorted(p.name for p in folder.glob("digits_*.out")) == [f"digits_{job.id}_{i}.out" for i in MEMBERS]
    for index in MEMBERS:
        check(folder, job, index, alone)
    steps = cluster.sacct_steps(job.id, "engine", *(f"member_{i}" for i in MEMBERS))
    assert {steps[f"member_{i}"]["ExitCode"] for i in MEMBERS} == {"0:0"}
    assert steps["engine"]["State"] == "COMPLETED"


def test_plain_sbatch_with_the_plugin(
    cluster: SlurmCluster, workdir: Path, alone: dict[int, tuple[str, dict[str, torch.Tensor]]]
) -> None:
    script = digits(cluster, workdir)
    job = cluster.sbatch("--array=0-7", "-p", "jap", *SIZES, script, *SHORT, cwd=workdir)
    assert cluster.squeue("-j", str(job.id), "-r", format="%i %P %j") == [f"{job.id} jap digits"]
    check_whole(cluster, workdir, job, alone)


def test_jap_submit_on_a_partition_without_the_plugin(
    cluster: SlurmCluster,
    workdir: Path,
    jap_submit: str,
    alone: dict[int, tuple[str, dict[str, torch.Tensor]]],
) -> None:
    script = digits(cluster, workdir)
    job = cluster.sbatch("-p", "normal", *SIZES, script, *SHORT, program=jap_submit, cwd=workdir)
    assert cluster.squeue("-j", str(job.id), "-r", format="%i %P %j") == [f"{job.id} normal digits"]
    check_whole(cluster, workdir, job, alone)
    status = cluster.run(Path(jap_submit).with_name("jap-status"), "--json", str(job.id), cwd=workdir)
    assert status.stdout.count('"COMPLETED"') == len(MEMBERS)


def test_one_fails_and_one_is_cancelled_and_six_do_not_notice(
    cluster: SlurmCluster,
    workdir: Path,
    jap_submit: str,
    alone: dict[int, tuple[str, dict[str, torch.Tensor]]],
) -> None:
    """Member 2 exits 3 in the middle of training, member 5 is cancelled as a step."""
    insert = "sed -i 's/^        result = /        {}\\n&/' train_{}.py"
    marks = (
        f"[ $SLURM_ARRAY_TASK_ID != 2 ] || {insert.format('raise SystemExit(3)', 2)}\n"
        f"[ $SLURM_ARRAY_TASK_ID != 5 ] || {insert.format(SLEEP, 5)}\n"
    )
    script = digits(cluster, workdir)
    text = script.read_text().replace("exec ", "cp train.py train_$SLURM_ARRAY_TASK_ID.py\n" + marks + "exec ")
    script.write_text(text.replace(" train.py --lr", " train_$SLURM_ARRAY_TASK_ID.py --lr"))
    job = cluster.sbatch("-p", "normal", *SIZES, script, *SHORT, program=jap_submit, cwd=workdir)

    def step_of_member_5() -> list[str]:
        lines = cluster.squeue("-s", "-j", str(job.id), format="%i %j")
        logs = workdir / f"digits_{job.id}_5.out"
        begun = logs.exists() and "step 23" in logs.read_text()
        return [line.split()[0] for line in lines if line.endswith(" member_5")] if begun else []

    (step,) = wait_until(step_of_member_5, 200, "member 5 trained an epoch", every=0.5)
    cluster.run("scancel", step, user="root")
    code = job.wait(timeout=280)
    for index in (0, 1, 3, 4, 6, 7):
        check(workdir, job, index, alone)
    steps = cluster.sacct_steps(job.id, *(f"member_{i}" for i in MEMBERS))
    assert steps["member_2"]["ExitCode"] == "3:0"
    assert steps["member_5"]["State"].startswith("CANCELLED")
    folder = store.latest_attempt(workdir, job.id)
    assert folder is not None
    codes = {e["member"]: e["code"] for e in folder.events(store.RUN_WRITER) if e["kind"] == "member_ended"}
    assert codes[2] == 3
    assert codes[5] in (128 + 15, 128 + 9), "scancel ends a step with SIGTERM, and after KillWait with SIGKILL"
    assert code == max(codes.values())
