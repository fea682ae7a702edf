"""The cluster simulator: every job runs once, no GPU twice, and the same schedule as a plain second implementation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_jap.cluster_sim import Request, _Waiting, replay, shape_of


def naive_starts(requests: list[Request], nodes: int, gpus_per_node: int) -> list[int]:
    """FIFO with EASY backfill, written for reading: GPUs one by one, everything recomputed at every instant."""
    owner: list[list[int | None]] = [[None] * gpus_per_node for _ in range(nodes)]
    believed = [max(request.estimate, request.duration) for request in requests]
    queue: list[int] = []
    running: dict[int, int] = {}
    starts: dict[int, int] = {}
    to_come = sorted(range(len(requests)), key=lambda job: (requests[job].submit, job))

    def pieces(job: int) -> list[int]:
        request = requests[job]
        if request.nodes and request.gpus % request.nodes == 0 and request.gpus // request.nodes <= gpus_per_node:
            return [request.gpus // request.nodes] * request.nodes
        whole, rest = divmod(request.gpus, gpus_per_node)
        return [gpus_per_node] * whole + ([rest] if rest else [])

    def choose(free: list[int], job: int) -> list[tuple[int, int]] | None:
        """Best fit of the job's pieces on different nodes with ``free`` GPUs; None if it does not fit."""
        chosen: list[tuple[int, int]] = []
        for piece in pieces(job):
            used = [node for node, _ in chosen]
            candidates = [(free[node], node) for node in range(nodes) if free[node] >= piece and node not in used]
            if not candidates:
                return None
            chosen.append((min(candidates)[1], piece))
        return chosen

    def free_now() -> list[int]:
        return [gpus.count(None) for gpus in owner]

    def begin(job: int, chosen: list[tuple[int, int]], now: int) -> None:
        for node, piece in chosen:
            empty = [place for place, holder in enumerate(owner[node]) if holder is None]
            for place in empty[:piece]:
                owner[node][place] = job
        starts[job] = now
        running[job] = now
        queue.remove(job)

    now = 0
    while to_come or queue or running:
        instants = [requests[job].submit for job in to_come[:1]]
        instants += [began + requests[job].duration for job, began in running.items()]
        now = min(instants)
        for job in [job for job, began in running.items() if began + requests[job].duration == now]:
            del running[job]
            for gpus in owner:
                gpus[:] = [None if holder == job else holder for holder in gpus]
        while to_come and requests[to_come[0]].submit == now:
            queue.append(to_come.pop(0))

        while queue and (chosen := choose(free_now(), queue[0])) is not None:
            begin(queue[0], chosen, now)
        if not queue:
            continue
        head = queue[0]
        for job in queue[1:]:
            chosen = choose(free_now(), job)
            if chosen is None:
                continue
            reserved = None
            for instant in sorted({began + believed[other] for other, began in running.items()}):
                future = [
                    sum(holder is None or running[holder] + believed[holder] <= instant for holder in gpus)
                    for gpus in owner
                ]
                if choose(future, head) is not None:
                    reserved = instant
                    break
            assert reserved is not None
            if now + believed[job] > reserved:
                for node, piece in chosen:
                    future[node] -= piece
                if min(future) < 0 or choose(future, head) is None:
                    continue
            begin(job, chosen, now)
    return [starts[job] for job in range(len(requests))]


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Request], int, int]:
    nodes = draw(st.integers(1, 5))
    gpus_per_node = draw(st.sampled_from([1, 2, 4, 8]))
    exact = draw(st.booleans())
    # Few distinct values, so that ends, arrivals and reservations often fall on one instant.
    times = st.integers(0, 12)
    requests = []
    for _ in range(draw(st.integers(1, 25))):
        gpus = draw(st.integers(1, nodes * gpus_per_node))
        duration = draw(times)
        asked = draw(st.sampled_from([0, 0, 1, 2, 3]))
        if shape_of(gpus, asked, gpus_per_node).nodes > nodes:
            asked = 0
        estimate = duration if exact else draw(st.integers(0, 30))
        requests.append(Request(draw(times), duration, estimate, gpus, asked))
    return requests, nodes, gpus_per_node


