"""What prepare refuses, and what stands in place of what it took: messages name value, rule and remedy."""

from __future__ import annotations

import copy
import functools
import io
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slurm_jap as jap
from slurm_jap.errors import UsageError

X, Y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Plain(nn.Module):
    """Nothing to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Lookahead(torch.optim.Optimizer):
    """An optimizer within an optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Global(torch.optim.SGD):
    """State that belongs to no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.state["total"] = 0  # type: ignore[index]


class Clipping(torch.optim.SGD):
    """A norm over all parameters, within the optimizer."""

    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()


def prepare(model: Any = None, optimizer: Any = None, loss: Any = None, **options: Any) -> Any:
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    return jap.prepare(model, optimizer, loss or nn.CrossEntropyLoss(), **{"microbatches": 2, **options})


@pytest.fixture
def trainer() -> Iterator[Any]:
    with prepare() as made:
        yield made


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 3}, r"model is of type int; pass an nn\.Module"),
        ({"optimizer": 3}, r"optimizer is of type int; pass a torch\.optim\.Optimizer"),
        ({"loss": 3}, r"loss_fn is of type int; pass a function of \(output, target\)"),
        ({"after_step": 3}, r"after_step is of type int; pass a function of \(params, step\)"),
        ({"blocks": []}, r"blocks=\[\] is empty; pass the functions whose composition is model\(x\)"),
        ({"blocks": [nn.Identity(), 3]}, r"blocks\[1\] is of type int; pass functions or modules"),
        ({"microbatches": 0}, r"microbatches=0: it must be a whole number of at least 1"),
        ({"microbatches": 2.0}, r"microbatches=2\.0: it must be a whole number"),
        ({"microbatches": True}, r"microbatches=True: it must be a whole number"),
        ({"accumulate": -1}, r"accumulate=-1: it must be a whole number"),
        ({"clip_grad_norm": 0}, r"clip_grad_norm=0: give a positive number, or \(number, type of norm\)"),
        ({"clip_grad_norm": "1"}, r"clip_grad_norm='1': give a positive number"),
        ({"clip_grad_norm": (1.0, math.nan)}, r"clip_grad_norm=\(1\.0, nan\): give a positive number"),
        ({"clip_grad_norm": (1.0, 2, 3)}, r"clip_grad_norm=\(1\.0, 2, 3\): give a positive number"),
        ({"clip_grad_value": -1.0}, r"clip_grad_value=-1\.0: it must be a positive number"),
        ({"autocast": True}, r"autocast=True: give a dtype, e\.g\. autocast=torch\.bfloat16"),
        ({"autocast": torch.float16}, r"autocast=torch\.float16 needs a GradScaler, .*; use torch\.bfloat16"),
        ({"model": nn.DataParallel(nn.Linear(6, 3))}, r"wrapped in DataParallel, .*; pass the plain module"),
        ({"model": Plain()}, r"model Plain has nothing to cut: it is no nn\.Sequential .*blocks=\["),
        ({"optimizer": torch.optim.LBFGS(network().parameters())}, r"LBFGS calls the model again .*; use a first"),
        (
            {"optimizer": torch.optim.SGD(network().parameters(), lr=1.0)},
            r"group 0 holds a parameter of shape \(8, 6\) that is not the model's; build",
        ),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    if not isinstance(arguments.get("model", nn.Identity()), nn.Module):
        arguments = {"optimizer": torch.optim.SGD(network().parameters(), lr=0.1), **arguments}
    with pytest.raises(UsageError, match=message):
        prepare(**arguments)
    prepare().close()  # nothing is left behind


def with_extra_state() -> nn.Module:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return 1

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError

    return nn.Sequential(Extra(6, 8), nn.Linear(8, 3))


def test_extra_state() -> None:
    with pytest.raises(UsageError, match=r"Extra keeps extra state \(get_extra_state\), .*; keep it in buffers"):
        prepare(with_extra_state())


def test_optimizers_that_cannot_be_cut() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"Lookahead\.inner holds parameter '0\.weight' .*; use one that treats each"):
        prepare(model, Lookahead(optimizer))
    with pytest.raises(
        UsageError, match=r"Global keeps state that belongs to no parameter \('total'\), .*; use an optimizer"
    ):
        prepare(model, Global(model.parameters()))
    with pytest.raises(
        UsageError, match=r"Clipping mixes parameters .*; use an optimizer that treats each .*clip_grad_norm"
    ):
        prepare(model, Clipping(model.parameters(), lr=0.1))
    optimizer.register_step_post_hook(lambda *args: None)
    with pytest.raises(
        UsageError, match=r"step hooks \(_optimizer_step_post_hooks\), .*; use after_step=\.\.\. of prepare"
    ):
        prepare(model, optimizer)


def test_hooks_that_cannot_travel() -> None:
    model = network()
    model[0].weight.register_hook(lambda grad: grad)
    with pytest.raises(UsageError, match=r"parameter '0\.weight' has a gradient hook, .*; use clip_grad_norm"):
        prepare(model)
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        with pytest.raises(UsageError, match=r"global module hooks are registered .*; remove them"):
            prepare()
    finally:
        handle.remove()


def test_one_memory_under_two_parameters() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    model[2].weight = nn.Parameter(model[0].weight.data[:3])
    with pytest.raises(UsageError, match=r"'\d\.weight' and '\d\.weight' lie in the same memory, .*; make them one"):
        prepare(model)
    model = network()
    model.register_buffer("view", model[0].weight.detach())
    with pytest.raises(UsageError, match=r"lie in the same memory"):
        prepare(model)
    model = network()
    model.register_buffer("all", big := torch.randn(100))
    model.register_buffer("inside", big[:3])
    model.register_buffer("alone", torch.randn(3))
    model.constant = nn.Parameter(big[50:60], requires_grad=False)
    with pytest.raises(UsageError, match=r"'all' and 'constant' lie in the same memory"):
        prepare(model)
    flat = torch.randn(90)
    model = network()
    model[0].weight = nn.Parameter(flat[:48].view(8, 6))
    model[2].weight = nn.Parameter(flat[48:72].view(3, 8))
    prepare(model).close()  # side by side is fine


def test_pending_gradients() -> None:
    model = network()
    model(X).sum().backward()
    with pytest.raises(
        UsageError, match=r"parameter '0\.weight' has a gradient already, .*; call optimizer\.zero_grad\(\)"
    ):
        prepare(model)
    model.zero_grad(set_to_none=False)
    prepare(model).close()


def test_compiled_models() -> None:
    with pytest.raises(UsageError, match=r"the model is compiled \(torch\.compile\), .*; pass the plain module"):
        prepare(torch.compile(network()))


def test_parameters_that_are_not_there_yet() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3))
    with pytest.raises(UsageError, match=r"parameter '0\.weight' is not initialised; run one batch through the model"):
        prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.1))


def test_what_cannot_be_sent() -> None:
    model = network()
    model[1].lock = threading.Lock()
    with pytest.raises(UsageError, match=r"cannot be sent to the engine: TypeError: .*lock.*; keep open files, locks"):
        prepare(model)


def test_prepare_twice(trainer: Any) -> None:
    with pytest.raises(
        UsageError, match=r"prepare called twice: .*; one member trains one model: call trainer\.close\(\) first"
    ):
        prepare()
    trainer.close()
    with pytest.raises(
        UsageError, match=r"this trainer is closed; call slurm_jap\.prepare with a new model and optimizer"
    ):
        trainer.step(X, target=Y)
    with prepare() as second:
        second.step(X, target=Y)


def test_prepare_with_what_was_handed_over() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(model, optimizer).close()
    with pytest.raises(UsageError, match=r"called twice with the same model or optimizer; build new ones"):
        prepare(model, torch.optim.SGD(network().parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"called twice with the same model or optimizer; build new ones"):
        prepare(network(), optimizer)


# --- what is left of model and optimizer ------------------------------------------------------------------------------


@pytest.fixture
def left() -> Iterator[tuple[nn.Sequential, torch.optim.Optimizer, Any]]:
    """Model, optimizer and trainer after a step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with prepare(model, optimizer) as made:
        made.step(X, target=Y)
        yield model, optimizer, made


