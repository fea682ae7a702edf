"""Coalesced jobs on a real cluster: steps, codes, devices, memory, signals, requeue.

The engine is the torch-free one of ``standin`` where only the launcher is tested, the real one in the last test.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import standin
from slurm_harness import Job, SlurmCluster
from support import wait_until

from slurm_jap import carried
from slurm_jap.carried import Carried
from slurm_jap.store import SweepDir, latest_attempt

KILL_WAIT = 30.0
"""No end may take longer than this; the cluster's own KillWait is shorter."""


class Coalesced:
    """A coalesced job and its sweep directory."""

    def __init__(self, cluster: SlurmCluster, workdir: Path, job: Job) -> None:
        self.cluster, self.workdir, self.job = cluster, workdir, job

    @property
    def folder(self) -> SweepDir:
        found = latest_attempt(self.workdir, self.job.id)
        assert found is not None, self.own_output
        return found

    @property
    def own_output(self) -> str:
        path = self.workdir / "job.out"
        return path.read_text() if path.exists() else ""

    def output(self, index: int) -> str:
        path = self.workdir / f"m_{index}"
        return path.read_text() if path.exists() else ""

    def wait_for_output(self, text: str, *indices: int) -> None:
        for index in indices:
            wait_until(lambda index=index: text in self.output(index), 60, f"{text!r} of {index}: {self.own_output}")

    def ended(self) -> dict[int, dict]:
        return {e["member"]: e for e in self.folder.events("run") if e["kind"] == "member_ended"}

    def steps(self) -> dict[str, str]:
        """Running steps, name -> id."""
        lines = self.cluster.squeue("-s", "-j", str(self.job.id), format="%j %i")
        return dict(line.rsplit(" ", 1) for line in lines)

    def processes(self) -> set[int]:
        """Processes of the job on this machine, by their environment."""
        found, mark = set(), f"SLURM_JOB_ID={self.job.id}".encode()
        conf = f"SLURM_CONF={self.cluster.slurm_conf}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    environment = set((entry / "environ").read_bytes().split(b"\0"))
                    zombie = (entry / "stat").read_text().rsplit(") ", 1)[1][0] == "Z"
                except OSError:
                    continue
                if {mark, conf} <= environment and not zombie:
                    found.add(int(entry.name))
        return found


def submit(cluster: SlurmCluster, workdir: Path, script: str, *options: str, **facts: object) -> Coalesced:
    """Submit ``script`` as a coalesced job, the way jap-submit and the plugin do."""
    given: dict[str, object] = {"array": "0-3", "output": "m_%a", "stages": 1, "member_mem_mb": 200} | facts
    path = workdir / "coalesced.sh"
    text = script if script.startswith("#!") else "#!/bin/bash\n" + script
    path.write_bytes(carried.build(cluster.python, Carried(**given), text.encode()))  # type: ignore[arg-type]
    standin.write_engine(workdir, cluster.python)
    environment = {"STANDIN_ENGINE": str(workdir / "standin-engine"), "PYTHON": cluster.python}
    job = cluster.sbatch("-o", "job.out", "-t", "5", *options, path, "a b", cwd=workdir, env=environment)
    return Coalesced(cluster, workdir, job)


def trains(seconds: float, before: str = "") -> str:
    return f'{before} "$PYTHON" "{standin.__file__}" member {seconds}\n'


