"""Batches of every form and size train in a sweep as alone: trees, keywords, odd rows and layouts, evaluation."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from company import check, fit, rows
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import slurm_jap as jap
from slurm_jap.errors import UsageError

pytestmark = pytest.mark.engine

Sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
CROSS_ENTROPY = nn.CrossEntropyLoss()


def network(dropout: float = 0.3) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def simple(data: Callable[[], list[Any]], **options: Any) -> Any:
    model = network()
    return fit(model, Sgd(model.parameters()), CROSS_ENTROPY, data(), **options)


def odd_rows() -> list[Any]:
    """pytorch issue 126600: 8 rows in 3 micro-batches; and fewer rows than micro-batches, down to one."""
    return [batch for n in (8, 7, 5, 3, 1, 2, 8) for batch in rows(1, batch=n, seed=n)]


def last_short_batch() -> Any:
    """apex pull 1500: 10 samples in batches of 4, two epochs, every sample seen once."""
    model = network()
    generator = torch.Generator().manual_seed(3)
    samples = TensorDataset(torch.randn(10, 6, generator=generator), torch.arange(10) % 3)
    loader = DataLoader(samples, batch_size=4, shuffle=True, generator=generator)
    seen: collections.Counter[float] = collections.Counter()

    def batches() -> Any:
        for _ in range(2):
            for x, y in loader:
                seen.update(x[:, 0].tolist())
                yield (x,), {}, y

    answer = fit(model, Sgd(model.parameters()), CROSS_ENTROPY, batches(), microbatches=3)
    assert sorted(seen.values()) == [2] * 10
    assert len(answer["losses"]) == 6
    return answer


# --- trees ------------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    x: Tensor
    label: list[str]


@dataclasses.dataclass(frozen=True)
class Item:
    point: Point
    weight: Tensor | None
    words: list[str]
    kind: str = "plain"


class Output(collections.OrderedDict):  # type: ignore[type-arg]
    """A mapping that is a dataclass and forbids changes, as some libraries' outputs do."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("update is not allowed")


@dataclasses.dataclass
class Answer(Output):
    logits: Tensor
    loss: Tensor | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __reduce__(self) -> Any:
        make, _, *rest = super().__reduce__()
        return make, tuple(getattr(self, field.name) for field in dataclasses.fields(self)), *rest


class OnItem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, item: Item, *, scale: Any, flag: bool = False, mask: Tensor | None = None) -> dict[str, Any]:
        rows = len(item.point.x)
        assert isinstance(item, Item)
        assert isinstance(item.point, Point)
        assert len(item.words) == len(item.point.label) == rows, "lists are cut by row, wherever they lie"
        assert flag
        assert mask is None
        lengths = torch.tensor([len(word) for word in item.words], dtype=torch.float32).unsqueeze(1)
        return {"h": self.linear(item.point.x) * scale + lengths, "item": item}


class ToAnswer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, tree: dict[str, Any]) -> Answer:
        assert tree["item"].kind == "plain"
        return Answer(logits=self.linear(torch.relu(tree["h"])))


def trees() -> Any:
    """pytorch issue 130055, Modalities pull 399: only tensors passed."""
    torch.manual_seed(6)
    model = nn.Sequential(OnItem(), nn.Identity(), ToAnswer(), nn.Identity())
    blocks = list(model)

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, item: Item, **kwargs: Any) -> Answer:
            first, *rest = self.inner
            value = first(item, **kwargs)
            for block in rest:
                value = block(value)
            return value

    def loss(answer: Answer, target: dict[str, Any]) -> Tensor:
        assert isinstance(answer, Answer)
        assert answer.loss is None
        assert target["none"] is None
        assert len(target["names"]) == len(answer.logits)
        return nn.functional.cross_entropy(answer.logits, target["labels"][0])

    data = []
    for number, ((x,), _, y) in enumerate(rows(3, batch=7)):
        words = ["w" * (1 + (i + number) % 4) for i in range(7)]
        item = Item(Point(x, [f"p{i}" for i in range(7)]), None, words)
        keywords = {"scale": torch.tensor(0.5), "flag": True, "mask": None}
        data.append(((item,), keywords, {"labels": (y, y), "none": None, "names": tuple(words), "rate": 0.1}))

    def look(trainer: Any, number: int) -> Any:
        (item,), keywords, _ = data[0]
        answer = trainer.forward(item, **keywords)
        assert isinstance(answer, Answer)
        return answer.logits

    whole = Wrapped()
    return fit(whole, Sgd(whole.parameters()), loss, data, after_batch=look, blocks=blocks)


