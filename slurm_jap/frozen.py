"""Frozen parameters that siblings have in common are held once per stage.

One base network and K adapters are the usual case. What is common is found by content when a member joins: parameters
without ``requires_grad`` whose type, layout and bytes are equal, whatever they are called. Members keep parameters of
their own, over the same memory, until one changes:

* it is unfrozen, loaded, or its ``data`` is touched: the member gets memory of its own before that happens;
* the member's code writes to it (a target network, an average of weights): the version that torch counts for each
  parameter tells after the action. What it wrote is set aside, and the common values are put back from a copy on the
  host before anybody else acts. The member gets memory of its own as soon as it holds no activations; until then
  graphs of it may refer to the common memory, where its own values lie for the time of each of its actions.

So nobody sees a difference, to the bit. Memory is common from the second member on; what one member alone has is
not watched.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slurm_jap import trees

_Key = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]


class SharedParameter(nn.Parameter):
    """A parameter over memory that is not its own; becomes a plain one again when it gets its own."""

    travels_as_parameter = True
    """For ``shipping``: nothing of it but the values matters elsewhere."""
    _jap_holding: Holding

    @property
    def data(self) -> Tensor:
        """What is reached this way may be written to without a trace: it must be the member's own."""
        self._jap_holding.own(self)
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        self._jap_holding.own(self)
        _DATA.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            values = self.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(values, self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = nn.Parameter(self.detach(), self.requires_grad)
        return plain.__reduce_ex__(protocol)


_DATA: Any = torch.Tensor.data


class _Entry:
    """One content."""

    __slots__ = ("key", "original", "pristine", "tensor", "users")

    def __init__(self, key: _Key, owner: Holding, original: nn.Parameter) -> None:
        self.key = key
        self.original: tuple[Holding, nn.Parameter] | None = (owner, original)
        """While one member has it: in that member's own memory, and not watched."""
        self.tensor: Tensor | None = None
        """From the second member on: the common memory, on the device,"""
        self.pristine: Tensor | None = None
        """and a copy of it on the host."""
        self.users = 0


class Commons:
    """What the members of one stage have in common. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._entries: dict[_Key, list[_Entry]] = {}
        self.peek: Callable[[Tensor], Tensor] = lambda tensor: tensor
        """A tensor with the same content that can be read now, wherever it lies."""

        self.abandoned: Callable[[], None] = lambda: None
        """Called when a member's own memory has been replaced by common memory."""

    def holding(self) -> Holding:
        """For one new member."""
        return Holding(self)

    @property
    def bytes(self) -> int:
        """Bytes of common memory on the device."""
        return unique_bytes(self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """The common memory."""
        return (e.tensor for entries in self._entries.values() for e in entries if e.tensor is not None)

    def _find(self, key: _Key, host: Tensor) -> _Entry | None:
        for entry in self._entries.get(key, ()):
            if entry.pristine is not None:
                if _same_bytes(entry.pristine, host):
                    return entry
            elif entry.original is not None:
                owner, original = entry.original
                # It may have been written to, or have been given other memory, since it was entered.
                alike = original.shape == host.shape and original.stride() == host.stride()
                if alike and not original.requires_grad and _same_bytes(self.peek(original.detach()), host):
                    self._make_common(entry, owner, original, host)
                    return entry
        return None

    def _make_common(self, entry: _Entry, owner: Holding, original: nn.Parameter, host: Tensor) -> None:
        entry.original = None
        entry.tensor = host.to(self._device, copy=True)
        entry.pristine = host.clone(memory_format=torch.preserve_format)
        owner._attach(original, entry)
        self.abandoned()

    def _enter(self, key: _Key, owner: Holding, original: nn.Parameter) -> None:
        self._entries.setdefault(key, []).append(_Entry(key, owner, original))

    def _drop(self, entry: _Entry) -> None:
        entries = self._entries[entry.key]
        entries.remove(entry)
        if not entries:
            del self._entries[entry.key]

    def _forget(self, owner: Holding) -> None:
        for entries in list(self._entries.values()):
            for entry in list(entries):
                if entry.original is not None and entry.original[0] is owner:
                    self._drop(entry)


class Holding:
    """One member's part in the commons."""

    def __init__(self, commons: Commons) -> None:
        self._commons = commons
        self._shared: dict[int, tuple[SharedParameter, _Entry, int]] = {}
        """By id: the parameter, what it lies over, and its version when it came to lie there."""
        self._aside: dict[int, Tensor] = {}
        """Values that the member's code wrote to common memory, by parameter."""
        self._watched: list[SharedParameter] = []
        self._versions: list[int] = []

    def parameter(self, host: Tensor) -> nn.Parameter:
        """A frozen parameter with the values of ``host``, which lies on the host and belongs to somebody else."""
        commons = self._commons
        if host.layout is not torch.strided or not host.numel() or not trees.is_dense(host):
            return nn.Parameter(host.to(commons._device, copy=True), requires_grad=False)
        key = (host.dtype, tuple(host.shape), host.stride(), _checksum(host))
        entry = commons._find(key, host)
        if entry is None:
            made = nn.Parameter(host.to(commons._device, copy=True), requires_grad=False)
            commons._enter(key, self, made)
            return made
        assert entry.tensor is not None
        made = nn.Parameter(_over(entry.tensor), requires_grad=False)
        self._attach(made, entry)
        return made

    def _attach(self, parameter: nn.Parameter, entry: _Entry) -> None:
        """Put a parameter over the common memory."""
        assert entry.tensor is not None
        if parameter.data_ptr() != entry.tensor.data_ptr():
            _DATA.__set__(parameter, entry.tensor)
        parameter.__class__ = SharedParameter
        shared: Any = parameter
        shared._jap_holding = self
        entry.users += 1
        self._shared[id(parameter)] = (shared, entry, parameter._version)
        self._watch()

    def _watch(self) -> None:
        self._watched = [parameter for parameter, _, _ in self._shared.values()]
        self._versions = [version for _, _, version in self._shared.values()]

    def shares(self, tensor: Tensor) -> bool:
        """Whether it is a parameter over common memory."""
        return id(tensor) in self._shared

    def own(self, parameter: nn.Parameter) -> None:
        """Give a parameter memory of its own, if it has none; to be called before it changes."""
        number = id(parameter)
        if number not in self._shared:
            return
        _, entry, version = self._shared[number]
        written = parameter._version != version or self._aside.pop(number, None) is not None  # in this very action
        values = parameter.detach().clone(memory_format=torch.preserve_format) if entry.users > 1 else None
        if written and entry.users > 1:
            self._restore(number)
        self._detach(number, values)

    def act(self) -> None:
        """The member's code is about to run."""
        for number, values in self._aside.items():
            self._common(number).copy_(values)

    def acted(self, *, idle: bool) -> None:
        """The member's code has run: find what it has written to.

        Args:
            idle: it holds no activations.
        """
        if not self._aside and [parameter._version for parameter in self._watched] == self._versions:
            return
        for number, (parameter, entry, version) in list(self._shared.items()):
            if parameter._version != version:
                self._aside[number] = parameter.detach().clone(memory_format=torch.preserve_format)
                self._shared[number] = parameter, entry, parameter._version
        for number in list(self._aside):
            self._restore(number)
            if idle:
                self._detach(number, self._aside.pop(number))
        self._watch()

    def _common(self, number: int) -> Tensor:
        tensor = self._shared[number][1].tensor
        assert tensor is not None
        return tensor

    def _restore(self, number: int) -> None:
        pristine = self._shared[number][1].pristine
        assert pristine is not None
        self._common(number).copy_(pristine)

    def _detach(self, number: int, values: Tensor | None) -> None:
        """Put one parameter over ``values``; None: it is the last over the common memory, which it keeps."""
        parameter, entry, _ = self._shared.pop(number)
        self._watch()
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        del parameter._jap_holding
        if values is not None:
            _DATA.__set__(parameter, values)
        self._give_up(entry)

    def _give_up(self, entry: _Entry) -> None:
        entry.users -= 1
        if not entry.users:
            self._commons._drop(entry)

    def leave(self) -> None:
        """The member is gone, whatever it was doing: what nobody else holds is freed with it."""
        for number, (parameter, entry, version) in list(self._shared.items()):
            if number in self._aside or parameter._version != version:
                self._restore(number)
            self._give_up(entry)
        self._shared.clear()
        self._aside.clear()
        self._watch()
        self._commons._forget(self)


def unique_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory under some tensors, each piece counted once."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _bytes_of(dense: Tensor) -> Tensor:
    return dense.detach().as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _over(tensor: Tensor) -> Tensor:
    """Another tensor over the same memory, whose version is counted apart: each member's writes are its own."""
    bare = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return bare.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _checksum(dense: Tensor) -> int:
    bytes_: Any = _bytes_of(dense).numpy()
    return zlib.crc32(bytes_)


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    """Bit by bit: -0.0 is not 0.0, and a NaN equals itself."""
    return torch.equal(_bytes_of(left), _bytes_of(right).to(left.device))
