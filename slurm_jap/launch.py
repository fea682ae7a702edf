"""What the launchers have in common: their contract with the coordinator, the manifest, a member's array variables.

Torch-free. A launcher starts two kinds of things, members and one engine set, and tells how each ended.
``launch_local`` starts child processes, ``launch_slurm`` starts Slurm steps; all above them is the same code.
"""

from __future__ import annotations

import dataclasses
import getpass
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from slurm_jap import array_spec, filename_pattern, step, store, wire
from slurm_jap.carried import Carried
from slurm_jap.environment import ENV_DEVICE_MEMORY
from slurm_jap.errors import UsageError
from slurm_jap.sweep import Member, MemberState, Sweep

ENGINE_MODULE = "slurm_jap.engine"
LAUNCHERS_OWN = ("SLURM", "SBATCH", "SRUN", "JAP_", "_jap_", "PMI_", "PMIX_")
"""Prefixes of the variables that a launcher sets for what it starts and never takes from another process."""
DEVICE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "GPU_DEVICE_ORDINAL",
)
"""Which devices a process sees: empty for members, the allocation's for the engine."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of the allocation."""

    name: str
    """As Slurm calls it (``JAP_NODE``)."""
    cpus: int
    """CPUs that the allocation has there."""
    devices: int | None = None
    """Devices that the engine may use there; None: as many as are needed (CPU)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a member or the engine set ended."""

    code: int
    """Exit code; 128+n for signal n."""
    state: MemberState
    reason: str | None = None
    """One line, where something is known beyond the code."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What the engine set is started with: the first member's own interpreter and surroundings."""

    executable: str
    cwd: str
    environment: Mapping[str, str]
    """The member's; the launcher replaces SLURM_*, JAP_* and the device variables by its own."""


class Started(Protocol):
    """A member or the engine set, running."""

    pid: int

    async def wait(self) -> Ended:
        """Wait for its end; whatever it left behind is gone then."""

    async def kill(self) -> None:
        """End it now, whatever it ignores; ``wait`` returns soon after."""


class Launcher(Protocol):
    """Starts members and the engine set. ``OSError`` from a start means that it did not happen."""

    nodes: Sequence[Node]

    def node_of(self, member: Member) -> str:
        """Name of the node on which the member runs."""

    async def start_member(self, member: Member, environment: Mapping[str, str]) -> Started:
        """Start a member's script; ``environment`` holds the JAP_* and SLURM_ARRAY_* variables to set."""

    async def start_engine(self, request: EngineRequest, environment: Mapping[str, str]) -> Started:
        """Start one engine agent per node; ``environment`` holds the JAP_* variables to set."""

    async def forward(self, signum: int) -> None:
        """Pass a signal that jap-run alone received to the members' scripts."""


def user_name() -> str:
    """The user's name; its number where no name is known, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def sweep_root(output: str, work_dir: Path) -> Path:
    """The folder that holds ``.jap``: that of the members' output files; the working directory if it cannot serve."""
    folder = work_dir / filename_pattern.fixed_folder(output)
    held = folder / store.JAP_DIR  # in a folder shared by a group it may be another user's
    usable = os.access(held if held.exists() else folder, os.W_OK | os.X_OK)
    return folder if usable else work_dir


def place_members(count: int, nodes: Sequence[Node]) -> list[Node]:
    """The node of each member, by position: members are spread in proportion to the nodes' CPUs."""
    held = dict.fromkeys(range(len(nodes)), 0)
    placed = []
    for _ in range(count):
        best = min(held, key=lambda n: ((held[n] + 1) / max(1, nodes[n].cpus), n))
        held[best] += 1
        placed.append(nodes[best])
    return placed


