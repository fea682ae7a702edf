"""The one place that runs Slurm's commands on the login side. No torch.

``Commands`` asks in the text forms that every Slurm since 22.05 prints (``-o`` formats, ``scontrol -o``); it never
guesses a missing answer. Every question has a time limit.
"""

from __future__ import annotations

import dataclasses
import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from slurm_jap import resources
from slurm_jap.errors import JapError
from slurm_jap.resources import Limits, NodeClass

QUESTION_SECONDS = 30.0
"""Slurm's own commands give up after a few MessageTimeouts (10 s each)."""
SUBMIT_SECONDS = 600.0
"""sbatch itself retries for up to two minutes while the queue is full."""

_ANSWER = re.compile(r"([0-9]+)(?:;(\S+))?\s*")


class SlurmError(JapError):
    """Slurm gave no answer; the message says to which question, and what it said instead."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What ``scontrol show config`` tells."""

    version: tuple[int, int]
    max_array_size: int
    max_array_tasks: int | None
    default_memory_per_cpu_mb: int | None
    default_memory_per_node_mb: int | None
    max_memory_per_node_mb: int | None
    max_memory_per_cpu_mb: int | None
    file: str
    """Path of its slurm.conf here; empty: not told."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What became of a submission."""

    code: int
    """sbatch's exit code; with ``--wait`` the job's."""
    job_id: int | None
    """None: nothing was submitted, or (with ``--quiet``) nobody said its number."""
    cluster: str = ""
    found_in_queue: bool = False
    """sbatch failed, or said no number, and yet the job is in the queue."""


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[0-9]+", text) else None


def _minutes(text: str | None) -> int | None:
    """A time limit as scontrol shows it; None: unlimited, none, or not understood."""
    if not text or text.upper() in ("UNLIMITED", "NONE", "INFINITE", "N/A"):
        return None
    try:
        return resources.parse_minutes(text)
    except resources.Unclear:
        return None


