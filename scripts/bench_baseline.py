"""The benchmark's baseline: the same stages under torch.distributed.pipelining, one process per stage, gloo."""

from __future__ import annotations

import dataclasses
import multiprocessing
import multiprocessing.connection
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ANSWER_SECONDS = 300.0


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """One member: per stage its module, its batch, M."""

    stages: tuple[Callable[[], nn.Module], ...]
    batch: Callable[[], tuple[Tensor, Tensor]]
    microbatches: int
    loss: Callable[[Any, Any], Tensor] = nn.functional.mse_loss
    schedule: str = "1F1B"
    """``1F1B``, ``GPipe``, ``Interleaved1F1B`` or ``ZBVZeroBubble``; the latter two have two stages per process."""


class Pipeline:
    """Processes that stay; each runs its stages of whatever work it is given."""

    def __init__(
        self, ranks: int, folder: str, cores: tuple[int, ...] | None = None, *, fresh: bool = False
    ) -> None:
        """
        Args:
            folder: empty, and this pipeline's own.
            cores: pin process r to ``cores[r]``.
            fresh: start new interpreters, which load torch, as a job would.
        """
        context = multiprocessing.get_context("spawn" if fresh else "forkserver")
        self._processes, self._ends = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(rank, ranks, f"file://{folder}/store", theirs, cores and cores[rank]), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._ends.append(ours)

    def run(self, work: Work, iterations: int, *, warm: int = 0) -> float:
        """Train ``iterations`` iterations after ``warm`` uncounted ones; the seconds they took.

        Raises:
            RuntimeError: a process failed or did not answer; the pipeline cannot be used any more.
        """
        for end in self._ends:
            end.send((work, iterations, warm))
        answers = []
        deadline = time.monotonic() + ANSWER_SECONDS
        for end in self._ends:
            if not end.poll(max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"no answer for {ANSWER_SECONDS:g} s")
            try:
                answer = end.recv()
            except EOFError:
                raise RuntimeError("a process ended") from None
            if isinstance(answer, str):
                raise RuntimeError(answer)
            answers.append(answer)
        return max(end for _, end in answers) - min(begin for begin, _ in answers)

    def close(self) -> None:
        """End the processes."""
        for process, end in zip(self._processes, self._ends, strict=True):
            end.close()
            process.kill()
            process.join()


def _rank(rank: int, ranks: int, store: str, end: multiprocessing.connection.Connection, core: int | None) -> None:
    import os

    import torch.distributed as dist

    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    known: dict[Work, Callable[[], None]] = {}
    while True:
        try:
            work, iterations, warm = end.recv()
        except EOFError:
            return
        try:
            if work not in known:
                known[work] = _iteration(work, rank, ranks)
            for _ in range(warm):
                known[work]()
            dist.barrier()
            begin = time.monotonic()
            for _ in range(iterations):
                known[work]()
            end.send((begin, time.monotonic()))
        except Exception as error:
            traceback.print_exc()
            end.send(f"{type(error).__name__}: {error}".splitlines()[0])
            return


def _iteration(work: Work, rank: int, ranks: int) -> Callable[[], None]:
    """A function that trains one iteration on this process."""
    from torch.distributed import pipelining

    count = len(work.stages)
    if count == ranks:
        mine = [rank]
    elif work.schedule == "ZBVZeroBubble":  # down one way, up the other
        mine = [rank, count - 1 - rank]
    else:
        mine = list(range(rank, count, ranks))
    torch.manual_seed(rank)
    stages = [pipelining.PipelineStage(work.stages[number](), number, count, torch.device("cpu")) for number in mine]
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    kind = getattr(pipelining, f"Schedule{work.schedule}")
    schedule = kind(stages if count > ranks else stages[0], work.microbatches, loss_fn=work.loss)
    x, y = work.batch()
    first, last = 0 in mine, count - 1 in mine

    def once() -> None:
        schedule.step(*((x,) if first else ()), target=y if last else None, losses=[] if last else None)
        optimizer.step()
        optimizer.zero_grad()

    return once
