"""What runs first in a step: files, environment, signals, and an end like the script's. No Slurm is needed for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import wait_until

from slurm_jap import step

HANDLES = """import os, signal, time
signal.signal(signal.SIGUSR1, lambda *_: print("python handled", flush=True))
print("waiting", flush=True)
end = time.monotonic() + 60
while time.monotonic() < end and not os.path.exists("over"):
    time.sleep(0.02)
"""


def start(
    tmp_path: Path, script: str, *arguments: str, shebang: str = "#!/bin/bash", **orders: object
) -> subprocess.Popen[bytes]:
    (tmp_path / "script").write_text(f"{shebang}\n{script}\n")
    (tmp_path / "script").chmod(0o700)
    given = {
        "role": "member", "forward": True, "append": False, "input": "/dev/null", "output": str(tmp_path / "out"),
        "error": None, "slurm": {"SLURM_JOB_ID": "5"}, "unset": ["GONE"], "set": {"SLURM_ARRAY_TASK_ID": "3"},
    }  # fmt: skip
    environment = {
        "PATH": os.environ["PATH"], "GONE": "1", "KEPT": "1", "SLURM_STEP_ID": "9", "SLURM_CPU_BIND": "quiet",
        "PMI_RANK": "0", "SLURMD_NODENAME": "n7", step.ORDERS: json.dumps(given | orders),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-I", "-S", step.__file__, str(tmp_path / "script"), *arguments],
        cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def output(tmp_path: Path) -> str:
    return (tmp_path / "out").read_text() if (tmp_path / "out").exists() else ""


def test_environment_files_and_arguments(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("hello")
    (tmp_path / "out").write_text("older\n")
    script = (
        'cat; echo; echo "$1|$2"; echo err >&2; [ $SLURM_TASK_PID = $$ ]; echo $?; env | grep -v -e ^_ -e ^SHLVL | sort'
    )
    process = start(tmp_path, script, "a b", "$x", input=str(tmp_path / "in"), error=str(tmp_path / "err"))
    assert finish(process) == (0, b"begun\n", b"")
    assert (tmp_path / "err").read_text() == "err\n"
    lines = output(tmp_path).splitlines()
    assert lines[:3] == ["hello", "a b|$x", "0"]
    environment = dict(line.split("=", 1) for line in lines[3:])
    assert environment.pop("SLURM_TASK_PID").isdigit()
    assert environment == {
        "PATH": os.environ["PATH"], "KEPT": "1", "PWD": str(tmp_path),
        "SLURM_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "SLURMD_NODENAME": "n7",
    }  # fmt: skip


def test_append(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("older\n")
    assert finish(start(tmp_path, "echo newer", append=True))[0] == 0
    assert output(tmp_path) == "older\nnewer\n"


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    code, _, err = finish(start(tmp_path, "echo x", output=str(tmp_path / "no" / "out")))
    assert code == 1
    assert err.decode() == f"jap: cannot open {tmp_path}/no/out: No such file or directory\n"


def test_a_script_that_cannot_be_executed(tmp_path: Path) -> None:
    process = start(tmp_path, "echo x", shebang="#!/no/such/shell")
    assert finish(process)[0] == 126
    assert "cannot execute the batch script" in output(tmp_path)


@pytest.mark.parametrize("code", [0, 1, 42, 255])
def test_exit_codes(tmp_path: Path, code: int) -> None:
    assert finish(start(tmp_path, f"exit {code}"))[0] == code


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGSEGV", "SIGUSR1", "SIGPIPE"])
def test_it_ends_by_the_signal_that_ended_the_script(tmp_path: Path, name: str) -> None:
    number = getattr(signal, name)
    assert finish(start(tmp_path, f"kill -{int(number)} $$"))[0] == -number


def test_dispositions_are_the_scripts_own(tmp_path: Path) -> None:
    # Python ignores SIGPIPE; a script that inherited that would never end "yes | head"
    assert finish(start(tmp_path, "grep -e SigIgn -e SigBlk /proc/self/status"))[0] == 0
    blocked, ignored = (int(line.split()[1], 16) for line in output(tmp_path).splitlines())
    pythons = sum(1 << (number - 1) for number in (signal.SIGPIPE, signal.SIGXFSZ))
    ours = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("SigIgn"))
    assert blocked == 0
    assert ignored == int(ours.split()[1], 16) & ~pythons


def test_the_end_of_the_job_reaches_the_script(tmp_path: Path) -> None:
    process = start(tmp_path, "trap 'echo ended; exit 7' TERM; echo waiting; while :; do sleep 0.05; done")
    wait_until(lambda: "waiting" in output(tmp_path), 30)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 7
    assert output(tmp_path) == "waiting\nended\n"


@pytest.mark.parametrize("start_with", ["", "trap 'echo cleaning' EXIT\n", "trap 'echo bash handled' USR1\n"])
def test_other_signals_reach_those_that_handle_them_and_no_shell(tmp_path: Path, start_with: str) -> None:
    (tmp_path / "handles.py").write_text(HANDLES)
    process = start(tmp_path, f'{start_with}"{sys.executable}" handles.py\necho code $?')
    wait_until(lambda: "waiting" in output(tmp_path), 30)
    process.send_signal(signal.SIGUSR2)  # nobody handles it
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: "python handled" in output(tmp_path), 30)
    (tmp_path / "over").touch()
    assert finish(process)[0] == 0
    assert output(tmp_path).startswith("waiting\npython handled\ncode 0\n")
    assert "bash handled" not in output(tmp_path)


def test_nothing_is_passed_on_where_slurm_signals_everybody(tmp_path: Path) -> None:
    process = start(tmp_path, "trap 'echo ended' TERM; sleep 60 & echo waiting $!; sleep 1; echo done", forward=False)
    wait_until(lambda: "waiting" in output(tmp_path), 30)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 0
    assert "ended" not in output(tmp_path)
    left = int(output(tmp_path).split()[1])
    wait_until(lambda: not Path(f"/proc/{left}").exists() or "Z" in Path(f"/proc/{left}/stat").read_text(), 10)


def test_a_signal_for_the_script_comes_as_a_line(tmp_path: Path) -> None:
    process = start(tmp_path, "trap 'echo warned' USR1; trap 'exit 9' USR2; echo waiting; while :; do sleep 0.05; done")
    wait_until(lambda: "waiting" in output(tmp_path), 30)
    assert process.stdin is not None
    process.stdin.write(b"10\n")
    process.stdin.flush()
    wait_until(lambda: "warned" in output(tmp_path), 30)
    process.stdin.write(b"12\n")
    assert finish(process)[0] == 9


def test_it_outlives_the_end_of_its_input(tmp_path: Path) -> None:
    process = start(tmp_path, "echo waiting; sleep 0.5; exit 4")
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = None
    assert finish(process)[0] == 4


def test_the_engine_is_shielded_from_its_first_moment(tmp_path: Path) -> None:
    orders = {"role": "engine", "cwd": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-I", "-S", step.__file__, "/bin/bash", "-c",
         "pwd; echo $JAP_NODE; env | grep _jap; for s in TERM INT HUP USR1 USR2; do kill -$s $$; done; echo alive"],
        env={step.ORDERS: json.dumps(orders), "SLURMD_NODENAME": "n3"}, capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.decode().splitlines() == [str(tmp_path), "n3", "alive"]


def test_an_engine_whose_interpreter_is_missing(tmp_path: Path) -> None:
    environment = {step.ORDERS: json.dumps({"role": "engine", "cwd": str(tmp_path)})}
    command = [sys.executable, "-I", "-S", step.__file__, "/no/python", "-m", "x"]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert b"jap: cannot start the engine with /no/python" in done.stderr
