"""What siblings have in common and frozen is held once, and nobody sees a difference."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from array_harness import alone, same_bits, together
from torch import Tensor, nn

import slurm_jap as jap
from slurm_jap.environment import ENV_DEVICE_MEMORY
from slurm_jap.frozen import Commons, SharedParameter, unique_bytes

WIDTH = 32
CPU = torch.device("cpu")


class Adapted(nn.Module):
    """A frozen linear map and an adapter of low rank."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Target(Adapted):
    """Its base follows a trained copy: written to in forward, now and then, as target networks are."""

    def __init__(self, write: Callable[[nn.Linear, nn.Linear], None]) -> None:
        super().__init__()
        self.online = nn.Linear(WIDTH, WIDTH)
        self.write, self.calls = write, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            if self.calls % 4 == 3:
                self.write(self.base, self.online)
        return super().forward(x) + self.online(x)


def in_place(base: nn.Linear, online: nn.Linear) -> None:
    with torch.no_grad():
        base.weight.lerp_(online.weight, 0.5)


def by_data(base: nn.Linear, online: nn.Linear) -> None:
    base.weight.data.mul_(0.5).add_(online.weight.data, alpha=0.5)


def by_state(base: nn.Linear, online: nn.Linear) -> None:
    base.load_state_dict(copy.deepcopy(online.state_dict()))


def network(layer: Callable[[], nn.Module], seed: int) -> nn.Sequential:
    torch.manual_seed(1)
    net = nn.Sequential(*(layer() for _ in range(4)))
    torch.manual_seed(100 + seed)
    for name, parameter in net.named_parameters():
        if "down" in name or "up" in name:
            nn.init.normal_(parameter, std=0.1)
    return net


def train(
    seed: int,
    layer: Callable[[], nn.Module] = Adapted,
    *,
    steps: int = 5,
    unfreeze: int | None = None,
    load: bool = False,
) -> dict[str, Any]:
    net = network(layer, seed)
    trainer = jap.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=0.01 * (seed + 1)), nn.MSELoss(), microbatches=2, clip_grad_norm=1.0
    )
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for number in range(steps):
        if number == unfreeze:
            net.requires_grad_(True)
        if load and number == 2:
            trainer.load_state_dict({name: value + 1.0 for name, value in trainer.state_dict().items()})
        x, y = torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)
        losses.append(trainer.step(x, target=y).loss)
    seen = {"losses": losses, "state": trainer.state_dict()}
    trainer.close()
    return seen


