"""The Slurm launcher: members and engine as named steps of the job that jap-run is the batch script of. Torch-free.

    step engine      one task per node, all the job's devices and memory, never dies of a signal
    step member_3    the user's script on one node, no device, its own share of memory, every CPU of the job there

All steps overlap, and are started from an environment that holds nothing of the job's request: srun reads its defaults
there, and a step that asks for the job's GPUs or CPUs again waits for ever, or takes them from a sibling. ``step``
gives the member back what it should see, with what keeps an srun inside its script beside the running engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from slurm_jap import launch, step
from slurm_jap.carried import Carried
from slurm_jap.errors import UsageError
from slurm_jap.launch import ENGINE_MODULE, Ended, EngineRequest, Job, Node, Place
from slurm_jap.sweep import Member, MemberState, exit_code_of, state_of

LAUNCHER = "slurm"
ENGINE_STEP = "engine"
COMMAND_SECONDS = 60.0
"""A Slurm command that has not answered after this long is given up."""
SRUN_NEEDS = (
    "SLURM_CONF",
    "SLURM_CONF_SERVER",
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "SLURM_CLUSTER_NAME",
    "SLURM_WORKING_CLUSTER",
    "SLURM_JWT",
)
"""All that a step's srun may know of the job; everything else about the step is on its command line."""
DROPPED_FOR_MEMBERS = (
    re.compile(r"SLURM_(GPUS|GPU_|TRES_|CPUS_PER_(GPU|TRES)|MEM_PER_|NTASKS_PER_|STEP_|EXCLUSIVE|EXACT|WHOLE)"),
    re.compile(r"SLURM_(JOB_GPUS|STEPID|NTASKS|NPROCS|CPU_BIND\w*|MEM_BIND\w*|DISTRIBUTION|TASKS_PER_NODE)$"),
)
"""What the coalesced job's request left in the environment and no member asked for."""
_OUR_LINE = re.compile(rb"(slurmstepd|srun)\S*: ")
_VERDICTS = (
    (re.compile(r"oom.kill|out of memory|exceeded (job|step)? ?memory limit", re.I), MemberState.OUT_OF_MEMORY),
    (re.compile(r"DUE TO TIME LIMIT"), MemberState.TIMEOUT),
    (re.compile(r"DUE TO (JOB REQUEUE|PREEMPTION)"), MemberState.REQUEUED),
    (re.compile(r"node failure", re.I), MemberState.NODE_FAIL),
    (re.compile(r"CANCELLED AT"), MemberState.CANCELLED),
)
"""Slurm's word on a step, from what slurmstepd and srun print; the first that matches counts."""
_ORDINARY = re.compile(
    r"srun: error: \S+: tasks? [-\d,]+: |srun: (launch/slurm|Terminating|Force|got SIGCONT|cluster configuration lacks)"
)
"""What srun says of any task, and of any task that ends with a code or by a signal."""
_BUSY = re.compile(
    r"Socket timed out|Unable to (confirm allocation|contact slurm)|Connection (refused|reset)|Zero Bytes"
)
"""srun found nobody to start its step; it is worth another try."""
RETRY_SECONDS = (5.0, 20.0, 60.0)
"""How long to wait before each further try."""
_TAIL_BYTES = 1 << 16
_INNER = "inner"
"""Folder of the attempt that says which steps were started inside which member."""
_NOTE_INNER = f"""#!/bin/sh
# Runs before each task of an srun inside a member. Slurm does not end such a step with the step that started it.
: >"$JAP_SWEEP_DIR/{_INNER}/$JAP_MEMBER.$SLURM_STEP_ID" 2>/dev/null
exit 0
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What jap-run must know of the cluster."""

    version: tuple[int, int] = (22, 5)
    kill_wait: float = 30.0
    """Seconds between TERM and KILL when a job ends."""
    signals_reach_children: bool = False
    """Whether Slurm signals every process of a step (proctrack/linuxproc, pgid), not only the first (cgroup)."""
    binds_cpus: bool = True
    """Whether srun knows ``--cpu-bind`` (task/affinity or task/cgroup); else it complains of it."""
    append: bool = False
    """Whether output files are appended to by default (JobFileAppend)."""

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """From ``scontrol show config``; a missing line leaves the default."""
        values = dict(re.findall(r"^(\w+)\s*= (.*?)\s*$", text, re.MULTILINE))
        version = re.match(r"(\d+)\.(\d+)", values.get("SLURM_VERSION", ""))
        wait = re.match(r"\d+", values.get("KillWait", ""))
        unknown = cls()
        return cls(
            version=(int(version[1]), int(version[2])) if version else unknown.version,
            kill_wait=float(wait[0]) if wait else unknown.kill_wait,
            signals_reach_children=values.get("ProctrackType", "proctrack/cgroup") != "proctrack/cgroup",
            binds_cpus=re.search("affinity|cgroup", values.get("TaskPlugin", "affinity")) is not None,
            append=values.get("JobFileAppend", "0") == "1",
        )


