"""The event graph of a schedule: who waits for whom, and the period that follows.

Pure: no I/O, no torch. ``Orders`` is a schedule in slots (see ``layout``), ``Graph`` what each of its nodes waits for,
``solve`` the largest ratio of any cycle: the time along it over the periods it spans. ``peaks`` and ``fits`` look at
what the orders hold in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from slurm_jap.layout import Layout
from slurm_jap.schedule import Kind, Schedule


@dataclasses.dataclass(slots=True)
class Orders:
    """A schedule in slots: per stage the cyclic order, per node the iteration offset."""

    order: list[list[int]]
    offset: list[int]

    @staticmethod
    def read(layout: Layout, schedule: Schedule) -> Orders:
        """From a complete ``schedule``."""
        offset = [0] * (layout.stages * layout.slots)
        order: list[list[int]] = []
        for stage, actions in enumerate(schedule.stages):
            order.append([layout.slot(action) for action in actions])
            for slot, action in zip(order[-1], actions, strict=True):
                offset[stage * layout.slots + slot] = action.iteration
        return Orders(order, offset)

    def schedule(self, layout: Layout) -> Schedule:
        """The ``Schedule`` in its normal form: each stage begins with member 0's first forward, its least offset is 0.

        With a barrier the period begins where the iteration does.
        """
        stages = []
        for stage, order in enumerate(self.order):
            offsets = [self.offset[stage * layout.slots + slot] for slot in order]
            # Slot 0 is member 0's first forward; what is before it belongs to the period after.
            first = 0 if layout.problem.barrier else order.index(0)
            rotated = [*zip(order[first:], offsets[first:], strict=True)]
            rotated += [(slot, offset + 1) for slot, offset in zip(order[:first], offsets[:first], strict=True)]
            least = min(offset for _, offset in rotated)
            stages.append(tuple(layout.action(slot, offset - least) for slot, offset in rotated))
        return Schedule(tuple(stages))

    @staticmethod
    def by_start(layout: Layout, start: Sequence[int], period: int) -> Orders:
        """Cut the endless repetition, every ``period``, of one iteration's ``start`` times into equal windows.

        When the times respect the data dependencies, within the iteration and to the next, no order can deadlock.
        """
        slots = layout.slots
        order: list[list[int]] = []
        offset = [-(time // period) for time in start]
        for stage in range(layout.stages):
            times, duration = start[stage * slots : (stage + 1) * slots], layout.duration[stage]
            # Of actions that start together all but one take no time; a member's own then follow iteration and slot.
            keys = [
                (t % period, d, -(t // period), slot) for slot, (t, d) in enumerate(zip(times, duration, strict=True))
            ]
            order.append([key[3] for key in sorted(keys)])
        return Orders(order, offset)


def peaks(layout: Layout, orders: Orders, stage: int) -> tuple[int, int]:
    """The most activations, and the most bytes of them, that ``stage`` holds after any prefix of its endless order.

    The orders decide this alone, without times: a stage runs one action at a time. A run over finitely many iterations
    leaves some pairs of forward and backward out, so it never holds more.
    """
    shift = stage * layout.slots
    counts = layout.problem.microbatches
    sizes = [m.activation[stage] if m.activation else 0 for m in layout.problem.members]
    held = held_bytes = 0
    for slot, kind in enumerate(layout.kind):
        if kind is Kind.FORWARD:
            member = layout.member[slot]
            # Begun in an earlier period, and still held when the period begins.
            over = orders.offset[shift + slot] - orders.offset[shift + slot + counts[member]]
            held += over
            held_bytes += over * sizes[member]
    most, most_bytes = held, held_bytes
    for slot in orders.order[stage]:
        kind = layout.kind[slot]
        if kind is Kind.FORWARD:
            held += 1
            held_bytes += sizes[layout.member[slot]]
            most, most_bytes = max(most, held), max(most_bytes, held_bytes)
        elif kind is Kind.BACKWARD:
            held -= 1
            held_bytes -= sizes[layout.member[slot]]
    return most, most_bytes


def fits(layout: Layout, orders: Orders, stage: int) -> bool:
    """Whether ``stage`` stays inside its cap and its memory."""
    problem = layout.problem
    if problem.caps is None and problem.memory is None:
        return True
    most, most_bytes = peaks(layout, orders, stage)
    return (problem.caps is None or most <= problem.caps[stage]) and (
        problem.memory is None or most_bytes <= problem.memory[stage]
    )


@dataclasses.dataclass(slots=True)
class Steady:
    """The steady state of an event graph: its largest cycle ratio, where it lies, and starts that attain it."""

    period: int
    """Ticks, rounded up."""
    start: list[int]
    """Per node, the earliest start in the period that its stage's order puts it in, relative to that period's begin."""
    critical: list[int]
    """Nodes of one critical cycle, in order; empty when ``floor`` rules instead."""


class Graph:
    """The event graph of ``Orders``: what each node waits for.

    Every node has at most two predecessors: the action before it on its stage, which lies ``h`` periods back with h = 1
    for the first of the period, and its data. Where links can queue, messages are nodes as well.
    """

    def __init__(self, layout: Layout, orders: Orders) -> None:
        slots, stages, link, switch = layout.slots, layout.stages, layout.link, layout.switch
        member, duration, offset = layout.member, layout.duration, orders.offset
        nodes = slots * stages
        queue = layout.links_queue
        size = nodes * 2 if queue else nodes
        # Predecessor, weight (time from start to start) and height (periods back), by order and by data; a node that
        # waits for nothing waits for itself, no time.
        self.before, self.before_weight, self.before_height = list(range(size)), [0] * size, [0] * size
        self.data, self.data_weight, self.data_height = list(range(size)), [0] * size, [0] * size
        for stage, order in enumerate(orders.order):
            shift, times = stage * slots, duration[stage]
            last = order[-1]
            height = 0 if layout.problem.barrier else 1
            if layout.problem.barrier:
                last = -1
            for slot in order:
                node = shift + slot
                if last >= 0:
                    self.before[node] = shift + last
                    self.before_weight[node] = times[last] + (switch if member[slot] != member[last] else 0)
                    self.before_height[node] = height
                height = 0
                last = slot
            for down in (True, False):
                to = stage + 1 if down else stage - 1
                if not 0 <= to < stages:
                    continue
                wanted = Kind.FORWARD if down else Kind.BACKWARD
                message, period_shift = -1, 0
                sent = [slot for slot in order if layout.kind[slot] is wanted]
                if queue and not layout.problem.barrier:
                    message, period_shift = nodes + shift + sent[-1], 1
                for slot in sent:
                    source, target = shift + slot, to * slots + slot
                    self.data_height[target] = offset[source] - offset[target]
                    if queue:
                        # A message starts when it is produced and the one before it is through.
                        carrier = nodes + source
                        self.data[carrier], self.data_weight[carrier] = source, times[slot]
                        if message >= 0:
                            self.before[carrier], self.before_weight[carrier] = message, link
                            self.before_height[carrier] = period_shift
                        self.data[target], self.data_weight[target] = carrier, link
                        message, period_shift = carrier, 0
                    else:
                        self.data[target], self.data_weight[target] = source, times[slot] + link
        self.size = size
        self.nodes = nodes
        self.barrier = layout.problem.barrier
        self.duration = [time for times in duration for time in times]
        """Per action node."""
        self.relaxed = 0
        """How often a node was looked at so far."""

    def sequence(self, times: Sequence[int]) -> list[int]:
        """The nodes in the order of ``times`` (per action node), each message after its sender."""
        ordered = sorted(range(self.nodes), key=times.__getitem__)
        if self.size == self.nodes:
            return ordered
        return [node for action in ordered for node in (action, self.nodes + action)]


def solve(
    graph: Graph, floor: int, sequence: Sequence[int], give_up: int | None = None, warm: Sequence[int] | None = None
) -> Steady | None:
    """The smallest period >= ``floor`` that the graph allows; None if it deadlocks or must exceed ``give_up``.

    Longest paths at a trial period; whenever the chosen predecessors close a cycle, that cycle needs a longer period,
    which becomes the trial. ``sequence`` is any order of the nodes, quick when close to that in time; ``warm`` is any
    guess of the starts. With a barrier the graph has no cycles, and its longest path is the period.
    """
    before, before_weight, before_height = graph.before, graph.before_weight, graph.before_height
    data, data_weight, data_height = graph.data, graph.data_weight, graph.data_height
    period = floor
    critical: list[int] = []
    start = [0] * graph.size if warm is None or graph.barrier else list(warm)
    while True:
        rows = [
            (
                node,
                before[node],
                before_weight[node] - before_height[node] * period,
                data[node],
                data_weight[node] - data_height[node] * period,
            )
            for node in sequence
        ]
        chosen = [0] * graph.size  # 0: none, 1: machine, 2: data
        cycle: list[int] = []
        rounds = 0
        while not cycle:
            changed = False
            for node, one, gap, two, other in rows:
                now = start[node]
                by_order = start[one] + gap
                by_data = start[two] + other
                if by_order > now or by_data > now:
                    changed = True
                    if by_order >= by_data:
                        start[node] = by_order
                        chosen[node] = 1
                    else:
                        start[node] = by_data
                        chosen[node] = 2
            graph.relaxed += graph.size
            if not changed:
                if graph.barrier:
                    return _longest_path(graph, start, chosen, floor, give_up)
                return Steady(period, start, critical)
            rounds += 1
            if rounds % 2 == 0:
                cycle = _chosen_cycle(graph, chosen)
        weight = sum(before_weight[n] if chosen[n] == 1 else data_weight[n] for n in cycle)
        height = sum(before_height[n] if chosen[n] == 1 else data_height[n] for n in cycle)
        if height <= 0:
            return None
        period = max(period + 1, -(-weight // height))
        critical = cycle
        if give_up is not None and period > give_up:
            return None


def _longest_path(
    graph: Graph, start: list[int], chosen: Sequence[int], floor: int, give_up: int | None
) -> Steady | None:
    """The makespan, and the chain of nodes that makes it."""
    ends = [begin + duration for begin, duration in zip(start, graph.duration, strict=False)]
    period = max(floor, *ends)
    if give_up is not None and period > give_up:
        return None
    node = ends.index(max(ends))
    critical = [node]
    while chosen[node]:
        node = graph.before[node] if chosen[node] == 1 else graph.data[node]
        critical.append(node)
    return Steady(period, start, critical[::-1])


def _chosen_cycle(graph: Graph, chosen: Sequence[int]) -> list[int]:
    """A cycle along the chosen predecessors, in the order of time, or nothing."""
    mark = [0] * graph.size
    for first in range(graph.size):
        node, walk = first, first + 1
        while chosen[node] and not mark[node]:
            mark[node] = walk
            node = graph.before[node] if chosen[node] == 1 else graph.data[node]
        if chosen[node] and mark[node] == walk:
            cycle = [node]
            other = graph.before[node] if chosen[node] == 1 else graph.data[node]
            while other != node:
                cycle.append(other)
                other = graph.before[other] if chosen[other] == 1 else graph.data[other]
            cycle.reverse()
            return cycle
        if not mark[node]:
            mark[node] = walk
    return []


def deadlocks(layout: Layout, orders: Orders) -> bool:
    """Whether some actions wait for each other for ever, whatever the times are."""
    graph = Graph(layout, orders)
    nodes = range(graph.size)
    graph.before_weight = [int(graph.before[node] != node) for node in nodes]
    graph.data_weight = [int(graph.data[node] != node) for node in nodes]
    return solve(graph, 1, nodes) is None
