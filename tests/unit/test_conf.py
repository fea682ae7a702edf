"""jap.conf: what is accepted, and that every fault is named by file, line and the nearest thing that would do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_jap import conf

REPOSITORY = Path(__file__).resolve().parents[2]
GOOD = "Python=/opt/jap/bin/python\nPartition=gpu MaxTime=2-00:00:00\n"


def first_problem(text: str) -> str:
    problems = conf.check_text(text, "jap.conf")
    assert problems, f"no fault found in {text!r}"
    return str(problems[0])


def test_all_keys() -> None:
    parsed = conf.parse(
        "# a comment\n"
        "Python=/opt/jap/bin/python   # at the end of a line too\n"
        "MaxArraySize=2000 DefMemPerCPU=4G\r\n"
        "\n"
        "Partition=gpu MaxMembers=16 MaxTime=1-12 NodeCPUs=64 NodeMemory=500G NodeGPUs=4\n"
        "\tpartition=gpu-long_2.0\tmaxtime=90\n"
    )
    assert parsed == conf.Conf(
        python="/opt/jap/bin/python",
        max_array_size=2000,
        default_memory_per_cpu_mb=4096,
        partitions={
            "gpu": conf.PartitionConf(
                name="gpu", max_members=16, max_time_minutes=36 * 60, node_cpus=64, node_memory_mb=512000, node_gpus=4
            ),
            "gpu-long_2.0": conf.PartitionConf(name="gpu-long_2.0", max_time_minutes=90),
        },
    )


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing yet\n", "Python=/opt/jap/bin/python\n"])
def test_no_partition_is_no_fault_and_enables_nothing(text: str) -> None:
    assert conf.check_text(text) == []
    assert conf.parse(text).partitions == {}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("Partition=gpu MaxTime=60 MaxMember=4", "unknown key 'MaxMember': the nearest known key is MaxMembers"),
        ("Pyton=/x", "unknown key 'Pyton': the nearest known key is Python"),
        ("Partition=gpu MaxTime=60 NodeMem=4G", "the nearest known key is NodeMemory"),
        ("Qwertz=1", "the nearest known key is "),
        ("Partition=gpu", "Partition=gpu lacks MaxTime=: add"),
        ("Partition=gpu MaxTime=60 MaxTime=70", "MaxTime= stands twice"),
        ("Partition=gpu MaxTime=UNLIMITED", "MaxTime=UNLIMITED: expected a time as Slurm writes it"),
        ("Partition=gpu MaxTime=0:30", "at least one minute"),
        ("Partition=gpu MaxTime=1:2:3:4", "expected a time"),
        ("Partition=gpu MaxTime=", "expected a time"),
        ("Partition=a,b MaxTime=60", "Partition=a,b: expected a partition's name"),
        ("Partition= MaxTime=60", "expected a partition's name"),
        ("Partition=gpu MaxTime=60 MaxMembers=0", "MaxMembers=0: expected a whole number from 1 to 1000"),
        ("Partition=gpu MaxTime=60 MaxMembers=1001", "from 1 to 1000"),
        ("Partition=gpu MaxTime=60 MaxMembers=8x", "expected a whole number"),
        ("Partition=gpu MaxTime=60 NodeMemory=500GB", "NodeMemory=500GB: expected a whole number with K, M, G or T"),
        ("Partition=gpu MaxTime=60 NodeMemory=1023K", "at least 1M"),
        ("Partition=gpu MaxTime=60 Python=/x", "Python= may not stand here: begin a line of its own"),
        ("MaxTime=60 Partition=gpu", "MaxTime= may not stand here: move it to a line that begins with Partition="),
        ("MaxArraySize=5 Partition=gpu", "Partition= may not stand here: begin a line of its own"),
        ("Partition=gpu Partition=cpu MaxTime=60", "Partition= may not stand here"),
        ("Python = /x", "'Python' is not Key=Value: write it without spaces around '='"),
        ("Python=bin/python", "Python=bin/python: expected an absolute path"),
        ("Python=/x/$HOME", "expected an absolute path"),
        ("Partition=gpu MaxTime=60 \\", "is not Key=Value"),
        ("Partition=gpü MaxTime=60", "a character that is not plain ASCII"),
        ("Partition=gpu\0 MaxTime=60", "a character that is not plain ASCII"),
    ],
)
def test_a_fault_is_one_line_with_the_line_number(line: str, says: str) -> None:
    problem = first_problem("Python=/opt/jap/bin/python\n" + line + "\n" if "Python" not in line else "\n" + line)
    assert problem.startswith("jap: jap.conf:2: ")
    assert says in problem
    assert "\n" not in problem
    with pytest.raises(ValueError, match=re.escape(problem)):
        conf.parse("Python=/opt/jap/bin/python\n" + line + "\n" if "Python" not in line else "\n" + line)


def test_python_is_asked_for_once_partitions_are_enabled() -> None:
    assert first_problem("Partition=gpu MaxTime=60\n").startswith("jap: jap.conf: Python= is missing: add Python=/")


def test_a_partition_stands_once() -> None:
    assert first_problem(GOOD + "Partition=gpu MaxTime=60\n").startswith("jap: jap.conf:3: Partition=gpu stands twice")


def test_every_fault_is_reported_in_order() -> None:
    problems = conf.check_text("Pithon=/x\nPartition=a\nPartition=b MaxTime=x Node=3\n")
    assert [problem.line for problem in problems] == [1, 2, 3, 3]


def test_a_huge_file_is_refused() -> None:
    assert "larger than 65536 bytes" in first_problem(GOOD + "#" * conf.MAX_BYTES)


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("5", 5), ("5:30", 5), ("1:00:59", 60), ("2-0", 2880), ("1-2:3", 1563), ("1-2:3:4", 1563), ("0", None), ("", None),
     ("1-", None), ("-5", None), ("1:2:3:4", None), ("1.5", None), ("٣", None)],
)  # fmt: skip
def test_times(text: str, minutes: int | None) -> None:
    assert conf.parse_minutes(text) == minutes


@given(st.text(alphabet="PpartionMxTme=/#0-9:GK \t\r\n\\'\"ü\0", max_size=200))
def test_any_text_is_judged_without_an_exception(text: str) -> None:
    problems = conf.check_text(text)
    if not problems:
        assert all(p.max_time_minutes >= 1 for p in conf.parse(text).partitions.values())


class TestCheckFile:
    def test_good(self, tmp_path: Path) -> None:
        (tmp_path / "jap.conf").write_text(GOOD)
        assert conf.check_file(str(tmp_path / "jap.conf")) == []

    def test_faults_name_the_file_as_given(self, tmp_path: Path) -> None:
        path = tmp_path / "odd name.conf"
        path.write_bytes(b"Partition=gpu\nX=\xff\n")
        lines = conf.check_file(str(path))
        assert len(lines) == 2
        assert all(line.startswith(f"jap: {path}:") for line in lines)

    @pytest.mark.parametrize("name", ["absent.conf", "."])
    def test_what_cannot_be_read_is_one_line(self, tmp_path: Path, name: str) -> None:
        (line,) = conf.check_file(str(tmp_path / name))
        assert "cannot be read" in line


def test_the_shipped_example_is_good_and_shows_every_key() -> None:
    text = (REPOSITORY / "etc" / "jap.conf").read_text()
    assert conf.check_text(text) == []
    assert [key.name for key in conf.KEYS if f"{key.name}=" not in text] == []
    without_comments = re.sub(r"^#(?=\w+=)", "", text, flags=re.MULTILINE)
    assert conf.check_text(without_comments) == []


def test_the_administrators_page_shows_the_table_of_keys() -> None:
    assert conf.key_table() in (REPOSITORY / "docs" / "admin.md").read_text()
