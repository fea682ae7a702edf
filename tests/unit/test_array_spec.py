"""Array specifications against what sbatch 22.05.8 made of them, recorded; tests/slurm asks the installed one again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_jap import array_spec
from slurm_jap.errors import UsageError

# Specification -> (indices, throttle, SLURM_ARRAY_TASK_STEP), with MaxArraySize=1001.
ACCEPTED: dict[str, tuple[list[int], int | None, int]] = {
    "0-3": ([0, 1, 2, 3], None, 1),
    "1-10:2%3": ([1, 3, 5, 7, 9], 3, 2),
    "0-3,2-5": ([0, 1, 2, 3, 4, 5], None, 1),
    "7": ([7], None, 1),
    "5,1,3": ([1, 3, 5], None, 1),
    "-": ([0], None, 1),
    "%3": ([0], 3, 1),
    "1,,2": ([1, 2], None, 1),
    "[1-3]": ([1, 2, 3], None, 1),
    "1]": ([1], None, 1),
    "[1-7:2]": ([1, 3, 5, 7], None, 2),
    "1%a": ([1], None, 1),
    "1%0": ([1], None, 1),
    "1%-3": ([1], None, 1),
    " 1": ([1], None, 1),
    "1- 3": ([1, 2, 3], None, 1),
    "+1": ([1], None, 1),
    "01-03": ([1, 2, 3], None, 1),
    "1000": ([1000], None, 1),
    "1-3%2,7": ([1, 2, 3, 7], 2, 1),
    "1-3,7%2": ([1, 2, 3, 7], 2, 1),
    "0-7:2,9-11:5": ([0, 2, 4, 6, 9], None, 2),
    "1-2,5-9:4": ([1, 2, 5, 9], None, 4),
    "1%2:3": ([1], 2, 3),
    "0-3%": ([0, 1, 2, 3], None, 1),
    "1-3:1000": ([1], None, 1000),
    "1%4294967298": ([1], 2, 1),
}
REFUSED = [
    "3-1",
    "5:2",
    "1-",
    "a",
    "0-3:0",
    "1--3",
    "1 ",
    "0x3",
    "1001",
    "0-2000:1001",
    "1:2",
    "-1",
    "1-3:1001",
    "1-3:a",
    "99999999999999999999",
    "1;2",
    "1-3-5",
    "1.5",
    "0-1001",
    "1,a",
    "[1-3]]x",
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_set_throttle_and_step_are_those_of_sbatch(text: str) -> None:
    spec = array_spec.parse(text)
    assert (list(spec.indices), spec.throttle, spec.step) == ACCEPTED[text]
    assert spec.text == text


@pytest.mark.parametrize("text", REFUSED)
def test_what_sbatch_refuses_is_refused_in_one_line_that_shows_it(text: str) -> None:
    with pytest.raises(UsageError) as error:
        array_spec.parse(text)
    assert repr(text) in str(error.value)
    assert "\n" not in str(error.value)


# https://github.com/TUM-DAML/seml/issues/47: an index above the cap was found out only by sbatch
def test_an_index_above_the_cap_says_what_the_cap_is_and_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"index 64 is above 63.*MaxArraySize=64.*split"):
        array_spec.parse("0-64", max_size=64)
    assert array_spec.parse("63", max_size=64).indices == (63,)


@pytest.mark.parametrize("text", ["", ",", ",,"])
def test_a_text_without_tokens_is_no_array(text: str) -> None:
    assert len(array_spec.parse(text)) == 0


def test_too_many_tasks_and_too_long_a_text_are_refused() -> None:
    with pytest.raises(UsageError, match="max_array_tasks"):
        array_spec.parse("0-9", max_tasks=9)
    assert len(array_spec.parse("0-9", max_tasks=10)) == 10
    with pytest.raises(UsageError, match="longer than 4096"):
        array_spec.parse(",".join(["1"] * 3000))


def test_arrays_switched_off_refuse_all() -> None:
    with pytest.raises(UsageError, match="no arrays"):
        array_spec.parse("0", max_size=0)


def test_the_environment_of_a_task() -> None:
    assert array_spec.parse("1-9:4,20%2").environment(77, 9) == {
        "SLURM_ARRAY_JOB_ID": "77",
        "SLURM_ARRAY_TASK_ID": "9",
        "SLURM_ARRAY_TASK_COUNT": "4",
        "SLURM_ARRAY_TASK_MIN": "1",
        "SLURM_ARRAY_TASK_MAX": "20",
        "SLURM_ARRAY_TASK_STEP": "4",
    }
    with pytest.raises(ValueError, match="index 2"):
        array_spec.parse("1-9:4").environment(77, 2)


ranges = st.tuples(st.integers(0, 200), st.integers(0, 200), st.integers(1, 50)).map(
    lambda t: (min(t[:2]), max(t[:2]), t[2])
)


@given(st.lists(ranges, min_size=1, max_size=6), st.none() | st.integers(1, 50))
def test_a_list_of_ranges_is_their_union(parts: list[tuple[int, int, int]], throttle: int | None) -> None:
    text = ",".join(f"{a}-{b}:{c}" for a, b, c in parts) + (f"%{throttle}" if throttle else "")
    spec = array_spec.parse(text)
    assert set(spec.indices) == {i for a, b, c in parts for i in range(a, b + 1, c)}
    assert list(spec.indices) == sorted(set(spec.indices))
    assert spec.throttle == throttle
    assert spec.step == parts[0][2]


@given(st.text("0123456789-,:%[] +ax", max_size=20))
def test_any_text_is_an_array_or_refused(text: str) -> None:
    try:
        spec = array_spec.parse(text)
    except UsageError:
        return
    assert all(0 <= index <= 1000 for index in spec.indices)
