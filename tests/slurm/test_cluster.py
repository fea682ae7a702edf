"""The test cluster is a real Slurm, and does what the other tests rely on."""

from __future__ import annotations

import re
from pathlib import Path

from slurm_harness import SlurmCluster


def test_four_nodes_are_idle(cluster: SlurmCluster) -> None:
    answer = cluster.run("sinfo", "-h", "-N", "-p", "normal", "-o", "%N %t %G").stdout.split()
    expected = [word for node in cluster.nodes for word in (node, "idle", "gpu:fake:4")]
    assert answer == expected
    assert len(cluster.nodes) >= 4


def test_plain_array_gets_gpus_and_is_accounted(cluster: SlurmCluster, workdir: Path) -> None:
    script = workdir / "a.sh"
    script.write_text("#!/bin/bash\necho $SLURM_ARRAY_TASK_ID:$CUDA_VISIBLE_DEVICES\nexit $SLURM_ARRAY_TASK_ID\n")
    job = cluster.sbatch("--array=0-2", "--gres=gpu:2", "-o", "%a.out", script, cwd=workdir)
    assert job.wait() == 2
    for index in range(3):
        shown, gpus = (workdir / f"{index}.out").read_text().strip().split(":")
        assert int(shown) == index
        assert len(gpus.split(",")) == 2
    rows = {row["JobID"]: row for row in cluster.sacct_rows(job.id)}
    for index in range(3):
        row = rows[f"{job.id}_{index}"]
        assert row["ExitCode"] == f"{index}:0"
        assert "gres/gpu=2" in row["AllocTRES"]


def test_plugin_is_loaded_and_enabled_in_its_partition(cluster: SlurmCluster, workdir: Path) -> None:
    script = workdir / "sweep.sh"
    script.write_text("#!/bin/bash\n#JAP --stages=2\necho $SLURM_ARRAY_TASK_ID\n")
    for partition, coalesced in (("jap", True), ("normal", False)):
        job = cluster.sbatch("--hold", "--array=0-3", "--gres=gpu:1", "-p", partition, script, cwd=workdir)
        assert ("ArrayTaskId" in job.info()) != coalesced
        text = cluster.run("scontrol", "write", "batch_script", str(job.id), "-").stdout
        assert ("#JAP-USER-SCRIPT" in text) == coalesced
        assert text.rstrip("\n").endswith(script.read_text().rstrip("\n"))
        job.cancel()
    assert "jap: not in use" not in (cluster.log / "slurmctld.log").read_text()


def test_step_beyond_its_memory_is_killed_alone(cluster: SlurmCluster, workdir: Path) -> None:
    check_memory_kill(cluster, workdir)


def test_fenced_step_beyond_its_memory_is_killed_alone(fenced_cluster: SlurmCluster, workdir: Path) -> None:
    check_memory_kill(fenced_cluster, workdir)


def check_memory_kill(cluster: SlurmCluster, workdir: Path) -> None:
    (workdir / "eat.py").write_text(
        "import time\nblocks = []\n"
        "for _ in range(40):\n    blocks.append(bytearray(b'x' * (20 << 20)))\n    time.sleep(0.1)\n"
    )
    (workdir / "live.py").write_text(
        "import os, time\nend = time.monotonic() + 60\n"
        "while not os.path.exists('greedy_has_ended') and time.monotonic() < end:\n    time.sleep(0.1)\n"
    )
    script = workdir / "m.sh"
    script.write_text(
        f"""#!/bin/bash
step() {{ name=$1; shift; srun --overlap -n1 -N1 --job-name=$name --cpu-bind=none "$@" ; }}
step modest --mem=100 {cluster.python} live.py & modest=$!
step greedy --mem=200 {cluster.python} eat.py & greedy=$!
wait $greedy; echo greedy $?
touch greedy_has_ended
wait $modest; echo modest $?
"""
    )
    job = cluster.sbatch("--mem=1000", "-o", "job.out", script, cwd=workdir)
    assert job.wait() == 0
    codes = dict(re.findall(r"^(greedy|modest) (\d+)$", (workdir / "job.out").read_text(), re.MULTILINE))
    assert codes["modest"] == "0"
    assert codes["greedy"] != "0"
    steps = cluster.sacct_steps(job.id, "modest", "greedy")
    assert steps["modest"]["State"] == "COMPLETED"
    assert steps["greedy"]["State"].split()[0] in ("OUT_OF_MEMORY", "CANCELLED", "FAILED")


def test_fence_hides_the_gpus_of_others(fenced_cluster: SlurmCluster, workdir: Path) -> None:
    script = workdir / "g.sh"
    script.write_text(
        f"""#!/bin/bash
for i in 0 1 2 3; do
  # An absent driver answers ENXIO; the fence answers EPERM.
  if head -c1 {fenced_cluster.base}/dev/gpu$i 2>&1 | grep -q 'not permitted'; then echo hidden; else echo open; fi
done
head -c1 /dev/zero >/dev/null && echo "null works"
"""
    )
    job = fenced_cluster.sbatch("--gres=gpu:1", "-o", "job.out", script, cwd=workdir)
    assert job.wait() == 0
    *gpus, last = (workdir / "job.out").read_text().splitlines()
    assert sorted(gpus) == ["hidden", "hidden", "hidden", "open"]
    assert last == "null works"
