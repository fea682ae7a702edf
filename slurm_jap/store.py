"""The sweep directory: all that submit, run, members, engine and status share.

    <root>/.jap/<job id>/<attempt>/manifest.json      written once
                                   key                random, 0600: authenticates every process of the attempt
                                   script             the user's batch script, verbatim
                                   events/<writer>.jsonl   append-only, one file per writer
                                   engine.log         what the engine step printed outside any member

It may lie on NFS: no locks, no database, no rename of anything that is read meanwhile. A torn last line is ignored.
Folders are 0700 and files 0600: events hold command lines. Liveness is a counter which the reader sees change
(event kind ``alive``), never a clock of another machine.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurm_jap.sweep import Sweep

JAP_DIR = ".jap"
KEY_BYTES = 32
RUN_WRITER = "run"
BEAT_SECONDS = 10.0
"""How often jap-run writes ``alive``."""


def member_writer(index: int) -> str:
    """Name of the event file that member ``index`` writes."""
    return f"member_{index}"


class EventWriter:
    """Appends JSON lines to one file, each line in one write. A full or vanished disk never stops training."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._fd).st_size
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        """The file ends inside a line: the next one starts on a line of its own, else it would be lost as well."""
        self.failed: OSError | None = None

    def write(self, kind: str, **fields: Any) -> None:
        """Append ``{"time": ..., "kind": kind, **fields}``; an I/O error is kept in ``failed``, not raised."""
        if self._fd is None:
            return
        line = json.dumps({"time": round(time.time(), 3), "kind": kind, **fields}, default=str) + "\n"
        data = b"\n" * self._torn + line.encode()
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            self.failed = error
            return
        if written == len(data):
            self._torn = False
        elif written:
            self._torn = True
            self.failed = OSError(errno.ENOSPC, f"{written} of {len(data)} bytes written", str(self._path))

    def close(self) -> None:
        """Close the file; later writes are dropped."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of an event file; missing file: none; torn or foreign lines are skipped."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    yield from _whole_events(data)


def _whole_events(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.split(b"\n")[:-1]:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and isinstance(event.get("kind"), str):
            yield event


class EventReader:
    """Reads one event file again and again, each time only what was appended since. Writes nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_events(self) -> Iterator[dict[str, Any]]:
        """The whole lines that were not yet returned; missing file: none; torn or foreign lines are skipped."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        end = data.rfind(b"\n") + 1
        self._offset += end
        yield from _whole_events(data[:end])


class SweepDir:
    """One attempt's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def attempt_path(cls, root: Path, job_id: int, attempt: int) -> Path:
        """Where an attempt lies under ``root`` (the folder that holds ``.jap``)."""
        return root / JAP_DIR / str(job_id) / str(attempt)

    @classmethod
    def create(cls, path: Path) -> SweepDir:
        """Make the folder and its key.

        Raises:
            OSError: it exists already, or cannot be made; the folder that holds ``.jap`` is not made.
        """
        for folder in (path.parent.parent, path.parent):  # one by one: parents= would open the upper one to others
            folder.mkdir(mode=0o700, exist_ok=True)
        path.mkdir(mode=0o700)
        (path / "events").mkdir(mode=0o700)
        fd = os.open(path / "key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        return cls(path)

    @property
    def key_file(self) -> Path:
        """The attempt's authentication key."""
        return self.path / "key"

    @property
    def engine_log(self) -> Path:
        """What the engine step printed outside any member."""
        return self.path / "engine.log"

    @property
    def script(self) -> Path:
        """The carried user script."""
        return self.path / "script"

    def write_script(self, text: bytes) -> Path:
        """Store the user's script, executable by its owner alone."""
        fd = os.open(self.script, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700)
        with os.fdopen(fd, "wb") as file:
            file.write(text)
        return self.script

    def write_manifest(self, sweep: Sweep) -> None:
        """Write the manifest once, appearing whole or not at all."""
        temporary = self.path / f".manifest.{os.getpid()}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(sweep.to_json(), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, self.path / "manifest.json")

    def read_manifest(self) -> Sweep:
        """Read it back.

        Raises:
            FileNotFoundError: not written yet.
            ValueError: not a manifest this version reads.
        """
        try:
            return Sweep.from_json(json.loads((self.path / "manifest.json").read_text()))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a sweep's manifest: {error!r}") from None

    def events_file(self, writer: str) -> Path:
        """The event file of one writer."""
        return self.path / "events" / f"{writer}.jsonl"

    def writer(self, name: str) -> EventWriter:
        """Open the event file of one writer for appending."""
        return EventWriter(self.events_file(name))

    def events(self, writer: str) -> Iterator[dict[str, Any]]:
        """The whole lines that one writer has written so far."""
        return read_events(self.events_file(writer))


def latest_attempt(root: Path, job_id: int) -> SweepDir | None:
    """The newest attempt of a job under ``root`` that has a manifest, or None."""
    folder = root / JAP_DIR / str(job_id)
    try:
        attempts = sorted((int(p.name) for p in folder.iterdir() if p.name.isdecimal()), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return None
    for attempt in attempts:
        if (folder / str(attempt) / "manifest.json").exists():
            return SweepDir(folder / str(attempt))
    return None


def pointer_folder() -> Path:
    """Where one small file per job id names the sweep's root, so that ``jap-status N`` works from any directory."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return base / "slurm-jap" / "sweeps"


def write_pointer(root: Path, job_id: int) -> None:
    """Remember that job ``job_id``'s sweep directory lies under ``root``; a convenience, so that errors are dropped."""
    try:
        folder = pointer_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = folder / f".{job_id}.{os.getpid()}"
        temporary.write_bytes(os.fsencode(root.absolute()) + b"\n")
        os.rename(temporary, folder / str(job_id))
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        return


def read_pointer(job_id: int) -> Path | None:
    """The root that :func:`write_pointer` last noted for this job id, or None."""
    try:
        line = (pointer_folder() / str(job_id)).read_bytes()
    except (OSError, RuntimeError):
        return None
    path = Path(os.fsdecode(line[:-1])) if line.endswith(b"\n") else None
    return path if path is not None and path.is_absolute() else None
