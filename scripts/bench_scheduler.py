#!/usr/bin/env python3
"""Measure the schedulers against their bound on a fixed, seeded set of instances.

    scripts/bench_scheduler.py                           stream and the simple orders, a table and the gates
    scripts/bench_scheduler.py --exact 60 --json FILE    and the exact scheduler, 60 s at most per instance
    scripts/bench_scheduler.py --exact 60 --json FILE --part 3/8    an eighth of them; FILE keeps the others' rows
    scripts/bench_scheduler.py --json FILE               all but exact anew; FILE keeps what exact found
    scripts/bench_scheduler.py --json FILE --report      print what FILE holds, measure nothing

Every result but the seconds is a period over the lower bound: 1 is perfect. A forward takes 1 (about so where
instances are uneven), a backward 2, a step 0.2; ``link`` is in forwards, ``memory`` in one 1F1B pipeline's activations.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_jap.exact import MOST_ACTIONS, available, exact
from slurm_jap.layout import Layout
from slurm_jap.problem import MemberCost, Problem, caps_of, lower_bound
from slurm_jap.simulate import Rule, evaluate, run_rule
from slurm_jap.stream import THOROUGH, plain_rule, stream
from slurm_jap.validate import validate

SEED = 20250101
INSTANCES = 202
REGIME = "equal-memory"
COLUMNS = (
    "stages", "members", "microbatches", "equal", "link", "memory", "regime", "bound_by", "load_over_path", "exact",
    "exact_bound", "stream", "quick", "rule", "barrier", "round_robin", "sequential",
)


def instances() -> list[dict[str, Any]]:
    """What describes each instance; the same list on every machine."""
    draw = random.Random(SEED)
    rows: list[dict[str, Any]] = []
    while len(rows) < INSTANCES:
        row = {
            "stages": draw.choice((2, 3, 4, 4, 6, 8, 8, 12, 16)),
            "members": draw.choice((1, 2, 2, 3, 4, 4, 6, 8, 12, 16, 32, 64)),
            "microbatches": draw.choice((1, 2, 3, 4, 4, 6, 8, 8, 12, 16)),
            "equal": draw.random() < 0.5,
            "link": draw.choice((0.0, 0.02, 0.05, 0.1, 0.2, 0.3)),
            "memory": draw.choice((1.0, 1.0, 1.5, 2.0, 2.0, 3.0)),
            "regime": "",
            "seed": len(rows),
        }
        if row["stages"] * row["members"] * row["microbatches"] <= 4096:
            rows.append(row)
    for plain_stages in (2, 4, 8):
        for grouped in (2, 4, 8):
            for microbatches in (4, 8):
                # The link costs 5% of a plain stage's forward, which is ``grouped`` of these forwards.
                rows.append(
                    {
                        "stages": plain_stages * grouped, "members": grouped, "microbatches": microbatches,
                        "equal": True, "link": 0.05 * grouped, "memory": 1.0, "regime": REGIME, "seed": len(rows),
                    }
                )
    return rows


def problem_of(row: dict[str, Any]) -> Problem:
    """The instance that ``row`` describes."""
    stages = row["stages"]
    draw = random.Random(f"{SEED}/{row['seed']}")
    speeds = [1.0 if row["equal"] else draw.uniform(0.8, 1.25) for _ in range(stages)]
    members = []
    for _ in range(row["members"]):
        size = 1.0 if row["equal"] else draw.uniform(0.6, 1.6)
        forward = tuple(round(size * speed, 2) for speed in speeds)
        members.append(
            MemberCost(
                forward=forward, backward=tuple(round(2 * f, 2) for f in forward),
                step=tuple(round(0.2 * f, 2) for f in forward), microbatches=row["microbatches"],
            )
        )
    return Problem(members=tuple(members), link=row["link"], caps=caps_of(stages, row["memory"]))


def played(problem: Problem, rule_of: Callable[[Layout], Rule]) -> float:
    """The mean period of a priority, played as the engine would, once it has settled."""
    layout = Layout(problem)
    iterations = 16 if problem.actions < 20_000 else 8
    run = run_rule(layout, rule_of(layout), iterations)
    ends = [max(starts) for starts in run.start]  # the last step's start: every member's iteration has ended
    first = iterations // 2 - 1
    return (ends[iterations - 2] - ends[first]) / (iterations - 2 - first) * layout.tick


def round_robin(layout: Layout) -> Rule:
    """One micro-batch of each member in turn."""
    members = len(layout.problem.members)
    rank = [micro * members + member for micro, member in zip(layout.microbatch, layout.member, strict=True)]
    return Rule(rank=[rank] * layout.stages, weight=layout.slots * members)


def sequential(problem: Problem) -> float:
    """One member after the other, each alone on the whole pipeline with the order that suits it."""
    alone = {member: played(problem.alone(index), plain_rule) for index, member in enumerate(problem.members)}
    return sum(alone[member] for member in problem.members)


def measure(row: dict[str, Any], exact_seconds: float, exact_actions: int) -> dict[str, Any]:
    """``row`` with its results."""
    problem = problem_of(row)
    bound = lower_bound(problem)
    began = time.process_time()
    quick = stream(problem)
    quick_seconds = time.process_time() - began
    began = time.process_time()
    found = stream(problem, work=THOROUGH)
    spent = time.process_time() - began
    validate(problem, found.schedule)
    assert abs(evaluate(problem, found.schedule).period - found.period) <= 1e-4 * found.period
    barrier = Problem(members=problem.members, link=problem.link, caps=problem.caps, barrier=True)
    result = {
        **row,
        "one": 1.0,
        "actions": problem.actions,
        "bound": bound.period,
        "bound_by": bound.by.value,
        "load_over_path": bound.load / bound.path,
        "bound_load_path": max(bound.load, bound.path) / bound.period,
        "stream": found.period / bound.period,
        "stream_method": found.method,
        "stream_seconds": spent,
        "quick": quick.period / bound.period,
        "quick_seconds": quick_seconds,
        "rule": played(problem, plain_rule) / bound.period,
        "round_robin": played(problem, round_robin) / bound.period,
        "barrier": stream(barrier).period / bound.period,
        "sequential": sequential(problem) / bound.period,
        "exact": None, "exact_bound": None, "exact_seconds": None, "exact_proven": None,
    }
    if exact_seconds > 0 and problem.actions <= exact_actions:
        began = time.monotonic()
        best = exact(problem, seconds=exact_seconds, start=found)
        validate(problem, best.schedule)
        result.update(
            exact=best.period / bound.period, exact_bound=best.lower / bound.period, exact_proven=best.optimal,
            exact_seconds=time.monotonic() - began,
        )
    return result


# --- report -----------------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    """All rows; ``!`` after stream marks more than 1.10 times the bound."""
    widths = [max(len(name), 6) for name in COLUMNS]
    lines = ["  ".join(name.rjust(width) for name, width in zip(COLUMNS, widths, strict=True))]
    for row in rows:
        cells = []
        for name, width in zip(COLUMNS, widths, strict=True):
            value = row[name]
            if isinstance(value, bool):
                text = "yes" if value else "no"
            elif isinstance(value, float):
                text = f"{value:.4g}" if name in ("link", "memory") else f"{value:.3f}"
            else:
                text = "-" if value is None else str(value)
            if name == "stream" and row["stream"] > 1.10:
                text += "!"
            cells.append(text.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def mean(name: str, rows: list[dict[str, Any]]) -> float:
    """The mean of a column."""
    return statistics.mean(row[name] for row in rows)


def gates(rows: list[dict[str, Any]]) -> str:
    """What is asked of the schedulers, and what was measured."""
    loaded = [row for row in rows if row["load_over_path"] >= 1.1]
    other = [row for row in rows if row["load_over_path"] < 1.1]
    lines = ["", f"{len(rows)} instances; the stage load exceeds the critical path by >= 10% in {len(loaded)}"]

    def worst(name: str, chosen: list[dict[str, Any]], limit: float, value: Callable[[dict[str, Any]], float]) -> None:
        if chosen:
            most = max(map(value, chosen))
            verdict = "ok" if most <= limit + 5e-4 else "MISSED"
            lines.append(f"{verdict:6}  {name}: max {most:.4f} (<= {limit}), {len(chosen)} instances")

    def compared(name: str, base: str) -> Callable[[dict[str, Any]], float]:
        return lambda row: float(row[name] / row[base])

    for title, name, base in (
        ("stream over the bound", "stream", "one"),
        ("stream over load and path alone, whatever memory and links forbid", "stream", "bound_load_path"),
        ("quick stream over the bound", "quick", "one"),
    ):
        value = compared(name, base)
        lines.append(f"{title}:")
        worst("load rules, equal, memory >= 2x", [r for r in loaded if r["equal"] and r["memory"] >= 2], 1.01, value)
        tight = [r for r in loaded if r["equal"] and r["memory"] == 1 and r["link"] <= 0.05]
        worst("load rules, equal, memory 1x, link <= 0.05", tight, 1.03, value)
        uneven = [row for row in loaded if not row["equal"]]
        worst("load rules, uneven", uneven, 1.10, value)
        if uneven:
            median = statistics.median(map(value, uneven))
            lines.append(f"{'ok' if median <= 1.02 else 'MISSED':6}  load rules, uneven: median {median:.4f} (<= 1.02)")
        worst("elsewhere (more is marked ! in the table)", other, 1.10, value)
    both = [row for row in rows if row["exact"] is not None]
    hard = [row for row in both if row["load_over_path"] < 1.1]
    lines.append("against the exact scheduler:")
    for name in ("stream", "quick"):
        worst(f"elsewhere, {name} over exact", hard, 1.03, compared(name, "exact"))
        worst(f"everywhere, {name} over exact", both, 1.03, compared(name, "exact"))
    proven = [row for row in both if row["exact"] <= row["exact_bound"] * 1.001]
    if both:
        seconds = sorted(row["exact_seconds"] for row in proven) or [0.0]
        lines.append(
            f"        exact ran on {len(both)} and proved the optimum (to 0.1%) on {len(proven)}, "
            f"median {statistics.median(seconds):.1f} s, longest {seconds[-1]:.1f} s"
        )
    regime = [row for row in rows if row["regime"] == REGIME]
    if regime:
        beaten = [row for row in regime if row["stream"] < row["rule"] - 5e-4]
        at_bound = [row for row in regime if row["rule"] <= 1.0005]
        lines.append(
            f"{'ok' if len(beaten) + len(at_bound) == len(regime) else 'MISSED':6}  equal-memory regime: stream beats "
            f"the plain rule on {len(beaten)} of {len(regime)}; the rule is at the bound on {len(at_bound)}; "
            f"means {mean('stream', regime):.3f} and {mean('rule', regime):.3f}"
        )
    for name in ("stream", "quick"):
        slowest = max(row[f"{name}_seconds"] for row in rows)
        lines.append(f"        {name} took at most {slowest:.2f} s of CPU time per instance")
    return "\n".join(lines)


def speed() -> str:
    """The two sizes whose time is limited."""
    lines = ["", "speed (CPU seconds)"]
    draw = random.Random(SEED)

    def uneven(stages: int, members: int, microbatches: int) -> Problem:
        speeds = [draw.uniform(0.8, 1.25) for _ in range(stages)]
        made = []
        for _ in range(members):
            size = draw.uniform(0.6, 1.6)
            forward = tuple(size * speed for speed in speeds)
            made.append(
                MemberCost(forward=forward, backward=tuple(2 * f for f in forward),
                           step=tuple(0.2 * f for f in forward), microbatches=microbatches)
            )
        return Problem(members=tuple(made), link=0.05, caps=caps_of(stages, 2))

    def timed(name: str, problems: list[Problem], limit: float) -> None:
        began = time.process_time()
        found = [stream(problem) for problem in problems]
        spent = time.process_time() - began
        worst = max(solution.period / solution.bound.period for solution in found)
        verdict = "ok" if spent <= limit else "MISSED"
        lines.append(f"{verdict:6}  {name}: {spent:.2f} (<= {limit}), worst {worst:.4f} x bound")

    timed("64 uneven members, 8 stages, 8 micro-batches", [uneven(8, 64, 8)], 0.5)
    for groups in (8, 4, 2, 1):
        name = f"1,000 uneven members, {groups} x {64 // groups} devices, 8 micro-batches"
        timed(name, [uneven(64 // groups, 1000 // groups, 8) for _ in range(groups)], 5.0)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="keep the rows in this file; rows measured before are replaced")
    parser.add_argument("--exact", type=float, default=0.0, metavar="SECONDS", help="seconds for the exact scheduler")
    parser.add_argument(
        "--exact-actions", type=int, default=700, metavar="N", help=f"exact runs up to this size (< {MOST_ACTIONS})"
    )
    parser.add_argument("--part", default="1/1", metavar="I/N", help="measure every N-th instance, from the I-th")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--speed", action="store_true", help="measure only the two large sizes")
    options = parser.parse_args(arguments)
    if options.speed:
        print(speed())
        return 0
    if options.exact > 0 and not available():
        print("jap: --exact needs OR-Tools: pip install 'slurm-jap[exact]'", file=sys.stderr)
        return 2
    kept: dict[int, dict[str, Any]] = {}
    if options.json and options.json.exists():
        kept = {row["seed"]: row for row in json.loads(options.json.read_text())["rows"]}
    if not options.report:
        part, parts = map(int, options.part.split("/"))
        for row in instances()[part - 1 :: parts]:
            before = kept.get(row["seed"], {})
            new = kept[row["seed"]] = measure(row, options.exact, options.exact_actions)
            if options.exact == 0 and before.get("exact") is not None:
                # The optimum does not depend on stream: keep what was proven, and the better of the two schedules.
                new.update({name: before[name] for name in ("exact_bound", "exact_seconds", "exact_proven")})
                new["exact"] = min(before["exact"], new["stream"])
            if options.json:
                rows = [kept[seed] for seed in sorted(kept)]
                options.json.write_text(json.dumps({"seed": SEED, "rows": rows}, indent=1) + "\n")
    rows = [kept[seed] for seed in sorted(kept)]
    if not rows:
        print("jap: no rows to report; run without --report first", file=sys.stderr)
        return 2
    print(table(rows))
    print(gates(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
