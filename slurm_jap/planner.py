"""From what one member asks for and what is known of its network to the allocation of the coalesced job.

Pure: no I/O, no torch; fast enough for a login node. ``choose`` looks at pipelines of S stages, G of them side by side,
predicts what one iteration of every member takes (the engine's rule, simulated) and what each device must hold, sizes
the job (``resources.plan``) and picks by the goal:

* ``throughput``  the fastest on the GPUs that one member asks for; on more only where fewer gain nothing, hold too
                  little, or take longer than the partition allows
* ``finish``      the fastest on at most the GPUs that all members at once ask for
* ``gpu-hours``   the fewest GPU-hours, on at most the GPUs that all members at once ask for

Predictions within ``ALIKE`` of each other count as equal; then fewer GPUs win, then fewer stages. "Alone" is what the
plain array would do: one member on a pipeline of as many stages as it asks for GPUs.

``Unclear`` is raised where nothing fits or nothing is gained: the array stays a plain one, and the message says why.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from slurm_jap import resources
from slurm_jap.cut import cut
from slurm_jap.jap_options import FINISH, GPU_HOURS, THROUGHPUT, JapOptions
from slurm_jap.problem import Bound, MemberCost, Problem, lower_bound
from slurm_jap.profile import Profile
from slurm_jap.resources import Limits, MemberRequest, Request, Unclear
from slurm_jap.schedule import activation_cap
from slurm_jap.simulate import Layout, run_rule
from slurm_jap.stream import plain_rule

ALIKE = 0.02
"""Predictions that differ by less count as equal."""
MOST_STAGES = 64
MOST_SIMULATED = 12
"""Candidates that are simulated; of the others only the bound is known."""
ACTIONS = 40_000
"""About as many actions are simulated of one candidate: 0.2 s."""
MARGIN_MEASURED = 1.25
MARGIN_ESTIMATED = 1.5
"""Time limit over prediction."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What no profile tells."""

    link_latency: float = 50e-6
    """Seconds before an activation starts to arrive."""
    accelerator_link: float = 10e9
    """Bytes a second between two stages on accelerators."""
    host_link: float = 1e9
    """Bytes a second between two stages on CPUs."""
    device_reserve: float = 0.1
    """Share of an accelerator's memory for its context, workspaces and fragments."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The networks of an array's members."""

    profiles: tuple[Profile, ...]
    """Distinct ones."""
    of_member: tuple[int, ...]
    """Per member, by position, which of ``profiles`` is its own."""
    same_arguments: bool = True
    """Whether the script had the same arguments then: others may make another network of it."""
    notes: tuple[str, ...] = ()

    @property
    def measured(self) -> bool:
        """Whether all times are seconds."""
        return all(profile.measured for profile in self.profiles)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One pair (groups, stages), and what became of it."""

    groups: int
    stages: int
    members_per_group: int
    """Of the fullest group, at once."""
    at_once: int
    """Of all groups."""
    period: float
    """Seconds (in an estimate: a measure of work) of one iteration of every member of the fullest group at once."""
    simulated: bool
    """Whether ``period`` is a simulation of the engine's rule; else the bound stands in for it."""
    bound: Bound
    memory: int
    """Bytes that the fullest device must hold: states of its group's members, activations up to the engine's cap."""
    pace: float
    """Time until every member has done one iteration, over what one member takes alone."""
    gpu_hours: float
    """Over the plain array's on equal GPUs."""
    gpu_hours_same_memory: float | None
    """Over the plain array's on devices that hold no more than this candidate's do; None: no depth fits."""
    request: Request | None = None
    refused: str = ""
    """Why not; empty: it can be had."""
    chosen: bool = False

    @property
    def engines(self) -> int:
        """Devices."""
        return self.groups * self.stages


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was chosen, from what, and why."""

    request: Request
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    """All that were looked at, in order of engines and stages."""
    goal: str
    why: str
    alone: float
    """Seconds of one iteration of one member alone on ``alone_stages`` stages."""
    alone_stages: int
    device_limit: int | None
    """Bytes that a device may hold; None: not known."""
    measured: bool
    notes: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    """Which blocks of the first member's network lie on which stage."""
    problem: Problem
    """The fullest group, as the scheduler sees it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What earlier runs of a script left."""

    entries: Sequence[tuple[Profile, Sequence[int]]] = ()
    """Each profile with the array indices that had it, newest first."""
    same_arguments: bool = True
    """Whether the script had the same arguments then."""


