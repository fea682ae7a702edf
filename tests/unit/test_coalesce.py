"""Which arrays become one job, which stay plain, and why."""

from __future__ import annotations

import pytest

from slurm_jap import array_spec, carried, coalesce, launch, resources, sbatch_options
from slurm_jap.coalesce import Coalesced, Plain
from slurm_jap.jap_options import JapOptions
from slurm_jap.resources import Limits, NodeClass
from slurm_jap.sbatch_options import COMMAND_LINE, Submission

LIMITS = Limits(default_time_min=60, node_classes=(NodeClass(count=4, cpus=16, memory_mb=16_000, gpus={"a": 4}),))


def submission(text: str, argv: list[str], environment: dict[str, str]) -> Submission:
    return Submission(
        script=tuple(sbatch_options.from_script(text.encode())),
        environment=tuple(sbatch_options.from_environment(environment)),
        command_line=tuple(sbatch_options.parse_words(argv, COMMAND_LINE)[0]),
    )


def decided(
    *lines: str,
    body: str = "true",
    argv: list[str] | None = None,
    environment: dict[str, str] | None = None,
    asked: JapOptions | None = None,
) -> Coalesced:
    text = "\n".join(("#!/bin/sh", *lines, body, ""))
    given = submission(text, argv or [], environment or {})
    spec = array_spec.parse(given.effective()["array"].value or "")
    return coalesce.decide(given, text.encode(), "t.sh", asked or JapOptions(), spec, LIMITS, (22, 5))


ARRAY = "#SBATCH --array=0-3"


@pytest.mark.parametrize(
    ("lines", "body", "reason"),
    [
        (["#SBATCH -o %j.out"], "true", r"--output=%j\.out has %j without %a"),
        (["#SBATCH -e %J"], "true", "%j without %a"),
        ([], "python t.py --out runs/$SLURM_JOB_ID", "SLURM_JOB_ID"),
        ([], "mkdir ${SLURM_JOBID}", "SLURM_JOB_ID"),
        (["#SBATCH --exclusive"], "true", "--exclusive gives every task nodes"),
        (["#SBATCH -d aftercorr:7"], "true", "aftercorr"),
        (["#SBATCH -p a,b"], "true", "several partitions"),
        (["#SBATCH -M all"], "true", "several clusters"),
        (["#SBATCH -L matlab:1"], "true", "licenses"),
        (["#SBATCH --signal=USR1@60"], "true", "--signal without B:"),
        (["#SBATCH --bb=x"], "true", "burst buffer"),
        (["#SBATCH --container=/x"], "true", "container"),
        (["#SBATCH --gres=gpu:a:1,gpu:b:1"], "true", "several types"),
        ([], "#PBS -N x", "#PBS"),
    ],
)
def test_reasons_to_stay_plain(lines: list[str], body: str, reason: str) -> None:
    with pytest.raises(Plain, match=reason):
        decided(ARRAY, *lines, body=body)


def test_ids_may_be_shared_on_request_and_comments_do_not_count() -> None:
    shared = JapOptions(shared_job_id=True)
    assert decided(ARRAY, "#SBATCH -o %j.out", body="echo $SLURM_JOB_ID", asked=shared).facts.output == "%j.out"
    assert len(decided(ARRAY, body="# SLURM_JOB_ID\necho $SLURM_ARRAY_JOB_ID").spec) == 4
    assert decided(ARRAY, "#SBATCH -o %j_%a.out").facts.output == "%j_%a.out"


def test_options_of_the_script_stay_in_force_and_ours_replace_theirs() -> None:
    job = decided(
        ARRAY,
        '#SBATCH -J "my job" --mem=1G --gres=gpu:2 -c 2 -t 30 -e err/%a -i in/%a',
        "#SBATCH --mail-type=END -A acc",
        argv=["-p", "gpu", "-o", "logs/%A_%a", "--parsable", "-W", "--time=20"],
    )
    assert job.directives == (
        '-J "my job"',
        "--mail-type=END",
        "-A acc",
        "--output=logs/jap-%j.out",
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=10",
        "--gres=gpu:2",
        "--mem=5120M",
        "--time=80",
        '"--comment=jap: 4 members (0-3), 2 stages x 1 group"',
    )
    assert job.command_line == ("-p", "gpu", "-W")
    assert job.facts == carried.Carried(
        array="0-3",
        output="logs/%A_%a",
        error="err/%a",
        input="in/%a",
        script_name="t.sh",
        stages=2,
        groups=1,
        member_cpus=2,
        member_mem_mb=1024,
        gres="gpu:2",
        at_once=4,
    )


