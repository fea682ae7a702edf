"""jap-plan and jap-submit --jap-explain with and without a profile: tables, JSON, charts, and what they say is wrong.

The stand-ins for Slurm's commands print what Slurm 22.05.8 printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from slurm_jap import carried, profile_cache
from slurm_jap.profile import BlockProfile, Profile
from slurm_jap.profile_cache import Entry

SCRIPT = (
    b"#!/bin/bash\n#SBATCH --array=0-7 --gres=gpu:4 --mem=1000 --cpus-per-task=2 --time=60\n#JAP\npython train.py\n"
)
SCONTROL = """#!/bin/sh
case "$*" in
*config*) printf 'MaxArraySize = 1001\\nSLURM_VERSION = 22.05.8\\nMaxMemPerNode = UNLIMITED\\n' ;;
*partition*) echo "PartitionName=normal Default=YES DefaultTime=01:00:00 MaxNodes=4 MaxTime=1-00:00:00" ;;
*node*) echo "NodeName=n1 CPUTot=32 CPUEfctv=32 Gres=gpu:4 RealMemory=64000" ;;
esac
"""
SINFO = '#!/bin/sh\nfor n in 1 2 3 4; do echo "n$n|32|64000|gpu:4|(null)"; done\n'
SBATCH = '#!/bin/sh\nfor word; do case $word in */jap-submit-*) cp "$word" script;; esac; done\necho 90\n'


def network(*, measured: bool = True, forward: float = 0.01, device: str = "NVIDIA H200") -> Profile:
    block = BlockProfile(
        name="Block", forward=forward, backward=2 * forward, step=1e-3, parameter_bytes=1 << 30,
        gradient_bytes=1 << 30, optimizer_bytes=2 << 30, activation_bytes=1 << 26, output_bytes=1 << 20,
    )  # fmt: skip
    loss = BlockProfile(name="Loss", forward=0.0, backward=0.0)
    return Profile(
        signature="0" * 16, device=device, blocks=(block,) * 8 + (loss,), microbatches=4, measured=measured,
        device_bytes=80 << 30,
    )  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a script, stand-ins for Slurm's commands, an empty cache."""
    (tmp_path / "bin").mkdir()
    for name, text in {"scontrol": SCONTROL, "sinfo": SINFO, "sbatch": SBATCH}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.sh").write_bytes(SCRIPT)
    return tmp_path


def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"slurm_jap.{program}", *words], capture_output=True, timeout=60, encoding="utf-8"
    )


def remember(profile: Profile | None = None, arguments: tuple[str, ...] = ()) -> Path:
    entry = Entry(profile=profile or network(), members=tuple(range(8)), arguments=arguments)
    return profile_cache.save(SCRIPT, entry)


def test_before_the_first_run_the_first_rule_holds_and_the_plan_says_so(here: Path) -> None:
    done = run("plan", "t.sh")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("jap: 4 stages x 1 group, by the first sizing rule\n")
    assert "Nothing is known of this script's network yet" in done.stdout
    explained = run("submit", "--jap-explain", "t.sh").stdout
    assert "the first sizing rule: nothing is known of this script's network" in explained


def test_a_known_network_is_planned_with_a_table_and_the_winner_explained(here: Path) -> None:
    remember()
    done = run("plan", "t.sh")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("jap: one job trains 8 members")
    assert lines[1].split()[:4] == ["G", "x", "S", "devices"]
    assert sum("chosen" in line for line in lines) == 1
    assert any(line.startswith("Chosen for throughput: ") for line in lines)
    assert "Times are measured. A device's memory: 72.0 GiB." in done.stdout
    assert "not known" not in done.stdout
    explained = run("submit", "--jap-explain", "t.sh").stdout
    assert "throughput: " in explained
    assert next(line for line in lines if "chosen" in line) in explained.splitlines()


def test_what_is_planned_is_what_is_submitted(here: Path) -> None:
    remember()
    told = json.loads(run("plan", "t.sh", "--json").stdout)
    (row,) = [row for row in told["plan"]["candidates"] if row["chosen"]]
    assert run("submit", "t.sh").returncode == 0
    facts, script = carried.parse((here / "script").read_bytes())
    assert script == SCRIPT
    assert (
        (facts.groups, facts.stages)
        == (row["groups"], row["stages"])
        == (
            told["request"]["groups"],
            told["request"]["stages"],
        )
    )
    assert f"#SBATCH --time={row['time_minutes']}" in (here / "script").read_text()
    assert facts.gres == f"gpu:{told['request']['gpus_per_node']}"


def test_goals_and_wishes_of_script_and_command_line_are_heard(here: Path) -> None:
    remember()
    finish = json.loads(run("plan", "--jap-goal=finish", "t.sh", "--json").stdout)["plan"]
    assert finish["goal"] == "finish"
    usual = json.loads(run("plan", "--json", "t.sh").stdout)["plan"]

    def pace(plan: dict[str, list[dict[str, float]]]) -> float:
        return next(row["pace"] for row in plan["candidates"] if row["chosen"])

    assert pace(finish) < pace(usual)
    (here / "t.sh").write_bytes(SCRIPT.replace(b"#JAP\n", b"#JAP --goal=quickly\n"))
    done = run("plan", "t.sh")
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected one of throughput, finish, gpu-hours" in done.stderr


