"""The real test cluster as fixtures. Every test in this folder carries the marker ``slurm``.

    from slurm_harness import SlurmCluster                    # for the type only

    def test_something(cluster: SlurmCluster, workdir: Path) -> None:
        script = workdir / "t.sh"
        script.write_text("#!/bin/bash\\nsrun --job-name=one sleep 1\\nexit 3\\n")
        job = cluster.sbatch("-p", "jap", script, cwd=workdir)             # as cluster.user
        job = cluster.sbatch("--array=0-3", script, program=JAP_SUBMIT, cwd=workdir, env={"X": "1"}, user="root")
        assert job.wait() == 3                                             # highest code, a signal is 128+n
        assert job.info()["JobState"] == "FAILED"                          # scontrol show job
        assert cluster.sacct_steps(job.id, "one")["one"]["ExitCode"] == "0:0"        # waits for the late rows
        answer = cluster.run("squeue", "-h", check=False)                  # any command, with the cluster's SLURM_CONF
        wait_until(lambda: (workdir / "x").exists(), 20, "file x")         # from support; never a bare sleep

``cluster``          four nodes (their names: ``cluster.nodes``), each 4 fake GPUs, 16 CPUs, 16 GB; a step that
                     outgrows its --mem is killed
``fenced_cluster``   the same with control groups: device files hidden, memory limited; node names differ
``workdir``          an empty folder of this test, shared by all nodes, owned by the user whom commands run as
``jap_submit``       path of the console command, runnable by that user; its siblings lie beside it

``cluster.python`` is an interpreter with slurm_jap and torch that the users can run: put it in scripts, not
sys.executable. Where the checkout is closed to other users, ``cluster.user`` is root. Job ids of the two clusters never
meet. Both come up at first use and end with the session, by whatever means it ends. After a failure their logs are
kept, and a line at the end says where.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster
from slurm_harness import SlurmCluster

REPOSITORY = slurm_cluster.REPOSITORY
KEPT = pytest.StashKey[list[str]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            if "fenced_cluster" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.fenced)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slurm") is None:
        return
    reason = slurm_cluster.missing(fence=item.get_closest_marker("fenced") is not None)
    if reason is None:
        return
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(f"{reason}; with CI=true that is a failure", pytrace=False)
    pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(KEPT, []):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def test_root(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder with a short name that every user can enter; kept when a test failed."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > 8 or not slurm_cluster.reachable_by_users(parent):
        parent = Path("/tmp")
    root = Path(tempfile.mkdtemp(prefix="jap-test-", dir=parent))
    root.chmod(0o755)
    (root / "work").mkdir()
    yield root
    if request.session.testsfailed:
        request.config.stash.setdefault(KEPT, []).append(f"test cluster: logs and files are kept in {root}")
    else:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def job_python(test_root: Path) -> tuple[str, str]:
    """An interpreter for jobs, and the user who runs them.

    The environment that the tests run in may rest on an interpreter under somebody's closed home. Then the system's
    interpreter of the same version, with this environment's packages, serves the jobs; if that cannot be read either,
    jobs run as root.
    """
    user = slurm_cluster.USERS[0]
    packages = Path(sysconfig.get_path("purelib"))
    readable = all(slurm_cluster.reachable_by_users(path) for path in (packages, REPOSITORY / "slurm_jap"))
    if not readable:
        return sys.executable, "root"
    if slurm_cluster.reachable_by_users(Path(sys.executable)):
        return sys.executable, user
    system = shutil.which(f"python{sys.version_info.major}.{sys.version_info.minor}", path=slurm_cluster.PATH)
    if system is None or not slurm_cluster.reachable_by_users(Path(system)):
        return sys.executable, "root"
    twin = test_root / "python"
    subprocess.run([system, "-m", "venv", "--without-pip", twin], check=True, timeout=60)
    folder = next((twin / "lib").glob("python*/site-packages"))
    (folder / "packages.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    for command in Path(sys.executable).parent.glob("jap-*"):
        text = command.read_text()
        target = twin / "bin" / command.name
        target.write_text(re.sub(r"\A#!.*", f"#!{twin}/bin/python", text))
        target.chmod(0o755)
    return str(twin / "bin" / "python"), user


def _cluster(directory: Path, job_python: tuple[str, str], fence: bool) -> Iterator[SlurmCluster]:
    python, user = job_python
    slurm_cluster.up(slurm_cluster.Settings(directory=str(directory), fence=fence, python=python, owner=os.getpid()))
    try:
        yield SlurmCluster(directory, user)
    finally:
        slurm_cluster.down(directory)


@pytest.fixture(scope="session")
def cluster(test_root: Path, job_python: tuple[str, str]) -> Iterator[SlurmCluster]:
    """The test cluster, up for the whole session."""
    yield from _cluster(test_root / "c", job_python, fence=False)


@pytest.fixture(scope="session")
def fenced_cluster(test_root: Path, job_python: tuple[str, str]) -> Iterator[SlurmCluster]:
    """A second cluster, with devices and memory confined by control groups; only when a test asks for it."""
    yield from _cluster(test_root / "f", job_python, fence=True)


@pytest.fixture
def workdir(request: pytest.FixtureRequest, test_root: Path, job_python: tuple[str, str]) -> Path:
    """An empty folder of this test, on every node, owned by the user whom commands run as."""
    name = re.sub(r"[^\w.-]+", "_", request.node.name)[:60]
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=test_root / "work"))
    folder.chmod(0o755)
    shutil.chown(folder, job_python[1])
    return folder


@pytest.fixture(scope="session")
def jap_submit(job_python: tuple[str, str]) -> str:
    """Path of jap-submit, runnable by the user whom commands run as."""
    return str(Path(job_python[0]).parent / "jap-submit")
