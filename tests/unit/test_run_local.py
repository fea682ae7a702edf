"""The local launcher: members are the user's script with an array task's surroundings, and nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import standin
from support import wait_until

from slurm_jap import launch_local
from slurm_jap.carried import Carried
from slurm_jap.errors import UsageError
from slurm_jap.store import SweepDir, latest_attempt

HERE = Path(__file__).parent
TRAINS = f'exec "{sys.executable}" "{standin.__file__}" member {{seconds}}\n'


def events(folder: SweepDir, kind: str) -> list[dict]:
    return [e for e in folder.events("run") if e["kind"] == kind]


def run(
    workdir: Path, script: str, facts: dict | None = None, arguments: tuple[str, ...] = (), **options
) -> tuple[int, SweepDir, list[str]]:
    said: list[str] = []
    text = script if script.startswith("#!") else "#!/bin/bash\n" + script
    given = {"array": "0-3", "output": "o_%a", "stages": 2} | (facts or {})
    code = launch_local.run(
        Carried(**given), text.encode(), arguments, work_dir=workdir, job_name="name", progress=False, say=said.append,
        engine_seconds=options.pop("engine_seconds", 60.0), **options,
    )  # fmt: skip
    folder = latest_attempt(workdir, int(max(os.listdir(workdir / ".jap"), key=int)))
    assert folder is not None
    return code, folder, said


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Members that join claim this interpreter."""
    path = standin.write_engine(tmp_path)
    monkeypatch.setenv("STANDIN_ENGINE", str(path))
    return path


