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
import ctypes
import dataclasses
import fcntl
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
DEFAULT_DIR = REPOSITORY / ".test-cluster"
USERS = ("games", "news")
"""Ordinary accounts that every Debian has: users of the cluster."""
ACCOUNT = "dl"
MAX_ARRAY_SIZE = 1001
MEM_PER_CPU_MB = 1000
KILL_WAIT = 3
MARKER = "cluster.json"
PROGRAMS = (
    "slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "mariadb", "mariadb-install-db", "sbatch", "sacctmgr",
)  # fmt: skip
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_CONTROLLERS = ("freezer", "devices", "memory", "cpuset", "cpuacct")
UP_SECONDS = 90.0
DOWN_SECONDS = 40.0
PR_SET_CHILD_SUBREAPER = 36
FIRST_PORT = 21000
PORTS_PER_CLUSTER = 40
MAX_SOCKET_DIR = 40
"""Longest folder for Unix sockets: slurmd adds ``/spool/<node>/<node>_<job>.<step>`` and the limit is 107 bytes."""


class ClusterError(Exception):
    """One line that says what is wrong and what to do."""


@dataclasses.dataclass(kw_only=True)
class Settings:
    """What ``up`` was asked for."""

    directory: str
    nodes: int = 4
    gpus: int = 4
    cpus: int = 16
    memory_mb: int = 16000
    fence: bool = False
    python: str = sys.executable
    """Interpreter that jap.conf names: it has slurm_jap, and the users can run it."""
    owner: int | None = None
    """The cluster ends when this process does."""


# --------------------------------------------------------------------------------------------- what the machine offers


def missing(fence: bool = False) -> str | None:
    """One line that says what keeps a cluster from running here; None: nothing."""
    if os.geteuid() != 0:
        return "no test cluster: it needs root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        return f"no test cluster: {', '.join(absent)} not installed (scripts/install-slurm.sh installs it)"
    for user in ("slurm", "munge", "mysql", *USERS):
        try:
            pwd.getpwnam(user)
        except KeyError:
            return f"no test cluster: no account {user!r} (scripts/install-slurm.sh makes those of Slurm)"
    if fence:
        absent = [name for name in CGROUP_CONTROLLERS if not (CGROUP_ROOT / name / "cgroup.procs").exists()]
        if absent and (CGROUP_ROOT / "cgroup.controllers").exists():
            return "no fenced test cluster: this machine has control groups of version 2 only"
        if absent:
            return f"no fenced test cluster: no version 1 control groups for {', '.join(absent)} under {CGROUP_ROOT}"
        if not _can_make_devices():
            return "no fenced test cluster: device files cannot be made here"
    return None


def _can_make_devices() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.mknod(os.path.join(folder, "gpu"), stat.S_IFCHR | 0o600, os.makedev(240, 0))
        except OSError:
            return False
    return True