class _Step:
    """A step, seen through its srun."""

    def __init__(self, spawn: Callable[[], Awaitable[asyncio.subprocess.Process]]) -> None:
        """``spawn`` runs srun; call :meth:`start` next."""
        self._spawn = spawn
        self._process: asyncio.subprocess.Process
        self.pid = 0
        self._killed = asyncio.Event()

    async def start(self) -> None:
        """Run srun.

        Raises:
            OSError: there is no such program, or no more processes.
        """
        self._process = await self._spawn()
        self.pid = self._process.pid

    async def wait(self) -> Ended:
        return verdict(exit_code_of(await self._process.wait()), [])

    async def kill(self) -> None:
        """srun ends its step by force when it is told to end; if it does not listen, the end of the job will."""
        self._killed.set()
        for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(self._process.wait())), 5)
                return


class _MemberStep(_Step):
    """A member's step: with srun's messages, a second try, and a way to signal the script itself."""

    def __init__(
        self,
        spawn: Callable[[], Awaitable[asyncio.subprocess.Process]],
        error_file: str,
        clean_up: Callable[[], Awaitable[None]],
        share: str,
    ) -> None:
        """``clean_up`` is awaited after its end; ``share`` is its host memory in words, empty if it has no limit."""
        super().__init__(spawn)
        self._error_file, self._clean_up, self._share = error_file, clean_up, share

    async def wait(self) -> Ended:
        """Wait for its end; a step that Slurm could not start for lack of an answer is tried again."""
        for delay in (*RETRY_SECONDS, None):
            code, lines, began = await self._until_end()
            busy = code != 0 and not began and any(_BUSY.search(line) for line in lines)
            if not busy or delay is None or self._killed.is_set():
                break
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(self._killed.wait(), delay)
                break
            await self.start()
        self._tell_member([line for line in lines if line.startswith("slurmstepd")])
        await self._clean_up()
        ended = verdict(code, lines)
        if ended.state is MemberState.OUT_OF_MEMORY:
            remedy = f" of {self._share}: ask for more with #JAP --member-mem" if self._share else ", the job's"
            ended = dataclasses.replace(ended, reason=f"went beyond its host memory{remedy}")
        return ended

    async def _until_end(self) -> tuple[int, list[str], bool]:
        """srun's exit code, what it printed, and whether the step began."""
        process = self._process
        assert process.stdout is not None
        assert process.stderr is not None
        said, began = await asyncio.gather(_tail(process.stderr), _tail(process.stdout))
        return exit_code_of(await process.wait()), said.decode(errors="replace").splitlines(), bool(began)

    def tell(self, signum: int) -> None:
        """Have the script itself get a signal."""
        if self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(f"{int(signum)}\n".encode())

    def _tell_member(self, lines: Sequence[str]) -> None:
        """Slurm's own messages end up where a batch job's would: in its error file."""
        if not lines:
            return
        with contextlib.suppress(OSError):
            fd = os.open(self._error_file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                os.write(fd, "".join(f"{line}\n" for line in lines).encode())
            finally:
                os.close(fd)


async def _tail(stream: asyncio.StreamReader) -> bytes:
    """The last part of all that comes."""
    kept = b""
    while chunk := await stream.read(4096):
        kept = (kept + chunk)[-_TAIL_BYTES:]
    return kept


def verdict(code: int, lines: Sequence[str]) -> Ended:
    """How a step ended, from srun's exit code and the lines that srun and slurmstepd printed."""
    for pattern, state in _VERDICTS:
        for line in lines:
            if pattern.search(line):
                return Ended(code=code or 1, state=state, reason=line.strip())
    told = (line.strip() for line in lines if line.strip() and not _ORDINARY.search(line))
    return Ended(code=code, state=state_of(code), reason=next(told, None) if code else None)


class SlurmLauncher:
    """See the module's text."""

    def __init__(
        self,
        facts: Carried,
        job: Job,
        nodes: Sequence[Node],
        script: Path,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        cluster: Cluster,
    ) -> None:
        """
        Args:
            log: takes the engine's own output; further small files are made beside it.
            environment: that of the batch step.

        Raises:
            UsageError: there is no srun.
            OSError: the files cannot be made.
        """
        self.nodes = nodes
        self.places: dict[int, Place] = {}
        self._facts, self._job, self._script, self._arguments = facts, job, script, tuple(arguments)
        self._log, self._cluster = log, cluster
        self._own = launch.own_environment(environment)
        self._srun, self._scancel = find_command("srun", self._own), find_command("scancel", self._own)
        self._members: set[_MemberStep] = set()
        self._note_inner = log.parent / "note-inner-step"
        self._note_inner.write_text(_NOTE_INNER)
        self._note_inner.chmod(0o700)
        (log.parent / _INNER).mkdir(mode=0o700)

    def node_of(self, member: Member) -> str:
        """Name of the member's node."""
        return self.places[member.index].node.name

    async def start_member(self, member: Member, environment: Mapping[str, str]) -> _MemberStep:
        """Start the member's step."""
        place, facts = self.places[member.index], self._facts
        share = self._share_on(place.node)
        memory = f"{share}M" if share else "0"
        options = ["-N1", "-n1", f"--nodelist={place.node.name}", f"--mem={memory}", "--gres=none"]
        if facts.member_time_min:
            options.append(f"--time={facts.member_time_min}")
        orders = {
            "role": "member",
            "forward": not self._cluster.signals_reach_children,
            "append": self._append,
            "input": place.input,
            "output": member.output,
            "error": None if member.error in (None, member.output) else member.error,
            "slurm": self._slurm_of_members(),
            "unset": [],
            "set": {**self._seen_by(place.node), **environment},
        }
        spawn = functools.partial(
            self._step, member.step_name, options, [str(self._script), *self._arguments], self._own, orders,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        started = _MemberStep(
            spawn,
            member.error or member.output,
            functools.partial(self._end_inner_steps, member.index),
            f"{share} MiB" if share else "",
        )
        await started.start()
        self._members.add(started)
        return started

    async def _end_inner_steps(self, index: int) -> None:
        """End what sruns inside the member have left running: plain Slurm ends it with the batch script."""
        folder = self._log.parent / _INNER
        steps = [f"{self._job.job_id}.{p.suffix[1:]}" for p in folder.glob(f"{index}.*") if p.suffix[1:].isdigit()]
        if steps:
            await ask(self._scancel, "--quiet", *sorted(steps), environment=self._own)

    async def start_engine(self, request: EngineRequest, environment: Mapping[str, str]) -> _Step:
        """Start the engine's step: one agent per node."""
        count = len(self.nodes)
        options = [
            f"-N{count}", f"-n{count}", "--ntasks-per-node=1", "--mem=0", f"--gres={self._facts.gres or 'none'}",
            "--kill-on-bad-exit=0", "--input=none",
        ]  # fmt: skip
        orders = {"role": "engine", "cwd": request.cwd}
        with self._log.open("ab") as log:
            spawn = functools.partial(
                self._step, ENGINE_STEP, options, [request.executable, "-m", ENGINE_MODULE],
                launch.engine_environment(self._own, request, environment, self._facts), orders,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
            started = _Step(spawn)
            await started.start()
        return started

    async def forward(self, signum: int) -> None:
        """Pass a signal that Slurm sent to the batch script alone on to the members' scripts."""
        for member in self._members:
            member.tell(signum)

    async def _step(
        self, name: str, options: Sequence[str], command: Sequence[str], environment: Mapping[str, str],
        orders: Mapping[str, object], *, stdin: int, stdout: int | IO[bytes], stderr: int | IO[bytes],
    ) -> asyncio.subprocess.Process:  # fmt: skip
        scrubbed = {k: v for k, v in environment.items() if not k.startswith(step.TAKEN_BY_STEPS) or k in SRUN_NEEDS}
        binding = ["--cpu-bind=none"] if self._cluster.binds_cpus else []
        scrubbed |= {k: v for k, v in self._own.items() if k in SRUN_NEEDS}
        return await asyncio.create_subprocess_exec(
            self._srun, "--overlap", *binding, "--export=ALL", f"--job-name={name}", *options,
            sys.executable, "-I", "-S", str(Path(step.__file__)), *command,
            env=scrubbed | {step.ORDERS: json.dumps(orders)},
            stdin=stdin, stdout=stdout, stderr=stderr,
        )  # fmt: skip

    def _share_on(self, node: Node) -> int:
        """A member's host memory, MiB, 0 for the job's: a step that asks for more than its job has waits for ever."""
        share = self._facts.member_mem_mb or 0
        per_node, per_cpu = (int(self._own.get(f"SLURM_MEM_PER_{unit}", "0")) for unit in ("NODE", "CPU"))
        whole = per_node or per_cpu * node.cpus
        return 0 if whole and share >= whole else share

    def _host_file(self, node: Node) -> str:
        """A file that names one node, for sruns inside members there."""
        path = self._log.parent / f"host.{node.name}"
        path.write_text(f"{node.name}\n")
        return str(path)

    @property
    def _append(self) -> bool:
        # The plugin cannot see --open-mode on every Slurm; the batch step's environment always tells.
        mode = self._facts.open_mode or {"a": "append", "t": "truncate"}.get(self._own.get("SLURM_OPEN_MODE", ""), "")
        return self._job.attempt > 0 or mode == "append" or (self._cluster.append and mode != "truncate")

    def _slurm_of_members(self) -> dict[str, str]:
        """The job's own Slurm variables, without its request."""
        return {
            k: v
            for k, v in self._own.items()
            if k.startswith(step.TAKEN_BY_STEPS) and not any(p.match(k) for p in DROPPED_FOR_MEMBERS)
        }

    def _seen_by(self, node: Node) -> dict[str, str]:
        """What a member sees of its job: one task on one node, no device; and what its own sruns need."""
        cpus = self._facts.member_cpus
        seen = {
            "CUDA_VISIBLE_DEVICES": "",
            "SLURM_JOB_NODELIST": node.name,
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NNODES": "1",
            "SLURM_NODEID": "0",
            "SLURM_NODELIST": node.name,
            "SLURM_TASKS_PER_NODE": "1",
            "SLURM_CPUS_ON_NODE": str(cpus or node.cpus),
            "SLURM_JOB_CPUS_PER_NODE": str(cpus or node.cpus),
            "SLURM_OVERLAP": "1",
            "SLURM_GRES": "none",
            "SLURM_MEM_PER_NODE": str(self._share_on(node)),
        }
        if self._cluster.binds_cpus:
            seen["SLURM_CPU_BIND"] = "none"
        if "SLURM_TASK_PROLOG" not in self._own:
            seen["SLURM_TASK_PROLOG"] = str(self._note_inner)
        if len(self.nodes) > 1:  # else srun takes the job's first node; no variable but this one names another
            seen |= {"SLURM_HOSTFILE": self._host_file(node), "SLURM_DISTRIBUTION": "arbitrary"}
        seen |= {name: "" for name in launch.DEVICE_VARIABLES if name in self._own}
        if cpus and "SLURM_CPUS_PER_TASK" in self._own:
            seen["SLURM_CPUS_PER_TASK"] = str(cpus)
        seen |= {name: "1" for name in ("SLURM_NTASKS", "SLURM_NPROCS") if name in self._own}
        return seen


def find_command(name: str, environment: Mapping[str, str]) -> str:
    """Absolute path of a Slurm command.

    Raises:
        UsageError: it is not in the batch step's PATH.
    """
    found = shutil.which(name, path=environment.get("PATH", os.defpath))
    if found is None:
        raise UsageError(
            f"no {name} in the PATH of the batch step: submit from an environment that has Slurm's commands"
        )
    return found


async def ask(command: str, *arguments: str, environment: Mapping[str, str]) -> str:
    """Standard output of a Slurm command; empty if it fails or does not answer."""
    process = await asyncio.create_subprocess_exec(
        command, *arguments, env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        out, _ = await asyncio.wait_for(process.communicate(), COMMAND_SECONDS)
    except (TimeoutError, asyncio.TimeoutError):
        process.kill()
        await process.wait()
        return ""
    return out.decode(errors="replace") if process.returncode == 0 else ""


def devices_in(gres: str) -> int | None:
    """GPUs per node of ``gpu:a100:4,gpu:2``; None without any."""
    total, seen = 0, False
    for entry in gres.split(","):
        name, _, rest = entry.partition(":")
        if name.strip() in ("gpu", "gres/gpu"):
            count = re.search(r"(?:^|[:=])(\d+)(?:\(|$)", rest)
            total, seen = total + (int(count[1]) if count else 1), True
    return total if seen else None


def cpus_per_node(text: str, count: int) -> list[int]:
    """``8(x2),4`` (SLURM_JOB_CPUS_PER_NODE) as one number per node; what is missing counts as 1."""
    cpus: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        cpus += [int(number)] * int(times or 1)
    return (cpus + [1] * count)[:count]
