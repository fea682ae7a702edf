"""The scheduler for arrays of any size: simulate the engine's rule under many priorities, keep the best, improve it.

Pure: no I/O, no torch, no clock: the work is counted, so the same problem gives the same schedule everywhere.
``stream`` first plays the engine's own rule; where that misses the lower bound it tries tighter caps, members started
in even phases of the period, and priorities by due date; then it exchanges neighbours on the critical cycle.
Every candidate becomes one cyclic order, is checked against the memory in every prefix, and gets its exact period.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator
from itertools import pairwise

from slurm_jap.climb import Climber
from slurm_jap.event_graph import Graph, Orders, Steady, fits, solve
from slurm_jap.layout import Layout
from slurm_jap.problem import Bound, Problem, lower_bound
from slurm_jap.schedule import Kind, Schedule
from slurm_jap.simulate import Rule, run_rule


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
        """Whether nothing more than 0.015% better exists."""
        return self.gap < 1.5e-4


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


RELAXATIONS = 10
"""As many looks at a node take the time of one simulated action."""
QUICK = 200_000
"""Work of about half a second of one core: for comparing plans."""
THOROUGH = 4_000_000
"""Work of five seconds or so: for the schedule that an array then follows for hours."""


def stream(problem: Problem, *, work: int = QUICK, seed: int = 0) -> Solution:
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
        self.enough = self.floor + self.floor // 10_000
        self.left = work
        self.random = random.Random(seed)
        self.best: Candidate | None = None
        self.pool: list[Candidate] = []
        """The best few, worst last."""

    def run(self) -> Candidate:
        """Search until the bound is met or the work is spent."""
        budget = self.left
        rules = self.rules()
        climbs = not (self.layout.links_queue or self.layout.problem.barrier)
        # Some of the work finds good starts for the local search, which gets the rest.
        for number, (method, rule) in enumerate(rules):
            self.play(method, rule)
            if climbs and number == _FIRST and self.best is not None:
                self.improve(self.best)
            if self.done or (self.best is not None and (self.left < budget // 2 if climbs else number >= _MOST_RULES)):
                break
        for candidate in list(self.pool) if climbs else []:
            self.improve(candidate)
        while climbs and not self.done:
            # Everything is improved as far as it goes: begin again elsewhere.
            self.pool.clear()
            for method, rule in itertools.islice(rules, _POOL):
                self.play(method, rule)
            if self.pool:
                self.improve(self.pool[0])
        assert self.best is not None
        return self.best

    @property
    def done(self) -> bool:
        """Nothing left to gain or to spend."""
        return self.best is not None and (self.best.period <= self.enough or self.left <= 0)

    # --- the portfolio ----------------------------------------------------------------------------------------------

    def rules(self) -> Iterator[tuple[str, Rule]]:
        """The priorities to play, the most promising first."""
        layout = self.layout
        caps, orders = self.cap_choices(), self.member_orders()
        if self.left < 8 * layout.stages * layout.slots:
            orders = orders[1:] or orders  # time for one or two only: the order of numbers is rarely the best
        for name, order in orders:
            yield f"rule{name}", plain_rule(layout, order)
        for name, order in orders[:2]:
            for tight, choice in caps[1:]:
                yield f"rule{name}{tight}", dataclasses.replace(plain_rule(layout, order), caps=choice)
        plans = _Plans(layout, self.floor)
        _, full = caps[0]
        for name, order in orders[:2]:
            phases = self.phases(order)
            for slack in (1.0, 1.02, 1.01, 1.05, 1.03, 1.08):
                yield f"spaced{name}, {slack}", plans.rule(phases, slack, 1.0, full)
        for name, order in orders[:2]:
            phases = self.phases(order)
            for tight, choice in caps:
                for slack in (1.0, 1.02, 1.05):
                    for late in (False, True):
                        way = f"{name}{tight}, {'late' if late else 'early'}, {slack}"
                        yield f"due dates{way}", plans.rule(phases, slack, 0.0, choice, late=late)
                        if tight or late:
                            yield f"spaced{way}", plans.rule(phases, slack, 1.0, choice, late=late)
                    yield f"due dates{name}{tight}, free, {slack}", plans.rule(phases, slack, 0.0, choice, paced=False)
        draw = self.random
        while True:
            name, order = draw.choice(orders)
            order = list(order)
            for _ in range(draw.choice((0, 0, 1, 2))):
                one, other = draw.randrange(len(order)), draw.randrange(len(order))
                order[one], order[other] = order[other], order[one]
            tight, choice = draw.choice(caps)
            if draw.random() < 0.2:
                yield f"rule, random order{tight}", dataclasses.replace(plain_rule(layout, order), caps=choice)
                continue
            jitter = draw.choice((0.0, 0.25, 1.0)) / len(order)
            phases = [(share + draw.uniform(-0.5, 0.5) * jitter) % 1.0 for share in self.phases(order)]
            rule = plans.rule(
                phases, draw.uniform(1.0, 1.08), draw.choice((0.0, 0.5, 0.8, 1.0, 1.0)), choice,
                late=draw.random() < 0.5, paced=draw.random() < 0.8, merged=draw.random() < 0.7,
            )
            yield f"random phases{tight}", rule

    def member_orders(self) -> list[tuple[str, list[int]]]:
        """Which member comes first: by number, and where members differ so that neighbours are alike.

        A pipeline with little memory works like a queue: a small micro-batch behind a large one waits for it. Rising
        and then falling sizes keep neighbours alike all around the period.
        """
        members = self.layout.problem.members
        numbers = list(range(len(members)))
        sizes = [member.microbatches * (sum(member.forward) + sum(member.backward)) for member in members]
        rising = sorted(numbers, key=sizes.__getitem__)
        orders = [("", numbers)]
        for name, order in (
            (", rising and falling", rising[::2] + rising[1::2][::-1]),
            (", falling", rising[::-1]),
            (", rising", rising),
        ):
            if len(set(members)) > 1 and order not in [known for _, known in orders]:
                orders.append((name, order))
        return orders

    def phases(self, order: list[int]) -> list[float]:
        """Per member, where it starts in the period: after the work of those before it in ``order``."""
        members = self.layout.problem.members
        work = [
            max(m.microbatches * (f + b) + s for f, b, s in zip(m.forward, m.backward, m.step, strict=True))
            for m in members
        ]
        total = sum(work) or 1.0
        phases, done = [0.0] * len(members), 0.0
        for member in order:
            phases[member] = done / total
            done += work[member]
        return phases

    def cap_choices(self) -> list[tuple[str, list[int]]]:
        """The problem's caps and tighter ones: holding fewer micro-batches keeps members apart."""
        layout = self.layout
        total = sum(layout.problem.microbatches)
        full = list(layout.problem.caps or [total] * layout.stages)
        choices = [("", full)]
        for factor in (1.0, 1.5, 1.25, 2.0):
            tight = [min(cap, math.ceil(factor * (layout.stages - stage))) for stage, cap in enumerate(full)]
            if tight not in [choice for _, choice in choices]:
                choices.append((f", caps {factor:g}x", tight))
        return choices

    def play(self, method: str, rule: Rule) -> None:
        """Simulate ``rule``, cut one period out of its steady state, and judge it."""
        layout = self.layout
        actions = layout.stages * layout.slots
        if layout.problem.barrier:
            run = run_rule(layout, rule, 1)
            self.left -= actions
            self.judge(method, run.start[0], run.end + 1)
            return
        # The more work there is, the smaller the part of an iteration that it takes to settle.
        many = len(layout.problem.members) >= 4 * layout.stages
        iterations = 6 if actions <= 4000 else 4 if not many else 3 if actions <= 100_000 else 2
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
        self.left -= graph.relaxed // RELAXATIONS
        return steady

    def keep(self, candidate: Candidate) -> None:
        """Enter ``candidate`` into the pool."""
        if candidate.period not in [kept.period for kept in self.pool]:
            self.pool.append(candidate)
            self.pool.sort(key=lambda kept: kept.period)
            del self.pool[_POOL:]
        if self.best is None or candidate.period < self.best.period:
            self.best = candidate

    def improve(self, candidate: Candidate) -> None:
        """Exchange neighbours until that has not helped for a while."""
        if self.done:
            return
        climber = Climber(self.layout, candidate.orders, candidate.steady, self.floor, self.random)
        best, idle, spent = climber.period, 0, 0
        while not self.done and idle < _PATIENCE:
            moved = climber.move()
            self.left -= (climber.relaxed - spent) // RELAXATIONS + 1
            spent = climber.relaxed
            if not moved:
                break
            idle += 1
            if climber.period < best:
                best, idle = climber.period, 0
                if self.best is None or best < self.best.period:
                    method = candidate.method.removesuffix(_EXCHANGED) + _EXCHANGED
                    steady = Steady(best, list(climber.start), list(climber.critical))
                    self.best = Candidate(climber.orders(), steady, method)


