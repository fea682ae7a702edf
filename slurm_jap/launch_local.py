"""The local launcher: members and engine as child processes of this one, without Slurm.

A member is the user's own batch script with the SLURM_* variables that an array task would find; its output goes to the
files that the user's patterns name. Every child leads a session of its own, which is gone when the child has ended:
nothing stays behind, whatever ended the sweep. Torch-free.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from slurm_jap import launch, local_srun, store
from slurm_jap.carried import Carried
from slurm_jap.coordinator import END_SECONDS, ENGINE_SECONDS, Coordinator
from slurm_jap.errors import PREFIX, UsageError
from slurm_jap.launch import ENGINE_MODULE, Ended, EngineRequest, Job, Node, Place
from slurm_jap.store import SweepDir
from slurm_jap.sweep import Member, MemberState, Sweep, exit_code_of, state_of

LAUNCHER = "local"
FILE_COLUMNS = 160
"""Width of a table that goes to a file or a pipe: paths stay whole."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Child:
    """A child process that leads a session of its own."""

    def __init__(self, process: asyncio.subprocess.Process, seconds: float | None, grace: float) -> None:
        self._process, self.pid = process, process.pid
        self._seconds, self._grace = seconds, grace
        self._over = False

    async def wait(self) -> Ended:
        timed_out = False
        waiting = asyncio.create_task(self._process.wait())
        await asyncio.wait([waiting], timeout=self._seconds)
        if not waiting.done():
            timed_out = True
            self.signal(signal.SIGTERM)
            await asyncio.wait([waiting], timeout=self._grace)
            self.signal(signal.SIGKILL)
        code = exit_code_of(await waiting)
        self.signal(signal.SIGKILL)  # what the script left running in its session
        self._over = True  # its number may soon be somebody else's
        if timed_out:
            return Ended(code=code, state=MemberState.TIMEOUT, reason="reached its time limit")
        return Ended(code=code, state=state_of(code))

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def signal(self, signum: int) -> None:
        if self._over:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signum)


