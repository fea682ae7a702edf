"""The process that starts a cluster's daemons, waits, and ends everything that ever descended from them."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import pwd
import re
import secrets
import select
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_testbed.configuration import FIRST_PORT, KILL_WAIT, PORTS_PER_CLUSTER, Settings, write, write_configuration
from slurm_testbed.machine import CGROUP_ROOT, PATH, USERS, ClusterError, program
from slurm_testbed.processes import DAEMON_VARIABLE, descendants, kill

ACCOUNT = "dl"
MARKER = "cluster.json"
"""Describes the cluster that is up in a folder."""
PR_SET_CHILD_SUBREAPER = 36
MAX_SOCKET_DIR = 40
"""Longest folder for Unix sockets: slurmd adds ``/spool/<node>/<node>_<job>.<step>`` and the limit is 107 bytes."""


class _Stop(Exception):
    """Asked to end while coming up."""


class Supervisor:
    """Starts the daemons, waits, ends everything that ever descended from them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.directory = Path(settings.directory)
        self.base = self.directory
        self.prefix = "n"
        self.daemons: dict[int, str] = {}
        self.ended: dict[int, str] = {}
        self.claim: socket.socket | None = None
        self.stop = False
        self.owner_fd: int | None = None

    # -- coming up

    def up(self) -> None:
        """Bring the cluster up; raises ClusterError with one line."""
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise ClusterError("this kernel has no child subreaper: the cluster could not be ended completely")
        if self.settings.owner is not None:
            self.owner_fd = os.pidfd_open(self.settings.owner)
        block = self._claim_ports()
        if self.settings.fence:
            self.prefix = f"f{block}n"  # control groups are named by node, for the whole machine
        self._make_folders()
        write_configuration(self.settings, self.base, block, self.prefix)
        description = {
            **dataclasses.asdict(self.settings),
            "slurm_conf": f"{self.base}/etc/slurm.conf",
            "nodes": [f"{self.prefix}{i}" for i in range(1, self.settings.nodes + 1)],
            "base": str(self.base),
            "supervisor": os.getpid(),
        }
        write(self.directory / MARKER, json.dumps(description, indent=1) + "\n")
        self.environment = {
            "PATH": PATH,
            "LANG": "C.UTF-8",
            "SLURM_CONF": description["slurm_conf"],
            "MYSQL_UNIX_PORT": f"{self.base}/mysql/socket",
            DAEMON_VARIABLE: "1",
        }
        self._start_munge()
        self._start_database()
        self._start_slurm()

    def _claim_ports(self) -> int:
        """A block of ports that nobody listens on and no other test cluster has claimed, by an abstract socket."""
        blocks = list(range(250))
        start = secrets.randbelow(len(blocks))
        for block in blocks[start:] + blocks[:start]:
            if block == 0:
                continue
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                claim.bind(f"\0jap-test-cluster-{block}")
                for port in range(FIRST_PORT + block * PORTS_PER_CLUSTER, FIRST_PORT + (block + 1) * PORTS_PER_CLUSTER):
                    with socket.socket() as probe:
                        probe.bind(("", port))
            except OSError:
                claim.close()
                continue
            self.claim = claim
            return block
        raise ClusterError(f"no {PORTS_PER_CLUSTER} free ports in a row from {FIRST_PORT} on: end other test clusters")

    def _make_folders(self) -> None:
        directory = self.directory
        if len(str(directory)) > MAX_SOCKET_DIR or not re.fullmatch(r"[\w./-]+", str(directory), re.ASCII):
            self.base = Path(tempfile.mkdtemp(prefix="jap-cluster-", dir="/tmp")) / "c"
            self.base.parent.chmod(0o755)
            self.base.symlink_to(directory)
        for name in ("etc", "log", "munge", "mysql", "state", "spool", "dev", "home", "scratch"):
            (directory / name).mkdir(exist_ok=True)
            (directory / name).chmod(0o755)
        (directory / "scratch").chmod(0o1777)
        (directory / "log").chmod(0o1777)
        for name, owner in (("munge", "munge"), ("mysql", "mysql"), ("state", "slurm")):
            shutil.chown(directory / name, owner)
        for user in ("root", *USERS):
            (directory / "home" / user).mkdir(exist_ok=True)
            shutil.chown(directory / "home" / user, user)
        for index in range(self.settings.gpus):
            device = directory / "dev" / f"gpu{index}"
            try:
                # An experimental major number without a driver. Never that of a real device: fencing off (1, 3) would
                # take /dev/null from every job.
                os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(240, index))
            except OSError:
                device.touch()
            device.chmod(0o666)

    def _start(self, name: str, *command: str, user: str | None = None) -> None:
        with open(self.directory / "log" / f"{name}.out", "wb") as log:
            identity: dict[str, Any] = {}
            if user is not None:
                identity = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
            process = subprocess.Popen(
                [program(command[0]), *command[1:]], env=self.environment, cwd="/", stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True, **identity,
            )  # fmt: skip
        self.daemons[process.pid] = name
        process.returncode = 0  # reaped by pid, together with orphans: keep Popen from waiting for it

    def _client(self, *command: str, timeout: float = 20.0, check: bool = True) -> str:
        try:
            done = subprocess.run(
                [program(command[0]), *command[1:]], env=self.environment, cwd="/", stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=timeout,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            if check:
                raise ClusterError(f"{shlex.join(command)}: no answer within {timeout:g} s") from None
            return ""
        if check and done.returncode != 0:
            raise ClusterError(f"{shlex.join(command)}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def _wait_for(self, what: str, ready: Callable[[], bool], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            self._check_daemons()
            if self.stop or self._owner_gone():
                raise _Stop
            if time.monotonic() > deadline:
                raise ClusterError(f"{what}: not within {seconds:g} s; see {self.directory}/log")
            time.sleep(0.05)

    def _check_daemons(self) -> None:
        self.reap()
        for pid, name in self.daemons.items():
            if pid in self.ended:
                log = (self.directory / "log" / f"{name}.out").read_text(errors="replace").strip().splitlines()
                said = f": {log[-1]}" if log else ""
                raise ClusterError(f"{name} ended ({self.ended[pid]}){said}; see {self.directory}/log")

    def reap(self) -> None:
        """Collect children that have ended, orphans of jobs included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            self.ended[pid] = f"exit code {code}" if code >= 0 else f"signal {-code}"

    def _start_munge(self) -> None:
        key = self.directory / "munge" / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        shutil.chown(key, "munge")
        folder = f"{self.base}/munge"
        self._start(
            "munged", "munged", "--foreground", "--force", "--num-threads=4", f"--key-file={folder}/key",
            f"--socket={folder}/socket", f"--pid-file={folder}/pid", f"--log-file={folder}/log",
            f"--seed-file={folder}/seed", user="munge",
        )  # fmt: skip
        self._wait_for("munged", (self.directory / "munge" / "socket").exists)

    def _start_database(self) -> None:
        # A folder of its own for temporary tables: at its start each server removes those that it finds there.
        temporary = self.directory / "mysql" / "tmp"
        temporary.mkdir()
        shutil.chown(temporary, "mysql")
        places = (f"--datadir={self.base}/mysql/data", f"--tmpdir={self.base}/mysql/tmp")
        self._client(
            "mariadb-install-db", "--no-defaults", "--user=mysql", *places, "--skip-test-db",
            "--auth-root-authentication-method=socket", timeout=60,
        )  # fmt: skip
        self._start(
            "mariadbd", "mariadbd", "--no-defaults", *places, f"--socket={self.base}/mysql/socket",
            f"--pid-file={self.base}/mysql/pid", "--skip-networking", "--skip-log-bin", "--innodb-buffer-pool-size=64M",
            "--innodb-log-file-size=16M", "--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0",
            user="mysql",
        )  # fmt: skip
        client = ("mariadb", "--no-defaults", f"--socket={self.base}/mysql/socket", "-e")
        self._wait_for("mariadbd", lambda: "1" in self._client(*client, "select 1", check=False))
        self._client(
            *client,
            "create database slurm_acct; create user slurm@localhost identified via unix_socket; "
            "grant all on slurm_acct.* to slurm@localhost",
        )

    def _start_slurm(self) -> None:
        self._start("slurmdbd", "slurmdbd", "-D", user="slurm")
        ask = ("sacctmgr", "-n", "show", "user", "root")
        self._wait_for("slurmdbd", lambda: self._client(*ask, timeout=5, check=False) != "")
        add = ("sacctmgr", "-i", "-Q", "add")
        self._client(*add, "cluster", "japtest")
        self._client(*add, "account", ACCOUNT, f"Description={ACCOUNT}", f"Organization={ACCOUNT}")
        self._client(*add, "user", ",".join(("root", *USERS)), f"account={ACCOUNT}")
        self._start("slurmctld", "slurmctld", "-D", "-i", user="slurm")
        for index in range(1, self.settings.nodes + 1):
            self._start(f"slurmd.{self.prefix}{index}", "slurmd", "-D", "-N", f"{self.prefix}{index}")
        self._wait_for("all nodes idle", self._all_idle)

    def _all_idle(self) -> bool:
        states = self._client("sinfo", "-h", "-N", "-p", "normal", "-o", "%t", timeout=10, check=False).split()
        return states == ["idle"] * self.settings.nodes

    # -- being up

    def _owner_gone(self) -> bool:
        return self.owner_fd is not None and bool(select.select([self.owner_fd], [], [], 0)[0])

    def serve(self) -> None:
        """Sleep until asked to end, or the owner ends, or a daemon does."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        sources = [wake_read, *([self.owner_fd] if self.owner_fd is not None else [])]
        while not self.stop and not self._owner_gone():
            self._check_daemons()
            select.select(sources, [], [], 60)
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)

    # -- going down

    def down(self) -> None:
        """End every descendant, remove what they left."""
        if "slurmctld" in self.daemons.values():
            self._cancel_jobs()
        for number, seconds in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 10.0)):
            deadline = time.monotonic() + seconds
            kill(descendants(os.getpid()), number)
            while descendants(os.getpid()) and time.monotonic() < deadline:
                if number == signal.SIGKILL:
                    kill(descendants(os.getpid()), number)
                self.reap()
                time.sleep(0.05)
        self.reap()
        clean_up(self.directory, self.base, [f"{self.prefix}{i}" for i in range(1, self.settings.nodes + 1)])

    def _cancel_jobs(self) -> None:
        """Let jobs end in order, so that what they keep in /tmp goes with them."""
        with contextlib.suppress(ClusterError):
            for user in ("root", *USERS):
                self._client("scancel", "--quiet", "-u", user, timeout=5)
            deadline = time.monotonic() + KILL_WAIT + 3
            while time.monotonic() < deadline and self._client("squeue", "-h", timeout=5, check=False).strip():
                time.sleep(0.1)


