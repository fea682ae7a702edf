"""``jap-submit``: sbatch's command line, plus ``--jap-*``. Coalesces the arrays that opt in, hands on all else.

An array opts in by a ``#JAP`` line in its script, or by ``--jap`` or a sizing ``--jap-*`` option on the command line.
Anything else, and whatever is not understood, goes to sbatch as it came (same words, same script, same environment),
and one line on standard error says why. Standard output is sbatch's in both cases. No torch.

Exit codes: sbatch's (with ``--wait`` the highest member's); 2 for what cannot be served, one line, nothing submitted.
"""

from __future__ import annotations

import os
import pwd
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from slurm_jap import (
    array_spec,
    carried,
    coalesce,
    conf,
    decision,
    explain,
    filename_pattern,
    jap_options,
    resources,
    sbatch_options,
)
from slurm_jap._version import __version__
from slurm_jap.coalesce import Coalesced, Plain
from slurm_jap.errors import PREFIX, USAGE_EXIT_CODE, UsageError
from slurm_jap.jap_options import JapOptions
from slurm_jap.sbatch_options import Given
from slurm_jap.slurm import Answer, Commands, SlurmError
from slurm_jap.submit_input import CHECK_CONF, FLAGS, CommandLine, Script, part, read_script

OPT_OUT = "JAP"
"""``JAP=0`` in the environment: every array stays a plain one."""
INTERRUPTED_EXIT_CODE = 130

