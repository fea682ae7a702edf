"""The Gantt view: well-formed, every action in its place, and refusals."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from slurm_jap.errors import UsageError
from slurm_jap.gantt import svg
from slurm_jap.problem import uniform
from slurm_jap.schedule import Schedule, ScheduleError
from slurm_jap.stream import stream

SPACE = "{http://www.w3.org/2000/svg}"


def test_every_action_is_drawn_where_and_when_it_runs() -> None:
    problem = uniform(stages=2, members=1, microbatches=1, step=1)
    schedule = Schedule.parse("0: i0m0F0 i0m0B0 i0m0S\n1: i0m0F0 i0m0B0 i0m0S\n")
    root = ElementTree.fromstring(svg(problem, schedule, iterations=2, title='a <b> & "c"'))
    bars = [rect for rect in root.iter(f"{SPACE}rect") if rect.find(f"{SPACE}title") is not None]
    tips = [str(bar.findtext(f"{SPACE}title")) for bar in bars]
    assert len(bars) == problem.actions * 2
    assert "i0m0B0 on stage 1: 2 s to 4 s" in tips
    assert "i1m0F0 on stage 0: 7 s to 8 s" in tips
    by_tip = {tip.split(":")[0]: bar for tip, bar in zip(tips, bars, strict=True)}
    first, back = by_tip["i0m0F0 on stage 0"], by_tip["i0m0B0 on stage 1"]
    unit = float(first.get("width", "0"))
    assert float(back.get("width", "0")) == pytest.approx(2 * unit, abs=0.1)
    assert float(back.get("x", "0")) - float(first.get("x", "0")) == pytest.approx(2 * unit, abs=0.1)
    assert float(back.get("y", "0")) > float(first.get("y", "0"))
    heading = next(text.text for text in root.iter(f"{SPACE}text"))
    assert heading == 'a <b> & "c": period 7 s, bound 7 s (path)'


def test_many_members_and_stages_stay_inside_the_picture() -> None:
    problem = uniform(stages=6, members=20, microbatches=2, link=0.1, step=0.1)
    root = ElementTree.fromstring(svg(problem, stream(problem, work=1).schedule, iterations=1, width=900))
    height = float(root.get("height", "0"))
    for rect in root.iter(f"{SPACE}rect"):
        assert float(rect.get("x", "0")) >= 0
        assert float(rect.get("x", "0")) + float(rect.get("width", "0")) <= 900.1
        assert float(rect.get("y", "0")) + float(rect.get("height", "0")) <= height
    colours = {rect.get("fill") for rect in root.iter(f"{SPACE}rect") if rect.find(f"{SPACE}title") is None}
    assert len(colours) == 1 + 20


def test_what_cannot_be_drawn_is_refused() -> None:
    problem = uniform(stages=2, members=1, microbatches=2)
    schedule = stream(problem).schedule
    with pytest.raises(UsageError, match="give >= 1"):
        svg(problem, schedule, iterations=0)
    with pytest.raises(UsageError, match="draw fewer iterations"):
        svg(problem, schedule, iterations=100_000)
    crossed = Schedule.parse("0: i0m0F0 i0m0B0 i0m0F1 i0m0B1 i0m0S\n1: i0m0F0 i0m0F1 i0m0B0 i0m0B1 i0m0S\n")
    with pytest.raises(ScheduleError, match="deadlocks"):
        svg(problem, crossed)
