"""What the sweep directory tells of a sweep: its manifest and events, folded into plain data. Writes nothing.

No torch, no rich, no Slurm command. Missing files, torn lines, unknown kinds and unknown words are tolerated: what is
not understood is UNKNOWN, never guessed. Whether jap-run still lives is judged by ``Watcher`` from one thing only, that
its event file grows between two looks of the *reader*; clocks of other machines are shown, never believed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from slurm_jap.store import RUN_WRITER, EventReader, SweepDir, member_writer
from slurm_jap.sweep import Member, MemberState, Sweep

JSON_VERSION = 1
SILENT_SECONDS = 240.0
"""Without a sign of jap-run for this long, members that had not ended are UNKNOWN."""


@dataclasses.dataclass(slots=True, kw_only=True)
class MemberView:
    """One member as far as the events tell."""

    member: Member
    state: MemberState = MemberState.PENDING
    reason: str | None = None
    """Why it is in this state, where somebody said so."""
    exit_code: int | None = None
    """Of its script, 128+n for a signal; None until it has ended."""
    node: str | None = None
    argv: tuple[str, ...] = ()
    """The training process's own command line, once it has joined the engine."""
    step: int | None = None
    """Optimizer steps done, as last written."""
    loss: float | None = None
    rate: float | None = None
    """Steps per second, as last written."""
    reported: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What its script passed to ``jap.report``; the last value of each name."""

    def apply_run_event(self, kind: str, event: Mapping[str, Any]) -> None:
        """Take in ``member_started`` or ``member_ended``."""
        if kind == "member_started":
            self.state, self.reason, self.exit_code = MemberState.RUNNING, None, None
            self.node = _text(event.get("node"))
        elif kind == "member_ended":
            self.state, self.reason = _state(event.get("state")), _text(event.get("reason"))
            if self.state is MemberState.UNKNOWN and self.reason is None:
                self.reason = f"jap-run wrote the state {event.get('state')!r}, which this jap-status does not know"
            self.exit_code = _whole(event.get("code"))

    def apply_own_event(self, kind: str, event: Mapping[str, Any]) -> None:
        """Take in an event that the member wrote itself."""
        if kind == "joined":
            argv = event.get("argv")
            self.argv = tuple(map(str, argv)) if isinstance(argv, list) else ()
        elif kind == "progress":
            self.step = _whole(event.get("step"), self.step)
            self.loss = _number(event.get("loss"), self.loss)
            self.rate = _number(event.get("rate"), self.rate)
        elif kind == "report":
            values = event.get("values")
            if isinstance(values, dict):
                self.reported.update(values)
        elif kind == "left":
            self.step = _whole(event.get("step"), self.step)


@dataclasses.dataclass(slots=True, kw_only=True)
class SweepView:
    """One look at an attempt."""

    sweep: Sweep
    directory: str
    """The attempt's folder."""
    members: list[MemberView]
    """In ascending index."""
    node: str | None = None
    """Where jap-run runs."""
    beat: int | None = None
    """jap-run's last ``alive`` counter."""
    last_written: float | None = None
    """Time of jap-run's last event by the clock of *its* node, seconds since 1970."""
    signs: int = 0
    """How many events of jap-run have been read: a counter that grows while it lives."""
    ended: bool = False
    """jap-run has written its last event."""
    exit_code: int | None = None
    """The sweep's, once it has ended."""
    engine_starts: int = 0
    """More than one: an engine ended by a fault and another took its place."""
    engine_trouble: str | None = None
    """Why the engine ended, if it did by a fault and no other has taken its place yet."""
    verdict: str = "not judged"
    """``ended``, ``alive`` (the reader saw jap-run write), ``silent`` (no sign for a while) or ``not judged``."""

    @property
    def finished(self) -> bool:
        """Nothing will change any more in this attempt."""
        return self.ended or all(view.state.terminal for view in self.members)

    def close_open_members(self, reason: str) -> None:
        """Turn every member that has not ended into UNKNOWN."""
        for view in self.members:
            if not view.state.terminal and view.state is not MemberState.UNKNOWN:
                view.state, view.reason = MemberState.UNKNOWN, reason


