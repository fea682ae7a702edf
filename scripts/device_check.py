#!/usr/bin/env python3
"""Check the engine on one GPU, in under 4 minutes: exactness first, then what things cost.

    scripts/device_check.py             on this machine's GPU; ends with code 1 if anything differs, 2 without a GPU
    scripts/device_check.py --cpu       the same on the CPU, small: proves this script, says nothing about a GPU
    scripts/device_check.py --json FILE

Every member is compared, losses and parameters bit for bit, with the same training alone in one process on the same
device. The parts, in this order; what does not fit into the time is named as not run:

    together   S=1, K=1, 2, 4, 8: one engine process
    shared     S=2, K=2: two engine processes that share the GPU. They stand for two nodes here, each with this GPU as
               its device 0, so what passes between them takes the way between nodes
    offload    S=1, K=4 with room for two members' states: they move between host and device
    assertion  an index out of range in one of three members, which on a GPU poisons the whole process (a device-side
               assertion): its siblings end exactly as alone all the same
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "engine"))

from array_harness import alone, same_bits, together

LIMIT_SECONDS = 230.0
PART_SECONDS = 90.0
BOUND = "JAP_DEVICE_MEMORY"


class Layer(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.grow = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        x = x + self.drop(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.drop(self.shrink(nn.functional.gelu(self.grow(x))))


class Broken(nn.Module):
    """Looks up a row that is not there, in the third forward of training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(4, width)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        row = torch.full((1,), 4 if self.calls == 3 else 0, device=x.device)
        return x + self.table(row)


def train(
    *, seed: int, size: dict[str, int], steps: int, device: str = "cpu", broken: bool = False, memory: bool = False
) -> dict[str, Any]:
    """One member; ``device`` is where it trains when it is alone. A member of a sweep sees no GPU."""
    import slurm_jap as jap

    torch.manual_seed(seed)
    width = size["width"]
    layers: list[nn.Module] = [Layer(width) for _ in range(size["depth"])]
    if broken:
        layers.insert(1, Broken(width))
    net = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    trainer = jap.prepare(net, optimizer, nn.functional.mse_loss, microbatches=4, clip_grad_norm=1.0)
    generator = torch.Generator().manual_seed(seed)
    shape = (2, size["rows"], size["length"], width)
    data = [torch.randn(shape, generator=generator) for _ in range(4)]
    results = []
    begun = time.monotonic()
    for step in range(steps):
        x, y = (t.to(device) for t in data[step % len(data)])
        results.append(trainer.step(x, target=y))
        if step == 2:  # the first steps load kernels
            results[-1].loss  # noqa: B018
            begun = time.monotonic()
    losses = [result.loss for result in results]
    state = {name: value.cpu() for name, value in trainer.state_dict().items()}
    ended = time.monotonic()
    moved = trainer._backend.pull("memory") if memory else {}
    trainer.close()
    # Times and figures travel as numbers; only the rest is compared.
    return {"same": {"losses": losses, "state": state}, "begun": begun, "ended": ended, "memory": moved}


