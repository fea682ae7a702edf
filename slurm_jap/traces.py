"""Readers of cluster traces: ``sacct -P`` dumps, Philly-style CSV, the Standard Workload Format (SWF).

Pure: text lines in, a ``Trace`` out; no I/O, no torch. A row that cannot be used is never guessed at: it is left out
and counted under one rule, with the row of its first example. A file in which no row can be used is a ``UsageError``.
Times are whole milliseconds; the first arrival is time 0.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta

from slurm_jap.errors import UsageError

FORMATS = ("sacct", "csv", "swf")
SACCT_COMMAND = (
    "sacct -a -X -P --noconvert -S 2025-01-01 -E 2025-04-01 "
    "-s CD,F,CA,TO,OOM,NF,PR,DL -o JobID,JobIDRaw,User,Account,Partition,Submit,Eligible,Start,End,"
    "ElapsedRaw,TimelimitRaw,NNodes,AllocTRES,State,JobName"
)
TIME_UNITS = {"ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000}

# What a CSV column may be called, the first found counts. The keys are the names that --column takes.
CSV_NAMES: Mapping[str, tuple[str, ...]] = {
    "submit": ("timestamp", "submit_time", "submit", "submitted_time", "arrival_time"),
    "duration": ("duration", "run_time", "runtime", "elapsed"),
    "gpus": ("num_gpus", "num_gpu", "gpus", "gpu_num"),
    "partition": ("partition", "cluster", "vc", "queue"),
    "user": ("user", "user_id", "username"),
    "name": ("job_name", "jobname", "name"),
    "array": ("array_job_id", "array_id", "array"),
    "job": ("job_id", "jobid", "id"),
    "limit": ("time_limit", "timelimit", "limit"),
    "nodes": ("num_nodes", "nodes", "node_num"),
}
_CSV_NEEDED = ("submit", "duration", "gpus")
# States of a job that has ended after running; sacct adds words to some ("CANCELLED by 1000").
_ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REQUEUED",
    "REVOKED", "TIMEOUT",
}  # fmt: skip
_NOT_ENDED = {"PENDING", "RUNNING", "SUSPENDED", "REQUEUE_HOLD", "RESIZING", "CONFIGURING", "COMPLETING", "STOPPED"}

RULE_TORN = "torn row"
RULE_NUMBER = "not a number or time"
RULE_NEGATIVE = "negative duration"
RULE_NO_GPU = "no GPU"
RULE_NEVER_RAN = "never ran"
RULE_NOT_ENDED = "not ended yet"
RULE_REPEATED = "repeated row"
RULE_STATE = "unknown state"
RULE_PARTIAL = "part of a job that another row holds whole"
RULE_TOO_LARGE = "larger than the cluster"
# Rules that say nothing against the file: rows that no GPU simulation is about.
EXPECTED_RULES = (RULE_NO_GPU, RULE_NEVER_RAN, RULE_NOT_ENDED, RULE_PARTIAL)


@dataclasses.dataclass(frozen=True, slots=True)
class TraceJob:
    """One job that ran."""

    row: int
    """Line of the file, from 1."""
    job: str
    submit: int
    """When it could first have started, ms after the trace's first job."""
    duration: int
    """ms, >= 0."""
    gpus: int
    nodes: int
    """Nodes it had; 0: unknown."""
    limit: int | None
    """Time limit, ms; None: unknown or unlimited."""
    partition: str
    user: str
    name: str
    array: str
    """Array job id; empty: not a task of an array, or unknown."""


@dataclasses.dataclass(slots=True)
class Skipped:
    """Rows left out by one rule."""

    rule: str
    count: int = 0
    first_row: int = 0
    first_text: str = ""


class SkipCounter:
    """Counts rows left out, by rule."""

    def __init__(self) -> None:
        self.by_rule: dict[str, Skipped] = {}

    def add(self, rule: str, row: int, text: str) -> None:
        """One more row; ``text`` says what is wrong with it."""
        skipped = self.by_rule.setdefault(rule, Skipped(rule))
        if not skipped.count:
            skipped.first_row, skipped.first_text = row, printable(text)
        skipped.count += 1


@dataclasses.dataclass(slots=True)
class Trace:
    """The jobs of a trace by time of arrival, and what was left out."""

    source: str
    format: str
    jobs: list[TraceJob]
    rows: int
    """Rows read, without header, comments, blank lines and sacct's step rows."""
    skipped: SkipCounter
    fields: frozenset[str]
    """Those of ``user``, ``name``, ``array``, ``partition``, ``limit`` that the trace has."""
    notes: list[str]
    """Lines that the reader of the results must know."""


