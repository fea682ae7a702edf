"""The coalesced job's script: what goes in comes out, bash included."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_jap.carried import MARKER, Carried, build, parse, quote_for_bash

PYTHON = "/opt/jap env/bin/python"
value = st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=["Cs"]), max_size=30)
count = st.none() | st.integers(0, 10**6)
facts_given = st.builds(
    Carried,
    array=value.filter(bool),
    output=value,
    error=value,
    input=value,
    open_mode=value,
    script_name=value,
    gres=value,
    stages=count,
    groups=count,
    member_cpus=count,
    member_mem_mb=count,
    member_time_min=count,
    memory_per_device_mb=count,
    at_once=count,
)


@given(facts=facts_given, script=st.binary(max_size=200), lines=st.lists(value, max_size=3))
def test_facts_and_script_come_back(facts: Carried, script: bytes, lines: list[str]) -> None:
    assert parse(build(PYTHON, facts, script, tuple(lines))) == (facts, script)


@pytest.mark.parametrize("word", ["#JAP-USER-SCRIPT", "x #JAP-USER-SCRIPT", "#JAP-CARRIED array=9"])
def test_values_that_look_like_our_own_lines(word: str) -> None:
    facts = Carried(array="0-1", script_name=word, output=word)
    script = f"#!/bin/sh\n{word}\n#JAP-CARRIED stages=9\n".encode()
    assert parse(build(PYTHON, facts, script, (f"--comment={word}",))) == (facts, script)


def test_names_that_are_no_text_come_back() -> None:
    name = b"\xff\xfe.sh".decode(errors="surrogateescape")
    facts = Carried(array="0-1", script_name=name)
    assert parse(build(PYTHON, facts, b""))[0].script_name.encode(errors="surrogateescape") == b"\xff\xfe.sh"


@pytest.mark.parametrize("bad", ["a\nb", "a\rb", "a\0b"])
@pytest.mark.parametrize("where", ["array", "output", "script_name", "sbatch"])
def test_a_line_break_cannot_be_carried(bad: str, where: str) -> None:
    facts = {"array": "0-1"} | ({} if where == "sbatch" else {where: bad})
    lines = (bad,) if where == "sbatch" else ()
    with pytest.raises(ValueError, match="cannot be carried"):
        build(PYTHON, Carried(**facts), b"", lines)


@pytest.mark.parametrize("character", ['"', "$", "`", "\\", "!", "\n", "\t", "\0"])
def test_interpreter_paths_that_bash_would_change_are_refused(character: str) -> None:
    with pytest.raises(ValueError, match="cannot carry safely"):
        quote_for_bash(f"/opt/{character}/python")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (b"", "no #JAP-USER-SCRIPT line"),
        (b"#!/bin/bash\necho '#JAP-USER-SCRIPT'\n", "no #JAP-USER-SCRIPT line"),
        (b"#!/bin/bash\n" + MARKER, "name no array"),
        (b"#!/bin/bash\n#JAP-CARRIED array=0\n#JAP-CARRIED future=1\n" + MARKER, "unknown fact 'future'"),
        (
            b"#!/bin/bash\n#JAP-CARRIED array=0\n#JAP-CARRIED stages=two\n" + MARKER,
            "stages='two' is not a whole number",
        ),
    ],
)
def test_what_is_no_coalesced_script_is_refused_with_the_reason(script: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(script)


def test_bash_runs_the_launcher_and_nothing_of_the_users_text(tmp_path: Path) -> None:
    python = tmp_path / "a folder" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    script = tmp_path / "job script"
    user = b"#!/bin/bash\ntouch ran\n' \" $( ` <<EOF\nexit 9\n"
    script.write_bytes(
        build(str(python), Carried(array="0-1", output="$(touch ran)"), user, ("--comment=`touch ran`",))
    )
    done = subprocess.run(
        ["bash", script, "a b", "$c"], cwd=tmp_path, capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout.splitlines() == ["-I", "-m", "slurm_jap.run", str(script), "a b", "$c"]
    assert not (tmp_path / "ran").exists()


def test_a_missing_launcher_is_said_plainly(tmp_path: Path) -> None:
    script = tmp_path / "job"
    script.write_bytes(build(str(tmp_path / "nowhere" / "python"), Carried(array="0-1"), b"touch ran\n"))
    done = subprocess.run(["bash", script], cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert done.returncode == 127
    assert done.stderr.startswith(f"jap: {tmp_path}/nowhere/python not found on ")
    assert "JAP=0" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "ran").exists()
