"""Trees: what a step's inputs, a block's outputs and a target may be, and how they are split by row and sent.

A tree is a tensor, None, a number, a string, or a dict, list, tuple, named tuple or dataclass of trees; anything else
is a leaf that travels whole. Paths in messages read like Python: ``batch['name'][0]``.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from slurm_jap import shipping
from slurm_jap.errors import UsageError

Tree = Any

ALIGNMENT = 64
"""Bytes on which the memory of every tensor that could cross to another process starts."""


def tree_map(function: Callable[[Any, str], Any], tree: Tree, path: str = "") -> Tree:
    """The same tree with ``function(leaf, path)`` in place of every leaf (tensor, None, number, ...)."""
    if isinstance(tree, Tensor):  # most trees are one tensor
        return function(tree, path)
    if isinstance(tree, dict):
        return _like_mapping(tree, {k: tree_map(function, v, f"{path}[{k!r}]") for k, v in tree.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(tree_map(function, v, f"{path}.{f}") for f, v in zip(tree._fields, tree, strict=True)))
    if type(tree) in (list, tuple):
        return type(tree)(tree_map(function, value, f"{path}[{i}]") for i, value in enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
        return _like_dataclass(tree, {f: tree_map(function, v, f"{path}.{f}") for f, v in fields.items()})
    return function(tree, path)


def _like_dataclass(original: Any, values: dict[str, Any]) -> Any:
    return _filled(type(original), {**getattr(original, "__dict__", {}), **values})


def _like_mapping(original: dict[Any, Any], values: dict[Any, Any]) -> dict[Any, Any]:
    if type(original) is dict:
        return values
    if dataclasses.is_dataclass(original):  # some such classes forbid every change after construction
        return type(original)(**values)
    twin = copy.copy(original)
    twin.update(values)
    return twin


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, in order."""
    found: list[tuple[str, Any]] = []
    tree_map(lambda leaf, where: found.append((where, leaf)), tree, path)
    return iter(found)


def tensors(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)]


def row_count(trees: Sequence[tuple[str, Tree]]) -> int:
    """The number of rows: dimension 0 of the first tensor with at least one dimension.

    Raises:
        UsageError: no tensor has rows.
    """
    for name, tree in trees:
        for _, leaf in leaves(tree, name):
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                return leaf.shape[0]
    names = ", ".join(name for name, _ in trees)
    raise UsageError(
        f"step({names}): no tensor with a batch dimension to split into micro-batches; pass the batch as tensors"
    )


def microbatch_sizes(rows: int, microbatches: int) -> list[int]:
    """Rows of each micro-batch: as equal as can be, larger ones first; fewer micro-batches when rows are fewer.

    >>> microbatch_sizes(8, 3)
    [3, 3, 2]
    """
    count = max(1, min(rows, microbatches))
    base, extra = divmod(rows, count)
    return [base + (i < extra) for i in range(count)]


def split_rows(name: str, tree: Tree, sizes: Sequence[int]) -> list[Tree]:
    """Cut a tree into micro-batches along dimension 0.

    Tensors are cut by row, and so are lists or tuples of that many strings or numbers; a 0-dimensional tensor, None, a
    number, a bool or a string goes to every micro-batch.

    Raises:
        UsageError: a tensor or list whose length is not the number of rows; the message names its path.
    """
    rows = sum(sizes)
    if len(sizes) == 1:
        return [tree]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]

    def piece(start: int, size: int) -> Tree:
        def cut(leaf: Any, path: str) -> Any:
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                if leaf.shape[0] != rows:
                    raise UsageError(
                        f"{path}: shape {tuple(leaf.shape)} has {leaf.shape[0]} rows, the batch has {rows}; every "
                        "tensor needs one row per sample in dimension 0: keep constants inside the model, or pass "
                        "0-d tensors"
                    )
                return leaf[start : start + size]
            if leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes, Tensor)):
                return leaf
            raise UsageError(
                f"{path}: a {type(leaf).__name__} cannot be split into micro-batches; pass tensors, lists of one item "
                "per row, dicts, tuples or dataclasses of those, or microbatches=1"
            )

        return tree_map(cut, _slice_plain_lists(tree, name, rows, start, size), name)

    return [piece(start, size) for start, size in zip(starts, sizes, strict=True)]


