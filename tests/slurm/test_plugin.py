"""etc/jap.lua in a real slurmctld: which arrays become one job and what it asks for; all else is untouched."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from slurm_harness import Job, SlurmCluster
from support import wait_until

from slurm_jap import carried

SWEEP = """\
#!/bin/bash
#SBATCH --job-name=sweep
#JAP
echo "member $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT: $*"
"""
REPOSITORY_ETC = Path(__file__).resolve().parents[2] / "etc"
PASS_THROUGH = (
    "function slurm_job_submit(d, p, u) return slurm.SUCCESS end\n"
    "function slurm_job_modify(d, r, p, u) return slurm.SUCCESS end\n"
    "return slurm.SUCCESS\n"
)


@contextlib.contextmanager
def file_in_etc(cluster: SlurmCluster, name: str, text: str | None) -> Iterator[None]:
    """Replace a file beside slurm.conf for a while (None: remove it), and have slurmctld load its Lua anew."""
    path, plugin = cluster.etc / name, cluster.etc / "job_submit.lua"
    before = path.read_text()

    def write(content: str | None) -> None:
        # slurmctld loads job_submit.lua again when its time of change, in whole seconds, has grown.
        newer = int(plugin.stat().st_mtime) + 1
        if content is None:
            path.unlink()
        else:
            path.write_text(content)
            path.chmod(0o644)
        os.utime(plugin, (newer, newer))

    write(text)
    try:
        yield
    finally:
        write(before)


class Submitted(Job):
    """A held job, with what sbatch printed."""

    said: str

    def script(self) -> bytes:
        text = self.cluster.run("scontrol", "write", "batch_script", str(self.id), "-", user="root").stdout
        return text.encode("utf-8", "surrogateescape")

    def facts(self) -> carried.Carried:
        return carried.parse(self.script())[0]


def submit(
    cluster: SlurmCluster, folder: Path, *arguments: str, script: str = SWEEP, name: str = "sweep.sh", **options: object
) -> Submitted:
    """Submit, held; the caller cancels (or the end of the cluster does)."""
    path = folder / name
    path.write_text(script)
    done = cluster.run("sbatch", "--hold", *arguments, path, "a", "b c", cwd=folder, **options)  # type: ignore[arg-type]
    job = Submitted(cluster, cluster.submitted(done.stdout).id)
    job.said = done.stderr
    return job


@pytest.fixture(autouse=True)
def leave_no_jobs(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cluster" in request.fixturenames:
        cluster: SlurmCluster = request.getfixturevalue("cluster")
        cluster.run("scancel", "--state=PENDING", "-u", cluster.user, user="root")


# ----------------------------------------------------------------------------------------------------------- coalesced


def test_an_array_of_an_opted_in_script_is_one_job(cluster: SlurmCluster, workdir: Path) -> None:
    job = submit(
        cluster, workdir, "--array=0-7%4", "-p", "jap", "-c2", "--gres=gpu:2", "--mem=300M", "-t30",
        "-o", "o_%A_%a.out", "--open-mode=append",
    )  # fmt: skip
    assert cluster.squeue("-j", str(job.id), format="%i %P %j %D %C") == [f"{job.id} jap sweep 1 10"]
    assert job.said.startswith("sbatch: jap: 8 members in one job: 1 node with gpu:2, 10 CPUs and 1500 MiB each,")
    assert len(job.said.splitlines()) == 1
    comment = cluster.run("scontrol", "show", "job", str(job.id)).stdout
    assert "   AdminComment=jap:v1 array=0-7%4 members=8 stages=2 groups=1 \n" in comment
    info = job.info()
    assert "ArrayTaskId" not in info
    assert info["NumNodes"] == "1-1"
    assert info["NumTasks"] == "1"
    assert info["CPUs/Task"] == "10"
    assert info["MinMemoryNode"] == "1500M"
    assert info["TRES"] == "cpu=10,mem=1500M,node=1,billing=10,gres/gpu=2"
    assert info["TimeLimit"] == "04:00:00"
    assert info["StdOut"] == f"{workdir}/jap-{job.id}.out"
    facts = carried.Carried(
        array="0-7%4", output=f"{workdir}/o_%A_%a.out", open_mode="append", script_name=f"{workdir}/sweep.sh", stages=2,
        groups=1, member_cpus=2, member_mem_mb=300, member_time_min=120, gres="gpu:2", at_once=4,
    )  # fmt: skip
    expected = carried.build(cluster.python, facts, SWEEP.encode())
    assert job.script().rstrip(b"\n") == expected.rstrip(b"\n")


def test_the_default_partition_counts_where_none_is_named(cluster: SlurmCluster, workdir: Path) -> None:
    conf = (cluster.etc / "jap.conf").read_text()
    with file_in_etc(cluster, "jap.conf", conf.replace("Partition=jap", "Partition=normal")):
        assert "ArrayTaskId" not in submit(cluster, workdir, "--array=0-1").info()
        assert "ArrayTaskId" in submit(cluster, workdir, "--array=0-1", "-p", "jap").records()[0]


SIZES = ("array", "stages", "groups", "member_cpus", "member_mem_mb", "member_time_min", "gres", "at_once")
REQUESTS = [
    [],
    ["-c4", "--gres=gpu:4", "--mem=1G"],
    ["-n4", "--gpus=4", "--mem-per-cpu=100"],
    ["-N2", "--gpus-per-node=4"],
    ["-N2", "--gpus=8"],
    ["-n4", "--gpus-per-task=1"],
    ["--gpus=4", "--cpus-per-gpu=2", "--mem-per-gpu=50M"],
    ["-N2", "--ntasks-per-node=4", "--gres=gpu:fake:4"],
    ["--gres=gpu:1,gpu:1"],
    ["--gpus=8"],
    ["-n3", "-N2"],
    ["--mincpus=3"],
    ["--mem=0"],
    ["--mem=15000"],
    ["-N1-2"],
    ["--exclusive"],
    ["--gpus-per-socket=1", "--sockets-per-node=1"],
    ["--ntasks-per-gpu=1", "--gpus=2"],
    ["--gpu-bind=none", "--gpus=2"],
    ["-t", "10-0"],
    ["-t", "UNLIMITED"],
    ["--time-min=5"],
    ["-d", "aftercorr:1"],
    ["-o", "%j.out"],
    ["-o", "%j_%a.out"],
    ["--threads-per-core=1"],
    ["--hint=nomultithread"],
    ["--signal=B:USR1@60"],
    ["--requeue"],
]


def test_plugin_and_jap_submit_decide_alike(cluster: SlurmCluster, workdir: Path, jap_submit: str) -> None:
    verdicts = set()
    for request in REQUESTS:
        for line in ("", "--stages=2 --groups=2", "--member-mem=500M --member-cpus=3"):
            words = ["-p", "jap", "--array=0-7%5", *request]
            script = f"#!/bin/bash\n#JAP {line}\necho\n"
            (workdir / "e.sh").write_text(script)
            explained = cluster.run(jap_submit, "--jap-explain", "--jap-json", *words, "e.sh", cwd=workdir)
            told = json.loads(explained.stdout)
            path = workdir / "e.sh"
            done = cluster.run("sbatch", "--hold", *words, path, cwd=workdir, check=False)
            case = (request, line, told.get("reason"), done.stderr)
            if done.returncode != 0:  # not even a plain array can be
                assert not told["coalesced"], case
                continue
            job = Submitted(cluster, cluster.submitted(done.stdout).id)
            verdicts.add(told["coalesced"])
            if not told["coalesced"]:
                assert "ArrayTaskId" in job.records()[0], case
                assert "sbatch: jap: plain array: " in done.stderr, case
                continue
            assert "ArrayTaskId" not in job.records()[0], case
            facts = job.facts()
            for name in SIZES:
                assert getattr(facts, name) == told["carried"][name], (name, *case)
            info, wanted = job.info(), told["request"]
            assert info["NumNodes"] == f"{wanted['nodes']}-{wanted['nodes']}", case
            assert int(info["CPUs/Task"]) == wanted["cpus_per_node"], case
            memory = wanted["memory_per_node_mb"]
            assert info["MinMemoryNode"] in (f"{memory}M", f"{memory / 1024:g}G", str(memory)), case
            days, _, clock = info["TimeLimit"].rpartition("-")
            hours, minutes, _ = clock.split(":")
            assert (int(days or 0) * 24 + int(hours)) * 60 + int(minutes) == wanted["time_min"], case
            job.cancel()
    assert verdicts == {True, False}


def test_members_run_with_their_files_and_environment_of_their_own(cluster: SlurmCluster, workdir: Path) -> None:
    (workdir / "run.sh").write_text(SWEEP + 'exit "$SLURM_ARRAY_TASK_ID"\n')
    job = cluster.sbatch("--array=0-6:2", "-p", "jap", "-o", "o_%a.out", "run.sh", "x y", cwd=workdir)
    assert job.wait() == 6
    for index in (0, 2, 4, 6):
        assert (workdir / f"o_{index}.out").read_text() == f"member {index} of 4: x y\n"
    assert sorted(path.name for path in workdir.glob("*.out")) == sorted(
        [f"jap-{job.id}.out", *(f"o_{index}.out" for index in (0, 2, 4, 6))]
    )


@pytest.mark.parametrize("export", ["NONE", "NIL", "ONLY=this"])
def test_without_the_users_environment(cluster: SlurmCluster, workdir: Path, export: str) -> None:
    (workdir / "run.sh").write_text(SWEEP + 'echo "${GONE:-none} ${ONLY:-none}"\n')
    job = cluster.sbatch(
        "--array=1-2", "-p", "jap", f"--export={export}", "-o", "o_%a.out", "run.sh", cwd=workdir, env={"GONE": "seen"}
    )
    assert job.wait() == 0
    second = "this" if export.startswith("ONLY") else "none"
    assert (workdir / "o_2.out").read_text() == f"member 2 of 2: \nnone {second}\n"


HOSTILE = ["a 0", 'a"=0"', "a'; echo foo", "a$(touch x)`touch y`", "100%j%s%n%%", "a\\b", "-p normal", "ü"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_and_specifications_with_percent_signs(cluster: SlurmCluster, workdir: Path, name: str) -> None:
    script = workdir / f"{name}.sh"
    script.write_text(SWEEP.replace("--job-name=sweep", "--job-name='%s %n %a'"))
    job = cluster.sbatch(
        "--array=1,3%1", "-p", "jap", f"--comment={name}", "-o", f"{workdir}/%%s %A.%a", script, name, cwd=workdir
    )
    assert job.wait() == 0
    files = sorted(path.name for path in workdir.iterdir() if path.name.startswith("%s "))
    assert files == [f"%s {job.id}.1", f"%s {job.id}.3"]
    assert (workdir / files[1]).read_text() == f"member 3 of 2: {name}\n"
    assert not (workdir / "x").exists()
    assert not (workdir / "y").exists()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_working_directories(cluster: SlurmCluster, workdir: Path, name: str) -> None:
    folder = workdir / name
    cluster.run("mkdir", folder)
    (folder / "run.sh").write_text(SWEEP)
    job = cluster.sbatch("--array=0-1", "-p", "jap", "run.sh", cwd=folder)
    assert job.wait() == 0
    assert (folder / f"slurm-{job.id}_1.out").read_text() == "member 1 of 2: \n"


# ----------------------------------------------------------------------------------------------------------- untouched

VOLATILE = re.compile(
    r"(JobId|ArrayJobId|SubmitTime|EligibleTime|AccrueTime|StartTime|EndTime|LastSchedEval|Priority|AllocNode:Sid)$"
)

UNTOUCHED: dict[str, tuple[list[str], str, dict[str, str]]] = {
    "no #JAP line": (["--array=0-3", "-p", "jap", "--gres=gpu:1"], "#!/bin/bash\n# JAP\necho '#JAP'\n#JAP\n", {}),
    "not an array": (["-p", "jap", "-n2", "-o", "%j"], SWEEP, {}),
    "partition not enabled": (["--array=0-3%2", "--mem=100", "-o", "%A_%a"], SWEEP, {}),
    "two partitions": (["--array=0-3", "-p", "jap,normal"], SWEEP, {}),
    "JAP=0": (["--array=0-3", "-p", "jap"], SWEEP, {"JAP": "0"}),
    "unknown key": (["--array=0-3", "-p", "jap"], "#!/bin/bash\n#JAP --stage=2\n", {}),
    "job id in the script": (["--array=0-3", "-p", "jap"], SWEEP + "mkdir run.$SLURM_JOB_ID\n", {}),
    "too many members": (["--array=0-64", "-p", "jap"], SWEEP, {}),
    "too long": (["--array=0-3", "-p", "jap", "-t1-0"], SWEEP, {}),
    "exclusive": (["--array=0-3", "-p", "jap", "--exclusive"], SWEEP, {}),
    "odd bytes": (["--array=0-3"], "#!/bin/bash\n#JAP\n\t%s%n \\ \"'`\u00fc\n\n\n", {}),
}


def fingerprint(job: Submitted) -> tuple[list[dict[str, str]], bytes]:
    """All that scontrol shows of a job, without what two equal submissions differ in, and its script."""
    records = [
        {name: value.replace(str(job.id), "ID") for name, value in record.items() if not VOLATILE.match(name)}
        for record in job.records()
    ]
    return records, job.script()


def test_everything_else_is_as_without_the_plugin(cluster: SlurmCluster, workdir: Path) -> None:
    def submit_all() -> dict[str, tuple[list[dict[str, str]], bytes]]:
        found = {}
        for name, (arguments, script, env) in UNTOUCHED.items():
            found[name] = fingerprint(submit(cluster, workdir, *arguments, script=script, env=env))
        wrapped = cluster.run("sbatch", "--hold", "-p", "jap", "--array=0-1", "--wrap=true", cwd=workdir)
        found["--wrap"] = fingerprint(Submitted(cluster, cluster.submitted(wrapped.stdout).id))
        return found

    with_plugin = submit_all()
    with file_in_etc(cluster, "job_submit.lua", PASS_THROUGH):
        without = submit_all()
    assert set(with_plugin) == set(without)
    for name in without:
        assert with_plugin[name] == without[name], name


def test_what_slurm_refuses_is_refused_in_slurms_words(cluster: SlurmCluster, workdir: Path) -> None:
    (workdir / "s.sh").write_text(SWEEP)
    for spec in ("3-1", "0-1001", "a", "0-3:0"):
        refused = cluster.run("sbatch", "-p", "jap", f"--array={spec}", "s.sh", cwd=workdir, check=False)
        assert refused.returncode == 1
        assert "Invalid job array specification" in refused.stderr
        assert "jap:" not in refused.stderr


# ------------------------------------------------------------------------------------------------------- when it fails

FAULTS = {
    "error while computing": ("local function plan(", "local function plan() error('no') end\nlocal function unused("),
    "error in the middle of the edits": ('set("script", jap.carry(', 'set("script", {}) local _ = (jap.carry('),
    "nil for the array": ('set("array_inx", "")', 'edits[#edits + 1] = { "array_inx" }'),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_internal_error_leaves_the_array_as_it_was(cluster: SlurmCluster, workdir: Path, name: str) -> None:
    before, after = FAULTS[name]
    text = (cluster.etc / "jap.lua").read_text()
    assert before in text
    request = ["--array=0-3%2", "-p", "jap", "-n2", "-c3", "--gpus=2", "--mem=200", "-o", "%A_%a", "-e", "e%a", "-t5"]
    with file_in_etc(cluster, "job_submit.lua", PASS_THROUGH):
        plain = fingerprint(submit(cluster, workdir, *request))
    log = cluster.log / "slurmctld.log"
    length = len(log.read_text())
    with file_in_etc(cluster, "jap.lua", text.replace(before, after)):
        job = submit(cluster, workdir, *request)
    assert fingerprint(job) == plain
    assert job.said == "sbatch: jap: plain array: an internal error, see slurmctld's log\n"
    assert "error: lua: jap: internal error, the job stays as it was: " in log.read_text()[length:]


@pytest.mark.parametrize("text", [None, "this is no Lua", "error('at load')", "return 7"])
def test_without_a_usable_module_slurm_is_as_it_was(cluster: SlurmCluster, workdir: Path, text: str | None) -> None:
    with file_in_etc(cluster, "job_submit.lua", PASS_THROUGH):
        plain = fingerprint(submit(cluster, workdir, "--array=0-3", "-p", "jap"))
    log = cluster.log / "slurmctld.log"
    length = len(log.read_text())
    with file_in_etc(cluster, "jap.lua", text):
        job = submit(cluster, workdir, "--array=0-3", "-p", "jap")
    assert fingerprint(job) == plain
    assert job.said == ""
    assert "error: lua: jap: not in use: " in log.read_text()[length:]


def test_a_fault_in_jap_conf_is_logged_and_everything_stays_plain(cluster: SlurmCluster, workdir: Path) -> None:
    conf = (cluster.etc / "jap.conf").read_text()
    log = cluster.log / "slurmctld.log"
    length = len(log.read_text())
    with file_in_etc(cluster, "jap.conf", conf + "Partitoin=normal MaxTime=5\n"):
        for _ in range(2):
            job = submit(cluster, workdir, "--array=0-3", "-p", "jap")
            assert "ArrayTaskId" in job.records()[0]
            assert job.said == "sbatch: jap: plain array: this site's jap.conf has a fault, tell the administrator\n"
    said = [line for line in log.read_text()[length:].splitlines() if "jap.conf" in line]
    assert len(said) == 1
    line = conf.count("\n") + 1
    assert f"error: lua: jap: {cluster.etc}/jap.conf:{line}: unknown key 'Partitoin'" in said[0]


@pytest.mark.parametrize("text", [None, "", "# Partition=jap MaxTime=5\n"])
def test_one_file_switches_it_off_and_on(cluster: SlurmCluster, workdir: Path, text: str | None) -> None:
    with file_in_etc(cluster, "jap.conf", text):
        job = submit(cluster, workdir, "--array=0-3", "-p", "jap")
        assert "ArrayTaskId" in job.records()[0]
        assert job.said == ""
    assert "ArrayTaskId" not in submit(cluster, workdir, "--array=0-3", "-p", "jap").records()[0]


def test_the_installed_files_are_the_repositorys(cluster: SlurmCluster) -> None:
    for name in ("jap.lua", "job_submit.lua"):
        assert (cluster.etc / name).read_bytes() == (REPOSITORY_ETC / name).read_bytes()


def test_every_command_of_the_administrators_page(cluster: SlurmCluster, workdir: Path, jap_submit: str) -> None:
    """In their order, on a folder of its own for /etc/slurm, on the partition that is enabled here."""
    page = (REPOSITORY_ETC.parent / "docs" / "admin.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines()]
    assert len(commands) == 8
    etc = workdir / "etc-slurm"
    etc.mkdir()
    here = {
        " etc/": f" {REPOSITORY_ETC}/",
        "/etc/slurm/": f"{etc}/",
        "/opt/slurm-jap/bin/jap-submit": jap_submit,
        "/opt/slurm-jap/bin/python": cluster.python,
        "-p gpu": "-p jap",
    }
    printed = {}
    for command in commands:
        ours = command
        for there, replacement in here.items():
            ours = ours.replace(there, replacement)
        user = "root" if ours.startswith(("install", "touch")) else cluster.user
        printed[command.split()[0]] = cluster.run("bash", "-c", ours, cwd=workdir, user=user).stdout
        if command.startswith("sbatch"):
            job = cluster.submitted(printed["sbatch"])
        if command.startswith("squeue"):
            (row,) = [row for row in printed["squeue"].splitlines() if row.split()[0] == str(job.id)]
            assert row.split(maxsplit=2)[2].startswith("jap:v1 array=0-3 members=4 ")
            assert job.wait() == 0
        if command.startswith("sacct"):  # accounting is late
            run = partial(cluster.run, "bash", "-c", ours, cwd=workdir)
            wait_until(lambda run=run: "jap:v1 array=0-3" in run().stdout, 30, "the job in sacct", every=0.5)
    assert sorted(path.name for path in etc.iterdir()) == ["jap.conf", "jap.lua", "job_submit.lua"]
    assert (workdir / f"slurm-{job.id}_3.out").read_text() == "member 3\n"
