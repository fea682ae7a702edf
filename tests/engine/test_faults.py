"""Nobody hurts nobody: what one member's code does ends that member alone, and its siblings change by no bit.

Each test runs real processes, ends in seconds, and shows one cause.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from array_harness import alone, same_bits, together
from support import wait_until
from torch import nn

import slurm_jap as jap

pytestmark = pytest.mark.engine

STEPS = 6


class At(nn.Module):
    """Does something in forward or backward of one step; passes tensors through."""

    def __init__(self, what: Callable[[], Any], step: int, where: str) -> None:
        super().__init__()
        self.what, self.step, self.where = what, step, where
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x.clone()
        self.calls += 1
        now = (self.calls - 1) // 2 == self.step and self.calls % 2 == 0  # the second of two micro-batches
        if now and self.where == "forward":
            self.what()
        if now and self.where == "backward":
            x = x.clone()
            x.register_hook(lambda grad: self.what())
        return x.clone()


def model(extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), extra, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
    )


def train(extra: Callable[[], nn.Module] = nn.Identity, *, seed: int = 0, steps: int = STEPS, **hooks: Any) -> Any:
    torch.manual_seed(seed)
    net = model(extra())
    optimizer = hooks.get("optimizer", torch.optim.AdamW)(net.parameters(), lr=0.01)
    trainer = jap.prepare(net, optimizer, hooks.get("loss", nn.CrossEntropyLoss()), microbatches=2, clip_grad_norm=1.0)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for number in range(steps):
        hooks.get("each", lambda number: None)(number)
        x, y = torch.randn(6, 4, generator=generator), torch.randint(0, 2, (6,), generator=generator)
        losses.append(trainer.step(x, target=y).loss)
    state = trainer.state_dict()
    trainer.close()
    return {"losses": losses, "state": state}


def siblings(indices: list[int], **options: Any) -> dict[int, Callable[[], Any]]:
    return {i: functools.partial(train, seed=i, **options) for i in indices}


@pytest.fixture(scope="module")
def expected() -> dict[int, Any]:
    return {i: alone(function) for i, function in siblings([1, 2]).items()}


def value_error() -> None:
    raise ValueError("the model says no")


def exits() -> None:
    raise SystemExit(7)


def interrupts() -> None:
    raise KeyboardInterrupt


def check_siblings(outcome: Any, expected: dict[int, Any]) -> None:
    for index, answer in expected.items():
        assert outcome.codes[index] == 0, outcome
        same_bits(outcome.answers[index], answer)


@pytest.mark.parametrize(
    ("what", "where", "code", "words"),
    [
        (value_error, "forward", 1, "ValueError: the model says no"),
        (value_error, "backward", 1, "ValueError: the model says no"),
        (exits, "forward", 7, ""),
        (interrupts, "backward", 1, "KeyboardInterrupt"),
    ],
)
@pytest.mark.parametrize("stages", [1, 3])
def test_a_member_that_raises_fails_alone(
    what: Callable[[], None], where: str, code: int, words: str, stages: int, expected: dict[int, Any]
) -> None:
    bad = functools.partial(train, functools.partial(At, what, 3, where))
    outcome = together({0: bad, **siblings([1, 2])}, stages=stages)
    check_siblings(outcome, expected)
    assert outcome.codes[0] == code, outcome
    assert words in outcome.logs[0]
    if words:
        assert re.search(r"in stage \d of the engine", outcome.logs[0])
        assert what.__name__ in outcome.logs[0], "the remote traceback names the function"


def test_what_a_members_code_prints_is_in_its_own_log(expected: dict[int, Any]) -> None:
    talk = functools.partial(At, lambda: print("hello from the engine"), 2, "forward")
    outcome = together({0: functools.partial(train, talk), **siblings([1, 2])}, stages=2)
    check_siblings(outcome, expected)
    assert outcome.logs[0].count("hello from the engine") == 1
    assert "hello" not in outcome.engine_log + outcome.logs[1] + outcome.logs[2]


def test_a_loss_that_raises_fails_its_member_alone(expected: dict[int, Any]) -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if output.requires_grad:
            raise RuntimeError("no loss today")
        return nn.functional.cross_entropy(output, target)

    outcome = together({0: functools.partial(train, loss=loss), **siblings([1, 2])}, stages=2)
    check_siblings(outcome, expected)
    assert outcome.codes[0] == 1
    assert "RuntimeError: no loss today" in outcome.logs[0]


def test_an_optimizer_that_raises_fails_its_member_alone(expected: dict[int, Any]) -> None:
    class Stubborn(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ArithmeticError("stubborn")

    outcome = together({0: functools.partial(train, optimizer=Stubborn), **siblings([1, 2])}, stages=2)
    check_siblings(outcome, expected)
    assert "ArithmeticError: stubborn" in outcome.logs[0]


def test_out_of_memory_in_one_member(expected: dict[int, Any]) -> None:
    """https://github.com/ray-project/ray/issues/4061: one trial's out-of-memory error is that trial's."""

    def too_much() -> None:
        raise torch.OutOfMemoryError("tried to allocate 9 EiB")

    outcome = together(
        {0: functools.partial(train, functools.partial(At, too_much, 2, "forward")), **siblings([1, 2])}, stages=2
    )
    check_siblings(outcome, expected)
    assert "OutOfMemoryError" in outcome.logs[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_member_process_that_is_killed(number: int, expected: dict[int, Any]) -> None:
    def end(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), number)

    outcome = together({0: functools.partial(train, each=end), **siblings([1, 2])}, stages=2)
    check_siblings(outcome, expected)
    assert outcome.codes[0] == 128 + number


