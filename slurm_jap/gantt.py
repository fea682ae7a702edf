"""A schedule drawn as an SVG Gantt chart: one row per stage, time to the right, one colour per member.

Pure: text in, text out. Forwards are light, backwards full, steps dark; each bar's tooltip names its action and times.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from slurm_jap.errors import UsageError
from slurm_jap.problem import Problem, lower_bound
from slurm_jap.schedule import Action, Kind, Schedule
from slurm_jap.simulate import Bar, evaluate, timeline

MOST_BARS = 50_000
"""A larger drawing is refused: no viewer shows it in reasonable time."""

_ROW, _BAR, _LEFT, _TOP, _LEGEND = 34, 26, 76, 44, 22
_LIGHTNESS = {Kind.FORWARD: 74, Kind.BACKWARD: 50, Kind.STEP: 24}


def svg(problem: Problem, schedule: Schedule, *, iterations: int = 3, width: int = 1200, title: str = "") -> str:
    """Draw the first ``iterations`` iterations of every member, from an empty pipeline.

    ``width`` is in pixels. Raises ``ScheduleError`` for a schedule that cannot run, ``UsageError`` for a drawing that
    is too large or too small.
    """
    if iterations < 1 or width < 300:
        raise UsageError(f"a chart of {iterations} iterations, {width} pixels wide; give >= 1 and >= 300")
    if problem.actions * iterations > MOST_BARS:
        raise UsageError(
            f"{problem.actions * iterations} bars are more than a chart can show ({MOST_BARS}); "
            f"draw fewer iterations or fewer members"
        )
    period = evaluate(problem, schedule).period
    bars = timeline(problem, schedule, iterations)
    end = max((bar.end for bar in bars), default=0.0) or 1.0
    scale = (width - _LEFT - 16) / end
    members = len(problem.members)
    per_line = max(1, (width - _LEFT) // 96)
    height = _TOP + problem.stages * _ROW + 34 + _LEGEND * (1 + (members - 1) // per_line)
    bound = lower_bound(problem)
    words = f"period {_time(period)}, bound {_time(bound.period)} ({bound.by.value})"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="18" font-size="14">{escape(f"{title}: {words}" if title else words)}</text>',
        *_axis(problem.stages, end, scale, period),
        *_rows(problem, bars, scale),
        *_legend(problem, members, per_line),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _time(seconds: float) -> str:
    """``seconds`` with a fitting unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size or unit == "us":
            return f"{seconds / size:.4g} {unit}"
    raise AssertionError


def _axis(stages: int, end: float, scale: float, period: float) -> Iterator[str]:
    """A vertical line, with its time, at every period."""
    bottom = _TOP + stages * _ROW
    lines = int(end / period) if period > 0 else 0
    every = max(1, lines // 20)
    for number in range(0, lines + 1, every):
        x = _LEFT + number * period * scale
        line = f'<line x1="{x:.1f}" y1="{_TOP - 8}" x2="{x:.1f}" y2="{bottom + 4}"'
        yield f'{line} stroke="#999" stroke-dasharray="3 3"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" fill="#555">{_time(number * period)}</text>'


def _rows(problem: Problem, bars: list[Bar], scale: float) -> Iterator[str]:
    for stage in range(problem.stages):
        y = _TOP + stage * _ROW
        yield f'<text x="{_LEFT - 8}" y="{y + 18}" text-anchor="end">stage {stage}</text>'
    for bar in bars:
        x, y = _LEFT + bar.start * scale, _TOP + bar.stage * _ROW
        wide = max(0.0, (bar.end - bar.start) * scale)
        tip = f"{bar.action} on stage {bar.stage}: {_time(bar.start)} to {_time(bar.end)}"
        yield (
            f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_BAR}" fill="{_colour(bar.action, problem)}" '
            f'stroke="#fff" stroke-width="0.5"><title>{tip}</title></rect>'
        )
        if wide >= 14 and bar.action.kind is not Kind.STEP:
            yield (
                f'<text x="{x + wide / 2:.2f}" y="{y + 17}" text-anchor="middle" font-size="10" '
                f'pointer-events="none">{bar.action.microbatch}</text>'
            )


def _legend(problem: Problem, members: int, per_line: int) -> Iterator[str]:
    top = _TOP + problem.stages * _ROW + 30
    for member in range(members):
        x, y = _LEFT + member % per_line * 96, top + member // per_line * _LEGEND
        colour = _colour(Action(Kind.BACKWARD, 0, member), problem)
        yield f'<rect x="{x}" y="{y}" width="14" height="14" fill="{colour}"/>'
        yield f'<text x="{x + 19}" y="{y + 12}">member {member}</text>'


def _colour(action: Action, problem: Problem) -> str:
    """The member's hue; neighbours in number lie far apart on the circle."""
    members = len(problem.members)
    hue = round(action.member * 360 / members) if members <= 6 else round(action.member * 137.508) % 360
    return f"hsl({hue},65%,{_LIGHTNESS[action.kind]}%)"
