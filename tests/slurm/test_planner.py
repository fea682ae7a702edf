"""On a real cluster: the first run of a script measures its network, and from then on jap-plan and jap-submit plan."""

from __future__ import annotations

import json
from pathlib import Path

from slurm_harness import SlurmCluster

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"


def test_a_run_leaves_what_the_next_submission_plans_with(
    cluster: SlurmCluster, workdir: Path, jap_submit: str
) -> None:
    (workdir / "train.py").write_bytes((DIGITS / "train.py").read_bytes())
    text = (DIGITS / "sweep.sh").read_text().replace("python train.py", f"exec {cluster.python} train.py")
    script = workdir / "sweep.sh"
    script.write_text(text.replace("#JAP --stages=2\n", "#JAP\n# of tests/slurm/test_planner.py\n"))
    words = ("--array=0-1", "-p", "normal", "--mem=700M", "--time=20", script, "--epochs", "1")
    jap_plan = Path(jap_submit).with_name("jap-plan")

    assert "by the first sizing rule" in cluster.run(jap_plan, *words, cwd=workdir).stdout
    job = cluster.sbatch("--jap-stages=2", *words, program=jap_submit, cwd=workdir)
    assert job.wait(timeout=200) == 0, (workdir / f"jap-{job.id}.out").read_text()

    planned = cluster.run(jap_plan, *words, cwd=workdir).stdout
    assert "Times are measured" in planned
    assert "not known: scontrol" not in planned
    explained = json.loads(cluster.run(jap_submit, "--jap-explain", "--jap-json", *words, cwd=workdir).stdout)
    (chosen,) = [row for row in explained["plan"]["candidates"] if row["chosen"]]
    # A member without GPUs that fits one device gains from no pipeline.
    assert (chosen["groups"], chosen["stages"]) == (1, 1)
    assert explained["carried"]["stages"] == 1
    assert 20 <= explained["request"]["time_min"] == chosen["time_minutes"]
