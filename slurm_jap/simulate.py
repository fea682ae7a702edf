"""Runs schedules without processes: the engine's rule, the period of a schedule, and whether blocking sends hang it.

Pure: no I/O, no torch. ``run_rule`` plays the engine's rule (or another priority) event by event; ``evaluate`` gives
the exact period of a ``Schedule`` as the largest cycle ratio of its event graph; ``timeline`` lays its actions out in
time; ``validate`` proves a schedule complete, inside its memory in every prefix, and free of deadlock even where a
send blocks until it is received.

Inside this module and ``stream`` a problem is in whole ticks (``problem.in_ticks``), and an action of a stage is a
number, its *slot*: for each member in turn M forwards, M backwards, one step. A *node* is ``stage * slots + slot``.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import NamedTuple

from slurm_jap.problem import Problem, in_ticks, scaled
from slurm_jap.schedule import Action, Kind, Schedule, ScheduleError


class Layout:
    """The numbering of a problem's actions, and their times in ticks. Built once, read by every simulation."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.tick = in_ticks(problem)
        self.stages = problem.stages
        self.kind: list[Kind] = []
        self.member: list[int] = []
        self.microbatch: list[int] = []
        self.base: list[int] = []
        for member, count in enumerate(problem.microbatches):
            self.base.append(len(self.kind))
            for kind, many in ((Kind.FORWARD, count), (Kind.BACKWARD, count), (Kind.STEP, 1)):
                self.kind += [kind] * many
                self.member += [member] * many
                self.microbatch += range(many)
        self.slots = len(self.kind)
        self.duration: list[list[int]] = [self._durations(stage) for stage in range(self.stages)]
        self.link = int(self.problem.link)
        self.switch = int(self.problem.switch)

    def _durations(self, stage: int) -> list[int]:
        durations: list[int] = []
        for member in self.problem.members:
            durations += [int(member.forward[stage])] * member.microbatches
            durations += [int(member.backward[stage])] * member.microbatches
            durations.append(int(member.step[stage]))
        return durations

    def alone(self, index: int) -> Layout:
        """The layout of one member by itself, in the same ticks."""
        single = Layout.__new__(Layout)
        single.problem, single.tick, single.stages = self.problem.alone(index), self.tick, self.stages
        first = self.base[index]
        last = first + 2 * self.problem.members[index].microbatches + 1
        single.kind, single.microbatch = self.kind[first:last], self.microbatch[first:last]
        single.member, single.base, single.slots = [0] * (last - first), [0], last - first
        single.duration = [row[first:last] for row in self.duration]
        single.link, single.switch = self.link, self.switch
        return single

    def divided(self, unit: int) -> Layout:
        """The same layout with every time divided by ``unit``, which divides them all."""
        other = Layout.__new__(Layout)
        other.__dict__.update(self.__dict__)
        other.problem = scaled(self.problem, 1 / unit)
        other.duration = [[time // unit for time in times] for times in self.duration]
        other.link, other.switch, other.tick = self.link // unit, self.switch // unit, self.tick * unit
        return other

    def slot(self, action: Action) -> int:
        """The slot of ``action``."""
        count = self.problem.members[action.member].microbatches
        shift = {Kind.FORWARD: 0, Kind.BACKWARD: count, Kind.STEP: 2 * count}[action.kind]
        return self.base[action.member] + shift + action.microbatch

    def action(self, slot: int, iteration: int = 0) -> Action:
        """The action of ``slot``."""
        return Action(self.kind[slot], iteration, self.member[slot], self.microbatch[slot])

    @property
    def links_queue(self) -> bool:
        """Whether a message can find its link busy: only if some stage can send faster than the link takes them."""
        members = self.problem.members
        sends = [m.forward[s] for m in members for s in range(self.stages - 1)]
        sends += [m.backward[s] for m in members for s in range(1, self.stages)]
        return any(time < self.link for time in sends)


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


# --- the period of a schedule ---------------------------------------------------------------------------------------


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
    layout, orders = _read(problem, schedule)
    steady = _steady(layout, orders)
    if steady is None:
        raise ScheduleError(_deadlock(problem, schedule))
    critical = tuple(
        (node // layout.slots, layout.action(node % layout.slots, orders.offset[node]))
        for node in steady.critical
        if node < layout.stages * layout.slots
    )
    return Evaluation(steady.period * layout.tick, critical)


def _read(problem: Problem, schedule: Schedule) -> tuple[Layout, Orders]:
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


def deadlocks(layout: Layout, orders: Orders) -> bool:
    """Whether some actions wait for each other for ever, whatever the times are."""
    graph = Graph(layout, orders)
    nodes = range(graph.size)
    graph.before_weight = [int(graph.before[node] != node) for node in nodes]
    graph.data_weight = [int(graph.data[node] != node) for node in nodes]
    return solve(graph, 1, nodes) is None


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
    layout, _ = _read(problem, schedule)
    orders = [list(schedule.unrolled(stage, iterations)) for stage in range(problem.stages)]
    bars, _ = _play(layout, orders)
    if len(bars) < sum(map(len, orders)):
        raise ScheduleError(_deadlock(problem, schedule))
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


def _deadlock(problem: Problem, schedule: Schedule) -> str:
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


# --- blocking sends ---------------------------------------------------------------------------------------------------


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
    layout, orders = _read(problem, schedule)
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
        raise ScheduleError(_deadlock(problem, schedule))
    spread = max(orders.offset) - min(orders.offset)
    run_blocking(programs(problem, schedule, spread + 2))