class _BadRowError(Exception):
    def __init__(self, rule: str, text: str) -> None:
        super().__init__(text)
        self.rule = rule


def read_trace(
    lines: Iterable[str],
    source: str,
    *,
    format: str | None = None,
    columns: Mapping[str, str] | None = None,
    time_unit: str = "s",
) -> Trace:
    """Read a trace; ``source`` is the file's name for messages.

    ``format`` is one of ``FORMATS``, None: told from the first line. ``columns`` maps the keys of ``CSV_NAMES`` to the
    file's own column names; ``time_unit`` (a key of ``TIME_UNITS``) is that of bare numbers in a CSV.
    Raises UsageError where no row can be used.
    """
    numbered = ((row, line.rstrip("\r\n")) for row, line in enumerate(lines, 1))
    numbered = ((row, line) for row, line in numbered if line.strip())
    first = next(numbered, None)
    if first is None:
        raise UsageError(f"{source}: the trace is empty; give a file with one row per job, see jap-sim --help")
    first = (first[0], first[1].removeprefix("\ufeff"))
    found = format or _guess_format(first[1])
    rows = _chain(first, numbered)
    if found == "sacct":
        trace = _read_sacct(rows, source)
    elif found == "csv":
        trace = _read_csv(rows, source, columns or {}, TIME_UNITS[time_unit])
    elif found == "swf":
        trace = _read_swf(rows, source)
    else:
        raise UsageError(
            f"{source}:{first[0]}: {_short(first[1])} is neither a `sacct -P` header, nor a CSV header, nor SWF; "
            f"say which with --format {'|'.join(FORMATS)}"
        )
    if not trace.jobs:
        raise UsageError(f"{source}: no job to simulate among {trace.rows} rows{_why_none(trace)}")
    trace.jobs.sort(key=lambda job: (job.submit, job.row))
    origin = trace.jobs[0].submit
    if origin:
        trace.jobs = [dataclasses.replace(job, submit=job.submit - origin) for job in trace.jobs]
    return trace


def _why_none(trace: Trace) -> str:
    rules = trace.skipped.by_rule.values()
    if not rules:
        return "; the file ends after its header"
    said = "; ".join(f"{rule.rule}: {rule.count} (row {rule.first_row}: {rule.first_text})" for rule in rules)
    return f": {said}"


