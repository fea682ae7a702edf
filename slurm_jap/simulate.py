"""Runs schedules without processes: the engine's rule, the period of a schedule, its actions laid out in time.

Pure: no I/O, no torch. ``run_rule`` plays the engine's rule (or another priority) event by event; ``evaluate`` gives
the exact period of a ``Schedule``; ``timeline`` plays it from an empty pipeline.
"""

from __future__ import annotations

import dataclasses
import heapq

from slurm_jap.event_graph import Graph, Orders, Steady, solve
from slurm_jap.layout import Layout
from slurm_jap.problem import Problem
from slurm_jap.schedule import Action, Kind, Schedule, ScheduleError

__all__ = [
    "Bar", "Evaluation", "Layout", "Rule", "Run", "deadlock_message", "evaluate", "read", "run_rule", "step_table",
    "timeline",
]  # fmt: skip

# --- the engine's rule ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Rule:
    """What ``run_rule`` plays: of the ready actions a step first, then a backward, then a forward; within a kind the
    smallest ``iteration * weight + rank[stage][slot]``. Per stage no forward starts beyond the caps."""

    rank: list[list[int]]
    """Per stage and slot; of one member's actions of a kind, ranks ascend with the micro-batch."""
    weight: int
    caps: list[int] | None = None
    """Per stage; None: the problem's. Never above the problem's."""
    merged: bool = False
    """Whether backwards and forwards compete by rank alone."""
    phase: list[int] | None = None
    """Per member, in ticks: stage 0 does not start micro-batch m of its iteration i before ``phase + i * pace + m *
    spacing``; None: as soon as it can."""
    pace: int = 0
    spacing: list[int] | None = None
    """Per member, in ticks; None: 0."""


@dataclasses.dataclass(slots=True)
class Run:
    """What happened: per iteration and node the start in ticks, and per stage the slots in the order they ran."""

    start: list[list[int]]
    order: list[list[int]]
    end: int


