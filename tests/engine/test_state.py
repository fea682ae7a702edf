"""State: what is saved is whole, is read without the package, and goes on bit for bit in other company."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from array_harness import alone, same_bits, together
from company import check, plainly, rows
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import slurm_jap as jap
from slurm_jap import checkpoint
from slurm_jap.errors import UsageError

pytestmark = pytest.mark.engine

CROSS_ENTROPY = nn.CrossEntropyLoss()


class Tracking(nn.Module):
    """Buffers that change, persistent and not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("hidden", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean = self.mean * 0.9 + x.mean(0) * 0.1
                self.hidden = self.hidden * 0.99
        return self.norm(x - self.mean) * self.hidden


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Dropout(0.3), Tracking(), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 3)
    )


class Scaled(nn.Module):
    """A loss that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output * self.scale, target)


class Average:
    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def __call__(self, parameters: dict[str, nn.Parameter], step: int) -> dict[str, Tensor]:
        for name, parameter in parameters.items():
            self.values[name] = self.values.get(name, parameter).clone().lerp(parameter, 0.3)
        return self.values

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.values = dict(state)


class Shuffled:
    """A loader that knows where it is, also in the middle of an epoch."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(24, 6, generator=generator), torch.arange(24) % 3
        self.order: list[int] = []

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if not self.order:
            self.order = torch.randperm(24).tolist()
            random.shuffle(self.order)
        rows, self.order = self.order[:7], self.order[7:]
        return self.x[rows] + float(numpy.random.rand()) * 0.01, self.y[rows]

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = list(state["order"])


def make(seed: int = 0, **options: Any) -> tuple[Any, Any, Any]:
    model, loss = network(seed), Scaled()
    random.seed(seed)
    numpy.random.seed(seed)
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()], lr=0.02)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    trainer = jap.prepare(model, optimizer, loss, microbatches=3, clip_grad_norm=0.5, after_step=Average(), **options)
    loader = Shuffled()
    trainer.register(scheduler=scheduler, loader=loader)
    return trainer, scheduler, loader


def train(path: str, steps: int, *, seed: int = 0, save: bool = True, **options: Any) -> Any:
    """Go on from the checkpoint if there is one, as any job script would, and save at the end."""
    trainer, scheduler, loader = make(seed, **options)
    resumed = trainer.resume(path)
    losses = []
    for _ in range(steps):
        x, y = next(loader)
        losses.append(trainer.step(x, target=y).loss)
        if trainer.steps and options.get("accumulate", 1) == 1:
            scheduler.step()
    kept = trainer.evaluate([(loader.x, loader.y)], right)
    state = [
        trainer.state_dict(),
        trainer.loss_state_dict(),
        trainer.optimizer_state_dict(),
        trainer.after_step_state(),
    ]
    if save:
        trainer.save(path)
    draws = [torch.rand(2), random.random(), float(numpy.random.rand())]
    trainer.close()
    return {"resumed": resumed, "losses": losses, "kept": kept, "state": state, "draws": draws}


def right(output: Tensor, target: Tensor) -> dict[str, Any]:
    return {"right": ((output.argmax(1) == target).sum(), len(target))}


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(0, 0), (2, 3), (3, 1), (1, 0), (0, 4)])
def test_ten_steps_are_five_and_five(first: int, second: int, tmp_path: Path) -> None:
    """ace issue 690, transformers issue 17032. Numbers of stages; 0: alone. Members of other seeds keep company."""
    whole = alone(functools.partial(train, str(tmp_path / "never"), 10, save=False))

    def part(stages: int, seeds: list[int]) -> Any:
        members = {
            i: functools.partial(train, str(tmp_path / f"{seed}.pt"), 5, seed=seed) for i, seed in enumerate(seeds)
        }
        if stages == 0:
            return alone(members[0])
        outcome = together(members, stages=stages)
        assert outcome.code == 0, outcome
        return outcome.answers[0]

    one, two = part(first, [0, 4]), part(second, [0, 1, 2])
    assert not one["resumed"]
    assert two["resumed"]
    same_bits(one["losses"] + two["losses"], whole["losses"])
    same_bits(two["state"], whole["state"])
    same_bits(two["draws"], whole["draws"])


def test_accumulated_batches_go_on(tmp_path: Path) -> None:
    whole = alone(functools.partial(train, str(tmp_path / "never"), 8, save=False, accumulate=2))
    for _ in range(2):
        answer = alone(functools.partial(train, str(tmp_path / "half"), 4, accumulate=2))
    same_bits(answer["losses"], whole["losses"][4:])
    same_bits(answer["state"], whole["state"])


