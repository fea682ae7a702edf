"""The planner's candidates as a table for people. ``rich`` is loaded only when a table is drawn; no torch."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from typing import IO

from slurm_jap.planner import Candidate, Plan, in_bytes, shape_text

MOST_ROWS = 18
COLUMNS = (
    ("G x S", "right"),
    ("devices", "right"),
    ("at once", "right"),
    ("iteration", "right"),
    ("bound", "right"),
    ("bound by", "left"),
    ("device holds", "right"),
    ("time", "right"),
    ("GPU-hours", "right"),
    ("same memory", "right"),
    ("limit", "right"),
    ("", "left"),
)


def shown(plan: Plan) -> list[Candidate]:
    """The rows worth showing: the chosen one, what could be had, and why the smallest others could not."""
    if len(plan.candidates) <= MOST_ROWS:
        return list(plan.candidates)
    usable = sorted((c for c in plan.candidates if c.simulated and not c.refused), key=lambda c: c.pace)
    kept = [plan.chosen, *usable[: MOST_ROWS // 2]]
    for other in plan.candidates:
        if len(kept) >= MOST_ROWS:
            break
        if other not in kept and (other.refused or other.groups == 1):
            kept.append(other)
    return [c for c in plan.candidates if c in kept]


def seconds(value: float, measured: bool) -> str:
    """With a unit; an estimate has none that means anything."""
    if not math.isfinite(value):
        return "-"
    if not measured:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def row(found: Candidate, plan: Plan) -> tuple[str, ...]:
    """One candidate's cells."""

    def ratio(value: float | None) -> str:
        return "-" if value is None or not math.isfinite(value) else f"{value:.2f}"

    if found.chosen:
        remark = "chosen"
    elif found.refused:
        remark = found.refused.partition(":")[0]
    else:
        remark = "" if found.simulated else "bound only"
    limit = "-"
    if found.request is not None and found.request.time_min is not None:
        limit = f"{found.request.time_min} min"
    return (
        f"{found.groups} x {found.stages}",
        str(found.engines),
        str(found.at_once),
        seconds(found.period, plan.measured) if found.simulated else "-",
        seconds(found.bound.period, plan.measured),
        found.bound.by.value if found.bound.period else "-",
        in_bytes(found.memory) if found.memory else "-",
        ratio(found.pace),
        ratio(found.gpu_hours),
        ratio(found.gpu_hours_same_memory),
        limit,
        remark,
    )


def legend(plan: Plan) -> Sequence[str]:
    """What the columns mean, and on what they rest."""
    alone = f" ({seconds(plan.alone, True)} an iteration)" if plan.measured else ""
    stages = f"{plan.alone_stages} stage{'s' * (plan.alone_stages > 1)}"
    base = "measured" if plan.measured else "estimated: only ratios mean anything"
    limit = "not known" if plan.device_limit is None else in_bytes(plan.device_limit)
    return (
        f"Times are {base}. A device's memory: {limit}. Alone, a member takes {stages}{alone}.",
        "iteration, bound: one iteration of all members of a group, simulated, and the least that any order can take.",
        "time: of the whole array, over one member alone. GPU-hours: over the plain array's on as many GPUs; same",
        "memory: over those of a plain array whose GPUs hold as much.",
        f"Chosen for {plan.goal}: {shape_text(plan.chosen)}; {plan.why}.",
    )


def draw(plan: Plan, file: IO[str]) -> None:
    """Print the table and its legend."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = file.isatty()
    width = shutil.get_terminal_size((160, 24)).columns if terminal else 160
    console = Console(file=file, width=width, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in COLUMNS:
        table.add_column(name, justify="right" if side == "right" else "left", no_wrap=True, overflow="ellipsis")
    rows = shown(plan)
    for found in rows:
        table.add_row(*map(Text, row(found, plan)), style="bold" if found.chosen else "dim" if found.refused else "")
    console.print(table)
    if len(rows) < len(plan.candidates):
        console.print(Text(f"{len(plan.candidates) - len(rows)} more are in --json"))
    for line in legend(plan):
        console.print(Text(line))
