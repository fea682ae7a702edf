"""Replay of requests on a GPU cluster: first in, first out, with EASY backfill and gang allocation.

Pure: no I/O, no torch. The cluster is ``nodes`` equal nodes of ``gpus_per_node`` GPUs. A request gets all its GPUs at
once, holds them until it ends, and runs exactly once. At every instant, ends come before arrivals, then one pass:

1. Requests start in order of arrival while they fit. The first that does not fit, the *head*, gets a reservation: the
   earliest time at which it fits if everything running ends at its estimate.
2. Every later request, in order, starts if it fits now and either ends (by its estimate) no later than that time, or
   leaves the head enough on the nodes as they will be then.

Placement is best fit: the node with the fewest sufficient free GPUs, the lowest number among equals. Times are whole
milliseconds, so that no result depends on rounding.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import NamedTuple

_NEVER = 1 << 62


class Request(NamedTuple):
    """One job as the queue sees it."""

    submit: int
    """Arrival, ms."""
    duration: int
    """How long it runs once started, ms, >= 0."""
    estimate: int
    """What the scheduler believes, ms; taken as at least ``duration``, since Slurm ends a job at its limit."""
    gpus: int
    """GPUs in all, >= 1."""
    nodes: int = 0
    """Nodes asked for (GPUs spread evenly); 0, or a number that does not divide the GPUs: as few as possible."""


class Shape(NamedTuple):
    """``chunks`` nodes with ``chunk`` GPUs each, and one more node with ``rest`` (< ``chunk``) GPUs where not 0."""

    chunk: int
    chunks: int
    rest: int

    @property
    def nodes(self) -> int:
        """Distinct nodes needed."""
        return self.chunks + (self.rest > 0)


def shape_of(gpus: int, nodes: int, gpus_per_node: int) -> Shape:
    """How a request of ``gpus`` lies on the nodes."""
    if nodes > 0 and gpus % nodes == 0 and gpus // nodes <= gpus_per_node:
        return Shape(gpus // nodes, nodes, 0)
    if gpus <= gpus_per_node:
        return Shape(gpus, 1, 0)
    return Shape(gpus_per_node, gpus // gpus_per_node, gpus % gpus_per_node)


Placement = tuple[tuple[int, int], ...]
"""(node, GPUs) pairs."""


class Replay(NamedTuple):
    """What happened, by the index of the request."""

    starts: list[int]
    """Start time, ms."""
    placements: list[Placement]
    """Where it ran."""


def replay(requests: Sequence[Request], nodes: int, gpus_per_node: int) -> Replay:
    """Run every request to its end. Raises ValueError for a request that can never fit."""
    return _Replayer(requests, nodes, gpus_per_node).run()


class _Waiting:
    """Waiting requests of one shape, in order of arrival, with a minimum tree over their estimates."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks
        self.leaves = 1 << max(0, (len(ranks) - 1).bit_length())
        self.tree = [_NEVER] * (2 * self.leaves)

    def put(self, rank: int, estimate: int) -> None:
        """Enter the request ``rank``; ``estimate`` _NEVER takes it out."""
        tree = self.tree
        at = self.leaves + bisect_left(self.ranks, rank)
        tree[at] = estimate
        at >>= 1
        while at:
            left, right = tree[2 * at], tree[2 * at + 1]
            smallest = left if left < right else right
            if tree[at] == smallest:
                break
            tree[at] = smallest
            at >>= 1

    def first_after(self, rank: int, longest: int) -> int:
        """The first waiting rank beyond ``rank`` whose estimate is at most ``longest``; _NEVER if there is none."""
        tree, leaves = self.tree, self.leaves
        if tree[1] > longest:
            return _NEVER
        at = leaves + bisect_right(self.ranks, rank)
        if at >= 2 * leaves:
            return _NEVER
        # Climb to the first subtree at or right of the leaf that holds an answer, then descend to its leftmost.
        while tree[at] > longest:
            while at & 1:
                at >>= 1
            if at == 0:
                return _NEVER
            at += 1
        while at < leaves:
            at *= 2
            if tree[at] > longest:
                at += 1
        return self.ranks[at - leaves]