def test_a_member_process_that_is_stopped_holds_up_nobody(expected: dict[int, Any]) -> None:
    def stop(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)

    def let_it_end(launcher: Any, sweep_dir: Any) -> None:
        others = wait_until(
            lambda: {e["member"] for e in sweep_dir.events("run") if e["kind"] == "member_ended"} >= {1, 2}, 60
        )
        assert others
        os.kill(launcher.members[0].pid, signal.SIGKILL)

    outcome = together({0: functools.partial(train, each=stop), **siblings([1, 2])}, stages=2, during=let_it_end)
    check_siblings(outcome, expected)


def test_nan_in_one_member_is_its_own_business() -> None:
    """https://github.com/karpathy/nanoGPT/pull/227: one rank's NaN must not reach the others."""
    members = {0: functools.partial(train, seed=0), 1: functools.partial(train, seed=1)}
    sick = functools.partial(train, seed=5, optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=1e30))
    outcome = together({**members, 2: sick}, stages=2)
    assert outcome.code == 0, outcome
    for index, function in {**members, 2: sick}.items():
        same_bits(outcome.answers[index], alone(function))
    assert not all(loss.isfinite() for loss in outcome.answers[2]["losses"])


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def segfault() -> None:
    import ctypes

    ctypes.string_at(0)


def leaves() -> None:
    os._exit(86)


