"""The scheduler for arrays of any size: simulate the engine's rule under many priorities, keep the best, improve it.

Pure: no I/O, no torch, no clock: the work is counted, so the same problem gives the same schedule everywhere.
``stream`` first plays the engine's own rule; where that misses the lower bound it tries tighter caps, members started
in even phases of the period, and priorities by due date; then it exchanges neighbours on the critical cycle.
Every candidate becomes one cyclic order, is checked against the memory in every prefix, and gets its exact period.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from itertools import pairwise

from slurm_jap.problem import Bound, Problem, lower_bound
from slurm_jap.schedule import Kind, Schedule
from slurm_jap.simulate import Graph, Layout, Orders, Rule, Steady, fits, run_rule, solve


@dataclasses.dataclass(frozen=True, slots=True)
class Solution:
    """A schedule and what is known of its quality."""

    schedule: Schedule
    period: float
    """Seconds."""
    bound: Bound
    """The lower bounds of ``problem.lower_bound``, seconds."""
    lower: float
    """The best proven lower bound, seconds: ``bound.period``, or more where the exact scheduler proved more."""
    method: str
    """What found the schedule."""
    note: str | None = None
    """One line for the user, when another method was asked for than was used."""

    @property
    def gap(self) -> float:
        """How far the period may be above the optimum, as a share of the proven lower bound."""
        return self.period / self.lower - 1.0 if self.lower > 0 else 0.0

    @property
    def optimal(self) -> bool:
        """Whether nothing better exists, to the resolution of the simulation's tick."""
        return self.gap < 2e-5


@dataclasses.dataclass(slots=True)
class Candidate:
    """One schedule on the way, in ticks."""

    orders: Orders
    steady: Steady
    method: str

    @property
    def period(self) -> int:
        """Ticks."""
        return self.steady.period


DEFAULT_WORK = 400_000
"""Actions simulated, and quarters of relaxations: about 0.4 s of one core."""


def stream(problem: Problem, *, work: int = DEFAULT_WORK, seed: int = 0) -> Solution:
    """Schedule ``problem`` with at most about ``work`` simulated actions; at least the engine's rule is played once."""
    search = Search(problem, work, seed)
    best = search.run()
    tick = search.layout.tick
    bound = lower_bound(problem)
    return Solution(
        schedule=best.orders.schedule(search.layout),
        period=max(best.period * tick, bound.period) if best.period <= search.floor else best.period * tick,
        bound=bound,
        lower=bound.period,
        method=best.method,
    )