def saved_in_company(path: str) -> Any:
    """Saving disturbs nothing; a state loaded in the middle brings its numbers back."""
    trainer, _, loader = make()
    (x, y), answer = next(loader), []
    for number in range(4):
        answer.append(trainer.step(x, target=y).loss)
        if number == 1:
            trainer.save(path)
            model, optimizer = trainer.state_dict(), trainer.optimizer_state_dict()
    trainer.load_state_dict(model)
    trainer.load_optimizer_state_dict(optimizer)
    same_bits(trainer.state_dict(), model)
    same_bits(trainer.optimizer_state_dict()["state"], optimizer["state"])
    answer += [trainer.step(x, target=y).loss, trainer.state_dict(), trainer.optimizer_state_dict()]
    trainer.load_loss_state_dict({"scale": torch.tensor(2.0)})
    answer.append(trainer.step(x, target=y).loss)
    trainer.close()
    return answer


def loaded_before_training(path: str) -> Any:
    """A state_dict and an optimizer's state of plain torch, given before the first step."""
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    torch.manual_seed(6)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    plainly(plain, optimizer, CROSS_ENTROPY, rows(3))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    ours = torch.optim.AdamW(model.parameters(), lr=0.7)
    trainer = jap.prepare(model, ours, CROSS_ENTROPY, microbatches=1)
    trainer.load_state_dict(plain.state_dict())
    trainer.load_optimizer_state_dict(optimizer.state_dict())
    assert ours.param_groups[0]["lr"] == 0.1
    losses = [trainer.step(*x, target=y).loss for x, _, y in rows(2, seed=5)]
    expected = plainly(plain, optimizer, CROSS_ENTROPY, rows(2, seed=5))
    same_bits(losses, expected["losses"])
    same_bits(trainer.state_dict(), expected["state"])
    back = torch.optim.AdamW(plain.parameters(), lr=0.7)
    back.load_state_dict(trainer.optimizer_state_dict())  # and torch takes it back
    state = trainer.optimizer_state_dict()
    same_bits(back.state_dict()["state"], state["state"])
    trainer.close()
    return losses, state


