"""jap-status on sweep directories made by hand through ``store``, read through the command's own entry point."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_jap import status, store
from slurm_jap.status_view import SweepReader, Watcher
from slurm_jap.store import SweepDir
from slurm_jap.sweep import Member, MemberState, Sweep


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees, or leaves, a pointer in the real home; the working directory holds no sweep."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


def make_sweep(root: Path, job_id: int = 62, *, members: int = 3, attempt: int = 0, **fields: Any) -> SweepDir:
    directory = SweepDir.create(SweepDir.attempt_path(root, job_id, attempt))
    values: dict[str, Any] = {
        "job_id": job_id,
        "attempt": attempt,
        "job_name": "digits",
        "launcher": "local",
        "array": f"0-{members - 1}",
        "throttle": None,
        "members": tuple(Member(index=i, output=str(root / f"digits_{job_id}_{i}.out")) for i in range(members)),
        "script": str(directory.script),
        "arguments": (),
        "work_dir": str(root),
        "stages": 2,
        "groups": 1,
    }
    directory.write_manifest(Sweep(**{**values, **fields}))
    return directory


def run_event(directory: SweepDir, kind: str, **fields: Any) -> None:
    writer = directory.writer("run")
    writer.write(kind, **fields)
    writer.close()


def own_event(directory: SweepDir, index: int, kind: str, **fields: Any) -> None:
    writer = directory.writer(store.member_writer(index))
    writer.write(kind, **fields)
    writer.close()


def finish(directory: SweepDir, codes: list[int]) -> None:
    for index, code in enumerate(codes):
        run_event(directory, "member_started", member=index, node="n1", pid=1)
        state = "COMPLETED" if code == 0 else "FAILED"
        run_event(directory, "member_ended", member=index, code=code, state=state, reason=None)
    run_event(directory, "sweep_ended", code=max(codes))


def json_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert status.main([*argv, "--json"]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    document: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=refuse)
    return document


def test_every_state_and_value_of_a_running_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = make_sweep(tmp_path, members=5)
    run_event(directory, "sweep_started", node="n1")
    for index in range(4):
        run_event(directory, "member_started", member=index, node="n1", pid=100 + index)
    own_event(directory, 0, "joined", argv=["train.py", "--lr", "0.1"], group=0, stages=2)
    own_event(directory, 0, "progress", step=10, loss=2.5, rate=4.0)
    own_event(directory, 0, "report", values={"accuracy": 0.5, "note": "warm"})
    own_event(directory, 0, "report", values={"accuracy": 0.75})
    own_event(directory, 0, "progress", step=20, loss=1.5, rate=5.0)
    run_event(directory, "member_ended", member=1, code=3, state="FAILED", reason=None)
    run_event(directory, "member_ended", member=2, code=143, state="CANCELLED", reason="cancelled as a step")
    run_event(directory, "member_ended", member=3, code=137, state="OUT_OF_MEMORY", reason=None)
    run_event(directory, "alive", beat=7)

    document = json_of(capsys, "62", "--dir", str(tmp_path))
    assert document["version"] == 1
    assert document["job_id"] == 62
    assert document["finished"] is False
    assert document["jap_run"]["beat"] == 7
    assert document["jap_run"]["verdict"] == "not judged"  # one look cannot tell
    states = [m["state"] for m in document["members"]]
    assert states == ["RUNNING", "FAILED", "CANCELLED", "OUT_OF_MEMORY", "PENDING"]
    assert [m["exit_code"] for m in document["members"]] == [None, 3, 143, 137, None]
    first = document["members"][0]
    assert (first["step"], first["loss"], first["steps_per_second"]) == (20, 1.5, 5.0)
    assert first["reported"] == {"accuracy": 0.75, "note": "warm"}
    assert first["argv"] == ["train.py", "--lr", "0.1"]
    assert first["output"] == str(tmp_path / "digits_62_0.out")

    assert status.main(["62", "--dir", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    row = next(line for line in table.splitlines() if "RUNNING" in line)
    assert row.split() == ["0", "RUNNING", "20", "1.5", "5", "-", "accuracy=0.75", "note=warm", first["output"]]
    assert "cancelled as a step" in table
    assert "by the clock of n1" in table


def test_table_in_a_pipe_keeps_one_line_per_member(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / ("long" * 40)
    root.mkdir()
    finish(make_sweep(root), [0, 0, 0])
    assert status.main(["--dir", str(root)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "COMPLETED" in line]
    assert [row.split()[-1] for row in rows] == [str(root / f"digits_62_{i}.out") for i in range(3)]


def test_sweep_is_found_from_below_by_pointer_and_by_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / 'weird "root; $x'
    below = root / "logs" / "deep"
    below.mkdir(parents=True)
    finish(make_sweep(root), [0, 0, 0])
    assert status.main(["62"]) == 2
    assert "squeue -j 62" in capsys.readouterr().err

    store.write_pointer(root, 62)
    assert json_of(capsys, "62")["directory"].startswith(str(root))
    assert json_of(capsys)["job_id"] == 62  # the newest one noted
    (tmp_path / "state" / "slurm-jap" / "sweeps" / "62").unlink()
    monkeypatch.chdir(below)
    assert json_of(capsys, "62")["job_id"] == 62
    monkeypatch.chdir(tmp_path)
    assert json_of(capsys, "62", "--dir", str(root / ".jap"))["job_id"] == 62


def test_without_a_job_id_the_newest_sweep_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for job_id, age in ((900, 100.0), (17, 10.0), (500, 50.0)):
        directory = make_sweep(tmp_path, job_id)
        finish(directory, [0, 0, 0])
        then = time.time() - age
        os.utime(directory.path / "manifest.json", (then, then))
    monkeypatch.chdir(tmp_path)
    assert json_of(capsys)["job_id"] == 17


def test_the_newest_attempt_with_a_manifest_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(make_sweep(tmp_path), [0, 1, 0])
    finish(make_sweep(tmp_path, attempt=10), [0, 0, 0])
    SweepDir.create(SweepDir.attempt_path(tmp_path, 62, 11))  # begun, no manifest yet
    document = json_of(capsys, "62", "--dir", str(tmp_path))
    assert document["attempt"] == 10
    assert [m["exit_code"] for m in document["members"]] == [0, 0, 0]


def test_one_member_can_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(make_sweep(tmp_path), [0, 3, 0])
    document = json_of(capsys, "62_1", "--dir", str(tmp_path))
    assert [(m["member"], m["exit_code"]) for m in document["members"]] == [(1, 3)]
    assert status.main(["62_7", "--dir", str(tmp_path)]) == 2
    assert "no member 7" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [["x"], ["-3"], ["62_"], ["62_[0-3]"], ["62", "63"], ["--no-such"], ["--dir"], ["62"], [], ["--dir", "/nowhere"]],
)
def test_bad_requests_get_one_line_and_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jap: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"version": 99}', '{"version": 1, "members": [{"a": 1}]}', "null"]
)
def test_a_manifest_that_cannot_be_read_is_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_sweep(tmp_path)
    (directory.path / "manifest.json").write_text(text)
    assert status.main(["62", "--dir", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "manifest.json" in captured.err


# https://github.com/anomalyco/opencode/issues/14970: half-written shared state made readers fail
def test_torn_lines_foreign_events_and_unknown_words_are_tolerated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_sweep(tmp_path)
    run_event(directory, "sweep_started", node="n1")
    run_event(directory, "member_started", member=0, node="n1", pid=1)
    run_event(directory, "member_started", member=77, node="n1", pid=1)
    run_event(directory, "member_started", member="0", node="n1", pid=1)
    run_event(directory, "from_the_future", member=0)
    run_event(directory, "member_ended", member=1, code="three", state="EXPLODED", reason=None)
    run_event(directory, "member_ended", member=2, state=None)
    run_event(directory, "alive", beat=1)
    own_event(directory, 0, "progress", step="many", loss=None, rate=True)
    own_event(directory, 0, "progress", step=4, loss=float("nan"), rate=float("inf"))
    own_event(directory, 0, "report", values=[1, 2])
    own_event(directory, 0, "joined", argv="not a list")
    with directory.events_file(store.member_writer(0)).open("ab") as file:
        file.write(b'\xff\xfe\n[]\n{"kind": 3}\n' + b"[" * 100_000 + b"\n" + b'{"kind": "progress", "step": 999')
    document = json_of(capsys, "62", "--dir", str(tmp_path))
    assert [m["state"] for m in document["members"]] == ["RUNNING", "UNKNOWN", "UNKNOWN"]
    assert "EXPLODED" in document["members"][1]["reason"]
    first = document["members"][0]
    assert (first["step"], first["loss"], first["steps_per_second"]) == (4, "NaN", "Infinity")
    assert (first["reported"], first["argv"]) == ({}, [])


def test_a_line_that_becomes_whole_later_is_read_then(tmp_path: Path) -> None:
    directory = make_sweep(tmp_path)
    reader = SweepReader(directory)
    with directory.events_file("run").open("ab", buffering=0) as file:
        file.write(b'{"kind": "member_started", "memb')
        assert reader.look().members[0].state is MemberState.PENDING
        file.write(b'er": 0, "node": "n1"}\n{"kind"')
        view = reader.look()
        assert view.members[0].state is MemberState.RUNNING
        file.write(b': "alive", "beat": 3}\n')
        assert reader.look().beat == 3
    assert view.beat is None  # an earlier view does not change


def test_engines_that_ended_and_were_replaced_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = make_sweep(tmp_path)
    run_event(directory, "engine_started", executable="python")
    run_event(directory, "engine_ended", code=0, reason="stage 1 of group 0 was killed by signal 9")
    document = json_of(capsys, "62", "--dir", str(tmp_path))
    assert (document["engine_starts"], document["engine_trouble"]) == (1, "stage 1 of group 0 was killed by signal 9")
    assert status.main(["62", "--dir", str(tmp_path)]) == 0
    assert "The engine is gone: stage 1 of group 0 was killed by signal 9; see " in capsys.readouterr().out

    run_event(directory, "engine_started", executable="python")
    document = json_of(capsys, "62", "--dir", str(tmp_path))
    assert (document["engine_starts"], document["engine_trouble"]) == (2, None)
    assert status.main(["62", "--dir", str(tmp_path)]) == 0
    assert "The engine was started 2 times; see " in capsys.readouterr().out

    run_event(directory, "engine_ended", code=0, reason=None)
    assert json_of(capsys, "62", "--dir", str(tmp_path))["engine_trouble"] is None


def test_members_of_a_sweep_that_ended_without_a_word_are_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_sweep(tmp_path)
    finish(directory, [0])
    document = json_of(capsys, "62", "--dir", str(tmp_path))
    assert [m["state"] for m in document["members"]] == ["COMPLETED", "UNKNOWN", "UNKNOWN"]
    assert document["jap_run"]["verdict"] == "ended"
    assert "without a word" in document["members"][1]["reason"]


# https://github.com/vatlab/sos/issues/1264: a dead launcher's jobs were shown as running for ever
def test_a_silent_jap_run_makes_open_members_unknown(tmp_path: Path) -> None:
    directory = make_sweep(tmp_path)
    run_event(directory, "member_started", member=0, node="n1", pid=1)
    run_event(directory, "member_ended", member=1, code=0, state="COMPLETED", reason=None)
    run_event(directory, "alive", beat=1)
    reader, watcher = SweepReader(directory), Watcher(1000.0)
    for now in (1000.0, 1100.0, 1239.0):
        view = reader.look()
        watcher.judge(view, now)
        assert (view.verdict, view.members[0].state) == ("not judged", MemberState.RUNNING)
    run_event(directory, "alive", beat=2)
    view = reader.look()
    watcher.judge(view, 1239.5)
    assert (view.verdict, view.members[0].state) == ("alive", MemberState.RUNNING)
    view = reader.look()
    watcher.judge(view, 1239.5 + 240)
    assert view.verdict == "silent"
    assert [m.state for m in view.members] == [MemberState.UNKNOWN, MemberState.COMPLETED, MemberState.UNKNOWN]
    assert view.members[0].reason == "no sign of jap-run for 4 min"
    run_event(directory, "alive", beat=3)  # a suspended job wakes up
    view = reader.look()
    watcher.judge(view, 2000.0)
    assert (view.verdict, view.members[0].state) == ("alive", MemberState.RUNNING)


class Clock:
    """A machine whose clock shows something else than the writer's, and whose sleeps take no time."""

    def __init__(self, wall: float, on_sleep: Any = None) -> None:
        self.now, self._wall, self._on_sleep = 0.0, wall, on_sleep

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self._wall + self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self._on_sleep is not None:
            self._on_sleep(self.now)


