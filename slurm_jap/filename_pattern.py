r"""File name patterns (``-o logs/%x_%A_%4a.out``) expanded as Slurm names the files of batch jobs.

Pure: no I/O, no torch. ``%%`` is a percent sign, ``%4a`` pads with zeros up to ten places, unknown letters stay as they
are, and one backslash anywhere switches expansion off: then only the escaping backslashes go. Slurm rewrote this code
for 25.11, which keeps an unknown ``%4z`` whole (before, only ``4z`` was left) and knows more letters; hence ``slurm``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

DEFAULT_ARRAY_OUTPUT = "slurm-%A_%a.out"
"""What Slurm writes a task's output to if nobody says otherwise."""
NOWHERE = "/dev/null"
MAX_WIDTH = 10

_MODULO = (24, 11)
_REWRITTEN = (25, 11)
_NUMERIC = frozenset("aAbjJntr")
_DIRECTIVE = re.compile(r"%(?:%|([0-9]*)(.?))", re.DOTALL)


def _letters(slurm: tuple[int, int]) -> frozenset[str]:
    """The letters that mean something to a batch job's file names in a version of Slurm."""
    known = set("aAjJnNstux")
    if slurm >= _MODULO:
        known.add("b")
    if slurm >= _REWRITTEN:
        known.add("r")
    return frozenset(known)


def _without_escapes(pattern: str, slurm: tuple[int, int]) -> str:
    r"""A pattern with a backslash, literally: ``\x`` is ``x``, and ``\\`` is ``\`` until 25.05, nothing after."""
    if slurm >= _REWRITTEN:
        return pattern.replace("\\", "")
    return re.sub(r"\\(\\?)", r"\1", pattern)


def _substitute(pattern: str, values: Mapping[str, str], slurm: tuple[int, int]) -> str:
    out: list[str] = []
    position = 0
    while (match := _DIRECTIVE.search(pattern, position)) is not None:
        out.append(pattern[position : match.start()])
        position = match.end()
        width, letter = match.group(1) or "", match.group(2)
        if match.group() == "%%":
            out.append("%")
        elif letter in values and letter:
            value = values[letter]
            out.append(value.zfill(min(int(width), MAX_WIDTH)) if width and letter in _NUMERIC else value)
        elif slurm >= _REWRITTEN:
            out.append(match.group() if width or letter else "")
        else:
            # The older code drops all of an unknown padded directive but its last digit, and reads on from the letter.
            out.append(width[-1] if width else match.group())
            position = match.end() - len(letter) if width or letter == "%" else match.end()
    return "".join(out) + pattern[position:]


def expand(
    pattern: str,
    *,
    job_id: int,
    array_job_id: int,
    index: int,
    job_name: str,
    user: str,
    node: str,
    node_index: int = 0,
    restarts: int = 0,
    slurm: tuple[int, int] = _MODULO,
) -> str:
    """The file name of one array task; relative patterns stay relative (to the job's working directory).

    Args:
        pattern: as given to ``-o``, ``-e`` or ``-i``; empty: Slurm's default for arrays; ``none``: /dev/null.
        node: short name of the node on which the task's script runs.
        node_index: that node's place in the job, from 0.
        restarts: how often the job was requeued (``%r``, from 25.11).
        slurm: version of the cluster, e.g. ``(22, 5)``.
    """
    pattern = pattern or DEFAULT_ARRAY_OUTPUT
    if pattern.lower() == "none":
        return NOWHERE
    if "\\" in pattern:
        return _without_escapes(pattern, slurm)
    values = {
        "a": str(index),
        "A": str(array_job_id),
        "b": str(index % 10),
        "j": str(job_id),
        "J": str(job_id),
        "n": str(node_index),
        "N": node,
        "r": str(restarts),
        "s": "batch",
        "t": "0",
        "u": user,
        "x": job_name,
    }
    return _substitute(pattern, {letter: values[letter] for letter in _letters(slurm)}, slurm)


def letters_in(pattern: str, slurm: tuple[int, int] = _MODULO) -> frozenset[str]:
    """The letters that expansion of the pattern would replace; empty for a pattern with a backslash, or ``none``."""
    pattern = pattern or DEFAULT_ARRAY_OUTPUT
    if "\\" in pattern or pattern.lower() == "none":
        return frozenset()
    known, found, position = _letters(slurm), set(), 0
    while (match := _DIRECTIVE.search(pattern, position)) is not None:
        position = match.end()
        if match.group(2) in known and match.group(2):
            found.add(match.group(2))
        elif match.group(2) == "%":
            position -= 1
    return frozenset(found)


def fixed_folder(pattern: str) -> str:
    """The folder that holds the files of all tasks: what stands before the last slash that no ``%`` precedes.

    Empty: the working directory (also for patterns that name devices, beside which nothing can be written).
    """
    pattern = pattern or DEFAULT_ARRAY_OUTPUT
    if pattern.lower() == "none":
        return ""
    if "\\" in pattern:
        pattern = _without_escapes(pattern, _MODULO)
        head = pattern
    else:
        head = pattern.partition("%")[0] if "%" in pattern else pattern
    folder, slash, _ = head.rpartition("/")
    if slash and not folder.strip("/"):
        folder = "/"
    return "" if folder == "/dev" or folder.startswith("/dev/") else folder
