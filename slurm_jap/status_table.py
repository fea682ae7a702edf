"""The members' table, as jap-status and the local launcher draw it. Imports rich only to draw, and no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_jap.status_view import MemberView, SweepView
from slurm_jap.sweep import MemberState

if TYPE_CHECKING:
    from rich.console import Group

COLOURS = {
    MemberState.RUNNING: "cyan",
    MemberState.COMPLETED: "green",
    MemberState.PENDING: "dim",
    MemberState.UNKNOWN: "yellow",
    MemberState.CANCELLED: "yellow",
}


def render(view: SweepView, members: Sequence[MemberView]) -> Group:
    """The table, with a line above (which sweep) and below (what is known of jap-run)."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    sweep = view.sweep
    title = f"Sweep {sweep.job_id} {sweep.job_name!r}: array {sweep.array}, {_count(sweep.stages, 'stage')}"
    if sweep.groups > 1:
        title += f" x {_count(sweep.groups, 'group')}"
    if sweep.attempt > 0:
        title += f", attempt {sweep.attempt}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("member", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("step", "loss", "steps/s", "exit"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("reported", overflow="fold")
    table.add_column("log", overflow="fold")
    for m in members:
        reported = " ".join(f"{name}={_value(value)}" for name, value in m.reported.items())
        if m.reason is not None:
            reported = f"{m.reason}; {reported}" if reported else m.reason
        table.add_row(
            str(m.member.index),
            Text(m.state.value, style=COLOURS.get(m.state, "red")),
            _dash(m.step),
            _dash(m.loss),
            "-" if m.rate is None else f"{m.rate:.3g}",
            _dash(m.exit_code),
            Text(_printable(reported)),
            Text(_printable(_short_path(m.member.output))),
        )
    return Group(Text(_printable(title)), table, Text(_printable(_footer(view))))


def _footer(view: SweepView) -> str:
    parts = []
    if view.ended:
        parts.append(f"jap-run has ended, exit code {_dash(view.exit_code)}.")
    elif view.verdict == "silent":
        parts.append("No sign of jap-run.")
    elif view.verdict == "alive":
        parts.append(f"jap-run is alive on {view.node} (beat {_dash(view.beat)}).")
    elif view.last_written is not None:
        at = time.strftime("%H:%M:%S", time.localtime(view.last_written))
        parts.append(
            f"As last written by jap-run at {at} by the clock of {view.node} (--watch tells whether it lives)."
        )
    log = f"see {view.directory}/engine.log"
    if view.engine_trouble is not None:
        parts.append(f"The engine is gone: {view.engine_trouble}; {log}.")
    elif view.engine_starts > 1:
        parts.append(f"The engine was started {view.engine_starts} times; {log}.")
    parts.append(f"Sweep directory: {view.directory}")
    return " ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _dash(value: float | None) -> str:
    return "-" if value is None else _value(value)


def _value(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _printable(text: str) -> str:
    """Control characters shown as escapes: a reported string must not drive the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _short_path(path: str) -> str:
    try:
        return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path
    except OSError:
        return path
