"""The life of one attempt: members are admitted a few at a time, the engine is started when the first one joins, a
fault reaches everybody with its one cause, and the sweep's code is the highest member code. Torch-free.

    member script ends  -> member_ended event, one printed line
    member joins        -> the engine starts (once); then ``group``, or ``refused``
    engine fails        -> ``fault`` to every member that joined, ``refused`` to every one that still comes
    all members ended   -> ``stop`` to the agents, the engine ends with 0
    stop(reason)        -> nothing new starts; what runs gets ``END_SECONDS`` to end, then is killed

docs/design.md "Control connection" is the protocol.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_jap import profile_cache, store, wire
from slurm_jap.control import ControlServer, Peer
from slurm_jap.engine_set import Death, EngineSet
from slurm_jap.launch import Ended, Launcher, Started
from slurm_jap.profile import Profile, merged
from slurm_jap.profile_cache import Entry
from slurm_jap.store import EventWriter, SweepDir
from slurm_jap.sweep import Member, MemberState, Sweep

STARTING_SECONDS = 20.0
"""A member that has not joined after this long no longer holds back the next one's start."""
ENGINE_SECONDS = 300.0
"""The engine set must be ready this long after its start (JAP_ENGINE_TIMEOUT)."""
MAX_DEATHS = 3
"""Engine sets that may end unasked before the sweep is given up; two more for every member that was expelled."""
END_SECONDS = 30.0
"""After ``stop(reason)``, what still runs is killed: Slurm's default KillWait."""


@dataclasses.dataclass(slots=True)
class _Joined:
    """A member that has joined and not left."""

    peer: Peer
    group: int
    told: bool = False
    """Whether it has been told its group."""


class Profiles:
    """What the members' networks were found to cost, for the next run of this script."""

    def __init__(self, sweep: Sweep, events: EventWriter) -> None:
        self._sweep, self._events = sweep, events
        self._found: dict[int, Profile] = {}
        self._saved: set[tuple[str, str]] = set()
        """Signature and device of what was saved as measured: a killed job leaves that much."""

    def note(self, index: int, data: Any) -> None:
        """A member's profile, estimated at first, measured later; ``ValueError`` if it is none."""
        found = Profile.from_json(data)
        self._found[index] = found
        if not found.measured:
            return
        self._events.write(
            "profile", member=index, signature=found.signature, device=found.device, iterations=found.iterations,
            seconds=found.seconds,
        )  # fmt: skip
        if (found.signature, found.device) not in self._saved:
            self.save()

    def save(self) -> None:
        """Keep everything, members with one signature and device as one. A disk that fails is no fault of the sweep."""
        alike: dict[tuple[str, str], list[int]] = {}
        for index, found in sorted(self._found.items()):
            alike.setdefault((found.signature, found.device), []).append(index)
        with contextlib.suppress(OSError):
            script = Path(self._sweep.script).read_bytes()
            for key, members in alike.items():
                whole = merged([self._found[index] for index in members])
                known = None if whole.measured else profile_cache.find(script, *key)
                if known is not None and known.measured:
                    continue
                entry = Entry(profile=whole, members=tuple(members), arguments=self._sweep.arguments)
                profile_cache.save(script, entry)
                if whole.measured:
                    self._saved.add(key)


