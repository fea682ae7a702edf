"""What travels by value arrives as it was, once, and apart from what the script goes on with."""

from __future__ import annotations

import importlib
import json
import math
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from slurm_jap import shipping
from slurm_jap.errors import UsageError


def round_trip(obj: Any) -> Any:
    return shipping.load(*shipping.dump(obj, "it"))


def test_tensors_lie_beside_the_bytes_uncopied_each_once() -> None:
    x = torch.randn(3)
    data, found = shipping.dump({"a": x, "b": [x, nn.Parameter(x)]}, "it")
    assert len(found) == 2
    assert all(t.data_ptr() == x.data_ptr() for t in found)
    loaded = shipping.load(data, found)
    assert loaded["a"] is loaded["b"][0]
    assert isinstance(loaded["b"][1], nn.Parameter)
    assert len(data) < 1000


def test_identity_and_kinds_are_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[2].weight = nn.Parameter(model[0].weight.detach().T.clone(), requires_grad=False)
    model[2].register_buffer("hidden", torch.ones(1), persistent=False)
    twin, parameters = round_trip((model, list(model.parameters())))
    assert [id(p) for p in twin.parameters()] == [id(p) for p in parameters]
    assert [p.requires_grad for p in parameters] == [p.requires_grad for p in model.parameters()]
    assert list(twin.state_dict()) == list(model.state_dict())
    assert [n for n, _ in twin.named_buffers()] == [n for n, _ in model.named_buffers()]


def test_meta_tensors_carry_their_shape_alone() -> None:
    big, small = nn.Parameter(torch.ones(10, 10)), nn.Parameter(torch.ones(2))
    data, found = shipping.dump([big, small], "it", lambda tensor: tensor is big)
    assert [t.shape for t in found] == [(2,)]
    loaded = shipping.load(data, found)
    assert loaded[0].is_meta
    assert loaded[0].shape == (10, 10)


def test_parametrized_modules_travel() -> None:
    """torch gives each a class of its own, which refuses to be pickled."""
    torch.manual_seed(0)
    layer = parametrizations.spectral_norm(parametrizations.weight_norm(nn.Linear(4, 3)), "bias")
    twin = round_trip(layer)
    x = torch.randn(2, 4)
    assert torch.equal(layer.eval()(x), twin.eval()(x))
    assert list(twin.state_dict()) == list(layer.state_dict())
    twin.parametrizations.weight.original0 = nn.Parameter(torch.full((3, 1), 9.0))
    assert not torch.equal(layer(x), twin(x))
    assert torch.equal(round_trip(twin)(x), twin(x)), "and on"


FILE = """
import math
import torch
RATE = 1
CALLS = []
def rate(): return RATE
class Layer(torch.nn.Module):
    def forward(self, x):
        CALLS.append(1)
        return x * rate() + len(CALLS) * math.pi * 0
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "swept_file.py").write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("swept_file")
    del sys.modules["swept_file"]


def test_a_files_globals_travel_as_they_are_now(file: Any) -> None:
    file.RATE = 5
    data, found = shipping.dump((file.Layer(), file.rate, file), "it")
    file.RATE = 7
    layer, rate, module = shipping.load(data, found)
    assert float(layer(torch.ones(()))) == 5
    assert rate() == module.rate() == 5
    assert file.CALLS == []
    assert type(layer) is not file.Layer
    assert float(file.Layer()(torch.ones(()))) == 7


def test_worlds_share_nothing(file: Any) -> None:
    dumped = shipping.dump(file.Layer(), "it")
    one, two = shipping.load(*dumped), shipping.load(*dumped)
    assert type(one) is not type(two)
    one(torch.ones(())), one(torch.ones(())), two(torch.ones(()))
    calls = [type(layer).forward.__globals__["CALLS"] for layer in (one, two)]
    assert [len(c) for c in calls] == [2, 1]


def test_one_world_has_one_class_which_nobody_changes(file: Any) -> None:
    first = shipping.dump(file.Layer(), "it")
    world = shipping.World()
    one = shipping.load(*first, world=world)
    file.RATE = 9
    two = shipping.load(*shipping.dump(file.Layer(), "it"), world=world)
    assert type(one) is type(two)
    assert float(two(torch.ones(()))) == 1, "the world's class stays as it is"
    shipping.forget_own_classes()
    three = shipping.load(*shipping.dump(file.Layer(), "it"), world=world)
    assert float(three(torch.ones(()))) == 9, "unless it was announced as another"


def test_loaded_things_can_be_sent_on(file: Any) -> None:
    file.RATE = 3
    layer = round_trip(round_trip(file.Layer()))
    assert float(layer(torch.ones(()))) == 3
    assert shipping.class_id(type(layer)) == shipping.class_id(file.Layer)


@pytest.mark.parametrize(
    ("module", "own"),
    [("json", False), ("torch", False), ("slurm_jap", False), ("hypothesis", False), ("swept_file", True)],
)
def test_whose_module_it_is(module: str, own: bool, file: Any) -> None:
    assert shipping.travels_by_value(importlib.import_module(module)) is own


def test_what_is_importable(file: Any) -> None:
    assert shipping.is_importable(json.dumps)
    assert shipping.is_importable(nn.Linear)
    assert not shipping.is_importable(file.rate)
    assert not shipping.is_importable(lambda: None)

    class Local:
        pass

    assert not shipping.is_importable(Local)
    assert not shipping.is_own(dict)
    assert not shipping.is_own(nn.Linear)
    assert shipping.is_own(Local)


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(UsageError, match=r"the thing cannot be sent to the engine: TypeError: .*keep open files"):
        shipping.dump(threading.Lock(), "the thing")


def test_where_tensors_shall_lie() -> None:
    data, found = shipping.dump([torch.ones(2), nn.Parameter(torch.ones(2), requires_grad=False)], "it")
    put, frozen = [], []

    def note(tensor: Tensor) -> Tensor:
        put.append(tensor)
        return tensor * math.e

    def freeze(tensor: Tensor) -> nn.Parameter:
        frozen.append(tensor)
        return nn.Parameter(tensor, requires_grad=False)

    plain, parameter = shipping.load(data, found, note, freeze)
    assert float(plain[0]) == pytest.approx(math.e)
    assert float(parameter[0]) == 1
    assert len(put) == len(frozen) == 1
