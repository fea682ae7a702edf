"""An engine that dies in the middle changes no bit either: what members had is made again from snapshot and log."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import test_batches
import test_exactness_models as models
import test_exactness_optimizers as optimizers
import test_losses
from array_harness import same_bits, together
from company import answers_alone
from support import wait_until
from test_faults import children_of

pytestmark = pytest.mark.engine

CASES: dict[str, Callable[[], Any]] = {
    **{name: models.MODELS[name] for name in ("convolutions", "checkpointing", "tied_weights", "recurrent")},
    **{
        name: models.TREES[name]
        for name in (
            "own_types",
            "modules_with_state",
            "buffers_changed_in_place",
            "parametrized",
            "functions_as_blocks",
        )
    },
    **{name: optimizers.OPTIMIZERS[name] for name in ("own groups", "several groups", "adamw fused")},
    **{name: optimizers.SCHEDULES[name] for name in ("tensor", "ema object", "ema closure", "accumulate 3", "plateau")},
    **{name: test_losses.LOSSES[name] for name in ("learned", "model in the loss", "Loss, accumulated")},
    **{name: test_batches.BATCHES[name] for name in ("evaluation", "trees", "last short batch")},
}


@dataclasses.dataclass(frozen=True)
class _Slowed:
    """A case with a snapshot every other step, and time between steps for an engine to die."""

    case: Callable[[], Any]

    def __call__(self) -> Any:
        os.environ["JAP_SNAPSHOT_STEPS"] = "2"
        from slurm_jap import client, remote

        remote.SNAPSHOT_STEPS = 2
        step = client.Trainer.step

        def slowly(self: Any, *args: Any, **kwargs: Any) -> Any:
            time.sleep(0.15)
            return step(self, *args, **kwargs)

        client.Trainer.step = slowly  # type: ignore[method-assign]
        return self.case()


@pytest.mark.parametrize("stages", [1, 3])
def test_an_engine_that_dies_changes_no_bit(stages: int) -> None:
    seed = int(os.environ.get("JAP_TEST_SEED") or random.randrange(1 << 31))
    print(f"JAP_TEST_SEED={seed}")
    draw = random.Random(seed)
    names = draw.sample(list(CASES), len(CASES))

    def kill_an_engine(launcher: Any, sweep_dir: Any) -> None:
        wait_until(lambda: launcher.agents and len(children_of(launcher.agents[0].pid)) == stages, 60)
        wait_until(lambda: any(any(sweep_dir.events(f"member_{i}")) for i in range(len(names))), 60)
        time.sleep(draw.uniform(0.5, 1.5))
        os.kill(draw.choice(children_of(launcher.agents[0].pid)), signal.SIGKILL)

    expected = answers_alone(CASES)
    outcome = together(
        {index: _Slowed(CASES[name]) for index, name in enumerate(names)}, stages=stages, during=kill_an_engine
    )
    wrong = []
    for index, name in enumerate(names):
        try:
            assert index in outcome.answers, outcome.errors.get(index) or outcome.logs[index][-2000:]
            same_bits(outcome.answers[index], expected[name])
        except AssertionError as error:
            wrong.append(f"{name} (member {index} of {stages} stages): {error}")
    assert not wrong, "\n".join([f"JAP_TEST_SEED={seed}", *wrong, *outcome.said, outcome.engine_log[-2000:]])
    assert sum(e["kind"] == "engine_started" for e in outcome.events) >= 2
