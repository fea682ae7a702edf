"""The scheduler's benchmark: a fixed set that covers what it must, and a report that tells misses."""

from __future__ import annotations

import json
from pathlib import Path

import bench_scheduler as bench
import pytest


def test_instances_are_fixed_and_cover_the_ranges() -> None:
    rows = bench.instances()
    assert rows == bench.instances()
    assert len(rows) >= 200
    assert {row["stages"] for row in rows if not row["regime"]} >= {2, 16}
    assert {row["members"] for row in rows} >= {1, 64}
    assert {row["microbatches"] for row in rows} >= {1, 16}
    assert {row["link"] for row in rows} >= {0.0, 0.05, 0.3}
    assert {row["memory"] for row in rows} >= {1.0, 2.0, 3.0}
    assert {row["equal"] for row in rows} == {True, False}
    assert sum(row["regime"] == bench.REGIME for row in rows) == 18
    assert bench.problem_of(rows[5]) == bench.problem_of(rows[5])


def test_a_part_is_measured_kept_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [row for row in bench.instances() if row["stages"] * row["members"] * row["microbatches"] <= 24][:4]
    monkeypatch.setattr(bench, "instances", lambda: small)
    monkeypatch.setattr(bench, "THOROUGH", 5000)
    file = tmp_path / "rows.json"
    for part in ("1/2", "2/2"):
        assert bench.main(["--json", str(file), "--part", part, "--exact", "1"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["seed"] for row in rows] == [row["seed"] for row in small]
    for row in rows:
        assert 1 <= row["exact_bound"] <= row["exact"] + 1e-4 <= row["stream"] + 2e-4
        assert row["stream"] <= row["barrier"] + 1e-9
    capsys.readouterr()
    assert bench.main(["--json", str(file), "--report"]) == 0
    report = capsys.readouterr().out
    assert report.splitlines()[0].split() == list(bench.COLUMNS)
    assert "exact ran on 4" in report
    rows[0]["stream"] = 1.3
    rows[0]["load_over_path"] = 0.9
    assert "1.300!" in bench.table(rows)
    assert "MISSED  elsewhere" in bench.gates(rows)


def test_nothing_to_report_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--json", str(tmp_path / "none.json"), "--report"]) == 2
    assert "run without --report first" in capsys.readouterr().err
