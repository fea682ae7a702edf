"""Array specifications (``--array=0-15:4%2``) with the verdict and the set of indices that Slurm gives them.

Pure: no I/O, no torch. The grammar is the controller's, quirks included: it reads numbers as C's ``strtol`` does, so
``-`` and ``%3`` mean index 0, brackets may surround a token, and the first ``%`` and the first ``:`` of the whole
text alone decide the throttle and the step that tasks are told. Texts without any token (empty, only commas) are no
array at all.
"""

from __future__ import annotations

import dataclasses
import re

from slurm_jap.errors import UsageError

DEFAULT_MAX_ARRAY_SIZE = 1001
"""Slurm's MaxArraySize where slurm.conf sets none: the largest index is one less."""
LARGEST_MAX_ARRAY_SIZE = 4_000_001
"""The largest MaxArraySize that Slurm accepts."""
MAX_TEXT = 4096
"""Longer specifications are refused by the controller."""

_LONG_MAX = 2**63 - 1
_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?[0-9]+)")


@dataclasses.dataclass(frozen=True, slots=True)
class ArraySpec:
    """The members of an array."""

    indices: tuple[int, ...]
    """Ascending, without repetition; empty: the text names no array and Slurm makes a plain job of it."""
    throttle: int | None
    """At most this many tasks at once; None: no limit."""
    text: str
    """The specification as written."""
    step: int = 1
    """SLURM_ARRAY_TASK_STEP: what follows the text's first colon, whatever the other tokens are."""

    def __len__(self) -> int:
        return len(self.indices)

    def environment(self, array_job_id: int, index: int) -> dict[str, str]:
        """The SLURM_ARRAY_* variables of the task ``index``.

        Raises:
            ValueError: the array has no such index.
        """
        if index not in self.indices:
            raise ValueError(f"index {index} is not in the array {self.text!r}")
        return {
            "SLURM_ARRAY_JOB_ID": str(array_job_id),
            "SLURM_ARRAY_TASK_ID": str(index),
            "SLURM_ARRAY_TASK_COUNT": str(len(self.indices)),
            "SLURM_ARRAY_TASK_MIN": str(self.indices[0]),
            "SLURM_ARRAY_TASK_MAX": str(self.indices[-1]),
            "SLURM_ARRAY_TASK_STEP": str(self.step),
        }


def _leading_number(text: str, start: int) -> tuple[int, int]:
    """C's ``strtol``: the number at ``start`` and where it ends; no number: 0, and ``start`` itself."""
    match = _NUMBER.match(text, start)
    if match is None:
        return 0, start
    return max(-_LONG_MAX - 1, min(_LONG_MAX, int(match.group(1)))), match.end()


def _as_int32(number: int) -> int:
    """What C's ``atoi`` leaves of a long."""
    return (number + 2**31) % 2**32 - 2**31


def _after_first(text: str, separator: str) -> int | None:
    """The number after the first ``separator`` of the text; None without one."""
    position = text.find(separator)
    return None if position < 0 else _as_int32(_leading_number(text, position + 1)[0])


def _parse_token(token: str, max_size: int) -> range | str:
    """The indices that one comma-separated token names, or what is wrong with it."""

    def past_bracket(position: int) -> int:
        return position + 1 if token[position : position + 1] == "]" else position

    def at_end(position: int) -> bool:
        return position == len(token) or token[position] == "%"

    first, end = _leading_number(token, 1 if token.startswith("[") else 0)
    end = past_bracket(end)
    if first < 0:
        return "an index cannot be negative"
    last, step = first, 1
    if token[end : end + 1] == "-":
        last, end = _leading_number(token, end + 1)
        end = past_bracket(end)
        if token[end : end + 1] == ":":
            step, end = _leading_number(token, end + 1)
            end = past_bracket(end)
            if at_end(end) and not 0 < step < max_size:
                return f"the step must be from 1 to {max_size - 1}"
    if not at_end(end):
        return f"unexpected {token[end:]!r}; write indices as 0-7, 0-7:2 or 1,3,5, with %N after them for N at once"
    if last < first:
        return f"the range ends at {last}, before its start {first}"
    if last >= max_size:
        return f"index {last} is above {max_size - 1}, the largest here (MaxArraySize={max_size}); split the array"
    return range(first, last + 1, step)


def parse(text: str, *, max_size: int = DEFAULT_MAX_ARRAY_SIZE, max_tasks: int | None = None) -> ArraySpec:
    """The array that Slurm makes of ``--array=text``.

    Args:
        max_size: the cluster's MaxArraySize.
        max_tasks: ``max_array_tasks`` of its SchedulerParameters, if set.

    Raises:
        UsageError: Slurm refuses the specification; the message says which token and why.
    """

    def refuse(reason: str) -> UsageError:
        shown = text if len(text) <= 80 else text[:77] + "..."
        return UsageError(f"array specification {shown!r}: {reason}")

    if len(text.encode(errors="surrogateescape")) > MAX_TEXT:
        raise refuse(f"longer than {MAX_TEXT} characters; write ranges (0-99) instead of lists")
    tokens = [token for token in text.split(",") if token]
    if tokens and max_size <= 0:
        raise refuse("this cluster allows no arrays (MaxArraySize=0)")
    chosen: set[int] = set()
    for token in tokens:
        indices = _parse_token(token, max_size)
        if isinstance(indices, str):
            raise refuse(indices if len(tokens) == 1 else f"{token!r}: {indices}")
        chosen.update(indices)
    if max_tasks is not None and len(chosen) > max_tasks:
        raise refuse(f"{len(chosen)} tasks, more than the {max_tasks} allowed here (max_array_tasks); split the array")
    throttle = _after_first(text, "%")
    step = _after_first(text, ":")
    return ArraySpec(
        indices=tuple(sorted(chosen)),
        throttle=throttle if throttle is not None and throttle > 0 else None,
        text=text,
        step=1 if step is None else step,
    )