def session_members(marker: str) -> list[int]:
    """Processes whose environment names ``marker``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
                if marker.encode() in environment and (entry / "stat").read_text().split(") ")[1][0] != "Z":
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_members_are_array_tasks(tmp_path: Path) -> None:
    code, folder, said = run(
        tmp_path,
        'env -0 > env_$SLURM_ARRAY_TASK_ID; pwd; echo "$0|$1|$2|$#"; echo err >&2; exit $SLURM_ARRAY_TASK_ID',
        {"array": "1-7:3%2", "output": "out_%A_%2a_%x_%j", "error": "err_%a", "member_cpus": 3},
        ("a b", "$c"),
    )
    assert code == 7
    for index in (1, 4, 7):
        text = (tmp_path / f"out_1_0{index}_name_1").read_text().splitlines()
        assert text == [str(tmp_path), f"{folder.script}|a b|$c|2"]
        assert (tmp_path / f"err_{index}").read_text() == "err\n"
        raw = (tmp_path / f"env_{index}").read_bytes().split(b"\0")
        environment = dict(e.decode().split("=", 1) for e in raw if e)
        arrays = {k: v for k, v in environment.items() if k.startswith("SLURM_ARRAY_")}
        assert arrays == {
            "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": str(index), "SLURM_ARRAY_TASK_COUNT": "3",
            "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "7", "SLURM_ARRAY_TASK_STEP": "3",
        }  # fmt: skip
        assert environment["SLURM_JOB_ID"] == environment["JAP_JOB_ID"] == "1"
        assert environment["SLURM_JOB_NAME"] == "name"
        assert environment["SLURM_SUBMIT_DIR"] == str(tmp_path)
        assert environment["SLURM_CPUS_PER_TASK"] == "3"
        assert environment["CUDA_VISIBLE_DEVICES"] == ""
        assert "OMP_NUM_THREADS" not in environment or "OMP_NUM_THREADS" in os.environ
    ended = {e["member"]: (e["code"], e["state"]) for e in events(folder, "member_ended")}
    assert ended == {1: (1, "FAILED"), 4: (4, "FAILED"), 7: (7, "FAILED")}
    assert events(folder, "sweep_ended")[-1]["code"] == 7
    assert not events(folder, "engine_started"), "nobody joined: no engine"
    assert sum("ended with code" in line for line in said) == 3
    assert folder.read_manifest().throttle == 2


def test_no_variable_of_an_outer_job_or_sweep_reaches_a_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # https://github.com/goodfire-ai/spd/pull/955, https://github.com/snakemake/snakemake/issues/2230
    for name in (
        "SLURM_NTASKS",
        "SLURM_ARRAY_TASK_MIN",
        "SLURM_CPU_BIND",
        "SBATCH_PARTITION",
        "SRUN_DEBUG",
        "SLURM_STEP_ID",
    ):
        monkeypatch.setenv(name, "77")
    monkeypatch.setenv("JAP_MEMBER", "77")
    monkeypatch.setenv("JAP_CONTROL", "unix:/77")
    code, _, _ = run(tmp_path, "env", {"array": "0"})
    assert code == 0
    text = (tmp_path / "o_0").read_text()
    assert "=77" not in text
    assert "unix:/77" not in text


def test_array_throttle_and_at_once_are_honoured(tmp_path: Path) -> None:
    script = "mkdir r_$SLURM_ARRAY_TASK_ID; set -- r_*; echo $#; sleep 0.3; rmdir r_$SLURM_ARRAY_TASK_ID"
    for facts in ({"array": "0-5%2"}, {"array": "0-5", "at_once": 2}, {"array": "0-5%3", "at_once": 2}):
        code, _, _ = run(tmp_path, script, facts, starting_at_once=9)
        assert code == 0
        most = [int((tmp_path / f"o_{i}").read_text()) for i in range(6)]
        assert max(most) <= 2, most


def test_output_is_truncated_or_appended_to_as_asked(tmp_path: Path) -> None:
    for mode, expected in (("", "x\n"), ("append", "x\nx\n"), ("truncate", "x\n")):
        assert run(tmp_path, "echo x", {"array": "0", "open_mode": mode})[0] == 0
        assert (tmp_path / "o_0").read_text() == expected


def test_standard_input_is_the_file_asked_for(tmp_path: Path) -> None:
    (tmp_path / "in_5").write_text("five")
    assert run(tmp_path, "cat", {"array": "5", "input": "in_%a"})[0] == 0
    assert (tmp_path / "o_5").read_text() == "five"


def test_a_missing_input_fails_that_member_alone(tmp_path: Path) -> None:
    (tmp_path / "in_5").write_text("five")
    code, folder, _said = run(tmp_path, "cat", {"array": "5,6", "input": "in_%a"})
    assert code == 1
    assert (tmp_path / "o_5").read_text() == "five"
    assert "in_6" in {e["member"]: e for e in events(folder, "member_ended")}[6]["reason"]


@pytest.mark.parametrize("name", ["a 0", 'a"=0"', "a'; echo foo", "a\nb", "a%b\\c", "ä"])
def test_hostile_directory_names(tmp_path: Path, name: str, engine: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    code, _, _ = run(folder, TRAINS.format(seconds=0.1), {"array": "0-1"})
    assert code == 0, (folder / "o_0").read_text()


def test_a_signal_counts_as_128_plus_n(tmp_path: Path) -> None:
    code, folder, _ = run(tmp_path, "test $SLURM_ARRAY_TASK_ID = 1 && kill -9 $$; exit 3", {"array": "0-1"})
    assert code == 137
    ended = {e["member"]: (e["code"], e["state"]) for e in events(folder, "member_ended")}
    assert ended == {0: (3, "FAILED"), 1: (137, "FAILED")}


def test_a_members_own_time_limit(tmp_path: Path) -> None:
    script = "test $SLURM_ARRAY_TASK_ID = 1 || exit 0; trap '' TERM; while :; do sleep 0.1; done"
    launch_local_facts = {"array": "0-1", "member_time_min": 0.02}
    code, folder, _ = run(tmp_path, script, launch_local_facts, end_seconds=0.5)
    assert code == 137
    ended = {e["member"]: e["state"] for e in events(folder, "member_ended")}
    assert ended == {0: "COMPLETED", 1: "TIMEOUT"}


@pytest.mark.parametrize(
    ("script", "facts", "words"),
    [
        ("echo x", {}, ["#!"]),
        ("#!/bin/bash\n", {"array": "3-1"}, ["3-1"]),
        ("#!/bin/bash\n", {"array": ","}, ["names no member"]),
        ("#!/bin/bash\n", {"output": "no/such/%a"}, ["no/such", "mkdir -p"]),
        ("#!/bin/bash\n", {"error": "nowhere/%a"}, ["nowhere", "mkdir -p"]),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_left(tmp_path: Path, script: str, facts: dict, words: list[str]) -> None:
    given = {"array": "0-3", "output": "o_%a"} | facts
    with pytest.raises(UsageError) as caught:
        launch_local.run(Carried(**given), script.encode(), (), work_dir=tmp_path, job_name="x", progress=False)
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.rglob("*")) == []


def test_numbers_are_never_given_twice(tmp_path: Path) -> None:
    given = [launch_local.claim_job_id(tmp_path) for _ in range(3)]
    assert given == [1, 2, 3]


@pytest.mark.parametrize(
    "options",
    [
        "",
        "-n1",
        "-n 1 -N1-1 -c 4",
        "--ntasks=1 --gres gpu:1",
        "-Qu -J name",
        "--exclusive -K1 --cpu-bind=none",
        "--job-n x --",
    ],
)
def test_srun_inside_a_member_runs_in_place(tmp_path: Path, options: str) -> None:
    script = f"srun {options} bash -c 'echo \"$SLURM_ARRAY_TASK_ID $0 $1\"; exit 5' 'a b' -n9\necho $?"
    assert run(tmp_path, script, {"array": "3"})[0] == 0
    assert (tmp_path / "o_3").read_text() == "3 a b -n9\n5\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("-n4 true", "--ntasks=4: a member of a local sweep is one task"),
        ("--nodes 2 true", "--nodes=2"),
        ("-o log true", "--output does not work in a local sweep"),
        ("--no-such true", "unknown option --no-such"),
        ("--ntasks", "needs a value"),
        ("-n1", "no command"),
        ("no-such-program", "no-such-program: No such file"),
    ],
)
def test_srun_that_needs_a_cluster_is_one_line(tmp_path: Path, options: str, words: str) -> None:
    assert run(tmp_path, f"srun {options}\n[ $? = 2 ] || [ $? = 127 ]", {"array": "3"})[0] in (0, 1)
    text = (tmp_path / "o_3").read_text()
    assert text.startswith("jap: srun: ")
    assert text.count("\n") == 1
    assert words in text


# --- with an engine --------------------------------------------------------------------------------------------------


def test_members_join_one_engine_set(tmp_path: Path, engine: Path) -> None:
    code, folder, _ = run(tmp_path, TRAINS.format(seconds=0.3), {"array": "0-5", "groups": 2})
    assert code == 0
    for index in range(6):
        assert (tmp_path / f"o_{index}").read_text() == "group  2\n"
    assert [e["executable"] for e in events(folder, "engine_started")] == [str(engine)]
    assert [(e["code"], e["reason"]) for e in events(folder, "engine_ended")] == [(0, None)]
    assert not list(Path("/tmp").glob(f"jap-*/engine_*_{os.getpid()}"))


def test_a_script_may_train_twice_in_turn(tmp_path: Path, engine: Path) -> None:
    once = TRAINS.format(seconds=0.1).replace("exec ", "")
    code, _, _ = run(tmp_path, once + once, {"array": "0"})
    assert code == 0
    assert (tmp_path / "o_0").read_text() == "group  2\n" * 2


def test_training_that_outlives_its_script_is_told_to_end(tmp_path: Path, engine: Path) -> None:
    train = TRAINS.format(seconds=60).replace("exec ", "")
    script = f"setsid {train.strip()} &\nuntil grep -q group o_4; do sleep 0.1; done\n"
    code, _, _ = run(tmp_path, script, {"array": "4"})
    assert code == 0
    wait_until(lambda: "fault the script of member 4 has ended" in (tmp_path / "o_4").read_text(), 20, "told")


def test_prepare_called_twice_is_refused(tmp_path: Path, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_TWICE", "1")
    code, _, _said = run(tmp_path, TRAINS.format(seconds=0.1), {"array": "4"})
    assert code == 0, "the first connection trains on"
    text = (tmp_path / "o_4").read_text()
    assert "second refused prepare was called twice" in text
    assert "member 4" in text


def test_fewer_blocks_than_stages(tmp_path: Path, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_BLOCKS", "2")
    code, folder, _ = run(tmp_path, TRAINS.format(seconds=0.1), {"array": "3", "stages": 4})
    assert code == 2
    expected = "refused #JAP --stages=4: the model of member 3 has 2 blocks; type --jap-stages=2 or fewer"
    assert expected in (tmp_path / "o_3").read_text()
    assert not events(folder, "engine_started")


def test_members_must_share_interpreter_and_versions(tmp_path: Path, engine: Path) -> None:
    script = (
        "while [ $SLURM_ARRAY_TASK_ID != 0 ] && [ ! -s o_0 ]; do sleep 0.05; done\n"
        "[ $SLURM_ARRAY_TASK_ID = 1 ] && export STANDIN_ENGINE=/other/python\n"
        "[ $SLURM_ARRAY_TASK_ID = 2 ] && export STANDIN_TORCH=0.1\n" + TRAINS.format(seconds=2)
    )
    code, _, _ = run(tmp_path, script, {"array": "0-2"}, starting_at_once=3)
    assert code == 2
    assert "group" in (tmp_path / "o_0").read_text()
    assert "/other/python" in (tmp_path / "o_1").read_text()
    assert "use one interpreter" in (tmp_path / "o_1").read_text()
    assert "torch 0.1" in (tmp_path / "o_2").read_text()


@pytest.mark.parametrize(
    ("mode", "answer", "words"),
    [
        ("exit", "fault", ["code 1", "the stand-in cannot find its library", "engine.log"]),
        ("silent", "fault", ["not ready within 3 s", "JAP_ENGINE_TIMEOUT"]),
        ("fatal", "fault", ["the stand-in has no luck"]),
        ("die", "fault", ["stage 0", "SIGSEGV"]),
    ],
)
def test_an_engine_that_fails_is_told_to_every_member(
    tmp_path: Path, engine: Path, monkeypatch: pytest.MonkeyPatch, mode: str, answer: str, words: list[str]
) -> None:
    # https://github.com/pytorch/gloo/issues/520, https://github.com/pytorch/pytorch/issues/113281: others wait for ever
    monkeypatch.setenv("STANDIN", mode)
    code, folder, _said = run(
        tmp_path, TRAINS.format(seconds=60), {"array": "0-1"}, engine_seconds=3.0 if mode == "silent" else 60.0
    )
    assert code in (2, 3)
    for index in (0, 1):
        last = (tmp_path / f"o_{index}").read_text().splitlines()[-1]
        assert last.startswith((answer, "refused")), last
        assert all(word in last for word in words), last
    reasons = [e["reason"] for e in events(folder, "engine_ended")]
    assert len(reasons) == (1 if mode != "die" else 4), "a set that was ready is started again, but not for ever"
    assert all(word in reason for reason in reasons for word in words)
    assert not session_members(str(folder.path))


def test_an_interpreter_without_the_package_is_one_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "python"
    empty.write_text('#!/bin/sh\necho "$0: No module named slurm_jap" >&2; exit 1\n')
    empty.chmod(0o755)
    for executable, word in ((str(empty), "No module named slurm_jap"), ("/no/such/python", "/no/such/python")):
        monkeypatch.setenv("STANDIN_ENGINE", executable)
        code, _, _ = run(tmp_path, TRAINS.format(seconds=60), {"array": "0-1"})
        assert code in (2, 3)
        assert word in (tmp_path / "o_1").read_text()


def test_an_engine_that_ignores_stop_is_killed(tmp_path: Path, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN", "deaf")
    monkeypatch.setattr("slurm_jap.engine_set.STOP_SECONDS", 1.0)
    code, folder, _ = run(tmp_path, TRAINS.format(seconds=0.1), {"array": "0"})
    assert code == 0
    assert events(folder, "engine_ended")[0]["code"] == 137
    assert not session_members(str(folder.path))


# --- ending early ----------------------------------------------------------------------------------------------------

LAUNCH = """
import sys
from pathlib import Path
from slurm_jap import launch_local
from slurm_jap.carried import Carried
script = Path("script.sh").read_bytes()
sys.exit(launch_local.run(Carried(array="0-3%2", output="o_%a", stages=2), script, (), work_dir=Path.cwd(),
         job_name="x", progress=False, end_seconds=2.0))
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("stubborn", [False, True])
def test_a_signal_ends_everything(tmp_path: Path, engine: Path, signum: signal.Signals, stubborn: bool) -> None:
    trap = "trap '' INT TERM HUP\n" if stubborn else ""
    train = TRAINS.format(seconds=600).replace("exec ", "")
    (tmp_path / "script.sh").write_text(f"#!/bin/bash\n{trap}sleep 600 &\n{train}")
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCH], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(
            lambda: (tmp_path / "o_1").exists() and "group" in (tmp_path / "o_1").read_text(), 30, "members joined"
        )
        launcher.send_signal(signum)
        said = launcher.communicate(timeout=60)[1]
    finally:
        launcher.kill()
    assert launcher.returncode == 128 + signum
    assert f"received {signum.name}" in said
    folder = latest_attempt(tmp_path, 1)
    assert folder is not None
    assert not session_members(str(folder.path)), "processes left behind"
    ended = {e["member"]: (e["state"], e["reason"]) for e in events(folder, "member_ended")}
    assert set(ended) == {0, 1, 2, 3}
    assert ended[3][0] == "CANCELLED"
    assert "not started" in ended[3][1]
    assert events(folder, "sweep_ended")
    control = json.loads((folder.path / "manifest.json").read_text())
    assert control["launcher"] == "local"