NO_VALUES = r"of a parameter or buffer: .*call trainer\.state_dict\(\) for values, clip with clip_grad_norm=\.\.\."
USES: dict[str, tuple[Any, str]] = {
    "model(x)": (lambda m, o: m(X), r"call trainer\.forward\(\.\.\.\) for its output"),
    "part(x)": (lambda m, o: m[0](X), r"trainer\.step\(\.\.\.\) to train"),
    "to": (lambda m, o: m.to("cpu"), r"move it or change its dtype .* before prepare"),
    "half": (lambda m, o: m[0].half(), r"before prepare"),
    "torch.save(model)": (lambda m, o: torch.save(m, io.BytesIO()), r"holds no values; save trainer\.state_dict\(\)"),
    "deepcopy": (lambda m, o: copy.deepcopy(m), r"save trainer\.state_dict\(\)"),
    "part.load": (lambda m, o: m[0].load_state_dict({}), r"load the whole model with trainer\.load_state_dict"),
    "strict": (lambda m, o: m.load_state_dict({}, strict=False), r"load_state_dict\(strict=False\).*no such argument"),
    "prefix": (lambda m, o: m.state_dict(prefix="a."), r"state_dict\(prefix\).*call trainer\.state_dict\(\)"),
    "p.sum()": (lambda m, o: m[0].weight.sum(), r"^sum " + NO_VALUES),
    "p.item()": (lambda m, o: m[0].bias[0].item(), NO_VALUES),
    "p * 2": (lambda m, o: m[0].bias * 2, NO_VALUES),
    "p.data": (lambda m, o: m[0].weight.data, r"^data " + NO_VALUES),
    "p.grad": (lambda m, o: m[0].weight.grad, r"^grad " + NO_VALUES),
    "clip": (lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), 1.0), r"^grad " + NO_VALUES),
    "init": (lambda m, o: nn.init.zeros_(m[0].weight), NO_VALUES),
    "torch.save(p)": (lambda m, o: torch.save(m[0].weight, io.BytesIO()), r"save trainer\.state_dict\(\)"),
    "optimizer.step": (lambda m, o: o.step(), r"call trainer\.step\(x, target=y\) instead"),
    "state[p]": (lambda m, o: o.state[m[0].weight], r"handed over .*call trainer\.optimizer_state_dict"),
    "state.items": (lambda m, o: list(o.state.items()), r"call trainer\.optimizer_state_dict"),
    "for in state": (lambda m, o: list(o.state), r"call trainer\.optimizer_state_dict"),
    "in state": (lambda m, o: m[0].weight in o.state, r"call trainer\.optimizer_state_dict"),
    "state.get": (lambda m, o: o.state.get(m[0].weight), r"call trainer\.optimizer_state_dict"),
    "torch.save(optimizer)": (lambda m, o: torch.save(o, io.BytesIO()), r"call trainer\.optimizer_state_dict"),
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_what_was_handed_over_says_what_to_call(left: Any, name: str) -> None:
    model, optimizer, _ = left
    use, message = USES[name]
    with pytest.raises(UsageError, match=message):
        use(model, optimizer)


