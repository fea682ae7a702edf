"""jap.conf: what the administrator enables, partition by partition. Pure but for ``check_file``; no torch.

    Python=/opt/slurm-jap/bin/python
    Partition=gpu MaxMembers=64 MaxTime=2-00:00:00 NodeMemory=512G

One line holds either global ``Key=Value`` words or one partition, whose line begins with ``Partition=``. Keys are not
case-sensitive, ``#`` begins a comment anywhere in a line, a line never continues on the next. ``KEYS`` is the one table
from which checks, messages and the documentation derive; etc/jap.lua reads the same language, and a test holds the two
together. A file with a fault enables nothing: the checker exists so that the administrator sees the fault first.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import re
from collections.abc import Callable

MAX_BYTES = 65536
"""jap.conf is read at each submission of an array under slurmctld's locks: it stays small."""


class Scope(str, enum.Enum):
    """Where a key may stand."""

    GLOBAL = "global"
    """In a line of its own, outside partitions."""
    PARTITION = "partition"
    """In a line that begins with ``Partition=``."""


class Kind(str, enum.Enum):
    """What a value looks like; the text is the rule that messages and documentation show."""

    PATH = "an absolute path without spaces, quotes, $, !, \\ or #"
    NAME = "a partition's name: letters, digits, '_', '-', '.'"
    COUNT = "a whole number from 1 to 4000001"
    MEMBERS = "a whole number from 1 to 1000"
    MINUTES = "a time as Slurm writes it (minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS), at least one minute"
    MEMORY = "a whole number with K, M, G or T (without: M), at least 1M"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of jap.conf."""

    name: str
    scope: Scope
    kind: Kind
    doc: str
    """One line for the administrator."""
    required: bool = False
    default: int | None = None
    """The value where the key is absent; None: see ``doc``."""


KEYS: tuple[Key, ...] = (
    Key(
        name="Python",
        scope=Scope.GLOBAL,
        kind=Kind.PATH,
        required=True,
        doc="The interpreter that has slurm_jap installed, at the same path on every node of the enabled partitions.",
    ),
    Key(
        name="MaxArraySize",
        scope=Scope.GLOBAL,
        kind=Kind.COUNT,
        default=1001,
        doc="MaxArraySize of slurm.conf, if set there. An array with an index beyond it is left to Slurm.",
    ),
    Key(
        name="DefMemPerCPU",
        scope=Scope.GLOBAL,
        kind=Kind.MEMORY,
        doc="DefMemPerCPU of slurm.conf, if set there: what a member asks for that names no memory.",
    ),
    Key(
        name="DefMemPerNode",
        scope=Scope.GLOBAL,
        kind=Kind.MEMORY,
        doc="DefMemPerNode of slurm.conf, if set there, likewise.",
    ),
    Key(
        name="Partition",
        scope=Scope.PARTITION,
        kind=Kind.NAME,
        required=True,
        doc="Enables this partition: arrays of opted-in scripts are coalesced there. One line each, once.",
    ),
    Key(
        name="MaxTime",
        scope=Scope.PARTITION,
        kind=Kind.MINUTES,
        required=True,
        doc="The longest time limit a coalesced job may ask for. Not above the wall limit of any QOS in use there.",
    ),
    Key(
        name="MaxMembers",
        scope=Scope.PARTITION,
        kind=Kind.MEMBERS,
        default=64,
        doc="An array with more members stays a plain array.",
    ),
    Key(
        name="NodeCPUs",
        scope=Scope.PARTITION,
        kind=Kind.COUNT,
        doc="CPUs of the partition's smallest node. Absent: the partition's CPUs divided by its nodes.",
    ),
    Key(
        name="NodeMemory",
        scope=Scope.PARTITION,
        kind=Kind.MEMORY,
        doc="Memory of the partition's smallest node (its RealMemory). "
        "Absent: a script that asks for memory stays a plain array.",
    ),
    Key(
        name="NodeGPUs",
        scope=Scope.PARTITION,
        kind=Kind.COUNT,
        doc="GPUs of the partition's smallest node. Absent: a coalesced job never asks more GPUs of a node than a "
        "member did.",
    ),
)

_BY_LOWER = {key.name.lower(): key for key in KEYS}


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A fault in a file; ``str()`` gives the line for the administrator."""

    name: str
    """The file's name, as the caller gave it."""
    line: int
    """Counted from 1; 0: the file as a whole."""
    message: str

    def __str__(self) -> str:
        where = f"{self.name}:{self.line}" if self.line else self.name
        return f"jap: {where}: {self.message}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartitionConf:
    """One enabled partition."""

    name: str
    max_time_minutes: int
    max_members: int = 64
    node_cpus: int | None = None
    node_memory_mb: int | None = None
    node_gpus: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conf:
    """A jap.conf without faults. No partitions: nothing is coalesced by the plugin."""

    python: str | None
    partitions: dict[str, PartitionConf]
    max_array_size: int = 1001
    default_memory_per_cpu_mb: int | None = None
    default_memory_per_node_mb: int | None = None


