"""What jap-submit and jap-plan both do first: read options and script, ask Slurm, decide. No torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from slurm_jap import array_spec, coalesce, conf, profile_cache, sbatch_options
from slurm_jap.coalesce import Coalesced, Plain
from slurm_jap.conf import PartitionConf
from slurm_jap.jap_options import JapOptions
from slurm_jap.planner import Earlier
from slurm_jap.resources import Limits
from slurm_jap.sbatch_options import Given, NotUnderstood, Submission
from slurm_jap.slurm import Commands, Config, SlurmError
from slurm_jap.submit_input import CommandLine, Script


def value(options: dict[str, Given], name: str) -> str:
    """An option's value; empty: it is not given."""
    return (options[name].value or "") if name in options else ""


def known_profiles(script: Script, arguments: Sequence[str]) -> Earlier:
    """What earlier runs of the script measured, with these arguments if there were any."""
    entries = profile_cache.load(script.text, arguments)
    return Earlier(
        entries=[(entry.profile, entry.members) for entry in entries],
        same_arguments=all(entry.arguments == tuple(arguments) for entry in entries),
    )


def read(line: CommandLine, script: Script) -> tuple[Submission, JapOptions | None]:
    """All options of the submission, and what is asked of us; None: nobody opted in.

    Raises:
        Plain: sbatch alone can judge them.
        UsageError: a wrong ``#JAP`` line.
    """
    name = os.path.basename(script.name)
    try:
        said = sbatch_options.jap_lines(script.text, name)
        submission = Submission(
            script=tuple(sbatch_options.from_script(script.text, name)),
            environment=tuple(sbatch_options.from_environment(os.environ)),
            command_line=line.options,
        )
    except NotUnderstood as fault:
        raise Plain(str(fault)) from None
    asked = (said or JapOptions()).overridden_by(line.asked)
    return submission, asked if said is not None or line.opts_in else None


def decide(
    submission: Submission,
    script: Script,
    asked: JapOptions,
    *,
    explaining: bool,
    earlier: Earlier,
) -> tuple[Coalesced, str | None]:
    """The job; and, when explaining, what Slurm did not answer.

    Args:
        explaining: nothing will be submitted, so that Slurm's silence is no reason for a plain array.
        earlier: what is known of the script's networks.

    Raises:
        Plain: it stays an array.
        UsageError: the array specification is none.
    """
    options = submission.effective()
    reason = coalesce.why_plain(options, script.text)
    if reason is not None:
        raise Plain(reason)
    config: Config | None = None
    limits, unknown = Limits(), None
    try:
        commands = Commands(cluster=value(options, "clusters"))
        config = commands.config()
        feature = value(options, "constraint")
        simple = feature.replace("-", "").replace("_", "").isalnum()
        limits = commands.limits(value(options, "partition"), config, feature if simple else "")
    except SlurmError as error:
        if not explaining:
            raise Plain(f"Slurm does not answer ({error})") from None
        unknown = str(error)
    site = _site_conf(config.file, limits.partition) if config else None
    if site is not None:
        most = site.max_time_minutes if limits.max_time_min is None else min(limits.max_time_min, site.max_time_minutes)
        limits = dataclasses.replace(limits, max_time_min=most)
    if not earlier.same_arguments and any(one.block_count < (asked.stages or 1) for one, _ in earlier.entries):
        earlier = Earlier()  # with other arguments it may well be a deeper network
    spec = coalesce.parse_array(
        options,
        config.max_array_size if config else array_spec.DEFAULT_MAX_ARRAY_SIZE,
        config.max_array_tasks if config else None,
    )
    if spec is None:
        raise Plain(f"--array={value(options, 'array')} names no task")
    if site is not None and len(spec) > site.max_members:
        raise Plain(f"{len(spec)} members are more than MaxMembers={site.max_members} of jap.conf; split the array")
    slurm = config.version if config else (24, 11)
    job = coalesce.decide(submission, script.text, script.name, asked, spec, limits, slurm, earlier)
    return job, unknown


def _site_conf(slurm_conf: str, partition: str) -> PartitionConf | None:
    """What the administrator's jap.conf, beside slurm.conf, says of a partition; None: nothing, or nothing readable."""
    try:
        with open(os.path.join(os.path.dirname(slurm_conf), "jap.conf"), encoding="utf-8") as file:
            return conf.parse(file.read(conf.MAX_BYTES + 1)).partitions.get(partition)
    except (OSError, ValueError):
        return None
