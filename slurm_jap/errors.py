"""Errors that users meet. Every message names the value, the rule, the context and what to type next.

Pure: no I/O, no torch. ``UsageError`` ends a command-line program with exit code 2 and one line;
``EngineFault`` is raised in a member's process when its engine or allocation cannot go on.
"""

from __future__ import annotations

USAGE_EXIT_CODE = 2
PREFIX = "jap:"


class JapError(Exception):
    """Base of every error that slurm_jap raises on purpose."""


class UsageError(JapError, ValueError):
    """The user asked for something that cannot be; the message ends with what to type next."""


class EngineFault(JapError, RuntimeError):
    """The engine ended, or refused this member; the message names the one cause."""


class RemoteError(JapError, RuntimeError):
    """User code raised inside the engine; carries the remote traceback and the stage where it happened.

    The original exception, where it can be pickled, is the ``__cause__``.
    """