def test_each_member_is_a_named_step_with_its_own_code(cluster: SlurmCluster, workdir: Path) -> None:
    script = 'echo "$SLURM_ARRAY_TASK_ID $1 $#"; echo err >&2; exit $((SLURM_ARRAY_TASK_ID % 5))'
    sweep = submit(
        cluster, workdir, script, "-J", "nm", array="0-12:4,7", output="logs/%x_%A_%3a_%j.out", error="logs/%a.err"
    )
    assert sweep.job.wait() == 1, "the folder logs does not exist"
    (workdir / "logs").mkdir()
    shutil.chown(workdir / "logs", cluster.user if cluster.user != "root" else "root")
    sweep = submit(
        cluster, workdir, script, "-J", "nm", array="0-12:4,7", output="logs/%x_%A_%3a_%j.out", error="logs/%a.err"
    )
    assert sweep.job.wait() == 4
    indices = {0: 0, 4: 4, 7: 2, 8: 3, 12: 2}
    for index in indices:
        name = f"logs/nm_{sweep.job.id}_{index:03}_{sweep.job.id}.out"
        assert (workdir / name).read_text() == f"{index} a b 1\n"
        assert (workdir / f"logs/{index}.err").read_text() == "err\n"
    rows = cluster.sacct_steps(sweep.job.id, *(f"member_{i}" for i in indices))
    assert set(rows) == {"batch", *(f"member_{i}" for i in indices)}, "one step each, no engine: nobody joined"
    for index, code in indices.items():
        assert rows[f"member_{index}"]["ExitCode"] == f"{code}:0"
        assert rows[f"member_{index}"]["State"] == ("COMPLETED" if code == 0 else "FAILED")
    assert re.findall(r"jap: member (\d+) ended with code (\d+)", sweep.own_output).__len__() == 5


def test_missing_output_folder_is_told_in_the_jobs_output(cluster: SlurmCluster, workdir: Path) -> None:
    # https://github.com/DataBiosphere/toil/issues/4633
    sweep = submit(cluster, workdir, "echo x", output="nowhere/%a", array="0")
    assert sweep.job.wait() == 1
    assert "cannot open" in sweep.own_output
    assert "nowhere/0" in sweep.own_output
    assert not (workdir / "nowhere").exists()


def test_a_member_sees_what_an_array_task_sees(cluster: SlurmCluster, workdir: Path) -> None:
    # https://github.com/goodfire-ai/spd/pull/955
    script = (
        "env | grep -v ^_= | sort; echo umask $(umask); ulimit -a; pwd; [ ! -t 0 ] && wc -c; readlink /proc/$$/fd/0"
    )
    plain = workdir / "coalesced.sh"
    plain.write_text("#!/bin/bash\n" + script)
    array = cluster.sbatch("--array=3-7:2", "-n1", "-c2", "--gres=gpu:1", "-o", "p_%a", plain, cwd=workdir)
    assert array.wait() == 0
    sweep = submit(
        cluster, workdir, script, "-n1", "-c2", "--gres=gpu:1", array="3-7:2", member_cpus=2, gres="gpu:1",
        member_mem_mb=None,
    )  # fmt: skip
    assert sweep.job.wait() == 0

    def read(name: str) -> tuple[dict[str, str], list[str]]:
        lines = (workdir / name).read_text().splitlines()
        split = next(i for i, line in enumerate(lines) if line.startswith("umask"))
        return dict(line.split("=", 1) for line in lines[:split]), lines[split:]

    ours, our_rest = read("m_5")
    theirs, their_rest = read("p_5")
    assert our_rest == their_rest
    hidden = {"CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"}
    for name in hidden:
        assert ours.pop(name) == ""
    for name in [n for n in theirs if n in hidden or re.match(r"SLURM_(JOB_GPUS|GPUS_ON_NODE|MEM_PER_CPU)$", n)]:
        del theirs[name]
    differs = {"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_ARRAY_JOB_ID", "SLURM_TASK_PID", "SLURMD_NODENAME", "HOSTNAME"}
    differs |= {"SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_TOPOLOGY_ADDR", "STANDIN_ENGINE", "PYTHON"}
    for_nested_srun = {"SLURM_OVERLAP", "SLURM_GRES", "SLURM_MEM_PER_NODE", "SLURM_CPU_BIND", "SLURM_TASK_PROLOG"}
    assert {k: v for k, v in ours.items() if k not in differs | for_nested_srun and not k.startswith("JAP_")} == {
        k: v for k, v in theirs.items() if k not in differs
    }
    assert ours["SLURM_ARRAY_JOB_ID"] == ours["SLURM_JOB_ID"] == str(sweep.job.id)


