"""The ``srun`` that members of a local sweep find: runs its command in place, as a step of one task would.

    python -I -S .../local_srun.py [srun's options] COMMAND [ARGUMENTS...]

Standard library only. Options that say how much of a cluster a task gets are accepted and mean nothing here; those that
one process on this machine cannot honour are refused in one line (exit code 2), so that nothing is lost in silence.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

WITH_VALUE = {
    "account": "A", "acctg-freq": "", "bb": "", "bbf": "", "bcast": "", "bcast-exclude": "", "begin": "b",
    "cluster-constraint": "", "clusters": "M", "comment": "", "constraint": "C", "container": "", "core-spec": "S",
    "cores-per-socket": "", "cpu-bind": "", "cpu-freq": "", "cpus-per-gpu": "", "cpus-per-task": "c", "deadline": "",
    "delay-boot": "", "dependency": "d", "distribution": "m", "epilog": "", "error": "e", "exclude": "x", "export": "",
    "extra-node-info": "B", "gpu-bind": "", "gpu-freq": "", "gpus": "G", "gpus-per-node": "", "gpus-per-socket": "",
    "gpus-per-task": "", "gres": "", "gres-flags": "", "het-group": "", "hint": "", "input": "i", "job-name": "J",
    "jobid": "", "licenses": "L", "mail-type": "", "mail-user": "", "mcs-label": "", "mem": "", "mem-bind": "",
    "mem-per-cpu": "", "mem-per-gpu": "", "mincpus": "", "mpi": "", "network": "", "nodefile": "F", "nodelist": "w",
    "nodes": "N", "ntasks": "n", "ntasks-per-core": "", "ntasks-per-gpu": "", "ntasks-per-node": "",
    "ntasks-per-socket": "", "open-mode": "", "output": "o", "partition": "p", "power": "", "priority": "",
    "profile": "", "prolog": "", "qos": "q", "relative": "r", "reservation": "", "signal": "", "slurmd-debug": "",
    "sockets-per-node": "", "switches": "", "task-epilog": "", "task-prolog": "", "thread-spec": "", "threads": "T",
    "threads-per-core": "", "time": "t", "time-min": "", "tmp": "", "tres-per-task": "", "wait": "W", "wckey": "",
    "chdir": "D",
}  # fmt: skip
"""srun's options that take a value, with their letters."""
WITHOUT_VALUE = {
    "contiguous": "", "disable-status": "X", "exact": "", "hold": "H", "label": "l",
    "multi-prog": "", "no-allocate": "Z", "no-kill": "k", "overcommit": "O", "overlap": "", "oversubscribe": "s",
    "preserve-env": "E", "pty": "", "quiet": "Q", "quit-on-interrupt": "", "reboot": "", "resv-ports": "",
    "spread-job": "", "unbuffered": "u", "use-min-nodes": "", "verbose": "v", "whole": "",
}  # fmt: skip
OPTIONAL_VALUE = {
    "compress": "", "exclusive": "", "immediate": "I", "kill-on-bad-exit": "K", "nice": "", "propagate": "",
    "send-libs": "",
}  # fmt: skip
"""A value only after ``=``, or at once after the letter."""
ONE_ONLY = ("nodes", "ntasks", "ntasks-per-node")
REFUSED = ("bcast", "container", "error", "input", "jobid", "multi-prog", "output")
"""They change what runs, or where its output goes."""
_ALL = {**WITH_VALUE, **WITHOUT_VALUE, **OPTIONAL_VALUE}
_BY_LETTER = {letter: name for name, letter in _ALL.items() if letter}


class CannotRun(Exception):
    """What was asked for needs a cluster, or is no srun option; the message says what to do."""


def parse(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """srun's options by long name, and the command.

    Raises:
        CannotRun: an option is unknown or lacks its value, or there is no command.
    """
    options: dict[str, str] = {}
    words = list(arguments)
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = _long(name)
            options[name] = value if equals or name not in WITH_VALUE else _value(word, words)
            continue
        letters = word[1:]
        while letters:
            found = _BY_LETTER.get(letters[0])
            if found is None:
                raise CannotRun(f"unknown option -{letters[0]}")
            letters = letters[1:]
            if found in WITH_VALUE:
                options[found] = letters or _value(word, words)
                break
            options[found] = ""
            if found in OPTIONAL_VALUE:
                letters = letters.lstrip("0123456789")
    if not words:
        raise CannotRun("no command to run: type srun COMMAND")
    return options, words


def _long(name: str) -> str:
    fits = [name] if name in _ALL else [known for known in _ALL if known.startswith(name)]
    if len(fits) != 1:
        raise CannotRun(f"unknown option --{name}")
    return fits[0]


def _value(word: str, words: list[str]) -> str:
    if not words:
        raise CannotRun(f"option {word} needs a value")
    return words.pop(0)


def check(options: dict[str, str]) -> None:
    """Refuse what one process on this machine cannot do.

    Raises:
        CannotRun: one of the options asks for it.
    """
    for name in REFUSED:
        if name in options:
            raise CannotRun(f"--{name} does not work in a local sweep: leave it out, or submit to Slurm")
    for name in ONE_ONLY:
        if options.get(name, "1").partition("-")[0] not in ("0", "1"):
            raise CannotRun(
                f"--{name}={options[name]}: a member of a local sweep is one task; leave it out, or submit to Slurm"
            )


def main(arguments: Sequence[str]) -> int:
    """Become the command; returns only if that cannot be."""
    try:
        options, command = parse(arguments)
        check(options)
    except CannotRun as reason:
        print(f"jap: srun: {reason}", file=sys.stderr)
        return 2
    os.environ.update(SLURM_STEP_ID="0", SLURM_STEPID="0", SLURM_NTASKS="1", SLURM_NPROCS="1", SLURM_PROCID="0")
    try:
        if options.get("chdir"):
            os.chdir(options["chdir"])
        sys.stdout.flush()
        for name in ("SIGPIPE", "SIGXFSZ"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        print(f"jap: srun: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