class Commands:
    """Slurm, through its commands."""

    def __init__(self, environment: Mapping[str, str] | None = None, cluster: str = "") -> None:
        """Make one.

        Args:
            environment: for all commands; None: this process's.
            cluster: ask this cluster instead of the local one (``-M``).
        """
        self._environment = dict(os.environ if environment is None else environment)
        self._cluster = (f"--clusters={cluster}",) if cluster else ()

    def sbatch(self) -> str:
        """Path of sbatch.

        Raises:
            SlurmError: this machine has none.
        """
        path = shutil.which("sbatch", path=self._environment.get("PATH"))
        if path is None:
            raise SlurmError("no sbatch on this machine; type --jap-local to run the members here, without Slurm")
        return path

    def _ask(self, *command: str) -> str:
        # What a user's own settings make of the output (SQUEUE_FORMAT, SINFO_*, SLURM_TIME_FORMAT) is not for us.
        own = re.compile(r"SQUEUE_|SINFO_|SCONTROL_|SLURM_TIME_FORMAT$|SLURM_JSON$|SLURM_YAML$")
        environment = {name: value for name, value in self._environment.items() if not own.match(name)}
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=QUESTION_SECONDS,
                encoding="utf-8",
                errors="surrogateescape",
            )
        except OSError as error:
            raise SlurmError(f"cannot run {command[0]}: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            raise SlurmError(f"{command[0]} gave no answer within {QUESTION_SECONDS:.0f} s") from None
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise SlurmError(f"{' '.join(command[:3])}: {said[-1] if said else f'exit code {done.returncode}'}")
        return done.stdout

    def config(self) -> Config:
        """The cluster's configuration, as far as we need it.

        Raises:
            SlurmError: no answer.
        """
        values = {}
        for line in self._ask("scontrol", *self._cluster, "show", "config").splitlines():
            name, equals, value = line.partition("=")
            if equals:
                values[name.strip()] = value.strip()
        version = re.match(r"([0-9]+)\.([0-9]+)", values.get("SLURM_VERSION", ""))
        size = _number(values.get("MaxArraySize"))
        if version is None or size is None:
            raise SlurmError("scontrol show config tells no SLURM_VERSION or MaxArraySize")
        tasks = re.search(r"max_array_tasks=([0-9]+)", values.get("SchedulerParameters", ""), re.IGNORECASE)
        return Config(
            version=(int(version.group(1)), int(version.group(2))),
            max_array_size=size,
            max_array_tasks=int(tasks.group(1)) if tasks else None,
            default_memory_per_cpu_mb=_number(values.get("DefMemPerCPU")),
            default_memory_per_node_mb=_number(values.get("DefMemPerNode")),
            max_memory_per_node_mb=_number(values.get("MaxMemPerNode")),
            max_memory_per_cpu_mb=_number(values.get("MaxMemPerCPU")),
            file=values.get("SLURM_CONF", ""),
        )

    def limits(self, partition: str, config: Config, feature: str = "") -> Limits:
        """What a partition allows, and its nodes.

        Args:
            partition: empty: the cluster's default.
            feature: only nodes that have it; empty: all.

        Raises:
            SlurmError: no answer, or no such partition.
        """
        chosen = None
        name = (partition,) if partition else ()
        for line in self._ask("scontrol", *self._cluster, "-o", "show", "partition", *name).splitlines():
            values = dict(word.partition("=")[::2] for word in line.split() if "=" in word)
            if values.get("PartitionName") == partition or (not partition and values.get("Default") == "YES"):
                chosen = values
        if chosen is None:
            raise SlurmError(f"no partition {partition!r}" if partition else "the cluster has no default partition")
        job_defaults = dict(word.partition("=")[::2] for word in chosen.get("JobDefaults", "").split(","))
        per_cpu, per_node = _number(chosen.get("DefMemPerCPU")), _number(chosen.get("DefMemPerNode"))
        if per_cpu is None and per_node is None:
            per_cpu, per_node = config.default_memory_per_cpu_mb, config.default_memory_per_node_mb
        most_per_cpu, most_per_node = _number(chosen.get("MaxMemPerCPU")), _number(chosen.get("MaxMemPerNode"))
        if most_per_cpu is None and most_per_node is None:
            most_per_cpu, most_per_node = config.max_memory_per_cpu_mb, config.max_memory_per_node_mb
        return Limits(
            partition=chosen["PartitionName"],
            max_time_min=_minutes(chosen.get("MaxTime")),
            default_time_min=_minutes(chosen.get("DefaultTime")),
            max_nodes=_number(chosen.get("MaxNodes")),
            max_cpus_per_node=_number(chosen.get("MaxCPUsPerNode")),
            max_memory_per_node_mb=most_per_node or None,
            max_memory_per_cpu_mb=most_per_cpu or None,
            default_memory_per_cpu_mb=per_cpu or None,
            default_memory_per_node_mb=per_node or None,
            default_memory_per_gpu_mb=_number(job_defaults.get("DefMemPerGPU")) or None,
            node_classes=self._nodes(chosen["PartitionName"], feature),
        )

    def _nodes(self, partition: str, feature: str) -> tuple[NodeClass, ...]:
        names: dict[tuple[int, int, tuple[tuple[str, int], ...]], set[str]] = {}
        text = self._ask("sinfo", *self._cluster, "-h", "-N", "-p", partition, "-o", "%N|%c|%m|%G|%f")
        for line in text.splitlines():
            fields = line.split("|")
            if len(fields) != 5 or not fields[1].isdigit() or not fields[2].isdigit():
                continue
            name, cpus_text, memory_text, gres, features = fields
            if feature and feature not in features.split(","):
                continue
            gpus: dict[str, int] = {}
            for part in resources.without_places(gres).split(","):
                if re.match(r"gpu(:|$)", part):
                    for kind, number in resources.parse_gres(part).items():
                        gpus[kind] = gpus.get(kind, 0) + number
            names.setdefault((int(cpus_text), int(memory_text), tuple(sorted(gpus.items()))), set()).add(name)
        if not names:
            return ()
        # Of each kind, one node tells what it keeps for the system.
        examples = {min(group): kind for kind, group in names.items()}
        found = []
        for line in self._ask("scontrol", *self._cluster, "-o", "show", "node", ",".join(examples)).splitlines():
            values = dict(word.partition("=")[::2] for word in line.split() if "=" in word)
            kind_of_node = examples.get(values.get("NodeName", ""))
            if kind_of_node is None:
                continue
            cpus, memory, node_gpus = kind_of_node
            found.append(
                NodeClass(
                    count=len(names[kind_of_node]),
                    cpus=_number(values.get("CPUEfctv")) or cpus,
                    memory_mb=memory - (_number(values.get("MemSpecLimit")) or 0),
                    gpus=dict(node_gpus),
                )
            )
        return tuple(found)

    def job_of_script(self, script: str) -> int | None:
        """The job in this user's queue whose script lies in this script's (uniquely named) folder; None: there is none.

        Raises:
            SlurmError: no answer.
        """
        for line in self._ask("squeue", *self._cluster, "-h", "--me", "-o", "%A|%o").splitlines():
            job_id, _, command = line.partition("|")
            if os.path.dirname(script) in command and job_id.isdigit():
                return int(job_id)
        return None

    def submit(
        self,
        options: Sequence[str],
        script: str,
        arguments: Sequence[str],
        *,
        submitted: Callable[[Answer], None],
        silent: bool = False,
    ) -> Answer:
        """Run sbatch once, never twice, and find out which job came of it.

        sbatch's standard error is this process's. Whatever else it, or a site's wrapper of it, prints is kept off
        standard output. If it fails after the controller had the job, the queue knows: the script's path is unique.

        Args:
            options: sbatch's, without ``--parsable``.
            script: path of the batch script, different for every submission.
            submitted: called once, as soon as the job's number is known (before the end of ``--wait``).
            silent: ``--quiet`` is among the options: no number is printed, and its absence means nothing.

        Raises:
            SlurmError: sbatch cannot be run.
        """
        command = [self.sbatch(), *options, "--parsable", script, *arguments]
        try:
            process = subprocess.Popen(command, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        except OSError as error:
            raise SlurmError(f"cannot run {command[0]}: {error.strerror}") from None
        assert process.stdout is not None
        answer = None
        with process:
            try:
                answer = _read_answer(process.stdout.fileno(), None if silent else SUBMIT_SECONDS)
                if answer is not None:
                    submitted(answer)
                while process.stdout.read(65536):
                    pass
                code = process.wait()
            except TimeoutError:
                process.kill()
                code = process.wait()
            except BaseException:
                process.terminate()
                raise
        code = 128 - code if code < 0 else code
        if answer is not None:
            return dataclasses.replace(answer, code=code)
        if silent and code == 0:
            return Answer(code, None)
        try:
            job_id = self.job_of_script(script)
        except SlurmError:
            job_id = None
        if job_id is None:
            return Answer(code or 1, None)
        answer = Answer(0, job_id, found_in_queue=True)
        submitted(answer)
        return answer


def _read_answer(fd: int, seconds: float | None) -> Answer | None:
    """The first line that is a job's number; None: the output ended without one.

    Raises:
        TimeoutError: neither within ``seconds``.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    received = b""
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([fd], [], [], left)[0]:
            raise TimeoutError
        chunk = os.read(fd, 65536)
        received += chunk
        *lines, received = received.split(b"\n") if chunk else [received, b""]
        for line in lines:
            match = _ANSWER.fullmatch(line.decode("utf-8", "replace").strip())
            if match is not None:
                return Answer(0, int(match.group(1)), match.group(2) or "")
        if not chunk:
            return None