@pytest.mark.parametrize("export", ["NONE", "NIL", "STANDIN_ENGINE,MINE=1"])
def test_export_forms_and_outer_array(cluster: SlurmCluster, workdir: Path, export: str) -> None:
    # https://github.com/snakemake/snakemake/issues/2230: inherited SLURM_* pin CPUs or make srun die
    text = "#!/bin/bash\nenv | grep -e ^SLURM_ARRAY -e ^SLURM_EXPORT -e ^MINE -e ^OUTER | sort\n"
    (workdir / "plain.sh").write_text(text)
    outer = {
        "SLURM_ARRAY_TASK_ID": "99", "SLURM_ARRAY_TASK_COUNT": "99", "SLURM_ARRAY_JOB_ID": "99", "OUTER": "1",
        "SLURM_NTASKS": "9", "SLURM_CPU_BIND": "map_cpu:99", "SLURM_DISTRIBUTION": "arbitrary",
    }  # fmt: skip
    array = cluster.sbatch(
        f"--export={export}", "--array=0-1", "-o", "p_%a", workdir / "plain.sh", cwd=workdir, env=outer
    )
    assert array.wait() == 0
    path = workdir / "coalesced.sh"
    path.write_bytes(carried.build(cluster.python, Carried(array="0-1", output="m_%a"), text.encode()))
    job = cluster.sbatch(f"--export={export}", "-o", "job.out", path, cwd=workdir, env=outer)
    assert job.wait() == 0, (workdir / "job.out").read_text()
    for index in (0, 1):
        ours, theirs = ((workdir / f"{kind}_{index}").read_text() for kind in "mp")
        same_id = re.compile(r"(SLURM_ARRAY_JOB_ID=)\d+")
        assert same_id.sub(r"\1", ours) == same_id.sub(r"\1", theirs)
        assert "=99" not in ours


def test_members_are_spread_over_the_nodes(cluster: SlurmCluster, workdir: Path) -> None:
    script = "echo $SLURMD_NODENAME $JAP_NODE $SLURM_JOB_NODELIST $SLURM_NNODES $SLURM_NTASKS\n" + trains(1)
    sweep = submit(cluster, workdir, script, "-N2", "-n2", "--gres=gpu:1", array="0-3", stages=2, gres="gpu:1")
    assert sweep.job.wait() == 0, sweep.own_output
    nodes = []
    for index in range(4):
        first, second = sweep.output(index).splitlines()
        name, known, listed, count, tasks = first.split()
        assert name == known == listed
        assert (count, tasks) == ("1", "1")
        assert second == "group  2"
        nodes.append(name)
    assert sorted(nodes.count(n) for n in set(nodes)) == [2, 2]
    log = sweep.folder.engine_log.read_text()
    assert {line.split()[3] for line in log.splitlines()} == {f"{n}:" for n in set(nodes)}, "an agent on each node"
    rows = cluster.sacct_steps(sweep.job.id, "engine")
    assert (rows["engine"]["State"], rows["engine"]["ExitCode"], rows["engine"]["NTasks"]) == ("COMPLETED", "0:0", "2")


def test_throttle(cluster: SlurmCluster, workdir: Path) -> None:
    script = "mkdir r_$SLURM_ARRAY_TASK_ID; set -- r_*; echo $#; sleep 1; rmdir r_$SLURM_ARRAY_TASK_ID"
    sweep = submit(cluster, workdir, script, "-c8", array="0-5%2")
    assert sweep.job.wait() == 0
    assert max(int(sweep.output(i)) for i in range(6)) <= 2


GPU_REQUESTS = {
    1: ["--gres=gpu:2", "--gpus=2", "--gpus-per-node=2", "-n2 --gpus-per-task=1", "--gpus=2 --cpus-per-gpu=2"],
    2: ["--gres=gpu:1", "--gpus=2", "--gpus-per-node=1", "-n2 --gpus-per-task=1", "--gpus=2 --cpus-per-gpu=2"],
}
REQUESTS = [(nodes, request) for nodes, requests in GPU_REQUESTS.items() for request in requests]


