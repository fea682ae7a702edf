"""``jap-status [JOBID[_MEMBER]] [--json] [--watch]``: what each member of a sweep does, from the sweep directory alone.

Writes nothing, runs no Slurm command, imports no torch, and rich only to draw a table. Exit codes: 0; 1 when a watched
jap-run gives no sign any more; 2 for a request that cannot be served, with one line saying why; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from slurm_jap import store
from slurm_jap.errors import PREFIX, USAGE_EXIT_CODE, UsageError
from slurm_jap.status_table import render
from slurm_jap.status_view import SILENT_SECONDS, MemberView, SweepReader, SweepView, Watcher, duration, to_json
from slurm_jap.sweep import MemberState

if TYPE_CHECKING:
    from rich.console import Console

FIRST_INTERVAL = 1.0
INTERVAL_GROWTH = 1.25
LAST_INTERVAL = 5.0
SECOND_LOOK_SECONDS = store.BEAT_SECONDS + 2.0
"""How long a single call watches a counter that looks old before it says that nothing moves."""
SILENT_EXIT_CODE = 1
INTERRUPTED_EXIT_CODE = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        arguments = _parser().parse_args(argv)
        job_id, index = parse_job(arguments.job) if arguments.job is not None else (None, None)
        root, job_id = find_sweep(job_id, arguments.dir)
        reader = open_sweep(root, job_id)
        if arguments.watch:
            return _watch(reader, root, job_id, index, as_json=arguments.json)
        view = look_once(reader)
        members = select(view, index)
        if arguments.json:
            print(json.dumps(to_json(view, members), indent=2))
        else:
            _console().print(render(view, members))
        return 0
    except UsageError as error:
        print(f"{PREFIX} {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:  # "jap-status | head": nobody reads on, and the interpreter must not complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see jap-status --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="jap-status",
        description="Show the members of a coalesced array: state, step, loss, steps per second, exit code, "
        "what they reported, and their log files.",
    )
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOBID",
        help="the job's id, or JOBID_MEMBER for one member; default: the newest sweep",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document (with --watch: one per line and change)")
    parser.add_argument("--watch", action="store_true", help="refresh until every member has ended")
    parser.add_argument(
        "--dir", metavar="DIR", type=Path, help="the folder that holds .jap; default: this one, its parents, then any"
    )
    return parser


def parse_job(text: str) -> tuple[int, int | None]:
    """``62`` or ``62_3`` as (job id, member or None).

    Raises:
        UsageError: anything else.
    """
    match = re.fullmatch(r"([0-9]+)(?:_([0-9]+))?", text)
    if match is None:
        raise UsageError(f"{text!r} is no job id: give a number such as 62, or 62_3 for member 3")
    return int(match[1]), None if match[2] is None else int(match[2])


def find_sweep(job_id: int | None, folder: Path | None) -> tuple[Path, int]:
    """The root that holds the sweep's ``.jap``, and the job id: the given one, or that of the newest sweep.

    Looks in ``folder`` alone if given; else in the working directory, its parents, then where jap-run left a pointer.

    Raises:
        UsageError: there is none.
    """
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--dir {folder}: no such folder; give the one that holds {store.JAP_DIR}")
    if folder is not None and folder.name == store.JAP_DIR:
        folder = folder.parent
    roots = [folder] if folder is not None else list(_upwards())
    for root in roots:
        found = job_id if job_id is not None else _newest_job(root)
        if found is not None and _holds(root, found):
            return root, found
    where = f"under {folder}" if folder is not None else "here, in a parent folder, or noted by jap-run"
    if job_id is None:
        pointed = _newest_pointer() if folder is None else None
        if pointed is None:
            raise UsageError(f"no sweep {where}: go to the folder of the members' output files, or pass --dir DIR")
        return pointed
    noted = store.read_pointer(job_id) if folder is None else None
    if noted is not None and _holds(noted, job_id):
        return noted, job_id
    raise UsageError(
        f"no sweep {job_id} {where}: it may not have started (squeue -j {job_id}), or was not coalesced; "
        "else pass --dir with the folder of its output files"
    )


def _upwards() -> Iterator[Path]:
    try:
        here = Path.cwd()
    except OSError:  # the working directory was removed
        return
    yield from (here, *here.parents)


def _holds(root: Path, job_id: int) -> bool:
    try:
        return store.latest_attempt(root, job_id) is not None
    except PermissionError:
        raise UsageError(f"{root / store.JAP_DIR / str(job_id)} belongs to another user: ask its owner") from None


def _newest_job(root: Path) -> int | None:
    """The job whose newest attempt was begun last, by the file server's own time stamps."""
    dated: list[tuple[float, int]] = []
    try:
        job_ids = [int(p.name) for p in (root / store.JAP_DIR).iterdir() if p.name.isdecimal()]
    except OSError:
        return None
    for job_id in job_ids:
        try:
            attempt = store.latest_attempt(root, job_id)
            if attempt is not None:
                dated.append(((attempt.path / "manifest.json").stat().st_mtime, job_id))
        except OSError:
            continue
    return max(dated)[1] if dated else None