def _chain(first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _guess_format(line: str) -> str | None:
    if line.startswith(";"):
        return "swf"
    if "|" in line:
        return "sacct"
    if "," in line:
        return "csv"
    fields = line.split()
    if len(fields) >= 5 and all(re.fullmatch(r"-?\d+(\.\d+)?", field) for field in fields):
        return "swf"
    return None


def printable(text: str) -> str:
    """``text`` of a trace for a terminal: what is not printable is written as its escape."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


# --- values ---------------------------------------------------------------------------------------------------------

_EPOCH = datetime(1970, 1, 1)
_MILLISECOND = timedelta(milliseconds=1)
_CLOCK = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.(\d+))?")


def _instant(text: str, unit: int) -> int:
    """ms since an origin of the trace's own: a number of ``unit`` ms, or an ISO date and time (taken as UTC)."""
    if "-" in text[1:]:
        try:
            moment = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
        except ValueError:
            raise _BadRowError(RULE_NUMBER, f"{_short(text)} is not a date and time") from None
        if moment.tzinfo is not None:
            moment = (moment - (moment.utcoffset() or timedelta())).replace(tzinfo=None)
        return (moment - _EPOCH) // _MILLISECOND
    return _scaled(text, unit, "submit time")


def _span(text: str, unit: int, what: str) -> int:
    """A duration in ms: a number of ``unit`` ms, or [days-][hours:]minutes:seconds."""
    if ":" in text:
        match = _CLOCK.fullmatch(text.strip())
        if match is None:
            raise _BadRowError(RULE_NUMBER, f"{what} {_short(text)} is not [days-][hours:]minutes:seconds")
        days, hours, minutes, seconds, fraction = match.groups()
        whole = ((int(days or 0) * 24 + int(hours or 0)) * 60 + int(minutes)) * 60 + int(seconds)
        return whole * 1000 + int((fraction or "0").ljust(3, "0")[:3])
    value = _scaled(text, unit, what)
    if value < 0:
        raise _BadRowError(RULE_NEGATIVE, f"{what} is {text.strip()}")
    return value


def _scaled(text: str, unit: int, what: str) -> int:
    try:
        value = float(text) * unit
    except ValueError:
        raise _BadRowError(RULE_NUMBER, f"{what} is {_short(text)}") from None
    if not math.isfinite(value) or abs(value) > 1e15:
        raise _BadRowError(RULE_NUMBER, f"{what} is {_short(text)}")
    return round(value)


def _count(text: str, what: str) -> int:
    try:
        value = float(text)
    except ValueError:
        raise _BadRowError(RULE_NUMBER, f"{what} is {_short(text)}") from None
    if not (math.isfinite(value) and value == int(value) and abs(value) <= 1e6):
        raise _BadRowError(RULE_NUMBER, f"{what} is {_short(text)}, not a whole number of at most a million")
    return int(value)


# --- sacct ----------------------------------------------------------------------------------------------------------

_TRES_GPU = re.compile(r"gres/gpu(:[^=,]+)?=(\d+)")


def tres_gpus(tres: str) -> int:
    """GPUs in a TRES list such as ``cpu=8,gres/gpu=4,gres/gpu:a100=4``: the untyped total, else the sum over types."""
    total, typed = None, 0
    for kind, number in _TRES_GPU.findall(tres):
        if kind:
            typed += int(number)
        else:
            total = int(number)
    return typed if total is None else total


def _read_sacct(rows: Iterator[tuple[int, str]], source: str) -> Trace:
    header_row, header = next(rows)
    names = [name.strip().lower() for name in header.split("|")]
    at = {name: index for index, name in enumerate(names)}
    elapsed = next((name for name in ("elapsedraw", "elapsed") if name in at), None)
    limit_column = next((name for name in ("timelimitraw", "timelimit") if name in at), None)
    tres = next((name for name in ("alloctres", "reqtres") if name in at), None)
    missing = [
        title
        for title, known in (
            ("JobID", "jobid" in at),
            ("Submit", "submit" in at),
            ("ElapsedRaw or Elapsed", elapsed is not None),
            ("AllocTRES", tres is not None),
        )
        if not known
    ]
    if missing or elapsed is None or tres is None:
        raise UsageError(
            f"{source}:{header_row}: no column {', '.join(missing)} in the sacct header {_short(header)}; "
            f"make the dump with: {SACCT_COMMAND}"
        )
    skipped = SkipCounter()
    jobs: list[TraceJob] = []
    seen: set[tuple[str, ...]] = set()
    count = 0
    name_is_last = names[-1] == "jobname"
    width = len(names)

    for row, line in rows:
        if line == header:  # dumps put one after another
            continue
        fields = line.split("|")
        if len(fields) > width and name_is_last:
            # Job names may hold the delimiter; as the last column the rest of the line is the name.
            fields[width - 1 :] = ["|".join(fields[width - 1 :])]
        if "." in fields[0]:  # a step
            continue
        count += 1

        def field(name: str, fields: list[str] = fields) -> str:
            return fields[at[name]].strip() if name in at else ""

        try:
            if len(fields) != width:
                raise _BadRowError(RULE_TORN, f"{len(fields)} fields where the header has {width}")
            job = _sacct_job(row, field, elapsed, limit_column, tres)
            identity = (field("jobidraw") or job.job, field("submit"), field("start"))
            if identity in seen:
                raise _BadRowError(RULE_REPEATED, f"job {job.job} stands in an earlier row")
            seen.add(identity)
            jobs.append(job)
        except _BadRowError as bad:
            skipped.add(bad.rule, row, str(bad))
    has = {"user": "user", "jobname": "name", "partition": "partition"}
    fields_known = {known for column, known in has.items() if column in at} | {"array"}
    if any(job.limit is not None for job in jobs):
        fields_known.add("limit")
    notes = []
    if tres == "reqtres":
        notes.append("no AllocTRES column: GPUs are those requested (ReqTRES)")
    if "state" not in at:
        notes.append("no State column: rows that never ran or have not ended are told by their elapsed time alone")
    return Trace(source, "sacct", jobs, count, skipped, frozenset(fields_known), notes)


def _sacct_job(row: int, field: Callable[[str], str], elapsed: str, limit_column: str | None, tres: str) -> TraceJob:
    job_id = field("jobid")
    state = field("state").split(" ")[0].rstrip("+")
    if "[" in job_id or state in _NOT_ENDED:
        raise _BadRowError(RULE_NOT_ENDED, f"job {job_id} is {state or 'pending'}")
    if state and state not in _ENDED:
        raise _BadRowError(RULE_STATE, f"job {job_id} has state {_short(state)}")
    if field("start") in ("Unknown", "None"):
        raise _BadRowError(RULE_NEVER_RAN, f"job {job_id} has no start time")
    duration = _span(field(elapsed), 1000, "elapsed time")
    if duration == 0:
        raise _BadRowError(RULE_NEVER_RAN, f"job {job_id} has no elapsed time")
    gpus = tres_gpus(field(tres))
    if gpus == 0:
        raise _BadRowError(RULE_NO_GPU, f"job {job_id} had no GPU")
    submit = _instant(field("submit"), 1000)
    if field("eligible") not in ("", "Unknown", "None"):
        # Waiting for a dependency or a begin time is no waiting for GPUs.
        submit = max(submit, _instant(field("eligible"), 1000))
    limit = None
    if limit_column is not None and field(limit_column)[:1].isdigit():
        limit = _span(field(limit_column), 60_000, "time limit")
    nodes = _count(field("nnodes"), "NNodes") if field("nnodes") else 0
    array, underscore, _ = job_id.partition("_")
    return TraceJob(
        row, job_id, submit, duration, gpus, nodes, limit, field("partition"), field("user"), field("jobname"),
        array if underscore else "",
    )  # fmt: skip


# --- CSV ------------------------------------------------------------------------------------------------------------


def _csv_fields(line: str) -> list[str]:
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line]))
    except csv.Error as error:
        raise _BadRowError(RULE_TORN, str(error)) from None


