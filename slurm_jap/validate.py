"""Accepts a schedule or refuses it: complete, inside its memory in every prefix, free of deadlock, also if sends block.

Pure: no I/O, no torch. ``programs`` gives every stage its sends and receives in an order that cannot hang;
``run_blocking`` runs any such programs with sends and receives that both block until they meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slurm_jap.event_graph import deadlocks, peaks
from slurm_jap.problem import Problem
from slurm_jap.schedule import Action, Kind, Schedule, ScheduleError
from slurm_jap.simulate import deadlock_message, read, step_table, timeline


class Transfer(NamedTuple):
    """One end of a message that blocks its stage until the other end is reached too."""

    sends: bool
    peer: int
    action: Action
    """What produced the payload."""

    def __str__(self) -> str:
        return f"{'SEND' if self.sends else 'RECV'}_{self.action}{'>' if self.sends else '<'}{self.peer}"


Operation = Action | Transfer


def programs(problem: Problem, schedule: Schedule, iterations: int) -> list[list[Operation]]:
    """Per stage, the actions with their sends and receives, in an order in which blocking sends cannot hang.

    The transfers take the order in which they become possible when nothing blocks. That is one order of all events, and
    every stage's program is its part of it: the first event that is still to come can always happen. A stage receives
    between two of its actions, possibly long before it needs the payload.
    """
    events: list[tuple[float, int, int, Operation]] = []
    for number, bar in enumerate(timeline(problem, schedule, iterations)):
        events.append((bar.start, 2 * number, bar.stage, bar.action))
        to = bar.stage + {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.STEP: problem.stages}[bar.action.kind]
        if 0 <= to < problem.stages:
            events.append((bar.end, 2 * number + 1, bar.stage, Transfer(True, to, bar.action)))
            events.append((bar.end, 2 * number + 1, to, Transfer(False, bar.stage, bar.action)))
    events.sort(key=lambda event: event[:2])
    rows: list[list[Operation]] = [[] for _ in range(problem.stages)]
    for _, _, stage, operation in events:
        rows[stage].append(operation)
    return rows


def run_blocking(rows: Sequence[Sequence[Operation]]) -> None:
    """Run programs whose sends and receives both block until they meet. Raises ``ScheduleError`` with the table."""
    place = [0] * len(rows)
    # What each stage holds: its own results, and what it received.
    results: list[set[Action]] = [set() for _ in rows]
    inputs: list[set[Action]] = [set() for _ in rows]
    last = len(rows) - 1
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(rows):
            while place[stage] < len(row):
                operation = row[place[stage]]
                if isinstance(operation, Action):
                    forward, backward = operation.kind is Kind.FORWARD, operation.kind is Kind.BACKWARD
                    if ((forward and stage > 0) or (backward and stage < last)) and operation not in inputs[stage]:
                        break
                    inputs[stage].discard(operation)
                    results[stage].add(operation)
                elif operation.sends:
                    peer = operation.peer
                    if operation.action not in results[stage] or place[peer] >= len(rows[peer]):
                        break
                    if rows[peer][place[peer]] != Transfer(False, stage, operation.action):
                        break
                    inputs[peer].add(operation.action)
                    place[peer] += 1
                else:
                    break  # its sender moves both
                place[stage] += 1
                moved = True
    stuck = [stage for stage, row in enumerate(rows) if place[stage] < len(row)]
    if stuck:
        waits = "; ".join(f"stage {stage} blocks in {rows[stage][place[stage]]}" for stage in stuck)
        table = step_table([[str(operation) for operation in row] for row in rows], place)
        raise ScheduleError(f"the sends block each other: {waits}; exchange a send and a receive\n{table}")


def validate(problem: Problem, schedule: Schedule) -> None:
    """Accept ``schedule`` for ``problem``, or raise ``ScheduleError``.

    Accepted means: every stage runs every action once per period in an order that training allows; no prefix of any
    stage's order holds more activations than its cap or memory; nothing deadlocks, in the endless order and whatever
    the times, nor when sends block.
    """
    layout, orders = read(problem, schedule)
    for stage in range(problem.stages):
        most, most_bytes = peaks(layout, orders, stage)
        if problem.caps is not None and most > problem.caps[stage]:
            raise ScheduleError(
                f"stage {stage} holds {most} micro-batches' activations at once, its cap is {problem.caps[stage]}; "
                f"let a backward run before a forward there"
            )
        if problem.memory is not None and most_bytes > problem.memory[stage]:
            raise ScheduleError(
                f"stage {stage} holds {most_bytes} bytes of activations at once, its limit is {problem.memory[stage]}; "
                f"let a backward run before a forward there"
            )
    if deadlocks(layout, orders):
        raise ScheduleError(deadlock_message(problem, schedule))
    spread = max(orders.offset) - min(orders.offset)
    run_blocking(programs(problem, schedule, spread + 2))