def parse_minutes(text: str) -> int | None:
    """Whole minutes of a Slurm time, seconds dropped; None if it is none, or shorter than a minute."""
    if not re.fullmatch(r"(\d{1,6}-)?\d{1,7}(:\d{1,7}){0,2}", text, re.ASCII):
        return None
    days, dash, rest = text.rpartition("-")
    fields = [int(field) for field in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*fields, 0, 0)[:3]
    elif len(fields) == 1:
        hours, minutes, seconds = 0, fields[0], 0
    elif len(fields) == 2:
        hours, (minutes, seconds) = 0, fields
    else:
        hours, minutes, seconds = fields
    total = (int(days or 0) * 24 + hours) * 60 + minutes + seconds // 60
    return total if total >= 1 else None


def parse_memory_mb(text: str) -> int | None:
    """MiB of a memory size, fractions dropped; None if it is none, or below 1 MiB."""
    match = re.fullmatch(r"(\d{1,9})([KkMmGgTt]?)", text, re.ASCII)
    if not match:
        return None
    kib = {"K": 1, "M": 1 << 10, "G": 1 << 20, "T": 1 << 30}[match[2].upper() or "M"]
    total = int(match[1]) * kib >> 10
    return total if total >= 1 else None


def _count_up_to(limit: int) -> Callable[[str], int | None]:
    def parse_count(text: str) -> int | None:
        if not re.fullmatch(r"\d{1,7}", text, re.ASCII):
            return None
        return int(text) if 1 <= int(text) <= limit else None

    return parse_count


def _parse_path(text: str) -> str | None:
    return text if text.startswith("/") and not re.search(r'["\'$`\\!]', text) else None


def _parse_name(text: str) -> str | None:
    return text if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", text, re.ASCII) else None


_PARSERS: dict[Kind, Callable[[str], int | str | None]] = {
    Kind.PATH: _parse_path,
    Kind.NAME: _parse_name,
    Kind.COUNT: _count_up_to(4_000_001),
    Kind.MEMBERS: _count_up_to(1000),
    Kind.MINUTES: parse_minutes,
    Kind.MEMORY: parse_memory_mb,
}


