"""``python -m slurm_jap.run SCRIPT ARGUMENTS...``: the batch script of a coalesced job ends here and the sweep begins.

SCRIPT is the job's own script as Slurm spooled it (``carried`` describes its text); the user's part of it is what every
member runs. Exit code: the highest member code (128+n for a signal), 2 for a job that cannot be run. Torch-free.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_jap import carried, launch, launch_slurm, store, wire
from slurm_jap.carried import Carried
from slurm_jap.coordinator import ENGINE_SECONDS, Coordinator
from slurm_jap.errors import PREFIX, USAGE_EXIT_CODE, UsageError
from slurm_jap.launch import Ended, Job, Node
from slurm_jap.launch_slurm import Cluster, SlurmLauncher
from slurm_jap.store import SweepDir
from slurm_jap.sweep import MemberState

ENGINE_TIMEOUT = "JAP_ENGINE_TIMEOUT"
TERMINATION_SECONDS = 5.0
"""Slurm ends a job with SIGCONT, then SIGTERM, to every step; a SIGTERM long after a SIGCONT came alone."""
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep of the job we are the batch script of."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if not argv:
            raise UsageError("jap-run is what a coalesced job's script calls; submit arrays with jap-submit")
        if "SLURM_JOB_ID" not in os.environ:
            raise UsageError("not inside a Slurm job: type jap-submit --jap-local SCRIPT to run an array without Slurm")
        try:
            facts, user_script = carried.parse(Path(argv[0]).read_bytes())
        except (OSError, ValueError) as error:
            raise UsageError(f"{argv[0]}: {error}") from None
        return asyncio.run(_run(facts, user_script, argv[1:], dict(os.environ)))
    except UsageError as error:
        print(f"{PREFIX} {error}", file=sys.stderr)
        return USAGE_EXIT_CODE


def say(line: str) -> None:
    """Print one line into the job's own output; a full disk does not end the sweep."""
    with contextlib.suppress(OSError):
        print(f"{PREFIX} {line}", flush=True)


async def _run(facts: Carried, user_script: bytes, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    signals = _Signals()
    scontrol = launch_slurm.find_command("scontrol", environment)
    cluster = Cluster.parse(await launch_slurm.ask(scontrol, "show", "config", environment=environment))
    nodes = await _nodes(scontrol, facts, environment)
    job = Job(
        job_id=int(environment["SLURM_JOB_ID"]),
        name=environment.get("SLURM_JOB_NAME", ""),
        user=environment.get("SLURM_JOB_USER") or launch.user_name(),
        work_dir=Path.cwd(),
        attempt=int(environment.get("SLURM_RESTART_COUNT", "0")),
        slurm=cluster.version,
    )
    root = launch.sweep_root(facts.output, job.work_dir)
    try:
        folder, done = open_attempt(root, job)
        script = folder.write_script(user_script)
        launcher = SlurmLauncher(facts, job, nodes, script, arguments, folder.engine_log, environment, cluster)
        sweep, launcher.places, arrays = launch.lay_out(facts, arguments, job, nodes, launch_slurm.LAUNCHER, script)
        folder.write_manifest(sweep)
    except OSError as error:
        raise UsageError(
            f"cannot write the sweep directory under {root}: {error}; choose another folder with -o"
        ) from None
    store.write_pointer(root, job.job_id)
    again = f", attempt {job.attempt + 1}: {len(done)} already done" if job.attempt else ""
    size = f"{len(sweep.members)} member(s) on {len(nodes)} node(s)"
    say(f"job {job.job_id}: {size}{again}; sweep directory {folder.path}")
    hosts: list[str] = []
    if len(nodes) > 1:
        shown = await launch_slurm.ask(scontrol, "-o", "show", "node", nodes[0].name, environment=environment)
        address = re.search(r"\bNodeAddr=(\S+)", shown)
        hosts = wire.reachable_names(nodes[0].name, address[1] if address else "", environment)
    coordinator = Coordinator(
        sweep, folder, launcher, arrays=arrays, say=say, done=done, tcp_hosts=hosts,
        engine_seconds=_seconds(environment.get(ENGINE_TIMEOUT), ENGINE_SECONDS),
        end_seconds=max(1.0, cluster.kill_wait - 1.0),
    )  # fmt: skip
    signals.hand_over(coordinator, launcher)
    return await coordinator.run()


class _Signals:
    """What Slurm sends to the batch script: the end of the job, or a signal meant for the scripts of the members.

    Handled from the first moment; what comes before there is a coordinator is kept for it.
    """

    def __init__(self) -> None:
        self._continued = float("-inf")
        self._early: list[int] = []
        self._coordinator: Coordinator | None = None
        self._launcher: SlurmLauncher | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCONT, self._on_continue)
        for signum in (signal.SIGTERM, *PASSED_ON):
            loop.add_signal_handler(signum, self._on_signal, signum)

    def hand_over(self, coordinator: Coordinator, launcher: SlurmLauncher) -> None:
        self._coordinator, self._launcher = coordinator, launcher
        for signum in self._early:
            self._on_signal(signum)

    def _on_continue(self) -> None:
        self._continued = time.monotonic()

    def _on_signal(self, signum: int) -> None:
        if self._coordinator is None or self._launcher is None:
            self._early.append(signum)
        elif signum == signal.SIGTERM and time.monotonic() - self._continued < TERMINATION_SECONDS:
            self._coordinator.stop("Slurm ends the job (cancelled, requeued, preempted, or at its time limit)")
        else:
            say(f"passing {signal.Signals(signum).name} on to the members' scripts")
            self._tasks.add(asyncio.get_running_loop().create_task(self._launcher.forward(signum)))


