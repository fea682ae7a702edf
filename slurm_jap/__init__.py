"""Train the siblings of a Slurm job array together, each exactly as alone.

    import slurm_jap as jap
    trainer = jap.prepare(model, optimizer, loss_fn, microbatches=8)
    loss = trainer.step(x, target=y).loss

The names below load torch when they are first used, so that the command-line programs stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from slurm_jap._version import __version__

if TYPE_CHECKING:
    from slurm_jap.client import StepResult, Trainer, prepare, report
    from slurm_jap.microbatch import Loss

__all__ = ["Loss", "StepResult", "Trainer", "__version__", "prepare", "report"]

_HOME = {
    "Loss": "slurm_jap.microbatch",
    "StepResult": "slurm_jap.client",
    "Trainer": "slurm_jap.client",
    "prepare": "slurm_jap.client",
    "report": "slurm_jap.client",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'slurm_jap' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
