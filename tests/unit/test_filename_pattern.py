r"""File names against those that Slurm 22.05.8 gave the files of a real array, recorded; tests/slurm makes them again.

Trial: https://github.com/karimknaebel/turm/issues/11, https://github.com/neilmunday/slurm-mail/issues/61 (%N)
"""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_jap import filename_pattern
from slurm_jap.filename_pattern import expand, fixed_folder, letters_in

OLD, NEW = (22, 5), (26, 5)


def names(pattern: str, slurm: tuple[int, int] = OLD) -> str:
    return expand(
        pattern, job_id=56, array_job_id=31, index=3, job_name="na me", user="root", node="vm", slurm=slurm, restarts=2
    )


# What Slurm 22.05.8 called the file of task 3 (job id 56) of array 31.
RECORDED = {
    "%A_%a": "31_3",
    "%j.x": "56.x",
    "%J_%a": "56_3",
    "%x-%a-%u": "na me-3-root",
    "%N_%n_%t_%s_%a": "vm_0_0_batch_3",
    "%4a.%3A": "0003.031",
    "%%a_%a": "%a_3",
    "%z_%a": "%z_3",
    "%4z_%a": "4z_3",
    "%12z_%a": "2z_3",
    "%12a_x": "0000000003_x",
    "%012a_y": "0000000003_y",
    "p%4%a": "p43",
    "end_%a%": "end_3%",
    "end_%a%5": "end_35",
    "b_%b_%a": "b_%b_3",
    "%%%a_k": "%3_k",
    "%%%%a_%a": "%%a_3",
    "\\%a_lit": "%a_lit",
    "q\\\\%a": "q\\%a",
    "%05%_%a": "5%_3",
    "%r%a": "%r3",
    "% a%a": "% a3",
    "%3x_%a": "na me_3",
    "noidx": "noidx",
    "%4%%a_%a": "4%a_3",
    "%a%4%%a": "34%a",
    "%é%a": "%é3",
}


@pytest.mark.parametrize("pattern", RECORDED)
def test_names_are_those_of_slurm_22_05(pattern: str) -> None:
    assert names(pattern) == RECORDED[pattern]


def test_newer_versions_know_more_letters_and_keep_unknown_ones_whole() -> None:
    assert names("%b.%a.%r", (24, 11)) == "3.3.%r"
    assert names("%2b.%a.%r", NEW) == "03.3.2"
    assert names("%4z_%a", NEW) == "%4z_3"
    assert names("\\%a\\\\b", NEW) == "%ab"
    assert names("end_%a%", NEW) == "end_3"


def test_defaults() -> None:
    assert names("") == "slurm-31_3.out"
    assert names("NONE") == "/dev/null"


@pytest.mark.parametrize(
    ("pattern", "letters"),
    [
        ("%A_%4a.out", "Aa"),
        ("%%a", ""),
        ("%%%a", "a"),
        ("\\%a", ""),
        ("", "Aa"),
        ("%j", "j"),
        ("none", ""),
        ("%4%a", "a"),
    ],
)
def test_letters_that_expansion_replaces(pattern: str, letters: str) -> None:
    assert letters_in(pattern, OLD) == set(letters)


@pytest.mark.parametrize(
    ("pattern", "folder"),
    [
        ("", ""),
        ("logs/%A_%a.out", "logs"),
        ("/a/b/%x/c/%a.out", "/a/b"),
        ("%x/%a.out", ""),
        ("/%a.out", "/"),
        ("all.out", ""),
        ("logs/all.out", "logs"),
        ("/dev/null", ""),
        ("none", ""),
        ("lo\\gs/%a", "logs"),
    ],
)
def test_the_folder_that_all_members_share(pattern: str, folder: str) -> None:
    assert fixed_folder(pattern) == folder


@given(st.text("ab%04Aj_x/\\", max_size=12), st.sampled_from([OLD, (24, 11), (25, 11), NEW]))
def test_any_pattern_gives_a_name_below_its_fixed_folder(pattern: str, slurm: tuple[int, int]) -> None:
    name = names(pattern, slurm)
    plain = "\\" not in pattern and "//" not in pattern and not pattern.rstrip("%0").endswith("/")
    if plain and (folder := fixed_folder(pattern)):
        assert PurePosixPath(folder) in PurePosixPath(name).parents
    assert filename_pattern.expand(
        "%%" + pattern, job_id=1, array_job_id=1, index=0, job_name="n", user="u", node="n", slurm=slurm
    ).startswith("%")
