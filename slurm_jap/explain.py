"""What ``jap-submit --jap-explain`` says: the job that would be submitted, and what decided it. Pure; no torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

from slurm_jap import filename_pattern, planner
from slurm_jap.coalesce import Coalesced, counted, shape_text


def one_line(text: str) -> str:
    """The text without characters that would end the line or disturb a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def summary(job: Coalesced) -> str:
    """``one job trains 8 members, 4 at once (2 stages x 1 group)``."""
    at_once = f", {job.request.at_once} at once" if job.request.at_once < len(job.spec) else ""
    return f"one job trains {counted(len(job.spec), 'member')}{at_once} ({shape_text(job.request)})"


def as_json(job: Coalesced, script: str, arguments: Sequence[str], unknown: str | None) -> dict[str, Any]:
    """Everything about the job, in JSON's types."""
    return {
        "coalesced": True,
        "members": list(job.spec.indices),
        "throttle": job.spec.throttle,
        "request": dataclasses.asdict(job.request),
        "carried": dataclasses.asdict(job.facts),
        "directives": list(job.directives),
        "sbatch": [*job.command_line, script, *arguments],
        "unknown": unknown,
        "plan": None if job.plan is None else planner.as_json(job.plan),
    }


def as_text(job: Coalesced, script: str, arguments: Sequence[str], unknown: str | None) -> Iterator[str]:
    """The same for people, line by line."""
    request = job.request
    if request.memory_per_node_mb is None:
        memory = "the cluster's default"
    else:
        memory = f"{request.memory_per_node_mb} MiB a node" if request.memory_per_node_mb else "all of a node"
    if request.member_memory_mb is not None:
        memory += f", of which a member may take {request.member_memory_mb} MiB"
    gpus = f"{request.gres}, " if request.gres else ""
    if request.unlimited:
        time = "none"
    else:
        time = f"{request.time_min} min" if request.time_min is not None else "the partition's default"
    rows = [
        ("members", f"{len(job.spec)} ({job.spec.text}), {request.at_once} at once"),
        ("engines", f"{shape_text(request)}, {'one per GPU' if request.gres else 'on CPUs'}"),
        ("nodes", f"{request.nodes}, with {gpus}{counted(request.cpus_per_node, 'CPU')} each"),
        ("host memory", memory),
        ("time limit", time),
        ("output", job.facts.output or filename_pattern.DEFAULT_ARRAY_OUTPUT),
        *(("note", note) for note in request.notes),
    ]
    if job.plan is None:
        rows.append(
            ("plan", "the first sizing rule: nothing is known of this script's network before its first run (jap-plan)")
        )
    else:
        rows.append(("plan", f"{job.plan.goal}: {job.plan.why}"))
        rows += [("note", note) for note in job.plan.notes]
    if unknown is not None:
        rows.append(("not known", f"what the partition allows: {unknown}"))
    yield f"{summary(job)} instead of an array of {len(job.spec)}"
    for name, text in rows:
        yield f"  {name:<12}{one_line(text)}"
    yield "  would submit"
    for directive in job.directives:
        yield f"    #SBATCH {one_line(directive)}"
    words = ("sbatch", *job.command_line, os.path.basename(script), *arguments)
    yield f"    {' '.join(map(one_line, words))}"
