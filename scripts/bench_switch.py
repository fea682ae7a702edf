"""What it costs to have members take turns on a bounded device: one switch, and how much of it is hidden.

    python scripts/bench_switch.py [--quick] [--json FILE]

K members train on one device where ``fit`` of them fit. Blocks sleep for an exact time, so that the table tells of the
moves and not of a busy machine's arithmetic; on a CPU a "device" is memory of the same kind, and a move is two copies.
A switch brings one member in and sends another out. Hidden is the share of the moves' time in which the stage had
other work. "over resident" compares an iteration of all members with one in which everything stays on the device.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from bench_members import Meet, Session
from bench_models import SleepBlock, sleep_exactly
from torch import nn

import slurm_jap as jap
from slurm_jap.environment import ENV_DEVICE_MEMORY

MEMBERS = 6
MICROBATCHES = 2
ROWS = 2


def state_bytes(width: int) -> int:
    """Parameters, gradients and AdamW's two tensors of one block."""
    return 4 * 4 * (width * width + width)


def join(kept: dict[str, Any], meet: Meet, *, width: int, seconds: tuple[float, float]) -> None:
    """Build, prepare, and take the first steps."""
    if "trainer" in kept:
        kept.pop("trainer").close()
    torch.manual_seed(0)
    net = nn.Sequential(SleepBlock(*seconds, width=width))
    kept["trainer"] = jap.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-3), nn.MSELoss(), microbatches=MICROBATCHES
    )
    kept["x"] = torch.randn(ROWS * MICROBATCHES, width)
    for _ in range(3):
        _ = kept["trainer"].step(kept["x"], target=kept["x"]).loss
    meet()


def train(
    kept: dict[str, Any], meet: Meet, *, iterations: int
) -> tuple[float, float, dict[str, float], dict[str, float]]:
    """Some iterations; when they began and ended, and the stage's report before and after."""
    trainer = kept["trainer"]
    meet()
    before = trainer._backend.pull("memory")["0"]
    meet()
    begin = time.monotonic()
    results = [trainer.step(kept["x"], target=kept["x"]) for _ in range(iterations)]
    _ = results[-1].loss
    end = time.monotonic()
    meet()
    return begin, end, before, trainer._backend.pull("memory")["0"]


def measure(width: int, seconds: tuple[float, float], fit: int | None, iterations: int, repeats: int) -> dict[str, Any]:
    """One row; ``fit`` None: no bound."""
    variables = {} if fit is None else {ENV_DEVICE_MEMORY: str(fit * state_bytes(width) + 4096)}
    times, switches, moved, moving, waited = [], 0.0, 0.0, 0.0, 0.0
    with Session(1, MEMBERS, variables=variables) as session:
        everybody = range(MEMBERS)
        session.call(dict.fromkeys(everybody, functools.partial(join, width=width, seconds=seconds)))
        for _ in range(repeats):
            answers = session.call(dict.fromkeys(everybody, functools.partial(train, iterations=iterations)))
            times.append((max(a[1] for a in answers.values()) - min(a[0] for a in answers.values())) / iterations)
            if fit is not None:
                before, after = answers[0][2:]
                change = {name: after[name] - before[name] for name in after}
                switches += change["switches"]
                moved += change["bytes_in"] + change["bytes_out"]
                moving += change["moving_us"]
                waited += change["waited_us"]
    row: dict[str, Any] = {
        "state_mib": state_bytes(width) / 2**20,
        "fit": fit,
        "iteration_ms": statistics.median(times) * 1e3,
    }
    if switches:
        row |= {
            "switches_per_iteration": switches / (iterations * repeats),
            "switch_bytes": moved / switches,
            "switch_us": moving / switches,
            "gb_per_s": moved / moving / 1e3,
            "hidden": max(0.0, 1.0 - waited / moving),
        }
    return row


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="two sizes, fewer repeats (about a minute)")
    parser.add_argument("--json", type=Path, help="write the rows there as well")
    options = parser.parse_args()
    sleep_exactly()
    forward, backward = 0.005, 0.010
    widths = (256, 1024) if options.quick else (128, 256, 512, 1024, 1448)
    iterations, repeats = (4, 3) if options.quick else (6, 5)
    busy = MICROBATCHES * (forward + backward) * 1e3
    print(f"{MEMBERS} members, 1 stage, {busy:g} ms of work in each turn; torch {torch.__version__} on the CPU")
    print(
        f"{'state':>9} {'fit':>4} {'switches':>9} {'bytes':>12} {'us':>9} {'GB/s':>6} {'hidden':>7} "
        f"{'iteration':>10} {'over resident':>14}"
    )
    print(f"{'MiB':>9} {'':>4} {'/iter.':>9} {'/switch':>12} {'/switch':>9} {'':>6} {'':>7} {'ms':>10}")
    rows = []
    for width in widths:
        resident = measure(width, (forward, backward), None, iterations, repeats)
        rows.append(resident)
        print(f"{resident['state_mib']:9.2f} {'all':>4} {'':>46} {resident['iteration_ms']:10.1f}", flush=True)
        for fit in (2, 4):
            row = measure(width, (forward, backward), fit, iterations, repeats)
            row["over_resident"] = row["iteration_ms"] / resident["iteration_ms"]
            rows.append(row)
            print(
                f"{row['state_mib']:9.2f} {fit:4} {row['switches_per_iteration']:9.2f} {row['switch_bytes']:12.0f} "
                f"{row['switch_us']:9.0f} {row['gb_per_s']:6.2f} {row['hidden']:7.1%} {row['iteration_ms']:10.1f} "
                f"{row['over_resident']:14.3f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
