from __future__ import annotations

import dataclasses

import pytest

from slurm_jap import jap_options
from slurm_jap.errors import UsageError
from slurm_jap.jap_options import JapOptions
from slurm_jap.sbatch_options import jap_lines


def said(*lines: str) -> JapOptions | None:
    return jap_lines("\n".join(("#!/bin/sh", *lines, "true", "")).encode(), "t.sh")


def test_a_script_without_a_line_has_not_opted_in() -> None:
    assert said() is None
    assert said("# JAP --stages=2", " #JAP --stages=2", "##JAP", "#JAPANESE", "#JAP-CARRIED array=1", "#jap") is None
    assert said("true", "#JAP") is None
    assert said("cat <<X", "#JAP", "X") is None


def test_a_bare_line_opts_in_and_says_no_more() -> None:
    assert said("#JAP") == JapOptions()
    assert said("# comment", "", "#JAP   # why") == JapOptions()


def test_all_keys_in_all_forms() -> None:
    assert said(
        "#JAP --stages=4 --groups 2", "#JAP--member-mem=2G", "#SBATCH -n 1", "#JAP --member-cpus=3"
    ) == JapOptions(stages=4, groups=2, member_mem=2048, member_cpus=3)
    assert said("#JAP --shared-job-id --stages='2'") == JapOptions(stages=2, shared_job_id=True)
    assert said("#JAP --stages=2 --stages=3") == JapOptions(stages=3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("#JAP --stage=2", r"t\.sh, line 2: unknown key '--stage=2'; did you mean --stages\?"),
        ("#JAP --member_mem=2G", "did you mean --member-mem"),
        ("#JAP --frobnicate", "the keys are --stages, --groups"),
        ("#JAP please", "unknown key 'please'"),
        ("#JAP --stages=0", "--stages=0: expected a whole number from 1 on"),
        ("#JAP --stages=two", "expected a whole number"),
        ("#JAP --stages", "--stages needs a value; write --stages=N"),
        ("#JAP --stages --groups=2", "--stages needs a value"),
        ("#JAP --member-mem=lots", "expected a size such as"),
        ("#JAP --shared-job-id=yes", "takes no value"),
    ],
)
def test_errors_name_the_line_the_value_and_the_remedy(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        said(line)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "mib"), [("500", 500), ("500M", 500), ("2G", 2048), ("1t", 1048576), ("1K", 1), ("3GB", 3072)]
)
def test_sizes(text: str, mib: int) -> None:
    assert jap_options.mebibytes(text) == mib


def test_the_command_line_overrides_the_script() -> None:
    script, line = JapOptions(stages=2, member_mem=10), JapOptions(stages=4, shared_job_id=True)
    assert script.overridden_by(line) == JapOptions(stages=4, member_mem=10, shared_job_id=True)


def test_the_table_has_a_help_line_for_every_field() -> None:
    assert [key.name.replace("-", "_") for key in jap_options.table()] == [
        f.name for f in dataclasses.fields(JapOptions)
    ]
    assert all(key.help for key in jap_options.table())
