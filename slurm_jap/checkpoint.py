"""Checkpoint files: written whole or not at all, read by ``torch.load(weights_only=True)`` without this package."""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

from slurm_jap.errors import UsageError


def write(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write to a new file, flush it to disk, then put it in place of the old one.

    Raises:
        UsageError: there is no such folder, or the content could not be read back.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise UsageError(f"save({str(path)!r}): there is no folder {str(target.parent)!r}; create it first")
    if target.is_dir():
        raise UsageError(f"save({str(path)!r}): this is a folder; give the name of a file")
    content = _plain(content)
    _require_readable(content.get("registered", {}))
    _remove_left_overs(target, but=os.getpid())
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


def read(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What :func:`write` wrote, or None where there is no file; left-overs of interrupted writes are removed.

    Raises:
        UsageError: the file is something else.
    """
    target = Path(path)
    _remove_left_overs(target, but=os.getpid())
    if not target.exists():
        return None
    try:
        content = torch.load(target, weights_only=True, map_location="cpu")
    except Exception as error:
        raise UsageError(
            f"resume({str(path)!r}): not a checkpoint that trainer.save wrote ({type(error).__name__}); give another "
            "file, or remove it"
        ) from error
    if not (isinstance(content, dict) and content.keys() >= _KEYS):
        raise UsageError(
            f"resume({str(path)!r}): not a checkpoint that trainer.save wrote; to load a bare state_dict, call "
            "trainer.load_state_dict(torch.load(...))"
        )
    return content


_KEYS = {"model", "optimizer", "others", "after_step", "registered", "batches", "accumulate", "seed", "draws"}


def _remove_left_overs(target: Path, but: int) -> None:
    """Remove what processes that were killed while writing have left; one that still runs keeps its own."""
    begin, end = f".{target.name}.", ".tmp"
    with contextlib.suppress(OSError):
        for name in os.listdir(target.parent):
            owner = name[len(begin) : -len(end)]
            if name.startswith(begin) and name.endswith(end) and owner.isdecimal() and not _writes(int(owner), but):
                with contextlib.suppress(OSError):
                    (target.parent / name).unlink()


def _writes(owner: int, but: int) -> bool:
    if owner == but:
        return False
    try:
        os.kill(owner, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _plain(value: Any) -> Any:
    """The same with plain numbers in place of numpy's, which ``weights_only`` does not read."""
    if type(value) is dict:
        return {key: _plain(v) for key, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(v) for v in value)
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def _require_readable(registered: dict[str, Any]) -> None:
    for name, state in registered.items():
        buffer = io.BytesIO()
        try:
            torch.save(state, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:
            reason = str(error).strip().splitlines() or [""]
            raise UsageError(
                f"save: the state_dict() of the registered {name} could not be read back with weights_only=True "
                f"({type(error).__name__}: {reason[0]}); have it hold tensors, numbers, strings, lists and dicts only"
            ) from error


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