@pytest.mark.parametrize(("nodes", "request_"), REQUESTS, ids=[f"{n}-{r}".replace(" ", "") for n, r in REQUESTS])
def test_srun_inside_a_member_beside_the_engine(
    fenced_cluster: SlurmCluster, workdir: Path, nodes: int, request_: str
) -> None:
    cluster = fenced_cluster
    inner = "srun bash -c 'echo inner $SLURMD_NODENAME [$CUDA_VISIBLE_DEVICES] $SLURM_PROCID/$SLURM_NTASKS $(nproc)'\n"
    script = f"echo outer $SLURMD_NODENAME $(nproc)\n{trains(2, before='srun')}{inner}"
    sweep = submit(
        cluster, workdir, script, f"-N{nodes}", *request_.split(), array="0-2", stages=2, gres=f"gpu:{2 // nodes}"
    )
    assert sweep.job.wait() == 0, sweep.own_output
    for index in range(3):
        outer, joined, last = sweep.output(index).splitlines()
        _, node, cpus = outer.split()
        assert joined == "group  2", "the training process ran under srun while the engine held the devices"
        assert last == f"inner {node} [] 0/1 {cpus}"
    devices = [line.rsplit(" ", 1)[1] for line in sweep.folder.engine_log.read_text().splitlines()]
    assert sorted(devices) == (["0,1"] if nodes == 1 else ["0", "0"])
    rows = cluster.sacct_steps(sweep.job.id, "engine", "member_0", "member_1", "member_2")
    assert all(rows[name]["State"] == "COMPLETED" for name in rows)
    assert "gres/gpu" not in rows["member_0"]["AllocTRES"]


EAT = "import time\nb = []\nfor _ in range(40):\n    b.append(bytearray(b'x' * (10 << 20)))\n    time.sleep(0.1)\n"


@pytest.mark.parametrize("inner", ["", "srun "])
def test_only_the_member_beyond_its_memory_is_killed(cluster: SlurmCluster, workdir: Path, inner: str) -> None:
    check_memory(cluster, workdir, inner)


@pytest.mark.parametrize("inner", ["", "srun "])
def test_only_the_member_beyond_its_memory_is_killed_when_fenced(
    fenced_cluster: SlurmCluster, workdir: Path, inner: str
) -> None:
    check_memory(fenced_cluster, workdir, inner)


def check_memory(cluster: SlurmCluster, workdir: Path, inner: str) -> None:
    (workdir / "eat.py").write_text(EAT)
    train = trains(12, before=inner)
    script = f"""if [ $SLURM_ARRAY_TASK_ID = 1 ]; then exec {inner}"$PYTHON" eat.py; fi
{train}"""
    sweep = submit(cluster, workdir, script, "-c4", "--mem=1200", array="0-2", member_mem_mb=200)
    assert sweep.job.wait() != 0
    ended = sweep.ended()
    assert [ended[i]["state"] for i in (0, 2)] == ["COMPLETED", "COMPLETED"]
    assert [sweep.output(i) for i in (0, 2)] == ["group  1\n"] * 2
    assert ended[1]["code"] != 0
    rows = cluster.sacct_steps(sweep.job.id, "member_0", "member_1", "member_2", "engine")
    assert rows["engine"]["State"] == "COMPLETED"
    assert rows["member_0"]["State"] == rows["member_2"]["State"] == "COMPLETED"
    if not inner:
        # https://github.com/qiita-spots/qiita/issues/3521: Slurm's word beats the exit code
        assert ended[1]["state"] == "OUT_OF_MEMORY", ended
        assert "200 MiB" in ended[1]["reason"]
        assert "--member-mem" in ended[1]["reason"]


