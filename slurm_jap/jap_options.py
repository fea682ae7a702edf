"""The options that are ours: ``#JAP`` lines of a batch script, and ``jap-submit --jap-*``.

Pure: no I/O, no torch. One table, the fields of ``JapOptions``, from which the parser, ``--help`` and the documentation
are derived. Lines stand where ``#SBATCH`` lines may stand: before the first line that is neither blank nor a comment,
``#JAP`` in the first column, then a space, ``--`` or the end of the line. A bare ``#JAP`` line opts in, no more.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from slurm_jap.errors import UsageError

WORD = "#JAP"


def count(text: str) -> int:
    """A positive whole number.

    Raises:
        ValueError: it is none.
    """
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise ValueError("a whole number from 1 on, e.g. 4")
    return int(text)


def mebibytes(text: str) -> int:
    """A memory size as sbatch takes it (``500``, ``500M``, ``2G``, ``1T``), in MiB.

    Raises:
        ValueError: it is none, or zero.
    """
    match = re.fullmatch(r"([0-9]{1,15})([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if match is None or int(match.group(1)) == 0:
        raise ValueError("a size such as 500M, 2G or 1T (MiB without a letter)")
    number = int(match.group(1))
    unit = match.group(2).upper()
    return -(-number // 1024) if unit == "K" else number * {"": 1, "M": 1, "G": 1024, "T": 1024 * 1024}[unit]


THROUGHPUT, FINISH, GPU_HOURS = GOALS = ("throughput", "finish", "gpu-hours")
"""What the planner goes for; the first one unless the user says otherwise."""


def goal(text: str) -> str:
    """One of ``GOALS``.

    Raises:
        ValueError: it is none.
    """
    if text not in GOALS:
        raise ValueError(f"one of {', '.join(GOALS)}")
    return text


def _field(kind: Any, value: str, text: str) -> Any:
    return dataclasses.field(default=None, metadata={"parse": kind, "value": value, "help": text})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JapOptions:
    """What the user asked of us; None: nothing was said. ``#JAP --stages=4`` and ``--jap-stages=4`` are one key."""

    stages: int | None = _field(count, "N", "stages of a pipeline (default: the GPUs of one member, or 1)")
    groups: int | None = _field(count, "N", "pipelines side by side (default: 1)")
    member_mem: int | None = _field(
        mebibytes, "SIZE", "host memory of one member's own process, MiB (default: what the script requests)"
    )
    member_cpus: int | None = _field(count, "N", "CPUs of one member's own process (default: what the script requests)")
    goal: str | None = _field(
        goal, "GOAL", "throughput, finish or gpu-hours: what to plan for, the network being known (default: throughput)"
    )
    memory_per_device: int | None = _field(
        mebibytes, "SIZE", "what may lie on one device, MiB (default: its memory, once it is known)"
    )
    shared_job_id: bool | None = _field(
        None, "", "the script copes with one SLURM_JOB_ID for all members (%j without %a, SLURM_JOB_ID in its text)"
    )

    def overridden_by(self, other: JapOptions) -> JapOptions:
        """These options, with what ``other`` says in place of them."""
        said = {f.name: getattr(other, f.name) for f in dataclasses.fields(other)}
        return dataclasses.replace(self, **{name: value for name, value in said.items() if value is not None})


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One key, as users write it."""

    name: str
    """With dashes, without prefix: ``member-mem``."""
    value: str
    """Placeholder of its value in help texts; empty: a flag."""
    help: str


def table() -> tuple[Key, ...]:
    """All keys, in the order of the table."""
    return tuple(
        Key(f.name.replace("_", "-"), f.metadata["value"], f.metadata["help"]) for f in dataclasses.fields(JapOptions)
    )


def parse(words: Iterable[tuple[str, str]], prefix: str = "--", others: Sequence[str] = ()) -> JapOptions:
    """The options that words such as ``--stages=4`` or ``--stages 4`` set; the last one wins.

    Args:
        words: each word with where it stands, for messages.
        prefix: what stands before a key.
        others: words that the caller knows himself, to be named where they are nearest.

    Raises:
        UsageError: an unknown key (the nearest known one is named), a missing or a wrong value.
    """
    fields = {prefix + f.name.replace("_", "-"): f for f in dataclasses.fields(JapOptions)}
    values: dict[str, Any] = {}
    remaining = list(words)
    while remaining:
        word, place = remaining.pop(0)
        key, equals, value = word.partition("=")
        field = fields.get(key)
        if field is None:
            near = difflib.get_close_matches(key, [*fields, *others], n=1, cutoff=0.5)
            known = f"did you mean {near[0]}?" if near else "the keys are " + ", ".join([*fields, *others])
            raise UsageError(f"{place}: unknown key {word!r}; {known}")
        kind, placeholder = field.metadata["parse"], field.metadata["value"]
        if kind is None:
            if equals:
                raise UsageError(f"{place}: {key} takes no value, not {value!r}; write {key}")
            values[field.name] = True
            continue
        if not equals:
            if not remaining or remaining[0][0].startswith("--"):
                raise UsageError(f"{place}: {key} needs a value; write {key}={placeholder}")
            value = remaining.pop(0)[0]
        try:
            values[field.name] = kind(value)
        except ValueError as error:
            raise UsageError(f"{place}: {key}={value}: expected {error}") from None
    return JapOptions(**values)
