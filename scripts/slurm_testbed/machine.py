"""What this machine offers to a test cluster, and what every part must know of it."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
USERS = ("games", "news")
"""Ordinary accounts that every Debian has: users of the cluster."""
PROGRAMS = (
    "slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "mariadb", "mariadb-install-db", "sbatch", "sacctmgr",
)  # fmt: skip
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_CONTROLLERS = ("freezer", "devices", "memory", "cpuset", "cpuacct")


class ClusterError(Exception):
    """One line that says what is wrong and what to do."""


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
    command = [program("slurmctld"), "-V"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    found = re.search(r"(\d+)\.(\d+)", answer)
    if found is None:
        raise ClusterError(f"slurmctld -V answered {answer.strip()!r}: no version in it")
    return int(found[1]), int(found[2])


def program(name: str) -> str:
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
