"""Loss and gradient are the whole batch's, whatever the micro-batches, and the same in any company."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from company import check, fit, plainly, rows
from torch import Tensor, nn
from torch.nn import functional

import slurm_jap as jap
from slurm_jap.errors import UsageError

pytestmark = pytest.mark.engine

Sgd = functools.partial(torch.optim.SGD, lr=0.1)
WEIGHT = torch.tensor([0.2, 1.0, 3.0])


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def with_ignored(count: int = 4, batch: int = 8) -> list[Any]:
    """Targets of which some are ignored: none in the first batch, a whole micro-batch in the second."""
    data = []
    for number, ((x,), kwargs, y) in enumerate(rows(count, batch=batch)):
        if number == 1:
            y[:3] = -100
        if number == 2:
            y[-1] = -100
        if number == 3:
            y[1:-1] = -100
        data.append(((x,), kwargs, y))
    return data


def as_loss(output: Tensor, target: Tensor) -> jap.Loss:
    kept = target != -100
    total = functional.cross_entropy(output, target, reduction="sum")
    correct = (output.argmax(1) == target) & kept
    return jap.Loss(total, kept.sum(), {"correct": correct.sum(), "kept": kept.sum()})


def l2(loss: Any, model: nn.Module) -> Any:
    """A loss that reads the model's parameters."""

    def penalised(output: Tensor, target: Tensor) -> Tensor:
        return loss(output, target) + 0.01 * sum(p.square().sum() for p in model.parameters())

    return penalised