def _newest_pointer() -> tuple[Path, int] | None:
    try:
        pointers = [p for p in store.pointer_folder().iterdir() if p.name.isdecimal()]
        pointers.sort(key=lambda p: p.stat().st_mtime, reverse=True)
    except (OSError, RuntimeError):
        return None
    for pointer in pointers:
        root = store.read_pointer(int(pointer.name))
        if root is not None and _holds(root, int(pointer.name)):
            return root, int(pointer.name)
    return None


def open_sweep(root: Path, job_id: int) -> SweepReader:
    """The newest attempt of a sweep.

    Raises:
        UsageError: it cannot be read.
    """
    attempt = store.latest_attempt(root, job_id)
    if attempt is None:
        raise UsageError(f"the sweep directory of job {job_id} under {root} is gone; submit the array again")
    try:
        return SweepReader(attempt)
    except (ValueError, OSError) as error:
        raise UsageError(f"cannot read {attempt.path / 'manifest.json'}: {error}") from None


def select(view: SweepView, index: int | None) -> list[MemberView]:
    """All members, or the one asked for.

    Raises:
        UsageError: the sweep has no such member.
    """
    if index is None:
        return view.members
    chosen = [m for m in view.members if m.member.index == index]
    if not chosen:
        job_id, array = view.sweep.job_id, view.sweep.array
        raise UsageError(f"sweep {job_id} has no member {index}: its array is {array}; try jap-status {job_id}")
    return chosen


def look_once(
    reader: SweepReader,
    *,
    wall: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> SweepView:
    """One view, with a verdict on jap-run only where it can be had truthfully.

    One look cannot tell whether jap-run lives. Where the clocks hint that it wrote nothing for long, its event file is
    watched for a little more than a beat: the hint decides whether to wait, only the file decides what is said.
    """
    watcher = Watcher(monotonic())
    view = reader.look()
    watcher.judge(view, monotonic())
    age = None if view.last_written is None else wall() - view.last_written
    if view.finished or (age is not None and abs(age) < SILENT_SECONDS):
        return view
    hint = "" if age is None or age < 0 else f", and it last wrote {duration(age)} ago by the clock of {view.node}"
    print(f"{PREFIX} jap-run's last word looks old: watching for {SECOND_LOOK_SECONDS:.0f} s", file=sys.stderr)
    while view.verdict == "not judged" and not view.finished:  # ends: the watcher's patience is finite
        sleep(FIRST_INTERVAL)
        view = reader.look()
        watcher.judge(view, monotonic(), SECOND_LOOK_SECONDS, hint)
    return view


def _watch(reader: SweepReader, root: Path, job_id: int, index: int | None, *, as_json: bool) -> int:
    """Refresh until nothing changes any more, following the job into later attempts; returns the exit code."""
    show: Callable[[SweepView], None]
    live: Any = None
    if as_json:
        show = _JsonLines(index)
    else:
        console = _console()
        if console.is_terminal:
            from rich.live import Live

            live = Live(console=console, auto_refresh=False, transient=True)
            show = _LiveTable(live, index)
        else:
            show = _Tables(console, index)
    watcher, interval = Watcher(time.monotonic()), FIRST_INTERVAL
    view = reader.look()
    select(view, index)
    try:
        if live is not None:
            live.start()
        while True:
            watcher.judge(view, time.monotonic())
            show(view)
            if view.finished or view.verdict == "silent":
                break
            time.sleep(interval)
            interval = min(interval * INTERVAL_GROWTH, LAST_INTERVAL)
            latest = store.latest_attempt(root, job_id)
            if latest is not None and latest.path != reader.directory.path:
                reader, watcher = open_sweep(root, job_id), Watcher(time.monotonic())
            view = reader.look()
    finally:
        if live is not None:
            live.stop()
            console.print(render(view, select(view, index)))
    if view.verdict == "silent":
        print(f"{PREFIX} no sign of jap-run: stopped watching; ask Slurm with squeue -j {job_id}", file=sys.stderr)
        return SILENT_EXIT_CODE
    return 0


class _JsonLines:
    """Prints a document whenever something changed."""

    def __init__(self, index: int | None) -> None:
        self._index, self._last = index, ""

    def __call__(self, view: SweepView) -> None:
        line = json.dumps(to_json(view, select(view, self._index)))
        if line != self._last:
            print(line, flush=True)
            self._last = line


class _LiveTable:
    """Redraws the table in place."""

    def __init__(self, live: Any, index: int | None) -> None:
        self._live, self._index = live, index

    def __call__(self, view: SweepView) -> None:
        self._live.update(render(view, select(view, self._index)), refresh=True)


class _Tables:
    """For output that is no terminal: a whole table whenever a member's state changed."""

    def __init__(self, console: Console, index: int | None) -> None:
        self._console, self._index = console, index
        self._last: list[tuple[int, MemberState]] = []

    def __call__(self, view: SweepView) -> None:
        members = select(view, self._index)
        states = [(m.member.index, m.state) for m in members]
        if states != self._last:
            self._console.print(render(view, members))
            sys.stdout.flush()
            self._last = states


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 100_000  # for a file or a pipe: one line per member, whatever its length
    return console


if __name__ == "__main__":
    sys.exit(main())