class Check:
    """Runs the parts and keeps what they found."""

    def __init__(self, device: str, size: dict[str, int], steps: int) -> None:
        self.device, self.size, self.steps = device, size, steps
        self.deadline = time.monotonic() + LIMIT_SECONDS
        self.rows: list[dict[str, Any]] = []
        self._alone: dict[int, dict[str, Any]] = {}

    def member(self, seed: int, **options: Any) -> Callable[[], dict[str, Any]]:
        return functools.partial(train, seed=seed, size=self.size, steps=self.steps, **options)

    def alone(self, seed: int) -> dict[str, Any]:
        """A member's training by itself, on the device."""
        if seed not in self._alone:
            self._alone[seed] = alone(self.member(seed, device=self.device))
        return self._alone[seed]

    def compare(
        self,
        part: str,
        members: dict[int, Any],
        *,
        stages: int = 1,
        nodes: int = 1,
        fails: frozenset[int] = frozenset(),
        variables: dict[str, str] | None = None,
    ) -> None:
        """Train ``members`` together and compare each but those that must fail with itself alone."""
        row: dict[str, Any] = {"part": part, "S": stages, "K": len(members), "exact": None}
        self.rows.append(row)
        left = self.deadline - time.monotonic()
        if left < 20:
            row["not_run"] = "out of time"
            return
        try:
            outcome = together(
                members, stages=stages, nodes=nodes, engine_variables=variables, seconds=min(PART_SECONDS, left)
            )
            healthy = [k for k in members if k not in fails]
            for k in healthy:
                assert outcome.codes[k] == 0, f"member {k}: {outcome.logs[k][-600:]}\n{outcome.engine_log[-600:]}"
                same_bits(outcome.answers[k]["same"], self.alone(k)["same"], f"member {k}")
            for k in fails:
                assert outcome.codes[k] != 0, f"member {k} should have failed"
                row["failure"] = outcome.logs[k].strip().splitlines()[-1][:160]
        except AssertionError as error:
            row["exact"] = False
            row["difference"] = str(error)[:1500]
            return
        row["exact"] = True
        row["engine_sets"] = sum(event["kind"] == "engine_started" for event in outcome.events)
        answers = [outcome.answers[k] for k in healthy]
        seconds = max(a["ended"] for a in answers) - min(a["begun"] for a in answers)
        row["ms_per_member_step"] = 1e3 * seconds / ((self.steps - 3) * len(members))
        reference = [self.alone(k) for k in healthy]
        row["ms_alone"] = 1e3 * sum(a["ended"] - a["begun"] for a in reference) / ((self.steps - 3) * len(reference))
        row["memory"] = answers[0]["memory"]

    def run(self) -> None:
        for count in (1, 2, 4, 8):
            self.compare("together", {k: self.member(k) for k in range(count)})
        self.compare("shared", {k: self.member(k) for k in range(2)}, stages=2, nodes=2)
        parameters = self.size["depth"] * sum(p.numel() for p in Layer(self.size["width"]).parameters())
        room = 2 * 4 * (4 * parameters)  # two members: parameters, gradients, two moments, 4 bytes each
        members = {k: self.member(k, memory=True) for k in range(4)}
        self.compare("offload", members, variables={BOUND: str(room + (1 << 20))})
        three = {k: self.member(k, broken=k == 0) for k in range(3)}
        self.compare("assertion", three, fails=frozenset({0}))


def main() -> int:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="prove this script's logic where there is no GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    options = parser.parse_args()
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: the folder does not exist; make it first")
    if not options.cpu and not torch.accelerator.is_available():
        print("jap: torch sees no GPU here; --cpu proves the script alone", file=sys.stderr)
        return 2
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        check = Check("cpu", {"width": 32, "depth": 4, "rows": 8, "length": 16}, steps=8)
        where = "CPU (proves the script; no figure below says anything about a GPU)"
    else:
        device = str(torch.accelerator.current_accelerator())
        check = Check(device, {"width": 1024, "depth": 8, "rows": 16, "length": 256}, steps=13)
        where = f"{device}, torch {torch.__version__}"
    began = time.monotonic()
    check.run()
    report(check, where, time.monotonic() - began)
    if options.json:
        options.json.write_text(json.dumps({"where": where, "rows": check.rows}, indent=1) + "\n")
    return 0 if all(row["exact"] or "not_run" in row for row in check.rows) else 1


def report(check: Check, where: str, seconds: float) -> None:
    """Print what was found."""
    print(f"on {where}; {seconds:.0f} s")
    for row in check.rows:
        verdict = {True: "exact", False: "DIFFERS", None: "not run"}[row["exact"]]
        line = f"{row['part']:10} S={row['S']} K={row['K']}  {verdict}"
        if row["exact"]:
            line += f"  {row['ms_per_member_step']:.2f} ms per member and step, alone {row['ms_alone']:.2f}"
            line += f", engine sets {row['engine_sets']}"
        print(line)
        for name in ("not_run", "failure", "difference", "memory"):
            if row.get(name):
                print(f"           {name}: {row[name]}")


if __name__ == "__main__":
    sys.exit(main())
