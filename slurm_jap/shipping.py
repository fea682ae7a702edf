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
from torch.nn.utils import parametrize

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


class World:
    """The classes that one pickle brought along, and the globals behind them. Nothing in it is shared with another.

    Each block has a world of its own, so that it makes no difference which blocks lie in one process: what a class or
    a file of the script keeps between calls, each block keeps for itself. ``trees.moved`` takes values across.
    """

    def __init__(self) -> None:
        self.classes: dict[str, type] = {}
        """By the id that a class has in every process."""


class _Own:
    """The script's own classes."""

    def __init__(self) -> None:
        self.by_id: Any = weakref.WeakValueDictionary()


_own = _Own()
_ids: Any = weakref.WeakKeyDictionary()
"""Class -> its id: of the script's own, and of those in worlds."""
_references: Any = weakref.WeakKeyDictionary()
"""Class -> its id and dump, for trees."""
_outside = World()
"""Classes that no block of this process holds, and that are none of the script's own."""


def forget_own_classes() -> None:
    """Give the script's classes new ids: what is dumped from now on has them as they are now."""
    for kind in list(_own.by_id.values()):
        _ids.pop(kind, None)
        _references.pop(kind, None)
    _own.by_id.clear()


@contextlib.contextmanager
def _tracking(by_class: Any, by_id: Any) -> Iterator[None]:
    saved = _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS, _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
    _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS = by_class
    _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID = by_id
    try:
        yield
    finally:
        _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS, _cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID = saved


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, place: Callable[[Tensor], Any]) -> None:
        super().__init__(file, protocol=5)
        self._place = place

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in (Tensor, nn.Parameter, nn.Buffer) or getattr(type(obj), "travels_as_parameter", False):
            return self._place(obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and "parametrizations" in obj._modules:
            # torch gives such a module a class of its own, which refuses to be pickled.
            tensors = tuple(obj._modules["parametrizations"]._modules)  # type: ignore[union-attr]
            return _parametrized, (type(obj).__bases__[0], tensors), obj.__dict__.copy()
        return super().reducer_override(obj)


def _parametrized(kind: type[nn.Module], tensors: tuple[str, ...]) -> nn.Module:
    """An empty module of a class such as ``torch.nn.utils.parametrize`` would have given it."""
    module: nn.Module = kind.__new__(kind)
    module.__dict__.update(_parameters={}, _buffers={}, _modules={})
    parametrize._inject_new_class(module)
    for name in tensors:
        parametrize._inject_property(module, name)
    return module


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, fetch: Callable[[Any], Tensor], world: World) -> None:
        super().__init__(file)
        self._fetch, self._world = fetch, world
        self._known_before: set[type] = set()

    def persistent_load(self, pid: Any) -> Tensor:
        return self._fetch(pid)

    def find_class(self, module: str, name: str) -> Any:
        # A class that this world has already stays as it is: it must not change under those who use it.
        found = super().find_class(module, name)
        if module == _cloudpickle.__name__ and name in ("_make_skeleton_class", "_make_skeleton_enum"):
            return functools.partial(self._make_class, found)
        if module == _cloudpickle.__name__ and name == "_class_setstate":
            return lambda kind, state: kind if kind in self._known_before else found(kind, state)
        return found

    def _make_class(self, make: Callable[..., type], *args: Any) -> type:
        known = self._world.classes.get(args[-2])  # (..., class_tracker_id, extra)
        if known is None:
            return make(*args)
        self._known_before.add(known)
        return known


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
        with _by_value(), _tracking(_ids, _own.by_id):
            _Pickler(file, place).dump(obj)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{what} cannot be sent to the engine: {type(error).__name__}: {error}; keep open files, locks, "
            "generators and lambdas over such things out of it"
        ) from error
    return file.getvalue(), found


def load(
    data: bytes,
    found: Sequence[Tensor],
    put: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    frozen: Callable[[Tensor], nn.Parameter] | None = None,
    *,
    world: World | None = None,
) -> Any:
    """Inverse of :func:`dump`: new parameters over the given tensors, one object per original object.

    Args:
        found: the tensors that :func:`dump` gave.
        put: where each shall lie; as it is, if nothing is said.
        frozen: makes a parameter that requires no gradient, from the tensor as it was given.
        world: where its classes shall be; a new one, if nothing is said.
    """
    world = World() if world is None else world
    made: dict[int, Tensor] = {}

    def fetch(pid: Any) -> Tensor:
        kind, requires_grad, extra, number, index, shape = pid
        tensor = made.get(number)
        if tensor is None:
            if kind == "p" and not requires_grad and index is not None and frozen is not None:
                made[number] = tensor = frozen(found[index])
                return tensor
            base = torch.empty(shape[0], dtype=shape[1], device="meta") if index is None else put(found[index])
            if kind == "p":
                tensor = nn.Parameter(base, requires_grad=requires_grad)
            elif kind == "b":
                tensor = nn.Buffer(base, persistent=extra)
            else:
                tensor = base.requires_grad_(requires_grad) if requires_grad else base
            made[number] = tensor
        return tensor

    with _tracking(_ids, world.classes):
        return _Unpickler(io.BytesIO(data), fetch, world).load()


# --- classes in trees -------------------------------------------------------------------------------------------------


def class_reference(kind: type) -> tuple[str, bytes] | None:
    """The id and the dump of a class that no other process can import, or must not; None where it can.

    It is dumped once per process.
    """
    if kind.__module__ == "builtins":
        return None
    if kind not in _references:
        _references[kind] = _make_reference(kind)
    reference: tuple[str, bytes] | None = _references[kind]
    return reference


def _make_reference(kind: type) -> tuple[str, bytes] | None:
    return None if is_importable(kind) else (class_id(kind), pickle.dumps(dump(kind, f"class {kind.__qualname__}")))


def class_id(kind: type) -> str:
    """By which every process knows the class."""
    with _tracking(_ids, _own.by_id):
        number: str = _cloudpickle._get_or_create_tracker_id(kind)
    return number


def is_own(kind: type) -> bool:
    """Whether ``class_reference`` would give something."""
    if kind.__module__ == "builtins":
        return False
    if kind not in _is_own:
        _is_own[kind] = not is_importable(kind)
    return bool(_is_own[kind])


_is_own: Any = weakref.WeakKeyDictionary()


def is_importable(obj: Any) -> bool:
    """Whether a class or function is found by its name in a module that does not travel by value."""
    module = sys.modules.get(getattr(obj, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or travels_by_value(module):
        return False
    found: Any = module
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is obj


def class_of(reference: tuple[str, bytes]) -> type:
    """Inverse of :func:`class_reference`: the script's own class where it is one."""
    number, data = reference
    own: type | None = _own.by_id.get(number)
    return class_in(_outside, number, lambda: data) if own is None else own


def class_in(world: World, number: str, data: Callable[[], bytes]) -> type:
    """The class with this id in a world; made from its dump where the world has none."""
    if number not in world.classes:
        load(*pickle.loads(data()), world=world)
    return world.classes[number]
