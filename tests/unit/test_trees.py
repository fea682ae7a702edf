"""Trees: what is split, sent, settled comes out as it went in."""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_jap import shipping, trees
from slurm_jap.errors import UsageError


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    names: Any = ()


@dataclasses.dataclass(slots=True)
class Slotted:
    y: Any


class Colour(enum.Enum):
    RED = 1


class Named(dict):  # type: ignore[type-arg]
    """A mapping with an attribute."""

    note = "class"


ROWS = 6
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3), st.just(Colour.RED)
)
TREES = st.recursive(
    LEAVES | st.builds(lambda n: torch.arange(float(ROWS * n)).view(ROWS, n), st.integers(1, 3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(Named),
        st.builds(Pair, inner, inner),
        st.builds(Frozen, inner, inner),
        st.builds(Slotted, inner),
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    left, right = list(trees.leaves(a)), list(trees.leaves(b))
    return [p for p, _ in left] == [p for p, _ in right] and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for (_, x), (_, y) in zip(left, right, strict=True)
    )


def kinds(tree: Any) -> list[type]:
    found: list[type] = [type(tree)]
    if isinstance(tree, dict):
        inner = list(tree.values())
    elif isinstance(tree, (list, tuple)):
        inner = list(tree)
    elif dataclasses.is_dataclass(tree):
        inner = [getattr(tree, f.name) for f in dataclasses.fields(tree)]
    else:
        inner = []
    return found + [kind for value in inner for kind in kinds(value)]


@given(TREES)
def test_mapping_nothing_changes_nothing(tree: Any) -> None:
    twin = trees.tree_map(lambda leaf, path: leaf, tree)
    assert same(tree, twin)
    assert kinds(tree) == kinds(twin)


@given(TREES)
def test_sending_changes_nothing_for_the_script(tree: Any) -> None:
    data, found = trees.encode(tree)
    twin = trees.decode(data, found)
    assert same(tree, twin)
    assert kinds(tree) == kinds(twin), "the script's own classes come back as themselves"


@given(TREES)
def test_inside_classes_are_others_and_come_back(tree: Any) -> None:
    world, other = shipping.World(), shipping.World()
    inside = trees.moved(tree, world)
    assert [k.__name__ for k in kinds(inside)] == [k.__name__ for k in kinds(tree)]
    assert not {Pair, Frozen, Slotted, Named} & set(kinds(inside))
    assert kinds(trees.moved(tree, world)) == kinds(inside), "in one world, a class is one class"
    assert all(a is b for a, b in zip(trees.tensors(tree), trees.tensors(inside), strict=True))
    further = trees.moved(inside, other)
    assert not (set(kinds(further)) & set(kinds(inside))) & set(world.classes.values())
    assert kinds(trees.decode(*trees.encode(further))) == kinds(tree)


def test_sent_tensors_are_nobody_elses() -> None:
    x = torch.arange(6.0)
    sent = trees.as_sent({"x": x, "y": (x, x.view(2, 3))})
    sent["x"].add_(1)
    sent["y"][0].mul_(2)
    assert torch.equal(x, torch.arange(6.0))
    assert torch.equal(sent["y"][1], torch.arange(6.0).view(2, 3))


def test_functions_and_modules_go_by_value() -> None:
    from torch import nn

    class Custom(nn.Module):
        pass

    tree = {"f": lambda x: x + 1, "m": Custom(), "t": torch.ones(2)}
    twin = trees.decode(*trees.encode(tree))
    assert twin["f"](1) == 2
    assert type(twin["m"]).__name__ == "Custom"
    assert torch.equal(twin["t"], tree["t"])


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(UsageError, match="a batch, or what a block returned cannot be sent to the engine"):
        trees.encode({"lock": (i for i in range(3))})


# --- rows -------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 50), st.integers(1, 12))
def test_sizes_are_as_equal_as_can_be(rows: int, microbatches: int) -> None:
    sizes = trees.microbatch_sizes(rows, microbatches)
    assert sum(sizes) == rows
    assert len(sizes) == min(rows, microbatches)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(TREES, st.integers(2, 5))
def test_pieces_make_the_whole(tree: Any, microbatches: int) -> None:
    sizes = trees.microbatch_sizes(ROWS, microbatches)
    try:
        pieces = trees.split_rows("batch", tree, sizes)
    except UsageError:
        return  # its message is another test's
    assert len(pieces) == len(sizes)
    for (path, leaf), *parts in zip(trees.leaves(tree), *(trees.leaves(p) for p in pieces), strict=False):
        if isinstance(leaf, torch.Tensor):
            assert torch.equal(leaf, torch.cat([part for _, part in parts])), path
    assert all(kinds(piece)[0] is kinds(tree)[0] for piece in pieces)


@pytest.mark.parametrize(
    "batch",
    [
        {"words": ["a", "b", "c", "d"]},
        Pair(["a", "b", "c", "d"], None),
        Frozen(1, ["a", "b", "c", "d"]),
        [Slotted(("a", "b", "c", "d"))],
        ["a", None, "c", "d"],
        [["a", "b"], [], ["c"], ["d"]],
    ],
    ids=["dict", "named tuple", "dataclass", "nested", "with None", "lists of lists"],
)
def test_lists_are_cut_by_row_wherever_they_lie(batch: Any) -> None:
    first, second = trees.split_rows("batch", batch, [3, 1])
    left = [leaf for _, leaf in trees.leaves(first) if isinstance(leaf, str)]
    right = [leaf for _, leaf in trees.leaves(second) if isinstance(leaf, str)]
    assert right == ["d"]
    assert left == [leaf for leaf in ("a", "b", "c") if leaf in str(batch)]


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        ({"x": {"y": torch.ones(3)}}, r"batch\['x'\]\['y'\]: shape \(3,\) has 3 rows, the batch has 4"),
        (Frozen(torch.ones(4), [1, 2]), r"batch\.names: a list of 2 items, the batch has 4 rows"),
        (Pair(None, [["a"], ["b", "c"], 1]), r"batch\.b"),
        ([{1, 2}], r"batch\[0\]: a set cannot be split"),
        (Colour.RED, r"batch: a Colour cannot be split"),
    ],
)
def test_what_cannot_be_cut_is_named_by_its_path(batch: Any, path: str) -> None:
    with pytest.raises(UsageError, match=path):
        trees.split_rows("batch", batch, [2, 2])
    assert trees.split_rows("batch", batch, [4]) == [batch], "one micro-batch takes anything"


