"""Settings of every test: a clean environment, and hypothesis without deadlines (no test asserts a time)."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile

import pytest
from hypothesis import settings

settings.register_profile("jap", deadline=None, max_examples=100)
settings.register_profile("ci", deadline=None, max_examples=100, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "jap")


def pytest_configure(config: pytest.Config) -> None:
    """Forget the job that the tests may run in: only a test's own SLURM_* and JAP_* variables count."""
    for name in list(os.environ):
        if re.match(r"SLURM|SBATCH_|SRUN_|SQUEUE_|SACCT_|JAP_(?!TEST_)", name):
            del os.environ[name]
    # What earlier runs measured of the examples would decide where they are cut.
    cache = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="jap-test-cache-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
