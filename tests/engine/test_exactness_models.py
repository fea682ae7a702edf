"""Every kind of model trains in a sweep as it does alone, bit for bit, whatever the stages and the company."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import math
import os
import random
import tempfile
import warnings
from typing import Any, NamedTuple

import numpy
import pytest
import swept_module
import torch
from company import check, fit, rows
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.engine

Sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
CROSS_ENTROPY = nn.CrossEntropyLoss()


# --- multilayer perceptrons -------------------------------------------------------------------------------------------


def mlp_with_dropout() -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )
    return fit(model, Sgd(model.parameters()), CROSS_ENTROPY, rows(4), clip_grad_norm=0.1)


class _NoisyGradient(torch.autograd.Function):
    """Identity whose backward draws."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad + 0.1 * torch.randn_like(grad) + random.random() + numpy.random.rand()


class Noisy(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(_NoisyGradient.apply(torch.relu(self.linear(_NoisyGradient.apply(x)))))


def draws_in_backward() -> Any:
    """pytorch issue 55036: what is drawn depended on the number of partitions."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), Noisy(8), Noisy(8), Noisy(8), nn.Linear(8, 3))
    return fit(model, Sgd(model.parameters()), CROSS_ENTROPY, rows(4))


class Checkpointed(nn.Module):
    def __init__(self, width: int, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.4), Noisy(width))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def checkpointing() -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(6, 8), Checkpointed(8, False), Checkpointed(8, True), Checkpointed(8, False), nn.Linear(8, 3)
    )
    return fit(model, Sgd(model.parameters()), CROSS_ENTROPY, rows(4))


class InPlaceFirst(nn.Module):
    """Changes what it was given before anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(1.5).add_(0.1)
        return self.linear(x)


def in_place_first_operations() -> Any:
    """Also on the batch, which belongs to the script: the same batch is given again and again."""
    torch.manual_seed(4)
    model = nn.Sequential(InPlaceFirst(), InPlaceFirst(), InPlaceFirst(), InPlaceFirst(), nn.Linear(6, 3))
    data = rows(1) * 4
    answer = fit(model, Sgd(model.parameters()), CROSS_ENTROPY, data, microbatches=1)
    answer["batch"] = data[0][0][0]
    return answer


def not_a_number() -> Any:
    """A member that diverges goes on with NaN, as alone, and is nobody else's business (nanoGPT pull 227)."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    return fit(model, torch.optim.SGD(model.parameters(), lr=1e30), CROSS_ENTROPY, rows(5), clip_grad_norm=1e30)


# --- convolutions, normalisation --------------------------------------------------------------------------------------


def convolutions() -> Any:
    """BatchNorm warns, once; weights and images lie channels_last."""
    torch.manual_seed(6)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()),
        nn.Flatten(),
        nn.Linear(32, 3),
    ).to(memory_format=torch.channels_last)
    data = [((x.to(memory_format=torch.channels_last),), {}, y) for (x,), _, y in rows(4, batch=7, shape=(2, 8, 8))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = fit(model, Sgd(model.parameters(), nesterov=True), CROSS_ENTROPY, data, clip_grad_value=0.05)
    answer["warned"] = sum("BatchNorm statistics are per micro-batch" in str(w.message) for w in caught)
    assert answer["warned"] == 1
    return answer


def frozen_statistics() -> Any:
    """Fine-tuning in eval mode, then in train mode, then evaluation, then the modes of two modules apart."""
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    )

    def change_mode(trainer: Any, number: int) -> None:
        if number == 2:
            model.train()
        if number == 3:
            model[1].eval()
            model[2].eval()

    model.eval()
    return fit(model, Sgd(model.parameters()), CROSS_ENTROPY, rows(5), after_batch=change_mode, microbatches=2)


# --- transformers -----------------------------------------------------------------------------------------------------


class Embedding(nn.Module):
    def __init__(self, tokens: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.register_buffer("positions", torch.randn(length, width), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions[: ids.shape[1]]


class Transformer(nn.Module):
    def __init__(self, *, tied: bool, dropout: float = 0.2, layers: int = 3) -> None:
        super().__init__()
        self.embed = Embedding(11, 5, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True, norm_first=True) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def tokens(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [((x := torch.randint(0, 11, (6, 5), generator=generator),), {}, x.roll(-1, dims=1)) for _ in range(count)]


def transformer() -> Any:
    torch.manual_seed(8)
    model = Transformer(tied=False)
    return fit(model, torch.optim.AdamW(model.parameters(), lr=0.01), token_loss, tokens(4), clip_grad_norm=1.0)


def tied_weights() -> Any:
    """pytorch issue 51931: copies drift apart; and they count once in the norm."""
    torch.manual_seed(9)
    model = Transformer(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    answer = fit(model, optimizer, token_loss, tokens(5), clip_grad_norm=0.5)
    assert torch.equal(answer["state"]["embed.tokens.weight"], answer["state"]["head.weight"])
    return answer


def tied_three_times() -> Any:
    """One layer stands at three places; unfrozen after two batches."""
    torch.manual_seed(10)
    layer = nn.Linear(6, 6)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Dropout(0.2), layer, nn.Linear(6, 3))
    layer.weight.requires_grad_(False)

    def unfreeze(trainer: Any, number: int) -> None:
        if number == 2:
            layer.weight.requires_grad_(True)

    return fit(model, Sgd(model.parameters()), CROSS_ENTROPY, rows(5), after_batch=unfreeze, clip_grad_norm=0.3)


def bfloat16_autocast() -> Any:
    torch.manual_seed(11)
    model = Transformer(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return fit(model, optimizer, token_loss, tokens(4), autocast=torch.bfloat16, clip_grad_norm=1.0)


def recurrent() -> Any:
    torch.manual_seed(12)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.3, batch_first=True)
            self.gru = nn.GRU(8, 8, batch_first=True, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.gru(self.lstm(x)[0])[0]

    model = nn.Sequential(Embedding(11, 5, 8), Recurrent(), nn.LayerNorm(16), nn.Linear(16, 11))
    return fit(model, torch.optim.Adam(model.parameters(), lr=0.01), token_loss, tokens(3))


def sparse_gradients() -> Any:
    torch.manual_seed(13)
    model = nn.Sequential(nn.Embedding(11, 8, sparse=True), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 11))
    return fit(model, torch.optim.SGD(model.parameters(), lr=0.1), token_loss, tokens(3))


# --- what passes between blocks ---------------------------------------------------------------------------------------


class Split(nn.Module):
    """A tree of every kind of leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.linear(x)
        return {
            "h": (h, h),  # the same tensor twice: the next block changes one of them in place
            "skip": [x, {"half": h[:, ::2]}],
            "order": h.argsort(dim=1),
            "mask": h > 0,
            "double": h.double().sum(1),
            "none": None,
            "name": "a name",
            "number": 3,
        }


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, tree: dict[str, Any]) -> dict[str, Any]:
        first, second = tree["h"]
        first.mul_(0.5).relu_()
        mixed = self.dropout(self.linear(first)) + second.gather(1, tree["order"])
        return {**tree, "h": (mixed.masked_fill(tree["mask"], 0.5), second), "number": tree["number"] + 1}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(18, 3)

    def forward(self, tree: dict[str, Any]) -> Tensor:
        x, inner = tree["skip"]
        parts = [tree["h"][0] + tree["h"][1], x, inner["half"]]
        scale = tree["number"] + tree["double"].float().tanh().unsqueeze(1)
        assert tree["none"] is None
        assert tree["name"] == "a name"
        return self.linear(torch.cat(parts, dim=1)) * scale