class LocalLauncher:
    """See the module's text."""

    def __init__(
        self, facts: Carried, job: Job, script: Path, arguments: Sequence[str], log: Path, grace: float = END_SECONDS
    ) -> None:
        """``log`` takes the engine's own output; a member beyond its time limit is killed ``grace`` seconds later."""
        self.nodes: Sequence[Node] = [this_node()]
        self.places: dict[int, Place] = {}
        self._facts, self._job, self._script, self._arguments = facts, job, script, tuple(arguments)
        self._log, self._grace = log, grace
        self._own = launch.own_environment(os.environ)
        self._members: set[_Child] = set()

    def node_of(self, member: Member) -> str:
        """There is one node."""
        return self.nodes[0].name

    async def start_member(self, member: Member, environment: Mapping[str, str]) -> _Child:
        """Start the member's script."""
        append = self._facts.open_mode == "append"
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if append else os.O_TRUNC)
        with contextlib.ExitStack() as files:

            def opened(path: str, flags: int) -> int:
                fd = os.open(path, flags, 0o666)
                files.callback(os.close, fd)
                return fd

            stdin = opened(self.places[member.index].input, os.O_RDONLY | os.O_CLOEXEC)
            stdout = opened(member.output, flags)
            stderr = stdout if member.error in (None, member.output) else opened(str(member.error), flags)
            process = await asyncio.create_subprocess_exec(
                str(self._script), *self._arguments, stdin=stdin, stdout=stdout, stderr=stderr,
                env=self._member_environment(environment), cwd=self._job.work_dir, start_new_session=True,
            )  # fmt: skip
        minutes = self._facts.member_time_min
        child = _Child(process, None if minutes is None else 60.0 * minutes, self._grace)
        self._members.add(child)
        return child

    async def start_engine(self, request: EngineRequest, environment: Mapping[str, str]) -> _Child:
        """Start the one engine agent."""
        with self._log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                request.executable, "-m", ENGINE_MODULE, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                env=launch.engine_environment(
                    self._own, request, {**environment, "JAP_NODE": self.nodes[0].name}, self._facts
                ),
                cwd=request.cwd, start_new_session=True,
            )  # fmt: skip
        return _Child(process, None, self._grace)

    async def forward(self, signum: int) -> None:
        """Pass a signal on to every member's processes, as Slurm does when a job is cancelled."""
        for child in self._members:
            child.signal(signum)

    def _member_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        job, node = self._job, self.nodes[0]
        outer = {k: v for k, v in self._own.items() if not k.startswith(("SLURM", "SBATCH", "SRUN"))}
        cpus = str(self._facts.member_cpus or node.cpus)
        slurm = {
            "ENVIRONMENT": "BATCH",
            "PATH": f"{self._srun_folder()}{os.pathsep}{outer.get('PATH', os.defpath)}",
            "SLURMD_NODENAME": node.name,
            "SLURM_CPUS_ON_NODE": cpus,
            "SLURM_JOBID": str(job.job_id),
            "SLURM_JOB_CPUS_PER_NODE": cpus,
            "SLURM_JOB_ID": str(job.job_id),
            "SLURM_JOB_NAME": job.name,
            "SLURM_JOB_NODELIST": node.name,
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_UID": str(os.getuid()),
            "SLURM_JOB_USER": job.user,
            "SLURM_LOCALID": "0",
            "SLURM_NNODES": "1",
            "SLURM_NODEID": "0",
            "SLURM_NODELIST": node.name,
            "SLURM_PROCID": "0",
            "SLURM_SUBMIT_DIR": str(job.work_dir),
            "SLURM_SUBMIT_HOST": node.name,
            "SLURM_TASKS_PER_NODE": "1",
        }
        if self._facts.member_cpus is not None:
            slurm["SLURM_CPUS_PER_TASK"] = cpus
        return outer | slurm | dict(environment) | {"CUDA_VISIBLE_DEVICES": ""}

    def _srun_folder(self) -> Path:
        """A folder with the srun of local members: a real one would look for a job of this number in a cluster."""
        folder = self._log.parent / "bin"
        if not folder.exists():
            folder.mkdir(mode=0o700)
            program = folder / "srun"
            command = [sys.executable, "-I", "-S", local_srun.__file__]
            program.write_text(f'#!/bin/sh\nexec {" ".join(map(shlex.quote, command))} "$@"\n')
            program.chmod(0o700)
        return folder


def this_node() -> Node:
    """The machine we are on."""
    return Node(name=socket.gethostname().partition(".")[0] or "localhost", cpus=len(os.sched_getaffinity(0)))


