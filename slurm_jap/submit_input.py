"""What jap-submit is given: its command line, parted into our words and sbatch's, and the batch script. No torch."""

from __future__ import annotations

import dataclasses
import os
import stat
import sys
from collections.abc import Sequence

from slurm_jap import jap_options, sbatch_options
from slurm_jap.errors import UsageError
from slurm_jap.jap_options import JapOptions
from slurm_jap.sbatch_options import COMMAND_LINE, NotUnderstood

STDIN_NAME = "sbatch"
"""Job name that sbatch gives a script from standard input."""

_USAGE = "type jap-submit [options] SCRIPT [arguments]"
_WORD = "--jap"
FLAGS = {
    "--jap": "coalesce this array, although its script has no #JAP line",
    "--jap-local": "run the members here, without Slurm",
    "--jap-explain": "say what would be submitted and why, and submit nothing",
    "--jap-json": "with --jap-explain: as JSON",
}
CHECK_CONF = "--jap-check-conf"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """The words of a command line, parted."""

    flags: frozenset[str]
    """Which of ``FLAGS`` are there."""
    asked: JapOptions
    check_conf: str | None
    options: tuple[sbatch_options.Given, ...]
    script: str | None
    """None: on standard input."""
    arguments: tuple[str, ...]
    handed_on: tuple[str, ...]
    """All but our own words, as they came."""
    fault: str | None = None
    """What sbatch alone can judge; then ``options`` and ``script`` are not known."""

    @property
    def opts_in(self) -> bool:
        """Whether the command line alone makes us responsible for the array."""
        return "--jap" in self.flags or self.asked != JapOptions()


def _valued() -> frozenset[str]:
    """Our own options that take a value."""
    return frozenset({f"--jap-{key.name}" for key in jap_options.table() if key.value} | {CHECK_CONF})


def part(argv: Sequence[str]) -> CommandLine:
    """Part our own words from sbatch's.

    Raises:
        UsageError: a ``--jap-*`` option that does not exist, or its value is wrong.
    """
    ours: list[str] = []
    others: list[str] = []
    options: list[sbatch_options.Given] = []
    fault = "':' on the command line: a heterogeneous job" if ":" in argv else None
    position = 0
    while True:
        try:
            found, length = sbatch_options.parse_words(argv[position:], COMMAND_LINE, until=_WORD)
        except NotUnderstood as error:
            fault, found, length = str(error), [], _up_to_a_file(argv[position:])
        options += found
        others += argv[position : position + length]
        position += length
        if not argv[position : position + 1] or not argv[position].startswith(_WORD) or others[-1:] == ["--"]:
            break
        size = 2 if argv[position] in _valued() else 1
        if position + size > len(argv):
            raise UsageError(f"{argv[position]} needs a value; type jap-submit --help")
        ours += argv[position : position + size]
        position += size
    flags, check_conf, sizing = set(), None, []
    words = iter(ours)
    for word in words:
        name, equals, value = word.partition("=")
        if word in FLAGS:
            flags.add(word)
        elif name == CHECK_CONF:
            check_conf = value if equals else next(words)
        else:
            sizing += [word, next(words)] if word in _valued() else [word]
    return CommandLine(
        flags=frozenset(flags),
        asked=jap_options.parse(
            [(word, COMMAND_LINE) for word in sizing], prefix="--jap-", others=(*FLAGS, CHECK_CONF)
        ),
        check_conf=check_conf,
        options=tuple(options),
        script=argv[position] if position < len(argv) else None,
        arguments=tuple(argv[position + 1 :]),
        handed_on=(*others, *argv[position:]),
        fault=fault,
    )


def _up_to_a_file(words: Sequence[str]) -> int:
    """How far options may reach that are not understood: up to our next word, or the first that names a file."""
    for number, word in enumerate(words):
        if word.startswith(_WORD) or (not word.startswith("-") and os.path.isfile(word)):
            return number
    return len(words)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A batch script that has been read."""

    text: bytes
    path: str | None
    """Where sbatch would find it; None: standard input."""
    name: str
    """As the user gave it, or a word for standard input."""
    descriptor: int | None = None
    """A descriptor that has been read to its end: sbatch needs a fresh one in its place."""

    @property
    def job_name(self) -> str:
        """The name that sbatch gives its job."""
        return os.path.basename(self.path) if self.path else STDIN_NAME


def read_script(line: CommandLine) -> Script:
    """Read the batch script, from where sbatch would read it.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    if line.script is None:
        if sys.stdin is None or os.isatty(0):
            raise UsageError(
                "no batch script: type jap-submit [options] SCRIPT [arguments], or give it on standard input"
            )
        text = sys.stdin.buffer.read()
        if not text.strip():
            raise UsageError(
                "no batch script, and nothing on standard input: type jap-submit [options] SCRIPT [arguments]"
            )
        return Script(text=text, path=None, name="standard input", descriptor=0)
    path = _search(line.script)
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read()
    except OSError as error:
        raise UsageError(f"cannot read batch script {line.script!r}: {error.strerror}; check its path") from None
    descriptor = None
    if not stat.S_ISREG(mode):
        folder, _, number = os.path.normpath(path).rpartition("/")
        if folder not in ("/dev/fd", "/proc/self/fd") or not number.isdigit():
            raise UsageError(f"batch script {line.script!r} is no regular file: copy it to one")
        descriptor = int(number)
    return Script(text=text, path=path, name=line.script, descriptor=descriptor)


def _search(command: str) -> str:
    """Where sbatch looks for a script: here, then, unless it begins with ``.`` or ``/``, in PATH."""
    if not command.startswith((".", "/")):
        for folder in (os.getcwd(), *os.environ.get("PATH", "").split(":")):
            candidate = os.path.join(folder, command)
            if os.path.exists(candidate):
                return candidate
    return command