def trees_between_blocks() -> Any:
    """pytorch issue 183024, PiPPy pull 1029: integer and bool tensors were asked for gradients."""
    torch.manual_seed(14)
    model = nn.Sequential(Split(), Mix(), Mix(), Mix(), Join())
    return fit(model, torch.optim.AdamW(model.parameters(), lr=0.02), CROSS_ENTROPY, rows(4), clip_grad_norm=1.0)


@dataclasses.dataclass
class State:
    h: Tensor
    aux: Tensor | None = None
    names: tuple[str, ...] = ()


class Pair(NamedTuple):
    left: Tensor
    right: Any


class ToState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, pair: Pair) -> State:
        assert isinstance(pair, Pair), type(pair)
        assert isinstance(pair.right, State), type(pair.right)
        return State(self.linear(pair.left) + pair.right.h, None, ("a", "b"))


class OnState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, state: State) -> State:
        assert isinstance(state, State), type(state)
        return dataclasses.replace(state, h=torch.relu(self.linear(state.h)), aux=state.h.square().mean(1))


def own_types() -> Any:
    """Dataclasses and named tuples of the script's own, in and out, stay what they are (pytorch issue 130055)."""
    torch.manual_seed(15)
    model = nn.Sequential(ToState(), OnState(), OnState(), OnState())

    def loss(state: State, target: Pair) -> Tensor:
        assert isinstance(state, State), type(state)
        assert isinstance(target, Pair), type(target)
        assert state.aux is not None
        return (state.h - target.left).square().mean() + state.aux.mean() * 0.1

    data = [((Pair(x, State(x.flip(0))),), {}, Pair(x.roll(1, 0), {"unused": None})) for (x,), _, _ in rows(3)]
    batch = data[0][0][0]

    def look(trainer: Any, number: int) -> Any:
        output = trainer.forward(batch)
        assert isinstance(output, State), type(output)
        return [output.h, output.aux]

    return fit(model, Sgd(model.parameters()), loss, data, after_batch=look)