class SweepReader:
    """Looks at one attempt again and again, reading only what is new."""

    def __init__(self, directory: SweepDir) -> None:
        """Read the manifest.

        Raises:
            OSError: no manifest yet, or not readable by this user.
            ValueError: not a manifest that this version reads.
        """
        self.directory = directory
        sweep = directory.read_manifest()
        self._run = EventReader(directory.events_file(RUN_WRITER))
        self._own = {m.index: EventReader(directory.events_file(member_writer(m.index))) for m in sweep.members}
        self._view = SweepView(
            sweep=sweep, directory=str(directory.path), members=[MemberView(member=m) for m in sweep.members]
        )

    def look(self) -> SweepView:
        """A fresh view; earlier ones are not changed."""
        view = self._view
        by_index = {m.member.index: m for m in view.members}
        for event in self._run.new_events():
            _apply_run_event(view, by_index, event)
        for index, reader in self._own.items():
            for event in reader.new_events():
                by_index[index].apply_own_event(event["kind"], event)
        members = [dataclasses.replace(m, reported=dict(m.reported)) for m in view.members]
        fresh = dataclasses.replace(view, members=members)
        if fresh.ended:
            fresh.verdict = "ended"
            fresh.close_open_members("jap-run ended without a word on this member")
        return fresh


class Watcher:
    """Judges from repeated looks whether jap-run gives signs of life, by the reader's own monotonic clock."""

    def __init__(self, now: float) -> None:
        """``now``: seconds, of the reader's monotonic clock."""
        self._signs: int | None = None
        self._changed = now
        self._seen_alive = False

    def judge(self, view: SweepView, now: float, patience: float = SILENT_SECONDS, hint: str = "") -> None:
        """Set ``view.verdict``; after ``patience`` seconds without a sign, members that had not ended are UNKNOWN.

        ``hint`` is added to the reason they get then.
        """
        if self._signs is not None and view.signs != self._signs:
            self._seen_alive = True
        if view.signs != self._signs:
            self._signs, self._changed = view.signs, now
        silent = now - self._changed
        if view.finished:
            return
        if silent >= patience:
            view.verdict = "silent"
            view.close_open_members(f"no sign of jap-run for {duration(silent)}{hint}")
        elif self._seen_alive:
            view.verdict = "alive"


def to_json(view: SweepView, members: Iterable[MemberView] | None = None) -> dict[str, Any]:
    """The ``--json`` document (docs/quickstart.md describes it); numbers that JSON lacks become "NaN", "Infinity"."""
    sweep = view.sweep
    return {
        "version": JSON_VERSION,
        "job_id": sweep.job_id,
        "attempt": sweep.attempt,
        "job_name": sweep.job_name,
        "launcher": sweep.launcher,
        "array": sweep.array,
        "stages": sweep.stages,
        "groups": sweep.groups,
        "directory": view.directory,
        "finished": view.finished,
        "exit_code": view.exit_code,
        "engine_starts": view.engine_starts,
        "engine_trouble": view.engine_trouble,
        "jap_run": {
            "node": view.node,
            "beat": view.beat,
            "last_written": view.last_written,
            "verdict": view.verdict,
        },
        "members": [
            {
                "member": m.member.index,
                "state": m.state.value,
                "reason": m.reason,
                "step": m.step,
                "loss": _jsonable(m.loss),
                "steps_per_second": _jsonable(m.rate),
                "exit_code": m.exit_code,
                "reported": _jsonable(m.reported),
                "argv": list(m.argv),
                "node": m.node,
                "output": m.member.output,
                "error": m.member.error,
            }
            for m in (view.members if members is None else members)
        ],
    }


def _apply_run_event(view: SweepView, by_index: Mapping[int, MemberView], event: Mapping[str, Any]) -> None:
    kind = event["kind"]
    view.signs += 1
    view.last_written = _number(event.get("time"), view.last_written)
    if kind in ("member_started", "member_ended"):
        index = _whole(event.get("member"))
        if index is not None and index in by_index:
            by_index[index].apply_run_event(kind, event)
    elif kind == "sweep_started":
        view.node = _text(event.get("node"))
    elif kind == "alive":
        view.beat = _whole(event.get("beat"), view.beat)
    elif kind == "engine_started":
        view.engine_starts, view.engine_trouble = view.engine_starts + 1, None
    elif kind == "engine_ended":
        code, reason = event.get("code"), _text(event.get("reason"))
        view.engine_trouble = reason if reason is not None or code == 0 else f"ended with code {code}"
    elif kind == "sweep_ended":
        view.ended, view.exit_code = True, _whole(event.get("code"))


def _state(word: Any) -> MemberState:
    try:
        return MemberState(word)
    except ValueError:
        return MemberState.UNKNOWN


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _whole(value: Any, default: int | None = None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _number(value: Any, default: float | None = None) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default


def duration(seconds: float) -> str:
    """``45 s`` or ``4 min``."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_jsonable(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
