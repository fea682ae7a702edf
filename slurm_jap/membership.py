"""Whether this process is a member of a coalesced sweep, and what a member writes about itself.

The launcher sets ``JAP_*`` (see ``wire``). A job submitted from inside a member inherits them with another job id, and
is no member. Outside a sweep all of this does nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_jap import profile_cache, wire
from slurm_jap.profile import Profile
from slurm_jap.store import EventWriter, SweepDir, member_writer

if TYPE_CHECKING:
    from slurm_jap.backend import Pending

PROGRESS_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Membership:
    """Who this process is in its sweep."""

    index: int
    sweep_dir: str
    control: str
    node: str


def current() -> Membership | None:
    """This process's membership, or None."""
    environment = os.environ
    index = environment.get(wire.ENV_MEMBER)
    if index is None or environment.get(wire.ENV_JOB_ID) != environment.get("SLURM_JOB_ID"):
        return None
    try:
        return Membership(
            int(index),
            environment[wire.ENV_SWEEP_DIR],
            environment[wire.ENV_CONTROL],
            environment.get(wire.ENV_NODE, ""),
        )
    except (KeyError, ValueError):
        return None


@functools.cache
def _writer() -> EventWriter | None:
    member = current()
    if member is None:
        return None
    try:
        return SweepDir(Path(member.sweep_dir)).writer(member_writer(member.index))
    except OSError:
        return None


def report(values: dict[str, Any]) -> None:
    """Append a ``report`` event; tensors and other numbers become plain ones."""
    writer = _writer()
    if writer is not None:
        writer.write("report", values={name: _plain(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, (str, bool, int, float)) or value is None:
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)


def joined(group: int, stages: int) -> None:
    """The engine has taken this member in."""
    writer = _writer()
    if writer is not None:
        writer.write("joined", argv=sys.argv, group=group, stages=stages)


def known_profile(signature: str, device: str) -> Profile | None:
    """What earlier runs of this sweep's script measured of this network on such a device."""
    member = current()
    if member is None:
        return None
    try:
        script = SweepDir(Path(member.sweep_dir)).script.read_bytes()
    except OSError:
        return None
    found = profile_cache.find(script, signature, device)
    return found if found is not None and found.measured else None


class Progress:
    """Notes each finished batch; writes at most once a second, and at the end."""

    def __init__(self, accumulate: int) -> None:
        self._accumulate = accumulate
        self._lock = threading.Lock()
        self._begun = self._written = time.monotonic()
        self._written_step = 0
        self._latest: tuple[int, float] | None = None

    def note(self, batches: int, pending: Pending) -> None:
        """A batch is done (called from any thread)."""
        if pending.failed or _writer() is None:
            return
        loss = float(pending.wait()["result"].loss)
        with self._lock:
            self._latest = (batches // self._accumulate, loss)
            if time.monotonic() - self._written >= PROGRESS_SECONDS:
                self._write()

    def _write(self) -> None:
        writer, latest = _writer(), self._latest
        if writer is None or latest is None:
            return
        now = time.monotonic()
        rate = (latest[0] - self._written_step) / max(now - self._written, 1e-9)
        writer.write("progress", step=latest[0], loss=latest[1], rate=round(rate, 4))
        self._written, self._written_step = now, latest[0]

    def left(self, steps: int) -> None:
        """The member leaves the engine."""
        writer = _writer()
        with self._lock:
            if self._latest is not None and self._latest[0] != self._written_step:
                self._write()
        if writer is not None:
            writer.write("left", step=steps)