class _Reader:
    """Reads one text, collecting every problem in the order of the lines."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problems: list[Problem] = []
        self.globals: dict[str, int | str] = {}
        self.partitions: list[dict[str, int | str]] = []
        self.named_python = False

    def problem(self, line: int, message: str) -> None:
        self.problems.append(Problem(self.name, line, message))

    def read(self, text: str) -> None:
        if len(text.encode("utf-8", "surrogateescape")) > MAX_BYTES:
            self.problem(0, f"larger than {MAX_BYTES} bytes: keep the Partition= lines, move the comments elsewhere")
            return
        for number, raw in enumerate(text.split("\n"), start=1):
            content = raw.split("#", 1)[0].strip(" \t\r")
            if not all(c == "\t" or " " <= c <= "~" for c in content):
                self.problem(number, "a character that is not plain ASCII: retype the line")
            elif content:
                self.line(number, content.split())
        if self.partitions and not self.named_python:
            self.problem(0, "Python= is missing: add Python=/absolute/path/of/the/interpreter that has slurm_jap")

    def line(self, number: int, words: list[str]) -> None:
        scope = Scope.PARTITION if words[0].lower().startswith("partition=") else Scope.GLOBAL
        values: dict[str, int | str] = self.globals if scope is Scope.GLOBAL else {}
        faults = len(self.problems)
        for position, word in enumerate(words):
            self.word(number, word, position, scope, values)
        if scope is Scope.GLOBAL or len(self.problems) > faults:
            return
        name = values["Partition"]
        if any(other["Partition"] == name for other in self.partitions):
            self.problem(number, f"Partition={name} stands twice: keep one line")
            return
        if "MaxTime" not in values:
            self.problem(number, f"Partition={name} lacks MaxTime=: add the longest limit that every QOS allows there")
            return
        self.partitions.append(values)

    def word(self, number: int, word: str, position: int, scope: Scope, values: dict[str, int | str]) -> None:
        name, equals, text = word.partition("=")
        if not equals:
            self.problem(number, f"{word!r} is not Key=Value: write it without spaces around '='")
            return
        key = _BY_LOWER.get(name.lower())
        self.named_python |= key is not None and key.name == "Python"
        if key is None:
            nearest = difflib.get_close_matches(name.lower(), _BY_LOWER, n=1, cutoff=0.0)[0]
            self.problem(number, f"unknown key {name!r}: the nearest known key is {_BY_LOWER[nearest].name}")
            return
        if key.scope is not scope or (key.name == "Partition" and position > 0):
            rule = (
                "begin a line of its own with it"
                if key.name == "Partition" or key.scope is Scope.GLOBAL
                else "move it to a line that begins with Partition="
            )
            self.problem(number, f"{key.name}= may not stand here: {rule}")
            return
        if key.name in values:
            self.problem(number, f"{key.name}= stands twice: keep one")
            return
        value = _PARSERS[key.kind](text)
        if value is None:
            self.problem(number, f"{key.name}={text}: expected {key.kind.value}")
            return
        values[key.name] = value


def _read(text: str, name: str) -> _Reader:
    reader = _Reader(name)
    reader.read(text)
    return reader


def check_text(text: str, name: str = "jap.conf") -> list[Problem]:
    """Every fault of a jap.conf's text, in the order of its lines; empty: it is good."""
    return _read(text, name).problems


def parse(text: str, name: str = "jap.conf") -> Conf:
    """The configuration.

    Raises:
        ValueError: the text has a fault; the message is the first one.
    """
    reader = _read(text, name)
    if reader.problems:
        raise ValueError(str(reader.problems[0]))
    partitions = {}
    for values in reader.partitions:
        numbers = {key: value for key, value in values.items() if isinstance(value, int)}
        partition = PartitionConf(
            name=str(values["Partition"]),
            max_time_minutes=numbers["MaxTime"],
            max_members=numbers.get("MaxMembers", 64),
            node_cpus=numbers.get("NodeCPUs"),
            node_memory_mb=numbers.get("NodeMemory"),
            node_gpus=numbers.get("NodeGPUs"),
        )
        partitions[partition.name] = partition
    numbers = {key: value for key, value in reader.globals.items() if isinstance(value, int)}
    python = reader.globals.get("Python")
    return Conf(
        python=None if python is None else str(python),
        partitions=partitions,
        max_array_size=numbers.get("MaxArraySize", 1001),
        default_memory_per_cpu_mb=numbers.get("DefMemPerCPU"),
        default_memory_per_node_mb=numbers.get("DefMemPerNode"),
    )


def check_file(path: str) -> list[str]:
    """The faults of the file at ``path``, one line each; empty: it is good.

    A file that cannot be read is one such line, never an exception.
    """
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        return [f"jap: {path}: cannot be read ({error.strerror}): give the path of a jap.conf"]
    return [str(problem) for problem in check_text(text, path)]


def key_table() -> str:
    """``KEYS`` as a Markdown table; docs/admin.md holds exactly this text."""
    rows = ["| key | where | value | if absent | meaning |", "| --- | --- | --- | --- | --- |"]
    for key in KEYS:
        where = "own line" if key.scope is Scope.GLOBAL else "partition line"
        absent = "error" if key.required else "see right" if key.default is None else str(key.default)
        rows.append(f"| `{key.name}` | {where} | {key.kind.value} | {absent} | {key.doc} |")
    return "\n".join(rows) + "\n"
