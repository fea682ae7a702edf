"""A test's view of the test cluster: run commands as a user, submit, wait, read the accounting.

Fixtures in tests/slurm/conftest.py make these objects; see there how to use them.
"""

from __future__ import annotations

import os
import pwd
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from slurm_cluster import Cluster
from support import wait_until

TERMINAL = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "PREEMPTED"}
)
SACCT_FIELDS = ("JobID", "JobIDRaw", "JobName", "State", "ExitCode", "AllocTRES", "ReqMem", "NodeList", "NTasks")
Rows = list[dict[str, str]]


class SlurmCluster(Cluster):
    """A cluster that is up; see ``Cluster`` for nodes, gpus_per_node, cpus_per_node, python, etc, log, fenced."""

    def __init__(self, directory: Path, user: str) -> None:
        super().__init__(directory)
        self.user = user
        """Whom commands run as by default: an ordinary user, or root where the checkout is closed to others."""

    def run(
        self,
        *command: str | os.PathLike[str],
        user: str | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = 60.0,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the cluster, e.g. ``cluster.run("squeue", "-h", "-j", "7")``.

        Args:
            user: ``games``, ``news`` or ``root``; default ``self.user``.
            cwd: default the user's home.
            env: variables added to the environment.
            check: a failing command fails the test, with all that it printed.
        """
        who = user or self.user
        identity: dict[str, Any] = {}
        if who != "root":
            entry = pwd.getpwnam(who)
            identity = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        environment = self.environment(who) | dict(env or {})
        done = subprocess.run(
            [os.fspath(word) for word in command], cwd=cwd or self.home(who), env=environment, text=True,
            timeout=timeout, capture_output=True, input=input or "", **identity,
        )  # fmt: skip
        if check and done.returncode != 0:
            raise AssertionError(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def sbatch(self, *arguments: str | os.PathLike[str], program: str = "sbatch", **options: Any) -> Job:
        """Submit with sbatch (or jap-submit, as ``program``); keyword arguments are those of :meth:`run`."""
        done = self.run(program, *arguments, **options)
        return self.submitted(done.stdout)

    def submitted(self, stdout: str) -> Job:
        """The job that sbatch's standard output names."""
        found = re.search(r"^(?:Submitted batch job )?(\d+)\s*$", stdout, re.MULTILINE)
        assert found, f"no job id in {stdout!r}"
        return Job(self, int(found[1]))

    def squeue(self, *arguments: str, format: str = "%i %T") -> list[str]:
        """Lines of ``squeue -h -o format``, of all users."""
        return self.run("squeue", "-h", "-o", format, *arguments, user="root").stdout.splitlines()

    def sacct_rows(
        self,
        job_id: int,
        until: Callable[[Rows], object] | None = None,
        fields: Iterable[str] = SACCT_FIELDS,
        timeout: float = 60.0,
    ) -> Rows:
        """Rows of ``sacct -j``, one dict per job and step, field name -> text. They arrive seconds late: this waits.

        Args:
            until: what the rows must show; default: as many jobs as scontrol knows (array tasks), and all have ended.
        """
        names = list(dict.fromkeys((*fields, "JobID", "State")))
        tasks = 1 if until else len(Job(self, job_id).records())

        def ask() -> Rows:
            text = self.run("sacct", "-P", "-n", "-j", str(job_id), "-o", ",".join(names), user="root").stdout
            return [dict(zip(names, line.split("|"), strict=True)) for line in text.splitlines()]

        def ended(rows: Rows) -> bool:
            jobs = [row for row in rows if "." not in row["JobID"]]
            return len(jobs) >= tasks and all(row["State"].split()[0] in TERMINAL for row in rows)

        seen: Rows = []

        def enough() -> bool:
            seen[:] = ask()
            return bool(until(seen)) if until else ended(seen)

        try:
            wait_until(enough, timeout, f"sacct rows of job {job_id}", every=0.3)
        except AssertionError as error:
            raise AssertionError(f"{error}; rows: {seen}") from None
        return seen

    def sacct_steps(self, job_id: int, *names: str, timeout: float = 60.0) -> dict[str, dict[str, str]]:
        """The ended steps of a job by name, once all of ``names`` are among them."""

        def there(rows: Rows) -> bool:
            done = {row["JobName"] for row in rows if row["State"].split()[0] in TERMINAL}
            return done.issuperset(names) and all(row["State"].split()[0] in TERMINAL for row in rows)

        rows = self.sacct_rows(job_id, until=there, timeout=timeout)
        return {row["JobName"]: row for row in rows if "." in row["JobID"]}


class Job:
    """One submitted job (for an array: its array job id)."""

    def __init__(self, cluster: SlurmCluster, job_id: int) -> None:
        self.cluster = cluster
        self.id = job_id

    def __repr__(self) -> str:
        return f"<job {self.id}>"

    def records(self) -> list[dict[str, str]]:
        """``scontrol show job``: one dict per record (array tasks are several)."""
        text = self.cluster.run("scontrol", "-o", "show", "job", str(self.id), user="root").stdout
        records = []
        for line in text.splitlines():
            words = re.findall(r"(?:^|\s)([A-Za-z][\w:/]*)=(\S*)", line)
            if words:
                records.append(dict(words))
        return records

    def info(self) -> dict[str, str]:
        """The fields of a job that is one record; values end at the first blank."""
        records = self.records()
        assert len(records) == 1, f"{self} has {len(records)} records: an array"
        return records[0]

    def states(self) -> list[str]:
        """JobState of each record."""
        return [record["JobState"] for record in self.records()]

    @property
    def state(self) -> str:
        """JobState of a job that is one record."""
        return self.info()["JobState"]

    def wait_for_state(self, *states: str, timeout: float = 60.0) -> str:
        """Wait until the job is in one of these states."""
        return wait_until(
            lambda: (found := self.state) in states and found, timeout, f"{self} in {'/'.join(states)}: {self.info()}"
        )  # type: ignore[return-value]

    def wait(self, timeout: float = 120.0) -> int:
        """Wait for the end of all its tasks; the highest exit code, a signal counting as 128+n."""

        def all_ended() -> bool:
            return all(state in TERMINAL for state in self.states())

        try:
            wait_until(all_ended, timeout, f"the end of {self}", every=0.2)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.records()}") from None
        codes = []
        for record in self.records():
            code, _, number = record["ExitCode"].partition(":")
            codes.append(128 + int(number) if int(number) else int(code))
        return max(codes)

    def cancel(self, *arguments: str) -> None:
        """``scancel [arguments] ID`` as root."""
        self.cluster.run("scancel", *arguments, str(self.id), user="root")