class Search:
    """The portfolio and the local search over one problem."""

    def __init__(self, problem: Problem, work: int, seed: int) -> None:
        self.layout = Layout(problem)
        self.floor = math.ceil(lower_bound(self.layout.problem).period)
        self.left = work
        self.random = random.Random(seed)
        self.best: Candidate | None = None
        self.pool: list[Candidate] = []
        """The best few, worst last."""

    def run(self) -> Candidate:
        """Search until the bound is met or the work is spent."""
        budget = self.left
        for method, rule in self.rules():
            self.play(method, rule)
            # Half of the work is the local search's, once there is something to improve.
            if self.done or (self.best is not None and self.left < budget // 2):
                break
        for candidate in list(self.pool):
            if self.done:
                break
            self.improve(candidate)
        assert self.best is not None
        return self.best

    @property
    def done(self) -> bool:
        """Nothing left to gain or to spend."""
        return self.best is not None and (self.best.period <= self.floor or self.left <= 0)

    # --- the portfolio ----------------------------------------------------------------------------------------------

    def rules(self) -> Iterator[tuple[str, Rule]]:
        """The priorities to play, the most promising first."""
        layout = self.layout
        members = len(layout.problem.members)
        plain = plain_rule(layout)
        yield "rule", plain
        caps = self.cap_choices()
        for name, choice in caps[1:]:
            yield f"rule, {name}", dataclasses.replace(plain, caps=choice)
        templates = _Templates(layout)
        even = [index / members for index in range(members)]
        for slack in (1.0, 1.02, 1.05, 1.1):
            for late in (False, True):
                for paced in (True, False):
                    for name, choice in caps:
                        way = f"{'late' if late else 'early'}, {'paced' if paced else 'free'}, {slack}"
                        rule = self.due_rule(templates, even, slack, late, paced, True, choice)
                        yield f"due dates, {name}, {way}", rule
        while True:
            phases = [(share + self.random.uniform(-0.5, 0.5) / members) % 1.0 for share in even]
            name, choice = self.random.choice(caps)
            yield (
                f"due dates, {name}, random phases",
                self.due_rule(
                    templates, phases, self.random.uniform(1.0, 1.1), self.random.random() < 0.5,
                    self.random.random() < 0.5, self.random.random() < 0.7, choice,
                ),
            )

    def cap_choices(self) -> list[tuple[str, list[int]]]:
        """The problem's caps and tighter ones: holding fewer micro-batches keeps members apart."""
        layout = self.layout
        total = sum(layout.problem.microbatches)
        full = list(layout.problem.caps or [total] * layout.stages)
        choices = [("full caps", full)]
        for factor in (1.0, 1.5, 1.25, 2.0):
            tight = [min(cap, math.ceil(factor * (layout.stages - stage))) for stage, cap in enumerate(full)]
            if tight not in [choice for _, choice in choices]:
                choices.append((f"caps {factor:g}x", tight))
        return choices

    def due_rule(
        self, templates: _Templates, phases: list[float], slack: float, late: bool, paced: bool, merged: bool,
        caps: list[int],
    ) -> Rule:
        """Priority by when the member, started at its phase, would do the action if it were alone."""
        pace = math.ceil(self.floor * slack)
        shift = [round(share * pace) for share in phases]
        rank = templates.ranks(shift, late)
        return Rule(
            rank=rank, weight=pace * _TIES, caps=caps, merged=merged, phase=shift if paced else None,
            pace=pace if paced else 0,
        )

    def play(self, method: str, rule: Rule) -> None:
        """Simulate ``rule``, cut one period out of its steady state, and judge it."""
        layout = self.layout
        actions = layout.stages * layout.slots
        if layout.problem.barrier:
            run = run_rule(layout, rule, 1)
            self.left -= actions
            self.judge(method, run.start[0], run.end + 1)
            return
        iterations = 6 if actions <= 4000 else 4
        run = run_rule(layout, rule, iterations)
        self.left -= iterations * actions
        start, following = run.start[iterations - 2], run.start[iterations - 1]
        # At this period no member's next iteration begins before its own step on any stage.
        period = max(
            following[stage * layout.slots + base] - start[stage * layout.slots + base]
            for stage in range(layout.stages)
            for base in layout.base
        )
        self.judge(method, start, max(1, period))

    def judge(self, method: str, start: list[int], period: int) -> None:
        """Make a cyclic order of ``start`` and keep it if it is legal and among the best."""
        orders = Orders.by_start(self.layout, start, period)
        if not all(fits(self.layout, orders, stage) for stage in range(self.layout.stages)):
            return
        times = [time % period for time in start]
        worst = self.pool[-1].period if len(self.pool) == _POOL else None
        steady = self.steady(orders, times, self.floor, worst)
        if steady is not None:
            self.keep(Candidate(orders, steady, method))

    def steady(self, orders: Orders, times: list[int], floor: int, give_up: int | None) -> Steady | None:
        """``solve``, counted as work. ``times`` is any guess of each node's start."""
        graph = Graph(self.layout, orders)
        steady = solve(graph, floor, graph.sequence(times), give_up)
        self.left -= graph.relaxed // 4
        return steady

    def keep(self, candidate: Candidate) -> None:
        """Enter ``candidate`` into the pool."""
        self.pool.append(candidate)
        self.pool.sort(key=lambda kept: kept.period)
        del self.pool[_POOL:]
        self.best = self.pool[0]

    # --- local search -----------------------------------------------------------------------------------------------

    def improve(self, candidate: Candidate) -> None:
        """Exchange neighbours along the critical cycle, taking the best exchange even if it is worse (tabu search)."""
        layout = self.layout
        orders = Orders([list(order) for order in candidate.orders.order], list(candidate.orders.offset))
        steady = candidate.steady
        forbidden: dict[tuple[int, int], int] = {}
        stale = 0
        for move in range(10_000):
            if self.done or stale > 40 or not steady.critical:
                return
            assert self.best is not None
            choice: tuple[Steady, int, int, int, int] | None = None
            pairs = list(self.exchanges(orders, steady.critical))
            self.random.shuffle(pairs)
            for stage, place, earlier, later in pairs:
                limit = steady.period * 103 // 100
                if choice is not None:
                    limit = choice[0].period - 1
                if forbidden.get((earlier, later), -1) > move:
                    limit = self.best.period - 1
                exchange(layout, orders, stage, place)
                found = None
                if fits(layout, orders, stage):
                    found = self.steady(orders, steady.start, self.floor, limit)
                exchange(layout, orders, stage, place)
                if found is not None:
                    choice = found, stage, place, earlier, later
                    if found.period < steady.period:
                        break
                if self.left <= 0:
                    break
            if choice is None:
                return
            steady, stage, place, earlier, later = choice
            exchange(layout, orders, stage, place)
            forbidden[later, earlier] = move + self.random.randint(5, 15)
            stale += 1
            if steady.period < self.best.period:
                stale = 0
                method = f"{candidate.method}, exchanges" if "exchanges" not in candidate.method else candidate.method
                kept = Orders([list(order) for order in orders.order], list(orders.offset))
                self.keep(Candidate(kept, steady, method))

    def exchanges(self, orders: Orders, critical: list[int]) -> Iterator[tuple[int, int, int, int]]:
        """Neighbours on a stage, joined by the critical cycle, whose order a member leaves open.

        Yields the stage, the place of the earlier in its order, and the two nodes.
        """
        layout = self.layout
        slots = layout.slots
        places: dict[int, dict[int, int]] = {}
        for earlier, later in zip(critical, critical[1:] + critical[:1], strict=True):
            stage, slot = divmod(earlier, slots)
            if stage >= layout.stages or later // slots != stage:
                continue
            if stage not in places:
                places[stage] = {slot: place for place, slot in enumerate(orders.order[stage])}
            place = places[stage][slot]
            if layout.problem.barrier and place + 1 == slots:
                continue
            if orders.order[stage][(place + 1) % slots] == later % slots and self.free(slot, later % slots):
                yield stage, place, earlier, later

    def free(self, slot: int, other: int) -> bool:
        """Whether two slots of a stage may be exchanged when they are neighbours."""
        layout = self.layout
        if layout.member[slot] != layout.member[other]:
            return True
        kinds = {layout.kind[slot], layout.kind[other]}
        return kinds == {Kind.FORWARD, Kind.BACKWARD} and layout.microbatch[slot] != layout.microbatch[other]


_POOL = 4
_TIES = 1 << 12
"""Room, below the due date, for the order of actions that are due together."""


def plain_rule(layout: Layout) -> Rule:
    """The engine's rule: the smallest (iteration, member, micro-batch), within the problem's caps."""
    rank = [0] * layout.slots
    ordered = sorted(range(layout.slots), key=lambda slot: (layout.member[slot], layout.microbatch[slot]))
    for place, slot in enumerate(ordered):
        rank[slot] = place
    return Rule(rank=[rank] * layout.stages, weight=layout.slots)


def exchange(layout: Layout, orders: Orders, stage: int, place: int) -> None:
    """Exchange the action at ``place`` of ``stage`` with the next one; doing it twice restores the orders."""
    order = orders.order[stage]
    following = (place + 1) % len(order)
    one, two = order[place], order[following]
    order[place], order[following] = two, one
    if following == 0:
        # Across the end of the period: each moves to the other's period, one later, one earlier.
        orders.offset[stage * layout.slots + two] += 1
        orders.offset[stage * layout.slots + one] -= 1


class _Templates:
    """When each member would do each action if it were alone: earliest, and latest without delaying its step."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.known: dict[object, tuple[list[list[int]], list[list[int]]]] = {}
        for index, member in enumerate(layout.problem.members):
            if member not in self.known:
                self.known[member] = self.alone(index)

    def alone(self, index: int) -> tuple[list[list[int]], list[list[int]]]:
        """Per stage and slot of the member: earliest and latest start."""
        layout = self.layout
        single = layout.alone(index)
        run = run_rule(single, plain_rule(single), 1)
        slots = single.slots
        late = [run.end] * (single.stages * slots)
        follower = [-1] * (single.stages * slots)
        for stage, order in enumerate(run.order):
            for slot, following in pairwise(order):
                follower[stage * slots + slot] = stage * slots + following
        for node in sorted(range(len(late)), key=lambda node: -run.start[0][node]):
            stage, slot = divmod(node, slots)
            kind, duration = single.kind[slot], single.duration[stage][slot]
            latest = run.end - duration
            if follower[node] >= 0:
                latest = min(latest, late[follower[node]] - duration)
            if kind is Kind.FORWARD and stage + 1 < single.stages:
                latest = min(latest, late[node + slots] - duration - single.link)
            if kind is Kind.BACKWARD and stage:
                latest = min(latest, late[node - slots] - duration - single.link)
            late[node] = latest
        early = run.start[0]
        cut = range(0, len(late), slots)
        return [early[i : i + slots] for i in cut], [late[i : i + slots] for i in cut]

    def ranks(self, shift: list[int], late: bool) -> list[list[int]]:
        """Per stage and slot, the due date with each member's template ``shift``ed, ties by micro-batch."""
        rows: list[list[int]] = []
        for stage in range(self.layout.stages):
            row: list[int] = []
            for index, member in enumerate(self.layout.problem.members):
                template = self.known[member][late][stage]
                # Strictly ascending within a kind, whatever the template's ties.
                row += [
                    (shift[index] + due) * _TIES + self.layout.microbatch[len(row) + place]
                    for place, due in enumerate(template)
                ]
            rows.append(row)
        return rows
