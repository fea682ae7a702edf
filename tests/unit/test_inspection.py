"""Whether a model is its blocks: what is found, what is refused, and that nobody notices the looking."""

from __future__ import annotations

import copy
import logging
import random
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import slurm_jap as jap
from slurm_jap.blocks import find_blocks
from slurm_jap.errors import UsageError

X, Y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])


def first_step(model: nn.Module, blocks: Any = None, loss: Any = None, microbatches: int = 2) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = jap.prepare(
        model, optimizer, loss or nn.functional.cross_entropy, microbatches=microbatches, blocks=blocks
    )
    with trainer:
        return trainer.step(X, target=Y).loss


class Net(nn.Module):
    """Two layers; subclasses do something between, or beside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.aux: Any = 0.0

    def first(self, x: Tensor) -> Any:
        return self.a(x)

    def second(self, h: Any) -> Any:
        return self.b(h)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))


def named(*names: str) -> Callable[[nn.Module], list[Any]]:
    return lambda model: [getattr(model, name) for name in names]


# --- blocks that are found --------------------------------------------------------------------------------------------


def test_blocks_of_a_sequential_are_its_children() -> None:
    layers = [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)]
    assert find_blocks(nn.Sequential(*layers)) == layers
    assert find_blocks(nn.Sequential(nn.Sequential(*layers))) == layers, "wrapped once more"


def test_blocks_around_a_module_list_come_in_order() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(6, 8)
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
            self.empty = nn.ModuleList()
            self.head = nn.Linear(8, 3)

    model = Model()
    with pytest.raises(UsageError, match="has nothing to cut"):
        find_blocks(model)  # the empty list would be a block
    del model.empty
    assert find_blocks(model) == [model.embed, *model.layers, model.head]


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(6, 3),
        nn.ModuleDict({"a": nn.Linear(6, 3)}),
        nn.TransformerDecoderLayer(8, 2),
    ],
)
def test_a_model_with_nothing_to_cut_says_what_to_pass(model: nn.Module) -> None:
    with pytest.raises(UsageError, match=r"nothing to cut: .*pass blocks=\[f0, f1, \.\.\.\] to prepare"):
        find_blocks(model)


# --- models that are not their blocks ---------------------------------------------------------------------------------


class Between(Net):
    def forward(self, x: Tensor) -> Any:
        return self.second(torch.relu(self.first(x)))


class OtherType(Net):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x)}


class Slightly(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1 + 1e-6)


class Mismatch(Net):
    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x).abs()[:, :8])


@pytest.mark.parametrize(
    ("model", "blocks", "message"),
    [
        (Between, named("a", "b"), r"model Between is not the composition of its 2 blocks: output differs by up to"),
        (Slightly, named("first", "second"), r"not the composition of its 2 blocks: output differs by up to .*e-0"),
        (OtherType, named("a", "b"), r"the model returns dict, the blocks return float32\[2, 3\]"),
        (Mismatch, named("b", "a"), r"block 0 \(Linear\) failed on the batch: RuntimeError"),
        (Net, named("a", "a"), r"block 1 \(Linear\) failed on the output of the block before it: RuntimeError"),
        (Net, named("a"), r"output is float32\[2, 3\] from the model, float32\[2, 8\] from the blocks"),
    ],
)
def test_glue_outside_blocks_is_refused(model: type[Net], blocks: Any, message: str) -> None:
    made = model()
    with pytest.raises(UsageError, match=rf"(?s){message}.*pass blocks=\["):
        first_step(made, blocks(made))


# --- blocks that share more than they may -----------------------------------------------------------------------------


class Stash(Net):
    """The skip is kept on the model."""

    def first(self, x: Tensor) -> Any:
        self.skip = x.sum(1, keepdim=True)
        return self.a(x)

    def second(self, h: Any) -> Any:
        return self.b(h) + self.skip


class StaleStash(Stash):
    """An initial value would be taken silently."""

    def __init__(self) -> None:
        super().__init__()
        self.skip = 0.0


class TrainOnly(Net):
    """The same only while training: eval mode has no aux."""

    def first(self, x: Tensor) -> Any:
        h = self.a(x)
        if self.training:
            self.aux = h.square().mean()
        return h


class SharedCount(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def first(self, x: Tensor) -> Any:
        self.count += 1
        return self.a(x)

    def second(self, h: Any) -> Any:
        return self.b(h) / (1 + self.count)


def test_an_attribute_set_by_one_block_and_read_by_another_is_refused() -> None:
    for kind in (Stash, StaleStash):
        model = kind()
        with pytest.raises(
            UsageError,
            match=r"block 1 \(.*second\) reads attribute 'skip' of a \w+, which block 0 \(.*first\) sets; .*return it",
        ):
            first_step(model, [model.first, model.second])


@pytest.mark.parametrize("kind", [TrainOnly])
def test_a_loss_that_reads_what_the_model_left_behind_is_refused(kind: type[Net]) -> None:
    """The usual auxiliary loss of a mixture of experts: it would be 0 for ever."""
    model = kind()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target) + 0.01 * model.aux

    with pytest.raises(UsageError, match=r"loss_fn reads attribute 'aux' of a TrainOnly, which block 0 .* sets"):
        first_step(model, [model.first, model.second], loss)


def test_a_block_may_keep_things_for_itself() -> None:
    class Counts(Net):
        def first(self, x: Tensor) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            self.seen = x
            return self.a(x) + self.calls

    model = Counts()
    first_step(model, [model.first, model.second])


def test_a_buffer_that_one_block_changes_and_another_uses_is_refused() -> None:
    model = SharedCount()
    with pytest.raises(
        UsageError, match=r"buffer 'count' is changed by block 0 and used by blocks \[0, 1\].*of its own"
    ):
        first_step(model, [model.first, model.second])


def test_one_batch_norm_at_two_places_is_refused() -> None:
    norm = nn.BatchNorm1d(6)
    model = nn.Sequential(norm, nn.Linear(6, 6), norm, nn.Linear(6, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UsageError, match=r"buffer '0\.\w+' is changed by block 0 and used by blocks \[0, 2\]"):
            first_step(model)


def test_one_constant_buffer_at_many_places_is_fine() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(8))

    class Layer(nn.Module):
        def __init__(self, rotary: Rotary) -> None:
            super().__init__()
            self.rotary, self.linear = rotary, nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x * self.rotary.table)

    rotary = Rotary()
    first_step(nn.Sequential(nn.Linear(6, 8), Layer(rotary), Layer(rotary), nn.Linear(8, 3)))


def test_a_cache_shared_by_functions_is_refused() -> None:
    model, cache = Net(), {}

    def first(x: Tensor) -> Tensor:
        cache["x"] = x.sum(1, keepdim=True)
        return model.a(x)

    def second(h: Tensor) -> Tensor:
        return model.b(h) + cache["x"]

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return second(first(x))

    with pytest.raises(
        UsageError, match=r"work together, but not each by itself: 'x'; .*return what one of them changes"
    ):
        first_step(Whole(), [first, second])


def test_a_hidden_reference_to_another_blocks_weight_is_a_tie() -> None:
    class Head(nn.Module):
        def __init__(self, embedding: nn.Linear) -> None:
            super().__init__()
            self.hidden = [embedding]  # not registered

        def forward(self, h: Tensor) -> Tensor:
            return h @ self.hidden[0].weight

    torch.manual_seed(1)
    embedding = nn.Linear(6, 8, bias=False)
    model = nn.Sequential(embedding, nn.Tanh(), Head(embedding))
    plain = copy.deepcopy(model)
    nn.functional.cross_entropy(plain(X), Y).backward()
    trainer = jap.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy, microbatches=1
    )
    with trainer:
        trainer.step(X, target=Y)
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        assert torch.equal(trainer.state_dict()["0.weight"], plain[0].weight)


# --- looking changes nothing ------------------------------------------------------------------------------------------


def test_looking_changes_neither_model_nor_batch_nor_generators() -> None:
    class Restless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(6, 6), 0
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen += 1
            x.mul_(2)
            torch.rand(1), random.random(), numpy.random.rand()
            torch.set_default_dtype(torch.float64)
            torch.set_num_threads(1)
            return self.linear(x)

    model = nn.Sequential(Restless(), Restless(), nn.Linear(6, 3))
    batch = X.clone()
    streams = [torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())]
    threads = torch.get_num_threads()
    trainer = jap.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy, microbatches=2
    )
    with trainer:
        trainer.step(batch, target=Y)
        assert float(trainer.state_dict()["0.seen"]) == 2, "two micro-batches, and no look is counted"
    assert torch.equal(batch, X)
    assert torch.equal(streams[0], torch.get_rng_state())
    assert streams[1] == random.getstate()
    assert streams[2] == str(numpy.random.get_state())
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_num_threads() == threads


def test_looking_is_silent(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    class Talks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            print("forward", len(x))
            print("forward", file=sys.stderr)
            logging.getLogger("talks").warning("forward")
            warnings.warn("forward", stacklevel=1)
            return x

    with pytest.warns(UserWarning, match="forward") as caught:
        first_step(nn.Sequential(nn.Linear(6, 8), Talks(), nn.Linear(8, 3)))
    out, err = capfd.readouterr()
    assert out == "forward 2\n" * 2, "once per micro-batch, as in training"
    assert err == "forward\n" * 2
    assert len(caplog.records) == 2
    assert {str(w.message) for w in caught} == {"forward"}
    assert logging.root.manager.disable == logging.NOTSET


class _Grown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.buffer.add_(1)
        return grad, None


class GrowsInBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return _Grown.apply(x, self.count) + self.count


class NormsAgain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.norm, x, use_reentrant=False)


@pytest.mark.parametrize("middle", [GrowsInBackward, NormsAgain])
@pytest.mark.filterwarnings("ignore:jap. BatchNorm")
def test_a_buffer_that_changes_in_backward_needs_one_micro_batch(middle: type[nn.Module]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), middle(), nn.Linear(8, 3))

    with pytest.raises(UsageError, match=r"buffer '\w+\.\w+' is changed during backward .*or use microbatches=1"):
        first_step(build())
    first_step(build(), microbatches=1)


class ForceAcrossBlocks(Net):
    """Takes in its second block the gradient with respect to what went into the first."""

    def first(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        return x, self.a(x)

    def second(self, both: Any) -> Any:
        x, h = both
        (force,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
        return force[:, :3]


def test_gradients_across_blocks_are_refused() -> None:
    model = ForceAcrossBlocks()
    with pytest.raises(UsageError, match=r"(?s)work together, but not each by itself: .*differentiated"):
        first_step(model, [model.first, model.second])


def test_a_block_must_return_what_can_be_sent() -> None:
    class Locked(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, threading.Lock()

    class First(nn.Module):
        def forward(self, both: Any) -> Tensor:
            return both[0]

    with pytest.raises(UsageError, match=r"what block 1 returns cannot be sent to the engine: TypeError"):
        first_step(nn.Sequential(nn.Linear(6, 3), Locked(), First()))


def test_a_model_that_is_never_the_same_warns() -> None:
    with pytest.warns(UserWarning, match=r"Sequential gives another output each time it is run on one batch"):
        first_step(nn.Sequential(nn.Linear(6, 8), _Noisy(), nn.Linear(8, 3)))


class _Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        import os

        return x + int.from_bytes(os.urandom(2), "little") / 65536


def test_a_transformer_layer_is_itself() -> None:
    """torch has a fast path for it in eval mode, which whoever watches operations turns off."""
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2)]
    model = nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Linear(6, 8), *layers, nn.Flatten(), nn.Linear(8, 3))
    first_step(model)
