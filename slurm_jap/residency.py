"""Which members' states lie on the device, where not all of them fit.

A member's state is everything that it keeps between two batches: parameters, gradients, buffers, the optimizer's and
``after_step``'s state. Away from the device it lies on the host, pinned where the device is not the CPU. Tensors keep
their identity: on the way out the bytes go to a twin on the host and the storage is emptied, on the way back it is
filled again; whoever holds the tensor, or a view of it, notices nothing.

One background thread moves, so that one member's move is hidden behind another's computing. ``Residency`` only obeys:
whom to bring and whom to send away for it is decided by ``turns``. What is here, on the way here, or not yet gone never
takes more than the bound, but for what grows inside an action that runs (an optimizer's first step, where its state is
larger than was reckoned with).
"""

from __future__ import annotations

import dataclasses
import enum
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from slurm_jap.errors import UsageError
from slurm_jap.frozen import unique_bytes

_MIB = 1 << 20


class Place(enum.Enum):
    """Where a member's state is."""

    HERE = enum.auto()
    GOING = enum.auto()
    AWAY = enum.auto()
    COMING = enum.auto()


@dataclasses.dataclass(slots=True)
class _Resident:
    tensors: Callable[[], Iterable[Tensor]]
    bytes: int
    """On the device when it is here; also what it still needs there before its gradients and state exist."""
    place: Place = Place.HERE
    held: bool = False
    used: int = 0
    luggage: list[tuple[torch.UntypedStorage, Tensor]] = dataclasses.field(default_factory=list)
    """Each storage that was emptied, and its twin on the host."""


@dataclasses.dataclass(slots=True)
class Counts:
    """What moving has cost on one stage."""

    switches: int = 0
    """Members that were brought back."""
    bytes_in: int = 0
    bytes_out: int = 0
    moving_us: float = 0.0
    """Time that the moves took."""
    waited_us: float = 0.0
    """Of it, time for which the stage had nothing to do but wait for a move; the rest was hidden."""