def test_a_member_cancelled_as_a_step(cluster: SlurmCluster, workdir: Path) -> None:
    script = "[ $SLURM_ARRAY_TASK_ID = 1 ] && exec srun sleep 300\n[ $SLURM_ARRAY_TASK_ID = 2 ] && exit 3\n" + trains(
        15
    )
    sweep = submit(cluster, workdir, script, "-c8", array="0-3")
    sweep.wait_for_output("group", 0, 3)
    wait_until(lambda: {"member_1", "sleep"} <= set(sweep.steps()), 30, "steps running")
    cluster.run("scancel", sweep.steps()["member_1"], user="root")
    assert sweep.job.wait() == 137
    ended = sweep.ended()
    assert {i: e["state"] for i, e in ended.items()} == {0: "COMPLETED", 1: "CANCELLED", 2: "FAILED", 3: "COMPLETED"}
    assert "CANCELLED" in sweep.output(1), "Slurm's message is in the member's own file, as with plain jobs"
    rows = cluster.sacct_steps(sweep.job.id, "member_0", "member_1", "member_2", "engine", "sleep")
    assert rows["member_1"]["State"].startswith("CANCELLED")
    assert rows["member_2"]["ExitCode"] == "3:0"
    assert rows["engine"]["State"] == "COMPLETED"


STUBBORN = "trap '' TERM\n"


@pytest.mark.parametrize("fenced", [False, True])
@pytest.mark.parametrize("stubborn", [False, True])
def test_scancel_ends_everything_within_kill_wait(
    request: pytest.FixtureRequest, workdir: Path, fenced: bool, stubborn: bool
) -> None:
    cluster: SlurmCluster = request.getfixturevalue("fenced_cluster" if fenced else "cluster")
    script = (STUBBORN if stubborn else "") + "sleep 300 &\n" + trains(300)
    sweep = submit(cluster, workdir, script, "-c4", "-N2", "-n2", array="0-3%2", stages=2)
    sweep.wait_for_output("group", 0, 1)
    before = sweep.processes()
    assert len(before) >= 8
    sweep.job.cancel()
    sweep.job.wait_for_state("CANCELLED", timeout=KILL_WAIT)
    wait_until(lambda: not sweep.processes(), KILL_WAIT, "no process of the job is left")
    ended = sweep.ended()
    assert set(ended) == {0, 1, 2, 3}
    assert all(e["state"] == "CANCELLED" for e in ended.values()), ended
    assert "Slurm ends the job" in sweep.own_output
    if not stubborn:  # else Slurm kills jap-run with them
        assert [e for e in sweep.folder.events("run") if e["kind"] == "sweep_ended"]


def test_requeue_runs_only_what_was_not_done(cluster: SlurmCluster, workdir: Path) -> None:
    # https://github.com/Lightning-AI/pytorch-lightning/issues/15022, https://github.com/MFlowCode/MFC/pull/1771
    script = (
        "echo try ${SLURM_RESTART_COUNT:-0}\n"
        "[ $SLURM_ARRAY_TASK_ID = 0 ] && exit 0\n"
        "[ ${SLURM_RESTART_COUNT:-0} = 1 ] && exit 5\n" + trains(300)
    )
    sweep = submit(cluster, workdir, script, "-c4", "--requeue", array="0-2", stages=2)
    sweep.wait_for_output("group", 1, 2)
    wait_until(lambda: 0 in sweep.ended(), 30, "member 0 ended")
    first = sweep.folder
    cluster.run("scontrol", "requeue", str(sweep.job.id), user="root")
    wait_until(lambda: not sweep.processes(), KILL_WAIT, "no process of the first attempt is left")
    states = {e["member"]: e["state"] for e in first.events("run") if e["kind"] == "member_ended"}
    assert states == {0: "COMPLETED", 1: "REQUEUED", 2: "REQUEUED"}
    sweep.job.wait_for_state("PENDING")
    release(cluster, sweep.job)
    assert sweep.job.wait(timeout=240) == 5
    assert sweep.folder.path.name == "1"
    assert sweep.output(0) == "try 0\n", "a member that was done is not touched"
    for index in (1, 2):
        text = sweep.output(index)
        assert text.startswith("try 0\ngroup  2\n"), "appended to, not truncated"
        assert text.endswith("try 1\n")
    assert {i: e["code"] for i, e in sweep.ended().items()} == {0: 0, 1: 5, 2: 5}
    assert sweep.folder.key_file.read_bytes() != first.key_file.read_bytes()