# --- memory -----------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "plain": torch.randn(4, 6),
    "transposed": torch.randn(6, 4).T,
    "channels_last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "strided": torch.randn(8, 12)[::2, ::2],
    "expanded": torch.randn(1, 6).expand(4, 6),
    "misaligned": torch.randn(100)[3:27].view(4, 6),
    "empty": torch.randn(0, 6),
    "scalar": torch.randn(()),
    "bool": torch.randn(4, 6) > 0,
    "sparse": torch.eye(4).to_sparse(),
    "complex conjugate": torch.randn(4, dtype=torch.complex64).conj(),
    "negative view": torch.randn(4, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_settled_tensors_have_the_same_values_dense_and_aligned(name: str) -> None:
    tensor = LAYOUTS[name]
    found = trees.settled(tensor)
    assert torch.equal(
        found.to_dense() if found.is_sparse else found, tensor.to_dense() if tensor.is_sparse else tensor
    )
    if tensor.layout is torch.strided:
        assert trees.is_dense(found)
        assert found.numel() == 0 or found.data_ptr() % trees.ALIGNMENT == 0
        assert not found.is_conj()
        assert not found.is_neg()
    if name in ("plain", "channels_last", "transposed"):
        assert found is tensor, "what lies well is not copied"


def test_settled_trees_share_no_memory() -> None:
    x = torch.randn(4, 6)
    tree = trees.settle({"a": x, "b": (x, x.view(-1)), "c": x[:2], "d": torch.randn(2)})
    places = [t.untyped_storage().data_ptr() for t in trees.tensors(tree)]
    assert len(set(places)) == len(places)
    assert tree["a"] is x


def test_copies_keep_their_gradients() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    h = x * 2
    tree = trees.settle((h, h))
    (tree[0].sum() + 3 * tree[1].sum()).backward()
    assert torch.equal(x.grad, torch.full((4, 6), 8.0))


def test_classes_are_dumped_once() -> None:
    first = shipping.class_reference(Frozen)
    assert first is not None
    assert shipping.class_reference(Frozen) is first
    assert shipping.class_reference(collections.OrderedDict) is None
    assert shipping.class_reference(int) is None
    shipping.forget_own_classes()
    again = shipping.class_reference(Frozen)
    assert again is not None
    assert again[0] != first[0]
