"""The word that an engine shares with its agent is never seen half written."""

from __future__ import annotations

import os
import signal
import time

from slurm_jap.engine import Marker


def test_a_reader_sees_only_what_was_written() -> None:
    """A torn word would name a member that ran nothing, since a time that never was, and end a healthy engine."""
    marker = Marker()
    child = os.fork()
    if child == 0:
        try:
            while True:
                marker.set(5)
                marker.set(None)
        finally:
            os._exit(0)
    try:
        end = time.monotonic() + 1.5
        seen = set()
        while time.monotonic() < end:
            member, seconds = marker.get()
            seen.add(member)
            assert member in (5, None)
            assert -0.01 < seconds < 60
        assert seen == {5, None}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_the_largest_array_index_of_slurm_fits() -> None:
    marker = Marker()
    marker.set(4_000_001)
    assert marker.get()[0] == 4_000_001
    marker.set(0)
    assert marker.get()[0] == 0
