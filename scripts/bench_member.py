"""A member script for the benchmark: ITERATIONS MICROBATCHES FORWARD BACKWARD; prints when it began and ended."""

from __future__ import annotations

import sys
import time

import torch
from bench_models import ROWS, WIDTH, SleepBlock, sleep_exactly
from torch import nn

import slurm_jap as jap

sleep_exactly()
iterations, microbatches = int(sys.argv[1]), int(sys.argv[2])
forward, backward = float(sys.argv[3]), float(sys.argv[4])
model = nn.Sequential(SleepBlock(forward, backward), SleepBlock(forward, backward))
trainer = jap.prepare(
    model, torch.optim.SGD(model.parameters(), lr=1e-3), nn.functional.mse_loss, microbatches=microbatches
)
x, y = torch.randn(2, ROWS * microbatches, WIDTH)
begin = 0.0
for number in range(iterations):
    result = trainer.step(x, target=y)
    if number == 0:
        begin = time.time()  # what the first step waits for is starting up
trainer.state_dict()
print(begin, time.time())
trainer.close()