def slurm_version() -> tuple[int, int]:
    """Major and minor version of the installed slurmctld."""
    command = [_program("slurmctld"), "-V"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    found = re.search(r"(\d+)\.(\d+)", answer)
    if found is None:
        raise ClusterError(f"slurmctld -V answered {answer.strip()!r}: no version in it")
    return int(found[1]), int(found[2])


def _program(name: str) -> str:
    found = shutil.which(name, path=PATH)
    if found is None:
        raise ClusterError(f"{name} not installed: run scripts/install-slurm.sh")
    return found


def reachable_by_users(path: Path, mode: int = os.X_OK) -> bool:
    """Whether an ordinary user may walk to ``path`` and use it (default: execute or enter it)."""
    code = "import os, sys; sys.exit(0 if os.access(sys.argv[1], int(sys.argv[2])) else 1)"
    system_python = shutil.which("python3", path=PATH)
    if os.geteuid() != 0 or system_python is None:
        return os.access(path, mode)
    who = pwd.getpwnam(USERS[0])
    return (
        subprocess.run(
            [system_python, "-I", "-c", code, str(path), str(mode)],
            user=who.pw_uid, group=who.pw_gid, extra_groups=[], cwd="/", timeout=30,
        ).returncode
        == 0
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- processes, by /proc


def _parents() -> dict[int, tuple[int, str]]:
    """Every process: pid -> (parent, state)."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            found[int(entry)] = (int(fields[1]), fields[0].decode())
    return found


def descendants(root: int) -> set[int]:
    """All live processes below ``root``."""
    processes = _parents()
    children: dict[int, list[int]] = {}
    for pid, (parent, state) in processes.items():
        if state != "Z":
            children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = [root]
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def processes_of(slurm_conf: str) -> set[int]:
    """Live processes whose environment names this cluster: what is left when the supervisor itself was killed."""
    wanted = f"SLURM_CONF={slurm_conf}".encode()
    found = set()
    for pid, (_, state) in _parents().items():
        if state == "Z" or pid == os.getpid():
            continue
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                environment = file.read().split(b"\0")
        except OSError:
            continue
        if wanted in environment and (b"JAP_TEST_CLUSTER_DAEMON=1" in environment or _has_job(environment)):
            found.add(pid)
    return found


def alive(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    return _parents().get(pid, (0, "Z"))[1] != "Z"


def _has_job(environment: list[bytes]) -> bool:
    return any(line.startswith(b"SLURM_JOB_ID=") for line in environment)


def _kill(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


# ------------------------------------------------------------------------------------------------------- configuration


def write_configuration(settings: Settings, base: Path, block: int, prefix: str) -> None:
    """All files of ``DIR/etc``. ``base`` is DIR by a name short and plain enough for sockets and for slurm.conf."""
    etc = Path(settings.directory, "etc")
    host = socket.gethostname().partition(".")[0]
    port = FIRST_PORT + block * PORTS_PER_CLUSTER
    nodes = f"{prefix}[1-{settings.nodes}]"
    # An AuthInfo socket is not enough: the accounting client looks for munge by AccountingStoragePass.
    munge = f"{base}/munge/socket"
    if settings.fence:
        confinement = [
            "ProctrackType=proctrack/cgroup",
            "TaskPlugin=task/affinity,task/cgroup",
            "JobAcctGatherFrequency=task=2",
        ]
    else:
        confinement = [
            "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none",
            "JobAcctGatherFrequency=task=1", "JobAcctGatherParams=OverMemoryKill",
        ]  # fmt: skip
    slurm = f"""
ClusterName=japtest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=slurm
AuthType=auth/munge
AuthInfo=socket={munge}
CredType=cred/munge
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/state/slurmctld.pid
SlurmdPidFile={base}/spool/%n.pid
SlurmctldLogFile={base}/log/slurmctld.log
SlurmdLogFile={base}/log/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
MailProg=/bin/true
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
PriorityType=priority/multifactor
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=50000
GresTypes=gpu
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port + 1}
AccountingStoragePass={munge}
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,limits,qos
AccountingStoreFlags=job_comment
JobAcctGatherType=jobacct_gather/linux
JobSubmitPlugins=lua
JobRequeue=1
KillWait={KILL_WAIT}
MinJobAge=600
MaxArraySize={MAX_ARRAY_SIZE}
FirstJobId={block * 1000 + 1}
DefMemPerCPU={MEM_PER_CPU_MB}
NodeName={nodes} NodeHostName={host} NodeAddr=127.0.0.1 Port=[{port + 2}-{port + 1 + settings.nodes}] \
CPUs={settings.cpus} RealMemory={settings.memory_mb} Gres=gpu:fake:{settings.gpus} State=UNKNOWN
PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60
PartitionName=jap Nodes=ALL MaxTime=7-0 DefaultTime=60
"""
    _write(etc / "slurm.conf", slurm.lstrip() + "\n".join(confinement) + "\n")
    _write(etc / "gres.conf", f"NodeName={nodes} Name=gpu Type=fake File={base}/dev/gpu[0-{settings.gpus - 1}]\n")
    if settings.fence:
        cgroup = "CgroupPlugin=cgroup/v1\nConstrainDevices=yes\nConstrainRAMSpace=yes\nConstrainCores=no\n"
        if (CGROUP_ROOT / "memory" / "memory.memsw.limit_in_bytes").exists():
            cgroup += "ConstrainSwapSpace=yes\nAllowedSwapSpace=0\n"
    elif slurm_version() >= (24, 5):
        cgroup = "CgroupPlugin=disabled\n"
    else:
        cgroup = "CgroupPlugin=cgroup/v1\n"  # named, so that nothing is looked for; no other plugin here uses it
    _write(etc / "cgroup.conf", cgroup)
    slurmdbd = f"""
AuthType=auth/munge
AuthInfo=socket={munge}
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port + 1}
SlurmUser=slurm
LogFile={base}/log/slurmdbd.log
PidFile={base}/state/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StorageLoc=slurm_acct
"""
    _write(etc / "slurmdbd.conf", slurmdbd.lstrip(), mode=0o600, owner="slurm")
    install_plugin(etc, settings)


PASS_THROUGH = """\
-- No plugin in this repository: every job passes as it is.
function slurm_job_submit(job_desc, part_list, submit_uid) return slurm.SUCCESS end
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""