@pytest.mark.engine
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("stages", [1, 3])
def test_members_that_share_write_and_unfreeze_equal_themselves_alone(stages: int, bounded: bool) -> None:
    members: dict[int, Any] = {
        0: functools.partial(train, 0),
        1: functools.partial(train, 1),
        2: functools.partial(train, 2, unfreeze=3),
        3: functools.partial(train, 3, load=True),
        4: functools.partial(train, 4, functools.partial(Target, in_place)),
        5: functools.partial(train, 5, functools.partial(Target, by_data)),
        6: functools.partial(train, 6, functools.partial(Target, by_state)),
    }
    variables = {ENV_DEVICE_MEMORY: str(200_000 // stages)} if bounded else {}
    outcome = together(members, stages=stages, engine_variables=variables, seconds=90.0)
    assert outcome.code == 0, outcome
    for index, function in members.items():
        same_bits(outcome.answers[index], alone(function))


def report_of(members: int, tmp: Any) -> dict[str, Any]:
    """What the engine holds while all members are there."""

    def stays(seed: int) -> Any:
        import time
        from pathlib import Path

        net = network(Adapted, seed)
        trainer = jap.prepare(net, torch.optim.AdamW(net.parameters()), nn.MSELoss(), microbatches=2)
        trainer.step(torch.ones(4, WIDTH), target=torch.ones(4, WIDTH))
        trainer.state_dict()  # after the step, on every stage
        (Path(tmp) / f"stepped_{members}_{seed}").touch()
        end = time.monotonic() + 60
        while len(list(Path(tmp).glob(f"stepped_{members}_*"))) < members and time.monotonic() < end:
            time.sleep(0.02)
        report = trainer._backend.pull("memory")
        (Path(tmp) / f"asked_{members}_{seed}").touch()
        while len(list(Path(tmp).glob(f"asked_{members}_*"))) < members and time.monotonic() < end:
            time.sleep(0.02)
        return report

    outcome = together({i: functools.partial(stays, i) for i in range(members)}, stages=2, seconds=90.0)
    assert outcome.code == 0, outcome
    assert all(answer == outcome.answers[0] for answer in outcome.answers.values())
    return dict(outcome.answers[0])


@pytest.mark.engine
def test_memory_grows_by_the_adapters_only(tmp_path: Any) -> None:
    one, four = report_of(1, tmp_path), report_of(4, tmp_path)
    adapter = 2 * (2 * 2 * WIDTH * 4)  # two layers on each stage, two low-rank matrices each
    base = 2 * (WIDTH * WIDTH + WIDTH) * 4
    steps = 2 * 2 * 4  # AdamW's counters
    for stage in ("0", "1"):
        assert one[stage]["held_bytes"] == base + 3 * adapter + steps
        assert four[stage]["held_bytes"] == base + 4 * (3 * adapter + steps)
        assert four[stage]["common_bytes"] == base


# --- one process ----------------------------------------------------------------------------------------------------


def frozen(*values: float) -> Tensor:
    return torch.tensor(values)


def test_only_equal_bits_are_shared() -> None:
    commons = Commons(CPU)
    kept = [
        commons.holding().parameter(tensor)
        for tensor in (
            frozen(0.0, 1.0), frozen(-0.0, 1.0), frozen(0.0, 1.0).double(), frozen(0.0, 1.0).view(1, 2),
            frozen(float("nan"), 1.0),
        )
    ]  # fmt: skip
    assert commons.bytes == 0
    again = commons.holding().parameter(frozen(float("nan"), 1.0))
    assert commons.bytes == 8
    assert again.data_ptr() == kept[-1].data_ptr()


def test_memory_is_freed_with_the_last_who_holds_it() -> None:
    commons = Commons(CPU)
    holdings = [commons.holding() for _ in range(3)]
    values = torch.randn(1000)
    parameters = [holding.parameter(values) for holding in holdings]
    assert unique_bytes(parameters) == 4000
    holdings[0].leave()
    holdings[2].leave()
    assert commons.bytes == 4000
    assert torch.equal(parameters[1], values)
    holdings[1].leave()
    assert commons.bytes == 0
    assert not commons._entries


@pytest.mark.parametrize("write", [lambda p: p.mul_(2), lambda p: p.data.mul_(2), lambda p: p.view(-1)[:2].zero_()])
def test_who_writes_gets_memory_of_its_own(write: Callable[[nn.Parameter], Any]) -> None:
    commons = Commons(CPU)
    holdings = [commons.holding() for _ in range(3)]
    values, more = torch.randn(10), torch.randn(10)
    parameters = [(holding.parameter(values), holding.parameter(more)) for holding in holdings]
    expected = values.clone()
    write(nn.Parameter(expected, requires_grad=False))
    for writer in (0, 2):  # the first, whose memory it was before, and another
        with torch.no_grad():
            write(parameters[writer][0])
            _ = parameters[writer][1].data  # touched in the same action
        holdings[writer].acted(idle=True)
        assert torch.equal(parameters[writer][0], expected)
        assert torch.equal(parameters[1][0], values)
        assert type(parameters[writer][0]) is type(parameters[writer][1]) is nn.Parameter
    assert isinstance(parameters[1][0], SharedParameter)
    assert commons.bytes == 80


def test_copies_and_pickles_are_plain_parameters() -> None:
    commons = Commons(CPU)
    parameters = [commons.holding().parameter(torch.ones(3)) for _ in range(2)]
    duplicate = copy.deepcopy(parameters[0])
    assert type(duplicate) is nn.Parameter
    assert duplicate.data_ptr() != parameters[0].data_ptr()
    assert commons.bytes == 12