class _Replayer:
    """The state of one replay. A *rank* is a request's place in the order of arrival."""

    def __init__(self, requests: Sequence[Request], nodes: int, gpus_per_node: int) -> None:
        self.order = sorted(range(len(requests)), key=lambda index: requests[index].submit)
        self.requests = requests
        self.size = gpus_per_node
        self.shapes: list[Shape] = []
        ranks: dict[Shape, list[int]] = {}
        shapes: dict[tuple[int, int], Shape] = {}
        for rank, index in enumerate(self.order):
            request = requests[index]
            shape = shapes.get((request.gpus, request.nodes))
            if shape is None:
                shape = shape_of(request.gpus, request.nodes, gpus_per_node)
                if request.gpus < 1 or shape.nodes > nodes:
                    raise ValueError(f"request {index} of {request.gpus} GPUs can never fit {nodes} x {gpus_per_node}")
                shapes[request.gpus, request.nodes] = shape
            self.shapes.append(shape)
            ranks.setdefault(shape, []).append(rank)
        self.waiting = {shape: _Waiting(members) for shape, members in ranks.items()}
        self.free = [gpus_per_node] * nodes
        # with_free[f]: nodes with at least f free GPUs.
        self.with_free = [nodes] * (gpus_per_node + 1)
        # at_free[f]: heap of nodes that had f free GPUs when entered; entries that no longer hold are dropped on sight.
        self.at_free: list[list[int]] = [[] for _ in range(gpus_per_node + 1)]
        self.at_free[gpus_per_node] = list(range(nodes))
        self.running: list[tuple[int, int]] = []  # (estimated end, rank), sorted
        self.ends: list[tuple[int, int]] = []  # heap of (end, rank)
        self.starts = [-1] * len(requests)
        self.placements: list[Placement] = [()] * len(requests)
        self.head = 0
        self.arrived = 0
        self.now = 0
        self.reserved_at = -1  # -1: no reservation is known for the present head
        self.future: list[int] = []
        self.future_with_free: list[int] = []

    def run(self) -> Replay:
        requests, order = self.requests, self.order
        total = len(requests)
        changed = True  # something started or ended since a full pass found nothing to start
        while self.head < total or self.ends:
            end = self.ends[0][0] if self.ends else _NEVER
            arrival = requests[order[self.arrived]].submit if self.arrived < total else _NEVER
            self.now = now = min(end, arrival)
            while self.ends and self.ends[0][0] == now:
                self.finish(heapq.heappop(self.ends)[1])
                changed = True
            first_new = self.arrived
            while self.arrived < total and requests[order[self.arrived]].submit == now:
                rank = self.arrived
                request = requests[order[rank]]
                self.waiting[self.shapes[rank]].put(rank, max(request.estimate, request.duration))
                self.arrived += 1
            # What an unchanged cluster refused before it refuses now: only the arrivals need a look.
            changed = self.schedule(-1 if changed else first_new - 1)
        return Replay(self.starts, self.placements)

    def schedule(self, after: int) -> bool:
        """One pass over the waiting requests beyond rank ``after``; whether any started."""
        started = False
        order, starts = self.order, self.starts
        while self.head < self.arrived:
            if starts[order[self.head]] < 0:
                if not self.fits(self.shapes[self.head]):
                    break
                self.start(self.head, self.place(self.shapes[self.head]))
                started = True
            self.head += 1
            self.reserved_at = -1
        if self.head == self.arrived:
            return started
        if self.reserved_at < 0:
            self.reserve()
        position = max(after, self.head)
        open_shapes = [(shape, waiting) for shape, waiting in self.waiting.items() if waiting.tree[1] < _NEVER]
        while True:
            best = _NEVER
            best_placement: Placement = ()
            still_open = []
            for shape, waiting in open_shapes:
                if not self.fits(shape):
                    continue
                still_open.append((shape, waiting))
                spare = self.reserved_at - self.now
                candidate = waiting.first_after(position, _NEVER - 1)
                if candidate >= best:
                    continue
                placement = self.place(shape)
                if not self.spares_head(placement):
                    candidate = waiting.first_after(position, spare)
                if candidate < best:
                    best, best_placement = candidate, placement
            if best == _NEVER:
                return started
            self.start(best, best_placement)
            started = True
            position = best
            open_shapes = still_open

    def fits(self, shape: Shape) -> bool:
        return _fits(shape, self.with_free)

    def place(self, shape: Shape) -> Placement:
        """The best fit for a shape that fits; the cluster is not changed."""
        if shape.chunks == 1 and not shape.rest:
            return ((self.best_node(shape.chunk), shape.chunk),)
        by_fit = sorted((free, node) for node, free in enumerate(self.free) if free >= shape.chunk)
        placement = [(node, shape.chunk) for _, node in by_fit[: shape.chunks]]
        if shape.rest:
            taken = {node for node, _ in placement}
            rest = min((free, node) for node, free in enumerate(self.free) if free >= shape.rest and node not in taken)
            placement.append((rest[1], shape.rest))
        return tuple(placement)

    def best_node(self, gpus: int) -> int:
        for free in range(gpus, self.size + 1):
            heap = self.at_free[free]
            while heap and self.free[heap[0]] != free:
                heapq.heappop(heap)
            if heap:
                return heap[0]
        raise AssertionError("a shape that fits has a node")

    def spares_head(self, placement: Placement) -> bool:
        """Whether the head would still fit at its reserved time with ``placement`` held until after it."""
        shape, counts = self.shapes[self.head], self.future_with_free
        chunk_nodes, rest_nodes = counts[shape.chunk], counts[shape.rest] if shape.rest else 0
        for node, gpus in placement:
            before = self.future[node]
            after = before - gpus
            if after < shape.chunk <= before:
                chunk_nodes -= 1
            if after < shape.rest <= before:
                rest_nodes -= 1
        return chunk_nodes >= shape.chunks and (not shape.rest or rest_nodes > shape.chunks)

    def start(self, rank: int, placement: Placement) -> None:
        index = self.order[rank]
        request = self.requests[index]
        believed_end = self.now + max(request.estimate, request.duration)
        self.waiting[self.shapes[rank]].put(rank, _NEVER)
        self.starts[index] = self.now
        self.placements[index] = placement
        for node, gpus in placement:
            self.set_free(node, self.free[node] - gpus)
        heapq.heappush(self.ends, (self.now + request.duration, rank))
        insort(self.running, (believed_end, rank))
        if self.reserved_at >= 0 and believed_end > self.reserved_at:
            for node, gpus in placement:
                _shift(self.future_with_free, self.future[node], self.future[node] - gpus)
                self.future[node] -= gpus

    def finish(self, rank: int) -> None:
        index = self.order[rank]
        request = self.requests[index]
        for node, gpus in self.placements[index]:
            self.set_free(node, self.free[node] + gpus)
        believed_end = self.starts[index] + max(request.estimate, request.duration)
        del self.running[bisect_left(self.running, (believed_end, rank))]
        # An end at its estimate was counted on; an earlier one may let the head start earlier.
        if believed_end != self.now:
            self.reserved_at = -1

    def set_free(self, node: int, free: int) -> None:
        _shift(self.with_free, self.free[node], free)
        self.free[node] = free
        heapq.heappush(self.at_free[free], node)

    def reserve(self) -> None:
        """Find the head's reserved time and the free GPUs of every node then."""
        shape = self.shapes[self.head]
        future, counts = self.free.copy(), self.with_free.copy()
        running, order, placements = self.running, self.order, self.placements
        at = 0
        while at < len(running):
            believed_end = running[at][0]
            while at < len(running) and running[at][0] == believed_end:
                for node, gpus in placements[order[running[at][1]]]:
                    _shift(counts, future[node], future[node] + gpus)
                    future[node] += gpus
                at += 1
            if _fits(shape, counts):
                self.reserved_at, self.future, self.future_with_free = believed_end, future, counts
                return
        raise AssertionError("an empty cluster fits every request that was let in")


def _fits(shape: Shape, with_free: list[int]) -> bool:
    chunk, chunks, rest = shape
    # Nodes with room for a chunk have room for the rest too, so one node more than the chunks is enough.
    return with_free[chunk] >= chunks and (not rest or with_free[rest] > chunks)


def _shift(with_free: list[int], before: int, after: int) -> None:
    """Account in ``with_free`` for one node going from ``before`` to ``after`` free GPUs."""
    if after < before:
        for level in range(after + 1, before + 1):
            with_free[level] -= 1
    else:
        for level in range(before + 1, after + 1):
            with_free[level] += 1
