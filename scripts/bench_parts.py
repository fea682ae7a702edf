"""The other parts of the engine's benchmark; each returns ``{"title", "rows", "note"}``."""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_engine
import torch
from bench_baseline import Pipeline, Work
from bench_members import Meet, Session
from bench_models import ROWS, WIDTH, ChattyBlock, SleepBlock
from torch import nn

from slurm_jap.problem import uniform
from slurm_jap.simulate import Layout, run_rule
from slurm_jap.stream import plain_rule


def cpu_seconds(pid: int, *, main_thread: bool = True) -> float:
    """CPU time of a process or of its main thread, from the scheduler's own account (nanoseconds)."""
    tasks = [pid] if main_thread else [int(p.name) for p in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()[0]) for tid in tasks) * 1e-9


def bare_seconds(make: Callable[[], nn.Module], microbatches: int, iterations: int) -> float:
    """CPU seconds of one iteration of a block's forwards, backwards and step in a plain loop without any engine."""
    torch.manual_seed(0)
    block = make()
    optimizer = torch.optim.SGD(block.parameters(), lr=1e-3)
    x = torch.randn(ROWS, WIDTH)
    begin = 0.0
    for number in range(iterations + 3):
        if number == 3:
            begin = time.thread_time()
        for _ in range(microbatches):
            inputs = x.detach().requires_grad_()
            output = block(inputs)
            output.backward(torch.ones_like(output))
        optimizer.step()
        optimizer.zero_grad()
    return (time.thread_time() - begin) / iterations


def costs() -> dict[str, Any]:
    """Main-thread CPU per action."""
    rows = []
    kinds: list[tuple[str, Callable[[], nn.Module], bool]] = [
        ("one linear layer", functools.partial(SleepBlock, 0.0, 0.0), False),
        ("one linear layer, sleeping 2 + 4 ms", functools.partial(SleepBlock, 0.002, 0.004), True),
        ("200 tiny operations", functools.partial(ChattyBlock, 100), False),
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for stages in (1, 2):
        with Session(stages, 2) as session:
            for name, make, sleeps in kinds:
                members, microbatches, iterations = 2, 4, 60
                join = functools.partial(bench_engine.join, blocks=[make] * stages, microbatches=microbatches, warm=5)
                session.call({k: join for k in range(members)})
                samples = []
                for _ in range(5):
                    before = [(cpu_seconds(p), cpu_seconds(p, main_thread=False)) for p in session.engines]
                    answers = session.call(
                        {
                            k: functools.partial(bench_engine.train, iterations=iterations, barrier=False)
                            for k in range(members)
                        }
                    )
                    after = [(cpu_seconds(p), cpu_seconds(p, main_thread=False)) for p in session.engines]
                    actions = members * iterations * (2 * microbatches + 1)
                    samples.append(
                        (
                            max(b[0] - a[0] for a, b in zip(before, after, strict=True)) / actions,
                            max(b[1] - a[1] for a, b in zip(before, after, strict=True)) / actions,
                            bench_engine.span(answers) / actions,
                        )
                    )
                bare = 0.0
                if not sleeps:
                    bare = statistics.median(bare_seconds(make, microbatches, iterations) for _ in range(5))
                    bare /= 2 * microbatches + 1
                main, whole, wall = (statistics.median(values) for values in zip(*samples, strict=True))
                rows.append(
                    {
                        "stages": stages,
                        "stage": name,
                        "main_thread_us": main * 1e6,
                        "of_it_the_stage_itself_us": None if sleeps else bare * 1e6,
                        "overhead_us": None if sleeps else (main - bare) * 1e6,
                        "all_threads_us": whole * 1e6,
                        "wall_us": wall * 1e6,
                    }
                )
    torch.set_num_threads(threads)
    return {
        "title": f"CPU per action (forward, backward or step; activations of {ROWS * WIDTH * 4} bytes; K=2, M=4)",
        "rows": rows,
        "note": "the busiest engine's; the stage itself: the same block, loss and optimizer in a plain loop",
    }


# --- the same engines, the same memory -------------------------------------------------------------------------------


def memory() -> dict[str, Any]:
    """K members in one pipeline of K x S0 stages against K pipelines of S0 stages: the same bytes on every engine."""
    rows = []
    plain_stages, iterations = 2, bench_engine.ITERATIONS
    for members in (2, 4):
        for microbatches in (4, 8):
            deep = members * plain_stages
            block = functools.partial(
                SleepBlock, bench_engine.FORWARD / members, bench_engine.BACKWARD / members
            )
            walls: dict[str, list[float]] = {"plain": [], "deep": []}
            with Session(plain_stages, members, groups=members) as plain, Session(deep, members) as one:
                join = functools.partial(bench_engine.join, blocks=[block] * deep, microbatches=microbatches, warm=2)
                run = functools.partial(bench_engine.train, iterations=iterations, barrier=False)
                for session in (plain, one):
                    session.call({k: join for k in range(members)})
                for _ in range(bench_engine.ROUNDS):
                    for name, session in (("plain", plain), ("deep", one)):
                        walls[name].append(bench_engine.span(session.call({k: run for k in range(members)})))
            wall = {name: statistics.median(values) for name, values in walls.items()}
            ideal = {
                "plain": _ideal(1, plain_stages, microbatches, 1, iterations),
                "deep": _ideal(members, deep, microbatches, members, iterations),
            }
            rows.append(
                {
                    "engines": deep,
                    "members": members,
                    "microbatches": microbatches,
                    "separate_s": wall["plain"],
                    "one_pipeline_s": wall["deep"],
                    "gain": wall["plain"] / wall["deep"],
                    "simulated_gain": ideal["plain"] / ideal["deep"],
                    "wall_over_simulated": wall["deep"] / ideal["deep"],
                }
            )
    return {
        "title": f"Equal memory: K pipelines of {plain_stages} stages against one of K x {plain_stages}, "
        f"{iterations} iterations",
        "rows": rows,
        "note": "",
    }


def _ideal(members: int, stages: int, microbatches: int, shares: int, iterations: int) -> float:
    problem = uniform(
        stages=stages, members=members, microbatches=microbatches,
        forward=bench_engine.FORWARD / shares, backward=bench_engine.BACKWARD / shares, memory=2.0,
    )  # fmt: skip
    layout = Layout(problem)
    return run_rule(layout, plain_rule(layout), iterations).end * layout.tick


# --- one step, seen by its member ------------------------------------------------------------------------------------


class Reduce(nn.Module):
    """Takes many bytes and does little with them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[:, :16])


def _batch_of(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    columns = 1024
    rows = max(1, size // (4 * columns))
    return torch.zeros(rows, columns), torch.zeros(rows, 1)


def round_trips(kept: dict[str, Any], meet: Meet, *, size: int, count: int) -> list[float]:
    """A member's job: seconds from ``step`` to the loss, ``count`` times, one after another."""
    import slurm_jap as jap

    bench_engine.leave(kept, meet)
    torch.manual_seed(0)
    model = nn.Sequential(Reduce())
    trainer = kept["trainer"] = jap.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), nn.functional.mse_loss, microbatches=1
    )
    x, y = _batch_of(size)
    taken = []
    for number in range(count + 10):
        begin = time.perf_counter()
        trainer.step(x, target=y).loss  # noqa: B018
        if number >= 10:
            taken.append(time.perf_counter() - begin)
        trainer.state_dict()  # the step's end is not part of the next round trip
    bench_engine.leave(kept, meet)
    return taken