def run_rule(layout: Layout, rule: Rule, iterations: int) -> Run:
    """Play ``rule`` for ``iterations`` iterations of every member, from an empty pipeline."""
    stages, slots, link, switch = layout.stages, layout.slots, layout.link, layout.switch
    problem = layout.problem
    members, kinds, durations = layout.member, layout.kind, layout.duration
    counts, base = problem.microbatches, layout.base
    last = stages - 1
    rank, weight, merged = rule.rank, rule.weight, rule.merged
    caps = rule.caps if rule.caps is not None else list(problem.caps or [layout.slots] * stages)
    memory = problem.memory

    start = [[-1] * (stages * slots) for _ in range(iterations)]
    order: list[list[int]] = [[] for _ in range(stages)]
    steps: list[list[int]] = [[] for _ in range(stages)]  # ready, as heaps of key * slots + slot
    backwards: list[list[int]] = [[] for _ in range(stages)]
    forwards: list[list[int]] = [[] for _ in range(stages)]
    running = [-1] * stages
    previous = [-1] * stages  # member of the stage's last action
    held = [0] * stages
    held_bytes = [0] * stages
    stepped = [[0] * len(counts) for _ in range(stages)]  # steps done
    undone = [list(counts) for _ in range(stages)]  # backwards left before the step
    early: list[list[list[int]]] = [[[] for _ in counts] for _ in range(stages)]  # forwards that wait for the step
    seen = [0] * (stages * slots)  # times this node became ready
    down_free, up_free = [0] * stages, [0] * stages

    # Events are integers, time * codes + code: a node that arrives, or nodes + stage when the stage ends its action.
    nodes = stages * slots
    codes = nodes + stages
    events: list[int] = []
    push, pop = heapq.heappush, heapq.heappop

    def release(member: int, iteration: int, now: int) -> None:
        """Stage 0 may begin ``iteration`` of ``member``."""
        if iteration < iterations:
            planned = 0 if rule.phase is None else rule.phase[member] + iteration * rule.pace
            spacing = 0 if rule.spacing is None else rule.spacing[member]
            for microbatch in range(counts[member]):
                push(events, max(now, planned + microbatch * spacing) * codes + base[member] + microbatch)

    for member in range(len(counts)):
        release(member, 0, 0)
    now = 0
    while events:
        now = events[0] // codes
        limit = (now + 1) * codes
        touched: list[int] = []
        while events and events[0] < limit:
            code = pop(events) - now * codes
            if code < nodes:
                stage, slot = divmod(code, slots)
                iteration = seen[code]
                seen[code] += 1
                kind = kinds[slot]
                if kind is Kind.BACKWARD:
                    push(backwards[stage], (iteration * weight + rank[stage][slot]) * slots + slot)
                elif iteration > stepped[stage][members[slot]]:
                    early[stage][members[slot]].append((iteration * weight + rank[stage][slot]) * slots + slot)
                else:
                    push(forwards[stage], (iteration * weight + rank[stage][slot]) * slots + slot)
                touched.append(stage)
                continue
            stage = code - nodes
            touched.append(stage)
            slot = running[stage]
            running[stage] = -1
            kind = kinds[slot]
            member = members[slot]
            if kind is Kind.FORWARD:
                if stage < last:
                    sent = max(now, down_free[stage]) + link
                    down_free[stage] = sent
                    push(events, sent * codes + (stage + 1) * slots + slot)
                else:
                    push(events, now * codes + stage * slots + slot + counts[member])
            elif kind is Kind.BACKWARD:
                held[stage] -= 1
                if memory is not None:
                    held_bytes[stage] -= problem.members[member].activation[stage]
                if stage:
                    sent = max(now, up_free[stage]) + link
                    up_free[stage] = sent
                    push(events, sent * codes + (stage - 1) * slots + slot)
                undone[stage][member] -= 1
                if undone[stage][member] == 0:
                    undone[stage][member] = counts[member]
                    step = base[member] + 2 * counts[member]
                    push(steps[stage], (stepped[stage][member] * weight + rank[stage][step]) * slots + step)
            else:
                stepped[stage][member] += 1
                for item in early[stage][member]:
                    push(forwards[stage], item)
                early[stage][member].clear()
                if stage == 0:
                    release(member, stepped[0][member], now)
        for stage in sorted(set(touched)) if len(touched) > 1 else touched:
            if running[stage] >= 0:
                continue
            if steps[stage]:
                slot = pop(steps[stage]) % slots
            else:
                ahead, back = forwards[stage], backwards[stage]
                admitted = bool(ahead) and held[stage] < caps[stage]
                if admitted and memory is not None:
                    size = problem.members[members[ahead[0] % slots]].activation[stage]
                    admitted = held_bytes[stage] + size <= memory[stage]
                if back and not (merged and admitted and ahead[0] // slots < back[0] // slots):
                    slot = pop(back) % slots
                elif admitted:
                    slot = pop(ahead) % slots
                    held[stage] += 1
                    if memory is not None:
                        held_bytes[stage] += problem.members[members[slot]].activation[stage]
                else:
                    continue
            member = members[slot]
            begin = now + (switch if previous[stage] not in (member, -1) else 0)
            previous[stage] = member
            running[stage] = slot
            order[stage].append(slot)
            start[stepped[stage][member]][stage * slots + slot] = begin
            push(events, (begin + durations[stage][slot]) * codes + nodes + stage)
    return Run(start=start, order=order, end=now)


# --- schedules as users see them --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """What a schedule costs in the steady state."""

    period: float
    """Seconds for one iteration of every member."""
    critical: tuple[tuple[int, Action], ...]
    """(stage, action) along one cycle that makes the period; empty when no cycle is longer than every lower bound."""


def evaluate(problem: Problem, schedule: Schedule) -> Evaluation:
    """The exact period of ``schedule`` (to a tick) when every stage starts each action as soon as it may.

    Raises ``ScheduleError`` when the schedule is not complete for ``problem`` or deadlocks.
    """
    layout, orders = read(problem, schedule)
    steady = _steady(layout, orders)
    if steady is None:
        raise ScheduleError(deadlock_message(problem, schedule))
    critical = tuple(
        (node // layout.slots, layout.action(node % layout.slots, orders.offset[node]))
        for node in steady.critical
        if node < layout.stages * layout.slots
    )
    return Evaluation(steady.period * layout.tick, critical)


def read(problem: Problem, schedule: Schedule) -> tuple[Layout, Orders]:
    """``schedule`` in slots. Raises ``ScheduleError`` unless it is complete for ``problem``."""
    if len(schedule.stages) != problem.stages:
        raise ScheduleError(
            f"the schedule has {len(schedule.stages)} stages and the problem {problem.stages}; write one line per stage"
        )
    schedule.check_complete(problem.microbatches)
    layout = Layout(problem)
    orders = Orders.read(layout, schedule)
    if problem.barrier and any(orders.offset):
        raise ScheduleError("with a barrier a period runs one iteration of every member; write i0 in every action")
    return layout, orders


def _steady(layout: Layout, orders: Orders) -> Steady | None:
    slots = layout.slots
    times = [0] * (layout.stages * slots)
    for stage, order in enumerate(orders.order):
        for place, slot in enumerate(order):
            times[stage * slots + slot] = place
    graph = Graph(layout, orders)
    return solve(graph, 0, graph.sequence(times))


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """One action that ran, in seconds from the beginning."""

    stage: int
    action: Action
    start: float
    end: float


def timeline(problem: Problem, schedule: Schedule, iterations: int) -> list[Bar]:
    """Play ``iterations`` iterations from an empty pipeline, each action as soon as its stage's order and data allow.

    Bars come in an order in which every bar follows those it waited for. Raises ``ScheduleError`` for a deadlock.
    """
    layout, _ = read(problem, schedule)
    orders = [list(schedule.unrolled(stage, iterations)) for stage in range(problem.stages)]
    bars, _ = _play(layout, orders)
    if len(bars) < sum(map(len, orders)):
        raise ScheduleError(deadlock_message(problem, schedule))
    return bars


def _play(layout: Layout, orders: list[list[Action]]) -> tuple[list[Bar], list[int]]:
    """Run finite orders until nothing can go on; the bars, and per stage how many of its actions ran."""
    stages, tick = layout.stages, layout.tick
    last = stages - 1
    place = [0] * stages
    free = [0] * stages
    previous = [-1] * stages
    sent = [[0] * stages, [0] * stages]  # when the last message was through, down and up
    arrived: list[dict[Action, int]] = [{} for _ in range(stages)]
    barrier, left = 0, sum(2 * m + 1 for m in layout.problem.microbatches) * stages
    ended, iteration_end = [left] * (1 + max((a.iteration for order in orders for a in order), default=0)), [0]
    bars: list[Bar] = []
    moved = True
    while moved:
        moved = False
        for stage in range(stages):
            while place[stage] < len(orders[stage]):
                action = orders[stage][place[stage]]
                needs_message = (action.kind is Kind.FORWARD and stage > 0) or (
                    action.kind is Kind.BACKWARD and stage < last
                )
                if needs_message and action not in arrived[stage]:
                    break
                if layout.problem.barrier and action.iteration > barrier:
                    break
                begin = max(free[stage], arrived[stage].pop(action, 0))
                if layout.problem.barrier:
                    begin = max(begin, iteration_end[action.iteration])
                if previous[stage] not in (action.member, -1):
                    begin = max(begin, free[stage] + layout.switch)
                previous[stage] = action.member
                free[stage] = end = begin + layout.duration[stage][layout.slot(action)]
                bars.append(Bar(stage, action, begin * tick, end * tick))
                place[stage] += 1
                moved = True
                down = action.kind is Kind.FORWARD
                to = stage + 1 if down else stage - 1
                if action.kind is not Kind.STEP and 0 <= to < stages:
                    sent[down][stage] = max(end, sent[down][stage]) + layout.link
                    arrived[to][action] = sent[down][stage]
                ended[action.iteration] -= 1
                if layout.problem.barrier and ended[action.iteration] == 0:
                    barrier += 1
                    iteration_end.append(max(free))
    return bars, place


def deadlock_message(problem: Problem, schedule: Schedule) -> str:
    """The message for a schedule that hangs: who waits for what, and the table of steps."""
    layout = Layout(problem)
    spread = [action.iteration for order in schedule.stages for action in order]
    iterations = max(spread) - min(spread) + 2
    orders = [list(schedule.unrolled(stage, iterations)) for stage in range(problem.stages)]
    _, place = _play(layout, orders)
    rows = [[str(action) for action in order] for order in orders]
    waits = []
    for stage, at in enumerate(place):
        if at < len(orders[stage]):
            action = orders[stage][at]
            waits.append(f"stage {stage} waits for {action} from stage {_sender(action.kind, stage)}")
    return f"the schedule deadlocks: {'; '.join(waits)}; let one of these run earlier\n{step_table(rows, place)}"


def _sender(kind: Kind, stage: int) -> int:
    """Which stage an action's data come from."""
    return stage + {Kind.FORWARD: -1, Kind.BACKWARD: 1, Kind.STEP: 0}[kind]


def step_table(rows: list[list[str]], blocked: list[int], context: int = 4) -> str:
    """A step x stage table around the ``blocked`` places (per stage), which are marked with ``>``."""
    stuck = [at for at, row in zip(blocked, rows, strict=True) if at < len(row)]
    first = max(0, min(stuck, default=0) - context)
    last = max(stuck, default=0) + context
    width = max([len(cell) for row in rows for cell in row] + [len("stage 00")]) + 2
    lines = ["step  " + "".join(f" stage {stage}".ljust(width) for stage in range(len(rows))).rstrip()]
    for step in range(first, last + 1):
        cells = [
            ((">" if at == step and step < len(row) else " ") + (row[step] if step < len(row) else "")).ljust(width)
            for row, at in zip(rows, blocked, strict=True)
        ]
        if any(cell.strip() for cell in cells):
            lines.append(f"{step:4}  " + "".join(cells).rstrip())
    return "\n".join(lines)
