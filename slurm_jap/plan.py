"""``jap-plan SCRIPT``: the allocations that jap-submit would choose from, and why it would take the one it takes.

Reads the same command line as jap-submit (sbatch's options and ``--jap-*`` ones), submits nothing. What is known of the
script's network comes from its earlier runs, or from a file that a Trainer by itself wrote (``JAP_PROFILE``). No torch.

Exit codes: 0; 1 where the array would stay a plain one; 2 for what cannot be served.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence

from slurm_jap import coalesce, decision, explain, jap_options, planner, profile_cache
from slurm_jap.coalesce import Plain
from slurm_jap.errors import PREFIX, USAGE_EXIT_CODE, UsageError
from slurm_jap.planner import Earlier, Plan
from slurm_jap.submit_input import part, read_script

PLAIN_EXIT_CODE = 1
OWN = {
    "--gantt": ("FILE.svg", "draw the chosen pipeline's first iterations"),
    "--json": ("", "the plan as JSON"),
    "--profile": ("FILE", "plan with this profile (JAP_PROFILE=FILE python train.py writes one)"),
    "--help": ("", "this text"),
}


@dataclasses.dataclass(slots=True)
class _Own:
    """Our own words of the command line."""

    gantt: str | None = None
    json: bool = False
    profile: str | None = None
    help: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except UsageError as error:
        print(f"{PREFIX} {explain.one_line(str(error))}", file=sys.stderr)
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:
        return 130


def _part_own(argv: Sequence[str]) -> tuple[_Own, list[str]]:
    """Our own words may stand anywhere before ``--``; the rest is jap-submit's command line."""
    own, rest = _Own(), []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            rest += [word, *words]
            break
        name, equals, value = word.partition("=")
        if word == "-h":
            name = "--help"
        if name not in OWN:
            rest.append(word)
            continue
        placeholder = OWN[name][0]
        if not placeholder and equals:
            raise UsageError(f"{name} takes no value, not {value!r}; type {name}")
        if placeholder and not equals:
            if not words:
                raise UsageError(f"{name} needs a value; type {name}={placeholder}")
            value = words.pop(0)
        if placeholder and not value:
            raise UsageError(f"{name} needs a value; type {name}={placeholder}")
        setattr(own, name[2:], value if placeholder else True)
    return own, rest


def _main(argv: list[str]) -> int:
    own, rest = _part_own(argv)
    if own.help:
        print(_help(), end="")
        return 0
    line = part(rest)
    if line.fault is not None:
        raise UsageError(f"{line.fault}; type jap-plan [sbatch's options] SCRIPT")
    if line.flags or line.check_conf is not None:
        word = next(iter(sorted(line.flags)), "--jap-check-conf")
        raise UsageError(f"{word} is for jap-submit; type jap-plan [sbatch's options] SCRIPT")
    script = read_script(line)
    earlier = decision.known_profiles(script, line.arguments)
    if own.profile is not None:
        entry = profile_cache.read_named(own.profile)
        earlier = Earlier(entries=[(entry.profile, entry.members)])
    try:
        submission, asked = decision.read(line, script)
        options = submission.effective()
        if not decision.value(options, "array"):
            raise UsageError("it is not an array: give --array=0-7, say")
        job, unknown = decision.decide(
            submission, script, asked or jap_options.JapOptions(), explaining=True, earlier=earlier
        )
    except Plain as reason:
        return _plain(str(reason), own)
    if own.gantt is not None:
        _draw(own.gantt, job.plan)
    if own.json:
        print(json.dumps(explain.as_json(job, script.name, line.arguments, unknown), indent=2))
        return 0
    if job.plan is None:
        print(f"{PREFIX} {coalesce.shape_text(job.request)}, by the first sizing rule")
        print(
            "  Nothing is known of this script's network yet. Its first run measures it, and what follows is planned;\n"
            "  or measure it now: JAP_PROFILE=profile.json python train.py ..., then jap-plan --profile=profile.json"
        )
    else:
        from slurm_jap import plan_table

        print(f"{PREFIX} {explain.summary(job)}")
        plan_table.draw(job.plan, sys.stdout)
        for note in (*job.plan.notes, *job.request.notes):
            print(f"note: {explain.one_line(note)}")
    if unknown is not None:
        print(f"note: what the partition allows is not known: {explain.one_line(unknown)}")
    return 0


def _plain(reason: str, own: _Own) -> int:
    if own.json:
        print(json.dumps({"coalesced": False, "reason": reason}, indent=2))
    else:
        print(f"{PREFIX} plain array: {explain.one_line(reason)}")
    return PLAIN_EXIT_CODE


def _draw(path: str, plan: Plan | None) -> None:
    """Write the chart of the chosen pipeline.

    Raises:
        UsageError: there is nothing to draw, or nowhere to.
    """
    if plan is None:
        raise UsageError("--gantt: nothing is known of this script's network yet; run it once, or give --profile=FILE")
    from slurm_jap import gantt
    from slurm_jap.stream import stream

    problem = plan.problem
    few = dataclasses.replace(problem, members=problem.members[: max(1, min(len(problem.members), 16))])
    text = gantt.svg(few, stream(few, work=50_000).schedule, title=planner.shape_text(plan.chosen))
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        where = os.path.dirname(path) or "."
        raise UsageError(f"--gantt: cannot write {path!r}: {error.strerror}; check the folder {where!r}") from None


def _help() -> str:
    rows = [(f"{name}{f'={value}' if value else ''}", text) for name, (value, text) in OWN.items()]
    rows += [(f"--jap-{key.name}{f'={key.value}' if key.value else ''}", key.help) for key in jap_options.table()]
    options = "\n".join(f"  {name:<25} {text}" for name, text in rows)
    return f"""Usage: jap-plan [options of jap-plan and of sbatch] SCRIPT [arguments]

Shows the pipelines that jap-submit chooses from for a job array, what each is predicted to take and to hold, and why it
takes the one it takes. Submits nothing.

Options:
{options}
"""


if __name__ == "__main__":
    sys.exit(main())
