"""No accepted schedule hangs, also where a send blocks until it is received; and what hangs is refused."""

from __future__ import annotations

import itertools
import random

import pytest
from unit import schedule_reference as reference

from slurm_jap.problem import Problem, caps_of, uniform
from slurm_jap.schedule import Action, Kind, Schedule, ScheduleError
from slurm_jap.stream import stream
from slurm_jap.validate import Operation, Transfer, programs, run_blocking, validate


def rendezvous(rows: list[list[Operation]], seed: int) -> list[int]:
    """Where each stage ends up when stages are picked at random and a message passes only if both ends are at it."""
    draw = random.Random(seed)
    place = [0] * len(rows)
    done: list[set[Action]] = [set() for _ in rows]
    got: list[set[Action]] = [set() for _ in rows]
    idle = 0
    while idle < 4 * len(rows) ** 2:
        stage = draw.randrange(len(rows))
        idle += 1
        if place[stage] == len(rows[stage]):
            continue
        operation = rows[stage][place[stage]]
        if isinstance(operation, Action):
            comes = {Kind.FORWARD: stage > 0, Kind.BACKWARD: stage < len(rows) - 1, Kind.STEP: False}[operation.kind]
            if comes and operation not in got[stage]:
                continue
            done[stage].add(operation)
            place[stage] += 1
            idle = 0
            continue
        peer = operation.peer
        if place[peer] < len(rows[peer]):
            other = rows[peer][place[peer]]
            if isinstance(other, Transfer) and (other.peer, other.action) == (stage, operation.action):
                sender, receiver = (stage, peer) if operation.sends else (peer, stage)
                assert operation.sends is not other.sends
                assert operation.action in done[sender]
                got[receiver].add(operation.action)
                place[stage] += 1
                place[peer] += 1
                idle = 0
    return place


SHAPES = list(itertools.product(range(1, 5), range(1, 4), range(1, 5)))


@pytest.mark.parametrize(("stages", "members", "microbatches"), SHAPES)
def test_every_small_schedule_runs_with_blocking_sends(stages: int, members: int, microbatches: int) -> None:
    for equal, link, memory in itertools.product((True, False), (0.0, 0.3), (1, 2)):
        problem = uniform(
            stages=stages, members=members, microbatches=microbatches, step=0.2, link=link, memory=memory
        )
        if not equal:
            problem = reference.uneven(stages, members, microbatches, 1, link=link, caps=caps_of(stages, memory))
        schedule = stream(problem, work=2500).schedule
        validate(problem, schedule)
        rows = programs(problem, schedule, 3)
        assert rendezvous(rows, seed=stages) == [len(row) for row in rows]


@pytest.mark.parametrize("microbatches", range(1, 9))
@pytest.mark.parametrize("stages", range(5, 9))
def test_longer_pipelines_too(stages: int, microbatches: int) -> None:
    for members in (1, 2, 3):
        problem = uniform(stages=stages, members=members, microbatches=microbatches, link=0.05, memory=1.5)
        validate(problem, stream(problem, work=2500).schedule)


@pytest.mark.parametrize(("members", "microbatches", "stages"), [(1, 2, 2), (1, 2, 3), (1, 3, 2), (2, 1, 2)])
def test_of_all_orders_just_those_are_accepted_that_run(members: int, microbatches: int, stages: int) -> None:
    """Every legal order of every stage, combined: the verdict is that of a run without any limit on messages."""
    problem = uniform(stages=stages, members=members, microbatches=microbatches)
    accepted = refused = 0
    for choice in itertools.product(reference.legal_orders([microbatches] * members), repeat=stages):
        schedule = Schedule(choice)
        runs = len(reference.times(problem, schedule, 3)) == 3 * problem.actions
        if not runs:
            with pytest.raises(ScheduleError, match="deadlocks"):
                validate(problem, schedule)
            refused += 1
        else:
            validate(problem, schedule)
            rows = programs(problem, schedule, 2)
            assert rendezvous(rows, seed=accepted) == [len(row) for row in rows]
            accepted += 1
    assert accepted > 0
    assert refused > 0


def test_orders_that_shift_iterations_between_stages_are_judged_too() -> None:
    """Members may meet in either order on stage 1, but none may be asked for before stage 0 can send it."""
    problem = uniform(stages=2, members=2, microbatches=1)
    first = "0: i1m0F0 i0m1B0 i0m1S i1m1F0 i1m0B0 i1m0S\n"
    validate(problem, Schedule.parse(first + "1: i0m1F0 i0m1B0 i0m1S i1m0F0 i1m0B0 i1m0S\n"))
    validate(problem, Schedule.parse(first + "1: i1m0F0 i1m0B0 i1m0S i1m1F0 i1m1B0 i1m1S\n"))
    with pytest.raises(ScheduleError, match="deadlocks"):
        validate(problem, Schedule.parse(first + "1: i1m1F0 i1m1B0 i1m1S i0m0F0 i0m0B0 i0m0S\n"))


def test_crossed_sends_are_refused_with_the_table() -> None:
    """Both neighbours send first: https://github.com/pytorch/pytorch/issues/172668."""
    forward = [Action(Kind.FORWARD, 0, 0, m) for m in range(2)]
    backward = [Action(Kind.BACKWARD, 0, 0, m) for m in range(2)]

    def send(action: Action, peer: int) -> Transfer:
        return Transfer(True, peer, action)

    def receive(action: Action, peer: int) -> Transfer:
        return Transfer(False, peer, action)

    upper: list[Operation] = [
        forward[0], send(forward[0], 1), forward[1], send(forward[1], 1),
        receive(backward[0], 1), backward[0], receive(backward[1], 1), backward[1],
    ]  # fmt: skip
    lower: list[Operation] = [
        receive(forward[0], 0), forward[0], backward[0], send(backward[0], 0),
        receive(forward[1], 0), forward[1], backward[1], send(backward[1], 0),
    ]  # fmt: skip
    with pytest.raises(ScheduleError) as caught:
        run_blocking([upper, lower])
    first, *table = str(caught.value).splitlines()
    assert "stage 0 blocks in SEND_i0m0F1>1; stage 1 blocks in SEND_i0m0B0>0" in first
    assert [line.split() for line in table if ">SEND" in line] == [["3", ">SEND_i0m0F1>1", ">SEND_i0m0B0>0"]]
    assert rendezvous([upper, lower], 0) == [3, 3]
    # The same actions in the order that the package gives the transfers:
    schedule = Schedule.parse("0: i0m0F0 i0m0F1 i0m0B0 i0m0B1 i0m0S\n1: i0m0F0 i0m0B0 i0m0F1 i0m0B1 i0m0S\n")
    run_blocking(programs(uniform(stages=2, members=1, microbatches=2), schedule, 4))


def test_a_receive_that_nobody_sends_is_refused() -> None:
    lonely = Transfer(False, 0, Action(Kind.FORWARD, 0, 0, 0))
    with pytest.raises(ScheduleError, match="stage 1 blocks in RECV_i0m0F0<0"):
        run_blocking([[], [lonely]])


def test_more_stages_than_microbatches() -> None:
    """1F1B's warm-up hung there: https://github.com/pytorch/torchtitan/issues/775."""
    for stages, microbatches in itertools.product((2, 3, 4), (1, 2, 3)):
        problem = Problem(members=uniform(stages=stages, members=1, microbatches=microbatches).members)
        validate(problem, stream(problem).schedule)