def run(
    facts: Carried,
    user_script: bytes,
    arguments: Sequence[str],
    *,
    work_dir: Path,
    job_name: str,
    progress: bool,
    engine_seconds: float = ENGINE_SECONDS,
    end_seconds: float = END_SECONDS,
    starting_at_once: int | None = None,
    say: Callable[[str], None] | None = None,
) -> int:
    """Run a sweep on this machine and return its exit code, the highest member code; 128+n after signal n.

    Blocks. Call it from the main thread: it handles SIGINT, SIGTERM and SIGHUP meanwhile.

    Args:
        facts, user_script, arguments: as ``carried`` describes them.
        work_dir: where members run and relative file names begin.
        progress: draw a live table on standard output (if it is a terminal; else a table whenever a state changed).
        engine_seconds: the engine must be ready this long after the first member joined.
        end_seconds: after a signal, what still runs is killed.
        starting_at_once: members that may be starting at a time; default: the CPUs, at least two.
        say: prints one line; default: to standard error, after ``jap: ``.

    Raises:
        UsageError: the sweep cannot be started; nothing has been.
    """
    if not user_script.startswith(b"#!"):
        raise UsageError("the batch script does not begin with #!: add #!/bin/bash as its first line")
    work_dir = work_dir.absolute()
    root = launch.sweep_root(facts.output, work_dir)
    try:
        job_id = claim_job_id(root)
    except OSError as error:
        raise UsageError(f"cannot make the sweep directory: {error}; choose another folder with -o") from None
    try:
        folder = SweepDir.create(SweepDir.attempt_path(root, job_id, 0))
        script = folder.write_script(user_script)
        job = Job(job_id=job_id, name=job_name, user=launch.user_name(), work_dir=work_dir)
        launcher = LocalLauncher(facts, job, script, arguments, folder.engine_log, end_seconds)
        sweep, launcher.places, arrays = launch.lay_out(facts, arguments, job, launcher.nodes, LAUNCHER, script)
        check_output_folders(sweep)
        folder.write_manifest(sweep)
    except (OSError, UsageError) as error:
        shutil.rmtree(root / store.JAP_DIR / str(job_id), ignore_errors=True)
        with contextlib.suppress(OSError):  # it holds other sweeps
            (root / store.JAP_DIR).rmdir()
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"cannot write the sweep directory: {error}; choose another folder with -o") from None
    store.write_pointer(root, job_id)
    say = say or _say
    say(f"local sweep {job_id}: {len(sweep.members)} member(s), sweep directory {folder.path}")
    received: list[int] = []
    forwarding: set[asyncio.Task[None]] = set()

    async def main() -> int:
        coordinator = Coordinator(
            sweep, folder, launcher, arrays=arrays, say=say, engine_seconds=engine_seconds, end_seconds=end_seconds,
            starting_at_once=starting_at_once,
        )  # fmt: skip
        loop = asyncio.get_running_loop()

        def end(signum: signal.Signals) -> None:
            received.append(signum)
            coordinator.stop(f"received {signum.name}")
            forwarding.add(loop.create_task(launcher.forward(signum if len(received) == 1 else signal.SIGKILL)))

        for signum in _ENDING:
            loop.add_signal_handler(signum, end, signum)
        return await coordinator.run()

    with _live_table(folder) if progress else contextlib.nullcontext():
        code = asyncio.run(main())
    return 128 + received[0] if received else code


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads on
        print(f"{PREFIX} {line}", file=sys.stderr, flush=True)


def claim_job_id(root: Path) -> int:
    """Take the next free job number under ``root``; two launchers never get the same.

    Raises:
        OSError: the folder cannot be made.
    """
    base = root / store.JAP_DIR
    base.mkdir(mode=0o700, exist_ok=True)
    number = max((int(p.name) for p in base.iterdir() if p.name.isdecimal()), default=0)
    while True:
        number += 1
        try:
            (base / str(number)).mkdir(mode=0o700)
        except FileExistsError:
            continue
        return number


def check_output_folders(sweep: Sweep) -> None:
    """Refuse a sweep whose output files cannot be made.

    Raises:
        UsageError: a folder does not exist or cannot be written.
    """
    folders = {os.path.dirname(path) for m in sweep.members for path in (m.output, m.error or m.output)}
    for folder in sorted(folders):
        if not os.path.isdir(folder):
            raise UsageError(f"output folder {folder} does not exist: mkdir -p it, or change -o or -e")
        if folder != "/dev" and not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"output folder {folder} cannot be written: choose another with -o or -e")


@contextlib.contextmanager
def _live_table(folder: SweepDir) -> Iterator[None]:
    """Draw the members' table from the sweep directory, in a thread of its own, until the block ends."""
    over = threading.Event()
    thread = threading.Thread(target=_draw, args=(folder, over), name="jap-table", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=5)


def _draw(folder: SweepDir, over: threading.Event) -> None:
    from rich.console import Console
    from rich.live import Live

    from slurm_jap.status_table import render
    from slurm_jap.status_view import SweepReader

    reader, console = SweepReader(folder), Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=FILE_COLUMNS)
    if not console.is_terminal:
        over.wait()
        view = reader.look()
        console.print(render(view, view.members))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            last = over.wait(0.5)
            view = reader.look()
            live.update(render(view, view.members), refresh=True)
            if last:
                return