def test_nothing_stale_can_be_read(left: Any) -> None:
    model, optimizer, trainer = left
    assert all(p.is_meta for p in model.parameters())
    assert all(p is q for p, q in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True))
    state = model.state_dict()
    assert not any(value.is_meta for value in state.values())
    for name, value in trainer.state_dict().items():
        assert torch.equal(state[name], value)
    assert torch.equal(model[2].state_dict()["bias"], state["2.bias"])
    assert list(optimizer.state_dict()["state"]) == [0, 1, 2, 3]
    assert repr(optimizer).startswith("SGD (")
    optimizer.zero_grad()
    model.zero_grad()
    weight = model[0].weight
    assert (weight.shape, weight.numel(), weight.dtype, weight.dim()) == ((8, 6), 48, torch.float32, 2)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 83
    assert isinstance(weight, nn.Parameter)
    assert repr(weight).endswith("<handed over to the trainer>")
    assert "Linear(in_features=6" in repr(model)


def test_states_can_be_loaded_as_ever(left: Any) -> None:
    model, optimizer, trainer = left
    state, inner = model.state_dict(), optimizer.state_dict()
    trainer.step(X, target=Y)
    assert not torch.equal(trainer.state_dict()["2.bias"], state["2.bias"])
    model.load_state_dict(state)
    optimizer.load_state_dict(inner)
    assert torch.equal(trainer.state_dict()["2.bias"], state["2.bias"])
    assert torch.equal(
        trainer.optimizer_state_dict()["state"][3]["momentum_buffer"], inner["state"][3]["momentum_buffer"]
    )


