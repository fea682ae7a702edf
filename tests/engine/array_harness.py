"""Run a few member functions as one sweep, quickly: the real coordinator, control server, agent, engines and clients.

Only the launcher differs from the product's: processes are forked from a server that has torch loaded, instead of
started from a batch script. ``together`` trains members in one engine set, ``alone`` runs one in a process of its own
without any. A member is a function without arguments; what it returns comes back (tensors and plain values).
"""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from slurm_jap.coordinator import Coordinator
from slurm_jap.launch import Ended, EngineRequest, Node
from slurm_jap.store import SweepDir
from slurm_jap.sweep import Member, Sweep, exit_code_of, state_of

MemberFunction = Callable[[], Any]
SECONDS = 120.0
"""A sweep that takes longer has hung: everything is killed and the test fails."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch._dynamo", "slurm_jap.client", "slurm_jap.remote", "slurm_jap.engine", "cloudpickle"]
)


def _enter(environment: Mapping[str, str], log: str) -> None:
    for name in list(os.environ):
        if name.startswith(("JAP_", "SLURM")):
            del os.environ[name]
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    torch.set_num_threads(1)


def _member(environment: dict[str, str], log: str, function: bytes, answer: str) -> None:
    _enter(environment, log)
    try:
        torch.save(cloudpickle.loads(function)(), answer)
    except SystemExit:
        raise
    except BaseException as error:
        traceback.print_exc()
        Path(answer + ".error").write_text(f"{type(error).__name__}: {error}")
        sys.exit(1)


def _engine(environment: dict[str, str], log: str) -> None:
    from slurm_jap import engine

    _enter(environment, log)
    sys.exit(engine.main())


class _Forked:
    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self._process = _context.Process(target=target, args=args)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    async def wait(self) -> Ended:
        while self._process.exitcode is None:  # a thread for each would exhaust the loop's few
            await asyncio.sleep(0.02)
        code = exit_code_of(self._process.exitcode or 0)
        return Ended(code=code, state=state_of(code))

    async def kill(self) -> None:
        self._process.kill()


class _Agents:
    """The engine set: one agent per node."""

    def __init__(self, agents: list[_Forked]) -> None:
        self._agents, self.pid = agents, agents[0].pid

    async def wait(self) -> Ended:
        ended = await asyncio.gather(*(agent.wait() for agent in self._agents))
        return max(ended, key=lambda e: e.code)

    async def kill(self) -> None:
        for agent in self._agents:
            await agent.kill()


class _ForkLauncher:
    """Implements ``slurm_jap.launch.Launcher``."""

    def __init__(
        self, functions: Mapping[int, MemberFunction], folder: Path, engine_variables: Mapping[str, str], nodes: int
    ) -> None:
        self.nodes = [Node(name=f"node{n}", cpus=2) for n in range(nodes)]
        self._functions, self._folder, self._engine_variables = functions, folder, engine_variables
        self.members: dict[int, _Forked] = {}
        self.agents: list[_Forked] = []

    def node_of(self, member: Member) -> str:
        return self.nodes[member.index % len(self.nodes)].name

    async def start_member(self, member: Member, environment: Mapping[str, str]) -> _Forked:
        function = cloudpickle.dumps(self._functions[member.index])
        variables = {**environment, "SLURM_JOB_ID": "1"}
        answer = str(self._folder / f"answer_{member.index}")
        forked = self.members[member.index] = _Forked(_member, variables, member.output, function, answer)
        return forked

    async def start_engine(self, request: EngineRequest, environment: Mapping[str, str]) -> _Agents:
        log = str(self._folder / "engine.log")
        self.agents = [
            _Forked(_engine, {**environment, "JAP_NODE": node.name, **self._engine_variables}, log)
            for node in self.nodes
        ]
        return _Agents(self.agents)

    async def forward(self, signum: int) -> None:
        for forked in self.members.values():
            os.kill(forked.pid, signum)


@dataclasses.dataclass
class Outcome:
    """What came of a sweep."""

    code: int
    codes: dict[int, int]
    answers: dict[int, Any]
    errors: dict[int, str]
    """``Type: message`` of what ended a member."""
    logs: dict[int, str]
    engine_log: str
    said: list[str]
    events: list[dict[str, Any]]


def together(
    functions: Mapping[int, MemberFunction],
    *,
    stages: int,
    groups: int = 1,
    throttle: int | None = None,
    nodes: int = 1,
    engine_variables: Mapping[str, str] | None = None,
    during: Callable[[_ForkLauncher, SweepDir], Any] | None = None,
    seconds: float = SECONDS,
    script: bytes = b"",
) -> Outcome:
    """Train the members in one sweep.

    Args:
        nodes: with more than one, engines and members are spread over them, and talk TCP between them.
        during: called in a thread while the sweep runs; may look at ``launcher.members`` and ``launcher.agents``.
        script: the batch script under which profiles are kept; none: they are not.
    """
    with tempfile.TemporaryDirectory(prefix="jap-test-") as name:
        folder = Path(name)
        members = tuple(Member(index=i, output=str(folder / f"out_{i}")) for i in sorted(functions))
        sweep_dir = SweepDir.create(folder / "sweep")
        sweep = Sweep(
            job_id=1, attempt=0, job_name="test", launcher="fork", array="test", throttle=throttle, members=members,
            script=str(sweep_dir.write_script(script)) if script else "", arguments=(), work_dir=name,
            stages=stages, groups=groups,
        )  # fmt: skip
        sweep_dir.write_manifest(sweep)
        launcher = _ForkLauncher(functions, folder, engine_variables or {}, nodes)
        said: list[str] = []

        async def run() -> int:
            coordinator = Coordinator(
                sweep, sweep_dir, launcher, arrays={i: {} for i in functions}, say=said.append,
                engine_seconds=60.0, end_seconds=5.0, starting_at_once=len(functions),
                tcp_hosts=["127.0.0.1"] if nodes > 1 else [],
            )  # fmt: skip
            side = asyncio.create_task(asyncio.to_thread(during, launcher, sweep_dir)) if during else None
            try:
                code = await asyncio.wait_for(coordinator.run(), seconds)
            except (TimeoutError, asyncio.TimeoutError):
                log = (folder / "engine.log").read_text() if (folder / "engine.log").exists() else ""
                raise AssertionError(f"the sweep hung for {seconds:g} s; engine said:\n{log[-3000:]}") from None
            finally:
                for forked in [*launcher.members.values(), *launcher.agents]:
                    await forked.kill()
            if side is not None:
                await side
            return code

        code = asyncio.run(run())
        events = list(sweep_dir.events("run"))
        text = {i: _text(folder / f"out_{i}") for i in functions}
        return Outcome(
            code=code,
            codes={e["member"]: e["code"] for e in events if e["kind"] == "member_ended"},
            answers={i: torch.load(folder / f"answer_{i}") for i in functions if (folder / f"answer_{i}").exists()},
            errors={
                i: _text(folder / f"answer_{i}.error") for i in functions if (folder / f"answer_{i}.error").exists()
            },
            logs=text,
            engine_log=_text(folder / "engine.log"),
            said=said,
            events=events,
        )


def alone(function: MemberFunction, *, threads: int = 1) -> Any:
    """Run one member function by itself: ``prepare`` trains in its own process.

    Raises:
        AssertionError: it failed; the message is its output.
    """
    with tempfile.TemporaryDirectory(prefix="jap-test-") as name:
        answer = Path(name) / "answer"
        forked = _Forked(_member, {}, str(Path(name) / "out"), cloudpickle.dumps(function), str(answer))
        forked._process.join(SECONDS)
        if forked._process.exitcode != 0:
            forked._process.kill()
            raise AssertionError(f"alone: exit code {forked._process.exitcode}\n{_text(Path(name) / 'out')}")
        return torch.load(answer)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def same_bits(left: Any, right: Any, path: str = "") -> None:
    """Assert that two answers are equal, tensors by ``torch.equal`` (NaN equals NaN)."""
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor), path
        assert left.shape == right.shape, f"{path}: {left.shape} and {right.shape}"
        assert left.dtype == right.dtype, f"{path}: {left.dtype} and {right.dtype}"
        assert left.layout == right.layout, f"{path}: {left.layout} and {right.layout}"
        if left.layout is not torch.strided:
            left, right = left.to_dense(), right.to_dense()
        equal = torch.equal(left.nan_to_num(), right.nan_to_num()) and torch.equal(left.isnan(), right.isnan())
        assert equal, f"{path}: differs by up to {(left.double() - right.double()).abs().max():.3g}"
    elif isinstance(left, dict):
        assert list(left) == list(right), path
        for key in left:
            same_bits(left[key], right[key], f"{path}[{key!r}]")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), path
        for number, (a, b) in enumerate(zip(left, right, strict=True)):
            same_bits(a, b, f"{path}[{number}]")
    else:
        assert left == right or (left != left and right != right), f"{path}: {left!r} and {right!r}"