def install_plugin(etc: Path, settings: Settings) -> None:
    """Do what an administrator does: the plugin's files beside slurm.conf, the partition ``jap`` enabled."""
    source = REPOSITORY / "etc"
    for name in ("job_submit.lua", "jap.lua"):
        if (source / name).exists():
            _write(etc / name, (source / name).read_text())
        elif name == "job_submit.lua":
            _write(etc / name, PASS_THROUGH)
    jap = f"""
Python={settings.python}
MaxArraySize={MAX_ARRAY_SIZE}
DefMemPerCPU={MEM_PER_CPU_MB}M
Partition=jap MaxMembers=64 MaxTime=2-00:00:00 NodeCPUs={settings.cpus} NodeMemory={settings.memory_mb}M \
NodeGPUs={settings.gpus}
"""
    _write(etc / "jap.conf", jap.lstrip())


def _write(path: Path, text: str, mode: int = 0o644, owner: str | None = None) -> None:
    path.write_text(text)
    path.chmod(mode)
    if owner is not None:
        shutil.chown(path, owner)


# ---------------------------------------------------------------------------------------------------------- supervisor


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
        _write(self.directory / MARKER, json.dumps(description, indent=1) + "\n")
        self.environment = {
            "PATH": PATH,
            "LANG": "C.UTF-8",
            "SLURM_CONF": description["slurm_conf"],
            "MYSQL_UNIX_PORT": f"{self.base}/mysql/socket",
            "JAP_TEST_CLUSTER_DAEMON": "1",
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
            self.base = Path(tempfile.mkdtemp(prefix="jap-", dir="/tmp")) / "c"
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
                [_program(command[0]), *command[1:]], env=self.environment, cwd="/", stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True, **identity,
            )  # fmt: skip
        self.daemons[process.pid] = name
        process.returncode = 0  # reaped by pid, together with orphans: keep Popen from waiting for it

    def _client(self, *command: str, timeout: float = 20.0, check: bool = True) -> str:
        try:
            done = subprocess.run(
                [_program(command[0]), *command[1:]], env=self.environment, cwd="/", stdin=subprocess.DEVNULL,
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
        data = f"{self.base}/mysql/data"
        self._client(
            "mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={data}", "--skip-test-db",
            "--auth-root-authentication-method=socket", timeout=60,
        )  # fmt: skip
        self._start(
            "mariadbd", "mariadbd", "--no-defaults", f"--datadir={data}", f"--socket={self.base}/mysql/socket",
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
            _kill(descendants(os.getpid()), number)
            while descendants(os.getpid()) and time.monotonic() < deadline:
                if number == signal.SIGKILL:
                    _kill(descendants(os.getpid()), number)
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


def _supervise(settings: Settings, answer: int) -> int:
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


# --------------------------------------------------------------------------------------------- the handle on a cluster


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
                [sys.executable, "-I", __file__, "_supervise", json.dumps(dataclasses.asdict(settings)), str(write)],
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
        _kill(left, signal.SIGKILL)
        time.sleep(0.05)
    clean_up(directory, cluster.base, cluster.nodes if cluster.fenced else [])


# -------------------------------------------------------------------------------------------------------- command line


def main(arguments: list[str] | None = None) -> int:
    """The command line; see the module's text."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["_supervise"]:
        return _supervise(Settings(**json.loads(given[1])), int(given[2]))
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