def copy_seconds(size: int) -> float:
    """One copy of a batch into fresh memory."""
    x = torch.zeros(size, dtype=torch.uint8)
    taken = []
    for _ in range(20):
        begin = time.perf_counter()
        x.clone()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def trips() -> dict[str, Any]:
    """Round trips of small and large batches, beside the same step in-process."""
    rows = []
    with Session(1, 1) as session:
        for size in (4 << 10, 16 << 10, 1 << 20, 8 << 20):
            count = 200
            far = sorted(session.call({0: functools.partial(round_trips, size=size, count=count)})[0])
            near = statistics.median(round_trips({}, lambda: None, size=size, count=count))
            rows.append(
                {
                    "batch_bytes": size,
                    "median_ms": 1e3 * statistics.median(far),
                    "p99_ms": 1e3 * far[int(0.99 * count)],
                    "in_process_ms": 1e3 * near,
                    "one_copy_ms": 1e3 * copy_seconds(size),
                    "trip_less_in_process_ms": 1e3 * (statistics.median(far) - near),
                }
            )
    return {"title": "Step round trip: from step() to its loss, in a member process; S=1", "rows": rows, "note": ""}


# --- 64 members ------------------------------------------------------------------------------------------------------


class Marking(nn.Module):
    """Sleeps, and notes in the engine's process when each of its actions began and ended."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 1)
        self.seconds = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return self.linear(x[:, :16])
        marks = sys.__dict__.setdefault("_jap_bench_marks", [])
        begin = time.perf_counter()
        output = self.linear(x[:, :16])
        time.sleep(self.seconds[0])
        output.register_hook(self.back)
        marks.append((begin, time.perf_counter()))
        return output

    def back(self, grad: torch.Tensor) -> None:
        begin = time.perf_counter()
        time.sleep(self.seconds[1])
        sys.__dict__["_jap_bench_marks"].append((begin, time.perf_counter()))


def gaps(output: torch.Tensor, target: torch.Tensor) -> dict[str, tuple[float, float]]:
    """A metric that runs in the engine: seconds between an action's end and the next one's begin."""
    marks = sorted(sys.__dict__.get("_jap_bench_marks", []))
    between = sorted(b[0] - a[1] for a, b in itertools.pairwise(marks[len(marks) // 10 : -(len(marks) // 10)]))
    picks = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "worst": 1.0}
    return {name: (between[min(len(between) - 1, int(p * len(between)))], 1.0) for name, p in picks.items()}


def crowd_member(
    kept: dict[str, Any], meet: Meet, *, size: int, steps: int, first: bool
) -> tuple[float, dict[str, float]]:
    """A member's job: join, meet, train; when it had joined, and in the first member the gaps."""
    import slurm_jap as jap

    model = nn.Sequential(Marking(0.002, 0.004))
    trainer = jap.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), nn.functional.mse_loss, microbatches=1
    )
    x, y = _batch_of(size)
    trainer.step(x, target=y).loss  # noqa: B018
    joined = time.monotonic()
    meet()
    for _ in range(steps):
        trainer.step(x, target=y)
    trainer.state_dict()
    meet()
    found = trainer.evaluate([(x[:1], y[:1])], gaps) if first else {}
    meet()
    trainer.close()
    return joined, found


