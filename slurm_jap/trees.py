"""Trees: what a step's inputs, a block's outputs and a target may be, and how they are split by row and sent.

A tree is a tensor, None, a number, a string, or a dict, list, tuple, named tuple or dataclass of trees; anything else
is a leaf that travels whole. Paths in messages read like Python: ``batch['name'][0]``.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from slurm_jap.errors import UsageError

Tree = Any

ALIGNMENT = 64
"""Bytes on which the memory of every tensor that could cross to another process starts."""


def tree_map(function: Callable[[Any, str], Any], tree: Tree, path: str = "") -> Tree:
    """The same tree with ``function(leaf, path)`` in place of every leaf (tensor, None, number, ...)."""
    if isinstance(tree, dict):
        mapped = {key: tree_map(function, value, f"{path}[{key!r}]") for key, value in tree.items()}
        return mapped if type(tree) is dict else _like_mapping(tree, mapped)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(tree_map(function, v, f"{path}.{f}") for f, v in zip(tree._fields, tree, strict=True)))
    if type(tree) in (list, tuple):
        return type(tree)(tree_map(function, value, f"{path}[{i}]") for i, value in enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        values = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
        copy = object.__new__(type(tree))
        for name, value in values.items():
            object.__setattr__(copy, name, tree_map(function, value, f"{path}.{name}"))
        return copy
    return function(tree, path)


def _like_mapping(original: dict[Any, Any], values: dict[Any, Any]) -> dict[Any, Any]:
    copy = original.copy()
    copy.update(values)
    return copy


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path, in order."""
    found: list[tuple[str, Any]] = []
    tree_map(lambda leaf, where: found.append((where, leaf)), tree, path)
    return iter(found)


def tensors(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in order."""
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


def _is_row_list(value: Any) -> bool:
    return (
        type(value) in (list, tuple)
        and bool(value)
        and all(isinstance(v, (str, bytes, int, float, bool)) for v in value)
    )


def _slice_plain_lists(tree: Tree, path: str, rows: int, start: int, size: int) -> Tree:
    if _is_row_list(tree):
        if len(tree) != rows:
            raise UsageError(
                f"{path}: a list of {len(tree)} items, the batch has {rows} rows; give one item per row, or "
                "microbatches=1"
            )
        return tree[start : start + size]
    if isinstance(tree, dict):
        values = {k: _slice_plain_lists(v, f"{path}[{k!r}]", rows, start, size) for k, v in tree.items()}
        return values if type(tree) is dict else _like_mapping(tree, values)
    if type(tree) in (list, tuple):
        return type(tree)(_slice_plain_lists(v, f"{path}[{i}]", rows, start, size) for i, v in enumerate(tree))
    return tree


# --- Trees on the wire: tensors apart from the rest ----------------------------------------------------------------


class _FastPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, found: list[Tensor]) -> None:
        super().__init__(file, protocol=5)
        self._found = found

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, Tensor):
            self._found.append(obj)
            return len(self._found) - 1
        return None


class _ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, found: list[Tensor]) -> None:
        super().__init__(file, protocol=5)
        self._found = found

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, Tensor):
            self._found.append(obj)
            return len(self._found) - 1
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, found: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._found = found

    def persistent_load(self, pid: int) -> Tensor:
        return self._found[pid]


def encode(tree: Tree) -> tuple[bytes, list[Tensor]]:
    """A tree as bytes without its tensors, and the tensors. Classes that no peer can import go by value."""
    found: list[Tensor] = []
    file = io.BytesIO()
    try:
        _FastPickler(file, found).dump(tree)
    except (pickle.PicklingError, AttributeError, TypeError, ImportError):
        found.clear()
        file = io.BytesIO()
        _ByValuePickler(file, found).dump(tree)
    return file.getvalue(), found


def decode(data: bytes, found: Sequence[Tensor]) -> Tree:
    """Inverse of :func:`encode`."""
    return _Unpickler(io.BytesIO(data), found).load()


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory exactly once, in some order of dimensions (channels_last too)."""
    if tensor.layout is not torch.strided:
        return False
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
    if not is_dense(tensor):
        return tensor.contiguous()
    if tensor.numel() and tensor.data_ptr() % ALIGNMENT:
        return tensor.clone()
    return tensor


def settle(tree: Tree) -> Tree:
    """The tree with every tensor settled."""
    return tree_map(lambda leaf, path: settled(leaf) if isinstance(leaf, Tensor) else leaf, tree)
