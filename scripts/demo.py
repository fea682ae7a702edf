"""The product in a minute, on any machine: examples/digits' eight members trained together, then one after another.

Runs ``jap-submit --jap-local sweep.sh`` (no Slurm needed) and shows its members as they train; runs them again one
after another (``%1``), each alone in the same engine with as many processes; then compares wall times, logs and trained
parameters. Ends with code 0 only if every member completed and both ways gave the same bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from slurm_jap import array_spec, status, status_table, store
from slurm_jap.errors import USAGE_EXIT_CODE, UsageError
from slurm_jap.status_view import MemberView, SweepReader, SweepView
from slurm_jap.sweep import MemberState

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "digits"
STAGES = 2
LIMIT_SECONDS = 1200.0
"""For one array; on a machine where it takes longer something is wrong."""
LOOK_SECONDS = 0.5


class DemoError(Exception):
    """A run that did not come to its end; one line."""


@dataclasses.dataclass(slots=True)
class Run:
    """One array, run to its end."""

    wall: float
    """Seconds from typing the command to its end."""
    training: float
    """Seconds during which at least one member was in the engine; NaN if none was."""
    view: SweepView
    folder: Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--array", default="0-7", help="members to train (default: all eight)")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--dir", type=Path, help="where to work; default: a new folder for temporary files")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    folder = arguments.dir or Path(tempfile.mkdtemp(prefix="jap-demo-"))
    try:
        return demo(console, folder.absolute(), arguments.array, arguments.epochs)
    except (DemoError, UsageError) as error:
        console.print(Text(f"demo: {error}"), soft_wrap=True)
        return USAGE_EXIT_CODE if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130
    finally:
        console.print(Text(f"Logs, models and sweep directories: {folder}"), soft_wrap=True)


def demo(console: Console, folder: Path, array: str, epochs: int) -> int:
    indices = array_spec.parse(array, max_size=1001).indices
    listed, cores = ",".join(map(str, indices)), len(os.sched_getaffinity(0))
    console.print(f"Training {len(indices)} members of examples/digits together, in {STAGES} stages:")
    together = run_array(console, folder / "together", listed, epochs)
    console.print("The same members in the same way, but one after another (%1), each alone in the engine:")
    alone = run_array(console, folder / "one-after-another", f"{listed}%1", epochs)

    pairs = list(zip(together.view.members, alone.view.members, strict=True))
    same_logs = [m.member.index for m, other in pairs if same_log(m, other)]
    same_models = [i for i in indices if same_parameters(together, alone, i)]
    console.print(member_table(together.view.members, final=True))
    console.print(times(together, alone))
    console.print(
        Text(
            f"Both ways: one array, {STAGES} engine processes, one process per member at work, on {cores} CPU cores. "
            "In training: the time during which at least one member was in the engine; together, later members "
            "start up on the same cores meanwhile."
        )
    )
    console.print(
        f"Equal bit for bit, together and alone: every loss and accuracy that the scripts printed for "
        f"{len(same_logs)} of {len(indices)} members, all trained parameters for {len(same_models)} of {len(indices)}."
    )
    completed = all(m.state is MemberState.COMPLETED for run in (together, alone) for m in run.view.members)
    if not completed:
        console.print("demo: not every member completed")
    return 0 if completed and len(same_logs) == len(same_models) == len(indices) else 1


def run_array(console: Console, folder: Path, array: str, epochs: int) -> Run:
    """Submit a copy of the example in a folder of its own and show its members until it has ended.

    Raises:
        DemoError: it left no sweep directory, or did not end in time.
        UsageError: the folder exists.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", ".jap", "*.out", "*.pt"))
    except FileExistsError:
        raise UsageError(f"{folder} exists: remove it, or pass another --dir") from None
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    words = ["--jap-local", f"--array={array}", "sweep.sh", "--epochs", str(epochs)]
    console.print(Text(f"    jap-submit {' '.join(words)}"))
    began = time.monotonic()
    with (folder / "jap-submit.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "slurm_jap.submit", *words],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            reader = watch(console, process, folder, began)
        finally:
            if process.poll() is None:
                end(process)
    wall = time.monotonic() - began
    console.print(f"    done in {wall:.0f} s")
    said = (folder / "jap-submit.log").read_text(errors="replace").strip()
    if reader is None:
        raise DemoError(f"jap-submit ended with code {process.returncode}: {said or 'it said nothing'}")
    view = reader.look()
    if any(m.state is not MemberState.COMPLETED for m in view.members):
        console.print(status_table.render(view, view.members))
        console.print(Text(said))
    return Run(wall=wall, training=training_seconds(reader), view=view, folder=folder)


def watch(console: Console, process: subprocess.Popen[bytes], folder: Path, began: float) -> SweepReader | None:
    """Redraw the members' table until the process has ended; None if it left no sweep directory."""
    reader: SweepReader | None = None
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            running = process.poll() is None
            if reader is None:
                try:
                    reader = status.open_sweep(*status.find_sweep(None, folder))
                except UsageError:
                    reader = None
            elapsed = time.monotonic() - began
            if reader is not None:
                live.update(Group(member_table(reader.look().members), f"{elapsed:.0f} s"), refresh=True)
            if not running:
                return reader
            if elapsed > LIMIT_SECONDS:
                raise DemoError(f"the array did not end within {LIMIT_SECONDS:.0f} s; see {folder}")
            time.sleep(LOOK_SECONDS)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask the launcher to end its members and engine; insist after a while."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def training_seconds(reader: SweepReader) -> float:
    """Length of the union of the members' stays in the engine."""
    stays = []
    for member in reader.look().members:
        events = list(reader.directory.events(store.member_writer(member.member.index)))
        begun = [event["time"] for event in events if event["kind"] == "joined"]
        ended = [event["time"] for event in events if event["kind"] == "left"]
        if begun and ended:
            stays.append((begun[0], ended[-1]))
    total, until = 0.0, float("-inf")
    for begin, end_ in sorted(stays):
        total += max(0.0, end_ - max(begin, until))
        until = max(until, end_)
    return total if stays else float("nan")


def hyper_parameters(argv: tuple[str, ...]) -> dict[str, str]:
    """``--name value`` pairs of a command line."""
    return {name[2:]: value for name, value in itertools.pairwise(argv) if name.startswith("--")}


def member_table(members: list[MemberView], final: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = ["member", "lr", "dropout"]
    names += (
        ["final loss", "accuracy", "state", "exit code"] if final else ["state", "step", "loss", "steps/s", "accuracy"]
    )
    for name in names:
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    for m in members:
        options = hyper_parameters(m.argv)
        chosen = [str(m.member.index), options.get("lr", "-"), options.get("dropout", "-")]
        word = Text(m.state.value, style=status_table.COLOURS.get(m.state, "red"))
        accuracy = decimals(m.reported.get("accuracy"), 4)
        rest: list[str | Text]
        if final:
            rest = [decimals(m.reported.get("loss"), 6), accuracy, word, str(m.exit_code)]
        else:
            step = "-" if m.step is None else str(m.step)
            rest = [word, step, decimals(m.loss, 4), decimals(m.rate, 1), accuracy]
        table.add_row(*chosen, *rest)
    return table


def times(together: Run, alone: Run) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("wall time")
    for name in ("together", "one after another", "ratio"):
        table.add_column(name, justify="right")
    for name, fast, slow in (
        ("whole, start-up of all processes included", together.wall, alone.wall),
        ("in training", together.training, alone.training),
    ):
        table.add_row(name, f"{fast:.1f} s", f"{slow:.1f} s", f"{slow / fast:.2f}")
    return table


def same_log(member: MemberView, alone: MemberView) -> bool:
    """Whether the member's whole output file equals that of the run alone; losses are printed with all their bits."""
    own, other = Path(member.member.output), Path(alone.member.output)
    return own.is_file() and other.is_file() and own.stat().st_size > 0 and own.read_bytes() == other.read_bytes()


def same_parameters(together: Run, alone: Run, index: int) -> bool:
    files = [run.folder / f"digits_{index}.pt" for run in (together, alone)]
    if not all(file.is_file() for file in files):
        return False
    first, second = (torch.load(file, weights_only=True) for file in files)
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


def decimals(value: Any, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else "-"


if __name__ == "__main__":
    sys.exit(main())