def as_built(path: str) -> Any:
    """pytorch issue 139304: stages that start from one seed each had equal layers."""
    torch.manual_seed(11)
    layers = [nn.Linear(6, 6) for _ in range(5)]
    model = nn.Sequential(*layers, nn.Linear(6, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = jap.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), CROSS_ENTROPY, microbatches=2)
    trainer.forward(torch.ones(4, 6))
    state = trainer.state_dict()
    trainer.close()
    same_bits(state, before)
    assert not torch.equal(state["0.weight"], state["3.weight"])
    return state


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_saving_and_loading_in_company(stages: int, tmp_path: Path) -> None:
    cases: dict[str, Callable[[], Any]] = {
        name: functools.partial(case, str(tmp_path / name))
        for name, case in [("saved", saved_in_company), ("loaded", loaded_before_training), ("built", as_built)]
    }
    check({**cases, "other": functools.partial(train, str(tmp_path / "other"), 3, save=False)}, stages=stages)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_read_without_the_package(tmp_path: Path) -> None:
    path = tmp_path / "model [1] ü.pt"
    train(str(path), 2)
    program = (
        "import sys; sys.modules['slurm_jap'] = None; import torch\n"
        "saved = torch.load(sys.argv[1], weights_only=True)\n"
        "assert 'slurm_jap.client' not in sys.modules\n"
        "model = torch.nn.Linear(6, 8); model.weight.data = saved['model']['0.weight']\n"
        "print(sorted(saved), len(saved['optimizer']['state']), saved['batches'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (
        "['accumulate', 'after_step', 'batches', 'draws', 'evaluations', 'model', 'optimizer', 'others', 'registered', "
        "'seed'] 9 2"
    )
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def _save_again_and_again(path: str) -> None:
    number = 0
    while True:
        number += 1
        checkpoint.write(
            path,
            {
                "model": {"w": torch.full((50_000,), float(number))}, "optimizer": {"n": number}, "others": {},
                "after_step": {}, "registered": {}, "batches": number, "accumulate": 1, "evaluations": 0, "seed": 0,
                "draws": {},
            },
        )  # fmt: skip


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Lightning issue 19970, flax pull 1200: a torn file, or a left-over taken for the newest."""
    seed = int(os.environ.get("JAP_TEST_SEED") or random.randrange(1 << 31))
    print(f"JAP_TEST_SEED={seed}")
    draw = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    path = tmp_path / "model.pt"
    newest, left_overs = 0, 0
    for _ in range(50):
        process = context.Process(target=_save_again_and_again, args=(str(path),))
        process.start()
        deadline = time.monotonic() + 60
        begun = path.stat().st_mtime_ns if path.exists() else None
        while (path.stat().st_mtime_ns if path.exists() else None) == begun and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.02))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        left_overs += len(list(tmp_path.iterdir())) - 1
        saved = checkpoint.read(str(path))
        assert saved is not None
        number = saved["batches"]
        assert number >= 1
        assert saved["optimizer"]["n"] == number
        assert torch.equal(saved["model"]["w"], torch.full((50_000,), float(number))), "torn"
        assert [p.name for p in tmp_path.iterdir()] == ["model.pt"], "left-overs are removed"
        newest = max(newest, number)
    assert newest > 1
    print(f"{left_overs} of 50 kills left a temporary file")


def test_left_overs_are_removed_when_saving_and_never_a_neighbours(tmp_path: Path) -> None:
    for name in (".a.pt.999999999.tmp", ".a.pt.x.tmp", ".b.pt.999999999.tmp", f".a.pt.{os.getppid()}.tmp"):
        (tmp_path / name).write_bytes(b"")
    train(str(tmp_path / "a.pt"), 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["a.pt", ".a.pt.x.tmp", ".b.pt.999999999.tmp", f".a.pt.{os.getppid()}.tmp"]
    )


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pt"
    train(str(path), 1)
    before = path.read_bytes()

    def full(content: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.write(path, {"model": {}})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture
def trainer() -> Any:
    made, _, loader = make()
    with made:
        x, y = next(loader)
        made.step(x, target=y)
        yield made


def test_states_of_another_model(trainer: Any) -> None:
    before = trainer.state_dict()
    state = dict(before)
    del state["0.weight"]
    with pytest.raises(
        UsageError, match=r"load_state_dict: missing \['0.weight'\], unknown \[\]; load a state of the same"
    ):
        trainer.load_state_dict(state)
    with pytest.raises(UsageError, match=r"unknown \['more'\]"):
        trainer.load_state_dict({**before, "more": torch.ones(1)})
    with pytest.raises(UsageError, match=r"4.weight has shape \(2,\), the model's is \(8, 8\)"):
        trainer.load_state_dict({**before, "0.weight": torch.ones(8, 6), "4.weight": torch.ones(2)})
    with pytest.raises(UsageError, match=r"0.weight is a float; load a state of tensors"):
        trainer.load_state_dict({**before, "0.weight": 1.0})
    same_bits(trainer.state_dict(), before)


def test_states_of_another_optimizer(trainer: Any) -> None:
    before = trainer.optimizer_state_dict()
    with pytest.raises(
        UsageError, match=r"groups of \[1\] parameters, the optimizer has \[9\]; load a state of the same"
    ):
        trainer.load_optimizer_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
    with pytest.raises(UsageError, match="without 'state' and 'param_groups'; load what optimizer_state_dict"):
        trainer.load_optimizer_state_dict({"0.weight": torch.ones(1)})
    same_bits(trainer.optimizer_state_dict(), before)


def test_saving_where_it_cannot_be(trainer: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"save\('.*nowhere/a\.pt'\): there is no folder .*; create it first"):
        trainer.save(str(tmp_path / "nowhere" / "a.pt"))
    with pytest.raises(UsageError, match=r"this is a folder; give the name of a file"):
        trainer.save(tmp_path)


def test_saving_between_accumulated_batches(tmp_path: Path) -> None:
    trainer, _, loader = make(accumulate=3)
    with trainer:
        for _ in range(2):
            x, y = next(loader)
            trainer.step(x, target=y)
        with pytest.raises(
            UsageError, match=r"2 of 3 batches are accumulated; save after the batch that completes a step"
        ):
            trainer.save(tmp_path / "a.pt")
        assert list(tmp_path.iterdir()) == []


def test_registering_what_has_no_state(trainer: Any) -> None:
    loader = DataLoader(TensorDataset(torch.ones(3)))
    with pytest.raises(
        UsageError, match=r"register\(loader=...\): a DataLoader has no state_dict and load_state_dict; wrap"
    ):
        trainer.register(loader=loader)


def test_a_registered_state_that_could_not_be_read_back(trainer: Any, tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> Any:
            return {"where": Path("x")}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    trainer.register(loader=Odd())
    with pytest.raises(UsageError, match=r"save: the state_dict\(\) of the registered loader could not be read back"):
        trainer.save(tmp_path / "a.pt")
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_numpy_are_saved_as_numbers(trainer: Any, tmp_path: Path) -> None:
    trainer._user_optimizer.param_groups[0]["lr"] = numpy.float64(0.5)
    trainer.save(tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["optimizer"]["param_groups"][0]["lr"] == 0.5


def test_resuming_from_something_else(trainer: Any, tmp_path: Path) -> None:
    assert trainer.resume(tmp_path / "none.pt") is False
    (tmp_path / "a.pt").write_bytes(b"no checkpoint")
    with pytest.raises(UsageError, match=r"a\.pt'\): not a checkpoint that trainer\.save wrote .*; give another file"):
        trainer.resume(tmp_path / "a.pt")
    torch.save(trainer.state_dict(), tmp_path / "b.pt")
    with pytest.raises(UsageError, match=r"call trainer\.load_state_dict\(torch\.load\(\.\.\.\)\)"):
        trainer.resume(tmp_path / "b.pt")


def plain(after_step: Any = None, seed: int = 0, accumulate: int = 1) -> Any:
    model = network(seed)
    return jap.prepare(
        model, torch.optim.AdamW(model.parameters()), CROSS_ENTROPY, microbatches=2, after_step=after_step,
        accumulate=accumulate,
    )  # fmt: skip


def test_resuming_with_other_settings(tmp_path: Path) -> None:
    path = str(tmp_path / "a.pt")
    train(path, 2)
    with (
        plain() as other,
        pytest.raises(UsageError, match=r"covers \['loader', 'scheduler'\] .* registers nothing; call"),
    ):
        other.resume(path)
    with plain(Average()) as first:
        (x,), _, y = rows(1)[0]
        first.step(x, target=y)
        first.save(path)
    with (
        plain() as other,
        pytest.raises(UsageError, match=r"after_step has no load_state_dict to take it back; make it an"),
    ):
        other.resume(path)
    with (
        plain(Average(), accumulate=2) as other,
        pytest.raises(UsageError, match=r"saved with accumulate=1.*give it the same"),
    ):
        other.resume(path)
    with plain(Average(), seed=3) as other:
        other.step(x, target=y)
        with pytest.raises(
            UsageError, match=r"saved under seed 0, .* began under 3; call resume before the first step"
        ):
            other.resume(path)
    with plain(Average()) as same:
        same.step(x, target=y)
        assert same.resume(path)  # back to where it was, in the same process
        assert same.steps == 1


# --- selfcheck --------------------------------------------------------------------------------------------------------


class Unsteady(nn.Module):
    """Not deterministic: it draws from the system; in ``where`` (output or gradient) that shows."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.linear = where, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        drawn = 1.0 + int.from_bytes(os.urandom(4), "little") / 2**32
        y = self.linear(x)
        if not self.training:
            return y
        if self.where == "output":
            return y + 1e-3 * drawn
        return _Unsteady.apply(y, drawn) if self.where == "gradient" else y