def crowd() -> dict[str, Any]:
    """What 64 members with large batches cost the engine's loop."""
    members, steps = 64, 8
    rows = []
    for size in (4 << 10, 8 << 20):
        begin = time.monotonic()
        # Without recovery the members keep no log of their batches.
        with Session(1, members, variables={"JAP_RECOVERY": "0"}) as session:
            jobs = {
                k: functools.partial(crowd_member, size=size, steps=steps, first=k == 0) for k in range(members)
            }
            answers = session.call(jobs)
            held = [pss(session.process(k)) for k in range(members)]
            engine = pss(session.engines[0])
        found = answers[0][1]
        rows.append(
            {
                "members": members,
                "batch_bytes": size,
                "gap_p50_ms": 1e3 * found["p50"],
                "gap_p99_ms": 1e3 * found["p99"],
                "gap_worst_ms": 1e3 * found["worst"],
                "all_joined_s": max(joined for joined, _ in answers.values()) - begin,
                "member_mib": statistics.median(held) / 2**20,
                "engine_mib": engine / 2**20,
            }
        )
    return {
        "title": "64 members, one engine, actions of 2 and 4 ms: from one action's end to the next one's begin",
        "rows": rows,
        "note": "members are forked from a process that has torch loaded, so that their start is not what is measured; "
        "memory is each process's proportional share",
    }


def pss(pid: int) -> int:
    """Bytes of a process, what it shares counted in proportion."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


# --- real computing --------------------------------------------------------------------------------------------------

CHARLM = Path(__file__).resolve().parent.parent / "examples" / "charlm"
CHARLM_SIZE = {"depth": 8, "width": 64, "heads": 4, "context": 64}
CHARLM_ROWS, CHARLM_MICROBATCHES = 16, 4


def _charlm_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def _charlm_batch() -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(128, (2, CHARLM_ROWS, CHARLM_SIZE["context"]), generator=torch.Generator().manual_seed(0))
    return codes[0], codes[1]


def _charlm_blocks() -> list[nn.Module]:
    if str(CHARLM) not in sys.path:
        sys.path.insert(0, str(CHARLM))
    import model

    network = model.CharTransformer(**CHARLM_SIZE)
    return [network.embed, *network.layers, network.head]


def _charlm_half(stage: int) -> nn.Module:
    blocks = _charlm_blocks()
    return nn.Sequential(*(blocks[: len(blocks) // 2] if stage == 0 else blocks[len(blocks) // 2 :]))


def charlm_join(kept: dict[str, Any], meet: Meet) -> None:
    """A member's job."""
    import slurm_jap as jap

    bench_engine.leave(kept, meet)
    torch.manual_seed(0)
    model = nn.Sequential(*_charlm_blocks())
    kept["trainer"] = jap.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), _charlm_loss, microbatches=CHARLM_MICROBATCHES
    )
    kept["batch"] = x, y = _charlm_batch()
    for _ in range(3):
        kept["trainer"].step(x, target=y)
    kept["trainer"].state_dict()