def weights_in_the_tree() -> Any:
    """A weight that travels with the activations, to be used again far away."""
    torch.manual_seed(16)

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)

        def forward(self, ids: Tensor) -> Any:
            return self.embed(ids), self.embed.weight

    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, both: Any) -> Any:
            return torch.tanh(self.linear(both[0])), both[1]

    class Last(nn.Module):
        def forward(self, both: Any) -> Tensor:
            return both[0] @ both[1].T

    model = nn.Sequential(First(), Middle(), Middle(), Last())
    return fit(model, Sgd(model.parameters()), token_loss, tokens(4))


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Any:
        return (torch.fft.rfft(x) * self.filter).conj()


class FromSpectrum(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, classes)

    def forward(self, z: Tensor) -> Tensor:
        return self.linear(torch.fft.irfft(z.conj(), n=6) + z.imag.sum(1, keepdim=True))


def complex_numbers() -> Any:
    """Conjugates are views that only promise to conjugate."""
    torch.manual_seed(31)
    model = nn.Sequential(nn.Linear(6, 6), Spectrum(), FromSpectrum(6), Spectrum(), FromSpectrum(3))
    return fit(model, torch.optim.Adam(model.parameters(), lr=0.02), CROSS_ENTROPY, rows(3), clip_grad_norm=1.0)