class Margin(nn.Module):
    """A loss with a parameter, a buffer that it changes, dropout and a mode of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros(()))
        self.dropout = nn.Dropout(0.3)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.seen += len(target)
        return functional.cross_entropy(self.dropout(output * self.scale), target)


def learned() -> Any:
    model, loss = network(), Margin()
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()], lr=0.05)

    def change_mode(trainer: Any, number: int) -> Any:
        if number == 2:
            model.eval()  # is not the loss's business
        if number == 4:
            loss.eval()
        return trainer.loss_state_dict()

    answer = fit(model, optimizer, loss, rows(6), after_batch=change_mode, clip_grad_norm=0.5)
    assert float(answer["kept"][-1]["seen"]) == 48
    assert float(answer["kept"][-1]["scale"]) != 1.5
    return answer


def drawing(output: Tensor, target: Tensor) -> Tensor:
    """A loss that draws."""
    noise = torch.randn(output.shape[0], 1)
    return functional.cross_entropy(output + 0.1 * noise, target)


def model_in_the_loss() -> Any:
    model = network()
    return fit(model, Sgd(model.parameters()), l2(functional.cross_entropy, model), rows(4), clip_grad_norm=0.5)


def rows3() -> list[Any]:
    return rows(3)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, output.detach() + 1)


SOME = functools.partial(functional.cross_entropy, weight=WEIGHT, ignore_index=1)
SUM = functools.partial(functional.cross_entropy, reduction="sum")


def simple(loss: Any, data: Callable[[], list[Any]] = with_ignored, **options: Any) -> Any:
    model = network()
    return fit(model, Sgd(model.parameters()), loss, data(), **options)


LOSSES: dict[str, Callable[[], Any]] = {
    "module": functools.partial(simple, nn.CrossEntropyLoss()),
    "function": functools.partial(simple, functional.cross_entropy),
    "weights, smoothing": functools.partial(simple, nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1)),
    "partial": functools.partial(simple, SOME, rows3),
    "sum": functools.partial(simple, nn.CrossEntropyLoss(reduction="sum"), clip_grad_norm=1.0),
    "sum, accumulated": functools.partial(simple, SUM, accumulate=2),
    "Loss": functools.partial(simple, as_loss, clip_grad_norm=0.2),
    "Loss, accumulated": functools.partial(simple, as_loss, accumulate=3),
    "Loss, one micro-batch": functools.partial(simple, as_loss, microbatches=1),
    "mean, accumulated": functools.partial(simple, nn.CrossEntropyLoss(), accumulate=2, clip_grad_value=0.1),
    "bfloat16": functools.partial(simple, nn.CrossEntropyLoss(), autocast=torch.bfloat16),
    "draws": functools.partial(simple, drawing, rows3),
    "learned": learned,
    "model in the loss": model_in_the_loss,
}  # fmt: skip


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_losses(stages: int) -> None:
    answers = check(LOSSES, stages=stages)
    assert all(0 <= m["correct"] <= m["kept"] == 1 for m in answers["Loss"]["metrics"])


# --- the whole batch's gradient ---------------------------------------------------------------------------------------

PLAIN: dict[str, tuple[Any, Any]] = {
    "mean": (nn.CrossEntropyLoss(), nn.CrossEntropyLoss()),
    "mean of a function": (mean_square, mean_square),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), nn.CrossEntropyLoss(reduction="sum")),
    "ignored": (functional.cross_entropy, functional.cross_entropy),
    "weights": (nn.CrossEntropyLoss(weight=WEIGHT), nn.CrossEntropyLoss(weight=WEIGHT)),
    "Loss": (as_loss, nn.CrossEntropyLoss()),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("microbatches", [2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_the_whole_batchs(name: str, microbatches: int, accumulate: int) -> None:
    """torchtitan issues 1733 and 2972, torchtune pull 1875: a mean of means weighs rows unequally.

    Within 2e-6 relative to the largest: sums in another order.
    """
    ours, plain = PLAIN[name]
    data = rows(4, batch=8) if "mean" in name else with_ignored(4, batch=8)
    model, twin = network(), network()
    trained = fit(model, Sgd(model.parameters()), ours, data, microbatches=microbatches, accumulate=accumulate)
    optimizer = Sgd(twin.parameters())
    for group in range(0, 4, accumulate):  # accumulated batches are one batch, cut in pieces
        batch = data[group : group + accumulate]
        x, y = torch.cat([b[0][0] for b in batch]), torch.cat([b[2] for b in batch])
        plain(twin(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for key, value in twin.state_dict().items():
        assert torch.allclose(trained["state"][key], value, rtol=2e-6, atol=2e-6), key


@pytest.mark.parametrize("name", PLAIN)
def test_one_micro_batch_is_plain_torch(name: str) -> None:
    ours, plain = PLAIN[name]
    model, twin = network(), network()
    trained = fit(model, Sgd(model.parameters()), ours, with_ignored(), microbatches=1)
    expected = plainly(twin, Sgd(twin.parameters()), plain, with_ignored())
    if name == "Loss":  # a sum divided by a count is not, to the bit, torch's own mean
        assert all(torch.allclose(a, b) for a, b in zip(trained["losses"], expected["losses"], strict=True))
        return
    for a, b in zip(trained["losses"], expected["losses"], strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(trained["state"][key], value) for key, value in expected["state"].items())


def test_a_batch_of_which_all_is_ignored_is_not_a_number_as_in_torch() -> None:
    data = rows(1)
    data[0][2].fill_(-100)
    model, twin = network(), network()
    trained = fit(model, Sgd(model.parameters()), functional.cross_entropy, data, microbatches=2)
    expected = plainly(twin, Sgd(twin.parameters()), functional.cross_entropy, data)
    assert trained["losses"][0].isnan()
    assert expected["losses"][0].isnan()
    assert trained["state"]["0.weight"].isnan().equal(expected["state"]["0.weight"].isnan())


# --- what is no mean --------------------------------------------------------------------------------------------------


def test_a_sum_taken_for_a_mean_is_refused() -> None:
    model = network()
    trainer = jap.prepare(
        model, Sgd(model.parameters()), lambda o, t: functional.cross_entropy(o, t, reduction="sum"), microbatches=2
    )
    (x,), _, y = rows(1)[0]
    with (
        trainer,
        pytest.raises(UsageError, match=r"loss_fn returns a sum over rows.*return slurm_jap\.Loss\(sum, count\)"),
    ):
        trainer.step(x, target=y)


def test_what_is_neither_sum_nor_mean_warns() -> None:
    model = network()
    trainer = jap.prepare(model, Sgd(model.parameters()), lambda o, t: o.max() + o.std(), microbatches=2)
    (x,), _, y = rows(1)[0]
    with trainer, pytest.warns(UserWarning, match="loss_fn is not a mean over rows"):
        trainer.step(x, target=y)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda o, t: functional.cross_entropy(o, t, reduction="none"), r"shape \(3,\); reduce it: \.mean\(\)"),
        (lambda o, t: float(o.mean()), r"returned a float; return a 0-d tensor"),
        (lambda o, t: jap.Loss(o.sum(0), 1), r"shape \(3,\)"),
        (lambda o, t: (o.mean(), {}), r"returned a tuple; return a 0-d tensor"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any, message: str) -> None:
    model = network()
    trainer = jap.prepare(model, Sgd(model.parameters()), loss, microbatches=3)
    (x,), _, y = rows(1)[0]
    with trainer, pytest.raises(UsageError, match=message):
        trainer.step(x, target=y)


def test_a_loss_may_not_change_its_kind() -> None:
    model = network()

    def loss(output: Tensor, target: Tensor) -> Any:
        return jap.Loss(output.sum(), 8) if float(output.mean()) != 0 and target.sum() > 100 else output.mean()

    trainer = jap.prepare(model, Sgd(model.parameters()), loss, microbatches=2)
    (x,), _, y = rows(1)[0]
    with trainer:
        trainer.step(x, target=y)
        with pytest.raises(UsageError, match="return the same kind always"):
            trainer.step(x, target=y + 100)