def test_the_bound_on_device_memory_is_carried() -> None:
    facts = decided(ARRAY, asked=JapOptions(memory_per_device=2048)).facts
    assert facts.memory_per_device_mb == 2048
    request = launch.EngineRequest(executable="python", cwd="/", environment={"JAP_DEVICE_MEMORY": "1", "A": "b"})
    assert launch.engine_environment({}, request, {}, facts) == {"JAP_DEVICE_MEMORY": str(2 << 30), "A": "b"}
    assert launch.engine_environment({}, request, {}, decided(ARRAY).facts) == {"A": "b"}


def test_a_comment_of_the_users_own_is_kept() -> None:
    assert not any("jap:" in line for line in decided(ARRAY, argv=["--comment=mine"]).directives)


def test_memory_given_by_a_variable_yields() -> None:
    job = decided(ARRAY, "#SBATCH --mem-per-cpu=200", environment={"SBATCH_MEM_PER_NODE": "9G"})
    assert job.request.member_memory_mb == 200
    with pytest.raises(Plain, match="exclude each other"):
        decided(ARRAY, "#SBATCH --mem-per-cpu=200", argv=["--mem=1G"])


@pytest.mark.parametrize(
    ("pattern", "own"),
    [
        ("", "jap-%j.out"),
        ("logs/%a.out", "logs/jap-%j.out"),
        ("/a/%a", "/a/jap-%j.out"),
        ("/%a", "/jap-%j.out"),
        ("/dev/null", "jap-%j.out"),
        ("none", "jap-%j.out"),
        ("x\\y/%a", "xy/jap-%j.out"),
    ],
)
def test_our_own_output_lies_beside_the_members(pattern: str, own: str) -> None:
    assert coalesce.own_output(pattern) == own


# https://github.com/goodfire-ai/spd/pull/955: what the submitting shell inherited reached the tasks
def test_the_environment_of_a_submission_forgets_the_outer_task_and_our_options() -> None:
    outer = {
        "HOME": "/h",
        "SLURM_ARRAY_TASK_ID": "5",
        "SLURM_ARRAY_JOB_ID": "1",
        "SBATCH_ARRAY_INX": "0-3",
        "SBATCH_OUTPUT": "x",
        "SBATCH_MEM_PER_CPU": "1",
        "SBATCH_PARTITION": "p",
        "SLURM_JOB_ID": "9",
        "SLURM_HOSTFILE": "/site/hosts",
    }
    kept = {"HOME": "/h", "SBATCH_PARTITION": "p", "SLURM_JOB_ID": "9"}
    assert coalesce.environment_for_sbatch(outer) == kept | {"SLURM_HOSTFILE": "/site/hosts"}
    member = outer | {"JAP_MEMBER": "3", "JAP_SWEEP_DIR": "/s", "SLURM_OVERLAP": "1"}
    assert coalesce.environment_for_sbatch(member) == kept
    assert coalesce.environment_to_hand_on(outer) == outer


KEPT = """
    account acctg-freq array batch begin chdir cluster-constraint clusters comment consolidate-segments constraint
    context contiguous cpu-freq deadline delay-boot dependency distribution exclude export export-file extra
    get-user-env gpu-freq gres-flags hint hold ignore-pbs job-name kill-on-invalid-dep mail-type mail-user
    mcs-label mem-bind network nice no-kill no-requeue nodefile nodelist oom-kill-step open-mode oversubscribe
    parsable partition power prefer priority profile propagate qos reboot requeue reservation resv-ports segment
    signal spread-job spread-segments stepmgr switches test-only tmp use-min-nodes wait wait-all-nodes wckey"""
"""Options that mean the same for the coalesced job as for each task."""


def test_every_option_is_kept_replaced_refused_or_sbatchs_own_business() -> None:
    """A new option of sbatch's must be thought about before arrays with it are coalesced."""
    kept = KEPT.split()
    commands = sbatch_options.COMMAND_LINE_ONLY | {"autocomplete"}
    known = coalesce.OURS | resources.UNCLEAR | coalesce._REASONS.keys() | commands | set(kept)
    assert sbatch_options.OPTIONS.keys() - sbatch_options.SYNONYMS.keys() == known
