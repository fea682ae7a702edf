"""The engine set as jap-run sees it: started once, ready or failed within a time, ended on request. Torch-free.

    started -> every agent has said ``node`` and got ``assign`` -> every engine has said ``engine`` and got ``topology``
            -> every engine has said ``ready`` -> ready -> ``stop`` -> ended
    any step may fail: then ``fault`` holds the one cause, for good, and what is left of the set is ended

docs/design.md "Control connection" is the protocol.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurm_jap import launch
from slurm_jap.control import Peer
from slurm_jap.errors import UsageError
from slurm_jap.launch import EngineRequest, Launcher, Started
from slurm_jap.store import EventWriter
from slurm_jap.sweep import Sweep

STOP_SECONDS = 30.0
"""After ``stop``, or after a fault, the set gets this long to end by itself."""
CAUSE_SECONDS = 1.0
"""How long a vanished connection may wait for somebody to tell the cause."""
_TAIL_BYTES = 8192


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How an engine process ended unasked, as its agent saw it."""

    member: int | None
    """Whose code was running in it, if anybody's."""
    overdue: bool
    """It was killed because that code did not return."""


class EngineSet:
    """One agent per node and the engines that they fork."""

    def __init__(
        self,
        sweep: Sweep,
        launcher: Launcher,
        join: Mapping[str, Any],
        environment: Mapping[str, str],
        events: EventWriter,
        log: Path,
        *,
        seconds: float,
        on_ready: Callable[[], None],
        on_fault: Callable[[EngineSet], None],
    ) -> None:
        """Start it, with the surroundings of the member that sent ``join``.

        Args:
            environment: the JAP_* variables to set.
            log: where the set's own output goes.
            seconds: it must be ready within this time.
            on_ready, on_fault: called once each at most, from the event loop; the latter with this set, ``fault`` set.

        Raises:
            KeyError, TypeError, ValueError: ``join`` does not follow the protocol.
        """
        self._sweep, self._launcher, self._events, self._log = sweep, launcher, events, log
        self._request = EngineRequest(
            executable=str(join["executable"]),
            cwd=str(join["cwd"]),
            environment={str(k): str(v) for k, v in dict(join["environment"]).items()},
        )
        self._path = [str(entry) for entry in join["path"]]
        self._environment = environment
        self._seconds, self._on_ready, self._on_fault = seconds, on_ready, on_fault
        self._placement: dict[str, list[dict[str, int]]] = {}
        self._agents: dict[str, Peer] = {}
        self._engines: dict[tuple[int, int], tuple[Peer, dict[str, Any]]] = {}
        self._ready: set[tuple[int, int]] = set()
        self._all_ready, self._over = asyncio.Event(), asyncio.Event()
        self._stopping = False
        self.fault: str | None = None
        """Why the set cannot be used any more."""
        self.death: Death | None = None
        """What is known of the process that ended, where one did."""
        self.was_ready = False
        self._life = asyncio.create_task(self._live())

    @property
    def ready(self) -> bool:
        """Whether every engine has its neighbours and nothing has failed."""
        return self._all_ready.is_set() and self.fault is None

    def engines_of(self, group: int) -> list[dict[str, Any]]:
        """The ENGINE objects of a group, in stage order."""
        return [self._engines[group, stage][1] for stage in range(self._sweep.stages)]

    async def stop(self) -> None:
        """Tell agents and engines to stop and wait for the end, by force if need be."""
        self._stopping = True
        for peer in self._peers():
            peer.send({"kind": "stop"})
        self._over.set()
        await self._life

    def fail(self, reason: str, death: Death | None = None) -> None:
        """Record the first cause, tell it, and have the rest of the set end: each process ends with its connection."""
        if self.fault is not None or self._stopping:
            return
        self.fault, self.death = reason, death
        self._on_fault(self)
        for peer in self._peers():
            peer.abort()
        self._over.set()

    def _peers(self) -> list[Peer]:
        return [*self._agents.values(), *(peer for peer, _ in self._engines.values())]

    async def _live(self) -> None:
        code: int | None = None
        try:
            self._placement = launch.place_engines(self._sweep.stages, self._sweep.groups, self._launcher.nodes)
            started = await self._launcher.start_engine(self._request, self._environment)
        except (UsageError, OSError) as error:
            self.fail(f"cannot start the engine: {error}")
        else:
            self._events.write("engine_started", executable=self._request.executable)
            code = await self._until_end(started)
        self._events.write("engine_ended", code=code, reason=self.fault)

    async def _until_end(self, started: Started) -> int:
        """Watch the set from its start to its end; returns its exit code."""
        end = asyncio.create_task(started.wait())
        ready, over = asyncio.create_task(self._all_ready.wait()), asyncio.create_task(self._over.wait())
        await asyncio.wait([end, ready, over], timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
        if not (end.done() or ready.done() or over.done()):
            self.fail(self._with_log(f"the engine was not ready within {self._seconds:g} s (JAP_ENGINE_TIMEOUT)"))
        await asyncio.wait([end, over], return_when=asyncio.FIRST_COMPLETED)
        if not end.done():
            await asyncio.wait([end], timeout=STOP_SECONDS)
        if not end.done():
            await started.kill()
        ended = await end
        ready.cancel()
        over.cancel()
        when = "before" if not self._all_ready.is_set() else "after"
        why = f": {ended.reason}" if ended.reason else ""
        self.fail(self._with_log(f"the engine ended with code {ended.code} {when} it was ready{why}"))
        return ended.code

    def _with_log(self, text: str) -> str:
        """Add the last line that the engine printed, where there is one, and where to read the rest."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return text
        told = [line.strip() for line in lines if line.strip() and not line.startswith(("srun: ", "slurmstepd"))]
        last = told[-1] if told else ""
        return f"{text}; its last words: {last[:500]} (all of them: {self._log})" if last else text

    async def serve_agent(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """Talk to the agent of one node until it goes."""
        node = str(message["node"])
        if node not in self._placement or node in self._agents or self.fault is not None:
            return
        self._agents[node] = peer
        peer.send(
            {"kind": "assign", "engines": self._placement[node], "stages": self._sweep.stages, "path": self._path}
        )
        if self._stopping:
            peer.send({"kind": "stop"})
        try:
            while True:
                said = await peer.receive()
                if said.get("kind") == "engine_died":
                    await asyncio.sleep(CAUSE_SECONDS / 4)  # its own last word, if any, comes on another connection
                    self.fail(*self._died(said))
        finally:
            await self._explain(f"the engine agent on {node} went away")

    def _died(self, said: Mapping[str, Any]) -> tuple[str, Death]:
        member, overdue = said.get("acting"), said.get("overdue")
        where = f"the engine of group {said['group']}, stage {said['stage']}"
        whose = "" if member is None else f" while it ran code of member {member}"
        if overdue is not None:
            reason = f"{where} was ended{whose} that had not returned for {overdue:.0f} s (JAP_ACTION_TIMEOUT)"
        else:
            reason = self._with_log(f"{where} {_how(int(said['code']))}{whose}")
        return reason, Death(member=None if member is None else int(member), overdue=overdue is not None)

    async def serve_engine(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """Talk to one engine until it goes."""
        group, stage = int(message["group"]), int(message["stage"])
        node = next(
            (n for n, es in self._placement.items() for e in es if (e["group"], e["stage"]) == (group, stage)), None
        )
        if node is None or (group, stage) in self._engines or self.fault is not None:
            return
        addresses = [str(address) for address in message["addresses"]]
        self._engines[group, stage] = (
            peer,
            {
                "group": group,
                "stage": stage,
                "node": node,
                "addresses": addresses,
                "device": str(message.get("device", "")),
            },
        )
        if all((group, s) in self._engines for s in range(self._sweep.stages)):
            for s in range(self._sweep.stages):
                self._engines[group, s][0].send({"kind": "topology", "engines": self.engines_of(group)})
        try:
            while True:
                said = await peer.receive()
                if said.get("kind") == "fatal":
                    self.fail(f"the engine of group {group}, stage {stage} cannot go on: {said['reason']}")
                elif said.get("kind") == "ready":
                    self._ready.add((group, stage))
                    if len(self._ready) == self._sweep.stages * self._sweep.groups and self.fault is None:
                        self.was_ready = True
                        self._all_ready.set()
                        self._on_ready()
        finally:
            await self._explain(f"the engine of group {group}, stage {stage} went away")

    async def _explain(self, otherwise: str) -> None:
        """A connection is gone: let the cause arrive by another way first."""
        if self._stopping or self.fault is not None:
            return
        await asyncio.wait([self._life], timeout=CAUSE_SECONDS)
        self.fail(self._with_log(otherwise))


def _how(code: int) -> str:
    """``ended with code 3`` or ``was killed by SIGSEGV``, from a ``subprocess`` return code."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