@settings(max_examples=400, deadline=None)
@given(clusters())
def test_same_schedule_as_the_naive_implementation(cluster):
    requests, nodes, gpus_per_node = cluster
    assert replay(requests, nodes, gpus_per_node).starts == naive_starts(requests, nodes, gpus_per_node)


@settings(max_examples=300, deadline=None)
@given(clusters())
def test_every_job_runs_once_and_no_gpu_is_given_twice(cluster):
    requests, nodes, gpus_per_node = cluster
    result = replay(requests, nodes, gpus_per_node)
    assert len(result.starts) == len(requests)
    edges = []
    for request, start, placement in zip(requests, result.starts, result.placements, strict=True):
        assert start >= request.submit
        assert sum(gpus for _, gpus in placement) == request.gpus
        used = [node for node, _ in placement]
        assert len(set(used)) == len(used)
        if request.duration:
            # An end at an instant comes before a start at the same instant.
            edges += [(start, 1, node, gpus) for node, gpus in placement]
            edges += [(start + request.duration, 0, node, -gpus) for node, gpus in placement]
    held = [0] * nodes
    for _, _, node, gpus in sorted(edges):
        held[node] += gpus
        assert 0 <= held[node] <= gpus_per_node
    assert held == [0] * nodes


def test_a_job_that_can_never_fit_is_refused():
    with pytest.raises(ValueError, match="can never fit"):
        replay([Request(0, 1, 1, 9)], nodes=2, gpus_per_node=4)
    with pytest.raises(ValueError, match="can never fit"):
        replay([Request(0, 1, 1, 0)], nodes=2, gpus_per_node=4)


def test_backfill_never_delays_the_head():
    # 4 GPUs: a long job holds 2; the head wants 4 at time 10. Of the later ones the short fits before, the long not.
    requests = [
        Request(0, 10, 10, 2),
        Request(1, 5, 5, 4),
        Request(2, 8, 8, 2),
        Request(3, 9, 9, 2),
    ]
    assert replay(requests, nodes=1, gpus_per_node=4).starts == [0, 10, 2, 15]


def test_a_job_that_leaves_room_for_the_head_may_run_past_its_reservation():
    requests = [Request(0, 10, 10, 6), Request(1, 5, 5, 4), Request(2, 100, 100, 2)]
    # At time 10 the head finds 8 - 2 = 6 GPUs, enough for its 4.
    assert replay(requests, nodes=1, gpus_per_node=8).starts == [0, 10, 2]


def test_gangs_wait_for_whole_nodes():
    requests = [Request(0, 10, 10, 1), Request(1, 5, 5, 1), Request(2, 1, 1, 12)]
    result = replay(requests, nodes=2, gpus_per_node=8)
    assert result.placements[0] == ((0, 1),)
    assert result.placements[1] == ((0, 1),)  # best fit: beside the first
    assert result.placements[2] == ((1, 8), (0, 4))
    assert result.starts == [0, 1, 2]


def test_an_early_end_lets_the_head_start_early():
    requests = [Request(0, 5, 100, 8), Request(1, 1, 1, 8), Request(2, 50, 50, 8)]
    assert replay(requests, nodes=1, gpus_per_node=8).starts == [0, 5, 6]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(-1, 60), st.integers(0, 9), st.data())
def test_the_waiting_tree_finds_the_first(estimates, after, longest, data):
    ranks = sorted(data.draw(st.sets(st.integers(0, 60), min_size=len(estimates), max_size=len(estimates))))
    waiting = _Waiting(ranks)
    present = {}
    for rank, estimate in zip(ranks, estimates, strict=True):
        waiting.put(rank, estimate)
        present[rank] = estimate
    for rank in data.draw(st.sets(st.sampled_from(ranks))):
        waiting.put(rank, 1 << 62)
        del present[rank]
    expected = [rank for rank in sorted(present) if rank > after and present[rank] <= longest]
    assert waiting.first_after(after, longest) == (expected[0] if expected else 1 << 62)
