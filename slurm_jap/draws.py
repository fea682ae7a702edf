"""Random draws that depend on what is computed, never on where or beside whom.

Before each block runs, forward or backward, every generator that user code commonly draws from is seeded with
``key(member seed, iteration, micro-batch, block, direction)``. So a member's dropout masks are the same whatever the
cut into stages and whoever its siblings are. CPU generators ignore seed bits above 31, hence a hash whose low 32 bits
suffice.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
import sys
from collections.abc import Iterator
from typing import Any

import torch

FORWARD = 0
BACKWARD = 1
EVALUATION = 2


def key(seed: int, iteration: int, microbatch: int, block: int, direction: int) -> int:
    """A 63-bit seed, well mixed in every bit."""
    text = struct.pack("<Qqqqq", seed & 0xFFFFFFFFFFFFFFFF, iteration, microbatch, block, direction)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def reseed(value: int, device: torch.device) -> None:
    """Seed torch's default generators (CPU and ``device``), ``random`` and, where it is loaded, ``numpy.random``."""
    torch.default_generator.manual_seed(value)  # 1.6 us; torch.manual_seed costs 238 us
    if device.type != "cpu":
        _device_generator(device).manual_seed(value)
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFFFFFF)


def _device_generator(device: torch.device) -> Any:
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    return module.default_generators[index]


@contextlib.contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Leave the caller's generators as they were, whatever happens inside."""
    cpu = torch.default_generator.get_state()
    other = None if device.type == "cpu" else _device_generator(device).get_state()
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu)
        if other is not None:
            _device_generator(device).set_state(other)
        random.setstate(python)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)