_NO_ARRAY = "it is not an array"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (or becomes sbatch)."""
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except UsageError as error:
        _tell(str(error))
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE


def _tell(text: str) -> None:
    print(f"{PREFIX} {explain.one_line(text)}", file=sys.stderr, flush=True)


def _main(argv: list[str]) -> int:
    line = part(argv)
    early = {given.name for given in line.options} & sbatch_options.COMMAND_LINE_ONLY
    if "help" in early:
        print(_help(), end="")
        return 0
    if line.check_conf is not None:
        return _check_conf(line.check_conf)
    if "version" in early:
        print(f"slurm-jap {__version__}", flush=True)
        return _become_sbatch(line.handed_on, None) if shutil.which("sbatch") else 0
    if "usage" in early or any(given.name == "autocomplete" for given in line.options):
        return _become_sbatch(line.handed_on, None)
    explaining, local = "--jap-explain" in line.flags, "--jap-local" in line.flags
    if "--jap-json" in line.flags and not explaining:
        raise UsageError("--jap-json goes with --jap-explain; type both, or neither")
    if local and explaining:
        raise UsageError("--jap-local submits nothing that --jap-explain could explain; type one of them")
    if local:
        return _run_local(line)
    if not explaining:
        _sbatch()
    script = None
    try:
        if os.environ.get(OPT_OUT) == "0":
            raise Plain(f"{OPT_OUT}=0 in the environment")
        if line.fault is not None:
            raise Plain(line.fault)
        if "wrap" in early:
            raise Plain("--wrap has no batch script to coalesce")
        script = read_script(line)
        submission, asked = decision.read(line, script)
        options = submission.effective()
        if not decision.value(options, "array"):
            raise Plain(_NO_ARRAY)
        if asked is None:
            raise Plain("its script has no #JAP line (nor is there a --jap option)")
        earlier = decision.known_profiles(script, line.arguments)
        job, unknown = decision.decide(submission, script, asked, explaining=explaining, earlier=earlier)
        if not explaining:
            _check_output_folders(job, options, script)
            text = _build(job, script)
    except Plain as reason:
        return _stay_plain(line, script, str(reason), explaining)
    if not explaining:
        return _send(line, script, job, text, options)
    if "--jap-json" in line.flags:
        _print_json(explain.as_json(job, script.name, line.arguments, unknown))
        return 0
    print(PREFIX, "\n".join(explain.as_text(job, script.name, line.arguments, unknown)))
    if job.plan is not None:
        from slurm_jap import plan_table

        sys.stdout.flush()
        plan_table.draw(job.plan, sys.stdout)
    return 0


def _print_json(data: dict[str, object]) -> None:
    import json

    print(json.dumps(data, indent=2))


def _sbatch() -> str:
    """Path of sbatch.

    Raises:
        UsageError: there is none.
    """
    try:
        return Commands().sbatch()
    except SlurmError as error:
        raise UsageError(str(error)) from None


def _check_output_folders(job: Coalesced, options: dict[str, Given], script: Script) -> None:
    """Refuse what would kill every task without a trace: an output folder that is not there.

    Raises:
        UsageError: naming it.
    """
    work_dir = os.path.join(os.getcwd(), decision.value(options, "chdir"))
    for pattern in {job.facts.output, job.facts.error or job.facts.output}:
        folder = os.path.dirname(pattern)
        if folder and filename_pattern.letters_in(folder) - {"a", "b", "u", "x"}:
            continue  # job id or node: not known yet
        for index in job.spec.indices:
            path = filename_pattern.expand(
                pattern,
                job_id=0,
                array_job_id=0,
                index=index,
                job_name=decision.value(options, "job-name") or script.job_name,
                user=pwd.getpwuid(os.getuid()).pw_name,
                node="",
            )
            folder = os.path.dirname(os.path.join(work_dir, path))
            if not os.path.isdir(folder):
                raise UsageError(f"output folder {folder!r} does not exist: mkdir -p it first, or change -o or -e")


def _build(job: Coalesced, script: Script) -> bytes:
    """The text of the coalesced job's script.

    Raises:
        Plain: something about it cannot be carried.
    """
    try:
        return carried.build(os.path.abspath(sys.executable), job.facts, script.text, job.directives)
    except ValueError as error:
        raise Plain(f"it cannot be carried: {error}") from None


def _send(line: CommandLine, script: Script, job: Coalesced, text: bytes, options: dict[str, Given]) -> int:
    quiet, parsable = "quiet" in options, "parsable" in options

    def submitted(answer: Answer) -> None:
        if answer.found_in_queue:
            _tell(f"sbatch named no job, and yet job {answer.job_id} is in the queue")
        if quiet:
            return
        if parsable:
            print(answer.job_id, *filter(None, [answer.cluster]), sep=";", flush=True)
            return
        cluster = f" on cluster {answer.cluster}" if answer.cluster else ""
        print(f"Submitted batch job {answer.job_id}{cluster}", flush=True)
        for told in (f"{explain.summary(job)}; type jap-status {answer.job_id}", *job.request.notes):
            _tell(told)

    folder = tempfile.mkdtemp(prefix="jap-submit-")
    try:
        path = os.path.join(folder, script.job_name)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text)
        commands = Commands(coalesce.environment_for_sbatch(os.environ), decision.value(options, "clusters"))
        answer = commands.submit(
            job.command_line, path, line.arguments, submitted=submitted, silent=quiet or "test-only" in options
        )
    except SlurmError as error:
        raise UsageError(str(error)) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if answer.job_id is None and answer.code != 0 and "test-only" not in options:
        _tell(f"nothing was submitted; with {OPT_OUT}=0 in the environment jap-submit submits the plain array")
    return answer.code


def _stay_plain(line: CommandLine, script: Script | None, reason: str, explaining: bool) -> int:
    kind = "plain job" if reason == _NO_ARRAY else "plain array"
    if not explaining:
        _tell(f"{kind}: {reason}")
        return _become_sbatch(line.handed_on, script)
    if "--jap-json" in line.flags:
        _print_json({"coalesced": False, "reason": reason, "sbatch": list(line.handed_on)})
    else:
        print(f"{PREFIX} {kind}: {explain.one_line(reason)}")
    return 0


def _become_sbatch(words: Sequence[str], script: Script | None) -> NoReturn:
    """Replace this process by sbatch.

    Raises:
        UsageError: there is none.
    """
    path = _sbatch()
    if script is not None and script.descriptor is not None:
        again = os.memfd_create("script")
        with open(again, "wb", closefd=False) as file:
            file.write(script.text)
        os.lseek(again, 0, os.SEEK_SET)
        os.dup2(again, script.descriptor, inheritable=True)
    sys.stdout.flush()
    try:
        os.execve(path, ["sbatch", *words], coalesce.environment_to_hand_on(os.environ))
    except OSError as error:
        raise UsageError(f"cannot run {path}: {error.strerror}; check the installation of Slurm") from None


def _run_local(line: CommandLine) -> int:
    if line.fault is not None or any(given.name == "wrap" for given in line.options):
        fault = line.fault or "--wrap has no batch script"
        raise UsageError(f"--jap-local: {fault}; give a batch script and sbatch's own options")
    script = read_script(line)
    if (unfit := sbatch_options.why_no_batch_script(script.text)) is not None:
        raise UsageError(f"--jap-local: {unfit}; begin it with #!/bin/bash, end lines with a line feed alone")
    try:
        submission, asked = decision.read(line, script)
        asked = asked or JapOptions()
        member = coalesce.member_request(submission) if asked.stages is None else resources.MemberRequest()
    except Plain as reason:
        raise UsageError(f"--jap-local: {reason}; give --jap-stages and sbatch's own options") from None
    options = submission.effective()
    if coalesce.parse_array(options, array_spec.LARGEST_MAX_ARRAY_SIZE, None) is None:
        raise UsageError("--jap-local runs the members of an array: give --array=0-7, say")
    work_dir = Path(os.getcwd(), decision.value(options, "chdir"))
    if not work_dir.is_dir():
        raise UsageError(f"working directory {str(work_dir)!r} does not exist: mkdir -p it first, or change -D")
    from slurm_jap import launch_local

    return launch_local.run(
        coalesce.carried(submission, script.name, asked, member, None),
        script.text,
        line.arguments,
        work_dir=work_dir,
        job_name=decision.value(options, "job-name") or script.job_name,
        progress="quiet" not in options,
    )


def _check_conf(path: str) -> int:
    problems = conf.check_file(path)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"{PREFIX} {path}: no faults")
    return USAGE_EXIT_CODE if problems else 0


def _help() -> str:
    rows = [
        *FLAGS.items(),
        *((f"--jap-{key.name}{f'={key.value}' if key.value else ''}", key.help) for key in jap_options.table()),
        (f"{CHECK_CONF}=FILE", "say what is wrong with a jap.conf"),
        ("-h, --help", "this text; for sbatch's own options: sbatch --help"),
    ]
    options = "\n".join(f"  {name:<25} {text}" for name, text in rows)
    return f"""Usage: jap-submit [options of jap-submit and of sbatch] SCRIPT [arguments]

Submits a job array as one job that trains its members together, if its script has a #JAP line
or a --jap option says so. Everything else goes to sbatch as it is. What a member prints, writes
and returns stays where an array task's would be.

Options (the sizing ones also as lines of the script, e.g. #JAP --stages=4):
{options}

{OPT_OUT}=0 in the environment submits plain arrays only.
"""


if __name__ == "__main__":
    sys.exit(main())