def place_engines(stages: int, groups: int, nodes: Sequence[Node]) -> dict[str, list[dict[str, int]]]:
    """Which node runs which engines: in order, the stages of a group side by side; ``device`` counts within the node.

    Raises:
        UsageError: the allocation has fewer devices than stages x groups.
    """
    wanted = [(group, stage) for group in range(groups) for stage in range(stages)]
    share = -(-len(wanted) // len(nodes))
    rooms = [share if node.devices is None else node.devices for node in nodes]
    if sum(rooms) < len(wanted):
        raise UsageError(
            f"{groups} group(s) of {stages} stage(s) need {len(wanted)} GPUs, the allocation has {sum(rooms)}: "
            f"ask for {len(wanted)} GPUs, or type --jap-stages={max(1, sum(rooms) // groups)}"
        )
    placed: dict[str, list[dict[str, int]]] = {node.name: [] for node in nodes}
    spots = ((node.name, device) for node, room in zip(nodes, rooms, strict=True) for device in range(room))
    for (group, stage), (name, device) in zip(wanted, spots, strict=False):
        placed[name].append({"group": group, "stage": stage, "device": device})
    return placed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job that a sweep runs in, as Slurm (or the local launcher) describes it."""

    job_id: int
    name: str
    user: str
    work_dir: Path
    attempt: int = 0
    """SLURM_RESTART_COUNT."""
    slurm: tuple[int, int] = (24, 11)
    """Slurm's version, which decides how file names are expanded."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a member runs, and the file it reads."""

    node: Node
    input: str
    """Absolute path of its standard input."""


def lay_out(
    facts: Carried, arguments: Sequence[str], job: Job, nodes: Sequence[Node], launcher: str, script: Path
) -> tuple[Sweep, dict[int, Place], dict[int, dict[str, str]]]:
    """The manifest; per member its place and its SLURM_ARRAY_* variables.

    Raises:
        UsageError: the array is none that Slurm accepts.
    """
    spec = array_spec.parse(facts.array, max_size=array_spec.LARGEST_MAX_ARRAY_SIZE)
    if not spec.indices:
        raise UsageError(f"array specification {facts.array!r} names no member: write --array=0-7")
    members, places = [], {}
    for index, node in zip(spec.indices, place_members(len(spec.indices), nodes), strict=True):

        def path(pattern: str, index: int = index, node: Node = node) -> str:
            name = filename_pattern.expand(
                pattern, job_id=job.job_id, array_job_id=job.job_id, index=index, job_name=job.name, user=job.user,
                node=node.name, node_index=nodes.index(node), restarts=job.attempt, slurm=job.slurm,
            )  # fmt: skip
            return os.path.join(job.work_dir, name)

        members.append(Member(index=index, output=path(facts.output), error=path(facts.error) if facts.error else None))
        places[index] = Place(node=node, input=path(facts.input) if facts.input else os.devnull)
    limits = [n for n in (spec.throttle, facts.at_once) if n]
    sweep = Sweep(
        job_id=job.job_id,
        attempt=job.attempt,
        job_name=job.name,
        launcher=launcher,
        array=facts.array,
        throttle=min(limits, default=None),
        members=tuple(members),
        script=str(script),
        arguments=tuple(arguments),
        work_dir=str(job.work_dir),
        stages=facts.stages or 1,
        groups=facts.groups or 1,
        member_cpus=facts.member_cpus,
        member_memory_mb=facts.member_mem_mb,
        member_time_minutes=facts.member_time_min,
    )
    arrays = {index: spec.environment(job.job_id, index) for index in spec.indices}
    return sweep, places, arrays


_SET_FOR_EACH = (
    wire.ENV_CONTROL,
    wire.ENV_SWEEP_DIR,
    wire.ENV_MEMBER,
    wire.ENV_JOB_ID,
    wire.ENV_NODE,
    wire.ENV_SOCKET_DIR,
)


def own_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """This process's environment as it was given, without what an enclosing sweep told it of itself."""
    return {k: v for k, v in step.without_coercion(environment).items() if k not in _SET_FOR_EACH}


def engine_environment(
    own: Mapping[str, str], request: EngineRequest, added: Mapping[str, str], facts: Carried
) -> dict[str, str]:
    """The engine's environment: the member's, with the launcher's own SLURM_*, JAP_* and device variables."""
    launchers = LAUNCHERS_OWN + DEVICE_VARIABLES
    kept = {k: v for k, v in request.environment.items() if not k.startswith(launchers)}
    bound = facts.memory_per_device_mb
    asked = {} if bound is None else {ENV_DEVICE_MEMORY: str(bound << 20)}
    return kept | {k: v for k, v in own.items() if k.startswith(launchers)} | asked | dict(added)
