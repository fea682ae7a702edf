"""The test cluster is a real Slurm, and does what the other tests rely on."""

from __future__ import annotations

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