def known(indices: Sequence[int], earlier: Earlier, gpus: bool) -> Known | None:
    """Match an array's members with the profiles of earlier runs; None: there are none.

    Args:
        indices: of the array.
        gpus: whether members ask for GPUs.
    """
    entries = earlier.entries
    fit = [entry for entry in entries if (entry[0].device != "cpu") == gpus]
    notes = []
    if not fit:
        if not entries:
            return None
        # Times on another device tell the ratios between blocks, no more.
        fit = [(dataclasses.replace(found, measured=False, device_bytes=None), whose) for found, whose in entries]
        notes.append(f"the profile is of {entries[0][0].device}, not of what this array asks for")
    if not earlier.same_arguments:
        notes.append("the profile is of a run with other arguments of the script")
    # Of several runs the newest on each network; a member that none knows is taken for the slowest.
    profiles: list[Profile] = []
    place: dict[int, int] = {}
    for found, whose in fit:
        if not set(whose) - place.keys() and profiles:
            continue
        profiles.append(found)
        for index in whose:
            place.setdefault(index, len(profiles) - 1)
    slowest = max(range(len(profiles)), key=lambda number: profiles[number].seconds)
    of_member = tuple(place.get(index, slowest) for index in indices)
    if any(index not in place for index in indices) and len(profiles) > 1:
        notes.append("members that no earlier run knows are taken for the slowest one")
    if len({found.measured for found in profiles}) > 1:
        profiles = [dataclasses.replace(found, measured=False) for found in profiles]
    used = sorted(set(of_member))
    return Known(
        profiles=tuple(profiles[number] for number in used),
        of_member=tuple(used.index(number) for number in of_member),
        same_arguments=earlier.same_arguments,
        notes=tuple(notes),
    )