class OnGraph(nn.Module):
    """A sparse matrix as a buffer, and one in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", (torch.eye(6) + torch.ones(6, 6).tril(-4)).to_sparse())
        self.linear = nn.Linear(6, 6)

    def forward(self, both: Any) -> Any:
        x, weights = both
        return torch.tanh(self.linear(torch.sparse.mm(self.edges, x.T).T)), weights


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, both: Any) -> Tensor:
        return self.linear(both[0] * torch.sparse.mm(both[1], torch.ones(6, 1)))


def sparse_tensors() -> Any:
    torch.manual_seed(32)
    model = nn.Sequential(OnGraph(), OnGraph(), OnGraph(), Weighted())
    data = [(((x, (x > 0).float().to_sparse()),), {}, y) for (x,), _, y in rows(3)]
    return fit(model, Sgd(model.parameters()), CROSS_ENTROPY, data, microbatches=1)


# --- further layers of torch ------------------------------------------------------------------------------------------


def older_norms() -> Any:
    """Weights that hooks compute anew before each forward."""
    torch.manual_seed(41)
    weight_norm, spectral_norm = torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm
    middle = prune.random_unstructured(nn.Linear(8, 8), "weight", 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers = [weight_norm(nn.Linear(6, 8)), nn.ReLU(), spectral_norm(nn.Linear(8, 8)), middle, nn.Linear(8, 3)]
    model = nn.Sequential(*layers)
    return fit(model, Sgd(model.parameters()), CROSS_ENTROPY, rows(3))


class CausalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        dropout = 0.1 if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return x + self.out(y.transpose(1, 2).flatten(2))


def attention() -> Any:
    torch.manual_seed(42)
    model = nn.Sequential(
        Embedding(11, 5, 8), CausalAttention(), CausalAttention(), CausalAttention(), nn.Linear(8, 11)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return fit(model, optimizer, token_loss, tokens(3), autocast=torch.bfloat16)


def bfloat16_parameters() -> Any:
    torch.manual_seed(43)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 3)).bfloat16()
    data = [((x.bfloat16(),), {}, y) for (x,), _, y in rows(3)]
    return fit(model, torch.optim.AdamW(model.parameters(), lr=0.01), CROSS_ENTROPY, data, clip_grad_norm=0.1)


def signals() -> Any:
    torch.manual_seed(44)
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1), nn.ConvTranspose1d(4, 4, 2, stride=2), nn.Upsample(scale_factor=2), nn.PReLU(4),
        nn.AdaptiveAvgPool1d(4), nn.Dropout1d(0.2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    return fit(model, torch.optim.Adagrad(model.parameters(), lr=0.01), CROSS_ENTROPY, rows(3, shape=(2, 6)))


# --- blocks that are no modules ---------------------------------------------------------------------------------------


class Unet(nn.Module):
    """Its blocks are bound methods, a closure, a function; the skips travel along."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Linear(6, 8), nn.Linear(8, 8)
        self.up1, self.up2 = nn.Linear(16, 8), nn.Linear(14, 6)
        self.dropout = nn.Dropout(0.3)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.randn(3))
        self.out = nn.Linear(6, 3)

    def first(self, x: Tensor) -> Any:
        return x, torch.relu(self.down1(x)) * self.scale

    def second(self, both: Any) -> Any:
        x, h = both
        return x, h, self.dropout(torch.relu(self.down2(h)))

    def third(self, three: Any) -> Any:
        x, h, z = three
        return x, self.up1(torch.cat([h, z], dim=1))

    def blocks(self) -> list[Any]:
        def fourth(both: Any) -> Tensor:
            x, u = both
            return self.up2(torch.cat([x, u], dim=1)) * self.scale

        return [self.first, self.second, self.third, fourth, torch.tanh, self.out]

    def forward(self, x: Tensor) -> Tensor:
        value: Any = x
        for block in self.blocks():
            value = block(value)
        return value


def functions_as_blocks() -> Any:
    torch.manual_seed(17)
    model = Unet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return fit(model, optimizer, CROSS_ENTROPY, rows(4), blocks=model.blocks(), clip_grad_norm=0.5)


def train_mode_only_parameters() -> Any:
    """A block given as a method reads a parameter in train mode that it does not read in eval mode."""
    torch.manual_seed(18)

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.noise = nn.Linear(6, 6), nn.Linear(6, 3), nn.Parameter(torch.ones(6))

        def first(self, x: Tensor) -> Tensor:
            return torch.relu(self.a(x))

        def middle(self, x: Tensor) -> Tensor:
            return x + self.noise * torch.randn_like(x) if self.training else x

        def last(self, x: Tensor) -> Tensor:
            return self.b(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.middle(self.first(x)))

    model = Gated()
    blocks = [model.first, torch.nn.Identity(), model.middle, model.last]
    return fit(model, Sgd(model.parameters()), CROSS_ENTROPY, rows(3), blocks=blocks)


# --- modules with a life of their own ---------------------------------------------------------------------------------


