"""Whether an array becomes one coalesced job, and which: the decision behind jap-submit.

Pure: no I/O, no torch. ``decide`` raises ``Plain`` with the one reason for which the array stays what it is; else it
returns the whole job. Errors of the user's own (a malformed array, say) are ``UsageError``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from slurm_jap import array_spec, filename_pattern, planner, resources, sbatch_options
from slurm_jap.array_spec import ArraySpec
from slurm_jap.carried import Carried
from slurm_jap.environment import ENV_MEMBER, SWEEP_VARIABLES
from slurm_jap.errors import JapError
from slurm_jap.jap_options import JapOptions
from slurm_jap.planner import Earlier, Plan
from slurm_jap.resources import Limits, MemberRequest, Request
from slurm_jap.sbatch_options import Given, Submission

OWN_OUTPUT = "jap-%j.out"
"""What jap-run itself prints, in the folder of the members' output files."""


class Plain(JapError):
    """The array stays a plain one; the message is the reason."""


OURS = frozenset({"array", "output", "error", "input"}) | resources.SIZING
"""Options that jap-run applies to each member, or that the coalesced job's own request replaces."""

_REASONS = {
    "bb": "a burst buffer is asked for per task",
    "bbf": "a burst buffer is asked for per task",
    "container": "its tasks run in a container of Slurm's",
    "container-id": "its tasks run in a container of Slurm's",
    "container-type": "its tasks run in a container of Slurm's",
    "exclusive": "--exclusive gives every task nodes of its own",
    "external": "--external runs no script",
    "gid": "--gid submits for somebody else",
    "licenses": "--licenses are counted per task",
    "time-min": "--time-min says nothing certain about a job that several members share",
    "uid": "--uid submits for somebody else",
}

_JOB_ID = re.compile(rb"\bSLURM_JOB_?ID\b")

MEMBERS_OWN = (
    "SLURM_CPU_BIND",
    "SLURM_DISTRIBUTION",
    "SLURM_GRES",
    "SLURM_HOSTFILE",
    "SLURM_MEM_PER_NODE",
    "SLURM_OVERLAP",
)
"""What a member's environment says to its own steps, and must not say to jobs that it submits."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Coalesced:
    """The job to submit."""

    spec: ArraySpec
    request: Request
    plan: Plan | None
    """What the planner found; None: nothing is known of the network yet, and the first sizing rule decided."""
    facts: Carried
    directives: tuple[str, ...]
    """Texts of its ``#SBATCH`` lines."""
    command_line: tuple[str, ...]
    """The options that stay on sbatch's command line."""


def why_plain(options: Mapping[str, Given], script: bytes) -> str | None:
    """The first thing about options or script that forbids coalescing, whatever the array; None: nothing does."""
    for name in sorted(_REASONS.keys() & options.keys()):
        return _REASONS[name]
    if (fault := sbatch_options.why_no_batch_script(script)) is not None:
        return fault
    if "ignore-pbs" not in options and (word := sbatch_options.other_systems_lines(script)) is not None:
        return f"its script has {word} lines, which sbatch translates (--ignore-pbs switches that off)"
    if "aftercorr" in _value(options, "dependency"):
        return "--dependency=aftercorr pairs tasks with tasks"
    if "," in _value(options, "partition"):
        return "several partitions are named"
    signal, colon, _ = _value(options, "signal").partition(":")
    if "signal" in options and not (colon and "B" in signal):
        return (
            "--signal without B: spares the batch script, and members' scripts run in steps; write --signal=B:USR1@60"
        )
    clusters = _value(options, "clusters")
    if "," in clusters or clusters == "all":
        return "several clusters are named"
    return None


def why_ids_collide(options: Mapping[str, Given], script: bytes, slurm: tuple[int, int]) -> str | None:
    """Where members would take each other's names, which tasks would not, as they have job ids of their own."""
    for name in ("output", "error"):
        letters = filename_pattern.letters_in(_value(options, name), slurm)
        if letters & {"j", "J"} and "a" not in letters:
            return f"--{name}={_value(options, name)} has %j without %a, and members share one job id"
    for line in script.split(b"\n"):
        if not line.lstrip().startswith(b"#") and _JOB_ID.search(line):
            return "its script uses SLURM_JOB_ID, which members share (#JAP --shared-job-id says that it copes)"
    return None


def _value(options: Mapping[str, Given], name: str) -> str:
    given = options.get(name)
    return (given.value or "") if given is not None else ""


def sizing_values(submission: Submission) -> dict[str, str]:
    """The resource options in force. Of --mem and its kin, a variable yields to what is given elsewhere."""
    options = submission.effective()
    kin = [name for name in ("mem", "mem-per-cpu", "mem-per-gpu") if name in options]
    if any(options[name].source != sbatch_options.ENVIRONMENT for name in kin):
        kin = [name for name in kin if options[name].source != sbatch_options.ENVIRONMENT]
    wanted = (resources.SIZING | resources.UNCLEAR) - {"mem", "mem-per-cpu", "mem-per-gpu"} | set(kin)
    return {name: given.value or "" for name, given in options.items() if name in wanted}