def charlm() -> dict[str, Any]:
    """Steps per second of the example's network on two stages, each on a core of its own."""
    cores = tuple(sorted(os.sched_getaffinity(0))[:2])
    rows = []
    iterations = 6
    with Session(2, 4) as session, tempfile.TemporaryDirectory(prefix="jap-bench-") as folder:
        base = Pipeline(2, folder, cores)
        work = Work(
            tuple(functools.partial(_charlm_half, stage) for stage in range(2)), _charlm_batch, CHARLM_MICROBATCHES,
            loss=_charlm_loss,
        )  # fmt: skip
        session.call({k: charlm_join for k in range(4)})
        for pid, core in zip(session.engines, cores, strict=False):
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {core})
        base.run(work, 3, warm=3)
        found: dict[str, list[float]] = {"1F1B": [], "one member": [], "four members": []}
        run = functools.partial(bench_engine.train, iterations=iterations, barrier=False)
        for _ in range(bench_engine.ROUNDS):
            found["1F1B"].append(iterations / base.run(work, iterations))
            found["one member"].append(iterations / bench_engine.span(session.call({0: run})))
            answers = session.call({k: run for k in range(4)})
            found["four members"].append(4 * iterations / bench_engine.span(answers))
        base.close()
    plain = statistics.median(found["1F1B"])
    for name, rates in found.items():
        rate = statistics.median(rates)
        rows.append({"way": name, "steps_per_second": rate, "over_1f1b": rate / plain, "lowest": min(rates)})
    return {
        "title": f"charlm {CHARLM_SIZE}, {CHARLM_ROWS} rows in {CHARLM_MICROBATCHES} micro-batches, 2 stages pinned to "
        "a core each",
        "rows": rows,
        "note": "the members' own processes share these cores; computing is not a controlled instrument on a shared "
        "machine",
    }


# --- a whole array, from typing the command to its end ---------------------------------------------------------------

_SCRIPT = """#!/bin/bash
#SBATCH --job-name=bench
#SBATCH --output=out_%a
#JAP --stages=2
export OMP_NUM_THREADS=1
exec {python} {script} {arguments}
"""


def finish() -> dict[str, Any]:
    """Four short trainings: the array through jap-submit --jap-local, and one after another under 1F1B."""
    members, iterations, microbatches = 4, 100, 2
    member = Path(__file__).resolve().parent / "bench_member.py"
    with tempfile.TemporaryDirectory(prefix="jap-bench-") as folder:
        script = Path(folder) / "sweep.sh"
        arguments = f"{iterations} {microbatches} {bench_engine.FORWARD} {bench_engine.BACKWARD}"
        script.write_text(_SCRIPT.format(python=sys.executable, script=member, arguments=arguments))
        begin = time.time()
        subprocess.run(
            [sys.executable, "-m", "slurm_jap.submit", "--jap-local", f"--array=0-{members - 1}", str(script)],
            cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=600,
        )  # fmt: skip
        together = time.time() - begin
        times = [
            tuple(map(float, (Path(folder) / f"out_{k}").read_text().splitlines()[-1].split())) for k in range(members)
        ]
    begun, ended = min(t[0] for t in times), max(t[1] for t in times)
    block = functools.partial(SleepBlock, bench_engine.FORWARD, bench_engine.BACKWARD)
    work = Work((block, block), functools.partial(bench_engine.batch, microbatches), microbatches)
    first = time.time()
    with tempfile.TemporaryDirectory(prefix="jap-bench-") as folder:
        pipeline = Pipeline(2, folder, fresh=True)
        training = pipeline.run(work, iterations)
        alone = time.time() - first
        pipeline.close()
    row = {
        "members": members,
        "together_s": together,
        "start_up_s": begun - begin,
        "training_s": ended - begun,
        "tail_s": begin + together - ended,
        "bound_s": iterations * members * microbatches * (bench_engine.FORWARD + bench_engine.BACKWARD),
        "one_1f1b_s": alone,
        "of_it_start_up_s": alone - training,
        "over_one_after_another": members * alone / together,
    }
    return {
        "title": f"A whole array of {members} trainings of {iterations} steps (S=2, M={microbatches}), whole",
        "rows": [row],
        "note": "one_1f1b: one training under 1F1B in two fresh processes; one after another is that many times it",
    }


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "memory": memory,
    "finish": finish,
    "costs": costs,
    "trips": trips,
    "crowd": crowd,
    "charlm": charlm,
}
