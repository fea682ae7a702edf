#!/usr/bin/env python3
"""A real Slurm on one machine, for tests: munged, MariaDB, slurmdbd, slurmctld and several slurmd with fake GPUs.

    scripts/slurm_cluster.py up   [--dir DIR] [--nodes 4] [--gpus 4] [--fence] [--python PYTHON]
    eval "$(scripts/slurm_cluster.py env [--dir DIR])"        then sbatch, squeue, sacct, ... speak to it
    scripts/slurm_cluster.py down [--dir DIR]
    scripts/slurm_cluster.py missing [--fence]                what keeps it from running here, or nothing

Needs root, the packages that scripts/install-slurm.sh installs, and nothing of their services. Partitions: ``normal``
(default) and ``jap``, the one that etc/jap.conf enables for the plugin. Without ``--fence`` steps are unconfined and
polling kills a step that outgrows its memory; with it, control groups hide other GPUs' device files and limit memory.
Several clusters may run side by side: each has its own ports, sockets, job numbers and, where fenced, node names.

How it ends completely: ``up`` leaves one supervisor process, a subreaper, so that whatever a daemon, a step or a job
forks stays its descendant. ``down``, SIGTERM, or the end of the process named by ``--owner`` make it cancel the jobs,
end every descendant, and remove the sockets, the database, the device files and the control groups. Only logs,
scratch files and the configuration stay in DIR, until the next ``up`` there.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from slurm_testbed.configuration import PORTS_PER_CLUSTER, Settings
from slurm_testbed.machine import PATH, REPOSITORY, USERS, ClusterError, missing, reachable_by_users
from slurm_testbed.processes import alive, descendants, kill, processes_of
from slurm_testbed.supervisor import MARKER, clean_up, supervise

__all__ = [
    "MARKER", "PATH", "REPOSITORY", "USERS", "Cluster", "ClusterError", "Settings", "alive", "descendants", "down",
    "missing", "processes_of", "reachable_by_users", "up",
]  # fmt: skip

DEFAULT_DIR = REPOSITORY / ".test-cluster"
UP_SECONDS = 90.0
DOWN_SECONDS = 40.0


class Cluster:
    """A cluster that is up, seen from outside: its settings, and commands that speak to it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            described = json.loads((directory / MARKER).read_text())
        except (OSError, ValueError):
            raise ClusterError(f"no cluster is up in {directory}: run scripts/slurm_cluster.py up") from None
        self.slurm_conf: str = described["slurm_conf"]
        self.nodes: list[str] = described["nodes"]
        self.base = Path(described["base"])
        self.supervisor: int = described["supervisor"]
        self.python: str = described["python"]
        self.gpus_per_node: int = described["gpus"]
        self.cpus_per_node: int = described["cpus"]
        self.memory_mb_per_node: int = described["memory_mb"]
        self.fenced: bool = described["fence"]
        self.scratch = self.base / "scratch"
        """Any user may make files and folders here."""
        self.etc = self.base / "etc"
        self.log = self.base / "log"

    def home(self, user: str) -> Path:
        """Home folder of one of the cluster's users."""
        return self.base / "home" / user

    def environment(self, user: str | None = None) -> dict[str, str]:
        """An environment to run commands in: the caller's, less the outer Slurm's and our own variables."""
        kept = {k: v for k, v in os.environ.items() if not re.match(r"SLURM|SBATCH|SRUN|SQUEUE|SACCT|JAP_", k)}
        kept["SLURM_CONF"] = self.slurm_conf
        kept["PATH"] = f"{kept.get('PATH', '')}:{PATH}".lstrip(":")
        if user is not None:
            kept = {k: v for k, v in kept.items() if not k.startswith("XDG_") and k != "TMPDIR"}
            kept.update(HOME=str(self.home(user)), USER=user, LOGNAME=user)
        return kept


@contextlib.contextmanager
def _lock(directory: Path, wait: float = 0.0) -> Iterator[int]:
    """Hold DIR's lock: one cluster per folder, and its supervisor inherits the descriptor."""
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + wait
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    said = f"a cluster is up in {directory}: run down first, or choose another --dir"
                    raise ClusterError(said) from None
                time.sleep(0.05)
        yield fd
    finally:
        os.close(fd)


