"""Whose turn it is on one stage, where not every member's state fits on the device (see ``residency``).

Without a bound the engine takes whatever is ready. With one, a member can only act while its state is here, and what
is here has to stay while something of it is under way. Two stages that admit members in different orders could then
wait for each other for ever. So:

* A *unit* is one ``step`` or ``evaluate`` of a member. On each stage it *begins* with its first micro-batch and ends
  with its last action; in between the member's state stays on that stage.
* Stage 0 begins a unit only when every stage has the member and the whole command (a stage says ``have`` to the one
  before it). From then on it depends on the engines alone, not on the member's process.
* A stage begins units one after the other: the next one only after every forward of those before it. So the forwards
  of one unit leave a stage, and reach the next, before those of the next unit; and every stage begins units in the
  order in which their first micro-batch arrived, which is the order of stage 0. Nobody overtakes.

Why this cannot come to a halt: take the unit X that stage 0 began first among all that have not ended everywhere. On a
stage where X has arrived but not begun, nothing else is under way: what was begun there before X has ended, what comes
after X has not begun. So every other member can be sent away, X fits (else it was refused), and X begins. On a stage
where X still has forwards to do nobody else holds activations: those before X have ended, those after X wait for its
forwards. So the cap of activations is full only of X's own, and the last stage, which has the oldest of them, can
always go on with X, forward or backward. Everything else X needs are messages. A member that fails is removed from
every stage. Other commands (state pulls and the like) and joining concern one stage only: they wait for room, and as
everything under way there ends, they get it. Copies take a bounded time.

Turns go around: a member's next unit comes one turn later, one that was idle or is new starts at the present. So the
order is known ahead: the next one that is not here is brought back while others compute, and whose turn is the furthest
away is sent away for it.
"""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from slurm_jap.environment import ENV_DEVICE_MEMORY
from slurm_jap.frozen import Commons, unique_bytes
from slurm_jap.residency import Place, Residency, size_of
from slurm_jap.schedule import Action
from slurm_jap.stage import MemberStage

_UNITS = ("step", "evaluate")
MEMORY = "memory"
"""The pull that tells what ``memory_report`` says."""


def _stateless(command: CommandLike) -> bool:
    """Whether it needs nothing of the member's state."""
    return command.kind == "metric" or (command.kind == "pull" and command.arguments[1] == MEMORY)


class CommandLike(Protocol):
    """What is asked of a command."""

    kind: str
    arguments: tuple[Any, ...]
    forwarded: int

    @property
    def serial(self) -> int:
        """Counts a membership's commands."""


class LaneLike(Protocol):
    """What is asked of a member on this stage."""

    index: int
    token: int
    stage: MemberStage | None
    commands: deque[Any]
    inbox: dict[tuple[str, int, int], Any]
    urgent: Action | None
    forward: Action | None


@dataclasses.dataclass(slots=True)
class _Turn:
    lane: LaneLike
    turn: int
    """Order among members; one more with every command that has ended."""
    begun: bool = False
    """A unit of it is under way here."""
    waiting_since: int = 0
    """When its first command came to need a turn here; 0: it has not."""
    announced: int = 0
    """Up to this serial the stage before this one has been told that the command is here."""
    stepped: bool = False