def look_once_at(directory: SweepDir, clock: Clock) -> Any:
    return status.look_once(SweepReader(directory), wall=clock.wall, monotonic=clock.monotonic, sleep=clock.sleep)


# https://github.com/TUM-DAML/seml/issues/90: a status command concluded too much
@pytest.mark.parametrize("skew", [1e6, -1e6])
def test_one_call_believes_the_counter_and_not_a_foreign_clock(skew: float, tmp_path: Path) -> None:
    directory = make_sweep(tmp_path)
    run_event(directory, "sweep_started", node="n1")
    run_event(directory, "member_started", member=0, node="n1", pid=1)

    def beat(now: float) -> None:
        if now >= 9:
            run_event(directory, "alive", beat=int(now))

    view = look_once_at(directory, Clock(time.time() + skew, beat))
    assert (view.verdict, view.members[0].state) == ("alive", MemberState.RUNNING)


def test_one_call_says_unknown_when_the_counter_stands_still(tmp_path: Path) -> None:
    directory = make_sweep(tmp_path)
    run_event(directory, "sweep_started", node="n1")
    run_event(directory, "member_started", member=0, node="n1", pid=1)
    clock = Clock(time.time() + 600)
    view = look_once_at(directory, clock)
    assert (view.verdict, view.members[0].state) == ("silent", MemberState.UNKNOWN)
    assert re.fullmatch(
        r"no sign of jap-run for 1[23] s, and it last wrote 10 min ago by the clock of n1", view.members[0].reason
    )
    assert clock.now < 15


