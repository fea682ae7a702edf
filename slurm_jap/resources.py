"""From what one member of an array requests to what the coalesced job requests: the first sizing rule.

Pure: no I/O, no torch. ``member_request`` reads sbatch's resource options, ``plan`` sizes the job:

* engines: stages x groups, one per GPU if the member asks for GPUs; stages default to one member's GPUs, groups to 1;
* host memory and CPUs: one member's request per group for the engines, plus one member's for every member that runs
  at once, within what a node has. Members that do not fit into memory run later (``at_once``). CPUs can be shared: the
  script's request was made for a process that feeds all of the GPUs alone, so only ``#JAP --member-cpus`` keeps the
  members from running at once;
* time: one member's limit x ceil(members / groups), or what the planner predicts; never above the partition's.

What is unclear raises ``Unclear``: the array stays a plain one, and the message is the reason.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

from slurm_jap.errors import JapError
from slurm_jap.jap_options import JapOptions


class Unclear(JapError):
    """The request cannot be sized; the message is the reason for a plain array."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemberRequest:
    """What one member asks for, over all its nodes."""

    gpus: int = 0
    gpu_type: str = ""
    """Empty: any."""
    nodes: int = 1
    cpus: int | None = None
    """None: nothing said; Slurm's default is 1."""
    memory_mb: int | None = None
    """None: nothing said, the cluster's default; 0: all of the node."""
    time_min: int | None = None
    """None: nothing said, the partition's default."""
    unlimited: bool = False
    """A time limit of ``UNLIMITED`` was asked for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeClass:
    """Equal nodes of a partition."""

    count: int
    cpus: int
    memory_mb: int
    gpus: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """By type (``""``: no type given)."""

    def gpus_of(self, gpu_type: str) -> int:
        """GPUs of one node; of any type for ``""``."""
        return sum(self.gpus.values()) if not gpu_type else self.gpus.get(gpu_type, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a partition allows; None: no limit, or unknown."""

    partition: str = ""
    max_time_min: int | None = None
    default_time_min: int | None = None
    max_nodes: int | None = None
    max_cpus_per_node: int | None = None
    max_memory_per_node_mb: int | None = None
    max_memory_per_cpu_mb: int | None = None
    default_memory_per_node_mb: int | None = None
    default_memory_per_cpu_mb: int | None = None
    default_memory_per_gpu_mb: int | None = None
    node_classes: tuple[NodeClass, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the coalesced job asks for."""

    stages: int
    groups: int
    nodes: int
    gpus_per_node: int
    gpu_type: str
    cpus_per_node: int
    memory_per_node_mb: int | None
    """None: the cluster's default; 0: all of a node."""
    time_min: int | None
    """None: the partition's default, or no limit (``unlimited``)."""
    unlimited: bool
    at_once: int
    """Members that run at once."""
    member_cpus: int
    member_memory_mb: int | None
    """Limit of one member's own process; None: none."""
    member_time_min: int | None
    """Limit of one member: a task's own x the members that share its group at once; None: the job's limit rules."""
    notes: tuple[str, ...] = ()
    """Where limits, and not the wish, decided."""

    @property
    def gres(self) -> str:
        """The explicit ``--gres`` per node; empty: no GPUs."""
        if not self.gpus_per_node:
            return ""
        return ":".join(filter(None, ("gpu", self.gpu_type, str(self.gpus_per_node))))

    def sbatch_words(self) -> list[str]:
        """The options that ask Slurm for it."""
        words = [f"--nodes={self.nodes}", f"--ntasks={self.nodes}", "--ntasks-per-node=1"]
        words.append(f"--cpus-per-task={self.cpus_per_node}")
        if self.gres:
            words.append(f"--gres={self.gres}")
        if self.memory_per_node_mb is not None:
            words.append(f"--mem={self.memory_per_node_mb}M" if self.memory_per_node_mb else "--mem=0")
        if self.unlimited:
            words.append("--time=UNLIMITED")
        elif self.time_min is not None:
            words.append(f"--time={self.time_min}")
        return words


_SIZING = """
    nodes ntasks ntasks-per-node cpus-per-task mincpus mem mem-per-cpu mem-per-gpu gres gpus gpus-per-node gpus-per-task
    cpus-per-gpu tres-per-task time"""
_UNCLEAR = """
    gpus-per-socket ntasks-per-core ntasks-per-gpu ntasks-per-socket ntasks-per-tres extra-node-info sockets-per-node
    cores-per-socket threads-per-core overcommit core-spec thread-spec gpu-bind tres-bind mem-update resources"""

SIZING = frozenset(_SIZING.split())
"""The options that ``member_request`` reads and the coalesced job's own request replaces."""

UNCLEAR = frozenset(_UNCLEAR.split())
"""Resource options that say nothing certain about a job that several members share."""


def parse_minutes(text: str) -> int | None:
    """A time limit as sbatch reads it, in minutes rounded up; None: unlimited.

    Raises:
        Unclear: it is none.
    """
    if text.upper() in ("-1", "INFINITE", "UNLIMITED"):
        return None
    match = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text)
    if match is None:
        raise Unclear(f"time limit {text!r} is not understood")
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    if days is not None:
        seconds = ((days * 24 + (first or 0)) * 60 + (second or 0)) * 60 + (third or 0)
    elif third is not None:
        seconds = ((first or 0) * 60 + (second or 0)) * 60 + third
    else:
        seconds = (first or 0) * 60 + (second or 0)
    return math.ceil(seconds / 60) or None


