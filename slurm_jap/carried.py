"""The batch script of a coalesced job: a bootstrap, what jap-run must know, and the user's script verbatim.

Pure: no I/O, no torch. jap-submit and etc/jap.lua write this text, jap-run reads it:

    #!/bin/bash
    #SBATCH ...                                          (jap-submit only: the user's effective options)
    if [ ! -x "/abs/python" ]; then echo "jap: ..." >&2; exit 127; fi
    exec "/abs/python" -I -m slurm_jap.run "$0" "$@"
    #JAP-CARRIED array=0-7%2
    #JAP-CARRIED output=logs/%A_%a.out
    #JAP-USER-SCRIPT
    ...the user's script, byte for byte...

Bash never reads past ``exec``, so nothing in the user's text can be misquoted. Values run to the end of their line; a
value with a newline cannot be carried, and such an array stays a plain one. The facts travel in the script and not in
the environment because ``--export=NONE`` empties the latter.
"""

from __future__ import annotations

import dataclasses

FACT = b"#JAP-CARRIED "
MARKER = b"#JAP-USER-SCRIPT\n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What jap-run must know and cannot read from Slurm's environment; absent facts keep these defaults."""

    array: str
    """The array specification as written, throttle included."""
    output: str = ""
    """The user's ``-o`` pattern; empty: Slurm's default for arrays, ``slurm-%A_%a.out``."""
    error: str = ""
    """The user's ``-e`` pattern; empty: standard error goes where output goes."""
    input: str = ""
    """The user's ``-i`` pattern; empty: /dev/null."""
    open_mode: str = ""
    """``append``, ``truncate`` or empty (the site's default)."""
    script_name: str = ""
    """The script's path as the user gave it (members' ``$0`` base name, job name default)."""
    stages: int | None = None
    groups: int | None = None
    member_cpus: int | None = None
    """CPUs of one member's host process."""
    member_mem_mb: int | None = None
    """Host memory of one member's process, MiB; None: not limited per member."""
    member_time_min: int | None = None
    """The member's own time limit, minutes (what the array task would have had)."""
    memory_per_device_mb: int | None = None
    """What members' states may take on one device, MiB; None: no bound."""
    gres: str = ""
    """The engine step's explicit ``--gres`` per node, e.g. ``gpu:4``; empty: no GPUs."""
    at_once: int | None = None
    """Members that fit at once (host memory, CPUs); None: all. The array's own ``%N`` applies as well."""


def quote_for_bash(text: str) -> str:
    """A double-quoted bash word for an absolute path free of quotes, ``$``, backquotes, backslashes and controls.

    Raises:
        ValueError: the path holds such a character.
    """
    if any(c in '"$`\\!' or ord(c) < 32 for c in text):
        raise ValueError(f"path {text!r} holds a character that a batch script cannot carry safely")
    return f'"{text}"'


def build(python: str, facts: Carried, user_script: bytes, sbatch_lines: tuple[str, ...] = ()) -> bytes:
    """The coalesced job's script.

    Args:
        python: absolute path of the interpreter that has slurm_jap, equal on all nodes.
        sbatch_lines: option texts for ``#SBATCH`` lines, e.g. ``--time=30``.

    Raises:
        ValueError: a value holds a newline or NUL and cannot be carried.
    """
    word = quote_for_bash(python)
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {line}" for line in sbatch_lines]
    lines.append(
        f'if [ ! -x {word} ]; then echo "jap: {python} not found on $(hostname): '
        'ask the administrator to install slurm_jap there, or submit with JAP=0 for a plain array" >&2; exit 127; fi'
    )
    lines.append(f'exec {word} -I -m slurm_jap.run "$0" "$@"')
    for field in dataclasses.fields(facts):
        value = getattr(facts, field.name)
        if value is None or value == "":
            continue
        lines.append(f"{FACT.decode()}{field.name}={value}")
    for line in lines:
        if "\n" in line or "\0" in line or "\r" in line:
            raise ValueError(f"{line!r} holds a line break and cannot be carried")
    return ("\n".join(lines) + "\n").encode(errors="surrogateescape") + MARKER + user_script


def parse(script: bytes) -> tuple[Carried, bytes]:
    """The facts and the user's script, from a coalesced job's script.

    Raises:
        ValueError: no marker, or a fact that this version does not know: the script was built by another version.
    """
    # The marker is a line of its own: a value may end with the same word.
    head, marker, user = script.partition(b"\n" + MARKER)
    if not marker:
        raise ValueError("not a coalesced job's script: no #JAP-USER-SCRIPT line; submit with jap-submit")
    types = {f.name: f.type for f in dataclasses.fields(Carried)}
    values: dict[str, str | int] = {}
    for line in head.split(b"\n"):
        if not line.startswith(FACT):
            continue
        name, _, value = line[len(FACT) :].decode(errors="surrogateescape").partition("=")
        if name not in types:
            raise ValueError(f"unknown fact {name!r}: the job was submitted by another slurm_jap; install one version")
        try:
            values[name] = int(value) if "int" in str(types[name]) else value
        except ValueError:
            raise ValueError(f"carried fact {name}={value!r} is not a whole number; submit with jap-submit") from None
    if "array" not in values:
        raise ValueError("the carried facts name no array; submit with jap-submit")
    return Carried(**values), user  # type: ignore[arg-type]