class Model:
    """Predicts for one array; every answer is remembered."""

    def __init__(self, known: Known, assumptions: Assumptions) -> None:
        self.known, self.assumptions = known, assumptions
        self.blocks = min(profile.block_count for profile in known.profiles)
        self.ranges = functools.cache(self._ranges)
        self.cost = functools.cache(self._cost)
        self.states = functools.cache(self._states)
        self.simulated = functools.cache(self._simulated)

    def _ranges(self, number: int, stages: int) -> tuple[tuple[int, int], ...]:
        """Where profile ``number`` is cut."""
        return tuple(cut(self.known.profiles[number].costs, stages))

    def _cost(self, number: int, stages: int) -> MemberCost:
        """What a member with this profile asks of each stage."""
        profile = self.known.profiles[number]
        model, loss = profile.blocks[:-1], profile.blocks[-1]
        forward, backward, step, activation = [], [], [], []
        for stage, (first, end) in enumerate(self.ranges(number, stages)):
            mine = [*model[first:end], *([loss] if stage == stages - 1 else [])]
            forward.append(sum(block.forward for block in mine) + profile.forward_overhead)
            backward.append(sum(block.backward for block in mine) + profile.backward_overhead)
            step.append(sum(block.step for block in mine) / profile.accumulate)
            activation.append(sum(block.activation_bytes for block in mine))
        return MemberCost(
            forward=tuple(forward),
            backward=tuple(backward),
            step=tuple(step),
            microbatches=profile.microbatches,
            activation=tuple(activation),
        )

    def _states(self, number: int, stages: int) -> tuple[int, ...]:
        """Bytes of parameters, gradients and optimizer on each stage."""
        blocks = self.known.profiles[number].blocks
        sizes = [sum(block.state_bytes for block in blocks[a:b]) for a, b in self.ranges(number, stages)]
        sizes[-1] += blocks[-1].state_bytes
        return tuple(sizes)

    def link(self, number: int, stages: int) -> float:
        """Seconds of the slowest transfer between two stages; in an estimate, in its own unit, nothing."""
        profile = self.known.profiles[number]
        if stages == 1 or not profile.measured:
            return 0.0
        rate = self.assumptions.host_link if profile.device == "cpu" else self.assumptions.accelerator_link
        largest = max(profile.blocks[end - 1].output_bytes for _, end in self.ranges(number, stages)[:-1])
        return self.assumptions.link_latency + largest / rate

    def problem(self, members: Sequence[int], stages: int) -> Problem:
        """Members with these profiles on one pipeline, within the engine's own caps."""
        return Problem(
            members=tuple(self.cost(number, stages) for number in members),
            link=max(self.link(number, stages) for number in set(members)),
            caps=tuple(activation_cap(stages, stage) for stage in range(stages)),
        )

    def memory(self, members: Sequence[int], stages: int) -> int:
        """Bytes that the fullest device of such a pipeline holds."""
        held = 0
        microbatches = sum(self.known.profiles[number].microbatches for number in members)
        for stage in range(stages):
            states = sum(self.states(number, stages)[stage] for number in members)
            largest = max(self.cost(number, stages).activation[stage] for number in members)
            held = max(held, states + min(activation_cap(stages, stage), microbatches) * largest)
        return held

    def period(self, members: Sequence[int], stages: int) -> float:
        """Seconds of one iteration of each, in the steady state of the engine's rule."""
        few, share = members, 1.0
        if len(set(members)) == 1 and len(members) > 2 * stages + 2:
            # Enough to keep every stage busy: more equal ones take their time in proportion.
            few = members[: 2 * stages + 2]
            share = len(members) / len(few)
        return self.simulated(tuple(few), stages) * share

    def _simulated(self, members: tuple[int, ...], stages: int) -> float:
        problem = self.problem(members, stages)
        bound = lower_bound(problem).period
        layout = Layout(problem)
        iterations = max(4, min(12, ACTIONS // max(1, problem.actions)))
        run = run_rule(layout, plain_rule(layout), iterations)
        # From the second iteration to the last but one, so that neither filling nor draining counts.
        ends = [max(start) for start in run.start]
        return max(bound, (ends[-2] - ends[1]) / (iterations - 3) * layout.tick)


def choose(
    member: MemberRequest,
    asked: JapOptions,
    members: int,
    limits: Limits,
    known: Known,
    *,
    throttle: int | None = None,
    assumptions: Assumptions | None = None,
) -> Plan:
    """The best allocation for the goal.

    Args:
        members: K, the size of the array; ``known.of_member`` has as many places.
        throttle: members that the array allows at once.

    Raises:
        Unclear: the array is better left a plain one.
    """
    chooser = _Chooser(member, asked, members, limits, known, throttle, assumptions or Assumptions())
    return chooser.choose()


class _Chooser:
    def __init__(
        self,
        member: MemberRequest,
        asked: JapOptions,
        members: int,
        limits: Limits,
        known: Known,
        throttle: int | None,
        assumptions: Assumptions,
    ) -> None:
        self.member, self.asked, self.members, self.limits = member, asked, members, limits
        self.known, self.throttle = known, throttle
        self.model = Model(known, assumptions)
        self.at_once = min(members, throttle or members)
        self.own = max(1, member.gpus)
        self.budget = self.at_once * self.own
        """Devices that all members at once ask for."""
        self.goal = asked.goal or THROUGHPUT
        self.margin = MARGIN_MEASURED if known.measured else MARGIN_ESTIMATED
        self.alone_stages = min(self.own, self.model.blocks)
        slowest = max(range(len(known.profiles)), key=lambda number: known.profiles[number].seconds)
        self.alone = max(self.model.period([number], self.alone_stages) for number in {slowest, *known.of_member})
        self.plain_seconds = sum(self.model.period([number], self.alone_stages) for number in known.of_member)
        """Device seconds of the plain array per iteration of every member, over the GPUs of one member."""
        self.device_limit = self._device_limit(assumptions)
        self.notes: list[str] = list(known.notes)

    def _device_limit(self, assumptions: Assumptions) -> int | None:
        if self.asked.memory_per_device is not None:
            return self.asked.memory_per_device << 20
        sizes = [profile.device_bytes for profile in self.known.profiles if profile.device_bytes]
        return int(min(sizes) * (1 - assumptions.device_reserve)) if sizes and self.member.gpus else None

    # --- the candidates ---------------------------------------------------------------------------------------------

    def shapes(self) -> list[tuple[int, int]]:
        """(groups, stages) to look at."""
        asked = self.asked
        most = min(self.model.blocks, self.budget, MOST_STAGES)
        # Whoever asks for several GPUs may need them: shallower pipelines only where it is known what fits a device.
        sure = self.device_limit is not None and self.known.same_arguments
        least = 1 if sure or not self.member.gpus else self.own
        if asked.stages is not None:
            stages = [asked.stages]
        else:
            own = {self.own * depth for depth in range(1, most // self.own + 1)} if self.own > 1 else set()
            usual = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, most, *own}
            stages = sorted({s for s in usual if least <= s <= most} or {most})
        # More groups only where fewer members share one.
        sizes = {-(-self.at_once // group) for group in range(1, self.at_once + 1)}
        groups = sorted({-(-self.at_once // size) for size in sizes})
        if asked.groups is not None:
            groups = [asked.groups]
        pairs = [(g, s) for s in stages for g in groups]
        return [(g, s) for g, s in pairs if g * s <= self.budget or self.as_asked(g, s)]

    def as_asked(self, groups: int, stages: int) -> bool:
        """Whether the user said just this: then it is no more than was asked for."""
        return self.asked.stages == stages and groups == (self.asked.groups or 1)

    def fullest(self, groups: int) -> list[int]:
        """The profiles of the group that has most to do, as jap-run deals members out."""
        teams = [list(self.known.of_member[group::groups]) for group in range(min(groups, self.members))]
        seconds = [profile.seconds for profile in self.known.profiles]
        return max(teams, key=lambda team: sum(seconds[number] for number in team))

    def candidate(self, groups: int, stages: int) -> Candidate:
        """What can be told without a simulation."""
        team = self.fullest(groups)[: -(-self.at_once // groups)]
        now = team[: self.fitting(team, stages)] or team[:1]
        blank = Bound(load=0.0, path=0.0, link=0.0, memory=0.0)
        bare = Candidate(
            groups=groups, stages=stages, members_per_group=len(now), at_once=min(self.at_once, len(now) * groups),
            period=math.inf, simulated=False, bound=blank, memory=0, pace=math.inf, gpu_hours=math.inf,
            gpu_hours_same_memory=None,
        )  # fmt: skip
        if stages > self.model.blocks:
            refused = f"the model has {self.model.blocks} blocks; type --stages={self.model.blocks} or fewer"
            return dataclasses.replace(bare, refused=refused)
        bound = lower_bound(self.model.problem(now, stages))
        memory = self.model.memory(now, stages)
        found = self.timed(dataclasses.replace(bare, bound=bound, memory=memory), bound.period, False)
        if groups * stages > self.budget and not self.as_asked(groups, stages):
            asked = f"{self.at_once} members at once x {self.own}" if self.at_once > 1 else str(self.own)
            return dataclasses.replace(found, refused=f"more devices than the array asks for ({asked})")
        if self.device_limit is not None and memory > self.device_limit:
            refused = (
                "one member alone needs offload to host memory, which is not planned with: "
                f"a device would hold {in_bytes(memory)} of it, and has {in_bytes(self.device_limit)}"
            )
            return dataclasses.replace(found, refused=refused)
        return found

    def fitting(self, team: list[int], stages: int) -> int:
        """How many of them a device's memory holds at once."""
        if self.device_limit is None or stages > self.model.blocks:
            return len(team)
        low, high = 0, len(team)
        while low < high:
            middle = (low + high + 1) // 2
            if self.model.memory(team[:middle], stages) <= self.device_limit:
                low = middle
            else:
                high = middle - 1
        return low

    def timed(self, found: Candidate, period: float, simulated: bool) -> Candidate:
        """With a period, and what follows from it."""
        pace = self.pace_at(found, period, found.at_once)
        hours = found.engines * pace * self.alone / (self.own * self.plain_seconds)
        same = None
        if found.memory:
            depth = self.depth_within(found.memory)
            if depth is not None:
                plain = depth * sum(self.model.period([number], depth) for number in self.known.of_member)
                same = found.engines * pace * self.alone / plain
        return dataclasses.replace(
            found, period=period, simulated=simulated, pace=pace, gpu_hours=hours, gpu_hours_same_memory=same
        )

    def pace_at(self, found: Candidate, period: float, at_once: int) -> float:
        """Time for one iteration of all members of the fullest group, ``at_once`` in all groups, over one alone."""
        team = self.fullest(found.groups)
        now = max(1, min(len(team), -(-at_once // found.groups)))
        if now < found.members_per_group and math.isfinite(period):
            period = max(period * now / found.members_per_group, self.bound_of(found.groups, found.stages, now).path)
        return period * math.ceil(len(team) / now) / self.alone

    def bound_of(self, groups: int, stages: int, now: int) -> Bound:
        """With ``now`` members at once in the fullest group."""
        return lower_bound(self.model.problem(self.fullest(groups)[:now], stages))

    def depth_within(self, memory: int) -> int | None:
        """The fewest stages of a pipeline of one member whose devices hold no more."""
        largest = max(set(self.known.of_member), key=lambda number: self.known.profiles[number].state_bytes)
        if self.model.memory([largest], self.model.blocks) > memory:
            return None
        low, high = 1, self.model.blocks
        while low < high:
            middle = (low + high) // 2
            if self.model.memory([largest], middle) <= memory:
                high = middle
            else:
                low = middle + 1
        return low

    def sized(self, found: Candidate) -> Candidate:
        """With its job, or why there is none."""
        wish = dataclasses.replace(self.asked, stages=found.stages, groups=found.groups)
        try:
            request = resources.plan(
                self.member, wish, self.members, self.limits,
                throttle=found.at_once,
                pace=resources.Pace(functools.partial(self.pace_at, found, found.period), self.margin),
            )  # fmt: skip
        except Unclear as unclear:
            return dataclasses.replace(found, refused=str(unclear))
        return dataclasses.replace(found, request=request)

    # --- the choice -------------------------------------------------------------------------------------------------

    def merit(self, found: Candidate) -> float:
        """What the goal makes small."""
        return found.gpu_hours if self.goal == GPU_HOURS else found.pace

    def choose(self) -> Plan:
        everything = {(g, s): self.candidate(g, s) for g, s in self.shapes()}
        if not everything:
            raise Unclear("no pipeline fits; give less --groups or --stages")
        best = self.search(everything)
        found = sorted(everything.values(), key=lambda c: (c.engines, c.stages))
        if best is None:
            raise Unclear(self.why_nothing(found))
        explicit = self.asked.stages is not None or self.asked.groups is not None
        if best.gpu_hours > 1 + ALIKE and not explicit and self.goal != FINISH:
            raise Unclear(
                f"nothing to gain: the best pipeline ({shape_text(best)}) is predicted to need {best.gpu_hours:.2f} "
                "times the plain array's GPU-hours"
            )
        best = dataclasses.replace(best, chosen=True)
        request = best.request
        assert request is not None
        if best.members_per_group < min(self.at_once, len(self.fullest(best.groups))) // best.groups:
            room = in_bytes(self.device_limit or 0)
            held = f"{best.members_per_group} members of a group at once, for the {room} of a device"
            request = dataclasses.replace(request, notes=(*request.notes, held))
        team = self.fullest(best.groups)[: best.members_per_group]
        return Plan(
            request=request,
            chosen=best,
            candidates=tuple(best if (c.groups, c.stages) == (best.groups, best.stages) else c for c in found),
            goal=self.goal,
            why=self.why(best, found),
            alone=self.alone,
            alone_stages=self.alone_stages,
            device_limit=self.device_limit,
            measured=self.known.measured,
            notes=tuple(self.notes),
            ranges=self.model.ranges(self.known.of_member[0], best.stages),
            problem=self.model.problem(team, best.stages),
        )

    def search(self, everything: dict[tuple[int, int], Candidate]) -> Candidate | None:
        """The preferred one, all predictions being bounds at first; it is simulated, until it stays the preferred one.

        What becomes known goes back into ``everything``.
        """
        tiers: list[int | None] = [None]
        if self.goal == THROUGHPUT:
            tiers = [*sorted({c.engines for c in everything.values() if c.engines >= self.own})] or tiers
        for shape, found in everything.items():
            if not found.refused:
                everything[shape] = self.sized(found)
        simulated = 0
        no_worse: Candidate | None = None
        best: Candidate | None = None
        for tier in tiers:
            while True:
                usable = [c for c in everything.values() if not c.refused and (tier is None or c.engines <= tier)]
                if simulated >= MOST_SIMULATED:
                    usable = [c for c in usable if c.simulated] or usable
                best = self.preferred(usable)
                if best is None or best.simulated:
                    break
                simulated += 1
                team = self.fullest(best.groups)[: best.members_per_group]
                best = self.sized(self.timed(best, self.model.period(team, best.stages), True))
                everything[best.groups, best.stages] = best
            if best is not None and (best.gpu_hours <= 1 - ALIKE or self.asked.stages or self.asked.groups):
                return best
            if best is not None and best.gpu_hours <= 1 + ALIKE:
                no_worse = no_worse or best
        return no_worse or best

    def preferred(self, usable: Sequence[Candidate]) -> Candidate | None:
        """Of those that are alike to the best, the one with the fewest devices, then the fewest stages."""
        if not usable:
            return None
        limit = min(map(self.merit, usable)) * (1 + ALIKE)
        alike = [c for c in usable if self.merit(c) <= limit]
        return min(alike, key=lambda c: (c.engines, c.stages))

    def why_nothing(self, found: Sequence[Candidate]) -> str:
        """The reason of the candidate that the first sizing rule would have taken, or else of the smallest."""
        usual = resources.shape(self.member, self.asked)
        refused = [c for c in found if c.refused]
        first = next((c for c in refused if (c.stages, c.groups) == usual), None)
        found_reason = first or refused[-1]
        others = len({c.refused for c in refused}) > 1
        more = f"; nor does any of the other {len(refused) - 1} pipelines fit" if others else ""
        return f"{shape_text(found_reason)}: {found_reason.refused}{more}"

    def why(self, best: Candidate, found: Sequence[Candidate]) -> str:
        """Why ``best`` won, in one line."""
        said = []
        if self.asked.stages is not None and self.asked.groups is not None:
            said.append("as asked for")
        elif best.stages == 1 and self.asked.stages is None:
            said.append("a member fits one device, so no pipeline can gain: 1 stage")
        if self.goal == THROUGHPUT and best.engines > self.own:
            fewer = [c for c in found if c.engines <= self.own and c.refused]
            because = f" (on {self.own}: {fewer[-1].refused})" if fewer else ""
            said.append(f"{best.engines} devices where one member asks for {self.own}{because}")
        texts = {
            THROUGHPUT: "the fastest on as many devices",
            FINISH: "the last member ends soonest",
            GPU_HOURS: "the fewest GPU-hours",
        }
        if "as asked for" not in said:
            said.append(texts[self.goal])
        said.append(f"{best.gpu_hours:.2f} of the plain array's GPU-hours")
        return "; ".join(said)


def shape_text(found: Candidate) -> str:
    """``2 groups x 4 stages``."""
    return f"{found.groups} group{'s' * (found.groups > 1)} x {found.stages} stage{'s' * (found.stages > 1)}"


def in_bytes(count: float) -> str:
    """With a binary unit: ``3.2 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def as_json(plan: Plan) -> Mapping[str, object]:
    """The plan in JSON's types: numbers that are not known are null."""

    def number(value: float | None) -> float | None:
        return None if value is None or not math.isfinite(value) else value

    rows = [
        {
            "groups": c.groups,
            "stages": c.stages,
            "devices": c.engines,
            "nodes": c.request.nodes if c.request else None,
            "members_per_group": c.members_per_group,
            "members_at_once": c.at_once,
            "seconds_per_iteration": number(c.period),
            "simulated": c.simulated,
            "bound": number(c.bound.period),
            "bound_by": c.bound.by.value,
            "bytes_per_device": c.memory,
            "pace": number(c.pace),
            "gpu_hours": number(c.gpu_hours),
            "gpu_hours_same_memory": number(c.gpu_hours_same_memory),
            "time_minutes": c.request.time_min if c.request else None,
            "refused": c.refused or None,
            "chosen": c.chosen,
        }
        for c in plan.candidates
    ]
    return {
        "goal": plan.goal,
        "why": plan.why,
        "measured": plan.measured,
        "seconds_alone": plan.alone,
        "stages_alone": plan.alone_stages,
        "bytes_of_device": plan.device_limit,
        "blocks_of_stages": [list(one) for one in plan.ranges],
        "candidates": rows,
        "notes": list(plan.notes),
    }