def _read_csv(rows: Iterator[tuple[int, str]], source: str, columns: Mapping[str, str], unit: int) -> Trace:
    header_row, header = next(rows)
    try:
        names = [name.strip() for name in _csv_fields(header)]
    except _BadRowError as bad:
        raise UsageError(f"{source}:{header_row}: {bad} in the header {_short(header)}; mend it") from None
    lower = {name.lower(): index for index, name in enumerate(names)}
    at: dict[str, int] = {}
    for key, known in CSV_NAMES.items():
        if key in columns:
            if columns[key].lower() not in lower:
                raise UsageError(
                    f"{source}:{header_row}: no column {columns[key]!r} for {key}; the file has {', '.join(names)}"
                )
            at[key] = lower[columns[key].lower()]
        else:
            index = next((lower[name] for name in known if name in lower), None)
            if index is not None:
                at[key] = index
    missing = [key for key in _CSV_NEEDED if key not in at]
    if missing:
        raise UsageError(
            f"{source}:{header_row}: no column for {', '.join(missing)} among {', '.join(names)}; "
            f"name it with --column {missing[0]}=COLUMN (looked for: {', '.join(CSV_NAMES[missing[0]])})"
        )
    unused = [name for index, name in enumerate(names) if index not in at.values()]
    notes = [f"{source}:{header_row}: columns not used: {', '.join(unused)}"] if unused else []
    skipped = SkipCounter()
    jobs: list[TraceJob] = []
    count = 0
    width = len(names)
    submit_at, duration_at, gpus_at = at["submit"], at["duration"], at["gpus"]

    for row, line in rows:
        if line == header:
            continue
        count += 1
        fields: list[str] = []

        def field(key: str) -> str:
            return fields[at[key]].strip() if key in at else ""  # noqa: B023 (called in this turn of the loop only)

        try:
            fields = _csv_fields(line)
            if len(fields) != width:
                raise _BadRowError(RULE_TORN, f"{len(fields)} fields where the header has {width}")
            duration = _span(fields[duration_at], unit, "duration")
            gpus = _count(fields[gpus_at], "number of GPUs")
            if gpus == 0:
                raise _BadRowError(RULE_NO_GPU, "number of GPUs is 0")
            if gpus < 0:
                raise _BadRowError(RULE_NUMBER, f"number of GPUs is {gpus}")
            limit = _span(field("limit"), unit, "time limit") if field("limit") else None
            nodes = _count(field("nodes"), "number of nodes") if field("nodes") else 0
            submit = _instant(fields[submit_at], unit)
            jobs.append(
                TraceJob(
                    row,
                    field("job") or str(row),
                    submit,
                    duration,
                    gpus,
                    max(nodes, 0),
                    limit or None,
                    field("partition"),
                    field("user"),
                    field("name"),
                    field("array"),
                )
            )
        except _BadRowError as bad:
            skipped.add(bad.rule, row, str(bad))
    known_fields = {key for key in ("user", "name", "array", "partition", "limit") if key in at}
    return Trace(source, "csv", jobs, count, skipped, frozenset(known_fields), notes)


# --- SWF ------------------------------------------------------------------------------------------------------------

_SWF_WIDTH = 18