def _is_row_list(value: Any, rows: int) -> bool:
    """A list of one plain item per row, or of one list of plain items per row."""
    if type(value) not in (list, tuple) or not value or all(v is None for v in value):
        return False
    if all(type(v) in _PLAIN for v in value):
        return True
    inner = [v for v in value if type(v) in (list, tuple)]
    return (
        type(value) is list
        and len(inner) == len(value) == rows
        and all(type(item) in _PLAIN for v in inner for item in v)
        and not all(len(v) == rows for v in inner)  # then it is the lists in it that have an item per row
    )


def _slice_plain_lists(tree: Tree, path: str, rows: int, start: int, size: int) -> Tree:
    if _is_row_list(tree, rows):
        if len(tree) != rows:
            raise UsageError(
                f"{path}: a list of {len(tree)} items, the batch has {rows} rows; give one item per row, or "
                "microbatches=1"
            )
        return tree[start : start + size]

    def down(value: Any, where: str) -> Tree:
        return _slice_plain_lists(value, where, rows, start, size)

    if isinstance(tree, dict):
        return _like_mapping(tree, {k: down(v, f"{path}[{k!r}]") for k, v in tree.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(down(v, f"{path}.{f}") for f, v in zip(tree._fields, tree, strict=True)))
    if type(tree) in (list, tuple):
        return type(tree)(down(v, f"{path}[{i}]") for i, v in enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
        return _like_dataclass(tree, {f: down(v, f"{path}.{f}") for f, v in fields.items()})
    return tree


# --- Trees on the wire: tensors apart from the rest ----------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Tensors go beside; classes of the script's own go by value, so that they are the same at both ends."""

    def __init__(self, file: io.BytesIO, found: list[Tensor]) -> None:
        super().__init__(file, protocol=5)
        self._found = found

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.layout is torch.strided:  # others hold tensors, which are
            self._found.append(obj)
            return len(self._found) - 1
        if isinstance(obj, type):
            return self._class(obj)
        if isinstance(obj, types.FunctionType) and not shipping.is_importable(obj):
            raise pickle.PicklingError(f"function {obj.__qualname__} can only go by value")
        return None

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if dataclasses.is_dataclass(kind) and "__slots__" in kind.__dict__ and shipping.is_own(kind):
            # A class that went by value has lost its slots, and what was pickled there would not fit here.
            fields = [f.name for f in dataclasses.fields(kind) if hasattr(obj, f.name)]
            return _filled, (kind, {name: getattr(obj, name) for name in fields})
        return NotImplemented

    def _class(self, kind: type) -> Any:
        return shipping.class_reference(kind)


def _filled(kind: type, values: dict[str, Any]) -> Any:
    made: Any = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, found: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._found = found

    def persistent_load(self, pid: Any) -> Any:
        return self._found[pid] if isinstance(pid, int) else self._class(pid)

    def _class(self, pid: Any) -> type:
        return shipping.class_of(pid)


def encode(tree: Tree, what: str = "a batch, or what a block returned") -> tuple[bytes, list[Tensor]]:
    """A tree as bytes without its tensors, and the tensors.

    Args:
        what: what to call it in an error.

    Raises:
        UsageError: it holds something that cannot be pickled.
    """
    found: list[Tensor] = []
    file = io.BytesIO()
    try:
        _Pickler(file, found).dump(tree)
    except (pickle.PicklingError, AttributeError, TypeError, ImportError):
        data, found = shipping.dump(tree, what)
        return _BY_VALUE + data, found
    return file.getvalue(), found


_BY_VALUE = b"v"
"""Before a tree that was dumped whole; no pickle begins with it."""


def decode(data: bytes, found: Sequence[Tensor]) -> Tree:
    """Inverse of :func:`encode`; the script's own classes are themselves again."""
    if data.startswith(_BY_VALUE):
        return shipping.load(data[1:], found)
    return _Unpickler(io.BytesIO(data), found).load()


class _Mover(_Pickler):
    def __init__(self, file: io.BytesIO, found: list[Tensor], kinds: list[type]) -> None:
        super().__init__(file, found)
        self._kinds = kinds

    def _class(self, kind: type) -> Any:
        if not shipping.is_own(kind):
            return None
        self._kinds.append(kind)
        return ("class", len(self._kinds) - 1)


class _Moved(_Unpickler):
    def __init__(self, file: io.BytesIO, found: Sequence[Tensor], kinds: list[type], world: shipping.World) -> None:
        super().__init__(file, found)
        self._kinds, self._world = kinds, world

    def _class(self, pid: Any) -> type:
        kind = self._kinds[pid[1]]
        return shipping.class_in(
            self._world,
            shipping.class_id(kind),
            lambda: shipping.class_reference(kind)[1],  # type: ignore[index]
        )


def moved(tree: Tree, world: shipping.World) -> Tree:
    """The tree as values of another world: same tensors, and the world's own classes in place of their likes."""
    if _is_plain(tree):
        return tree
    found: list[Tensor] = []
    kinds: list[type] = []
    file = io.BytesIO()
    try:
        _Mover(file, found, kinds).dump(tree)
    except (pickle.PicklingError, AttributeError, TypeError, ImportError):
        return tree_map(lambda leaf, _: leaf, tree)  # with functions in it: they take their world along
    return _Moved(io.BytesIO(file.getvalue()), found, kinds, world).load()


_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def _is_plain(tree: Tree) -> bool:
    """Whether there is no class in it that belongs to a world."""
    if isinstance(tree, Tensor) or type(tree) in _PLAIN:
        return True
    if type(tree) in (list, tuple):
        return all(map(_is_plain, tree))
    return type(tree) is dict and all(map(_is_plain, tree.values()))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory exactly once, in some order of dimensions (channels_last too)."""
    if tensor.layout is not torch.strided:
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return True
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def settled(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it is not dense or does not start on 64 bytes of memory.

    Kernels may round differently on another stride or alignment. What has crossed to another process always lies so;
    wherever a tensor could cross, it is settled even if it does not.
    """
    if tensor.layout is not torch.strided:
        return tensor
    tensor = tensor.resolve_conj().resolve_neg()  # a pending conjugation is no part of the memory
    if not is_dense(tensor):
        return tensor.contiguous()
    if tensor.numel() and tensor.data_ptr() % ALIGNMENT:
        return tensor.clone()
    return tensor


def nbytes(tensor: Tensor) -> int:
    """Bytes of its values; of a sparse tensor about, for it has none to ask for."""
    return tensor.nbytes if tensor.layout is torch.strided else tensor._nnz() * tensor.element_size()


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor laid out row by row, where it is strided at all."""
    return tensor.contiguous() if tensor.layout is torch.strided else tensor


def settle(tree: Tree) -> Tree:
    """The tree with every tensor settled, and no two of them in the same memory, as if each had been sent."""
    seen: set[int] = set()

    def own(leaf: Any, path: str) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensor = settled(leaf)
        if tensor.layout is torch.strided and tensor.numel():
            place = tensor.untyped_storage().data_ptr()
            if place in seen:
                return tensor.clone()
            seen.add(place)
        return tensor

    return tree_map(own, tree)


def cut_off(tree: Tree) -> Tree:
    """The tree without the computation that led to it, as it is after the way to another process."""
    return tree_map(lambda leaf, _: _cut_off(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def _cut_off(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(True) if tensor.requires_grad else tensor.detach()


def differentiable(tree: Tree) -> Tree:
    """The tree with tensors of numbers that gradients may be taken of."""
    return tree_map(
        lambda leaf, _: leaf.detach().requires_grad_(leaf.is_floating_point()) if isinstance(leaf, Tensor) else leaf,
        tree,
    )


def cloned(tree: Tree) -> Tree:
    """The tree with tensors that nobody else holds, laid out as they were."""
    return tree_map(lambda leaf, _: _clone(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def as_sent(tree: Tree) -> Tree:
    """The tree as if it had been sent: no object in it, and no tensor, is the script's own."""
    return decode(*encode(cloned(tree)))


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def to_device(tree: Tree, device: torch.device) -> Tree:
    """The tree with its tensors on ``device``."""
    return tree_map(lambda leaf, _: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)
