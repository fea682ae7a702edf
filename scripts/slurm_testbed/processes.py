"""Processes as /proc shows them: who descends from whom, who belongs to a cluster."""

from __future__ import annotations

import contextlib
import os

DAEMON_VARIABLE = "JAP_TEST_CLUSTER_DAEMON"
"""Set in the environment of a cluster's daemons."""


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
        if wanted in environment and (f"{DAEMON_VARIABLE}=1".encode() in environment or _has_job(environment)):
            found.add(pid)
    return found


def alive(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    return _parents().get(pid, (0, "Z"))[1] != "Z"


def _has_job(environment: list[bytes]) -> bool:
    return any(line.startswith(b"SLURM_JOB_ID=") for line in environment)


def kill(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
