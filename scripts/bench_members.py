"""The benchmark's own sweep: real coordinator, agent, engines and member processes, driven from one place.

Members stay and wait for functions to run, so that many cases are measured in turn without starting anything again.
"""

from __future__ import annotations

import functools
import multiprocessing.connection
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "engine"))

import array_harness

ANSWER_SECONDS = 600.0

Meet = Callable[[], None]
Job = Callable[[dict[str, Any], Meet], Any]
"""Gets what earlier jobs of this member kept, and a function that returns once every member has called it."""


class Session:
    """A running sweep."""

    def __init__(
        self, stages: int, members: int, *, groups: int = 1, variables: Mapping[str, str] | None = None
    ) -> None:
        """Start ``members`` member processes; the engines start with their first ``prepare``.

        Args:
            variables: set in every member and in the engine.
        """
        self.members, self.stages, self.groups = members, stages, groups
        self._folder = tempfile.TemporaryDirectory(prefix="jap-bench-")
        address = os.path.join(self._folder.name, "members")
        listener = multiprocessing.connection.Listener(address, "AF_UNIX", backlog=members)
        self._launcher: Any = None
        self.failure = ""
        functions = {
            index: functools.partial(_serve, address, index, dict(variables or {})) for index in range(members)
        }
        self._thread = threading.Thread(target=self._run, args=(functions, dict(variables or {})), daemon=True)
        self._thread.start()
        self._ends: dict[int, multiprocessing.connection.Connection] = {}
        for _ in range(members):
            end = listener.accept()
            self._ends[end.recv()] = end
        listener.close()

    def _run(self, functions: dict[int, Any], variables: dict[str, str]) -> None:
        def during(launcher: Any, sweep_dir: Any) -> None:
            self._launcher = launcher

        try:
            outcome = array_harness.together(
                functions, stages=self.stages, groups=self.groups, engine_variables=variables, during=during,
                seconds=86400.0,
            )  # fmt: skip
            self.failure = (
                "" if outcome.code == 0 else f"{outcome.errors} {outcome.said[-3:]} {outcome.engine_log[-2000:]}"
            )
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"

    @property
    def engines(self) -> list[int]:
        """Process ids of the engines, by group and stage."""
        agent = self._launcher.agents[0].pid
        return sorted(int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split())

    def process(self, member: int) -> int:
        """Process id of a member."""
        return int(self._launcher.members[member].pid)

    def call(self, jobs: Mapping[int, Job]) -> dict[int, Any]:
        """Run one function in each of some members, at once; their answers.

        Raises:
            RuntimeError: one raised, ended, or did not answer.
        """
        for index, job in jobs.items():
            self._ends[index].send_bytes(cloudpickle.dumps(job))
        waiting = {self._ends[index]: index for index in jobs}
        answers: dict[int, Any] = {}
        met: list[multiprocessing.connection.Connection] = []
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(answers) < len(jobs):
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RuntimeError(f"no answer of members {sorted(waiting.values())} for {ANSWER_SECONDS:g} s")
            for end in ready:
                assert isinstance(end, multiprocessing.connection.Connection)
                index = waiting[end]
                try:
                    kind, value = end.recv()
                except EOFError:
                    self._thread.join(timeout=10)
                    raise RuntimeError(f"member {index} ended: {self.failure}") from None
                if kind == "met":
                    met.append(end)
                elif kind == "error":
                    raise RuntimeError(f"member {index}: {value}")
                else:
                    answers[index] = value
                    del waiting[end]
            if len(met) == len(jobs):
                for end in met:
                    end.send(None)
                met.clear()
        return answers

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the members, and with them the sweep."""
        for end in self._ends.values():
            end.close()
        self._thread.join(timeout=60)
        self._folder.cleanup()


def _serve(address: str, index: int, variables: dict[str, str]) -> None:
    """The life of a member: run what is sent."""
    import traceback

    os.environ.update(variables)
    end = multiprocessing.connection.Client(address, "AF_UNIX")
    end.send(index)

    def meet() -> None:
        end.send(("met", None))
        end.recv()

    kept: dict[str, Any] = {}
    while True:
        try:
            job = cloudpickle.loads(end.recv_bytes())
        except EOFError:
            return
        try:
            end.send(("answer", job(kept, meet)))
        except EOFError:
            return
        except BaseException:
            end.send(("error", traceback.format_exc()))
