"""The numbering of a problem's actions that every simulation and search works with.

Pure: no I/O, no torch. Times are whole ticks (``problem.in_ticks``). An action of a stage is a number, its *slot*: for
each member in turn M forwards, M backwards, one step. A *node* is ``stage * slots + slot``.
"""

from __future__ import annotations

from slurm_jap.problem import Problem, in_ticks, scaled
from slurm_jap.schedule import Action, Kind


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
