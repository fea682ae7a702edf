"""A sweep: the members of one job array, their states, and the manifest that describes one attempt at running them.

Pure: no I/O, no torch. The manifest is written once per attempt (see ``store``) and read by every other process;
whatever changes afterwards travels as events.
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections.abc import Mapping
from typing import Any

MANIFEST_VERSION = 1


class MemberState(str, enum.Enum):
    """What is known of a member, in Slurm's words. Slurm's verdict, where there is one, beats our own belief."""

    PENDING = "PENDING"
    """Not started: it waits for its turn (throttle, memory) or for the allocation. Nothing of it exists yet."""
    RUNNING = "RUNNING"
    """Its script runs, and its launcher was seen alive."""
    COMPLETED = "COMPLETED"
    """Its script ended with code 0."""
    FAILED = "FAILED"
    """Its script ended with another code."""
    CANCELLED = "CANCELLED"
    """It was ended on request; siblings go on."""
    TIMEOUT = "TIMEOUT"
    """It reached its own or the job's time limit."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """It went beyond its share of host memory and was killed for it, whatever its exit code says."""
    NODE_FAIL = "NODE_FAIL"
    """Its node went away."""
    REQUEUED = "REQUEUED"
    """The job went back to the queue before this member ended; the next attempt runs it again."""
    UNKNOWN = "UNKNOWN"
    """No sign of the launcher for a while, or a word we do not know. Nothing is concluded from it."""

    @property
    def terminal(self) -> bool:
        """Whether the member will not change any more in this attempt."""
        return self not in (MemberState.PENDING, MemberState.RUNNING, MemberState.UNKNOWN)


def exit_code_of(wait_status: int) -> int:
    """Map ``subprocess`` return codes (negative for signals) to the shell's convention: a signal counts as 128+n."""
    return 128 - wait_status if wait_status < 0 else wait_status


def state_of(code: int) -> MemberState:
    """The state that an exit code alone tells (128+15 and 128+2 count as cancelled, as Slurm does)."""
    if code == 0:
        return MemberState.COMPLETED
    if code in (128 + signal.SIGTERM, 128 + signal.SIGINT):
        return MemberState.CANCELLED
    return MemberState.FAILED


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One array task of the sweep."""

    index: int
    """SLURM_ARRAY_TASK_ID."""
    output: str
    """Absolute path of its standard output, the user's pattern expanded."""
    error: str | None = None
    """Absolute path of its standard error; None when it shares ``output``."""

    @property
    def step_name(self) -> str:
        """Name of its Slurm step, as squeue -s and sacct show it."""
        return f"member_{self.index}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The manifest of one attempt: all that submit, run, engine and status need to agree on."""

    job_id: int
    """Slurm's job id, or the local launcher's own number."""
    attempt: int
    """SLURM_RESTART_COUNT: 0 at first."""
    job_name: str
    launcher: str
    """``slurm`` or ``local``."""
    array: str
    """The array specification as the user wrote it."""
    throttle: int | None
    """At most this many members at once (``%N`` of the specification); None: no limit."""
    members: tuple[Member, ...]
    """In ascending index."""
    script: str
    """Path of the carried user script, inside the sweep directory."""
    arguments: tuple[str, ...]
    """The script's arguments."""
    work_dir: str
    stages: int
    """S: engines per pipeline."""
    groups: int
    """G: pipelines side by side. A member that joins gets the one with the fewest members."""
    member_cpus: int | None = None
    member_memory_mb: int | None = None
    member_time_minutes: int | None = None
    version: int = MANIFEST_VERSION

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, nothing lost."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sweep:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: the manifest was written by a version that this one does not understand.
        """
        version = data.get("version")
        if version != MANIFEST_VERSION:
            raise ValueError(
                f"manifest version {version!r}: this slurm_jap reads version {MANIFEST_VERSION}; "
                "use the slurm_jap that ran the sweep"
            )
        fields = {f.name for f in dataclasses.fields(cls)}
        kept = {k: v for k, v in data.items() if k in fields}
        kept["members"] = tuple(Member(**m) for m in data["members"])
        kept["arguments"] = tuple(data["arguments"])
        return cls(**kept)