def test_one_call_does_not_wait_when_nothing_looks_wrong(tmp_path: Path) -> None:
    directory = make_sweep(tmp_path)
    run_event(directory, "sweep_started", node="n1")
    clock = Clock(time.time())
    assert look_once_at(directory, clock).verdict == "not judged"
    assert clock.now == 0


def test_watch_follows_to_the_end_and_prints_each_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "FIRST_INTERVAL", 0.02)
    directory = make_sweep(tmp_path, members=2)
    run_event(directory, "sweep_started", node="n1")

    def write() -> None:
        for index in (0, 1):
            time.sleep(0.2)
            run_event(directory, "member_started", member=index, node="n1", pid=1)
            own_event(directory, index, "progress", step=5, loss=0.5, rate=1.0)
        second = make_sweep(tmp_path, members=2, attempt=1)  # requeued
        time.sleep(0.2)
        finish(second, [0, 4])

    thread = threading.Thread(target=write)
    thread.start()
    assert status.main(["62", "--dir", str(tmp_path), "--watch", "--json"]) == 0
    thread.join()
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(documents) >= 3
    assert documents[0]["finished"] is False
    assert documents[-1]["finished"] is True
    assert documents[-1]["attempt"] == 1
    assert [m["exit_code"] for m in documents[-1]["members"]] == [0, 4]

    assert status.main(["62", "--dir", str(tmp_path), "--watch"]) == 0
    assert "FAILED" in capsys.readouterr().out


