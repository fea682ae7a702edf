"""What is known of one member's network: per block its times and bytes, measured by the engine or estimated.

Pure data: no I/O, no torch. The engine measures (``measure``), jap-run keeps it (``profile_cache``), the planner and
the next cut read it. Times are seconds of one micro-batch, sizes are bytes. The last block is the loss.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

VERSION = 1
WORTH_A_CUT = 0.1
"""Measured costs that ``drift`` by more from what a cut is made with are worth another one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockProfile:
    """One block, or the loss."""

    name: str
    forward: float
    """Seconds of one micro-batch's forward; in an estimate only the ratios between blocks mean anything."""
    backward: float
    """Seconds of one micro-batch's backward."""
    step: float = 0.0
    """Seconds of one optimizer step over its parameters."""
    parameter_bytes: int = 0
    """Of parameters and buffers."""
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0
    """Held from a micro-batch's forward to its backward."""
    output_bytes: int = 0
    """Of the tree that the next block gets."""

    @property
    def state_bytes(self) -> int:
        """What it takes on a device, whatever runs."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One member's network on one kind of device."""

    signature: str
    """Equal for equal networks on equal batches."""
    device: str
    """``cpu``, or the accelerator's name."""
    blocks: tuple[BlockProfile, ...]
    """In order; the last one is the loss."""
    microbatches: int
    """M of one batch."""
    accumulate: int = 1
    """Batches per optimizer step."""
    measured: bool = False
    """Whether the times were measured; else they are in proportion to the operations counted."""
    iterations: int = 0
    """How many were measured."""
    device_bytes: int | None = None
    """Memory of one device; None: not known, or the host's."""
    forward_overhead: float = 0.0
    """Seconds that a stage spends on a forward beyond its blocks (messages, bookkeeping)."""
    backward_overhead: float = 0.0
    version: int = VERSION

    @property
    def block_count(self) -> int:
        """Blocks that can be cut apart; the loss goes with the last one."""
        return len(self.blocks) - 1

    @property
    def costs(self) -> tuple[float, ...]:
        """Forward plus backward of each block of the model; the loss counts with the last."""
        own = [block.forward + block.backward for block in self.blocks]
        return (*own[:-2], own[-2] + own[-1])

    @property
    def seconds(self) -> float:
        """One batch alone on one device, without overheads."""
        step = sum(block.step for block in self.blocks) / self.accumulate
        return self.microbatches * sum(self.costs) + step

    @property
    def state_bytes(self) -> int:
        """Of parameters, gradients and optimizer."""
        return sum(block.state_bytes for block in self.blocks)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, nothing lost."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Profile:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: it is none, or another version's.
        """
        if data.get("version") != VERSION:
            raise ValueError(f"profile version {data.get('version')!r}; this slurm_jap reads version {VERSION}")
        try:
            kinds = {f.name: _KINDS[str(f.type)] for f in dataclasses.fields(cls) if f.name != "blocks"}
            values = {name: _checked(name, data[name], kind) for name, kind in kinds.items()}
            blocks = tuple(_block(block) for block in data["blocks"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a profile: {error!r}") from None
        if len(blocks) < 2 or values["microbatches"] < 1 or values["accumulate"] < 1:
            raise ValueError("not a profile: it needs two blocks, one micro-batch and one batch per step at least")
        return cls(blocks=blocks, **values)


_NUMBER = (int, float)
_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": _NUMBER,
    "int | None": (int, type(None)),
}


def _checked(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"{name} is {value!r}")
    if isinstance(value, _NUMBER) and not (math.isfinite(value) and value >= 0):
        raise TypeError(f"{name} is {value!r}")
    return value


def _block(data: Mapping[str, Any]) -> BlockProfile:
    kinds = {f.name: _KINDS[str(f.type)] for f in dataclasses.fields(BlockProfile)}
    return BlockProfile(**{name: _checked(name, data[name], kind) for name, kind in kinds.items()})


def script_key(script: bytes) -> str:
    """The name under which a batch script's profiles are kept: equal for equal texts."""
    return hashlib.sha256(script).hexdigest()[:16]


def merged(profiles: Sequence[Profile]) -> Profile:
    """What several members with one signature and device measured, as one: medians of times, largest sizes."""
    measured = [profile for profile in profiles if profile.measured]
    kept = measured or list(profiles)
    first = kept[0]
    if len(kept) == 1:
        return first

    def both(parts: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name in names:
            column = [getattr(part, name) for part in parts]
            values[name] = max(column) if name.endswith("_bytes") else statistics.median(column)
        return values

    times = ("forward", "backward", "step")
    sizes = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "output_bytes")
    blocks = tuple(
        dataclasses.replace(same[0], **both(same, times + sizes))
        for same in zip(*(profile.blocks for profile in kept), strict=True)
    )
    return dataclasses.replace(first, blocks=blocks, **both(kept, ("forward_overhead", "backward_overhead")))


def drift(costs: Sequence[float], others: Sequence[float]) -> float:
    """How much two lists of block costs differ: the largest change of a block's share, over the mean share.

    >>> drift([1, 1], [2, 2])
    0.0
    """
    if len(costs) != len(others) or not costs:
        return math.inf
    one, other = sum(costs), sum(others)
    if one <= 0 or other <= 0:
        return math.inf if (one > 0) != (other > 0) else 0.0
    return max(abs(a / one - b / other) for a, b in zip(costs, others, strict=True)) * len(costs)
