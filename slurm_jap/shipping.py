"""Moving user objects into the engine: by value, their tensors apart.

A module outside site-packages and the standard library is shipped by value. By reference the engine would import it
afresh, and a sweep over a module-level constant would silently train with the default.

Trainers in the member's own process go through the same pickles, so what cannot be shipped fails on a laptop too.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import site
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from slurm_jap.errors import UsageError

_cloudpickle: Any = sys.modules["cloudpickle.cloudpickle"]


def _installed_roots() -> tuple[str, ...]:
    roots = {*sysconfig.get_paths().values()}
    with contextlib.suppress(AttributeError):
        roots.update(site.getsitepackages())
        roots.add(site.getusersitepackages())
    roots.discard(sysconfig.get_paths()["data"])
    roots.discard(sysconfig.get_paths()["scripts"])
    return tuple(os.path.realpath(root) + os.sep for root in roots if root)


_INSTALLED = _installed_roots()
_ALWAYS_BY_REFERENCE = ("slurm_jap", "torch", "numpy", "cloudpickle")


def travels_by_value(module: types.ModuleType) -> bool:
    """Whether a module is the user's own source: outside site-packages and the standard library, and plain Python."""
    name = getattr(module, "__name__", "")
    if name.partition(".")[0] in _ALWAYS_BY_REFERENCE or name == "__main__":
        return False
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and file.endswith((".py", ".pyc")) and _is_own_file(file)


@functools.cache
def _is_own_file(file: str) -> bool:
    path = os.path.realpath(file)
    if f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path:
        return False
    return not path.startswith(_INSTALLED)


@contextlib.contextmanager
def _by_value() -> Iterator[None]:
    known = cloudpickle.list_registry_pickle_by_value()
    own = {
        module.__name__: module  # one module may stand under several names in sys.modules
        for module in list(sys.modules.values())
        if isinstance(module, types.ModuleType) and module.__name__ not in known and travels_by_value(module)
    }
    for module in own.values():
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own.values():
            cloudpickle.unregister_pickle_by_value(module)


class _Tracker:
    """cloudpickle's memory of which classes went by value, one for what is sent and one for what is received.

    With the single memory that cloudpickle keeps per process, loading here what was dumped here would find the user's
    own classes and overwrite their methods; in the engine there is nothing to find. Apart, both behave alike.
    """

    def __init__(self) -> None:
        self._by_class: Any = weakref.WeakKeyDictionary()
        self._by_id: Any = weakref.WeakValueDictionary()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        saved = _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS, _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
        _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS = self._by_class
        _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID = self._by_id
        try:
            yield
        finally:
            _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS, _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID = saved


_sent, _received = _Tracker(), _Tracker()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, place: Callable[[Tensor], Any]) -> None:
        super().__init__(file, protocol=5)
        self._place = place

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in (Tensor, nn.Parameter, nn.Buffer):
            return self._place(obj)
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, fetch: Callable[[Any], Tensor]) -> None:
        super().__init__(file)
        self._fetch = fetch

    def persistent_load(self, pid: Any) -> Tensor:
        return self._fetch(pid)


def dump(obj: Any, what: str, meta: Callable[[Tensor], bool] = lambda tensor: False) -> tuple[bytes, list[Tensor]]:
    """Pickle ``obj`` by value; its tensors come beside the bytes, each once, uncopied.

    Args:
        what: what to call it in an error.
        meta: tensors for which only shape and type travel.

    Raises:
        UsageError: something in it cannot be pickled.
    """
    found: list[Tensor] = []
    ids: dict[int, Any] = {}

    def place(tensor: Tensor) -> Any:
        pid = ids.get(id(tensor))
        if pid is None:
            kind = "p" if isinstance(tensor, nn.Parameter) else "b" if isinstance(tensor, nn.Buffer) else "t"
            extra = getattr(tensor, "persistent", True) if kind == "b" else True
            if meta(tensor) or tensor.is_meta:
                shape = (tuple(tensor.shape), tensor.dtype)
                pid = (kind, tensor.requires_grad, extra, len(ids), None, shape)
            else:
                pid = (kind, tensor.requires_grad, extra, len(ids), len(found), None)
                found.append(tensor.detach())
            ids[id(tensor)] = pid
        return pid

    file = io.BytesIO()
    try:
        with _by_value(), _sent.active():
            _Pickler(file, place).dump(obj)
    except Exception as error:
        raise UsageError(
            f"{what} cannot be sent to the engine: {type(error).__name__}: {error}; keep open files, locks, "
            "generators and lambdas over such things out of it"
        ) from error
    return file.getvalue(), found


def load(data: bytes, found: Sequence[Tensor], device: torch.device | None = None) -> Any:
    """Inverse of :func:`dump`: new parameters over the given tensors, one object per original object.

    Args:
        found: the tensors that :func:`dump` gave; they are used as they are where ``device`` is None.
        device: where they shall lie.
    """
    made: dict[int, Tensor] = {}

    def fetch(pid: Any) -> Tensor:
        kind, requires_grad, extra, number, index, shape = pid
        tensor = made.get(number)
        if tensor is None:
            base = torch.empty(shape[0], dtype=shape[1], device="meta") if index is None else found[index]
            if device is not None and index is not None:
                base = base.to(device)
            if kind == "p":
                tensor = nn.Parameter(base, requires_grad=requires_grad)
            elif kind == "b":
                tensor = nn.Buffer(base, persistent=extra)
            else:
                tensor = base.requires_grad_(requires_grad) if requires_grad else base
            made[number] = tensor
        return tensor

    with _received.active():
        return _Unpickler(io.BytesIO(data), fetch).load()