def clean_up(directory: Path, base: Path, nodes: list[str]) -> None:
    """Remove sockets, database, devices and control groups; logs, scratch files and configuration stay."""
    for node in nodes:
        for controller in CGROUP_ROOT.glob(f"*/slurm_{node}"):
            _remove_cgroups(controller)
    for name in ("munge", "mysql", "state", "spool", "dev"):
        shutil.rmtree(directory / name, ignore_errors=True)
    if base != directory:
        base.unlink(missing_ok=True)
        base.parent.rmdir()
    (directory / MARKER).unlink(missing_ok=True)


def _remove_cgroups(top: Path) -> None:
    deadline = time.monotonic() + 5
    while top.exists() and time.monotonic() < deadline:
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        if top.exists():  # the kernel lets go of an ended process a moment later
            time.sleep(0.05)


def supervise(settings: Settings, answer: int) -> int:
    """The supervisor process: reports on ``answer``, then serves until the end."""
    supervisor = Supervisor(settings)

    def ask_to_stop(*_: object) -> None:
        supervisor.stop = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ask_to_stop)
    report = "ended while coming up"
    try:
        supervisor.up()
        os.write(answer, b"up")
        os.close(answer)
        report = ""
        supervisor.serve()
    except _Stop:
        pass
    except (ClusterError, OSError, subprocess.SubprocessError) as error:
        report = report and str(error)
        print(f"slurm_cluster: {error}", file=sys.stderr, flush=True)
    finally:
        signal.set_wakeup_fd(-1)
        supervisor.down()
        if report:
            os.write(answer, report.encode())
    return 0