class Running(nn.Module):
    """Puts new tensors under its buffers' names, counts, and keeps plain attributes of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("hidden", torch.ones(8), persistent=False)
        self.linear = nn.Linear(8, 8)
        self.same = self.linear  # the same module under two names
        self.table = numpy.arange(8.0)
        self.options = {"a": [1, 2, {"b": torch.full((8,), 0.5)}]}
        self.function = lambda x: x * 1.01
        self.order = collections.OrderedDict(x=1)
        self.random = numpy.random.default_rng(5)
        self.calls = 0
        self.plain = [nn.Linear(8, 8)]  # a module that is not registered, hence not trained

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
                self.hidden = self.hidden * 1.01
                self.seen += x.shape[0]
        self.calls += 1
        jitter = float(self.random.random())
        fixed = torch.as_tensor(self.table, dtype=x.dtype) * self.options["a"][2]["b"]
        with torch.no_grad():
            constant = self.plain[0](fixed)
        h = self.same(self.linear(x - self.mean)) * self.hidden + constant
        return self.function(h) + jitter + self.calls


def modules_with_state() -> Any:
    torch.manual_seed(19)
    model = nn.Sequential(nn.Linear(6, 8), Running(), Running(), Running(), nn.Linear(8, 3))

    def evaluate(trainer: Any, number: int) -> Any:
        if number != 2:
            return None
        return trainer.evaluate([(x, y) for (x,), _, y in rows(2, batch=5, seed=9)], accuracy)

    return fit(model, Sgd(model.parameters()), CROSS_ENTROPY, rows(4), after_batch=evaluate)


def accuracy(output: Tensor, target: Tensor) -> dict[str, Any]:
    return {
        "accuracy": ((output.argmax(1) == target).sum(), len(target)),
        "entropy": output.softmax(1).max(1)[0].mean(),
    }


class Scaled(nn.Module):
    """Changes a buffer in place, then multiplies by it: the next micro-batch must not change what backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.training:
            with torch.no_grad():
                self.scale.mul_(0.7).add_(h.abs().mean(0), alpha=0.3)
        return torch.tanh(h * self.scale)


def buffers_changed_in_place() -> Any:
    torch.manual_seed(33)
    model = nn.Sequential(nn.Linear(6, 8), Scaled(), Scaled(), Scaled(), nn.Linear(8, 3))
    return fit(model, Sgd(model.parameters()), CROSS_ENTROPY, rows(4), microbatches=4)


class Energy(nn.Module):
    """Takes a gradient in its own forward, as models of forces do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.inner(x).sum(), x, create_graph=True)
        return force


def gradients_in_forward() -> Any:
    torch.manual_seed(34)
    model = nn.Sequential(nn.Linear(6, 6), Energy(), nn.Linear(6, 6), Energy(), nn.Linear(6, 3))
    held_out = [(x, y) for (x,), _, y in rows(2, batch=5, seed=9)]
    return fit(
        model, Sgd(model.parameters()), CROSS_ENTROPY, rows(3), clip_grad_norm=0.5,
        after_batch=lambda trainer, number: [trainer.evaluate(held_out, accuracy), trainer.forward(held_out[0][0])],
    )  # fmt: skip


def parametrized() -> Any:
    torch.manual_seed(20)
    weight_norm, spectral = torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.parametrizations.spectral_norm
    model = nn.Sequential(
        weight_norm(nn.Linear(6, 8)), nn.ReLU(), spectral(nn.Linear(8, 8)), nn.ReLU(), weight_norm(nn.Linear(8, 3))
    )
    return fit(model, Sgd(model.parameters()), CROSS_ENTROPY, rows(3))


def frozen_and_unused() -> Any:
    """A frozen first half, unfrozen later; a parameter that nothing uses; one outside the optimizer."""
    torch.manual_seed(21)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.unused = nn.Linear(8, 8), nn.Linear(2, 2)
            self.outside = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.linear(x)) * self.outside

    model = nn.Sequential(nn.Linear(6, 8), Odd(), nn.Dropout(0.2), Odd(), nn.Linear(8, 3))
    for parameter in [*model[0].parameters(), *model[1].parameters()]:
        parameter.requires_grad_(False)
    optimized = [p for n, p in model.named_parameters() if "outside" not in n]

    def unfreeze(trainer: Any, number: int) -> None:
        if number == 2:
            for parameter in [*model[0].parameters(), *model[1].parameters()]:
                parameter.requires_grad_(True)
        if number == 4:
            model[4].bias.requires_grad_(False)

    return fit(
        model, torch.optim.AdamW(optimized, lr=0.01), CROSS_ENTROPY, rows(6), after_batch=unfreeze, clip_grad_norm=0.2
    )


# --- what is global in a process --------------------------------------------------------------------------------------


def double_precision() -> Any:
    """torch's default dtype and other switches, meant for this member alone."""
    torch.manual_seed(22)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    torch.set_num_threads(2)
    try:

        class Constant(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                assert torch.are_deterministic_algorithms_enabled()
                assert torch.get_num_threads() == 2
                assert torch.get_float32_matmul_precision() == "medium"
                return x + torch.tensor(0.1)  # of the default dtype

        model = nn.Sequential(
            nn.Linear(6, 8), Constant(), nn.Dropout(0.2), nn.Linear(8, 8), Constant(), nn.Linear(8, 3)
        )
        data = [((x.double(),), {}, y) for (x,), _, y in rows(4)]
        answer = fit(model, Sgd(model.parameters()), CROSS_ENTROPY, data)
        assert all(loss.dtype is torch.float64 for loss in answer["losses"])
        return answer
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        torch.set_num_threads(1)


def careless_with_globals() -> Any:
    """A model that changes the process it runs in; wandb issue 7378 is one of many about such things."""
    torch.manual_seed(23)

    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x) + torch.ones(6, dtype=x.dtype)
            torch.set_default_dtype(torch.float64)
            torch.set_num_threads(2)
            torch.set_float32_matmul_precision("medium")
            torch.manual_seed(0)
            return y

    model = nn.Sequential(Careless(), nn.Dropout(0.2), Careless(), nn.Linear(6, 6), Careless(), nn.Linear(6, 3))
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        logging.basicConfig(level=logging.DEBUG, force=True)
        try:
            answer = fit(model, Sgd(model.parameters()), CROSS_ENTROPY, rows(3))
        finally:
            os.chdir(before)
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_num_threads() == 1
    return answer


