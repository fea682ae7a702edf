"""jap-submit without a Slurm: faults of the user's own, and what it makes of an sbatch that answers oddly.

The stand-ins for Slurm's commands print what Slurm 22.05.8 printed; the real commands are asked in tests/slurm.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_jap import slurm, submit

JAP_SUBMIT = [sys.executable, "-m", "slurm_jap.submit"]

SCRIPT = "#!/bin/bash\n#SBATCH --array=0-3 --gres=gpu:1 -J sweep\n#JAP\necho $SLURM_ARRAY_TASK_ID\n"

SCONTROL = """#!/bin/sh
case "$*" in
*config*) cat <<X
DefMemPerCPU            = 100
MaxArraySize            = 1001
MaxMemPerNode           = UNLIMITED
SchedulerParameters     = sched_interval=2,max_array_tasks=500
SLURM_VERSION           = 22.05.8
X
;;
*partition*) cat <<X
PartitionName=normal Default=YES DefaultTime=01:00:00 MaxNodes=UNLIMITED MaxTime=1-00:00:00 JobDefaults=(null)
X
;;
*node*) echo "NodeName=n1 Arch=x86_64 CPUTot=8 CPUEfctv=8 Gres=gpu:fake:4 RealMemory=4000 OS=Linux 6.1 #1 SMP" ;;
esac
"""
SINFO = '#!/bin/sh\nfor n in 1 2 3 4; do echo "n$n|8|4000|gpu:fake:4|(null)"; done\n'
SQUEUE = '#!/bin/sh\n[ -s "$FAKE/queued" ] && printf \'91|%s arg\\n\' "$(cat "$FAKE/queued")"\nexit 0\n'
SBATCH = """#!/bin/sh
printf '%s\\n' "$@" >"$FAKE/argv"; env >"$FAKE/env"; echo x >>"$FAKE/calls"
for word; do case $word in */jap-submit-*) cp "$word" "$FAKE/script"; script=$word;; esac; done
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose bin/ has stand-ins for Slurm's commands, and with it a script; the working directory."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    for name, text in {"scontrol": SCONTROL, "sinfo": SINFO, "squeue": SQUEUE, "sbatch": SBATCH + "echo 90\n"}.items():
        command(tmp_path, name, text)
    (tmp_path / "t.sh").write_text(SCRIPT)
    return tmp_path


def command(folder: Path, name: str, text: str) -> None:
    path = folder / "bin" / name
    path.write_text(text)
    path.chmod(0o755)


def run(
    *arguments: str | os.PathLike[str], input: bytes | None = b"", **environment: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*JAP_SUBMIT, *map(os.fspath, arguments)],
        input=input,
        capture_output=True,
        timeout=60,
        env=os.environ | environment,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture
