"""The scheduler for small arrays: the least period, proven with OR-Tools' CP-SAT (extra ``[exact]``).

Pure but for the solver: no I/O, no torch. For a given period T the question "is there a cyclic schedule?" has a linear
model: every action starts at ``rest + T * later`` with ``rest`` in [0, T) and ``later`` 0, 1 or, for some steps, 2
(docs/scheduling.md says why that suffices). Answers are monotone in T, so a bisection between the best known schedule
and the best proven bound closes the gap from both sides until it is gone or the time is up.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import time
from typing import TYPE_CHECKING

from slurm_jap.event_graph import Graph, Orders, fits, solve
from slurm_jap.layout import Layout
from slurm_jap.problem import Problem, lower_bound
from slurm_jap.schedule import Kind
from slurm_jap.stream import THOROUGH, Solution, stream

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

MOST_ACTIONS = 2000
"""Beyond this many actions per period the model is not even built."""
RESOLUTION = 1e-4
"""Bisection ends when the gap is below this share of the period."""
FINENESS = 10_000
"""A period is at least this many of the model's units of time."""


def available() -> bool:
    """Whether OR-Tools is installed."""
    return importlib.util.find_spec("ortools") is not None


def exact(problem: Problem, *, seconds: float = 60.0, start: Solution | None = None, seed: int = 0) -> Solution:
    """The best schedule found in ``seconds``, with the best lower bound proven meanwhile.

    Begins from ``start``, by default ``stream``'s thorough answer. Without OR-Tools, or above ``MOST_ACTIONS``, that is
    the answer and ``note`` says so in one line.
    """
    found = stream(problem, work=THOROUGH, seed=seed) if start is None else start
    if found.optimal:
        return found
    if not available():
        note = "OR-Tools is not installed: used the stream scheduler; for proofs: pip install 'slurm-jap[exact]'"
        return dataclasses.replace(found, note=note)
    if problem.actions > MOST_ACTIONS:
        note = f"{problem.actions} actions per period are too many for the exact scheduler: used the stream scheduler"
        return dataclasses.replace(found, note=note)
    return _Bisection(problem, found, seconds, seed).run()


