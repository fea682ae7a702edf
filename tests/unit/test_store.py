"""The sweep directory: whole lines, many writers and readers at once, closed to others, disk trouble never raised."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import stat
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_jap import store
from slurm_jap.store import EventReader, EventWriter, SweepDir, latest_attempt, read_events
from slurm_jap.sweep import Member, Sweep


def some_sweep(job_id: int = 7, attempt: int = 0) -> Sweep:
    return Sweep(
        job_id=job_id,
        attempt=attempt,
        job_name="a name",
        launcher="local",
        array="0-1",
        throttle=None,
        members=(Member(index=0, output="/o/0"), Member(index=1, output="/o/1", error="/e/1")),
        script="/s",
        arguments=("a b", "c"),
        work_dir="/w",
        stages=2,
        groups=1,
    )


@pytest.fixture
def sweep_dir(tmp_path: Path) -> SweepDir:
    return SweepDir.create(SweepDir.attempt_path(tmp_path, 7, 0))


# -- events


def test_events_come_back_as_written(sweep_dir: SweepDir) -> None:
    writer = sweep_dir.writer("run")
    writer.write("member_ended", member=3, code=137, reason=None, text='quote " newline \n tab \t é \udcff')
    writer.write("progress", loss=math.nan, path=Path("/x"))
    writer.close()
    writer.write("dropped")
    first, second = sweep_dir.events("run")
    assert first["kind"] == "member_ended"
    assert (first["member"], first["code"], first["reason"]) == (3, 137, None)
    assert first["text"] == 'quote " newline \n tab \t é \udcff'
    assert math.isnan(second["loss"])
    assert second["path"] == "/x"


def test_no_file_means_no_events(sweep_dir: SweepDir) -> None:
    assert list(sweep_dir.events("member_5")) == []
    assert list(EventReader(sweep_dir.events_file("member_5")).new_events()) == []


# https://github.com/LightconeResearch/lightcone-cli/issues/79: state on a network file system, without locks
@given(cut=st.integers(0, 200))
def test_a_torn_last_line_is_ignored_wherever_it_is_torn(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "run.jsonl"
    writer = EventWriter(path)
    for beat in range(3):
        writer.write("alive", beat=beat)
    writer.close()
    data = path.read_bytes()
    kept = data[: min(cut, len(data))]
    path.write_bytes(kept)
    whole = kept.count(b"\n")
    assert [event["beat"] for event in read_events(path)] == list(range(whole))
    reader = EventReader(path)
    assert len(list(reader.new_events())) == whole
    path.write_bytes(data)
    assert [event["beat"] for event in reader.new_events()] == list(range(whole, 3))


def test_foreign_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    deep = b"[" * 100_000
    path.write_bytes(
        b'\n7\n[]\n"x"\n{"a": 1}\n{"kind": 3}\n\xff\xfe\n' + deep + b'\n{"kind": "alive"}\n{"kind": "late"'
    )
    assert [event["kind"] for event in read_events(path)] == ["alive"]


def test_a_writer_that_finds_a_torn_line_starts_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"kind": "alive", "beat": 0}\n{"kind": "al')
    EventWriter(path).write("alive", beat=1)
    assert [event["beat"] for event in read_events(path)] == [0, 1]


def write_many(path: Path, writer: int, count: int) -> None:
    events = EventWriter(path)
    for number in range(count):
        events.write("progress", writer=writer, number=number, padding="x" * (number % 300))
    events.close()


# https://github.com/anomalyco/opencode/issues/14970
def test_eight_writers_and_four_readers_lose_and_mix_nothing(sweep_dir: SweepDir) -> None:
    """Four writers have a file each, as in a sweep; four share one, which O_APPEND must keep whole on a local disk."""
    count = 200
    shared = sweep_dir.events_file("shared")
    paths = [sweep_dir.events_file(f"member_{i}") if i < 4 else shared for i in range(8)]
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(path, i, count)) for i, path in enumerate(paths)]
    ended = threading.Event()
    seen: list[dict[Path, list[tuple[int, int]]]] = [{path: [] for path in paths} for _ in range(4)]

    def read(into: dict[Path, list[tuple[int, int]]]) -> None:
        readers = {path: EventReader(path) for path in into}
        last = False
        while True:
            for path, reader in readers.items():
                into[path] += [(event["writer"], event["number"]) for event in reader.new_events()]
            if last:
                return
            last = ended.wait(0.002)

    threads = [threading.Thread(target=read, args=(into,)) for into in seen]
    for one in (*writers, *threads):
        one.start()
    for process in writers:
        process.join(60)
        assert process.exitcode == 0
    ended.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for into in seen:
        for writer, path in enumerate(paths):
            assert [number for who, number in into[path] if who == writer] == list(range(count))
        assert sum(map(len, into.values())) == 8 * count


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_is_kept_and_not_raised() -> None:
    writer = EventWriter(Path("/dev/full"))
    writer.write("alive", beat=1)
    assert writer.failed is not None
    assert writer.failed.errno == errno.ENOSPC
    writer.close()


def test_a_line_cut_short_by_a_full_disk_costs_no_other_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    writer = EventWriter(path)
    writer.write("alive", beat=0)
    real = os.write

    def nearly_full(fd: int, data: bytes) -> int:
        return real(fd, data[:9])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", nearly_full)
        writer.write("alive", beat=1)
    assert writer.failed is not None
    assert writer.failed.errno == errno.ENOSPC
    writer.write("alive", beat=2)
    writer.write("alive", beat=3)
    assert [event["beat"] for event in read_events(path)] == [0, 2, 3]


# -- folders


def test_folders_and_files_are_closed_to_others(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        sweep_dir = SweepDir.create(SweepDir.attempt_path(tmp_path, 7, 0))
        sweep_dir.write_script(b"#!/bin/bash\n\xff\n")
        sweep_dir.write_manifest(some_sweep())
        sweep_dir.writer("run").write("alive", beat=0)
    finally:
        os.umask(previous)
    made = [tmp_path / store.JAP_DIR, *(tmp_path / store.JAP_DIR).rglob("*")]
    assert len(made) == 8
    for path in made:
        mode = stat.S_IMODE(path.stat().st_mode)
        expected = 0o700 if path.is_dir() or path.name == "script" else 0o600
        assert mode == expected, path
    assert sweep_dir.script.read_bytes() == b"#!/bin/bash\n\xff\n"


def test_an_attempt_is_made_once(sweep_dir: SweepDir) -> None:
    with pytest.raises(FileExistsError):
        SweepDir.create(sweep_dir.path)
    other = SweepDir.create(sweep_dir.path.parent / "1")
    assert other.key_file.read_bytes() != sweep_dir.key_file.read_bytes()
    assert len(other.key_file.read_bytes()) == store.KEY_BYTES


def test_a_missing_root_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SweepDir.create(SweepDir.attempt_path(tmp_path / "logs", 7, 0))
    assert not (tmp_path / "logs").exists()


def made_by_an_ordinary_user(path: Path) -> str:
    """In a child that is no longer root, if we are: the error that making an attempt under ``path`` raises."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            os.listdir(path)
            os.write(write, b"can look, ")
            SweepDir.create(SweepDir.attempt_path(path, 7, 0))
            os.write(write, b"made")
        except OSError as error:
            os.write(write, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        answer = file.read().decode()
    os.waitpid(pid, 0)
    return answer


def test_a_read_only_root_is_an_os_error_that_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory() as folder:  # tmp_path lies in a folder that only its owner may enter
        root = Path(folder)
        root.chmod(0o555)
        assert made_by_an_ordinary_user(root) == "can look, PermissionError"
        assert list(root.iterdir()) == []
        root.chmod(0o755)


# -- manifest


def test_manifest_comes_back(sweep_dir: SweepDir) -> None:
    with pytest.raises(FileNotFoundError):
        sweep_dir.read_manifest()
    sweep_dir.write_manifest(some_sweep())
    assert sweep_dir.read_manifest() == some_sweep()
    assert [path.name for path in sweep_dir.path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        "null",
        "{}",
        '{"version": 1}',
        '{"version": 1, "members": [{"x": 1}], "arguments": []}',
        "\x00",
    ],
)
def test_what_is_no_manifest_is_a_value_error(sweep_dir: SweepDir, text: str) -> None:
    (sweep_dir.path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r".+"):
        sweep_dir.read_manifest()


def test_another_version_of_the_manifest_is_refused_with_what_to_do(sweep_dir: SweepDir) -> None:
    data = some_sweep().to_json() | {"version": 2}
    (sweep_dir.path / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"manifest version 2: .* use the slurm_jap that ran the sweep"):
        sweep_dir.read_manifest()


def test_latest_attempt_is_the_newest_with_a_manifest(tmp_path: Path) -> None:
    assert latest_attempt(tmp_path, 7) is None
    for attempt in (0, 2, 10, 11):
        made = SweepDir.create(SweepDir.attempt_path(tmp_path, 7, attempt))
        if attempt != 11:
            made.write_manifest(some_sweep(attempt=attempt))
    for other in ("²", "x", "1.5"):
        (tmp_path / store.JAP_DIR / "7" / other).mkdir()
    found = latest_attempt(tmp_path, 7)
    assert found is not None
    assert found.path.name == "10"
    assert latest_attempt(tmp_path, 8) is None