def parse_memory(text: str, option: str) -> int:
    """MiB of ``--mem`` and its kin, as sbatch reads them; 0 is what it says.

    Raises:
        Unclear: it is none.
    """
    match = re.fullmatch(r"\+?([0-9]{1,15})(?:([KMGT])B?)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise Unclear(f"{option}={text} is not understood")
    number, unit = int(match.group(1)), (match.group(2) or "M").upper()
    return -(-number // 1024) if unit == "K" else number * {"M": 1, "G": 1024, "T": 1024 * 1024}[unit]


def _count(text: str, option: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise Unclear(f"{option}={text} is not understood")
    return int(text)


def _nodes(text: str) -> int:
    low, dash, high = text.partition("-")
    if dash and low != high:
        raise Unclear(f"--nodes={text}: a range of nodes")
    return _count(low, "--nodes")


def without_places(gres: str) -> str:
    """A GRES text without the sockets or devices that sinfo adds: ``gpu:4(S:0-1)`` is ``gpu:4``."""
    return re.sub(r"\([^)]*\)", "", gres)


def parse_gpus(text: str, option: str) -> dict[str, int]:
    """GPUs by type of a request such as ``2``, ``a100``, ``a100:2`` or ``a:1,b:1``.

    Raises:
        Unclear: it is none.
    """
    found: dict[str, int] = {}
    for part in without_places(text).split(","):
        match = re.fullmatch(r"(?:([A-Za-z0-9_.\-]+)[:=])?([0-9]{1,6})|([A-Za-z0-9_.\-]+)", part.strip())
        if match is None:
            raise Unclear(f"{option}={text} is not understood")
        kind = match.group(1) or match.group(3) or ""
        found[kind] = found.get(kind, 0) + int(match.group(2) or 1)
    return found


def parse_gres(text: str, option: str = "--gres") -> dict[str, int]:
    """GPUs by type of a ``--gres`` request, or of what sinfo tells of a node's GRES.

    Raises:
        Unclear: it names other resources, or is not understood.
    """
    found: dict[str, int] = {}
    if text.lower() in ("none", "", "(null)"):
        return found
    for part in without_places(text).split(","):
        match = re.fullmatch(r"(?:gres[:/])?gpu(?:[:=](.+))?", part.strip())
        if match is None:
            raise Unclear(f"{option} asks for {part.strip()!r}, not for GPUs alone")
        for kind, number in parse_gpus(match.group(1) or "1", option).items():
            found[kind] = found.get(kind, 0) + number
    return found


def _per_task(text: str) -> tuple[dict[str, int], int | None]:
    """GPUs by type and CPUs of ``--tres-per-task``."""
    gpus: dict[str, int] = {}
    cpus = None
    for part in text.split(","):
        if match := re.fullmatch(r"cpu[:=]([0-9]{1,6})", part.strip()):
            cpus = int(match.group(1))
        else:
            for kind, number in parse_gres(part, "--tres-per-task").items():
                gpus[kind] = gpus.get(kind, 0) + number
    return gpus, cpus


def member_request(options: Mapping[str, str]) -> MemberRequest:
    """What one member asks for.

    Args:
        options: the effective values of sbatch's options by long name; others than ``SIZING`` and ``UNCLEAR`` are
            not looked at.

    Raises:
        Unclear: how much that is cannot be said for certain.
    """
    for name in sorted(UNCLEAR):
        if name in options:
            raise Unclear(f"--{name} says nothing certain about a job that several members share")
    tasks = _count(options["ntasks"], "--ntasks") if "ntasks" in options else None
    tasks_per_node = _count(options["ntasks-per-node"], "--ntasks-per-node") if "ntasks-per-node" in options else None
    if "nodes" in options:
        nodes = _nodes(options["nodes"])
    else:
        nodes = math.ceil(tasks / tasks_per_node) if tasks and tasks_per_node else 1
    tasks = tasks or nodes * (tasks_per_node or 1)

    task_gpus, task_cpus = _per_task(options["tres-per-task"]) if "tres-per-task" in options else ({}, None)
    ways: dict[str, dict[str, int]] = {}
    if "gpus" in options:
        ways["--gpus"] = parse_gpus(options["gpus"], "--gpus")
    for name, parse, times in (("gres", parse_gres, nodes), ("gpus-per-node", parse_gpus, nodes)):
        if name in options:
            ways[f"--{name}"] = {kind: n * times for kind, n in parse(options[name], f"--{name}").items()}
    if "gpus-per-task" in options:
        one = parse_gpus(options["gpus-per-task"], "--gpus-per-task")
        ways["--gpus-per-task"] = {kind: n * tasks for kind, n in one.items()}
    if task_gpus:
        ways["--tres-per-task"] = {kind: n * tasks for kind, n in task_gpus.items()}
    ways = {way: gpus for way, gpus in ways.items() if gpus}
    if len({tuple(sorted(gpus.items())) for gpus in ways.values()}) > 1:
        raise Unclear(f"{' and '.join(ways)} ask for different GPUs")
    gpus = next(iter(ways.values()), {})
    if len(gpus) > 1:
        raise Unclear(f"{next(iter(ways))} asks for GPUs of several types ({', '.join(map(repr, gpus))})")
    gpu_type, gpu_count = next(iter(gpus.items()), ("", 0))
    if gpu_count == 0:
        gpu_type = ""

    cpus = None
    if "cpus-per-task" in options:
        cpus = tasks * _count(options["cpus-per-task"], "--cpus-per-task")
    elif task_cpus:
        cpus = tasks * task_cpus
    elif "cpus-per-gpu" in options and gpu_count:
        cpus = gpu_count * _count(options["cpus-per-gpu"], "--cpus-per-gpu")
    elif tasks > nodes:
        cpus = tasks
    if "mincpus" in options:
        cpus = max(cpus or 1, nodes * _count(options["mincpus"], "--mincpus"))

    said = [name for name in ("mem", "mem-per-cpu", "mem-per-gpu") if name in options]
    if len(said) > 1:
        raise Unclear(f"--{said[0]} and --{said[1]} exclude each other")
    memory = None
    if said:
        share = parse_memory(options[said[0]], f"--{said[0]}")
        memory = share * {"mem": nodes, "mem-per-cpu": cpus or tasks, "mem-per-gpu": gpu_count}[said[0]]
    time_min = parse_minutes(options["time"]) if "time" in options else None
    return MemberRequest(
        gpus=gpu_count,
        gpu_type=gpu_type,
        nodes=nodes,
        cpus=cpus,
        memory_mb=memory,
        time_min=time_min,
        unlimited="time" in options and time_min is None,
    )


def shape(member: MemberRequest, asked: JapOptions) -> tuple[int, int]:
    """Stages and groups: as asked for, else the GPUs of one member and 1."""
    return asked.stages or max(1, member.gpus), asked.groups or 1


def _node_class(classes: Sequence[NodeClass], member: MemberRequest, per_node: int, nodes: int) -> NodeClass | None:
    """The commonest kind of node that has the GPUs, the smaller of equals; None: nothing is known of the nodes."""
    if not classes:
        return None
    fit = [c for c in classes if c.gpus_of(member.gpu_type) >= per_node]
    if sum(c.count for c in fit) < nodes:
        kind = f" of type {member.gpu_type}" if member.gpu_type else ""
        raise Unclear(f"{nodes} node(s) with {per_node} GPU(s){kind} each are needed, the partition has not so many")
    enough = [c for c in fit if c.count >= nodes] or fit
    return max(enough, key=lambda c: (c.count, -c.memory_mb, -c.cpus))


def _spread(total: int, member: MemberRequest, limits: Limits) -> tuple[int, int]:
    """Nodes, and GPUs on each: the member's nodes while they can hold them, else as few as can."""
    largest = max((c.gpus_of(member.gpu_type) for c in limits.node_classes), default=None)
    if largest == 0 and total:
        kind = f" of type {member.gpu_type}" if member.gpu_type else ""
        raise Unclear(f"the partition's nodes have no GPUs{kind}")
    nodes = min(member.nodes, max(1, total)) if total else member.nodes
    if largest and total > nodes * largest:
        nodes = math.ceil(total / largest)
    if limits.max_nodes is not None and nodes > limits.max_nodes:
        raise Unclear(f"{nodes} nodes are needed for {total} GPUs, the partition allows {limits.max_nodes}")
    return nodes, math.ceil(total / nodes)


def _default_memory(member: MemberRequest, cpus: int, limits: Limits) -> int | None:
    """What the cluster gives a member that says nothing of memory; None: unknown, or all of the node."""
    if member.gpus and limits.default_memory_per_gpu_mb:
        return member.gpus * limits.default_memory_per_gpu_mb
    if limits.default_memory_per_cpu_mb:
        return cpus * limits.default_memory_per_cpu_mb
    if limits.default_memory_per_node_mb:
        return member.nodes * limits.default_memory_per_node_mb
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """What is predicted of the job's time, in place of one member's limit for each member of a group."""

    of: Callable[[int], float]
    """How many times one member's time alone the job takes, given how many members run at once."""
    margin: float
    """Time limit over prediction."""


STARTING_SECONDS = 3.0
"""CPU seconds that a member takes to start (an interpreter, and torch): members that share CPUs wait for each other."""


def _predicted_time(
    own: int | None, pace: float, margin: float, starting: float, limits: Limits, notes: list[str]
) -> tuple[int | None, bool, int | None]:
    """As ``_time``, from a prediction: with its margin, never below one member's own limit, never above MaxTime.

    ``starting`` is how many minutes the members need to start.
    """
    most = limits.max_time_min
    if own is None:
        if most is not None and pace > 1:
            raise Unclear("no --time is given, and the partition's longest cannot be multiplied; give --time")
        return None, False, most
    needed, wished = math.ceil(own * max(1.0, pace)), math.ceil(own * max(1.0, pace * margin) + starting)
    if most is not None and needed > most:
        raise Unclear(
            f"{needed} minutes are predicted ({pace:.2f} x one member's {own}), the partition allows {most}: give less "
            f"--time, more --groups, or split the array into {math.ceil(needed / most)} or more"
        )
    if most is not None and wished > most:
        notes.append(f"the time limit is the partition's longest, {most} min; {needed} min are predicted")
        wished = most
    return wished, False, own


def _time(member: MemberRequest, rounds: int, limits: Limits) -> tuple[int | None, bool, int | None]:
    """The job's time limit, whether it is unlimited, and what one array task would have had."""
    most = limits.max_time_min
    if member.unlimited:
        if most is not None:
            raise Unclear(f"no time limit is asked for, the partition allows {most} minutes; give --time")
        return None, True, None
    own = member.time_min if member.time_min is not None else limits.default_time_min
    if own is None:
        if most is not None and rounds > 1:
            raise Unclear("no --time is given, and the partition's longest cannot be multiplied; give --time")
        return None, False, most
    if most is not None and own * rounds > most:
        raise Unclear(
            f"{rounds} x {own} minutes ({rounds} members of a group, one member's --time) exceed "
            f"the partition's {most}; give less --time, or more --groups"
        )
    return own * rounds, False, own


def plan(
    member: MemberRequest,
    asked: JapOptions,
    members: int,
    limits: Limits,
    *,
    throttle: int | None = None,
    pace: Pace | None = None,
) -> Request:
    """Size the coalesced job.

    Args:
        members: K, the size of the array.
        throttle: members that the array allows at once.
        pace: what the planner predicts; None: nothing is known, the first sizing rule holds for the time limit.

    Raises:
        Unclear: it cannot be sized within the limits; the message says what would help.
    """
    stages, groups = shape(member, asked)
    engines = stages * groups
    nodes, gpus_per_node = _spread(engines if member.gpus else 0, member, limits)
    if not member.gpus:
        nodes = min(nodes, engines)
    node = _node_class(limits.node_classes, member, gpus_per_node, nodes)
    notes: list[str] = []

    own_cpus = member.cpus or 1
    member_cpus = asked.member_cpus or math.ceil(own_cpus / member.nodes)
    most_cpus = _least(node.cpus if node else None, limits.max_cpus_per_node)
    engine_cpus = math.ceil(max(engines, groups * own_cpus) / nodes)
    if most_cpus is not None and engine_cpus > most_cpus:
        engine_cpus = most_cpus

    own_memory = member.memory_mb if member.memory_mb is not None else _default_memory(member, own_cpus, limits)
    member_memory = asked.member_mem or (math.ceil(own_memory / member.nodes) if own_memory else None)
    most_memory = _least(node.memory_mb if node else None, limits.max_memory_per_node_mb)
    if limits.max_memory_per_cpu_mb is not None and most_cpus is not None:  # beyond it, Slurm asks for more CPUs
        most_memory = _least(most_memory, limits.max_memory_per_cpu_mb * most_cpus)
    whole_node = own_memory == 0 or (own_memory is None and asked.member_mem is not None)
    engine_memory = math.ceil(groups * (own_memory or 0) / nodes)

    wished = min(members, throttle or members)
    per_node = math.ceil(wished / nodes)
    if most_cpus is not None and engine_cpus + per_node * member_cpus > most_cpus:
        fit = max(1, (most_cpus - engine_cpus) // member_cpus)
        if asked.member_cpus and fit < per_node:
            notes.append(
                f"{fit} of {per_node} members at once on a node, for its {most_cpus} CPUs: {engine_cpus} for the "
                f"engines, {member_cpus} for each member (#JAP --member-cpus)"
            )
            per_node = fit
        else:
            notes.append(f"{per_node} members share the node's {most_cpus} CPUs (#JAP --member-cpus keeps them apart)")
    if member_memory is not None and most_memory is not None:
        fit = (most_memory - engine_memory) // member_memory
        if fit < 1:
            raise Unclear(
                f"a node has {most_memory} MiB; the engines need {engine_memory}, a member {member_memory}: "
                "say with #JAP --member-mem how much a member's own process needs, or give less --mem"
            )
        if fit < per_node:
            notes.append(
                f"{fit} of {per_node} members at once on a node, for its {most_memory} MiB: {engine_memory} for the "
                f"engines, {member_memory} for each member (#JAP --member-mem says how much a member needs)"
            )
            per_node = fit

    cpus_per_node = engine_cpus + per_node * member_cpus
    memory_per_node: int | None
    if whole_node:
        memory_per_node = 0
    elif member_memory is None:
        memory_per_node = None
    else:
        memory_per_node = engine_memory + per_node * member_memory
    at_once = min(wished, nodes * per_node)
    if pace is None or member.unlimited:
        time_min, unlimited, task_time = _time(member, math.ceil(members / groups), limits)
        slower = float(math.ceil(at_once / groups))
    else:
        own_time = member.time_min if member.time_min is not None else limits.default_time_min
        starting = members * STARTING_SECONDS / 60 / (nodes * cpus_per_node)
        time_min, unlimited, task_time = _predicted_time(
            own_time, pace.of(at_once), pace.margin, starting, limits, notes
        )
        # One member's part of it: the rounds before and after are others'.
        slower = max(1.0, pace.of(at_once) / math.ceil(members / at_once) * pace.margin)
    member_time = None if task_time is None or at_once == members else math.ceil(task_time * slower)
    return Request(
        stages=stages,
        groups=groups,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu_type=member.gpu_type,
        cpus_per_node=cpus_per_node if most_cpus is None else min(cpus_per_node, most_cpus),
        memory_per_node_mb=memory_per_node,
        time_min=time_min,
        unlimited=unlimited,
        at_once=at_once,
        member_cpus=member_cpus,
        member_memory_mb=member_memory,
        member_time_min=member_time,
        notes=tuple(notes),
    )


def _least(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)