def keywords_only() -> Any:
    torch.manual_seed(7)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Embedding(5, 8)

        def forward(self, *, ids: Tensor, x: Tensor) -> Tensor:
            return self.a(x) + self.b(ids)

    model = nn.Sequential(Two(), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(model)

        def forward(self, *, ids: Tensor, x: Tensor) -> Tensor:
            h = self.layers[0](ids=ids, x=x)
            for layer in self.layers[1:]:
                h = layer(h)
            return h

    whole = Whole()
    data = [((), {"x": x, "ids": torch.arange(len(x)) % 5}, y) for (x,), _, y in rows(3)]
    return fit(whole, Sgd(whole.parameters()), CROSS_ENTROPY, data)


# --- layouts ----------------------------------------------------------------------------------------------------------


def strange_layouts() -> list[Any]:
    """Transposed, sliced, expanded, misaligned, of width zero in front: their values alone count."""
    generator = torch.Generator().manual_seed(8)
    labels = torch.arange(8) % 3
    wide = torch.randn(16, 12, generator=generator)
    flat = torch.randn(8 * 6 + 3, generator=generator)
    return [
        ((wide[:6, :8].T,), {}, labels),
        ((wide[::2, ::2],), {}, labels.repeat_interleave(2)[::2]),
        ((wide[:1, :6].expand(8, 6),), {}, labels[:1].expand(8)),
        ((flat[3:].view(8, 6),), {}, labels),
        ((wide[3:11, 1:7],), {}, labels.flip(0)),
        ((wide.flip(0)[:8, :6],), {}, labels),
    ]


def overwritten_batches() -> Any:
    """The script keeps one buffer and overwrites it as soon as step returns; and gives views of it."""
    model = network()
    x, y = torch.empty(16, 6), torch.empty(16, dtype=torch.long)

    def batches() -> Any:
        for number in range(6):
            generator = torch.Generator().manual_seed(number)
            x.copy_(torch.randn(16, 6, generator=generator))
            y.copy_(torch.randint(0, 3, (16,), generator=generator))
            yield (x[4:12],), {}, y[4:12]
            x.fill_(float("nan"))
            y.fill_(-7)

    return fit(model, Sgd(model.parameters()), CROSS_ENTROPY, batches())


def large_batches() -> Any:
    """Above what goes through a socket in one piece."""
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 3))
    return fit(model, Sgd(model.parameters()), CROSS_ENTROPY, rows(2, batch=150, shape=(2048,)), microbatches=2)


def under_no_grad() -> Any:
    """Training inside no_grad and inference_mode: the trainer's gradients are its own affair."""
    model = network()
    with torch.no_grad():
        first = fit(model, Sgd(model.parameters()), CROSS_ENTROPY, rows(2))
    model = network()
    with torch.inference_mode():
        second = fit(model, Sgd(model.parameters()), CROSS_ENTROPY, rows(2))
    assert torch.equal(first["losses"][1], second["losses"][1])
    assert not torch.equal(first["losses"][0], first["losses"][1])
    return first["losses"], first["state"]


# --- evaluation -------------------------------------------------------------------------------------------------------


def metrics(output: Tensor, target: Tensor) -> dict[str, Any]:
    correct = (output.argmax(1) == target).sum()
    return {"accuracy": (correct, len(target)), "confidence": output.softmax(1).max(1)[0].mean()}


def evaluate_in_between() -> Any:
    """pytorch issue 162822: evaluation before training, between, with other batch sizes; and forward in both modes."""
    model = network()
    held_out = [(x, y) for n in (5, 1, 9) for (x,), _, y in rows(1, batch=n, seed=n)]
    trainer = jap.prepare(model, Sgd(model.parameters()), CROSS_ENTROPY, microbatches=4)
    kept: list[Any] = [trainer.evaluate(held_out, metrics)]
    model.eval()
    kept.append(trainer.forward(held_out[0][0]))
    model.train()
    kept.append(trainer.forward(held_out[2][0]))  # dropout draws, and each time anew
    kept.append(trainer.forward(held_out[2][0]))
    assert not torch.equal(kept[2], kept[3])
    for (x,), _, y in rows(2):
        kept.append(trainer.step(x, target=y).loss)
        kept.append(trainer.evaluate(iter(held_out), metrics))
    assert model.training
    kept.append(trainer.evaluate([], metrics))
    kept.append(
        trainer.evaluate([(*held_out[0][:1], held_out[0][1])], lambda o, t: float((o - o.mean()).square().mean()))
    )
    for (x,), _, y in rows(2, batch=6, seed=4):
        kept.append(trainer.step(x, target=y).loss)
    kept.append(trainer.state_dict())
    trainer.close()
    return kept


def evaluation_does_not_disturb() -> Any:
    """The same losses with and without evaluation before and between."""

    def train(look: bool) -> list[Tensor]:
        model = network()
        trainer = jap.prepare(model, Sgd(model.parameters()), CROSS_ENTROPY, microbatches=3)
        losses = []
        for (x,), _, y in rows(3):
            if look:
                trainer.evaluate([(x, y)], metrics)
                trainer.forward(x)
            losses.append(trainer.step(x, target=y).loss)
        trainer.close()
        return losses

    with_it, without = train(True), train(False)
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))
    return with_it


