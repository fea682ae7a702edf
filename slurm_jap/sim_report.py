"""The report of ``jap-sim``: tables for a terminal, plots as PNG files.

``rich`` and ``matplotlib`` are imported where they are used. Reads the results that ``slurm_jap.sim`` also writes as
JSON, and computes nothing but differences and percentages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_jap.errors import UsageError
from slurm_jap.traces import printable

if TYPE_CHECKING:
    from rich.console import Console

MOST_PARTITIONS = 12
_WITHOUT, _WITH = "#8c8c8c", "#1f6fb4"
Result = dict[str, Any]


def span(seconds: float) -> str:
    """A time for people: ``66 s``, ``12.3 min``, ``5.20 h``, ``3.41 d``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.2f} h"
    return f"{seconds / 86400:.2f} d"


def change(before: float, after: float | None) -> str:
    """The difference in percent of ``before``; None: unknown."""
    if after is None:
        return "-"
    if before == after:
        return "0.0%"
    return f"{(after / before - 1) * 100:+.1f}%" if before else "new"


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f}%"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}x"


def print_report(result: Result, console: Console) -> None:
    """The whole report on ``console``."""
    for line in heading(result):
        console.print(line, markup=False, highlight=False)
    _print_totals(result, console)
    _print_coalescing(result, console)
    _print_breakdown("Who gains", result["by_role"], console)
    _print_breakdown("By GPUs of a job", result["by_size"], console)
    _print_breakdown("By partition", result["by_partition"][:MOST_PARTITIONS], console)
    left = len(result["by_partition"]) - MOST_PARTITIONS
    if left > 0:
        console.print(f"  and {left} partitions more in --json", markup=False, highlight=False)
    if result.get("sensitivity"):
        _print_sensitivity(result["sensitivity"], console)


def heading(result: Result) -> list[str]:
    """What was read, what was assumed, what the reader must know: one line each."""
    trace, cluster, given = result["trace"], result["cluster"], result["assumptions"]
    lines = [f"trace     {trace['source']} ({trace['format']}): {trace['jobs']:,} jobs of {trace['rows']:,} rows"]
    for skipped in trace["skipped"]:
        lines.append(
            f"  left out {skipped['count']:,} x {skipped['rule']}, first {trace['source']}:{skipped['first_row']}: "
            f"{skipped['first_text']}"
        )
    lines += [f"  {note}" for note in trace["notes"]]
    pools = "".join(f", {name}: {nodes} nodes of its own" for name, nodes in cluster["pools"].items())
    lines.append(
        f"cluster   {cluster['nodes']} nodes of {cluster['gpus_per_node']} GPUs{pools} ({cluster['nodes_from']})"
    )
    siblings = trace["siblings"]
    shares = (
        f"{_percent(siblings['share_of_jobs'])} of all, {_percent(siblings['share_of_gpu_hours'])} of the GPU-hours"
    )
    lines.append(f"arrays    {siblings['arrays']:,} with {siblings['jobs']:,} jobs ({shares})")
    lines.append(f"  {siblings['rule']}")
    stages = given["stages"] or "as many as its GPUs"
    waves = f", with a place for one of {given['waves']} members at a time" if given["waves"] > 1 else ""
    lines.append(
        f"assumed   every array member is a pipeline; stages: {stages}, micro-batches: {given['microbatches']}, "
        f"link delay: {given['link']:g} forward, backward: {given['backward']:g} forwards"
    )
    of = "the schedules found" if given["periods"] == "schedule" else "lower bounds, which may be out of reach"
    lines.append(f"  time per iteration: of {of}; {given['activations']:g} x the activations of a 1F1B pipeline")
    lines.append(
        f"  at most {given['max_stages']} stages, {given['max_members']} members"
        f"{', ' + str(given['max_gpus']) + ' GPUs' if given['max_gpus'] else ''} per coalesced job; one job per "
        f"{given['job_per']}{waves}; {_percent(given['opt_in'])} of arrays opt in (seed {given['seed']})"
    )
    lines.append(f"  scheduler: FIFO, EASY backfill; run times it believes: {given['estimates']}")
    return lines