def test_members_that_never_start_hold_up_nobody(tmp_path: Path) -> None:
    code, folder, _ = run(tmp_path, "cat", {"array": "0-19", "input": "no_such_%a"}, starting_at_once=2)
    assert code == 1
    assert len(events(folder, "member_ended")) == 20


def test_a_stop_reaches_members_that_wait_for_their_turn(tmp_path: Path) -> None:
    (tmp_path / "script.sh").write_text("#!/bin/bash\nsleep 600\n")
    text = LAUNCH.replace("0-3%2", "0-19").replace("end_seconds", "starting_at_once=2, end_seconds")
    launcher = subprocess.Popen([sys.executable, "-c", text], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: (tmp_path / "o_1").exists(), 30, "two members started")
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        launcher.kill()
    folder = latest_attempt(tmp_path, 1)
    assert folder is not None
    ended = {e["member"]: e["state"] for e in events(folder, "member_ended")}
    assert ended == dict.fromkeys(range(20), "CANCELLED")


def test_what_a_script_leaves_running_ends_with_it(tmp_path: Path) -> None:
    code, folder, _ = run(tmp_path, "sleep 600 &\nexit 0", {"array": "0"})
    assert code == 0
    wait_until(lambda: not session_members(str(folder.path)), 10, "background process gone")
