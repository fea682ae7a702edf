"""jap-submit on a real cluster: what is queued, what is printed, what is handed on, beside sbatch itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slurm_harness import SlurmCluster

Submit = Callable[..., "subprocess.CompletedProcess[str]"]

SWEEP = """#!/bin/bash
#SBATCH --array=0-3 -J "my sweep" --gres=gpu:1 --mem=200 -t 10
#SBATCH -o %x_%A_%a.out
#JAP
echo "$SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT: $SLURM_ARRAY_TASK_MIN-$SLURM_ARRAY_TASK_MAX"
echo "in $PWD with $# arguments:"
printf '<%s>\\n' "$@"
echo "name $SLURM_JOB_NAME" >&2
exit $((SLURM_ARRAY_TASK_ID * 2))
"""


@pytest.fixture
def submit(cluster: SlurmCluster, workdir: Path, jap_submit: str) -> Submit:
    """Run jap-submit in the working directory; a test that fails leaves nothing in the queue."""

    def run(*arguments: str | os.PathLike[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return cluster.run(jap_submit, *arguments, **{"cwd": workdir, "check": False, **options})

    return run


@pytest.fixture(autouse=True)
def _empty_queue(cluster: SlurmCluster) -> Any:
    yield
    cluster.run("scancel", "-u", cluster.user, user="root", check=False)


@pytest.fixture
def sweep(workdir: Path) -> Path:
    path = workdir / "sweep.sh"
    path.write_text(SWEEP)
    return path


def job_id(done: subprocess.CompletedProcess[str]) -> int:
    found = re.fullmatch(r"(?:Submitted batch job )?(\d+)\n", done.stdout)
    assert found, done
    return int(found[1])


def batch_script(cluster: SlurmCluster, number: int) -> bytes:
    """The script that the controller has, byte for byte."""
    path = cluster.home(cluster.user) / f"script.{number}"
    cluster.run("scontrol", "write", "batch_script", str(number), str(path))
    try:
        return path.read_bytes()
    finally:
        path.unlink()


def shown(cluster: SlurmCluster, number: int) -> dict[str, str]:
    text = cluster.run("scontrol", "-o", "show", "job", str(number)).stdout
    return dict(re.findall(r"(?:^| )([A-Za-z][\w:/]*)=(.*?)(?= [A-Za-z][\w:/]*=|\s*$)", text))


def test_an_array_becomes_one_row_with_its_options_in_force(
    cluster: SlurmCluster, workdir: Path, submit: Submit, sweep: Path
) -> None:
    number = job_id(submit("--hold", "-p", "jap", "--jap-groups=2", "--nice=7", sweep, "a b"))
    assert cluster.squeue("-r", format="%A %i %j %P %T") == [f"{number} {number} my sweep jap PENDING"]
    job = shown(cluster, number)
    assert job["Comment"].strip() == "jap: 4 members (0-3), 1 stage x 2 groups"
    assert job["NumNodes"] in ("1", "1-1")  # how a pending job shows it
    assert (job["NumTasks"], job["CPUs/Task"], job["MinMemoryNode"]) == ("1", "6", "1200M")
    assert (job["TimeLimit"], job["Nice"], job["StdOut"]) == ("00:20:00", "7", f"{workdir}/jap-{number}.out")
    assert re.fullmatch(r"gres[:/]gpu:2", job["TresPerNode"])
    assert job["Command"].endswith("/sweep.sh a b")
    assert batch_script(cluster, number).endswith(b"\n#JAP-USER-SCRIPT\n" + SWEEP.encode())


def test_members_do_what_the_tasks_of_a_plain_array_do(
    cluster: SlurmCluster, workdir: Path, submit: Submit, sweep: Path
) -> None:
    texts = {}
    for kind, environment in ("plain", {"JAP": "0"}), ("coalesced", {}):
        done = submit("--wait", sweep, "a b", "", "*", env=environment)
        assert done.returncode == 6  # the highest code
        number = job_id(done)
        texts[kind] = [(workdir / f"my sweep_{number}_{i}.out").read_text() for i in range(4)]
        jobs = [row for row in cluster.sacct_rows(number) if "." not in row["JobID"]]
        assert len(jobs) == (4 if kind == "plain" else 1)
    assert texts["coalesced"] == texts["plain"]
    assert "<a b>\n<>\n<*>\nname my sweep\n" in texts["plain"][3]


@pytest.mark.parametrize(
    "options", [[], ["--parsable"], ["-Q"], ["--quiet", "--parsable"], ["-W"], ["-W", "--parsable"]]
)
def test_standard_output_and_code_are_sbatchs(
    cluster: SlurmCluster, workdir: Path, submit: Submit, sweep: Path, options: list[str]
) -> None:
    ours = submit(*options, "-o", "/dev/null", sweep)
    theirs = cluster.run("sbatch", *options, "-o", "/dev/null", sweep, cwd=workdir, check=False)
    assert ours.returncode == theirs.returncode
    assert re.sub(r"\d+", "N", ours.stdout) == re.sub(r"\d+", "N", theirs.stdout)
    if {"-Q", "--quiet", "--parsable"} & set(options):
        assert ours.stderr == ""
    else:
        assert ours.stderr.startswith("jap: one job trains 4 members (1 stage x 1 group); type jap-status ")


PASSED_ON = {
    "no #JAP line": "#SBATCH --array=0-3\n",
    "not an array": "#JAP\n",
    "%j without %a": "#SBATCH --array=0-3 -o %j.out\n#JAP\n",
    "--exclusive": "#SBATCH --array=0-3 --exclusive\n#JAP\n",
    "several types": "#SBATCH --array=0-3 --gres=gpu:fake:1,gpu:none:1\n#JAP\n",
    "aftercorr": "#SBATCH --array=0-3 --dependency=aftercorr:99999\n#JAP\n",
    "several partitions": "#SBATCH --array=0-3 -p jap,normal\n#JAP\n",
    "exceed the partition's": "#SBATCH --array=0-3 -p jap -t 5-0\n#JAP\n",
    "a backslash before a space": "#SBATCH --array=0-3 -J a\\ b\n#JAP\n",
}


@pytest.mark.parametrize("reason", PASSED_ON)
def test_what_is_not_coalesced_is_what_sbatch_would_have_queued(
    cluster: SlurmCluster, workdir: Path, submit: Submit, reason: str
) -> None:
    script = workdir / "t.sh"
    text = f"#!/bin/bash\n{PASSED_ON[reason]}printf '%s' 'é' \"$HOME\"  \n# last line without an end".encode()
    script.write_bytes(text)
    ours = submit("--hold", script, "x", "y z")
    theirs = cluster.run("sbatch", "--hold", script, "x", "y z", cwd=workdir, check=False)
    assert ours.stderr.startswith("jap: plain ")
    assert reason in ours.stderr.splitlines()[0]
    assert ours.stderr.splitlines()[1:] == theirs.stderr.splitlines()
    assert ours.returncode == theirs.returncode
    if theirs.returncode != 0:
        assert cluster.squeue() == []
        return
    jobs = [shown(cluster, job_id(done)) for done in (ours, theirs)]
    assert batch_script(cluster, job_id(ours)) == batch_script(cluster, job_id(theirs)) == text
    different = {k for k in jobs[0] if jobs[0][k] != jobs[1].get(k)}
    assert different <= {
        "JobId",
        "ArrayJobId",
        "SubmitTime",
        "EligibleTime",
        "AccrueTime",
        "StdOut",
        "StdErr",
        "Priority",
    }


@pytest.mark.parametrize(
    "text",
    [
        SWEEP.replace("\n", "\r\n"),
        SWEEP.partition("\n")[2],
        SWEEP + "\0",
        "#!/bin/bash\n#SBATCH -J nm (note) -a 0-3\n#JAP\n",
        "#!/bin/bash\n#SBATCH --array=0-3 --nosuchoption\n#JAP\n",
        "#!/bin/bash\n#JAP\n#SBATCH -a 0-3 --mem=lots\n",
    ],
)
def test_scripts_that_sbatch_refuses_stay_refused(
    cluster: SlurmCluster, workdir: Path, submit: Submit, text: str
) -> None:
    script = workdir / "t.sh"
    script.write_bytes(text.encode())
    ours = submit(script)
    theirs = cluster.run("sbatch", script, cwd=workdir, check=False)
    assert theirs.returncode != 0
    assert ours.returncode == theirs.returncode
    assert ours.stderr.splitlines()[1:] == theirs.stderr.splitlines()
    assert cluster.squeue() == []


@pytest.mark.parametrize(
    "arguments",
    [["--array=3-1"], ["--array=0-100000"], ["--jap-stages=x"], ["-o", "nowhere/%a"], ["--jap-nonsense"]],
)
def test_faults_leave_nothing_in_the_queue(
    cluster: SlurmCluster, submit: Submit, sweep: Path, arguments: list[str]
) -> None:
    done = submit(*arguments, sweep)
    assert done.returncode == 2
    assert re.fullmatch(r"jap: [^\n]*\n", done.stderr)
    assert done.stdout == ""
    assert cluster.squeue() == []


def test_what_slurm_refuses_has_sbatchs_code_and_words(
    cluster: SlurmCluster, workdir: Path, submit: Submit, sweep: Path
) -> None:
    for arguments in ["-A", "nobody"], ["-q", "nosuch"], ["-d", "afterok:x"]:
        ours = submit(*arguments, sweep)
        theirs = cluster.run("sbatch", *arguments, sweep, cwd=workdir, check=False)
        assert theirs.returncode != 0
        assert ours.returncode == theirs.returncode
        said = [line for line in theirs.stderr.splitlines() if "jap: " not in line]  # the plugin's reason is not ours
        assert set(said) <= set(ours.stderr.splitlines())
        assert ours.stdout == ""
    assert cluster.squeue() == []
    assert "plain array: Slurm does not answer" in submit("-p", "nosuch", sweep).stderr


def test_test_only_asks_about_the_coalesced_job_and_queues_nothing(
    cluster: SlurmCluster, submit: Submit, sweep: Path
) -> None:
    done = submit("--test-only", sweep)
    assert done.returncode == 0
    assert re.search(r"sbatch: Job \d+ to start at .* using 5 processors", done.stderr), done
    assert done.stdout == ""
    assert cluster.squeue() == []


def test_variables_override_the_script_and_the_command_line_overrides_both(
    cluster: SlurmCluster, workdir: Path, submit: Submit, sweep: Path
) -> None:
    variables = {
        "SBATCH_PARTITION": "jap",
        "SBATCH_TIMELIMIT": "5",
        "SBATCH_MEM_PER_NODE": "9G",
        "SBATCH_OUTPUT": "x.%a",
    }
    number = job_id(submit("--hold", "--mem=100", sweep, env=variables))
    job = shown(cluster, number)
    assert (job["Partition"], job["TimeLimit"], job["MinMemoryNode"]) == ("jap", "00:20:00", "500M")
    assert b"#JAP-CARRIED output=x.%a\n" in batch_script(cluster, number)
    number = job_id(submit("--hold", "-J", "n", sweep, env={"SBATCH_ARRAY_INX": "5,7"}))
    assert b"#JAP-CARRIED array=5,7\n" in batch_script(cluster, number)


# https://github.com/goodfire-ai/spd/pull/955, https://github.com/snakemake/snakemake/issues/2230
@pytest.mark.parametrize("export", [[], ["--export=ALL"], ["--export=NONE"], ["--export=NIL"], ["--export=MINE"]])
def test_a_submission_from_inside_an_array_task_knows_nothing_of_it(
    cluster: SlurmCluster, workdir: Path, jap_submit: str, export: list[str]
) -> None:
    inner, outer = workdir / "inner.sh", workdir / "outer.sh"
    inner.write_text(
        "#!/bin/bash\n#SBATCH --array=2-6:2 -o inner_%a.out\n#JAP\nenv | grep -E '^(SLURM_ARRAY|MINE|OTHER)' | sort\n"
    )
    outer.write_text(
        f"#!/bin/bash\nexport MINE=m OTHER=o\n{jap_submit} -W --parsable {' '.join(export)} inner.sh >id 2>err\n"
    )
    job = cluster.sbatch("--array=9", "-o", "outer.out", "-J", "outer", "-c", "2", outer, cwd=workdir)
    assert job.wait() == 0, (workdir / "err").read_text()
    number = (workdir / "id").read_text().strip()
    assert number.isdigit(), (workdir / "err").read_text()
    mine = {(): "mo", ("--export=ALL",): "mo", ("--export=MINE",): "m"}.get(tuple(export), "")
    for index in (2, 4, 6):
        told = (workdir / f"inner_{index}.out").read_text().splitlines()
        assert told == [
            *(f"{name}={value}" for name, value in (("MINE", "m"), ("OTHER", "o")) if value in mine),
            f"SLURM_ARRAY_JOB_ID={number}",
            "SLURM_ARRAY_TASK_COUNT=3",
            f"SLURM_ARRAY_TASK_ID={index}",
            "SLURM_ARRAY_TASK_MAX=6",
            "SLURM_ARRAY_TASK_MIN=2",
            "SLURM_ARRAY_TASK_STEP=2",
        ]


# https://github.com/nextflow-io/nextflow/issues/218, and the folders that submitit tests with
@pytest.mark.parametrize("name", ["a 0", 'a"=0"', "a'; echo foo", "a\nb", "$(false)"])
def test_hostile_names(cluster: SlurmCluster, workdir: Path, submit: Submit, name: str) -> None:
    folder = workdir / name
    folder.mkdir()
    shutil.chown(folder, cluster.user)
    script = folder / name
    script.write_text('#!/bin/bash\n#SBATCH --array=0-1\n#JAP\nprintf \'%s|\' "$PWD" "$SLURM_JOB_NAME" "$@"\n')
    done = submit("-W", script, name, cwd=folder)
    assert done.returncode == 0, done
    number = job_id(done)
    for index in 0, 1:
        text = (folder / f"slurm-{number}_{index}.out").read_text()
        assert text == f"{folder}|{name}|{name}|"
    if "\n" not in name:
        assert "one job trains 2 members" in done.stderr


def test_large_and_binary_scripts_reach_their_members(cluster: SlurmCluster, workdir: Path, submit: Submit) -> None:
    script = workdir / "big.sh"
    head = b'#!/bin/bash\n#SBATCH --array=0-1\n#JAP\ntail -c 4 "$0" | cksum\nexit\n'
    script.write_bytes(head + bytes(range(1, 10)) + bytes(range(14, 256)) * 12_500 + b"last")
    done = submit("-W", script)
    assert done.returncode == 0, done
    texts = {(workdir / f"slurm-{job_id(done)}_{i}.out").read_text() for i in (0, 1)}
    assert texts == {subprocess.run(["cksum"], input=b"last", capture_output=True, check=True).stdout.decode()}


def test_a_script_on_standard_input(cluster: SlurmCluster, submit: Submit, sweep: Path) -> None:
    number = job_id(submit("--hold", input=SWEEP.replace(' -J "my sweep"', "")))
    assert shown(cluster, number)["JobName"] == "sbatch"
    plain = SWEEP.replace("#JAP\n", "")
    number = job_id(submit("--hold", input=plain))
    assert batch_script(cluster, number) == plain.encode()


def test_more_stages_than_one_node_has_gpus_are_spread(cluster: SlurmCluster, submit: Submit, sweep: Path) -> None:
    stages = cluster.gpus_per_node + 2
    job = shown(cluster, job_id(submit("--hold", f"--jap-stages={stages}", sweep)))
    assert job["NumNodes"] in ("2", "2-2")
    assert re.fullmatch(rf"gres[:/]gpu:{stages // 2}", job["TresPerNode"])
    told = submit(f"--jap-stages={cluster.gpus_per_node * len(cluster.nodes) + 1}", "--hold", sweep)
    assert "the partition has not so many" in told.stderr