def test_backward_was_done_already(trainer: Any) -> None:
    result = trainer.step(X, target=Y)
    with pytest.raises(
        UsageError, match=r"backward\(\): trainer\.step\(x, target=y\) has done backward and optimizer step"
    ):
        result.backward()
    with pytest.raises(RuntimeError, match="does not require grad"):
        result.loss.backward()
    assert repr(result).startswith("StepResult(loss=")


def test_groups_may_not_change(left: Any) -> None:
    _, optimizer, trainer = left
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(UsageError, match=r"groups gained or lost parameters after prepare; add them before prepare"):
        trainer.step(X, target=Y)


def test_a_learned_loss_is_handed_over_and_others_are_not() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return nn.functional.cross_entropy(output * self.scale, target)

    model, loss = network(), Scaled()
    with prepare(model, torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1), loss) as trainer:
        trainer.step(X, target=Y)
        with pytest.raises(UsageError, match="handed over to the trainer"):
            loss(torch.ones(4, 3), Y)
        assert loss.state_dict()["scale"] == trainer.loss_state_dict()["scale"] != 1.5
        loss.load_state_dict({"scale": torch.tensor(3.0)})
        assert trainer.loss_state_dict()["scale"] == 3.0
    weights = nn.CrossEntropyLoss(weight=torch.ones(3))
    with prepare(loss=weights) as trainer:
        trainer.step(X, target=Y)
        assert torch.isfinite(weights(torch.ones(4, 3), Y))  # the script may go on using it


# --- errors of the user's code, and the end ---------------------------------------------------------------------------


def test_what_the_code_raises_ends_the_training(trainer: Any) -> None:
    """Alone as in the engine: a step half done cannot be taken up again."""
    trainer.close()

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and float(x.abs().sum()) > 1e6:
                raise KeyError("my own")
            return x

    with prepare(nn.Sequential(nn.Linear(6, 8), Fails(), nn.Linear(8, 3))) as other:
        other.step(X, target=Y)
        for inputs in (X.abs() * 1e8, X):
            with pytest.raises(KeyError, match="my own"):
                other.step(inputs, target=Y)
        with pytest.raises(KeyError, match="my own"):
            other.state_dict()


SCRIPT = """
import torch, slurm_jap as jap
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))
trainer = jap.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), {loss}, microbatches={microbatches})
trainer.step(torch.ones(4, 6), target=torch.zeros(4, 3))
print("done")
"""


@pytest.mark.parametrize(
    ("values", "code", "line"),
    [
        ({"microbatches": 0}, 2, "jap: microbatches=0: it must be a whole number of at least 1"),
        ({"loss": "lambda o, t: o - t"}, 2, "jap: loss_fn returned a tensor of shape (2, 3); reduce it: .mean(), or"),
        ({}, 0, ""),
    ],
)
def test_an_uncaught_usage_error_is_one_line_and_code_2(
    values: dict[str, Any], code: int, line: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(**{"loss": "torch.nn.functional.mse_loss", "microbatches": 2, **values}))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(line)
    assert len(done.stderr.splitlines()) == (1 if code else 0), done.stderr
    assert ("done" in done.stdout) == (code == 0)


def test_batch_norm_warns_once_and_only_with_several_micro_batches() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    with pytest.warns(UserWarning, match=r"BatchNorm statistics are per micro-batch \(2 per batch\)") as caught:
        prepare(build()).close()
    assert len(caught) == 1
    prepare(build(), microbatches=1).close()


def test_schedulers_made_before_and_after_prepare_do_not_complain(recwarn: pytest.WarningsRecorder) -> None:
    make = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = make(optimizer)
    with prepare(model, optimizer) as trainer:
        after = make(optimizer)
        for _ in range(2):
            trainer.step(X, target=Y)
            before.step()
            after.step()
    assert optimizer.param_groups[0]["lr"] == 0.0625
    assert not recwarn.list
