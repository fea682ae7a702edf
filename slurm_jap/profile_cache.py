"""Where profiles lie between runs: ``<cache>/slurm-jap/profiles/<script>/<signature>-<device>.json``. No torch.

``<cache>`` is ``$XDG_CACHE_HOME``, by default ``~/.cache``; ``<script>`` is ``profile.script_key`` of the batch
script's text. jap-run writes; jap-submit, jap-plan and members read. A file that cannot be read, or that another
version wrote, does not exist.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurm_jap import profile
from slurm_jap.errors import UsageError
from slurm_jap.profile import Profile

ENV_PROFILE = "JAP_PROFILE"
"""A Trainer outside any sweep writes what it measured to the file that this variable names."""
MAX_BYTES = 8 << 20
MOST = 64
"""Profiles kept of one script, the newest."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One profile, and whose it is."""

    profile: Profile
    members: tuple[int, ...] = ()
    """Array indices that had it."""
    arguments: tuple[str, ...] = ()
    """The script's arguments then."""
    saved: float = 0.0
    """Seconds since the epoch."""


def folder() -> Path:
    """Where all profiles lie."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "slurm-jap" / "profiles"


def _name(found: Profile) -> str:
    device = re.sub(r"[^A-Za-z0-9]+", "-", found.device).strip("-").lower()[:40]
    return f"{re.sub('[^0-9a-f]', '', found.signature)[:16]}-{device}.json"


def save(script: bytes, entry: Entry) -> Path:
    """Keep one profile, whole or not at all, in place of the last one with its signature and device.

    Raises:
        OSError: it cannot be written.
    """
    home = folder() / profile.script_key(script)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = home / _name(entry.profile)
    write(path, entry)
    for old in sorted(home.glob("*.json"), key=_age)[MOST:]:
        with contextlib.suppress(OSError):
            old.unlink()
    return path


def write(path: str | Path, entry: Entry) -> None:
    """One file, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    data = {
        "profile": entry.profile.to_json(),
        "members": list(entry.members),
        "arguments": list(entry.arguments),
        "saved": entry.saved or time.time(),
    }
    descriptor, temporary = tempfile.mkstemp(prefix=".new-", dir=Path(path).parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(data, file)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0


def load(script: bytes, arguments: Sequence[str] | None = None) -> list[Entry]:
    """What is known of a script, newest first; only runs with these arguments, where there were any."""
    home = folder() / profile.script_key(script)
    found = []
    with contextlib.suppress(OSError):
        for path in home.glob("*.json"):
            with contextlib.suppress(OSError, ValueError):
                found.append(read(path))
    found.sort(key=lambda entry: -entry.saved)
    alike = [entry for entry in found if arguments is not None and entry.arguments == tuple(arguments)]
    return alike or found


def find(script: bytes, signature: str, device: str) -> Profile | None:
    """The profile of one network on one kind of device."""
    for entry in load(script):
        if entry.profile.signature == signature and entry.profile.device == device:
            return entry.profile
    return None


def read(path: Path) -> Entry:
    """One file: of the cache, or what a Trainer outside any sweep wrote (``JAP_PROFILE``).

    Raises:
        OSError: it cannot be read.
        ValueError: it holds no profile.
    """
    with path.open("rb") as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise ValueError("too large for a profile")
    try:
        data: Any = json.loads(text)
        return Entry(
            profile=Profile.from_json(data["profile"]),
            members=tuple(int(index) for index in data.get("members", ())),
            arguments=tuple(str(word) for word in data.get("arguments", ())),
            saved=float(data.get("saved", 0.0)),
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a profile: {error!r}") from None


def read_named(path: str) -> Entry:
    """A file that the user named.

    Raises:
        UsageError: it cannot serve.
    """
    try:
        return read(Path(path))
    except OSError as error:
        raise UsageError(f"cannot read the profile {path!r}: {error.strerror}; check its path") from None
    except ValueError as error:
        raise UsageError(
            f"{path}: {error}; write one with JAP_PROFILE={path} python train.py, which trains by itself"
        ) from None
