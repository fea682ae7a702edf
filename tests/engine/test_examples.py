"""The house's first rule on its own examples: a member's log and trained parameters are those of its script alone.

Members train through ``jap-submit --jap-local`` with the batch script that users see; alone means the same batch script
run by bash, where ``prepare`` trains in the script's own process.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slurm_jap import status
from slurm_jap.status_view import SweepReader, SweepView
from slurm_jap.sweep import MemberState

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SHORT = {"digits": ["--epochs", "1"], "charlm": ["--steps", "12", "--characters", "20000"]}
SECONDS = 300.0


def environment(**values: str) -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **values}


def run(command: list[str], folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
    )


def copy_of(example: str, folder: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", ".jap", "*.out", "*.pt")
    return Path(shutil.copytree(ROOT / "examples" / example, folder, ignore=ignored))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[str, dict[str, torch.Tensor]]]:
    """Log and parameters of each member, trained by itself; filled when asked for."""

    class Alone(dict[tuple[str, int], tuple[str, dict[str, torch.Tensor]]]):
        def __missing__(self, key: tuple[str, int]) -> tuple[str, dict[str, torch.Tensor]]:
            example, index = key
            folder = copy_of(example, tmp_path_factory.mktemp("alone") / example)
            env = environment(SLURM_ARRAY_TASK_ID=str(index))
            done = run(["bash", "sweep.sh", *SHORT[example]], folder, env)
            assert done.returncode == 0, done.stderr
            self[key] = done.stdout, torch.load(folder / f"{example}_{index}.pt", weights_only=True)
            return self[key]

    return Alone()


def train_together(example: str, folder: Path, array: str, stages: int) -> SweepView:
    copy_of(example, folder)
    command = ["jap-submit", "--jap-local", f"--jap-stages={stages}", f"--array={array}", "sweep.sh", *SHORT[example]]
    done = run(command, folder, environment())
    logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.out"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    return SweepReader(status.open_sweep(*status.find_sweep(None, folder)).directory).look()


@pytest.mark.parametrize(
    ("example", "stages", "array"),
    [
        ("digits", 2, "0-7"),
        ("digits", 1, "2,5,7"),
        ("digits", 4, "1,4-6%2"),
        ("charlm", 2, "0-7"),
        ("charlm", 1, "1,6"),
        ("charlm", 4, "0,3,5"),
    ],
)
def test_members_equal_the_script_alone(
    example: str,
    stages: int,
    array: str,
    tmp_path: Path,
    alone: dict[tuple[str, int], tuple[str, dict[str, torch.Tensor]]],
) -> None:
    folder = tmp_path / "together"
    view = train_together(example, folder, array, stages)
    assert {m.state for m in view.members} == {MemberState.COMPLETED}
    assert len({Path(m.member.output).read_text() for m in view.members}) == len(view.members)
    for m in view.members:
        index = m.member.index
        log, parameters = alone[example, index]
        assert Path(m.member.output).read_text() == log, f"member {index}"
        found = torch.load(folder / f"{example}_{index}.pt", weights_only=True)
        assert list(found) == list(parameters)
        for name, value in parameters.items():
            assert torch.equal(found[name], value), f"member {index}: {name}"
        assert m.argv[0].endswith("train.py")
        assert m.reported["loss"] == pytest.approx(float(re.findall(r"step \d+ loss (\S+)", log)[-1]))


def test_dropout_set_in_an_imported_file_trains_with_that_value(
    alone: dict[tuple[str, int], tuple[str, dict[str, torch.Tensor]]],
) -> None:
    """Members 0 and 1 of charlm differ in ``model.DROPOUT`` alone; equal logs would mean that it did not arrive."""
    assert alone["charlm", 0][0] != alone["charlm", 1][0]


def test_digits_learns_in_its_own_process() -> None:
    command = ["python", "train.py", "--lr", "0.05", "--dropout", "0.1"]
    done = run(command, ROOT / "examples" / "digits", environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"accuracy (\S+)", done.stdout)[-1]) > 0.85
    assert done.stderr == ""


def test_a_sweep_can_be_explained_without_submitting(tmp_path: Path) -> None:
    folder = copy_of("digits", tmp_path / "digits")
    done = run(["jap-submit", "--jap-explain", "sweep.sh"], folder, environment())
    assert done.returncode == 0, done.stderr
    assert "one job trains 8 members (2 stages x 1 group) instead of an array of 8" in done.stdout
    assert not (folder / ".jap").exists()


def demo(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, str(root / "scripts" / "demo.py"), *arguments], root, environment(COLUMNS="200"))


def test_the_demo_trains_compares_and_ends_with_code_0(tmp_path: Path) -> None:
    done = demo(ROOT, "--array", "2,5", "--epochs", "1", "--dir", str(tmp_path / "work"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if "COMPLETED" in line]
    assert [(row[0], row[1], row[2], row[-1]) for row in rows] == [("2", "0.02", "0.0", "0"), ("5", "0.05", "0.5", "0")]
    assert "for 2 of 2 members, all trained parameters for 2 of 2" in done.stdout
    assert (tmp_path / "work" / "together" / "digits_5.pt").is_file()


def test_the_demo_ends_with_code_1_when_a_member_fails(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    copy_of("digits", root / "examples" / "digits")
    (root / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "demo.py", root / "scripts")
    script = root / "examples" / "digits" / "sweep.sh"
    script.write_text(script.read_text().replace("export OMP", '[ "$SLURM_ARRAY_TASK_ID" = 1 ] && exit 3\nexport OMP'))
    done = demo(root, "--array", "0,1", "--epochs", "1", "--dir", str(tmp_path / "work"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"\b1 .*FAILED +3\b", done.stdout)
    assert "not every member completed" in done.stdout
