"""Cases for the exactness tests: member functions that run in whatever company, and again by themselves.

A case is a function without arguments that trains something and returns what came of it. ``check`` runs a file's
cases together in one sweep, in a random order and with random pauses (its seed is printed, ``JAP_TEST_SEED`` repeats
it), and compares every answer with the one of the case alone, bit by bit.
"""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from array_harness import alone, same_bits, together
from torch import nn

import slurm_jap as jap

Case = Callable[[], Any]
Batch = tuple[tuple[Any, ...], dict[str, Any], Any]

_alone: dict[Any, Any] = {}
"""What each case gave alone; they are asked for again for every number of stages."""


@dataclasses.dataclass(frozen=True)
class _Paused:
    """A case that starts after a pause, so that members come in every order."""

    case: Case
    seconds: float

    def __call__(self) -> Any:
        time.sleep(self.seconds)
        return self.case()


@dataclasses.dataclass(frozen=True)
class _OneByOne:
    """Several cases in one process, one after another; an exception is an answer, too."""

    cases: Mapping[str, Case]

    def __call__(self) -> dict[str, Any]:
        answers: dict[str, Any] = {}
        for name, case in self.cases.items():
            try:
                answers[name] = case()
            except Exception as error:
                answers[name] = f"{type(error).__name__}: {error}"
        return answers


def answers_alone(cases: Mapping[str, Case]) -> dict[str, Any]:
    """What each case gives by itself."""
    missing = {name: case for name, case in cases.items() if (name, case) not in _alone}
    if missing:
        for name, answer in alone(_OneByOne(missing)).items():
            assert not isinstance(answer, str), f"{name} alone: {answer}"
            _alone[name, missing[name]] = answer
    return {name: _alone[name, case] for name, case in cases.items()}


def check(cases: Mapping[str, Case], *, stages: int, groups: int = 1) -> dict[str, Any]:
    """Require that every case gives alone and in this company the same bits; returns the answers."""
    seed = int(os.environ.get("JAP_TEST_SEED") or random.randrange(1 << 31))
    print(f"JAP_TEST_SEED={seed}")
    draw = random.Random(seed)
    names = draw.sample(list(cases), len(cases))
    members = {index: _Paused(cases[name], draw.choice([0.0, 0.0, 0.1, 0.4])) for index, name in enumerate(names)}
    expected = answers_alone(cases)
    outcome = together(members, stages=stages, groups=groups)
    wrong = []
    for index, name in enumerate(names):
        try:
            assert index in outcome.answers, outcome.errors.get(index) or outcome.logs[index][-2000:]
            same_bits(outcome.answers[index], expected[name])
        except AssertionError as error:
            wrong.append(f"{name} (member {index} of {stages} stages): {error}")
    assert not wrong, "\n".join([f"JAP_TEST_SEED={seed}", *wrong, outcome.engine_log[-2000:]])
    assert outcome.code == 0, outcome
    return {name: outcome.answers[index] for index, name in enumerate(names)}


# --- what cases are made of -------------------------------------------------------------------------------------------


def rows(count: int, *, batch: int = 8, shape: Sequence[int] = (6,), classes: int = 3, seed: int = 1) -> list[Batch]:
    """Batches of standard normal rows with class targets."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            (torch.randn(batch, *shape, generator=generator),),
            {},
            torch.randint(0, classes, (batch,), generator=generator),
        )
        for _ in range(count)
    ]


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Any],
    data: Iterable[Batch],
    *,
    microbatches: int = 3,
    after_batch: Callable[[Any, int], Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train on ``data`` and tell all that came of it.

    Args:
        after_batch: called with the Trainer and the number of batches so far; what it returns is kept.
    """
    trainer = jap.prepare(model, optimizer, loss, microbatches=microbatches, **options)
    streams = _streams()
    results, kept = [], []
    for number, (args, kwargs, target) in enumerate(data, start=1):
        results.append(trainer.step(*args, target=target, **kwargs))
        if after_batch is not None:
            kept.append(after_batch(trainer, number))
    answer = {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "metrics": [r.metrics for r in results],
        "kept": kept,
        "state": trainer.state_dict(),
        "optimizer": trainer.optimizer_state_dict(),
        "after_step": trainer.after_step_state(),
        "streams untouched": _streams() == streams,
    }
    trainer.close()
    assert answer["streams untouched"], "the script's own random streams were drawn from"
    return answer


def _streams() -> list[str]:
    import numpy

    return [str(torch.get_rng_state().tolist()), str(random.getstate()), str(numpy.random.get_state())]


def plainly(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Any],
    data: Iterable[Batch],
    *,
    clip: Callable[[list[nn.Parameter]], Any] | None = None,
    accumulate: int = 1,
) -> dict[str, Any]:
    """The same by plain torch, as anybody would write it."""
    losses, norms = [], []
    for number, (args, kwargs, target) in enumerate(data, start=1):
        value = loss(model(*args, **kwargs), target)
        (value / accumulate if accumulate > 1 else value).backward()
        losses.append(value.detach())
        if number % accumulate == 0:
            norms.append(clip(list(model.parameters())) if clip else None)
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "state": {k: v.detach() for k, v in model.state_dict().items()}}
