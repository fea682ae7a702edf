"""The other parts of the engine's benchmark; each returns ``{"title", "rows", "note"}``."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_engine
import torch
from bench_members import Session
from bench_models import ROWS, WIDTH, ChattyBlock, SleepBlock
from torch import nn


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


PARTS: dict[str, Callable[[], dict[str, Any]]] = {"costs": costs}