def _print_totals(result: Result, console: Console) -> None:
    from rich.table import Table

    before, after = result["without"], result["with"]
    table = Table(title="All jobs", title_justify="left")
    for title in ("", "without", "coalesced", "change"):
        table.add_column(title, justify="left" if not title else "right")

    def row(name: str, get: Callable[[Result], float], show: Callable[[float], str]) -> None:
        table.add_row(name, show(get(before)), show(get(after)), change(get(before), get(after)))

    for key, label in (("completion", "job completion time"), ("queueing", "queueing")):
        for part, part_label in (("mean_s", "mean"), ("median_s", "median"), ("p95_s", "95th percentile")):
            row(f"{label}, {part_label}", lambda f, k=key, p=part: float(f[k][p]), span)  # type: ignore[misc]
    row("makespan", lambda f: float(f["makespan_s"]), span)
    row("GPU utilisation (allocated)", lambda f: float(f["utilisation"]), _percent)
    row("GPU-hours", lambda f: float(f["gpu_hours"]), _hours)
    row("jobs scheduled", lambda f: float(f["scheduled_jobs"]), lambda value: f"{value:,.0f}")
    console.print(table)
    saved = result["gpu_hours_saved"]
    verb = "saved" if saved >= 0 else "lost"
    share = _percent(abs(saved) / before["gpu_hours"] if saved else 0.0)
    console.print(f"GPU-hours {verb}: {_hours(abs(saved))} ({share} of all)", markup=False, highlight=False)


