"""Without root or Slurm the cluster's tests are skipped, for one plain reason; in CI that is a failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import slurm_cluster

AS_ORDINARY_USER = """
import os, sys
os.geteuid = lambda: 1000
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/slurm/test_cluster.py"]))
"""


def run_without_root(ci: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", AS_ORDINARY_USER],
        cwd=slurm_cluster.REPOSITORY,
        env=os.environ | {"CI": ci},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_skipped_in_one_plain_line() -> None:
    done = run_without_root(ci="")
    assert done.returncode == 0, done.stdout
    lines = re.findall(r"^SKIPPED .*$", done.stdout, re.MULTILINE)
    assert len(lines) == 1, done.stdout
    assert re.fullmatch(r"SKIPPED \[\d+\] tests/slurm/conftest.py:\d+: no test cluster: it needs root", lines[0])


def test_a_failure_in_ci() -> None:
    done = run_without_root(ci="true")
    assert done.returncode == 1, done.stdout
    assert "no test cluster: it needs root; with CI=true that is a failure" in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from slurm_testbed import machine

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(machine, "PATH", "/nonexistent")
    assert machine.missing() == (
        f"no test cluster: {', '.join(machine.PROGRAMS)} not installed (scripts/install-slurm.sh installs it)"
    )
