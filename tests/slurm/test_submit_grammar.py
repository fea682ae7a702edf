"""What the installed sbatch itself makes of arrays, options and file names, beside what slurm_jap makes of them."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from slurm_harness import SlurmCluster
from support import wait_until

from slurm_jap import array_spec, filename_pattern, sbatch_options
from slurm_jap.errors import UsageError
from slurm_jap.sbatch_options import COMMAND_LINE, NotUnderstood, Submission

asked_of_slurm = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def script(workdir: Path) -> Path:
    path = workdir / "t.sh"
    path.write_text("#!/bin/sh\ntrue\n")
    path.chmod(0o755)
    return path


def max_array_size(cluster: SlurmCluster) -> int:
    found = re.search(r"MaxArraySize\s*=\s*(\d+)", cluster.run("scontrol", "show", "config").stdout)
    assert found
    return int(found[1])


def indices_of(text: str) -> list[int]:
    """``1,3-5%2`` or ``0-12:2`` as scontrol shows what remains of an array."""
    found: list[int] = []
    for part in text.partition("%")[0].split(","):
        ends, _, step = part.partition(":")
        first, _, last = ends.partition("-")
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return found


def as_slurm_sees_it(cluster: SlurmCluster, script: Path, text: str) -> tuple[list[int], str | None] | None:
    """Indices and throttle of a held array; None: refused."""
    done = cluster.run(
        "sbatch", "--hold", "--parsable", "-o", "/dev/null", f"--array={text}", script, cwd=script.parent, check=False
    )
    if done.returncode != 0:
        assert re.search("Invalid job array specification|parameter too long", done.stderr), done
        return None
    job_id = done.stdout.strip()
    try:
        shown = cluster.run("scontrol", "-o", "show", "job", job_id, env={"SLURM_BITSTR_LEN": "0"}).stdout
    finally:
        cluster.run("scancel", job_id)
    indices = re.search(r"ArrayTaskId=(\S+)", shown)
    throttle = re.search(r"ArrayTaskThrottle=(\S+)", shown)
    return indices_of(indices[1]) if indices else [], throttle[1] if throttle else None


def as_we_see_it(text: str, max_size: int) -> tuple[list[int], str | None] | None:
    try:
        spec = array_spec.parse(text, max_size=max_size)
    except UsageError:
        return None
    return list(spec.indices), str(spec.throttle) if spec.throttle and spec.indices else None


token = st.one_of(
    st.integers(0, 1200).map(str),
    st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda t: f"{min(t)}-{max(t)}"),
    st.tuples(st.integers(0, 40), st.integers(0, 1001), st.integers(0, 9)).map(lambda t: f"{t[0]}-{t[1]}:{t[2]}"),
    st.text("0123-:[]+ %ax", max_size=5),
)
specs = st.tuples(st.lists(token, min_size=1, max_size=4), st.sampled_from(["", "%1", "%4", "%0", "%", "%2x"])).map(
    lambda t: ",".join(t[0]) + t[1]
)


# https://github.com/TUM-DAML/seml/issues/47, https://github.com/rnabioco/sracha-rs/pull/81
@asked_of_slurm
@given(text=specs)
def test_any_specification_has_slurms_verdict_set_and_throttle(cluster: SlurmCluster, script: Path, text: str) -> None:
    assert as_we_see_it(text, max_array_size(cluster)) == as_slurm_sees_it(cluster, script, text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "-",
        "%3",
        "1,,2",
        "[1-3]",
        "1]",
        "1-",
        "3-1",
        "5:2",
        "a",
        "0-3:0",
        "1 ",
        " 1",
        "+1",
        "0x3",
        "1--3",
        "1-3:1000",
        "0-3,2-5",
        "1-3%2,7",
        "0-7:2,9-11:5",
        "1%4294967298",
        "99999999999999999999",
        "01-03",
        "10" + ",2" * 2047,
        "100" + ",2" * 2047,
    ],
)
def test_odd_specifications(cluster: SlurmCluster, script: Path, text: str) -> None:
    size = max_array_size(cluster)
    for spec in (text, text.replace("7", str(size - 1)), text.replace("7", str(size))):
        assert as_we_see_it(spec, size) == as_slurm_sees_it(cluster, script, spec)


@pytest.mark.parametrize("text", ["3-9:3", "1-2,5-9:4", "0-4:2,7%2", "4,1%1:3"])
def test_tasks_are_told_what_slurm_tells_them(cluster: SlurmCluster, workdir: Path, text: str) -> None:
    script = workdir / "env.sh"
    script.write_text("#!/bin/sh\nenv | grep ^SLURM_ARRAY_ | sort\n")
    job = cluster.sbatch(f"--array={text}", "-o", "%a.env", script, cwd=workdir)
    assert job.wait() == 0
    spec = array_spec.parse(text)
    for index in spec.indices:
        told = dict(line.split("=", 1) for line in (workdir / f"{index}.env").read_text().splitlines())
        assert told == spec.environment(job.id, index)


PATTERNS = [
    "%A_%a",
    "%j.x",
    "%J_%a",
    "%x-%a-%u",
    "%n_%t_%s_%a",
    "%4a.%3A",
    "%%a_%a",
    "%z_%a",
    "%4z_%a",
    "%12a_x",
    "%012a_y",
    "p%4%a",
    "end_%a%",
    "b_%b_%a",
    "%%%a_k",
    "%%%%a_%a",
    "\\%a_lit",
    "q\\\\%a",
    "%05%_%a",
    "%r%a",
    "% a%a",
    "%3x_%a",
    "noidx",
    "%4%%a_%a",
    "%é%a",
    "%2j-%2t.%a",
]


# https://github.com/karimknaebel/turm/issues/11, https://github.com/neilmunday/slurm-mail/issues/61
def test_file_names_are_those_that_slurm_makes(cluster: SlurmCluster, workdir: Path, script: Path) -> None:
    jobs = {}
    for number, pattern in enumerate([*PATTERNS, "%N_%a"]):
        folder = workdir / str(number)
        folder.mkdir()
        shutil.chown(folder, cluster.user)
        jobs[pattern] = folder, cluster.sbatch("-J", "na me", "-a", "3,12", "-o", folder / pattern, script, cwd=workdir)
    version = cluster.run("sbatch", "--version").stdout.split()[1].split(".")
    for pattern, (folder, job) in jobs.items():
        assert job.wait() == 0
        ids = {int(record["ArrayTaskId"]): int(record["JobId"]) for record in job.records()}
        nodes = {int(record["ArrayTaskId"]): record["BatchHost"] for record in job.records()}
        slurm = int(version[0]), int(version[1])

        def names(index: int, pattern: str = pattern, ids: dict[int, int] = ids, job_id: int = job.id) -> set[str]:
            # Until 25.05 %N is the machine's name, which all nodes of the test cluster share.
            node = socket.gethostname().partition(".")[0] if slurm < (25, 11) else nodes[index]  # noqa: B023
            return {
                filename_pattern.expand(
                    pattern,
                    job_id=ids[index],
                    array_job_id=job_id,
                    index=index,
                    job_name="na me",
                    user=cluster.user,
                    node=node,
                    slurm=slurm,  # noqa: B023
                )
            }

        expected = names(3) | names(12)
        found = wait_until(
            lambda f=folder, e=expected: set(os.listdir(f)) == e and e, 10, f"files of {pattern!r}: {expected}"
        )
        assert found == expected


VALUED = {"job-name": "J", "comment": "", "constraint": "C", "mail-user": "", "wckey": "", "reservation": ""}
text = st.text("ab c#'\"\\=-x:", min_size=0, max_size=8)


def spelled(name: str, value: str, form: int) -> list[str]:
    if form == 0 and VALUED[name]:
        return [f"-{VALUED[name]}", value]
    if form == 1:
        return [f"--{name}", value]
    return [f"--{name}={value}"]


option = st.tuples(st.sampled_from(sorted(VALUED)), text, st.integers(0, 2))


def shown_by_sbatch(
    cluster: SlurmCluster, script: Path, words: list[str], env: dict[str, str]
) -> dict[str, str] | None:
    """The options in force as ``sbatch -v`` lists them; None: refused."""
    done = cluster.run("sbatch", "-v", "--hold", *words, script, cwd=script.parent, env=env, check=False)
    if done.returncode == 0 and (job := re.search(r"Submitted batch job (\d+)", done.stdout)):
        cluster.run("scancel", job[1])
    if "defined options" not in done.stderr:
        return None
    return dict(re.findall(r"^sbatch: ([a-z-]+) *: (.*)$", done.stderr, re.MULTILINE))


@asked_of_slurm
@given(
    lines=st.lists(st.one_of(text, option), max_size=4),
    variables=st.dictionaries(
        st.sampled_from(["SBATCH_JOB_NAME", "SBATCH_CONSTRAINT", "SBATCH_WCKEY"]), text, max_size=2
    ),
    words=st.lists(option, max_size=3),
)
def test_the_options_in_force_are_those_that_sbatch_lists(
    cluster: SlurmCluster,
    script: Path,
    lines: list[str | tuple[str, str, int]],
    variables: dict[str, str],
    words: list[tuple[str, str, int]],
) -> None:
    directives = []
    for line in lines:
        if isinstance(line, str):
            directives.append(f"#SBATCH --comment={line}")
        else:
            directives.append("#SBATCH " + " ".join(sbatch_options.quote_for_directive(w) for w in spelled(*line) if w))
    batch = "\n".join(["#!/bin/sh", *directives, "true", ""])
    script.write_text(batch)
    argv = [word for one in words for word in spelled(*one)]
    shown = shown_by_sbatch(cluster, script, argv, variables)
    try:
        submission = Submission(
            script=tuple(sbatch_options.from_script(batch.encode())),
            environment=tuple(sbatch_options.from_environment(variables)),
            command_line=tuple(sbatch_options.parse_words(argv, COMMAND_LINE)[0]),
        )
    except NotUnderstood:
        assume(False)  # such a submission reaches sbatch unchanged
    ours = {name: given.value for name, given in submission.effective().items() if name in VALUED}
    assume(shown is not None)  # else sbatch refuses a value
    assert shown is not None
    assert {name: shown[name] for name in VALUED if name in shown} == ours


def test_the_table_knows_every_option_that_sbatch_helps_with(cluster: SlurmCluster) -> None:
    text = cluster.run("sbatch", "--help").stdout + cluster.run("sbatch", "--usage").stdout
    mentioned = set(re.findall(r"--([a-z][a-z-]+)\b", text)) - {"burst-buffer"}
    assert mentioned - sbatch_options.OPTIONS.keys() == set()


def test_options_take_arguments_exactly_as_the_installed_sbatch_says(cluster: SlurmCluster) -> None:
    version = tuple(map(int, cluster.run("sbatch", "--version").stdout.split()[1].split(".")[:2]))
    wrong, looked_at = {}, 0
    for name, option in sbatch_options.OPTIONS.items():
        if not option.since <= version <= (option.until or (99, 0)):
            continue
        looked_at += 1
        bare = cluster.run("sbatch", f"--{name}", check=False, input="").stderr
        with_argument = cluster.run("sbatch", f"--{name}=", check=False, input="").stderr
        argument = sbatch_options.OPTIONAL
        if "requires an argument" in bare:
            argument = sbatch_options.REQUIRED
        elif "doesn't allow an argument" in with_argument:
            argument = sbatch_options.NONE
        if argument != option.argument or "unrecognized" in bare:
            wrong[name] = (argument, bare)
    if version < (25, 11):
        wrong.pop("requeue", None)  # a flag until then; ours is the wider
    assert wrong == {}
    assert looked_at > 90