def flushes_denormals() -> Any:
    torch.manual_seed(24)
    torch.set_flush_denormal(True)
    try:

        class Tiny(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * 1e-30 * 1e-12 * 1e30 * 1e12  # denormal on the way

        model = nn.Sequential(nn.Linear(6, 8), Tiny(), nn.Linear(8, 8), Tiny(), nn.Linear(8, 3))
        return fit(model, Sgd(model.parameters()), CROSS_ENTROPY, rows(3))
    finally:
        torch.set_flush_denormal(False)


def module_level_constant(value: float) -> Any:
    """A sweep over a constant of an imported file: the engine must not import it afresh."""
    torch.manual_seed(25)
    before = swept_module.SLOPE
    swept_module.SLOPE = value
    try:
        model = nn.Sequential(
            nn.Linear(6, 8), swept_module.Leaky(), nn.Linear(8, 8), swept_module.Leaky(), nn.Linear(8, 3)
        )
        return fit(model, Sgd(model.parameters()), swept_module.scaled_loss, rows(3))
    finally:
        swept_module.SLOPE = before


MODELS = {
    case.__name__: case
    for case in [
        mlp_with_dropout, draws_in_backward, checkpointing, in_place_first_operations, not_a_number, convolutions,
        frozen_statistics, transformer, tied_weights, tied_three_times, bfloat16_autocast, recurrent, sparse_gradients,
        older_norms, attention, bfloat16_parameters, signals,
    ]
}  # fmt: skip
TREES = {
    case.__name__: case
    for case in [
        trees_between_blocks, complex_numbers, sparse_tensors, own_types, weights_in_the_tree, functions_as_blocks,
        train_mode_only_parameters,
        modules_with_state, buffers_changed_in_place, gradients_in_forward, parametrized, frozen_and_unused,
        mlp_with_dropout,
    ]
}  # fmt: skip
GLOBALS = {
    case.__name__: case
    for case in [double_precision, careless_with_globals, flushes_denormals, mlp_with_dropout, transformer]
} | {f"constant {value}": functools.partial(module_level_constant, value) for value in (0.1, 0.3)}


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_models(stages: int) -> None:
    check(MODELS, stages=stages)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_what_passes_between_blocks(stages: int) -> None:
    check(TREES, stages=stages)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_global_state_is_the_members_own(stages: int) -> None:
    answers = check(GLOBALS, stages=stages)
    assert not torch.equal(answers["constant 0.1"]["losses"][0], answers["constant 0.3"]["losses"][0])


def test_two_members_diverge_only_where_they_differ() -> None:
    """Two groups of one stage, and members that are NaN beside ones that are not."""
    answers = check(
        {name: MODELS[name] for name in ("not_a_number", "mlp_with_dropout", "transformer")}, stages=1, groups=2
    )
    assert math.isnan(float(answers["not_a_number"]["losses"][-1]))
    assert all(math.isfinite(float(loss)) for loss in answers["mlp_with_dropout"]["losses"])