def release(cluster: SlurmCluster, job: Job) -> None:
    """Spare the test the two minutes for which a requeued job is held."""
    cluster.run("scontrol", "update", f"jobid={job.id}", "StartTime=now", user="root", check=False)


def test_job_time_limit(cluster: SlurmCluster, workdir: Path) -> None:
    sweep = submit(cluster, workdir, trains(300), "-c4", "-t", "1", array="0-1")
    assert sweep.job.wait(timeout=180) != 0
    assert sweep.job.state == "TIMEOUT"
    wait_until(lambda: not sweep.processes(), KILL_WAIT, "no process is left")
    assert {e["state"] for e in sweep.ended().values()} == {"TIMEOUT"}, sweep.ended()


def test_a_members_own_time_limit(cluster: SlurmCluster, workdir: Path) -> None:
    script = "[ $SLURM_ARRAY_TASK_ID = 0 ] && exit 0\nsleep 300"
    sweep = submit(cluster, workdir, script, "-c4", "-t", "10", array="0-1", member_time_min=1)
    assert sweep.job.wait(timeout=240) != 0
    assert {i: e["state"] for i, e in sweep.ended().items()} == {0: "COMPLETED", 1: "TIMEOUT"}
    rows = cluster.sacct_steps(sweep.job.id, "member_1")
    assert rows["member_1"]["State"] == "TIMEOUT"


HANDLES = """import os, signal, sys, time
for name in ("SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), lambda number, _: print("handled", signal.Signals(number).name, flush=True))
print("waiting", flush=True)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    time.sleep(0.1)
"""


@pytest.mark.parametrize("inner", ["", "srun ", "exec "])
def test_scancel_signal_reaches_members_and_kills_no_script(
    fenced_cluster: SlurmCluster, workdir: Path, inner: str
) -> None:
    # https://github.com/pytorch/pytorch/issues/154849, https://github.com/facebookincubator/submitit/pull/1697
    (workdir / "handles.py").write_text(HANDLES)
    script = f'trap "echo cleaning" EXIT\n{inner}"$PYTHON" handles.py 8\necho code $?\n'
    sweep = submit(fenced_cluster, workdir, script, "-c4", array="0-1")
    sweep.wait_for_output("waiting", 0, 1)
    sweep.job.cancel("--signal=USR1")
    sweep.wait_for_output("handled SIGUSR1", 0, 1)
    assert sweep.job.wait() == 0
    for index in (0, 1):
        text = sweep.output(index)
        assert text.count("handled SIGUSR1") == 1
        assert inner == "exec " or text.endswith("code 0\ncleaning\n")


@pytest.mark.parametrize("fenced", [False, True])
def test_warning_signal_for_batch_scripts(request: pytest.FixtureRequest, workdir: Path, fenced: bool) -> None:
    # https://github.com/goodfire-ai/spd/issues/740: #SBATCH --signal=B:USR2@60
    cluster: SlurmCluster = request.getfixturevalue("fenced_cluster" if fenced else "cluster")
    script = "trap 'echo warned; exit 9' USR2\necho waiting\nfor i in $(seq 300); do sleep 0.2; done\n"
    sweep = submit(cluster, workdir, script, "-c4", array="0-1")
    sweep.wait_for_output("waiting", 0, 1)
    sweep.job.cancel("--batch", "--signal=USR2")
    assert sweep.job.wait() == 9
    assert [sweep.output(i) for i in (0, 1)] == ["waiting\nwarned\n"] * 2


def test_engine_that_cannot_start(cluster: SlurmCluster, workdir: Path) -> None:
    script = "export STANDIN=exit\n" + trains(300)
    sweep = submit(cluster, workdir, script, "-c4", array="0-1")
    assert sweep.job.wait() in (2, 3)
    for index in (0, 1):
        assert "the stand-in cannot find its library" in sweep.output(index)
    assert "the stand-in cannot find its library" in sweep.own_output