class Turns:
    """The choice of the next action on one stage, and whom ``residency`` brings and sends away."""

    def __init__(
        self,
        stage: int,
        stages: int,
        residency: Residency,
        *,
        announce: Callable[[int, int], None],
    ) -> None:
        """
        Args:
            announce: tells the stage before this one that the command (token, serial) has arrived here and further on.
        """
        self._first, self._last = stage == 0, stage == stages - 1
        self.residency = residency
        self._announce = announce
        self._turns: dict[int, _Turn] = {}
        self._arrived: deque[tuple[int, int]] = deque()
        """When and whose: units whose first micro-batch has come, not begun yet."""
        self._clock = 0
        self._now = 0
        self.stalled = False
        """Nothing could be chosen because of a move that is under way."""

    # --- what happens -----------------------------------------------------------------------------------------------

    def joined(self, lane: LaneLike) -> None:
        """A member's state has been made, here.

        Raises:
            UsageError: it can never fit.
        """
        assert lane.stage is not None
        stage = lane.stage
        turn = _Turn(lane, self._now, stepped=bool(stage.optimizer_slots))
        self.residency.enter(lane.token, 0, stage.state_tensors)
        self._turns[lane.token] = turn
        self._measure(turn)

    def left(self, token: int) -> None:
        """A member is gone."""
        if self._turns.pop(token, None) is not None:
            self.residency.leave(token)
            self._arrived = deque(entry for entry in self._arrived if entry[1] != token)

    def noted(self, lane: LaneLike, kind: str, number: int) -> None:
        """A message for a member has been put where it belongs.

        Args:
            kind, number: of a neighbour's message; the command's kind and 0 for one of the member's own.
        """
        self._clock += 1
        turn = self._turns[lane.token]
        if kind in ("F", "E") and number == 0:
            self._arrived.append((self._clock, lane.token))
        self._look(turn)

    def _look(self, turn: _Turn) -> None:
        lane = turn.lane
        if lane.commands and not turn.begun and not turn.waiting_since:
            turn.waiting_since = self._clock
            turn.turn = max(turn.turn, self._now)
        if not self._first:
            for command in lane.commands:
                if command.kind in _UNITS and command.serial > turn.announced:
                    if not self._last and lane.inbox.pop(("have", command.serial, 0), None) is None:
                        break
                    turn.announced = command.serial
                    self._announce(lane.token, command.serial)

    def begins(self, lane: LaneLike) -> None:
        """An action of the member's first command is about to run."""
        turn = self._turns[lane.token]
        command = lane.commands[0]
        if command.kind in _UNITS and not turn.begun:
            turn.begun = True
            self._now = max(self._now, turn.turn)
            self.residency.hold(lane.token)
            if self._first:
                lane.inbox.pop(("have", command.serial, 0), None)
            else:
                self._arrived.popleft()

    def ended(self, lane: LaneLike, command: CommandLike) -> None:
        """The member's first command has ended here.

        Raises:
            UsageError: the member has grown so that it does not fit any more.
        """
        turn = self._turns[lane.token]
        turn.turn += 1
        turn.waiting_since = 0
        if turn.begun:
            turn.begun = False
            self.residency.let_go(lane.token)
            if command.kind == "step" and command.arguments[1].apply:
                turn.stepped = True
        self._clock += 1
        self._look(turn)
        if self.residency.place(lane.token) is Place.HERE:
            self._measure(turn)

    def _measure(self, turn: _Turn) -> None:
        stage = turn.lane.stage
        assert stage is not None
        least, reckoned = size_of(stage.state_tensors(), self.residency.device, stepped=turn.stepped)
        self.residency.check_fits(least, turn.lane.index)
        self.residency.resize(turn.lane.token, min(reckoned, max(least, self.residency.spare)))

    # --- the choice -------------------------------------------------------------------------------------------------

    def room_to_join(self, bytes_: int) -> bool:
        """Whether a new member of at most that size can be made now; if not, room is being made."""
        order = self._order(self._line())
        return self.residency.room(min(bytes_, self.residency.spare), order)

    def choose(self, may_forward: bool, joining: bool) -> tuple[Action, Any] | None:
        """The next action and its member; also sets moves going.

        Args:
            may_forward: whether the cap of activations leaves room for one more.
            joining: whether a new member waits for room.
        """
        best: tuple[Action, LaneLike] | None = None
        opened = False

        def consider(lane: LaneLike) -> None:
            nonlocal best
            action = lane.urgent or (lane.forward if may_forward else None)
            if action is not None and (best is None or action < best[0]):
                best = action, lane

        for turn in self._turns.values():
            lane = turn.lane
            if turn.begun:
                consider(lane)
                command = lane.commands[0]
                opened = opened or command.forwarded < len(command.arguments[1].sizes)
            elif lane.commands and _stateless(lane.commands[0]):
                consider(lane)
        line = self._line()
        order = self._order(line)
        may_begin = not (opened or joining)
        missing = False
        if not joining:
            self.residency.shrink(order)
            self._bring_next(order)
        for turn in line:
            lane = turn.lane
            unit = lane.commands[0].kind in _UNITS
            if turn.begun:  # its next unit has arrived before the one under way has ended
                may_begin = False
            elif self.residency.place(lane.token) is Place.HERE:
                if not unit:
                    consider(lane)
                    may_begin = may_begin and self._first
                elif may_begin:
                    consider(lane)
                    may_begin = False
            else:
                # On stage 0 others may go first while it is on its way, and only then: it has to get its turn.
                missing = True
                may_begin = may_begin and self._first and self.residency.place(lane.token) is Place.COMING
        self.stalled = best is None and (missing or joining) and self.residency.moving
        return best

    def _order(self, line: Sequence[_Turn]) -> list[int]:
        """Whose turn is when: who waits, then who is expected; each once."""
        return list(dict.fromkeys(turn.lane.token for turn in [*line, *self._expected()]))

    def _line(self) -> list[_Turn]:
        """Who waits for a turn here, in order."""
        if self._first:
            ready = [turn for turn in self._turns.values() if self._may_wait(turn)]
            return sorted(ready, key=lambda turn: (turn.turn, turn.lane.index))
        entries = list(self._arrived)
        listed = {token for _, token in entries}
        for token, turn in self._turns.items():
            if token not in listed and self._may_wait(turn) and turn.lane.commands[0].kind not in _UNITS:
                entries.append((turn.waiting_since, token))
        return [self._turns[token] for _, token in sorted(entries)]

    def _may_wait(self, turn: _Turn) -> bool:
        lane = turn.lane
        if turn.begun or not lane.commands or _stateless(lane.commands[0]):
            return False
        command = lane.commands[0]
        if command.kind not in _UNITS or (self._first and self._last):
            return True
        return ("have", command.serial, 0) in lane.inbox if self._first else True

    def _expected(self) -> list[_Turn]:
        """Whose unit will come, in the order that is likely."""
        arrived = {token for _, token in self._arrived}
        coming = [
            turn
            for token, turn in self._turns.items()
            if turn.lane.commands
            and not turn.begun
            and turn.lane.commands[0].kind in _UNITS
            and (not self._may_wait(turn) if self._first else token not in arrived)
        ]
        return sorted(coming, key=lambda turn: (turn.turn, turn.lane.index))

    def _bring_next(self, order: Sequence[int]) -> None:
        """Bring back the one whose turn is next, if it is away.

        Not more than one ahead: who is sent away for it should be the one whose turn is the furthest away, and that is
        mostly the one that acts now.
        """
        token = next((token for token in order if not self._turns[token].begun), None)
        if token is not None and self.residency.place(token) is Place.AWAY and not self.residency.moving:
            self.residency.bring(token, order)


def from_environment(
    stage: int,
    stages: int,
    device: torch.device,
    commons: Commons,
    *,
    wake: Callable[[], None],
    announce: Callable[[int, int], None],
) -> Turns | None:
    """The turns of one stage where a bound is set."""
    bound = int(os.environ.get(ENV_DEVICE_MEMORY) or 0)
    if bound <= 0:
        return None
    residency = Residency(bound, device, stage=stage, common=lambda: commons.bytes, wake=wake)
    commons.peek, commons.abandoned = residency.twin, residency.prune
    return Turns(stage, stages, residency, announce=announce)


def memory_report(stages: Iterable[MemberStage], commons: Commons, turns: Turns | None) -> dict[str, float]:
    """What one stage holds on its device, in bytes, and what its moves have cost so far."""
    held = [*commons.tensors(), *(tensor for stage in stages for tensor in stage.state_tensors())]
    report: dict[str, float] = {"held_bytes": unique_bytes(held), "common_bytes": commons.bytes}
    if turns is not None:
        report.update(dataclasses.asdict(turns.residency.counts), bound=turns.residency.bound)
    return report


def total_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of some tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)