def member_request(submission: Submission) -> MemberRequest:
    """What one member asks for.

    Raises:
        Plain: that cannot be said for certain.
    """
    try:
        return resources.member_request(sizing_values(submission))
    except resources.Unclear as unclear:
        raise Plain(str(unclear)) from None


def own_output(pattern: str) -> str:
    """Pattern of the coalesced job's own output file: beside the members' files."""
    folder = filename_pattern.fixed_folder(pattern)
    if not folder or "\\" in folder:
        return OWN_OUTPUT
    return f"{folder.rstrip('/').replace('%', '%%')}/{OWN_OUTPUT}"


def carried(
    submission: Submission, script_name: str, asked: JapOptions, member: MemberRequest, request: Request | None
) -> Carried:
    """What jap-run must know; without a request, what the local launcher must know."""
    options = submission.effective()
    stages, groups = (request.stages, request.groups) if request else resources.shape(member, asked)
    facts = Carried(
        array=_value(options, "array"),
        output=_value(options, "output"),
        error=_value(options, "error"),
        input=_value(options, "input"),
        open_mode={"a": "append", "t": "truncate"}.get(_value(options, "open-mode")[:1].lower(), ""),
        script_name=script_name,
        stages=stages,
        groups=groups,
        memory_per_device_mb=asked.memory_per_device,
    )
    if request is None:
        return facts
    return dataclasses.replace(
        facts,
        member_cpus=request.member_cpus,
        member_mem_mb=request.member_memory_mb,
        member_time_min=request.member_time_min,
        gres=request.gres,
        at_once=request.at_once,
    )


def decide(
    submission: Submission,
    script: bytes,
    script_name: str,
    asked: JapOptions,
    spec: ArraySpec,
    limits: Limits,
    slurm: tuple[int, int],
    earlier: Earlier | None = None,
) -> Coalesced:
    """The coalesced job of an array whose script has opted in.

    Args:
        script_name: as the user gave it.
        asked: what ``#JAP`` lines and ``--jap-*`` options say.
        limits: of the partition; without knowledge of it, empty ones.
        slurm: the cluster's version.
        earlier: what earlier runs of the script measured; None: nothing.

    Raises:
        Plain: it stays a plain array.
    """
    options = submission.effective()
    reason = why_plain(options, script)
    if reason is None and not asked.shared_job_id:
        reason = why_ids_collide(options, script, slurm)
    if reason is not None:
        raise Plain(reason)
    member = member_request(submission)
    known = planner.known(spec.indices, earlier or Earlier(), member.gpus > 0)
    plan = None
    try:
        if known is None:
            request = resources.plan(member, asked, len(spec), limits, throttle=spec.throttle)
        else:
            plan = planner.choose(member, asked, len(spec), limits, known, throttle=spec.throttle)
            request = plan.request
    except resources.Unclear as unclear:
        raise Plain(str(unclear)) from None
    kept = [given for given in submission.script if given.name not in OURS]
    own = [f"--output={own_output(_value(options, 'output'))}", *request.sbatch_words()]
    if "comment" not in options:
        own.append(f"--comment=jap: {len(spec)} members ({_shortened(spec.text)}), {shape_text(request)}")
    try:
        directives = [" ".join(map(sbatch_options.quote_for_directive, given.words)) for given in kept]
        directives += [sbatch_options.quote_for_directive(word) for word in own]
    except ValueError as error:
        raise Plain(str(error)) from None
    return Coalesced(
        spec=spec,
        request=request,
        plan=plan,
        facts=carried(submission, script_name, asked, member, request),
        directives=tuple(directives),
        command_line=tuple(
            word for given in submission.command_line if given.name not in OURS | {"parsable"} for word in given.words
        ),
    )


def shape_text(request: Request) -> str:
    """``2 stages x 1 group``."""
    return f"{counted(request.stages, 'stage')} x {counted(request.groups, 'group')}"


def counted(number: int, noun: str) -> str:
    """``1 stage``, ``2 stages``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."


def parse_array(options: Mapping[str, Given], max_size: int, max_tasks: int | None) -> ArraySpec | None:
    """The array asked for; None: no array.

    Raises:
        UsageError: Slurm refuses the specification.
    """
    if "array" not in options:
        return None
    spec = array_spec.parse(_value(options, "array"), max_size=max_size, max_tasks=max_tasks)
    return spec if spec.indices else None


def environment_to_hand_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which sbatch runs in our place: untouched, unless we are inside a member of a sweep."""
    gone = set(MEMBERS_OWN) if ENV_MEMBER in environment else set()
    return {name: value for name, value in environment.items() if name not in gone}


def environment_for_sbatch(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which the coalesced job is submitted.

    Without the variables of the options in ``OURS`` (they would override the job's own), and without what an array task
    or a member of a sweep was told about itself, should that be where we run.
    """
    gone = {variable for variable, name in sbatch_options.VARIABLES.items() if name in OURS}
    gone |= SWEEP_VARIABLES
    kept = environment_to_hand_on(environment)
    return {n: value for n, value in kept.items() if n not in gone and not n.startswith("SLURM_ARRAY_")}
