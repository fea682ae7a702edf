"""sbatch's options from scripts, variables and command lines; tests/slurm asks the installed sbatch about the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_jap import sbatch_options
from slurm_jap.sbatch_options import (
    COMMAND_LINE,
    OPTIONS,
    NotUnderstood,
    Submission,
    from_environment,
    from_script,
    parse_words,
    quote_for_directive,
)


def script(*lines: str) -> dict[str, str | None]:
    return {given.name: given.value for given in from_script("\n".join(("#!/bin/sh", *lines)).encode(), "t.sh")}


def words(*argv: str) -> dict[str, str | None]:
    found, end = parse_words(argv, COMMAND_LINE)
    assert end == len(argv)
    return {given.name: given.value for given in found}


def effective(lines: list[str], environment: dict[str, str], argv: list[str]) -> dict[str, str | None]:
    submission = Submission(
        script=tuple(from_script("\n".join(["#!/bin/sh", *lines]).encode())),
        environment=tuple(from_environment(environment)),
        command_line=tuple(parse_words(argv, COMMAND_LINE)[0]),
    )
    return {name: given.value for name, given in submission.effective().items()}


def test_forms_of_options() -> None:
    assert words("--array=0-3", "--time", "5", "-n4", "-p", "gpu", "-Jx") == {
        "array": "0-3",
        "time": "5",
        "ntasks": "4",
        "partition": "gpu",
        "job-name": "x",
    }
    assert words("-HWn", "2", "-vv", "-k") == {
        "hold": None,
        "wait": None,
        "ntasks": "2",
        "verbose": None,
        "no-kill": None,
    }
    assert words("--exclusive", "--nice=5", "--exclusive=user", "-koff") == {
        "exclusive": "user",
        "nice": "5",
        "no-kill": "off",
    }
    assert words("--job-name=", "--comment", "") == {"job-name": "", "comment": ""}
    assert words("--tasks-per-node=2") == {"ntasks-per-node": "2"}


def test_abbreviations_as_getopt_long_takes_them() -> None:
    assert words("--arr=1", "--dep", "afterok:1", "--mem=1", "--export=NONE") == {
        "array": "1",
        "dependency": "afterok:1",
        "mem": "1",
        "export": "NONE",
    }
    with pytest.raises(NotUnderstood, match="--mem-per could be --mem-per-cpu or --mem-per-gpu"):
        words("--mem-per=1")


@pytest.mark.parametrize("argv", [["--nosuch"], ["-Z"], ["--array"], ["--wait=1"], ["-a"], ["--=x"]])
def test_what_is_not_sbatchs_is_not_understood(argv: list[str]) -> None:
    with pytest.raises(NotUnderstood):
        words(*argv)


def test_options_end_at_the_script_or_at_two_dashes() -> None:
    for argv, at in (["-n1", "t.sh", "-n2"], 1), (["-n1", "--", "-n2"], 2), (["-n", "1", "-"], 2), ([], 0):
        assert parse_words(argv, COMMAND_LINE)[1] == at


def test_each_option_can_be_said_again() -> None:
    argv = ["-WHn", "2", "--time", "5", "-J", "", "--nice", "--comment=a b", "-koff", "--arr", "1"]
    found, _ = parse_words(argv, COMMAND_LINE)
    again, _ = parse_words([word for given in found for word in given.words], COMMAND_LINE)
    assert [(g.name, g.value) for g in again] == [(g.name, g.value) for g in found]


# The rules that TRIALS of real scripts showed, each with what sbatch 22.05.8 made of it.
def test_placement_of_directives() -> None:
    assert script("#SBATCH -J a", "", "# comment", "  # indented", "#SBATCH -J b", "true", "#SBATCH -J c") == {
        "job-name": "b"
    }
    assert script(" #SBATCH -J a", "##SBATCH -J b", "#sbatch -J c") == {}
    assert script("#SBATCH--array=0-3", "#SBATCH\t-n\t2") == {"array": "0-3", "ntasks": "2"}
    assert script("#SLURM -J old") == {"job-name": "old"}
    assert script("cat <<E", "#SBATCH -J a", "E") == {}
    assert script("#SBATCH -J", "#SBATCH name") == {"job-name": "name"}


def test_words_of_directives() -> None:
    assert script("#SBATCH -J nm # a note") == {"job-name": "nm"}
    assert script("#SBATCH --comment='a # b' -J \"x 'y'\"") == {"comment": "a # b", "job-name": "x 'y'"}
    assert script(r'#SBATCH --comment="a\"b\\c" -J x\#y') == {"comment": r'a"b\c', "job-name": "x#y"}
    assert script("#SBATCH --comment=a#b") == {"comment": "a"}
    assert script('#SBATCH -H -J "" --wckey=zz', "#SBATCH z") == {"hold": None, "job-name": "z"}


@pytest.mark.parametrize(
    "line",
    [
        "#SBATCH -J nm (note)",
        "#SBATCH --nosuch=1",
        "#SBATCH -J 'a",
        "#SBATCH hetjob",
        "#SBATCH -n1 : -n2",
        r"#SBATCH -J a\ b",
        "#SBATCH packjob -n1",
        "#SBATCH stray",
    ],
)
def test_directives_that_only_sbatch_can_judge(line: str) -> None:
    with pytest.raises(NotUnderstood, match=r"t\.sh, line 2"):
        script(line)


def test_script_then_environment_then_command_line() -> None:
    assert effective(["#SBATCH -p a -t 1 -A x"], {"SBATCH_PARTITION": "b", "SBATCH_TIMELIMIT": "2"}, ["-t", "3"]) == {
        "partition": "b",
        "time": "3",
        "account": "x",
    }
    assert effective([], {"SBATCH_ARRAY_INX": "0-3"}, ["--array="]) == {"array": ""}


def test_variables_of_flags_can_say_no() -> None:
    lines = ["#SBATCH --overcommit --wait"]
    assert effective(lines, {"SBATCH_OVERCOMMIT": "0", "SBATCH_WAIT": "no"}, []) == {}
    assert set(effective(lines, {"SBATCH_OVERCOMMIT": "", "SBATCH_WAIT": "yes"}, [])) == {"overcommit", "wait"}
    assert set(effective([], {"SBATCH_SPREAD_JOB": "2"}, [])) == {"spread-job"}


def test_options_for_the_command_line_alone_are_ignored_in_scripts() -> None:
    assert effective(["#SBATCH --quiet -v --wrap=x --parsable"], {}, []) == {"parsable": None}


def test_the_table_is_consistent() -> None:
    shorts = [option.short for option in OPTIONS.values() if option.short]
    assert len(shorts) == len(set(shorts))
    assert set(sbatch_options.VARIABLES.values()) <= OPTIONS.keys()
    assert OPTIONS.keys() >= sbatch_options.COMMAND_LINE_ONLY


@given(st.text(st.characters(blacklist_characters="\n\0", blacklist_categories=["Cs"]), min_size=1, max_size=20))
def test_a_word_survives_a_directive(word: str) -> None:
    line = f"#SBATCH --comment={quote_for_directive('=' + word)}"
    assert script(line) == {"comment": "=" + word}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"", "empty"),
        (b" \n\n", "white space"),
        (b"true\n", "no #!"),
        (b"#!/bin/sh\n\0", "NUL"),
        (b"#!/bin/sh\r\ntrue\r\n", "DOS"),
    ],
)
def test_texts_that_sbatch_refuses(text: bytes, fault: str) -> None:
    assert fault in (sbatch_options.why_no_batch_script(text) or "")
    assert sbatch_options.why_no_batch_script(b"#!/bin/sh\n\rtrue\n") is None


def test_lines_of_other_systems_count_wherever_they_stand() -> None:
    assert sbatch_options.other_systems_lines(b"#!/bin/sh\ntrue\n#PBS -N x\n") == "#PBS"
    assert sbatch_options.other_systems_lines(b"#!/bin/sh\n #PBS -N x\n#BSUX\n") is None
