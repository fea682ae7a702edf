"""Local search on one cyclic order: exchange neighbours on the critical cycle.

Pure: no I/O, no torch. As in job-shop scheduling only an exchange at the edge of a block (a run of actions on one stage
along the critical cycle) can shorten the period at once. Whether an exchange keeps the period below a limit is decided
locally: with starts that are feasible before it, push the exchanged actions and their followers later; the limit is
exceeded exactly when that comes back to the action that was put first. So most exchanges cost a few steps, and only
those that are taken cost a new solution of the whole graph.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from slurm_jap.event_graph import Graph, Orders, Steady, solve
from slurm_jap.layout import Layout
from slurm_jap.schedule import Kind

_WORSE = (1000, 1002, 1010, 1030)
"""Limits tried in turn, in thousandths of the current period."""


class Climber:
    """One order under improvement. Starts and heights keep the naming of periods that the order began with."""

    def __init__(self, layout: Layout, orders: Orders, steady: Steady, floor: int, generator: random.Random) -> None:
        assert not layout.links_queue
        assert not layout.problem.barrier
        self.layout, self.floor, self.random = layout, floor, generator
        self.graph = Graph(layout, orders)
        self.offset = orders.offset
        self.start = list(steady.start)
        self.period = steady.period
        self.critical = steady.critical
        self.forbidden: dict[tuple[int, int], int] = {}
        self.moves = 0
        size = self.graph.size
        self.after = [0] * size
        for node, before in enumerate(self.graph.before):
            self.after[before] = node
        self.reader = list(range(size))
        """Who takes a node's result; itself: nobody."""
        for node, source in enumerate(self.graph.data):
            if source != node:
                self.reader[source] = node
        self.sequence = self.graph.sequence(self.start)
        self.steps = 0
        """Nodes looked at by local tests so far."""

    @property
    def relaxed(self) -> int:
        """How often a node was looked at so far, and as much again for each rebuilding of the arrays."""
        return self.steps * 6 + self.graph.relaxed

    def orders(self) -> Orders:
        """The order as it now is."""
        absolute = [start - offset * self.period for start, offset in zip(self.start, self.offset, strict=True)]
        return Orders.by_start(self.layout, absolute, self.period)

    def move(self) -> bool:
        """Make one exchange: one that does not lengthen the period if there is one, else one that does so little."""
        pairs = list(self.exchanges())
        self.random.shuffle(pairs)
        self.moves += 1
        for thousandths in _WORSE:
            limit = self.period * thousandths // 1000
            for earlier, later in pairs:
                if self.forbidden.get((earlier, later), -1) > self.moves:
                    continue
                starts = self.test(earlier, later, limit)
                if starts is not None and self.fits(earlier, later):
                    self.take(earlier, later, starts, limit)
                    return True
        return False

    def exchanges(self) -> Iterator[tuple[int, int]]:
        """Neighbours on a stage at the edge of a critical block whose order their members leave open."""
        critical, before, data = self.critical, self.graph.before, self.graph.data
        count = len(critical)
        arcs = [(critical[i - 1], critical[i]) for i in range(count)]
        by_order = [before[node] == source and data[node] != source for source, node in arcs]
        for i in range(count):
            # The arc into critical[i]; its neighbours along the cycle are those into [i - 1] and [i + 1].
            if not by_order[i] or (by_order[i - 1] and by_order[(i + 1) % count]):
                continue
            if self.open(*arcs[i]):
                yield arcs[i]

    def open(self, node: int, other: int) -> bool:
        """Whether two neighbours on a stage may be exchanged."""
        layout = self.layout
        slot, last = node % layout.slots, other % layout.slots
        if layout.member[slot] != layout.member[last]:
            return True
        kinds = {layout.kind[slot], layout.kind[last]}
        return kinds == {Kind.FORWARD, Kind.BACKWARD} and layout.microbatch[slot] != layout.microbatch[last]

    def gap(self, node: int, following: int) -> int:
        """Time from the start of ``node`` to that of its neighbour."""
        layout = self.layout
        same = layout.member[node % layout.slots] == layout.member[following % layout.slots]
        return self.graph.duration[node] + (0 if same else layout.switch)

    def arcs(self, earlier: int, later: int) -> dict[int, tuple[int, int, int]]:
        """The order's arcs after the exchange: node -> (before, weight, height)."""
        height = self.graph.before_height
        first, last = self.graph.before[earlier], self.after[later]
        between = height[later]
        new = {
            later: (first, self.gap(first, later), height[earlier] + between),
            earlier: (later, self.gap(later, earlier), -between),
        }
        if last != earlier:
            new[last] = (earlier, self.gap(earlier, last), height[last] + between)
        return new

    def test(self, earlier: int, later: int, limit: int) -> dict[int, int] | None:
        """Changed starts that are feasible at period ``limit`` after the exchange; None if there are none."""
        if self.after[later] == earlier:
            return None
        graph, start = self.graph, self.start
        before, weight, height = graph.before, graph.before_weight, graph.before_height
        data, data_weight, data_height = graph.data, graph.data_weight, graph.data_height
        new = self.arcs(earlier, later)
        changed: dict[int, int] = {}
        for node in (later, earlier):
            source, gap, back = new[node]
            begin = changed.get(source, start[source]) + gap - back * limit
            source = data[node]
            if source != node:
                begin = max(begin, start[source] + data_weight[node] - data_height[node] * limit)
            changed[node] = begin
        after, reader = self.after, self.reader
        last = after[later]
        pending = [last, reader[earlier]]
        budget = 4 * graph.size
        while pending:
            node = pending.pop()
            self.steps += 1
            budget -= 1
            if budget < 0:
                return None
            if node in new:
                source, gap, back = new[node]
            else:
                source, gap, back = before[node], weight[node], height[node]
            begin = changed.get(source, start[source]) + gap - back * limit
            source = data[node]
            by_data = changed.get(source, start[source]) + data_weight[node] - data_height[node] * limit
            if source != node and by_data > begin:
                begin = by_data
            if begin <= changed.get(node, start[node]):
                continue
            if node == later:
                return None
            changed[node] = begin
            pending.append(last if node == earlier else after[node])
            if reader[node] != node:
                pending.append(reader[node])
        return changed

    def fits(self, earlier: int, later: int) -> bool:
        """Whether the stage stays inside its memory after the exchange; only a forward put first can break it."""
        layout, problem = self.layout, self.layout.problem
        slots = layout.slots
        if problem.caps is None and problem.memory is None:
            return True
        if layout.kind[later % slots] is not Kind.FORWARD or layout.kind[earlier % slots] is not Kind.BACKWARD:
            return True
        self.steps += slots
        stage = later // slots
        sizes = [m.activation[stage] if m.activation else 0 for m in problem.members]
        # Once round the stage from the backward on: each visit is one iteration of its node.
        visits: list[int] = []
        iteration = [0] * slots
        node, periods = self.after[later], self.graph.before_height[later]
        visits = [later % slots, earlier % slots]
        iteration[earlier % slots] = self.offset[earlier]
        iteration[later % slots] = periods + self.offset[later]
        while node != earlier:
            periods += self.graph.before_height[node]
            visits.append(node % slots)
            iteration[node % slots] = periods + self.offset[node]
            node = self.after[node]
        held = held_bytes = 0
        for slot in visits:
            if layout.kind[slot] is Kind.FORWARD:
                over = iteration[slot] - iteration[slot + problem.members[layout.member[slot]].microbatches]
                held += over
                held_bytes += over * sizes[layout.member[slot]]
        for slot in visits:
            if layout.kind[slot] is Kind.FORWARD:
                held += 1
                held_bytes += sizes[layout.member[slot]]
                if problem.caps is not None and held > problem.caps[stage]:
                    return False
                if problem.memory is not None and held_bytes > problem.memory[stage]:
                    return False
            elif layout.kind[slot] is Kind.BACKWARD:
                held -= 1
                held_bytes -= sizes[layout.member[slot]]
        return True

    def take(self, earlier: int, later: int, starts: dict[int, int], limit: int) -> None:
        """Make the exchange, whose new ``starts`` are feasible at ``limit``, and find the exact period."""
        graph = self.graph
        arcs = self.arcs(earlier, later)
        for node, (source, gap, back) in arcs.items():
            graph.before[node], graph.before_weight[node], graph.before_height[node] = source, gap, back
            self.after[source] = node
        for node, begin in starts.items():
            self.start[node] = begin
        self.forbidden[later, earlier] = self.moves + self.random.randint(5, 15)
        self.sequence.sort(key=self.start.__getitem__)
        # Most moves change nothing, so ask first for one tick less than before.
        steady = solve(graph, max(self.floor, self.period - 1), self.sequence, warm=self.start)
        assert steady is not None
        if steady.period < self.period:
            steady = solve(graph, self.floor, self.sequence, warm=self.start)
            assert steady is not None
        self.period, self.start, self.critical = steady.period, steady.start, steady.critical