def refusal(fake: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run jap-submit in this process, which must refuse; returns its one line. Nothing reaches sbatch."""

    def never(*_: object) -> None:
        raise AssertionError("handed to sbatch")

    monkeypatch.setattr(os, "execve", never)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))

    def run_here(*arguments: str) -> str:
        code = submit.main(arguments)
        out, err = capfd.readouterr()
        return refused(subprocess.CompletedProcess(arguments, code, out, err), fake)

    return run_here


def refused(done: subprocess.CompletedProcess[str], folder: Path) -> str:
    """The one line of a refusal; nothing was submitted."""
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert not (folder / "calls").exists()
    [line] = done.stderr.splitlines()
    assert line.startswith("jap: ")
    return line


def test_the_answer_is_sbatchs(fake: Path) -> None:
    assert run("t.sh").stdout == "Submitted batch job 90\n"
    assert run("--parsable", "t.sh").stdout == "90\n"
    assert run("-Q", "t.sh").stdout == ""
    command(fake, "sbatch", SBATCH + "echo '75;he'\n")
    assert run("t.sh").stdout == "Submitted batch job 75 on cluster he\n"
    assert run("--parsable", "t.sh").stdout == "75;he\n"


# https://github.com/mlr-org/batchtools/issues/243, https://github.com/easybuilders/easybuild-framework/issues/4061
def test_banners_of_a_wrapped_sbatch_stay_off_standard_output(fake: Path) -> None:
    command(fake, "sbatch", SBATCH + "echo Welcome to 2 clusters; echo '  90  '; echo 13 jobs left; echo bye\n")
    assert run("--parsable", "t.sh").stdout == "90\n"


# https://github.com/DataBiosphere/toil/issues/5459: a time-out after the job was queued, and a second job
def test_a_submission_that_failed_after_queueing_is_found_and_not_repeated(fake: Path) -> None:
    failing = SBATCH + 'echo "$script" >"$FAKE/queued"\necho \'sbatch: error: Socket timed out\' >&2; exit 1\n'
    command(fake, "sbatch", failing)
    done = run("--parsable", "t.sh", "arg")
    assert (done.returncode, done.stdout) == (0, "91\n")
    assert "job 91 is in the queue" in done.stderr
    assert (fake / "calls").read_text() == "x\n"


def test_an_sbatch_that_hangs_is_given_up_and_the_queue_asked(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slurm, "SUBMIT_SECONDS", 0.5)
    command(fake, "sbatch", SBATCH + "exec sleep 300\n")
    assert submit.main(["t.sh"]) == 137
    assert "nothing was submitted" in capsys.readouterr().err
    command(fake, "sbatch", SBATCH + 'echo "$script" >"$FAKE/queued"; exec sleep 300\n')
    assert submit.main(["--parsable", "t.sh"]) == 0
    assert capsys.readouterr().out == "91\n"


@pytest.mark.parametrize("body", ["exit 3\n", "echo nothing to see\nexit 3\n", "kill -9 $$\n"])
def test_a_refused_submission_has_sbatchs_code_and_is_not_repeated(fake: Path, body: str) -> None:
    command(fake, "sbatch", SBATCH + body)
    done = run("t.sh")
    assert done.returncode == (137 if "kill" in body else 3)
    assert done.stdout == ""
    assert "nothing was submitted" in done.stderr
    assert (fake / "calls").read_text() == "x\n"


def test_an_sbatch_that_says_nothing_is_no_success(fake: Path) -> None:
    command(fake, "sbatch", SBATCH)
    done = run("--parsable", "t.sh")
    assert (done.returncode, done.stdout) == (1, "")


def test_the_code_of_wait_is_the_jobs(fake: Path) -> None:
    command(fake, "sbatch", SBATCH + "echo 90; exit 5\n")
    done = run("-W", "t.sh")
    assert (done.returncode, done.stdout) == (5, "Submitted batch job 90\n")
    assert "nothing was submitted" not in done.stderr


def test_the_job_carries_the_script_verbatim_and_the_temporary_file_is_gone(fake: Path) -> None:
    body = bytes(range(1, 256)).replace(b"\r\n", b"") + b"\n#JAP-USER-SCRIPT\n#SBATCH --time=9\n" + b"x" * 3_000_000
    (fake / "t.sh").write_bytes(SCRIPT.encode() + body)
    assert run("--hold", "t.sh", "a b", "").returncode == 0
    assert (fake / "script").read_bytes().endswith(b"#JAP-USER-SCRIPT\n" + SCRIPT.encode() + body)
    hold, parsable, script, *arguments, end = (fake / "argv").read_text().split("\n")
    assert (hold, parsable, arguments, end) == ("--hold", "--parsable", ["a b", ""], "")
    assert os.path.basename(script) == "t.sh"
    assert not os.path.exists(os.path.dirname(script))


def test_the_environment_of_an_outer_task_does_not_reach_sbatch(fake: Path) -> None:
    run("t.sh", SLURM_ARRAY_TASK_ID="7", SLURM_ARRAY_JOB_ID="1", SBATCH_OUTPUT="x", MINE="y")
    text = (fake / "env").read_text()
    assert "SLURM_ARRAY_" not in text
    assert "SBATCH_OUTPUT" not in text
    assert "MINE=y\n" in text


@pytest.mark.parametrize(
    ("lines", "arguments", "reason"),
    [
        ("#SBATCH --array=0-3", [], "no #JAP line"),
        ("#JAP", [], "it is not an array"),
        ("#SBATCH --array=0-3\n#JAP", ["--site-option=1"], "--site-option is not one of sbatch's own"),
        ("#SBATCH --array=0-3\n#JAP", ["-n1", ":", "-n1"], "a heterogeneous job"),
        ("#SBATCH --array=0-3\n#JAP\n#SBATCH hetjob", [], "a heterogeneous job"),
        ("#SBATCH --array=0-3 -J a (b)\n#JAP", [], "'(b)' is not an option"),
        ("#SBATCH --array=0-3 -o %j\n#JAP", [], "%j without %a"),
        ("#SBATCH --array=, \n#JAP", [], "names no task"),
    ],
)
def test_what_stays_plain_reaches_sbatch_as_it_came(fake: Path, lines: str, arguments: list[str], reason: str) -> None:
    (fake / "t.sh").write_text(f"#!/bin/bash\n{lines}\ntrue\n")
    done = run(*arguments, "t.sh", "--jap-explain", "x y")
    [line] = done.stderr.splitlines()
    assert line.startswith(("jap: plain array: ", "jap: plain job: "))
    assert reason in line
    assert done.stdout == "90\n"
    assert (fake / "argv").read_text().split("\n")[:-1] == [*arguments, "t.sh", "--jap-explain", "x y"]


def test_jap_0_and_wrap_stay_plain_and_our_words_are_left_out(fake: Path) -> None:
    done = run("--jap-stages", "2", "-N1", "--jap", "t.sh", JAP="0")
    assert "JAP=0" in done.stderr
    assert (fake / "argv").read_text() == "-N1\nt.sh\n"
    assert "--wrap" in run("--array=0-3", "--wrap=echo a && echo b", "--jap-groups=2").stderr
    assert (fake / "argv").read_text() == "--array=0-3\n--wrap=echo a && echo b\n"
    assert "is not one of sbatch's own" in run("--jap-stages=2", "--odd", "value", "t.sh", "--jap-local").stderr
    assert (fake / "argv").read_text() == "--odd\nvalue\nt.sh\n--jap-local\n"


def test_a_plain_script_on_standard_input_or_a_pipe_is_given_to_sbatch_again(fake: Path) -> None:
    command(fake, "sbatch", SBATCH + 'cat >"$FAKE/script"\n')
    text = SCRIPT.replace("#JAP\n", "").encode() + b"\0\xff"
    run(input=text)
    assert (fake / "script").read_bytes() == text
    command(fake, "sbatch", SBATCH + 'cat "$1" >"$FAKE/script"\n')
    subprocess.run(
        ["bash", "-c", f"exec {' '.join(JAP_SUBMIT)} <(grep -v JAP t.sh; printf 'more\\n') 2>/dev/null"],
        timeout=60,
        check=True,
    )
    assert (fake / "script").read_bytes() == SCRIPT.replace("#JAP\n", "").encode() + b"more\n"


def test_a_script_on_standard_input_is_coalesced(fake: Path) -> None:
    assert run("--jap", "-a", "0-3", input=b"#!/bin/sh\ntrue\n").stdout == "Submitted batch job 90\n"
    assert (fake / "script").read_bytes().endswith(b"#JAP-USER-SCRIPT\n#!/bin/sh\ntrue\n")
    assert (fake / "argv").read_text().splitlines()[-1].endswith("/sbatch")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "no batch script"),
        (["-N1"], "no batch script"),
        (["nowhere.sh"], "cannot read batch script 'nowhere.sh': No such file"),
        (["."], "cannot read batch script '.': Is a directory"),
        (["--jap-stage=2", "t.sh"], "unknown key '--jap-stage=2'; did you mean --jap-stages?"),
        (["--jap-locl", "t.sh"], "did you mean --jap-local?"),
        (["--jap-stages=0", "t.sh"], "--jap-stages=0: expected a whole number"),
        (["--jap-stages"], "--jap-stages needs a value"),
        (["--array=3-1", "t.sh"], "array specification '3-1': the range ends at 1"),
        (["--array=0-1001", "t.sh"], "MaxArraySize=1001"),
        (["--array=0-500", "t.sh"], "more than the 500 allowed here"),
        (["-o", "logs/%a.out", "t.sh"], "logs' does not exist: mkdir -p it first"),
        (["-e", "%a/err", "t.sh"], "/0' does not exist"),
        (["--jap-json", "t.sh"], "--jap-json goes with --jap-explain"),
        (["--jap-local", "--jap-explain", "t.sh"], "type one of them"),
        (["--jap-local", "-a", "", "t.sh"], "--jap-local runs the members of an array"),
        (["--jap-local", "--array=3-1", "t.sh"], "the range ends at 1"),
        (["--jap-local", "--wrap=true"], "--wrap has no batch script"),
        (["--jap-local", "-D", "nowhere", "t.sh"], "nowhere' does not exist"),
        (["--jap-local", "--odd", "t.sh"], "--odd is not one of sbatch's own"),
    ],
)
def test_faults_are_one_line_and_nothing_is_submitted(
    refusal: Callable[..., str], arguments: list[str], reason: str
) -> None:
    assert reason in refusal(*arguments)


def test_a_wrong_jap_line_is_refused(fake: Path, refusal: Callable[..., str]) -> None:
    (fake / "t.sh").write_text(SCRIPT.replace("#JAP", "#JAP --stagse=2"))
    assert "t.sh, line 3: unknown key '--stagse=2'; did you mean --stages?" in refusal("t.sh")


def test_an_unreadable_script_is_refused(fake: Path) -> None:
    (fake / "dir").mkdir()
    (fake / "dir" / "loop").symlink_to("loop")
    assert "cannot read batch script 'dir/loop'" in refused(run("dir/loop"), fake)
    os.mkfifo(fake / "pipe")
    writer = subprocess.Popen(["sh", "-c", "cat t.sh >pipe"])
    assert "is no regular file" in refused(run("./pipe"), fake)
    writer.wait(timeout=30)


def test_without_slurm_the_way_out_is_named(fake: Path) -> None:
    (fake / "bin" / "sbatch").unlink()
    assert "type --jap-local" in refused(run("t.sh", PATH=str(fake / "bin")), fake)


def test_a_slurm_that_does_not_answer_gets_the_array_as_it_is(fake: Path) -> None:
    command(
        fake,
        "scontrol",
        "#!/bin/sh\necho 'slurm_load_ctl_conf error: Unable to contact slurm controller' >&2; exit 1\n",
    )
    done = run("t.sh")
    assert "plain array: Slurm does not answer (scontrol show config: slurm_load_ctl_conf error" in done.stderr
    assert (fake / "argv").read_text() == "t.sh\n"


def test_the_administrators_limits_hold(fake: Path) -> None:
    (fake / "jap.conf").write_text("Python=/p\nPartition=normal MaxTime=5:00:00 MaxMembers=4\n")
    command(fake, "scontrol", SCONTROL.replace("SLURM_VERSION", f"SLURM_CONF = {fake}/slurm.conf\nSLURM_VERSION"))
    assert run("t.sh").stderr.startswith("jap: one job trains 4 members")
    assert "4 x 90 minutes" in run("-t", "90", "t.sh").stderr
    assert "5 members are more than MaxMembers=4 of jap.conf" in run("-a", "0-4", "t.sh").stderr


def test_explain_submits_nothing_and_works_without_slurm(fake: Path) -> None:
    done = run("--jap-explain", "-p", "normal", "t.sh", "x")
    assert done.returncode == 0
    assert "one job trains 4 members (1 stage x 1 group)" in done.stdout
    assert "#SBATCH --gres=gpu:1" in done.stdout
    told = json.loads(run("--jap-explain", "--jap-json", "--jap-groups=2", "t.sh", PATH="/nowhere").stdout)
    assert (told["coalesced"], told["members"], told["request"]["gpus_per_node"]) == (True, [0, 1, 2, 3], 2)
    assert "scontrol" in told["unknown"]
    (fake / "t.sh").write_text("#!/bin/sh\n#SBATCH --array=0-3\n")
    assert (
        run("--jap-explain", "t.sh").stdout
        == "jap: plain array: its script has no #JAP line (nor is there a --jap option)\n"
    )
    told = json.loads(run("--jap-explain", "--jap-json", "t.sh", "x").stdout)
    assert (told["coalesced"], told["sbatch"]) == (False, ["t.sh", "x"])
    assert not (fake / "calls").exists()


# https://github.com/nextflow-io/nextflow/issues/218, and submitit's names
@pytest.mark.parametrize("name", ["a 0", 'a"=0"', "a'; echo foo", "a\nb", "-x", "ü", "$HOME"])
def test_hostile_names_of_folders_and_scripts(fake: Path, name: str) -> None:
    (fake / name).mkdir()
    path = fake / name / name
    path.write_text(SCRIPT)
    done = run("-D", fake / name, "-o", fake / name / "%a.out", path, name)
    assert done.returncode == 0, done
    assert (fake / "argv").read_text().rstrip("\n").endswith(f"/{name}\n{name}")
    if name == "a\nb":  # an output pattern with a line break cannot be carried
        assert "plain array: it cannot be carried" in done.stderr or "cannot stand in a #SBATCH line" in done.stderr
    else:
        assert (fake / "script").read_bytes().endswith(SCRIPT.encode())


def test_help_loads_neither_torch_nor_rich() -> None:
    code = (
        "import sys; from slurm_jap.submit import main; main(['--help']);"
        "assert not {'torch', 'rich', 'numpy', 'cloudpickle'} & sys.modules.keys(), sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for word in ("--jap-stages=N", "--jap-local", "--jap-explain", "--jap-check-conf=FILE", "JAP=0"):
        assert word in done.stdout


def test_check_conf(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text("Python=/opt/python\nPartition=gpu MaxTime=2-00:00:00\n")
    bad.write_text("Python=/opt/python\nPartition=gpu MaxTme=60\n")
    done = run("--jap-check-conf", good)
    assert (done.returncode, done.stderr) == (0, "")
    done = run(f"--jap-check-conf={bad}")
    assert done.returncode == 2
    assert "MaxTime" in done.stderr


def test_local_members_run_here_with_their_own_environment_output_and_code(fake: Path) -> None:
    (fake / "sub").mkdir()
    (fake / "t.sh").write_text(
        "#!/bin/bash\n#SBATCH --array=1-5:2 --gres=gpu:2 -J sweep -o out/%x.%a -D sub\n#JAP\n"
        'echo "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT $PWD $*"\nexit $SLURM_ARRAY_TASK_ID\n'
    )
    (fake / "sub" / "out").mkdir()
    done = run("-Q", "--jap-local", "t.sh", "a b", "c", PATH="/usr/bin:/bin", SLURM_ARRAY_TASK_ID="77")
    assert done.returncode == 5, done
    for index in 1, 3, 5:
        assert (fake / "sub" / "out" / f"sweep.{index}").read_text() == f"{index}/3 {fake / 'sub'} a b c\n"
    assert not (fake / "calls").exists()