@pytest.mark.parametrize("snapshots", ["", "2"])
@pytest.mark.parametrize(("what", "words"), [(segfault, "SIGSEGV"), (leaves, "code 86")])
def test_code_that_ends_the_engine_costs_only_its_member(
    what: Callable[[], None], words: str, snapshots: str, expected: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps_of(index: int) -> Callable[[], Any]:
        def run() -> Any:
            if snapshots:
                os.environ["JAP_SNAPSHOT_STEPS"] = snapshots
            return train(seed=index)

        return run

    bad = functools.partial(train, functools.partial(At, what, 3, "forward"))
    outcome = together({0: bad, 1: steps_of(1), 2: steps_of(2)}, stages=2)
    check_siblings(outcome, expected)
    assert outcome.codes[0] == 1
    assert "code of member 0 ends the engine" in outcome.logs[0]
    assert words in outcome.logs[0]
    starts = sum(e["kind"] == "engine_started" for e in outcome.events)
    assert starts in (2, 3), "none is started any more where the siblings have ended by then"


def test_code_that_never_returns_is_ended(expected: dict[int, Any]) -> None:
    bad = functools.partial(train, functools.partial(At, lambda: time.sleep(3600), 2, "backward"))
    outcome = together({0: bad, **siblings([1, 2])}, stages=2, engine_variables={"JAP_ACTION_TIMEOUT": "4"})
    check_siblings(outcome, expected)
    assert outcome.codes[0] == 1
    assert "had not returned" in outcome.logs[0]


def test_without_recovery_the_engines_end_is_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Any:
        os.environ["JAP_RECOVERY"] = "0"
        return train(functools.partial(At, leaves, 3, "forward"))

    outcome = together({0: run}, stages=2)
    assert outcome.codes[0] == 1
    assert "code 86 while it ran code of member 0" in outcome.logs[0]


@pytest.mark.parametrize("stages", [1, 2])
def test_an_engine_that_is_killed_costs_nobody(stages: int) -> None:
    def slow(step: int) -> None:
        time.sleep(0.2)

    members = siblings([1, 2], steps=12, each=slow)

    def kill_an_engine(launcher: Any, sweep_dir: Any) -> None:
        wait_until(lambda: launcher.agents and len(children_of(launcher.agents[0].pid)) == stages, 60)
        wait_until(lambda: any(True for _ in sweep_dir.events("member_1")), 60)
        time.sleep(1.0)
        os.kill(children_of(launcher.agents[0].pid)[0], signal.SIGKILL)

    outcome = together(members, stages=stages, during=kill_an_engine)
    assert outcome.code == 0, outcome
    for index, function in siblings([1, 2], steps=12).items():
        same_bits(outcome.answers[index], alone(function))
    assert sum(e["kind"] == "engine_started" for e in outcome.events) == 2


def test_an_engine_that_keeps_ending_ends_the_sweep_with_one_cause() -> None:
    def kill_every_engine(launcher: Any, sweep_dir: Any) -> None:
        def over() -> bool:
            for agent in launcher.agents:
                try:
                    for pid in children_of(agent.pid):
                        if any(e["kind"] == "joined" for e in sweep_dir.events("member_1")):
                            os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
            return any(e["kind"] == "member_ended" for e in sweep_dir.events("run"))

        wait_until(over, 100, every=0.5)

    outcome = together(
        siblings([1], steps=10_000, each=lambda step: time.sleep(0.05)), stages=1, during=kill_every_engine
    )
    assert outcome.codes[1] == 1
    assert "the engine" in outcome.logs[1]
    assert outcome.logs[1].count("EngineFault") == 1


def test_an_engine_that_cannot_be_reached_is_one_cause_and_no_hang() -> None:
    """jap-run and the engine are well, but the member's node cannot find the engine's: no news will come."""
    outcome = together(siblings([0, 1]), stages=1, nodes=2, engine_variables={"JAP_TCP_HOST": "no-such-host.invalid"})
    assert outcome.codes == {0: 0, 1: 1}, outcome
    assert "cannot reach stage 0 of group 0" in outcome.logs[1]
    assert "no-such-host.invalid" in outcome.logs[1]


def test_an_engine_that_dies_before_it_has_the_model_without_recovery() -> None:
    class Deadly(nn.Module):
        def __setstate__(self, state: dict[str, Any]) -> None:
            self.__dict__.update(state)
            if os.environ.get("JAP_MEMBER") is None:  # in the engine
                os._exit(86)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def run() -> Any:
        os.environ["JAP_RECOVERY"] = "0"
        return train(Deadly)

    outcome = together({0: run}, stages=2)
    assert outcome.codes[0] == 1
    assert "code of member 0 ends the engine" in outcome.logs[0]