class _Unsteady(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, calls: float) -> Tensor:
        ctx.calls = calls
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.calls, None


def selfchecked(where: str) -> Any:
    os.environ["JAP_SELFCHECK"] = "1"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), Unsteady(where), nn.Tanh(), nn.Linear(8, 3))
    trainer = jap.prepare(model, torch.optim.AdamW(model.parameters()), CROSS_ENTROPY, microbatches=2)
    losses = [trainer.step(*x, target=y).loss for x, _, y in rows(3)]
    state = trainer.state_dict()
    trainer.close()
    del os.environ["JAP_SELFCHECK"]
    return [losses, state] if where == "nowhere" else None


@pytest.mark.parametrize("stages", [0, 1, 3])
def test_selfcheck_names_the_block(stages: int, capfd: pytest.CaptureFixture[str]) -> None:
    kinds = ["nowhere", "output", "gradient"]
    if stages:
        outcome = together({i: functools.partial(selfchecked, k) for i, k in enumerate(kinds)}, stages=stages)
        assert outcome.code == 0, outcome
        said = [outcome.logs[i] for i in range(3)]
        os.environ.pop("JAP_SELFCHECK", None)
        same_bits(outcome.answers[0], alone(functools.partial(selfchecked, "nowhere")))
    else:
        said = []
        for kind in kinds:
            selfchecked(kind)
            said.append(capfd.readouterr().err)
    fine = "the first batch gave the same bits twice"
    assert said[0].count(fine) == max(1, stages), said[0]
    assert "differs" not in said[0]
    assert "block 3 (Unsteady): its output differs by up to" in said[1]
    assert "block 3 (Unsteady): its gradient differs by up to" in said[2]
    assert all(text.count("selfcheck:") == max(1, stages) for text in said)