class _Bisection:
    """Narrow the gap between ``found`` and its lower bound."""

    def __init__(self, problem: Problem, found: Solution, seconds: float, seed: int) -> None:
        self.problem, self.found, self.seed = problem, found, seed
        self.deadline = time.monotonic() + seconds
        self.layout = Layout(problem)
        tick_bound = lower_bound(self.layout.problem)
        self.floor = math.ceil(tick_bound.period)
        # Smaller numbers, where the times allow them, make the solver quicker.
        times = {d for row in self.layout.duration for d in row} | {self.layout.link, self.layout.switch}
        common = math.gcd(*times)
        self.unit = max(1, common // math.ceil(common * FINENESS / self.floor)) if self.floor else 1
        while common % self.unit:
            self.unit -= 1
        self.coarse = self.layout.divided(self.unit)
        self.low = -(-self.floor // self.unit)
        """No schedule has a shorter period, in units, up to rounding."""
        self.best = round(found.period / self.layout.tick)
        """A schedule has this period, in ticks."""
        self.proven = self.floor
        """No schedule has a shorter period, in ticks."""
        self.method = found.method
        self.schedule = found.schedule

    @property
    def seconds(self) -> float:
        """What is left."""
        return self.deadline - time.monotonic()

    def run(self) -> Solution:
        """Bisect; first ask for the bound itself, which a good schedule often meets."""
        target = self.low
        patience = 4.0
        while self.seconds > 0 and self.low < self.high and self.best > self.proven * (1 + RESOLUTION):
            answer = self.decide(target, min(self.seconds, patience))
            if answer is None and self.high - target > 1 + self.high // 500:
                # Too hard within this patience: ask for less.
                target = (target + self.high) // 2
                continue
            if answer is None:
                patience *= 3
            elif answer and self.high > target:
                break  # the model lets messages overtake each other on a link, the pipeline does not
            elif not answer:
                self.low = target + 1
                self.proven = max(self.proven, target * self.unit + 1)
                assert self.proven <= self.best + 1, "the exact scheduler refuted a period that a schedule has"
            target = (self.low + self.high) // 2
        lower = max(self.found.bound.period, self.proven * self.layout.tick if self.proven > self.floor else 0.0)
        period = self.best * self.layout.tick
        return dataclasses.replace(
            self.found, schedule=self.schedule, period=max(period, lower), lower=lower, method=self.method
        )

    @property
    def high(self) -> int:
        """Asking for this many units, or more, would not better what is known."""
        return -(-self.best // self.unit)

    def decide(self, period: int, seconds: float) -> bool | None:
        """Whether a schedule with ``period`` units exists; None if that stays open. Keeps what it finds."""
        model = _Model(self.coarse, period)
        start = model.solve(seconds, self.seed)
        if start is None:
            return False if model.infeasible else None
        start = [moment * self.unit for moment in start]
        ticks = period * self.unit
        orders = Orders.by_start(self.layout, start, ticks + 1 if self.problem.barrier else ticks)
        if not all(fits(self.layout, orders, stage) for stage in range(self.layout.stages)):
            raise AssertionError("the exact scheduler's order exceeds the memory")
        graph = Graph(self.layout, orders)
        steady = solve(graph, self.floor, graph.sequence([moment % ticks for moment in start]))
        assert steady is not None
        if steady.period < self.best:
            self.best = steady.period
            self.schedule = orders.schedule(self.layout)
            self.method = "exact"
        return True


class _Model:
    """The CP-SAT model for one period, in ticks."""

    def __init__(self, layout: Layout, period: int) -> None:
        from ortools.sat.python import cp_model

        self.layout, self.period = layout, period
        self.model = cp_model.CpModel()
        self.infeasible = False
        nodes = range(layout.stages * layout.slots)
        barrier = layout.problem.barrier
        self.rest = [self.model.new_int_var(0, period if barrier else period - 1, f"rest{n}") for n in nodes]
        self.later = [self.model.new_int_var(0, 0 if barrier else self.most_later(n), f"later{n}") for n in nodes]
        self.start = [rest + period * later for rest, later in zip(self.rest, self.later, strict=True)]
        self.stages()
        self.members()
        self.memory()
        if layout.links_queue:
            self.links()
        self.symmetry()

    def most_later(self, node: int) -> int:
        """A step of a later stage only has to come before that stage's next forward, up to a period later."""
        stage, slot = divmod(node, self.layout.slots)
        return 2 if stage and self.layout.kind[slot] is Kind.STEP else 1

    def stages(self) -> None:
        """One action at a time; all of a period's fit between the stage's first start and that of the next period."""
        layout, model, period = self.layout, self.model, self.period
        for stage in range(layout.stages):
            first = model.new_int_var(0, 0 if stage == 0 or layout.problem.barrier else period - 1, f"first{stage}")
            intervals = []
            for slot, duration in enumerate(layout.duration[stage]):
                node = stage * layout.slots + slot
                model.add(self.rest[node] >= first)
                model.add(self.rest[node] + duration <= first + period)
                if duration:
                    intervals.append(model.new_fixed_size_interval_var(self.rest[node], duration, f"run{node}"))
            model.add_no_overlap(intervals)
            if layout.switch:
                self.switches(stage)

    def switches(self, stage: int) -> None:
        """The order of a stage as a circuit through a start, whose arcs between different members cost a switch."""
        layout, model = self.layout, self.model
        shift, slots = stage * layout.slots, layout.slots
        begins = [model.new_bool_var("") for _ in range(slots)]
        ends = [model.new_bool_var("") for _ in range(slots)]
        arcs: list[tuple[int, int, cp_model.IntVar]] = []
        for one, duration in enumerate(layout.duration[stage]):
            arcs += [(slots, one, begins[one]), (one, slots, ends[one])]
            for two in range(slots):
                if one == two:
                    continue
                gap = duration + (layout.switch if layout.member[one] != layout.member[two] else 0)
                follows = model.new_bool_var("")
                arcs.append((one, two, follows))
                model.add(self.rest[shift + two] >= self.rest[shift + one] + gap).only_enforce_if(follows)
                if not layout.problem.barrier:
                    around = self.rest[shift + two] + self.period >= self.rest[shift + one] + gap
                    model.add(around).only_enforce_if(ends[one], begins[two])
        model.add_circuit(arcs)

    def members(self) -> None:
        """Data, ascending micro-batches, and each next iteration after the step."""
        layout, model, link, slots = self.layout, self.model, self.layout.link, self.layout.slots
        for index, member in enumerate(layout.problem.members):
            count, base = member.microbatches, layout.base[index]
            for stage in range(layout.stages):
                forward, backward, step = (int(x[stage]) for x in (member.forward, member.backward, member.step))
                first = stage * slots + base
                below = forward + sum(
                    int(member.forward[s]) + int(member.backward[s]) + 2 * link for s in range(stage + 1, layout.stages)
                )
                for node in range(first, first + count - 1):
                    self.after(node, node + 1, forward)
                    self.after(node + count, node + count + 1, backward)
                for node in range(first, first + count):
                    self.after(node, node + count, below)
                    if stage + 1 < layout.stages:
                        self.after(node, node + slots, forward + link)
                        self.after(node + slots + count, node + count, int(member.backward[stage + 1]) + link)
                self.after(first + 2 * count - 1, first + 2 * count, backward)
                if not layout.problem.barrier:
                    model.add(self.start[first] + self.period >= self.start[first + 2 * count] + step)
            # Each member's iteration is named by the period in which stage 0 begins it.
            model.add(self.later[base] == 0)
        if not layout.problem.barrier:
            model.add(self.rest[0] == 0)

    def after(self, node: int, following: int, gap: int) -> None:
        """``following`` starts at least ``gap`` after ``node`` starts."""
        self.model.add(self.start[following] >= self.start[node] + gap)
        self.model.add(self.later[following] >= self.later[node])

    def memory(self) -> None:
        """What is held, from forward to backward; each period's twice, once as left over from the period before."""
        layout, model, period, problem = self.layout, self.model, self.period, self.layout.problem
        for stage in range(layout.stages):
            intervals: list[cp_model.IntervalVar] = []
            sizes: list[int] = []
            for slot, kind in enumerate(layout.kind):
                if kind is not Kind.FORWARD:
                    continue
                member = problem.members[layout.member[slot]]
                node = stage * layout.slots + slot
                release = node + member.microbatches
                span = model.new_int_var(0, period, f"held{node}")
                end = model.new_int_var(0, 3 * period, "")
                model.add(end == self.start[release] + int(member.backward[stage]) - period * self.later[node])
                for shift in (0,) if problem.barrier else (0, period):
                    intervals.append(model.new_interval_var(self.rest[node] + shift, span, end + shift, ""))
                    sizes.append(member.activation[stage] if member.activation else 0)
            if problem.caps is not None and problem.caps[stage] < sum(problem.microbatches):
                model.add_cumulative(intervals, [1] * len(intervals), problem.caps[stage])
            if problem.memory is not None:
                model.add_cumulative(intervals, sizes, problem.memory[stage])

    def links(self) -> None:
        """One message at a time per link and direction, where a stage can outrun its link."""
        layout, model, period, slots = self.layout, self.model, self.period, self.layout.slots
        for stage in range(layout.stages):
            for kind, to in ((Kind.FORWARD, stage + 1), (Kind.BACKWARD, stage - 1)):
                if not 0 <= to < layout.stages:
                    continue
                first = model.new_int_var(0, 0 if layout.problem.barrier else period - 1, "")
                intervals = []
                for slot in range(slots):
                    if layout.kind[slot] is not kind:
                        continue
                    node = stage * slots + slot
                    rest = model.new_int_var(0, period - 1, "")
                    later = model.new_int_var(0, 0 if layout.problem.barrier else 2, "")
                    start = rest + period * later
                    model.add(start >= self.start[node] + layout.duration[stage][slot])
                    model.add(self.start[to * slots + slot] >= start + layout.link)
                    model.add(rest >= first)
                    model.add(rest + layout.link <= first + period)
                    intervals.append(model.new_fixed_size_interval_var(rest, layout.link, ""))
                model.add_no_overlap(intervals)

    def symmetry(self) -> None:
        """Equal members begin in the order of their numbers."""
        layout = self.layout
        latest: dict[object, int] = {}
        for member, base in zip(layout.problem.members, layout.base, strict=True):
            if member in latest:
                self.model.add(self.rest[latest[member]] <= self.rest[base])
            latest[member] = base

    def solve(self, seconds: float, seed: int) -> list[int] | None:
        """The start of every node, or nothing (then ``infeasible`` says whether there is none)."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.max_time_in_seconds = max(0.01, seconds)
        status = solver.solve(self.model)
        self.infeasible = status == cp_model.INFEASIBLE
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return [
            solver.value(rest) + self.period * solver.value(later)
            for rest, later in zip(self.rest, self.later, strict=True)
        ]