def _read_swf(rows: Iterator[tuple[int, str]], source: str) -> Trace:
    """SWF: 18 numbers a row, -1 for unknown. Its processors are taken as GPUs."""
    skipped = SkipCounter()
    jobs: list[TraceJob] = []
    count = 0
    for row, line in rows:
        if line.lstrip().startswith(";"):
            continue
        count += 1
        fields = line.split()
        try:
            if len(fields) != _SWF_WIDTH:
                raise _BadRowError(RULE_TORN, f"{len(fields)} fields where SWF has {_SWF_WIDTH}")
            if fields[10] in ("2", "3", "4"):
                raise _BadRowError(RULE_PARTIAL, f"job {fields[0]} has status {fields[10]}")
            if fields[3] == "-1":
                raise _BadRowError(RULE_NEVER_RAN, f"job {fields[0]} has no run time")
            duration = _span(fields[3], 1000, "run time")
            processors = _count(fields[4], "number of processors")
            if processors == -1:
                processors = _count(fields[7], "number of processors")
            if processors < 1:
                raise _BadRowError(RULE_NO_GPU, f"job {fields[0]} has {processors} processors")
            limit = _span(fields[8], 1000, "requested time") if fields[8] not in ("-1", "0") else None
            user, name, queue = ("" if fields[index] == "-1" else fields[index] for index in (11, 13, 14))
            submit = _instant(fields[1], 1000)
            jobs.append(TraceJob(row, fields[0], submit, duration, processors, 0, limit, queue, user, name, ""))
        except _BadRowError as bad:
            skipped.add(bad.rule, row, str(bad))
    known = {key for key in ("user", "name", "partition", "limit") if any(getattr(job, key) for job in jobs)}
    notes = ["SWF counts processors; each is taken as one GPU"]
    return Trace(source, "swf", jobs, count, skipped, frozenset(known), notes)


# --- siblings -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Siblings:
    """Which jobs are members of one array, by index into ``Trace.jobs``; arrays of at least two."""

    arrays: tuple[tuple[int, ...], ...]
    rule: str
    """How they were told, for the reader."""
    inferred: bool
    """Guessed from rows that name no array; such a guess counts too many."""


def siblings_by_array(trace: Trace) -> Siblings:
    """Real arrays: same array job id, user, job name, partition and GPUs."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, job in enumerate(trace.jobs):
        if job.array:
            groups.setdefault((job.array, job.user, job.name, job.partition, job.gpus), []).append(index)
    arrays = tuple(tuple(group) for group in groups.values() if len(group) > 1)
    return Siblings(arrays, "tasks with one array job id, user, job name, partition and number of GPUs", False)


def siblings_by_gap(trace: Trace, gap: int, alike: float | None = None) -> Siblings:
    """Guessed arrays: same partition, GPUs and (where known) user and job name, each within ``gap`` ms of the last.

    ``alike``: split them further, so that no member lasted longer than ``alike`` times the shortest of its array.
    """
    last: dict[tuple[object, ...], int] = {}
    open_group: dict[tuple[object, ...], list[int]] = {}
    groups: list[list[int]] = []
    for index, job in enumerate(trace.jobs):
        key = (job.partition, job.user, job.name, job.gpus)
        if key not in last or job.submit - last[key] > gap:
            open_group[key] = []
            groups.append(open_group[key])
        open_group[key].append(index)
        last[key] = job.submit
    if alike is not None:
        groups = [part for group in groups for part in _alike(trace, group, alike)]
    same = [label for key, label in _SAME if key in trace.fields]
    lacking = [label for key, label in _SAME if key not in trace.fields]
    if lacking:
        why = f"the trace names no {' and no '.join(lacking)}, so unrelated jobs are taken together"
    else:
        why = "jobs submitted one after another need not be a sweep"
    of_length = "" if alike is None else f", lasting at most {alike:g} times the shortest (known only afterwards)"
    rule = (
        f"guessed: same {', '.join([*same, 'number of GPUs'])}, each submitted at most {gap / 1000:g} s after the last"
        f"{of_length}. This counts too many: {why}"
    )
    return Siblings(tuple(tuple(group) for group in groups if len(group) > 1), rule, True)


def _alike(trace: Trace, group: list[int], alike: float) -> list[list[int]]:
    parts: list[list[int]] = []
    for index in sorted(group, key=lambda index: trace.jobs[index].duration):
        if parts and trace.jobs[index].duration <= alike * trace.jobs[parts[-1][0]].duration:
            parts[-1].append(index)
        else:
            parts.append([index])
    return [sorted(part) for part in parts]


_SAME = (("user", "user"), ("name", "job name"), ("partition", "partition"))
