"""What keeps members apart in one process: random draws by key, torch's switches as a value, whole losses."""

from __future__ import annotations

import contextlib
import functools
import random
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import slurm_jap as jap
from slurm_jap import draws, microbatch
from slurm_jap.cut import cut
from slurm_jap.errors import UsageError
from slurm_jap.switches import Switches

CPU = torch.device("cpu")


# --- draws ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(*[st.integers(-1, 5)] * 5), min_size=2, max_size=30, unique=True))
def test_keys_differ_in_the_bits_that_generators_use(parts: list[tuple[int, ...]]) -> None:
    """The CPU generator ignores all but the low 32 bits."""
    keys = {draws.key(*part) & 0xFFFFFFFF for part in parts}
    assert len(keys) == len(parts)
    assert all(0 <= draws.key(*part) < 1 << 63 for part in parts)


def test_a_seed_of_any_size_gives_a_key() -> None:
    assert len({draws.key(seed, 0, 0, 0, 0) for seed in (0, 1, -1, 1 << 31, 1 << 63, (1 << 64) - 2)}) == 6


def values() -> list[float]:
    return [float(torch.rand(())), random.random(), float(numpy.random.rand())]


def test_every_generator_is_seeded() -> None:
    draws.reseed(draws.key(1, 2, 3, 4, 0), CPU)
    first = values()
    values()
    draws.reseed(draws.key(1, 2, 3, 4, 0), CPU)
    assert values() == first
    draws.reseed(draws.key(1, 2, 3, 4, 1), CPU)
    assert not set(values()) & set(first)


def test_the_scripts_generators_go_on_whatever_happens() -> None:
    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
    expected = [values(), values()]
    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
    found = [values()]
    with contextlib.suppress(ZeroDivisionError), draws.preserved(CPU):
        draws.reseed(5, CPU)
        values()
        raise ZeroDivisionError
    found.append(values())
    assert found == expected


# --- switches ---------------------------------------------------------------------------------------------------------

CHANGES: dict[str, Any] = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "deterministic, warn": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "mkldnn": lambda: torch._C._set_mkldnn_enabled(False),
    "fill": lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "fast path": lambda: torch.backends.mha.set_fastpath_enabled(False),
    "anomaly": lambda: torch.set_anomaly_enabled(True),
    "denormals": lambda: torch.set_flush_denormal(True),
}
if hasattr(torch._C, "_set_fp32_precision_setter"):
    CHANGES["new precision"] = lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16")


@pytest.mark.parametrize("name", CHANGES)
def test_switches_come_and_go(name: str) -> None:
    before = Switches.current()
    try:
        CHANGES[name]()
        changed = Switches.current()
        assert changed != before
        before.apply(changed)
        assert Switches.current() == before
        changed.apply(before)
        assert Switches.current() == changed
    finally:
        before.apply(Switches.current())
    assert Switches.current() == before


# --- losses -----------------------------------------------------------------------------------------------------------

WEIGHT = torch.tensor([1.0, 2.0, 4.0])
TARGETS = [torch.tensor([0, 1, -100]), torch.tensor([2, 2]), torch.tensor([-100])]
CROSS_ENTROPY = functional.cross_entropy


@pytest.mark.parametrize(
    ("loss", "counts"),
    [
        (nn.MSELoss(), [3, 2, 1]),
        (lambda o, t: o.mean(), [3, 2, 1]),
        (nn.CrossEntropyLoss(), [2, 2, 0]),
        (nn.CrossEntropyLoss(ignore_index=2), [3, 0, 1]),
        (nn.CrossEntropyLoss(weight=WEIGHT), [3, 8, 0]),
        (nn.NLLLoss(weight=WEIGHT), [3, 8, 0]),
        (CROSS_ENTROPY, [2, 2, 0]),
        (functional.nll_loss, [2, 2, 0]),
        (functools.partial(CROSS_ENTROPY, ignore_index=2), [3, 0, 1]),
        (functools.partial(functools.partial(CROSS_ENTROPY, ignore_index=1), ignore_index=2), [3, 0, 1]),
    ],
)  # fmt: skip
def test_what_a_mean_runs_over(loss: Any, counts: list[float]) -> None:
    assert microbatch.item_counts(loss, TARGETS, [3, 2, 1]) == counts


def test_probabilities_as_targets_count_rows() -> None:
    targets = [torch.ones(3, 4), torch.ones(2, 4)]
    assert microbatch.item_counts(nn.CrossEntropyLoss(), targets, [3, 2]) == [3, 2]


@pytest.mark.parametrize(
    ("loss", "reduction", "known"),
    [
        (nn.MSELoss(), "mean", True),
        (nn.MSELoss(reduction="sum"), "sum", True),
        (functools.partial(functional.mse_loss, reduction="sum"), "sum", True),
        (functional.mse_loss, "mean", False),
        (CROSS_ENTROPY, "mean", True),
        (lambda o, t: o.sum(), "mean", False),
    ],
)
def test_what_a_loss_says_of_itself(loss: Any, reduction: str, known: bool) -> None:
    assert microbatch.reduction_of(loss) == reduction
    assert microbatch.says_its_reduction(loss) is known


def halves(tree: Any) -> Any:
    return tree[:2], tree[2:]


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (functional.mse_loss, "mean"),
        (lambda o, t: (o - t).square().sum(), "sum"),
        (lambda o, t: (o - t).square().mean().sqrt(), "other"),
        (lambda o, t: (o - t).mean() * float("nan"), "mean"),
    ],
)
def test_sums_are_told_from_means(loss: Any, kind: str) -> None:
    output, target = torch.arange(12.0).view(4, 3), torch.zeros(4, 3)
    assert microbatch.whole_batch_kind(loss, output, target, 4, halves) == kind


def test_totals_add_up() -> None:
    totals = microbatch.LossTotals()
    totals.add(torch.tensor(4.0), 3, {"right": torch.tensor(2)})
    totals.add(torch.tensor(2.0), 1.0, {"right": 1})
    assert totals.weighted is not None
    assert float(totals.weighted) == 6
    assert totals.count == 4
    assert totals.means() == {"right": 0.75}
    assert microbatch.means({"none": (1.0, 0.0)})["none"] != 0


def test_metric_sums() -> None:
    assert microbatch.metric_sums({"a": (3, 4), "b": torch.tensor(0.5)}, 6) == {"a": (3.0, 4.0), "b": (3.0, 6.0)}
    assert microbatch.metric_sums(0.25, 4) == {"value": (1.0, 4.0)}
    with pytest.raises(UsageError, match="metric_fn returned a="):
        microbatch.metric_sums({"a": "much"}, 4)
    assert jap.Loss is microbatch.Loss


# --- the cut ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=9), st.integers(1, 9))
def test_the_cut_is_whole_and_the_heaviest_stage_as_light_as_can_be(costs: list[float], stages: int) -> None:
    if len(costs) < stages:
        with pytest.raises(UsageError, match=f"--stages={stages}: the model has {len(costs)} blocks"):
            cut(costs, stages)
        return
    ranges = cut(costs, stages)
    assert [r[0] for r in ranges] == [0, *[r[1] for r in ranges[:-1]]]
    assert ranges[-1][1] == len(costs)
    assert all(first < end for first, end in ranges)

    def best(count: int, pieces: int) -> float:
        if pieces == 1:
            return sum(costs[:count])
        return min(max(best(k, pieces - 1), sum(costs[k:count])) for k in range(pieces - 1, count))

    assert max(sum(costs[a:b]) for a, b in ranges) == pytest.approx(best(len(costs), stages), abs=1e-9)