def one_after_another() -> Any:
    """Two trainings in one script; the second model is another."""
    first = simple(lambda: rows(2))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    return first, fit(model, torch.optim.Adam(model.parameters()), CROSS_ENTROPY, rows(2), clip_grad_norm=1.0)


BATCHES: dict[str, Callable[[], Any]] = {
    **{f"odd rows, {m} micro-batches": functools.partial(simple, odd_rows, microbatches=m) for m in (1, 2, 3, 4, 7)},
    "last short batch": last_short_batch,
    "trees": trees,
    "keywords only": keywords_only,
    "strange layouts": functools.partial(simple, strange_layouts),
    "strange layouts, one micro-batch": functools.partial(simple, strange_layouts, microbatches=1),
    "overwritten": overwritten_batches,
    "large": large_batches,
    "under no_grad": under_no_grad,
    "evaluation": evaluate_in_between,
    "evaluation does not disturb": evaluation_does_not_disturb,
    "one after another": one_after_another,
}


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_batches(stages: int) -> None:
    check(BATCHES, stages=stages)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
def test_few_micro_batches_never_hang(microbatches: int) -> None:
    """torchtitan issue 775: fewer micro-batches than stages."""
    check({"few": functools.partial(simple, lambda: rows(2), microbatches=microbatches)}, stages=4)


def test_evaluation_is_the_plain_models() -> None:
    model, twin = network(), network()
    trainer = jap.prepare(model, Sgd(model.parameters()), CROSS_ENTROPY, microbatches=4)
    held_out = [(x, y) for n in (5, 1, 9) for (x,), _, y in rows(1, batch=n, seed=n)]
    result = trainer.evaluate(held_out, metrics)
    twin.eval()
    with torch.no_grad():
        outputs = [(twin(x), y) for x, y in held_out]
        assert result["accuracy"] == sum(int((o.argmax(1) == y).sum()) for o, y in outputs) / 15
        best = sum(float(o.softmax(1).max(1)[0].sum()) for o, _ in outputs) / 15
        assert result["confidence"] == pytest.approx(best, rel=1e-6)
        model.eval()
        output = trainer.forward(held_out[0][0])
        assert torch.allclose(output, outputs[0][0], atol=1e-6)
        assert output.device.type == "cpu"
    trainer.close()


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture
def trainer() -> Any:
    model = network()
    with jap.prepare(model, Sgd(model.parameters()), CROSS_ENTROPY, microbatches=2) as made:
        yield made


X, Y = torch.randn(8, 6), torch.zeros(8, dtype=torch.long)


@pytest.mark.parametrize(
    ("inputs", "keywords", "target", "message"),
    [
        ((), {}, Y, r"no inputs; pass what model\(\.\.\.\) takes"),
        ((X,), {}, Y[:5], r"target: shape \(5,\) has 5 rows, the batch has 8; every tensor needs one row per sample"),
        ((X[:0],), {}, Y[:0], r"the batch has 0 rows; skip empty batches, or use drop_last=True"),
        ((3,), {}, None, r"no tensor with a batch dimension"),
        (({"x": X, "name": ["a", "b"]},), {}, Y, r"inputs\[0\]\['name'\]: a list of 2 items, the batch has 8 rows"),
        ((X, {1, 2}), {}, Y, r"inputs\[1\]: a set cannot be split into micro-batches; pass tensors"),
        ((X,), {"mask": torch.ones(6, 6)}, Y, r"mask: shape \(6, 6\) has 6 rows"),
        ((X,), {"items": [[1, 2], "a"]}, Y, r"items\[0\]: a list of 2 items"),
        (
            (X.clone().requires_grad_() * 2,),
            {},
            Y,
            r"inputs\[0\] is the result of a computation with gradients.*detach\(\)",
        ),
    ],
)
def test_batches_that_cannot_be(trainer: Any, inputs: Any, keywords: Any, target: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trainer.step(*inputs, target=target, **keywords)
    assert trainer.steps == 0
    trainer.step(X, target=Y)  # nothing was broken
    assert trainer.steps == 1


def test_calls_inside_autocast_are_refused(trainer: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UsageError, match=r"autocast=torch\.bfloat16"):
        trainer.step(X, target=Y)


@pytest.mark.parametrize("batch", [X, (X,), {"x": X}])
def test_evaluation_needs_pairs(trainer: Any, batch: Any) -> None:
    with pytest.raises(UsageError, match=r"evaluate: the loader gave a .*; it must give \(input, target\)"):
        trainer.evaluate([batch], metrics)


@pytest.mark.parametrize("value", ["text", {"a": torch.ones(3)}, {"a": (1, 2, 3)}])
def test_metrics_must_be_numbers(trainer: Any, value: Any) -> None:
    with pytest.raises(UsageError, match=r"metric_fn returned .*return \{name: number\} or \{name: \(sum, count\)\}"):
        trainer.evaluate([(X, Y)], lambda output, target: value)
