"""The first process of a Slurm step that jap-run starts; stays with a member, becomes the engine agent.

    python -I -S .../step.py COMMAND [ARGUMENTS...]        with its orders, a JSON object, in the variable _jap_step

Standard library only, and not a part of the package at run time: it starts once per member, on every node.

Member: restores the environment that the step's srun had to do without, opens the member's own files as Slurm opens a
batch job's, runs the script as a child, and ends as the child ended. It stays because Slurm signals a step's first
processes (with proctrack/cgroup those alone), and a script that plain Slurm would not have signalled must not die of
it. What Slurm would have sent to the batch script (``--signal=B:USR1@60``) comes as a line on the step's own standard
input, the signal's number.

Engine: ignores what ``scancel`` and requeue send to every step, from its first moment on, then becomes the agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence

ORDERS = "_jap_step"
SHIELDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""What the engine never dies of: it ends by ``stop``, with its members, or by KILL."""
TO_THE_SCRIPT = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCONT}
)
"""Passed to the script, which gets them of a batch job too; all others only to processes that handle them."""
NEVER_DISTURBED = frozenset({"srun", "sh", "bash", "dash", "ash", "ksh", "zsh", "csh", "tcsh", "fish", "busybox"})
"""srun's own step is signalled by Slurm; shells catch signals to clean up, and then end."""
TAKEN_BY_STEPS = ("SLURM", "SBATCH", "SRUN", "PMI_", "PMIX_")
NODE_VARIABLES = ("SLURMD_NODENAME", "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN")
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT)


def main(argv: Sequence[str]) -> int:
    """Carry out the orders; returns only for a member, and then never normally (see ``_end_like``)."""
    orders = json.loads(os.environ.pop(ORDERS))
    if orders["role"] == "engine":
        _become_engine(argv, orders)
    return _run_member(argv, orders)


def _become_engine(argv: Sequence[str], orders: Mapping[str, object]) -> None:
    for name in SHIELDED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    os.environ["JAP_NODE"] = os.environ.get("SLURMD_NODENAME", "")
    _default_dispositions()
    try:
        os.chdir(str(orders["cwd"]))
        os.execve(argv[0], list(argv), os.environ)
    except OSError as error:
        sys.exit(f"jap: cannot start the engine with {argv[0]} in {orders['cwd']}: {error.strerror}")


def member_environment(now: Mapping[str, str], orders: Mapping[str, object]) -> dict[str, str]:
    """What the step was given, with the job's own Slurm variables in the place of the step's.

    Args:
        orders: ``slurm``: the job's; ``set``, ``unset``: what differs for this member.
    """
    environment = {k: v for k, v in now.items() if not k.startswith(TAKEN_BY_STEPS)}
    environment.update(orders["slurm"])  # type: ignore[call-overload]
    environment.update({k: now[k] for k in NODE_VARIABLES if k in now})
    for name in orders["unset"]:  # type: ignore[attr-defined]
        environment.pop(name, None)
    environment.update(orders["set"])  # type: ignore[call-overload]
    return environment


def without_coercion(environment: Mapping[str, str]) -> dict[str, str]:
    """Drop the LC_CTYPE that Python itself puts into its environment under the C locale (PEP 538)."""
    try:
        with open("/proc/self/environ", "rb") as file:
            given = any(entry.startswith(b"LC_CTYPE=") for entry in file.read().split(b"\0"))
    except OSError:
        given = True
    return {k: v for k, v in environment.items() if given or k != "LC_CTYPE"}


def _run_member(argv: Sequence[str], orders: Mapping[str, object]) -> int:
    environment = member_environment(without_coercion(os.environ), orders)
    caught = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, *_FAULTS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, caught)
    lines = os.dup(0)
    _open_files(orders)
    child = os.fork()
    if child == 0:
        environment["SLURM_TASK_PID"] = str(os.getpid())
        os.close(lines)
        _default_dispositions()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            os.execve(argv[0], list(argv), environment)
        except OSError as error:
            os.write(2, f"jap: cannot execute the batch script {argv[0]}: {error.strerror}\n".encode())
        os._exit(127 if not os.path.exists(argv[0]) else 126)
    arrivals, sink = os.pipe()
    os.set_blocking(sink, False)
    signal.set_wakeup_fd(sink)
    for number in caught:
        with contextlib.suppress(OSError, ValueError):  # those that the C library keeps for itself
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, caught)
    sources = [arrivals, lines]
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended == child:
            if not orders["forward"] and os.getpgrp() == os.getpid():
                _end_group()
            _end_like(status)
        readable, _, _ = select.select(sources, [], [])
        if arrivals in readable:
            for arrived in os.read(arrivals, 1024):
                if orders["forward"] and arrived != signal.SIGCHLD:
                    _pass_on(arrived, child)
        if lines in readable:
            told = os.read(lines, 1024)
            if not told:
                sources.remove(lines)
            for word in told.split():
                _signal(child, int(word))


def _pass_on(number: int, child: int) -> None:
    """What Slurm sent to the step."""
    for process in [child] if number in TO_THE_SCRIPT else handlers_of(number, child):
        _signal(process, number)


def _default_dispositions() -> None:
    """Undo what Python itself ignores: scripts count on SIGPIPE."""
    for name in ("SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)


def _open_files(orders: Mapping[str, object]) -> None:
    """Put the member's files in the place of the step's pipes, and a word into the last of these: it has begun."""
    begun = os.dup(1)
    append = os.O_APPEND if orders["append"] else os.O_TRUNC
    path = str(orders["input"])
    try:
        os.dup2(os.open(path, os.O_RDONLY), 0)
        path = str(orders["output"])
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | append, 0o666), 1)
        if orders["error"] is None:
            os.dup2(1, 2)
        else:
            path = str(orders["error"])
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | append, 0o666), 2)
    except OSError as error:
        sys.exit(f"jap: cannot open {path}: {error.strerror}")
    finally:
        with contextlib.suppress(OSError):
            os.write(begun, b"begun\n")
        os.close(begun)


def _end_group() -> None:
    """End what the script left running: where Slurm follows parents or groups, orphans would outlive the job."""
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and int(entry) != os.getpid() and os.getpgid(int(entry)) == os.getpgrp():
                os.kill(int(entry), signal.SIGKILL)


def _end_like(status: int) -> None:
    """End with the child's exit code, or by the signal that it died of."""
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left the one core file that is of use
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        os.kill(process, number)


def handlers_of(number: int, root: int) -> list[int]:
    """The processes of the tree under ``root`` that handle a signal, but for those that are ``NEVER_DISTURBED``."""
    parents: dict[int, int] = {}
    catching: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/status", encoding="ascii", errors="replace") as file:
                fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
            program = os.path.basename(os.readlink(f"/proc/{entry}/exe"))  # a script's own name hides its shell
        except OSError:
            continue
        parents[int(entry)] = int(fields.get("PPid", "0"))
        if int(fields.get("SigCgt", "0"), 16) >> (number - 1) & 1 and program not in NEVER_DISTURBED:
            catching.add(int(entry))
    tree = {root}
    grown = True
    while grown:
        grown = False
        for process, parent in parents.items():
            if parent in tree and process not in tree:
                tree.add(process)
                grown = True
    return sorted(tree & catching)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