async def _nodes(scontrol: str, facts: Carried, environment: Mapping[str, str]) -> list[Node]:
    """The nodes of the allocation, the batch step's first."""
    listed = environment.get("SLURM_JOB_NODELIST", "")
    names = [listed]
    if "[" in listed or "," in listed:
        names = (await launch_slurm.ask(scontrol, "show", "hostnames", listed, environment=environment)).split()
    if not names or not names[0]:
        raise UsageError(f"cannot tell the job's nodes from SLURM_JOB_NODELIST={listed!r}: is slurmctld reachable?")
    cpus = launch_slurm.cpus_per_node(environment.get("SLURM_JOB_CPUS_PER_NODE", ""), len(names))
    devices = launch_slurm.devices_in(facts.gres)
    return [Node(name=name, cpus=count, devices=devices) for name, count in zip(names, cpus, strict=True)]


def open_attempt(root: Path, job: Job) -> tuple[SweepDir, dict[int, Ended]]:
    """Make this attempt's folder; which members ended well in an earlier attempt and are not run again.

    A folder that another job of the same number left (Slurm's counter may begin anew) is moved aside.

    Raises:
        OSError: the folder cannot be made.
    """
    path = SweepDir.attempt_path(root, job.job_id, job.attempt)
    stale = path.parent if job.attempt == 0 else path
    if stale.exists():
        number = next(n for n in range(1, 10**6) if not stale.with_name(f"{stale.name}.old{n}").exists())
        stale.rename(stale.with_name(f"{stale.name}.old{number}"))
    done: dict[int, Ended] = {}
    for attempt in range(job.attempt):
        earlier = SweepDir(SweepDir.attempt_path(root, job.job_id, attempt))
        for event in earlier.events(store.RUN_WRITER):
            if event["kind"] == "member_ended" and event.get("state") == MemberState.COMPLETED.value:
                done[int(event["member"])] = Ended(
                    code=0, state=MemberState.COMPLETED, reason="ended in an earlier attempt"
                )
    return SweepDir.create(path), done


def _seconds(text: str | None, default: float) -> float:
    """A positive number of seconds from a variable."""
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise UsageError(f"{ENGINE_TIMEOUT}={text!r}: a positive number of seconds is needed, such as 300")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