def test_a_profile_can_be_named(here: Path) -> None:
    path = remember()
    os.rename(path, here / "p.json")
    assert "first sizing rule" in run("plan", "t.sh").stdout
    assert "Chosen for" in run("plan", "--profile=p.json", "t.sh").stdout
    for words, said in {
        ("--profile", "none.json"): "cannot read the profile 'none.json': No such file or directory; check its path",
        ("--profile=t.sh",): "write one with JAP_PROFILE=t.sh python train.py",
        ("--profile=",): "--profile needs a value; type --profile=FILE",
        ("--json=yes",): "--json takes no value, not 'yes'; type --json",
        ("--gantt=no/where.svg", "--profile=p.json"): "--gantt: cannot write 'no/where.svg'",
        ("--jap-explain",): "--jap-explain is for jap-submit",
        ("--no-such-option",): "no-such-option",
    }.items():
        done = run("plan", *words, "t.sh")
        assert (done.returncode, done.stdout) == (2, ""), words
        assert said in done.stderr, words
        assert done.stderr.count("\n") == 1


def test_a_chart_of_the_chosen_pipeline(here: Path) -> None:
    remember()
    assert run("plan", "t.sh", "--gantt", "g.svg").returncode == 0
    root = ElementTree.parse(here / "g.svg").getroot()
    assert root.tag.endswith("svg")
    assert len(list(root.iter())) > 50


def test_a_plain_array_is_a_plain_array(here: Path) -> None:
    remember(network(forward=10.0))
    (here / "t.sh").write_bytes(SCRIPT.replace(b"#JAP\n", b"#SBATCH --licenses=x\n#JAP\n"))
    done = run("plan", "t.sh")
    assert (done.returncode, done.stdout) == (1, "jap: plain array: --licenses are counted per task\n")
    assert json.loads(run("plan", "t.sh", "--json").stdout)["coalesced"] is False
    assert "give --array" in run("plan", os.devnull).stderr or run("plan", os.devnull).returncode == 2


def test_a_run_with_other_arguments_is_noted_and_refuses_no_deeper_network(here: Path) -> None:
    remember(arguments=("--layers", "8"))
    assert "note: the profile is of a run with other arguments" in run("plan", "t.sh", "--layers", "16").stdout
    assert "by the first sizing rule" in run("plan", "--jap-stages=12", "t.sh", "--layers", "16").stdout
    refused = run("plan", "--jap-stages=12", "t.sh", "--layers", "8").stdout
    assert refused.startswith("jap: plain array: 1 group x 12 stages: the model has 8 blocks; type --stages=8 or fewer")


def test_estimates_show_no_seconds(here: Path) -> None:
    remember(network(measured=False))
    done = run("plan", "t.sh")
    assert "Times are estimated: only ratios mean anything" in done.stdout
    assert " ms" not in done.stdout


def test_help_names_every_option(here: Path) -> None:
    done = run("plan", "--help")
    assert done.returncode == 0
    for word in ("--gantt=FILE.svg", "--json", "--profile=FILE", "--jap-goal=GOAL", "--jap-memory-per-device=SIZE"):
        assert word in done.stdout


# -------------------------------------------------------------------------------------------------------------- cache


def test_profiles_of_the_same_arguments_come_first_and_the_newest_of_them(here: Path) -> None:
    wide = network(forward=0.02)
    remember(network(), ("--steps", "2"))
    profile_cache.save(
        SCRIPT,
        Entry(
            profile=Profile.from_json({**wide.to_json(), "signature": "1" * 16}), arguments=("--wide",),
            saved=time.time() + 5,
        ),
    )  # fmt: skip
    assert [entry.arguments for entry in profile_cache.load(SCRIPT)] == [("--wide",), ("--steps", "2")]
    assert [entry.arguments for entry in profile_cache.load(SCRIPT, ["--steps", "2"])] == [("--steps", "2")]
    assert len(profile_cache.load(SCRIPT, ["--other"])) == 2
    assert profile_cache.load(SCRIPT + b"#") == []
    assert profile_cache.find(SCRIPT, "1" * 16, "NVIDIA H200") is not None
    assert profile_cache.find(SCRIPT, "1" * 16, "cpu") is None


def test_foreign_files_are_no_profiles(here: Path) -> None:
    folder = remember().parent
    (folder / "x.json").write_text("[1, 2]")
    (folder / "y.json").write_text('{"profile": {"version": 99}}')
    (folder / "z.json").write_bytes(b"\xff\xfe")
    assert len(profile_cache.load(SCRIPT)) == 1


def test_only_the_newest_profiles_are_kept(here: Path) -> None:
    for number in range(profile_cache.MOST + 3):
        one = Profile.from_json({**network().to_json(), "signature": f"{number:016x}"})
        path = profile_cache.save(SCRIPT, Entry(profile=one))
        os.utime(path, (number, number))
    assert len(profile_cache.load(SCRIPT)) <= profile_cache.MOST + 1
    assert not list(path.parent.glob(".new-*"))