class Coordinator:
    """Runs one attempt; see the module's text. All of it lives in one event loop."""

    def __init__(
        self,
        sweep: Sweep,
        folder: SweepDir,
        launcher: Launcher,
        *,
        arrays: Mapping[int, Mapping[str, str]],
        say: Callable[[str], None],
        done: Mapping[int, Ended] | None = None,
        tcp_hosts: Sequence[str] = (),
        starting_at_once: int | None = None,
        engine_seconds: float = ENGINE_SECONDS,
        end_seconds: float = END_SECONDS,
    ) -> None:
        """
        Args:
            arrays: the SLURM_ARRAY_* variables of each member.
            say: prints one line into the job's own output.
            done: members that are not run again, and how they ended.
            tcp_hosts: names of this node that others can connect to; empty: unix sockets only.
            starting_at_once: members that may be starting at a time; default: the CPUs, at least two.
            end_seconds: after ``stop``, what still runs is killed.
        """
        self._sweep, self._folder, self._launcher, self._arrays, self._say = sweep, folder, launcher, arrays, say
        self._done = dict(done or {})
        self._tcp_hosts = list(tcp_hosts)
        cpus = sum(node.cpus for node in launcher.nodes)
        self._starting = asyncio.Semaphore(starting_at_once or max(2, cpus))
        self._room = asyncio.Semaphore(sweep.throttle or max(1, len(sweep.members)))
        self._engine_seconds, self._end_seconds = engine_seconds, end_seconds
        self._events = folder.writer(store.RUN_WRITER)
        self._profiles = Profiles(sweep, self._events)
        self._server = ControlServer(wire.read_key(str(folder.path)), self._serve)
        self._environment: dict[str, str] = {}
        self._joined: dict[int, _Joined] = {}
        self._has_joined: dict[int, asyncio.Event] = {m.index: asyncio.Event() for m in sweep.members}
        self._first_join: dict[str, Any] | None = None
        self._engine: EngineSet | None = None
        self._deaths = 0
        self._blame: collections.Counter[int] = collections.Counter()
        self._expelled: dict[int, str] = {}
        """Members whose code ends engines, and the reason that they were told."""
        self._no_engine: str | None = None
        """Why there will be no engine any more."""
        self._restarting: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._stop_reason = ""
        self._running: dict[int, Started] = {}
        self._over: set[int] = set()

    def stop(self, reason: str) -> None:
        """End the sweep early: nothing new starts, what runs has ``end_seconds`` left. Call from the event loop."""
        if not self._stopping.is_set():
            self._stop_reason = reason
            self._say(f"ending: {reason}")
            self._stopping.set()

    @property
    def stopping(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stopping.is_set()

    async def run(self) -> int:
        """Run every member that is not done; return the highest member code."""
        sockets = Path(wire.make_socket_folder())
        helpers: list[asyncio.Task[None]] = []
        code = 1
        try:
            self._environment = await self._listen(sockets)
            self._events.write("sweep_started", node=self._launcher.nodes[0].name)
            helpers += [asyncio.create_task(self._beat()), asyncio.create_task(self._end_early())]
            codes = await asyncio.gather(*(self._member(m) for m in self._sweep.members))
            code = max(codes, default=0)
        finally:
            await self._kill_members()
            self._joined.clear()  # nobody is left to start another engine set for
            if self._restarting is not None:
                await asyncio.wait([self._restarting])
            if self._engine is not None:
                await self._engine.stop()
            for helper in helpers:
                helper.cancel()
            await self._server.close()
            self._profiles.save()
            self._events.write("sweep_ended", code=code)
            self._events.close()
            shutil.rmtree(sockets, ignore_errors=True)
        return code

    async def _listen(self, sockets: Path) -> dict[str, str]:
        addresses = [await self._server.listen_unix(sockets / "run")]
        environment = {
            wire.ENV_SWEEP_DIR: str(self._folder.path),
            wire.ENV_JOB_ID: str(self._sweep.job_id),
        }
        if self._tcp_hosts:
            port = await self._server.listen_tcp()
            addresses += [f"tcp:{host}:{port}" for host in self._tcp_hosts]
        else:  # one node: everybody can use the folder
            environment[wire.ENV_SOCKET_DIR] = str(sockets)
        environment[wire.ENV_CONTROL] = ",".join(addresses)
        return environment

    async def _beat(self) -> None:
        beat = 0
        while True:
            await asyncio.sleep(store.BEAT_SECONDS)
            beat += 1
            self._events.write("alive", beat=beat)

    # --- members ---------------------------------------------------------------------------------------------

    async def _member(self, member: Member) -> int:
        if member.index in self._done:
            return self._ended(member, self._done[member.index], quiet=True)
        async with self._room:
            await self._starting.acquire()
            admitted = asyncio.create_task(self._until_started(member))
            admitted.add_done_callback(lambda _: self._starting.release())
            try:
                if self.stopping:
                    return self._not_started().code
                try:
                    started = await self._launcher.start_member(member, self._member_environment(member))
                except OSError as error:
                    reason = f"could not start: {error}"
                    return self._ended(member, Ended(code=1, state=MemberState.FAILED, reason=reason))
                node = self._launcher.node_of(member)
                self._events.write("member_started", member=member.index, node=node, pid=started.pid)
                self._running[member.index] = started
                try:
                    ended = await started.wait()
                finally:
                    del self._running[member.index]
                self._outlived(member)
                return self._ended(member, ended)
            finally:
                admitted.cancel()

    def _outlived(self, member: Member) -> None:
        """A training process that goes on without its script serves nobody: tell it to end."""
        joined = self._joined.get(member.index)
        if joined is not None:
            joined.peer.send({"kind": "fault", "reason": f"the script of member {member.index} has ended"})

    def _member_environment(self, member: Member) -> dict[str, str]:
        return {
            **self._environment,
            **self._arrays[member.index],
            wire.ENV_MEMBER: str(member.index),
            wire.ENV_NODE: self._launcher.node_of(member),
        }

    async def _until_started(self, member: Member) -> None:
        """Wait until this member no longer counts among the starting ones: it has joined, or taken its time."""
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self._has_joined[member.index].wait(), STARTING_SECONDS)

    def _not_started(self) -> Ended:
        return Ended(code=128 + 15, state=MemberState.CANCELLED, reason=f"not started: {self._stop_reason}")

    def _ended(self, member: Member, ended: Ended, quiet: bool = False) -> int:
        self._over.add(member.index)
        self._events.write(
            "member_ended", member=member.index, code=ended.code, state=ended.state.value, reason=ended.reason
        )
        if not quiet:
            why = f": {ended.reason}" if ended.reason else ""
            self._say(f"member {member.index} ended with code {ended.code} ({ended.state.value}){why}")
        return ended.code

    async def _end_early(self) -> None:
        """After ``stop``: when the time is over, kill what still runs.

        Their ends are written down first: when Slurm ends the job, nobody knows whether we are there to see it.
        """
        await self._stopping.wait()
        for member in self._sweep.members:
            if member.index not in self._running and member.index not in self._over:
                self._ended(member, self._not_started(), quiet=True)
        await asyncio.sleep(self._end_seconds)
        reason = f"still ran {self._end_seconds:g} s later: {self._stop_reason}"
        for index in self._running:
            state = MemberState.CANCELLED.value
            self._events.write("member_ended", member=index, code=128 + 9, state=state, reason=reason)
        await self._kill_members()

    async def _kill_members(self) -> None:
        await asyncio.gather(*(started.kill() for started in list(self._running.values())))

    # --- the control connection ------------------------------------------------------------------------------

    async def _serve(self, peer: Peer) -> None:
        message = await asyncio.wait_for(peer.receive(), wire.HANDSHAKE_SECONDS)
        kind = message.get("kind")
        try:
            if kind == "join":
                await self._serve_member(peer, message)
            elif kind == "node" and self._engine is not None:
                await self._engine.serve_agent(peer, message)
            elif kind == "engine" and self._engine is not None:
                await self._engine.serve_engine(peer, message)
            elif kind == "fatal" and self._engine is not None:
                self._engine.fail(f"the engine cannot go on: {message['reason']}")
        except (KeyError, TypeError, ValueError) as error:
            raise wire.WireError(f"message {kind!r} that does not follow the protocol: {error!r}") from None

    async def _serve_member(self, peer: Peer, join: dict[str, Any]) -> None:
        index = int(join["member"])
        reason = self._refusal(index, join)
        if reason is not None:
            self._say(f"member {index} refused: {reason}")
            peer.send({"kind": "refused", "reason": reason})
            with contextlib.suppress(wire.WireError):
                await asyncio.wait_for(peer.receive(), wire.HANDSHAKE_SECONDS)
            return
        self._joined[index] = joined = _Joined(peer, self._emptiest_group())
        self._has_joined[index].set()
        try:
            if self._engine is None:
                self._engine = self._start_engine(join)
                self._first_join = join
            self._tell_group(index)
            while True:
                said = await peer.receive()
                if said.get("kind") == "profile":
                    self._profiles.note(index, said["profile"])
        finally:
            if self._joined.get(index) is joined:
                del self._joined[index]

    def _refusal(self, index: int, join: dict[str, Any]) -> str | None:
        """Why this member cannot join, or None; each reason says what to type next."""
        if index not in self._has_joined:
            return f"the sweep has no member {index}"
        if index in self._joined:
            return (
                f"prepare was called twice, or in two processes, of member {index} (process {join.get('pid')} is the "
                "second): call prepare once, in one process"
            )
        theirs = dict(join["versions"])
        if theirs.get("protocol") != wire.PROTOCOL:
            return (
                f"member {index} has slurm_jap {theirs.get('slurm_jap')}, jap-run has {wire.versions()['slurm_jap']}: "
                "install one version in both"
            )
        stages, blocks = self._sweep.stages, join.get("blocks")
        if blocks is not None and blocks < stages:
            return (
                f"#JAP --stages={stages}: the model of member {index} has {blocks} block{'s' * (blocks != 1)}; "
                f"type --jap-stages={max(1, blocks)}{' or fewer' * (blocks > 1)}"
            )
        first = self._first_join
        if first is not None:
            if join["executable"] != first["executable"]:
                return (
                    f"member {index} runs {join['executable']}, member {first['member']} runs {first['executable']}: "
                    "use one interpreter for all members"
                )
            for name, version in dict(first["versions"]).items():
                if theirs.get(name) != version:
                    return (
                        f"member {index} has {name} {theirs.get(name)}, member {first['member']} has {version}: "
                        "use one environment for all members"
                    )
        return self._expelled.get(index) or self._no_engine

    def _emptiest_group(self) -> int:
        """The group with the fewest members: whoever comes takes the place of one that has left."""
        held = collections.Counter(joined.group for joined in self._joined.values())
        return min(range(self._sweep.groups), key=lambda group: (held[group], group))

    def _tell_group(self, index: int) -> None:
        """Send the member its group if the engines are ready."""
        joined, engine = self._joined.get(index), self._engine
        if joined is None or joined.told or engine is None or not engine.ready:
            return
        group = joined.group
        joined.told = True
        joined.peer.send(
            {"kind": "group", "group": group, "stages": self._sweep.stages, "engines": engine.engines_of(group)}
        )

    # --- the engine set --------------------------------------------------------------------------------------

    def _start_engine(self, join: dict[str, Any]) -> EngineSet:
        self._say(f"starting the engine: {self._sweep.stages} stage(s) x {self._sweep.groups} group(s)")
        return EngineSet(
            self._sweep,
            self._launcher,
            join,
            self._environment,
            self._events,
            self._folder.engine_log,
            seconds=self._engine_seconds,
            on_ready=self._engine_ready,
            on_fault=self._engine_failed,
        )

    def _engine_ready(self) -> None:
        for index in list(self._joined):
            self._tell_group(index)

    def _engine_failed(self, engine: EngineSet) -> None:
        """Start another set for the members, without the one whose code ends engines; or give up, for one reason."""
        reason = str(engine.fault)
        self._say(f"engine: {reason}")
        self._deaths += 1
        self._judge(engine.death, reason)
        if not engine.was_ready or self.stopping:
            self._no_engine = reason
        elif self._deaths > MAX_DEATHS + 2 * len(self._expelled):
            self._no_engine = f"the engine ended {self._deaths} times; the last time: {reason}"
        if self._no_engine is not None:
            for joined in self._joined.values():
                joined.peer.send({"kind": "fault", "reason": self._no_engine})
            return
        for joined in self._joined.values():
            joined.told = False
            joined.peer.send({"kind": "restart", "reason": reason})
        self._restarting = asyncio.create_task(self._restart(engine))

    def _judge(self, death: Death | None, reason: str) -> None:
        """Expel a member whose code has ended an engine twice, or did not return."""
        if death is None or death.member is None:
            return
        index = death.member
        self._blame[index] += 1
        if not death.overdue and self._blame[index] < 2:
            return
        self._expelled[index] = f"code of member {index} ends the engine, its siblings go on without it: {reason}"
        self._say(f"member {index} expelled")
        joined = self._joined.pop(index, None)
        if joined is not None:
            joined.peer.send({"kind": "fault", "reason": self._expelled[index]})

    async def _restart(self, lost: EngineSet) -> None:
        await lost.stop()
        if not self.stopping and self._first_join is not None and self._joined:
            self._engine = self._start_engine(self._first_join)
        else:
            self._engine = None