def test_not_enough_devices_for_the_stages(cluster: SlurmCluster, workdir: Path) -> None:
    sweep = submit(cluster, workdir, trains(300), "-c4", "--gres=gpu:1", array="0", stages=2, gres="gpu:1")
    assert sweep.job.wait() in (2, 3)
    assert "need 2 GPUs, the allocation has 1" in sweep.output(0)


def test_two_jobs_on_one_node_never_share_a_port_or_socket(cluster: SlurmCluster, workdir: Path) -> None:
    # https://github.com/NVIDIA/enroot/issues/243, https://github.com/TorchDR/TorchDR/issues/249
    sweeps = []
    for name in ("a", "b"):
        folder = workdir / name
        folder.mkdir()
        shutil.chown(folder, cluster.user)
        sweeps.append(submit(cluster, folder, trains(3), "-c2", "-N2", "-n2", array="0-1", stages=2))
    assert [s.job.wait() for s in sweeps] == [0, 0]
    for sweep in sweeps:
        assert [sweep.output(i) for i in (0, 1)] == ["group  2\n"] * 2


TRAIN = """
import sys, torch
import slurm_jap as jap
index = int(sys.argv[1])
torch.set_num_threads(1)
torch.manual_seed(index)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (index + 1))
trainer = jap.prepare(model, optimizer, torch.nn.functional.cross_entropy, microbatches=2)
data = torch.Generator().manual_seed(7)
for _ in range(6):
    x, y = torch.randn(8, 6, generator=data), torch.randint(3, (8,), generator=data)
    print(float(trainer.step(x, target=y).loss).hex(), flush=True)
torch.save(trainer.state_dict(), f"{sys.argv[2]}_{index}.pt")
"""


def test_members_train_exactly_as_alone_with_their_stages_on_two_nodes(cluster: SlurmCluster, workdir: Path) -> None:
    import torch

    (workdir / "train.py").write_text(TRAIN)
    script = 'export OMP_NUM_THREADS=1\n"$PYTHON" train.py $SLURM_ARRAY_TASK_ID together\n'
    sweep = submit(
        cluster, workdir, script, "-N2", "-n2", "--gres=gpu:1", array="0-2", stages=2, gres="gpu:1", member_mem_mb=2000
    )
    assert sweep.job.wait(timeout=300) == 0, sweep.own_output + sweep.output(0) + sweep.output(1)
    for index in range(3):
        alone = cluster.run(
            cluster.python, "train.py", str(index), "alone", cwd=workdir, env={"OMP_NUM_THREADS": "1"}, timeout=120
        )
        assert sweep.output(index) == alone.stdout
        ours, theirs = (torch.load(workdir / f"{kind}_{index}.pt") for kind in ("together", "alone"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    rows = cluster.sacct_steps(sweep.job.id, "engine")
    assert (rows["engine"]["State"], rows["engine"]["NTasks"]) == ("COMPLETED", "2")


@pytest.mark.parametrize("how", ["cancel", "requeue"])
def test_the_real_engine_and_its_members_end_with_the_job(
    fenced_cluster: SlurmCluster, workdir: Path, how: str
) -> None:
    cluster = fenced_cluster
    (workdir / "train.py").write_text(TRAIN.replace("range(6)", "range(10**6)"))
    script = 'export OMP_NUM_THREADS=1\nexec "$PYTHON" train.py $SLURM_ARRAY_TASK_ID together\n'
    sweep = submit(
        cluster, workdir, script, "-c4", "--gres=gpu:2", "--requeue", array="0-1", stages=2, gres="gpu:2",
        member_mem_mb=None,
    )  # fmt: skip
    sweep.wait_for_output("0x", 0, 1)
    first = sweep.folder
    if how == "cancel":
        sweep.job.cancel()
    else:
        cluster.run("scontrol", "requeue", str(sweep.job.id), user="root")
    wait_until(lambda: not sweep.processes(), KILL_WAIT, "no process of the job is left")
    states = {e["member"]: e["state"] for e in first.events("run") if e["kind"] == "member_ended"}
    assert states == dict.fromkeys((0, 1), "CANCELLED" if how == "cancel" else "REQUEUED")
    sweep.job.cancel()