_POOL = 6
_FIRST = 7
"""Rules played before the first local search."""
_MOST_RULES = 60
"""Rules played where there is no local search: with a barrier, and where links queue."""
_PATIENCE = 60
_EXCHANGED = ", exchanges"
_TIES = 1 << 12
"""Room, below the due date, for the order of actions that are due together."""


def plain_rule(layout: Layout, order: list[int] | None = None) -> Rule:
    """The engine's rule: the smallest (iteration, member, micro-batch), within the problem's caps.

    ``order`` takes the members in another order than that of their numbers.
    """
    place = list(range(len(layout.problem.members)))
    for position, member in enumerate(order or []):
        place[member] = position
    rank = [0] * layout.slots
    ordered = sorted(range(layout.slots), key=lambda slot: (place[layout.member[slot]], layout.microbatch[slot]))
    for position, slot in enumerate(ordered):
        rank[slot] = position
    return Rule(rank=[rank] * layout.stages, weight=layout.slots)


class _Plans:
    """Priorities by when each member would do each action if it were alone, started at its phase of the period.

    A member that waits for nobody takes its path bound. Several do so at once when they start in even phases and each
    sends its micro-batches *spaced*, one per (F + B) of its slowest stage, rather than all at once: going down, the
    forwards then leave gaps of just the length of a backward, and members that cross fit into each other's gaps.
    """

    def __init__(self, layout: Layout, floor: int) -> None:
        self.layout, self.floor = layout, floor
        self.gaps: dict[tuple[int, int], int] = {}
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

    def rule(
        self, phases: list[float], slack: float, spaced: float, caps: list[int], *, late: bool = False,
        paced: bool = True, merged: bool = True,
    ) -> Rule:
        """Members start at ``phases`` (shares of a period that is ``slack`` times the bound).

        ``spaced`` is 0 for micro-batches all at once, 1 for as far apart as the period allows. ``late`` takes the
        latest dates that do not delay the member's step, ``paced`` makes stage 0 wait for the phase.
        """
        pace = math.ceil(self.floor * slack)
        shift = [round(share * pace) for share in phases]
        return Rule(
            rank=self.ranks(shift, late),
            weight=pace * _TIES,
            caps=caps,
            merged=merged,
            phase=shift if paced else None,
            pace=pace if paced else 0,
            spacing=[round(self.spacing(index, pace) * spaced) for index in range(len(phases))] if paced else None,
        )

    def spacing(self, index: int, pace: int) -> int:
        """The slowest stage's F + B, and beyond it what the period leaves, shared between the micro-batches."""
        member = self.layout.problem.members[index]
        if (index, pace) not in self.gaps:
            slowest = int(max(f + b for f, b in zip(member.forward, member.backward, strict=True)))
            spare = max(0, pace - int(lower_bound(self.layout.problem.alone(index)).path))
            widest = slowest * 13 // 10
            self.gaps[index, pace] = min(widest, slowest + spare // max(1, member.microbatches - 1))
        return self.gaps[index, pace]

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
