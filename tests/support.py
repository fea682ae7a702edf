"""What tests of every kind use: ``from support import wait_until``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(predicate: Callable[[], T], timeout: float = 30.0, message: str = "", every: float = 0.1) -> T:
    """Ask until the answer is true, and return it. A test never sleeps for a time it hopes to be long enough.

    Raises:
        AssertionError: not within ``timeout`` seconds; says ``message`` and the last answer.
    """
    deadline = time.monotonic() + timeout
    while True:
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout:g} s: {message or predicate}; last answer: {answer!r}")
        time.sleep(every)