def test_watch_ends_when_jap_run_is_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(time.time())
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    directory = make_sweep(tmp_path)
    run_event(directory, "member_started", member=0, node="n1", pid=1)
    assert status.main(["62", "--dir", str(tmp_path), "--watch"]) == 1
    captured = capsys.readouterr()
    assert "no sign of jap-run for 4 min" in captured.out
    assert captured.err == "jap: no sign of jap-run: stopped watching; ask Slurm with squeue -j 62\n"
    assert 240 <= clock.now < 250


def status_process(*argv: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "slurm_jap.status", *argv]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_ctrl_c_ends_a_watch_without_a_traceback(tmp_path: Path) -> None:
    directory = make_sweep(tmp_path)
    run_event(directory, "sweep_started", node="n1")
    process = status_process("62", "--watch", "--json", "--dir", str(tmp_path))
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(2)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "")


def test_output_that_nobody_reads_on_is_no_error(tmp_path: Path) -> None:
    finish(make_sweep(tmp_path, members=2000), [0] * 2000)
    process = status_process("62", "--json", "--dir", str(tmp_path))
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=20) == 0


def test_status_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = make_sweep(tmp_path)
    finish(directory, [0, 0, 0])
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(tmp_path.rglob("*"))}
    json_of(capsys, "62", "--dir", str(tmp_path))
    assert status.main(["--dir", str(tmp_path), "--watch"]) == 0
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(tmp_path.rglob("*"))} == before


def test_reported_text_cannot_drive_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = make_sweep(tmp_path)
    own_event(directory, 0, "report", values={"note": "\x1b[2J[bold]x[/bold]\n\r", "nested": {"a": [1, float("nan")]}})
    finish(directory, [0, 0, 0])
    assert status.main(["--dir", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert r"note=\x1b[2J[bold]x[/bold]\n\r" in table
    assert "\x1b" not in table
    document = json_of(capsys, "--dir", str(tmp_path))
    assert document["members"][0]["reported"]["nested"] == {"a": [1, "NaN"]}


def test_help_loads_neither_torch_nor_rich() -> None:
    code = (
        "import sys; from slurm_jap import status\n"
        "try: status.main(['--help'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'rich', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_pointers_hold_any_path_and_a_torn_one_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a b\xff'$x"))
    store.write_pointer(root, 5)
    assert store.read_pointer(5) == root
    (store.pointer_folder() / "5").write_text("/half")
    assert store.read_pointer(5) is None
    assert store.read_pointer(6) is None
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/no/such")
    store.write_pointer(root, 7)  # a convenience: no error
    assert store.read_pointer(7) is None