def _print_coalescing(result: Result, console: Console) -> None:
    from rich.table import Table

    told = result["coalescing"]
    table = Table(title="The arrays", title_justify="left", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_row("arrays coalesced, wholly or in part", f"{told['arrays_coalesced']:,} of {told['arrays']:,}")
    table.add_row("coalesced jobs / their members", f"{told['coalesced_jobs']:,} / {told['members']:,}")
    for reason, count in told["kept_plain"].items():
        table.add_row(f"jobs kept plain: {reason}", f"{count:,}")
    if told["members"]:
        table.add_row("gain that the plan predicts for equal members", _times(told["gain_predicted"]))
        table.add_row("gain with the members' real, uneven lengths", _times(told["gain_achieved"]))
        other = told["other_job_per"]
        table.add_row(f"the same with one job per {other['job_per']}", _times(other["gain_achieved"]))
        table.add_row("share of their GPU time that computes, without", _percent(told["busy_alone"]))
        table.add_row("share of their GPU time that computes, coalesced", _percent(told["busy_coalesced"]))
        table.add_row("coalesced jobs that cost more than their members alone", f"{told['losing_jobs']:,}")
        table.add_row("GPU-hours that those cost too much", _hours(told["gpu_hours_lost"]))
    console.print(table)


def _print_breakdown(title: str, rows: Sequence[Result], console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("jobs", "mean completion", "coalesced", "mean queueing", "coalesced", "GPU-hours", "saved"):
        table.add_column(name, justify="right")
    for row in rows:
        before, after = row["without"], row["with"]
        table.add_row(
            escape(printable(row["name"])) or "(none)", f"{before['jobs']:,}",
            span(before["completion"]["mean_s"]), span(after["completion"]["mean_s"]),
            span(before["queueing"]["mean_s"]), span(after["queueing"]["mean_s"]),
            _hours(before["gpu_hours"]), change(before["gpu_hours"], 2 * before["gpu_hours"] - after["gpu_hours"]),
        )  # fmt: skip
    console.print(table)


def _print_sensitivity(rows: Sequence[Result], console: Console) -> None:
    from rich.table import Table

    table = Table(title="One assumption changed at a time", title_justify="left")
    table.add_column("assumption")
    table.add_column("value")
    for name in ("mean completion", "median", "mean queueing", "GPU-hours saved", "of all", "gain"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["assumption"], str(row["value"]), change(1, row["completion_ratio"]["mean"]),
            change(1, row["completion_ratio"]["median"]), change(1, row["queueing_ratio"]["mean"]),
            f"{row['gpu_hours_saved']:,.0f}", _percent(row["gpu_hours_saved_share"]), _times(row["gain_achieved"]),
            style="bold" if row["base"] else "",
        )  # fmt: skip
    console.print(table)


# --- plots ----------------------------------------------------------------------------------------------------------


def need_matplotlib() -> None:
    """Raise UsageError unless matplotlib imports."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--plot needs matplotlib; type: pip install 'slurm-jap[sim]', or leave --plot out") from None


def draw_plots(
    result: Result,
    completions: tuple[Sequence[int], Sequence[int]],
    occupancy: tuple[Sequence[tuple[float, float]], Sequence[tuple[float, float]]],
    folder: Path,
) -> list[Path]:
    """Write the plots as PNG files into ``folder`` and return their paths.

    ``completions``: job completion times in ms without and with; ``occupancy``: (days, GPUs' worth of jobs waiting).
    """
    need_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []

    def save(name: str, figure: Any) -> None:
        path = folder / name
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        paths.append(path)

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for values, label, color in zip(completions, ("without", "coalesced"), (_WITHOUT, _WITH), strict=True):
        ordered = sorted(max(value, 1000) / 3_600_000 for value in values)
        shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
        axes.plot(ordered, shares, label=label, color=color)
    axes.set(xscale="log", xlabel="job completion time (hours)", ylabel="share of jobs", ylim=(0, 1))
    axes.set_title("Job completion time, all jobs")
    axes.grid(alpha=0.3)
    axes.legend()
    save("completion.png", figure)

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for points, label, color in zip(occupancy, ("without", "coalesced"), (_WITHOUT, _WITH), strict=True):
        axes.plot([day for day, _ in points], [gpus for _, gpus in points], label=label, color=color, linewidth=1)
    axes.set(xlabel="days since the first arrival", ylabel="GPUs that waiting jobs ask for", ylim=(0, None))
    axes.set_title("The queue")
    axes.grid(alpha=0.3)
    axes.legend()
    save("queue.png", figure)

    for key, name, title in (
        ("by_size", "size.png", "By GPUs of a job"),
        ("by_partition", "partition.png", "By partition"),
    ):
        rows = result[key][:MOST_PARTITIONS]
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
        places = range(len(rows))
        for shift, side, label, color in ((-0.2, "without", "without", _WITHOUT), (0.2, "with", "coalesced", _WITH)):
            for axes, values in (
                (left, [row[side]["completion"]["mean_s"] / 3600 for row in rows]),
                (right, [row[side]["gpu_hours"] for row in rows]),
            ):
                axes.bar([place + shift for place in places], values, width=0.4, label=label, color=color)
        for axes, label in ((left, "mean completion time (hours)"), (right, "GPU-hours")):
            axes.set_xticks(
                list(places),
                [printable(row["name"]).replace("$", r"\$") or "(none)" for row in rows],
                rotation=45,
                ha="right",
            )
            axes.set_ylabel(label)
            axes.grid(axis="y", alpha=0.3)
        left.legend()
        figure.suptitle(title)
        save(name, figure)

    if result.get("sensitivity"):
        rows = [row for row in result["sensitivity"] if not row["base"]][::-1]
        base = next(row for row in result["sensitivity"] if row["base"])
        figure, axes = pyplot.subplots(figsize=(7.5, 1.4 + 0.3 * len(rows)), layout="constrained")
        axes.barh(
            [f"{row['assumption']} = {row['value']}" for row in rows],
            [row["gpu_hours_saved_share"] * 100 for row in rows],
            color=_WITH,
        )
        axes.axvline(base["gpu_hours_saved_share"] * 100, color="black", linestyle="--", label="as assumed")
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xlabel("GPU-hours saved (% of all)")
        axes.set_title("One assumption changed at a time")
        axes.grid(axis="x", alpha=0.3)
        axes.legend()
        save("sensitivity.png", figure)
    return paths
