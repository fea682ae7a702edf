"""Checkpoint files: written whole or not at all, read by ``torch.load(weights_only=True)`` without this package."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch


def write(path: str, content: dict[str, Any]) -> None:
    """Write to a new file, flush it to disk, then put it in place of the old one."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: str) -> dict[str, Any] | None:
    """What :func:`write` wrote, or None where there is no file; left-overs of interrupted writes are removed."""
    target = Path(path)
    for left in target.parent.glob(f".{target.name}.*.tmp"):
        with contextlib.suppress(OSError):
            left.unlink()
    if not target.exists():
        return None
    content: dict[str, Any] = torch.load(target, weights_only=True, map_location="cpu")
    return content


def generator_states() -> dict[str, Any]:
    """The script's own random streams (torch on the CPU, ``random``, numpy), as tensors and plain numbers."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": list(words), "gauss": gauss},
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        states["numpy"] = {
            "name": name,
            "keys": [int(key) for key in keys],
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        }
    return states


def set_generator_states(states: dict[str, Any]) -> None:
    """Inverse of :func:`generator_states`."""
    torch.set_rng_state(states["torch"])
    python = states["python"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        n = states["numpy"]
        keys = numpy.array(n["keys"], dtype=numpy.uint32)
        numpy.random.set_state((n["name"], keys, n["position"], n["has_gauss"], n["cached"]))
