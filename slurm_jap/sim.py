"""``jap-sim TRACE``: what would coalescing job arrays have done on this cluster?

Replays a trace of jobs (``sacct -P``, CSV or SWF) with and without coalescing, and reports completion times, queueing,
makespan, utilisation and GPU-hours as tables, JSON and plots. Reads the trace and writes the named outputs, nothing
else; imports no torch. Exit codes: 0; 2 with one line where nothing can be simulated.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from slurm_jap._version import __version__
from slurm_jap.errors import PREFIX, USAGE_EXIT_CODE, UsageError

if TYPE_CHECKING:
    from slurm_jap.gain import Assumptions
    from slurm_jap.sim_study import Cluster, Coalescing, Outcome
    from slurm_jap.traces import Siblings, Trace, TraceJob

MOST_NODES = 1_000_000
_COLUMN_KEYS = ("submit", "duration", "gpus", "partition", "user", "name", "array", "job", "limit", "nodes")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_EXIT_CODE, f"{PREFIX} {message}; type {self.prog} --help for the options\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="jap-sim",
        description="Replay a cluster's trace with and without coalesced job arrays and report what changes.",
        epilog="docs/simulation.md has the sacct command that makes a trace, and what every assumption means.",
        allow_abbrev=False,
    )
    parser.add_argument("trace", metavar="TRACE", help="sacct -P dump, CSV or SWF (.gz too); -: standard input")
    parser.add_argument("--version", action="version", version=f"jap-sim {__version__}")

    out = parser.add_argument_group("output")
    out.add_argument("--json", metavar="FILE", help="write every figure as JSON; - for standard output, without tables")
    out.add_argument("--plot", metavar="DIR", help="write plots (PNG) into DIR; needs matplotlib")
    out.add_argument("--sensitivity", action="store_true", help="also replay with one assumption changed at a time")

    reading = parser.add_argument_group("reading the trace")
    reading.add_argument("--format", choices=("sacct", "csv", "swf"), help="default: told from the first line")
    reading.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="WHAT=NAME",
        help=f"CSV column NAME holds WHAT; WHAT is one of {', '.join(_COLUMN_KEYS)}",
    )
    reading.add_argument("--time-unit", choices=("ms", "s", "min", "h"), default="s", help="of numbers in a CSV (s)")
    reading.add_argument(
        "--siblings",
        choices=("auto", "array", "gap"),
        default="auto",
        help="what makes jobs an array: the trace's array ids, or alike and submitted close together (auto: array ids "
        "where the trace has any)",
    )
    reading.add_argument("--gap", type=float, default=60.0, metavar="S", help="seconds between guessed siblings (60)")

    reading.add_argument(
        "--alike",
        type=float,
        metavar="X",
        help="guessed siblings last at most X times the shortest (default: any time)",
    )

    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--nodes", type=int, metavar="N", help="GPU nodes; default: enough for --load")
    cluster.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="(8)")
    cluster.add_argument("--load", type=float, default=0.7, metavar="X", help="load that sizes the cluster (0.7)")
    cluster.add_argument(
        "--pool", action="append", default=[], metavar="PARTITION=N", help="N nodes that only this partition uses"
    )
    cluster.add_argument(
        "--overestimate",
        type=float,
        default=1.0,
        metavar="X",
        help="where a job has no time limit the scheduler believes X times its real duration (1)",
    )

    model = parser.add_argument_group("assumptions")
    model.add_argument("--microbatches", type=int, default=8, metavar="M", help="per iteration (8)")
    model.add_argument("--stages", type=int, metavar="S", help="of one member's pipeline (default: its GPUs)")
    model.add_argument("--link", type=float, default=0.05, metavar="X", help="delay of a transfer, in forwards (0.05)")
    model.add_argument("--backward", type=float, default=2.0, metavar="X", help="a backward, in forwards (2)")
    model.add_argument(
        "--activations", type=float, default=2.0, metavar="X", help="held per stage, in those of one 1F1B pipeline (2)"
    )
    model.add_argument(
        "--periods",
        choices=("schedule", "bound"),
        default="schedule",
        help="time per iteration: of the schedule that the planner finds, or its lower bound (schedule)",
    )
    model.add_argument("--max-stages", type=int, default=32, metavar="N", help="deepest pipeline networks allow (32)")
    model.add_argument("--max-members", type=int, default=64, metavar="N", help="members of a coalesced job (64)")
    model.add_argument("--max-gpus", type=int, metavar="N", help="GPUs of a coalesced job (default: the cluster's)")
    model.add_argument("--min-gain", type=float, default=1.02, metavar="X", help="less stays a plain array (1.02)")
    model.add_argument(
        "--waves", type=int, default=1, metavar="N", help="members per place; the next one starts when one ends (1)"
    )
    model.add_argument(
        "--job-per",
        choices=("array", "group"),
        default="array",
        help="one coalesced job for all pipelines of an array, or one for each (array)",
    )
    model.add_argument("--opt-in", type=float, default=1.0, metavar="X", help="share of the arrays that opt in (1)")
    model.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw which arrays opt in (0)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``jap-sim``; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        _simulate(options)
    except UsageError as error:
        print(f"{PREFIX} {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of standard output (head, less) left; nothing is lost that anybody waits for.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _simulate(options: argparse.Namespace) -> None:
    from slurm_jap.sim_report import need_matplotlib

    _check(options)
    assumptions = _assumptions(options)
    columns = _pairs(options.column, "--column", "WHAT=NAME")
    for key in columns:
        if key not in _COLUMN_KEYS:
            raise UsageError(f"--column {key}={columns[key]}: {key!r} is none of {', '.join(_COLUMN_KEYS)}")
    json_path = None if options.json in (None, "-") else Path(options.json)
    if json_path is not None and not (json_path.parent.is_dir() and not json_path.is_dir()):
        raise UsageError(f"--json {json_path}: {json_path.parent} is no folder to write in; make it, or name another")
    plot_folder = None if options.plot is None else Path(options.plot)
    if plot_folder is not None:
        need_matplotlib()
        try:
            plot_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--plot {plot_folder}: {error.strerror}; name a folder that can be written") from None

    trace = _read(options, columns)
    cluster, nodes_from = _cluster(options, trace)
    siblings = _siblings(options, trace)
    _say_skipped(trace)
    study = Study(trace, siblings, cluster, assumptions, options)
    result = study.result(nodes_from)
    if options.sensitivity:
        result["sensitivity"] = study.sensitivity()

    if json_path is not None:
        _write(json_path, json.dumps(result, indent=1) + "\n")
    if options.json == "-":
        print(json.dumps(result, indent=1))
    else:
        from rich.console import Console

        from slurm_jap.sim_report import print_report

        # Without a terminal rich would fold the tables at 80 columns.
        print_report(result, Console() if sys.stdout.isatty() else Console(width=140))
    if plot_folder is not None:
        from slurm_jap.sim_report import draw_plots

        paths = draw_plots(result, study.completions(), study.waiting(), plot_folder)
        print(f"plots: {', '.join(map(str, paths))}", file=sys.stderr)
    sys.stdout.flush()


def _check(options: argparse.Namespace) -> None:
    for name, low in (("nodes", 1), ("gpus_per_node", 1)):
        value = getattr(options, name)
        if value is not None and value < low:
            raise UsageError(f"--{name.replace('_', '-')} is {value}, but must be at least {low}")
    if options.nodes is not None and options.nodes > MOST_NODES:
        raise UsageError(f"--nodes is {options.nodes}, but must be at most {MOST_NODES:,}")
    if options.gpus_per_node > 1024:
        raise UsageError(f"--gpus-per-node is {options.gpus_per_node}, but no node has more than 1024")
    if not 0 < options.load <= 1:
        raise UsageError(f"--load is {options.load:g}, but must be above 0 and at most 1")
    if not 0 <= options.opt_in <= 1:
        raise UsageError(f"--opt-in is {options.opt_in:g}, but must be between 0 and 1")
    if not 0 <= options.gap < 1e9:
        raise UsageError(f"--gap is {options.gap:g}, but must be a number of seconds of at least 0")
    if options.alike is not None and not 1 <= options.alike < float("inf"):
        raise UsageError(f"--alike is {options.alike:g}, but must be at least 1")
    if not 1 <= options.overestimate < 1e6:
        raise UsageError(f"--overestimate is {options.overestimate:g}, but must be at least 1")


def _assumptions(options: argparse.Namespace) -> Assumptions:
    from slurm_jap.gain import Assumptions

    return Assumptions(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Assumptions)})


def _pairs(texts: Sequence[str], option: str, form: str) -> dict[str, str]:
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise UsageError(f"{option} {text}: write it as {option} {form}")
        pairs[key] = value
    return pairs


@contextlib.contextmanager
def _opened(name: str) -> Iterator[TextIO]:
    import gzip
    import io
    import zlib

    try:
        if name == "-":
            yield io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8", errors="replace")
        elif name.endswith(".gz"):
            with gzip.open(name, "rt", encoding="utf-8", errors="replace") as file:
                yield file
        else:
            with open(name, encoding="utf-8", errors="replace") as file:
                yield file
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{name}: {why}; give a readable trace file") from None


def _read(options: argparse.Namespace, columns: Mapping[str, str]) -> Trace:
    from slurm_jap.traces import read_trace

    with _opened(options.trace) as lines:
        name = "standard input" if options.trace == "-" else options.trace
        return read_trace(lines, name, format=options.format, columns=columns, time_unit=options.time_unit)


def _cluster(options: argparse.Namespace, trace: Trace) -> tuple[Cluster, str]:
    """The cluster, and where its size comes from; drops the jobs that are too large for it from the trace."""
    from slurm_jap.sim_study import Cluster, drop_too_large, size_cluster

    pools = {}
    for name, text in _pairs(options.pool, "--pool", "PARTITION=NODES").items():
        if not text.isdecimal() or not 1 <= int(text[:10]) <= MOST_NODES:
            raise UsageError(f"--pool {name}={text}: {text!r} is not a number of nodes from 1 to {MOST_NODES:,}")
        known = {job.partition for job in trace.jobs}
        if name not in known:
            there = ", ".join(sorted(known))
            raise UsageError(f"--pool {name}={text}: no job in partition {name!r}; the trace has {there}")
        pools[name] = int(text)
    shared = [job for job in trace.jobs if job.partition not in pools]
    if options.nodes is not None:
        nodes, nodes_from = options.nodes, "as given"
    elif shared:
        nodes = size_cluster(shared, options.gpus_per_node, options.load)
        if nodes > MOST_NODES:
            raise UsageError(f"{trace.source}: a load of {options.load:.0%} takes {nodes:,} nodes; give --nodes")
        nodes_from = f"sized for a load of {options.load:.0%}; give the real number with --nodes"
    else:
        nodes, nodes_from = 0, "as given"
    cluster = Cluster(options.gpus_per_node, nodes, pools)
    drop_too_large(trace, cluster)
    return cluster, nodes_from


def _say_skipped(trace: Trace) -> None:
    from slurm_jap.traces import EXPECTED_RULES

    for skipped in trace.skipped.by_rule.values():
        if skipped.rule not in EXPECTED_RULES:
            more = f" (and {skipped.count - 1:,} rows more)" if skipped.count > 1 else ""
            print(
                f"{PREFIX} {trace.source}:{skipped.first_row}: {skipped.rule}: {skipped.first_text}; left out{more}",
                file=sys.stderr,
            )


def _siblings(options: argparse.Namespace, trace: Trace) -> Siblings:
    from slurm_jap.traces import siblings_by_array, siblings_by_gap

    has_ids = any(job.array for job in trace.jobs)
    if options.siblings == "array" and not has_ids:
        raise UsageError(f"{trace.source}: no job has an array id; guess the siblings with --siblings gap")
    if options.siblings == "gap" or not has_ids:
        return siblings_by_gap(trace, round(options.gap * 1000), options.alike)
    return siblings_by_array(trace)


def _write(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise UsageError(f"{path}: {error.strerror}; name a file that can be written") from None


class Study:
    """One trace on one cluster: the replay without, the replay with, and variations."""

    def __init__(
        self,
        trace: Trace,
        siblings: Siblings,
        cluster: Cluster,
        assumptions: Assumptions,
        options: argparse.Namespace,
    ) -> None:
        from slurm_jap.sim_study import plain_units, run

        self.trace, self.siblings, self.cluster = trace, siblings, cluster
        self.assumptions, self.options = assumptions, options
        self.jobs: list[TraceJob] = trace.jobs
        self.without = run(plain_units(self.jobs, options.overestimate), self.jobs, cluster)
        self.coalescing, self.with_ = self._coalesced(assumptions)

    def _coalescing(self, assumptions: Assumptions, **changes: Any) -> Coalescing:
        from slurm_jap.sim_study import coalesce

        options = self.options
        settings = {"opt_in": options.opt_in, "job_per": options.job_per, "arrays": self.siblings.arrays, **changes}
        return coalesce(
            self.jobs,
            settings["arrays"],
            self.cluster,
            assumptions,
            opt_in=settings["opt_in"],
            seed=options.seed,
            overestimate=options.overestimate,
            job_per_group=settings["job_per"] == "group",
        )

    def _coalesced(self, assumptions: Assumptions, **changes: Any) -> tuple[Coalescing, Outcome]:
        from slurm_jap.sim_study import run

        coalescing = self._coalescing(assumptions, **changes)
        return coalescing, run(coalescing.units, self.jobs, self.cluster)

    def result(self, nodes_from: str) -> dict[str, Any]:
        """Every figure, as it goes into the JSON file."""
        from slurm_jap.sim_study import SIZES, breakdown, cluster_figures, coalescing_figures, size_name

        jobs, trace, options, cluster = self.jobs, self.trace, self.options, self.cluster
        without = cluster_figures(jobs, self.without, cluster)
        with_ = cluster_figures(jobs, self.with_, cluster)
        members = {index for unit in self.coalescing.units if len(unit.members) > 1 for index in unit.members}
        other = "group" if options.job_per == "array" else "array"
        told = coalescing_figures(self.coalescing)
        told["other_job_per"] = {
            "job_per": other,
            "gain_achieved": coalescing_figures(self._coalescing(self.assumptions, job_per=other))["gain_achieved"],
        }
        in_arrays = [index for array in self.siblings.arrays for index in array]
        work = sum(job.gpus * job.duration for job in jobs)
        work_in_arrays = sum(jobs[index].gpus * jobs[index].duration for index in in_arrays)
        return {
            "jap_sim": __version__,
            "trace": {
                "source": trace.source,
                "format": trace.format,
                "rows": trace.rows,
                "jobs": len(jobs),
                "skipped": [dataclasses.asdict(skipped) for skipped in trace.skipped.by_rule.values()],
                "notes": trace.notes,
                "siblings": {
                    "rule": self.siblings.rule,
                    "inferred": self.siblings.inferred,
                    "over_counts": self.siblings.inferred,
                    "arrays": len(self.siblings.arrays),
                    "jobs": len(in_arrays),
                    "share_of_jobs": len(in_arrays) / len(jobs),
                    "share_of_gpu_hours": work_in_arrays / work if work else 0.0,
                },
            },
            "cluster": {
                "nodes": cluster.nodes,
                "gpus_per_node": cluster.gpus_per_node,
                "pools": dict(cluster.pools),
                "gpus": cluster.gpus(),
                "nodes_from": nodes_from,
            },
            "assumptions": {
                **dataclasses.asdict(self.assumptions),
                "job_per": options.job_per,
                "opt_in": options.opt_in,
                "seed": options.seed,
                "estimates": ("the time limit where a job has one, else " if "limit" in trace.fields else "")
                + f"{options.overestimate:g} x the real duration",
            },
            "without": without,
            "with": with_,
            "gpu_hours_saved": without["gpu_hours"] - with_["gpu_hours"],
            "coalescing": told,
            "by_role": breakdown(
                jobs,
                lambda index: "members of coalesced jobs" if index in members else "all other jobs",
                self.without,
                self.with_,
                ("members of coalesced jobs", "all other jobs"),
            ),
            "by_size": breakdown(
                jobs, lambda index: size_name(jobs[index].gpus), self.without, self.with_, [name for name, _ in SIZES]
            ),
            "by_partition": breakdown(jobs, lambda index: jobs[index].partition, self.without, self.with_),
        }

    def sensitivity(self) -> list[dict[str, Any]]:
        """The outcome with one assumption changed at a time; the first row is the base."""
        from slurm_jap.traces import siblings_by_gap

        base = self.assumptions
        rows = [self._compared("as assumed", "", self.coalescing, self.with_, True)]
        variations: list[tuple[str, Any, Assumptions, dict[str, Any]]] = []

        def vary(name: str, values: Sequence[Any]) -> None:
            for value in values:
                if value != getattr(base, name):
                    shown = "GPUs" if value is None else value
                    variations.append((name, shown, dataclasses.replace(base, **{name: value}), {}))

        vary("microbatches", (2, 4, 8, 16, 32))
        vary("stages", (None, 2, 4, 8))
        vary("link", (0.0, 0.05, 0.2))
        vary("periods", ("schedule", "bound"))
        vary("max_stages", (8, 16, 32, 64))
        vary("max_members", (2, 4, 8, 64))
        vary("waves", (1, 2, 4))
        for share in (0.25, 0.5, 0.75, 1.0):
            if share != self.options.opt_in:
                variations.append(("opt_in", share, base, {"opt_in": share}))
        other = "group" if self.options.job_per == "array" else "array"
        variations.append(("job_per", other, base, {"job_per": other}))
        for waves in (2, 4):
            variations.append(
                (f"job_per {other}, waves", waves, dataclasses.replace(base, waves=waves), {"job_per": other})
            )
        if self.siblings.inferred:
            for gap, alike in ((self.options.gap / 4, None), (self.options.gap * 4, None), (self.options.gap, 2.0)):
                arrays = siblings_by_gap(self.trace, round(gap * 1000), alike).arrays
                name, value = ("gap", gap) if alike is None else ("alike", alike)
                variations.append((name, value, base, {"arrays": arrays}))
        for name, value, assumptions, changes in variations:
            coalescing, outcome = self._coalesced(assumptions, **changes)
            rows.append(self._compared(name, value, coalescing, outcome, False))
        return rows

    def _compared(
        self, assumption: str, value: Any, coalescing: Coalescing, outcome: Outcome, base: bool
    ) -> dict[str, Any]:
        from slurm_jap.sim_study import cluster_figures, coalescing_figures

        before = cluster_figures(self.jobs, self.without, self.cluster)
        after = cluster_figures(self.jobs, outcome, self.cluster)
        told = coalescing_figures(coalescing)
        saved = before["gpu_hours"] - after["gpu_hours"]

        def ratios(key: str) -> dict[str, float | None]:
            return {
                part: after[key][f"{part}_s"] / before[key][f"{part}_s"] if before[key][f"{part}_s"] else None
                for part in ("mean", "median", "p95")
            }

        return {
            "assumption": assumption,
            "value": value,
            "base": base,
            "completion_ratio": ratios("completion"),
            "queueing_ratio": ratios("queueing"),
            "gpu_hours_saved": saved,
            "gpu_hours_saved_share": saved / before["gpu_hours"] if before["gpu_hours"] else 0.0,
            "gain_predicted": told["gain_predicted"],
            "gain_achieved": told["gain_achieved"],
            "members": told["members"],
        }

    def completions(self) -> tuple[list[int], list[int]]:
        """Job completion times without and with, ms."""
        without, with_ = (
            [end - job.submit for job, end in zip(self.jobs, outcome.ends, strict=True)]
            for outcome in (self.without, self.with_)
        )
        return without, with_

    def waiting(self) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        """(days, GPUs that waiting jobs ask for) without and with, at about a thousand instants."""
        without, with_ = (self._waiting(outcome) for outcome in (self.without, self.with_))
        return without, with_

    def _waiting(self, outcome: Outcome) -> list[tuple[float, float]]:
        steps = sorted(
            step
            for job, start in zip(self.jobs, outcome.starts, strict=True)
            for step in ((job.submit, job.gpus), (start, -job.gpus))
        )
        last = max(outcome.starts)
        points = []
        at, gpus = 0, 0
        for sample in range(1001):
            time = last * sample // 1000
            while at < len(steps) and steps[at][0] <= time:
                gpus += steps[at][1]
                at += 1
            points.append((time / 86_400_000, float(gpus)))
        return points


if __name__ == "__main__":
    sys.exit(main())