class Residency:
    """The states of one stage's members. All but the moves themselves happens on one thread."""

    def __init__(
        self, bound: int, device: torch.device, *, stage: int, common: Callable[[], int], wake: Callable[[], None]
    ) -> None:
        """
        Args:
            bound: bytes that all of it together may take.
            common: bytes that several members have in common, which stay.
            wake: called, from another thread, when a move has ended.
        """
        self.bound, self.device, self.stage = bound, device, stage
        self.counts = Counts()
        self._common, self._wake = common, wake
        self._residents: dict[int, _Resident] = {}
        self._clock = 0
        self._jobs: queue.SimpleQueue[tuple[list[_Resident], _Resident | None]] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        self._moving = 0
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        threading.Thread(target=self._move, name="jap-moves", daemon=True).start()

    @property
    def spare(self) -> int:
        """Bytes that members may take in all: what they have in common stays."""
        return self.bound - self._common()

    # --- who there is -----------------------------------------------------------------------------------------------

    def check_fits(self, bytes_: int, member: int) -> None:
        """
        Raises:
            UsageError: a member of that size can never be here.
        """
        needed = bytes_ + self._common()
        if needed > self.bound:
            raise UsageError(
                f"member {member} needs {_mib(needed)} MiB on the device of stage {self.stage} (parameters, gradients, "
                f"buffers, optimizer state), --memory-per-device allows {self.bound // _MIB}: type "
                f"--jap-memory-per-device={_mib(needed)}M or more, or more --jap-stages"
            )

    def enter(self, token: int, bytes_: int, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """A member is new, and here; ``room`` was asked before."""
        self._residents[token] = _Resident(tensors, bytes_, used=self._tick())

    def leave(self, token: int) -> None:
        """A member is gone."""
        self._residents.pop(token, None)

    def resize(self, token: int, bytes_: int) -> None:
        """A member that is here has grown or shrunk."""
        self._residents[token].bytes = bytes_

    def place(self, token: int) -> Place:
        """Where the member's state is."""
        self._settle()
        return self._residents[token].place

    def hold(self, token: int) -> None:
        """The member, which is here, stays until it is let go."""
        resident = self._residents[token]
        resident.held, resident.used = True, self._tick()

    def let_go(self, token: int) -> None:
        """The member may be sent away from now on."""
        self._residents[token].held = False

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    # --- moving -----------------------------------------------------------------------------------------------------

    @property
    def moving(self) -> bool:
        """Whether a move is under way."""
        self._settle()
        return self._moving > 0

    def room(self, bytes_: int, order: Sequence[int]) -> bool:
        """Whether as many bytes are free now; if not, members are sent away for it, where that is possible.

        Args:
            order: members whose turn is known, the next first. Those not named are sent away before them, the one that
                was used least recently first; then those named, the last first.
        """
        self._settle()
        if self._moving:
            return False
        victims = self._victims(bytes_, order)
        if victims:
            self._start(victims, None)
        return victims == []

    def bring(self, token: int, order: Sequence[int]) -> None:
        """Have a member that is away come back, as soon as those that are held leave room for it. See ``room``."""
        resident = self._residents[token]
        victims = self._victims(resident.bytes, [other for other in order if other != token])
        if victims is not None:
            self._start(victims, resident)

    def shrink(self, order: Sequence[int]) -> None:
        """Send members away where those that are here have grown out of the bound."""
        if self._taken() > self.bound and not self.moving:
            victims = self._victims(0, order)
            if victims:
                self._start(victims, None)

    def _taken(self) -> int:
        here = (Place.HERE, Place.COMING)
        return self._common() + sum(r.bytes for r in self._residents.values() if r.place in here)

    def _victims(self, bytes_: int, order: Sequence[int]) -> list[_Resident] | None:
        """Whom to send away so that as many bytes are free; None if that is not enough."""
        excess = self._taken() + bytes_ - self.bound
        victims: list[_Resident] = []
        if excess <= 0:
            return victims
        unknown = [r for token, r in self._residents.items() if token not in order]
        known = [self._residents[token] for token in order]
        for resident in [*sorted(unknown, key=lambda r: r.used), *reversed(known)]:
            if resident.place is Place.HERE and not resident.held:
                victims.append(resident)
                excess -= resident.bytes
                if excess <= 0:
                    return victims
        return None

    def _start(self, victims: list[_Resident], coming: _Resident | None) -> None:
        for victim in victims:
            victim.place = Place.GOING
            victim.luggage = [(storage, torch.empty(0)) for storage in self._storages(victim)]
        if coming is not None:
            coming.place = Place.COMING
            coming.used = self._tick()
        self._moving += 1
        if self._stream is not None:  # what has been enqueued for them comes first
            self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        self._jobs.put((victims, coming))

    def _storages(self, resident: _Resident) -> list[torch.UntypedStorage]:
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in resident.tensors():
            if tensor.device.type == self.device.type and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.resizable():
                    found[storage._cdata] = storage
        return list(found.values())

    def _settle(self) -> None:
        """Take note of moves that have ended."""
        while not self._ended.empty():
            done = self._ended.get()
            if done.error is not None:
                raise done.error
            for victim in done.victims:
                victim.place = Place.AWAY
            if done.coming is not None:
                done.coming.place = Place.HERE
                self.counts.switches += 1
            self._moving -= 1
            self.counts.bytes_in += done.bytes_in
            self.counts.bytes_out += done.bytes_out
            self.counts.moving_us += done.seconds * 1e6

    def prune(self) -> None:
        """Forget memory that nobody refers to any more, of members that are away."""
        for resident in self._residents.values():
            if resident.place is Place.AWAY:
                for storage, twin in list(resident.luggage):
                    if torch._C._storage_Use_Count(storage._cdata) < 2:  # ours
                        resident.bytes -= twin.numel()
                        resident.luggage = [pair for pair in resident.luggage if pair[0] is not storage]

    def waited(self, seconds: float) -> None:
        """The stage had nothing to do for so long but to wait for a move."""
        self.counts.waited_us += seconds * 1e6

    def twin(self, tensor: Tensor) -> Tensor:
        """A tensor with the same content that can be read now: on the host, if it is away. No move may be under way."""
        wanted = tensor.untyped_storage()._cdata
        for resident in self._residents.values():
            for storage, twin in resident.luggage:
                if storage._cdata == wanted:
                    bare = torch.empty(0, dtype=tensor.dtype)
                    return bare.set_(twin.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return tensor

    # --- the other thread -------------------------------------------------------------------------------------------

    def _move(self) -> None:
        while True:
            victims, coming = self._jobs.get()
            done = _Done(victims, coming)
            began = time.perf_counter()
            try:
                if self._stream is None:
                    self._move_all(done)
                else:
                    with self._stream:
                        self._move_all(done)
            except BaseException as error:
                done.error = error
            done.seconds = time.perf_counter() - began
            self._ended.put(done)
            self._wake()
            del victims, coming, done

    def _move_all(self, done: _Done) -> None:
        for victim in done.victims:
            done.bytes_out += self._send_away(victim)
        if done.coming is not None:
            done.bytes_in += self._bring_back(done.coming)

    def _send_away(self, resident: _Resident) -> int:
        moved = 0
        for number, (storage, _) in enumerate(resident.luggage):
            twin = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._stream is not None)
            twin.copy_(_raw(storage, self.device), non_blocking=True)
            resident.luggage[number] = storage, twin
            moved += storage.nbytes()
            if self._stream is None:
                storage.resize_(0)
        if self._stream is not None:
            self._stream.synchronize()
            for storage, _ in resident.luggage:
                storage.resize_(0)
        return moved

    def _bring_back(self, resident: _Resident) -> int:
        moved = 0
        luggage, resident.luggage = resident.luggage, []
        for number, (storage, twin) in enumerate(luggage):
            storage.resize_(twin.numel())
            _raw(storage, self.device).copy_(twin, non_blocking=True)
            moved += twin.numel()
            if self._stream is None:
                luggage[number] = storage, torch.empty(0)
        if self._stream is not None:
            self._stream.synchronize()
        return moved


@dataclasses.dataclass(slots=True)
class _Done:
    victims: list[_Resident]
    coming: _Resident | None
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
    error: BaseException | None = None


def _raw(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _mib(bytes_: int) -> int:
    return math.ceil(bytes_ / _MIB)


def size_of(tensors: Iterable[Tensor], device: torch.device, *, stepped: bool) -> tuple[int, int]:
    """Bytes that a member's state takes on its device, gradients included: at least, and as reckoned with.

    Args:
        stepped: whether the optimizer has made its state; else two tensors per parameter are reckoned with, as Adam's.
    """
    held: list[Tensor] = []
    trained: dict[int, Tensor] = {}
    for tensor in tensors:
        if tensor.device.type == device.type and tensor.layout is torch.strided:
            held.append(tensor)
            if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
                trained[id(tensor)] = tensor
    sizes = {number: t.numel() * t.element_size() for number, t in trained.items()}
    least = unique_bytes(held) + sum(size for number, size in sizes.items() if trained[number].grad is None)
    return least, least if stepped else least + 2 * sum(sizes.values())