def up(settings: Settings) -> Cluster:
    """Bring a cluster up and return its handle.

    Raises:
        ClusterError: it cannot be; nothing is left running.
    """
    reason = missing(settings.fence)
    if reason is not None:
        raise ClusterError(reason)
    directory = Path(settings.directory).absolute()
    settings = dataclasses.replace(settings, directory=str(directory))
    if not 1 <= settings.nodes <= PORTS_PER_CLUSTER - 2:
        raise ClusterError(f"--nodes {settings.nodes}: from 1 to {PORTS_PER_CLUSTER - 2}")
    if directory.exists() and any(directory.iterdir()) and not (directory / "lock").exists():
        raise ClusterError(f"{directory} holds something else: choose an empty or new folder with --dir")
    directory.mkdir(parents=True, exist_ok=True)
    if not reachable_by_users(directory):
        raise ClusterError(f"{directory} is closed to the cluster's users: choose a folder under /tmp with --dir")
    with _lock(directory) as lock:
        remove_remains(directory)
        for name in ("etc", "log", "home", "scratch"):
            shutil.rmtree(directory / name, ignore_errors=True)
        (directory / "log").mkdir()
        read, write = os.pipe()
        os.set_inheritable(write, True)
        with open(directory / "log" / "supervisor.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-E", "-s", __file__, "_supervise", json.dumps(vars(settings)), str(write)],
                pass_fds=(write, lock), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
                start_new_session=True,
            )  # fmt: skip
        os.close(write)
        try:
            answer = b""
            deadline = time.monotonic() + UP_SECONDS
            while not answer.startswith(b"up"):
                ready, _, _ = select.select([read], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise ClusterError(f"not up within {UP_SECONDS:g} s; see {directory}/log")
                chunk = os.read(read, 65536)
                if not chunk:
                    raise ClusterError(answer.decode() or f"the supervisor ended; see {directory}/log/supervisor.log")
                answer += chunk
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(DOWN_SECONDS)
            raise
        finally:
            os.close(read)
    return Cluster(directory)


def down(directory: Path) -> bool:
    """End the cluster in ``directory``; whether one was up. Also ends what a killed supervisor left."""
    if not (directory / "lock").exists():
        return False
    try:
        cluster = Cluster(directory)
    except ClusterError:
        return False
    with contextlib.suppress(ClusterError), _lock(directory):
        remove_remains(directory)
        return True
    with contextlib.suppress(ProcessLookupError):
        os.kill(cluster.supervisor, signal.SIGTERM)
    with _lock(directory, DOWN_SECONDS):
        remove_remains(directory)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(cluster.supervisor, 0)  # it was ours, if this process brought the cluster up
    return True


def remove_remains(directory: Path) -> None:
    """With the lock held: end and remove what a supervisor that was killed left behind."""
    try:
        cluster = Cluster(directory)
    except ClusterError:
        return
    deadline = time.monotonic() + 10
    while (left := processes_of(cluster.slurm_conf)) and time.monotonic() < deadline:
        kill(left, signal.SIGKILL)
        time.sleep(0.05)
    clean_up(directory, cluster.base, cluster.nodes if cluster.fenced else [])


def main(arguments: list[str] | None = None) -> int:
    """The command line; see the module's text."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["_supervise"]:
        return supervise(Settings(**json.loads(given[1])), int(given[2]))
    parser = argparse.ArgumentParser(prog="slurm_cluster.py", description="A real Slurm on this machine, for tests.")
    commands = parser.add_subparsers(dest="command", required=True)
    parsers = {name: commands.add_parser(name) for name in ("up", "down", "env", "missing")}
    for name in ("up", "down", "env"):
        parsers[name].add_argument("--dir", type=Path, default=DEFAULT_DIR, help="state folder (default: %(default)s)")
    for name in ("up", "missing"):
        parsers[name].add_argument("--fence", action="store_true", help="confine devices and memory by control groups")
    parsers["up"].add_argument("--nodes", type=int, default=4)
    parsers["up"].add_argument("--gpus", type=int, default=4, help="fake GPUs per node")
    parsers["up"].add_argument("--cpus", type=int, default=16, help="CPUs per node")
    parsers["up"].add_argument("--memory-mb", type=int, default=16000, help="memory per node")
    parsers["up"].add_argument("--python", default=sys.executable, help="the interpreter that jap.conf names")
    parsers["up"].add_argument("--owner", type=int, help="end the cluster when this process ends")
    options = parser.parse_args(given)
    try:
        if options.command == "missing":
            reason = missing(options.fence)
            if reason:
                print(reason)
            return 1 if reason else 0
        if options.command == "up":
            started = time.monotonic()
            cluster = up(
                Settings(
                    directory=str(options.dir), nodes=options.nodes, gpus=options.gpus, cpus=options.cpus,
                    memory_mb=options.memory_mb, fence=options.fence, python=options.python, owner=options.owner,
                )
            )  # fmt: skip
            print(f"{len(cluster.nodes)} nodes idle after {time.monotonic() - started:.1f} s in {cluster.directory}")
            print(f"export SLURM_CONF={shlex.quote(cluster.slurm_conf)}")
        elif options.command == "env":
            cluster = Cluster(options.dir.absolute())
            print(f"export SLURM_CONF={shlex.quote(cluster.slurm_conf)} JAP_CLUSTER={shlex.quote(str(cluster.base))}")
        else:
            print("down" if down(options.dir.absolute()) else f"no cluster was up in {options.dir}")
    except ClusterError as error:
        print(f"slurm_cluster: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
