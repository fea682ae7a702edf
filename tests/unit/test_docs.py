"""The pages show only commands that a test runs, and link only to what exists."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from slurm_jap import jap_options
from slurm_jap.status_view import MemberView, SweepView, to_json
from slurm_jap.sweep import Member, MemberState, Sweep
from slurm_jap.traces import SACCT_COMMAND

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md", "docs/quickstart.md", "docs/member-script.md", "docs/how-it-works.md", "docs/simulation.md",
    "docs/planner.md",
]  # fmt: skip

EXAMPLES = "tests/engine/test_examples.py"
RUN_BY = {
    "make demo": f"{EXAMPLES}::test_the_demo_trains_compares_and_ends_with_code_0",
    "make test": ".ci/run::make test",
    "python train.py --lr 0.05 --dropout 0.1": f"{EXAMPLES}::test_digits_learns_in_its_own_process",
    "jap-submit --jap-local sweep.sh": f"{EXAMPLES}::test_members_equal_the_script_alone",
    "jap-submit --jap-explain sweep.sh": f"{EXAMPLES}::test_a_sweep_can_be_explained_without_submitting",
    "jap-submit sweep.sh": "tests/slurm/test_submit.py::test_an_array_becomes_one_row_with_its_options_in_force",
    "sbatch sweep.sh": "tests/slurm/test_plugin.py::test_an_array_of_an_opted_in_script_is_one_job",
    "jap-plan sweep.sh": "tests/unit/test_planner_program.py::test_a_known_network_is_planned_with_a_table",
    "jap-status": "tests/unit/test_status.py::test_without_a_job_id_the_newest_sweep_is_shown",
    "jap-status 62": "tests/unit/test_status.py::test_sweep_is_found_from_below_by_pointer_and_by_folder",
    "jap-status 62_3": "tests/unit/test_status.py::test_one_member_can_be_asked_for",
    "jap-status 62 --watch": "tests/unit/test_status.py::test_watch_ends_when_jap_run_is_silent",
    "jap-sim trace.txt --nodes 40 --gpus-per-node 8": "tests/unit/test_sim.py::test_report_for_people",
    f"{SACCT_COMMAND} > trace.txt": "tests/slurm/test_sim_sacct.py::test_sacct_of_a_real_array",
    "jap-status 62 --json": "tests/unit/test_status.py::test_every_state_and_value_of_a_running_sweep",
}
"""Each command of a ``bash`` block, and the test that runs it: a file, and a text that it holds."""


def commands(page: str) -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_shown_is_run_by_a_test(page: str) -> None:
    for command in commands(page):
        assert command in RUN_BY, f"{page} shows {command!r}: name the test that runs it"
        file, _, text = RUN_BY[command].partition("::")
        assert text in (ROOT / file).read_text(), f"{command!r}: {file} holds no {text!r}"


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md")))])
def test_every_link_leads_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        assert file.exists(), f"{page}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in slugs, f"{page}: {target}"


def test_every_jap_key_is_documented() -> None:
    page = (ROOT / "docs/member-script.md").read_text()
    keys = jap_options.table()
    for key in keys:
        assert f"`#JAP --{key.name}" + (f"={key.value}`" if key.value else "`") in page


def test_every_state_and_json_field_is_documented() -> None:
    page = (ROOT / "docs/quickstart.md").read_text()
    for state in MemberState:
        assert f"| `{state.value}` |" in page
    member = Member(index=0, output="/o")
    values: dict[str, object] = {
        f.name: 0 for f in dataclasses.fields(Sweep) if f.default is dataclasses.MISSING and f.name != "members"
    }
    sweep = Sweep(members=(member,), **values)  # type: ignore[arg-type]
    document = to_json(SweepView(sweep=sweep, directory="/d", members=[MemberView(member=member)]))
    names = [*document, *document["jap_run"], *document["members"][0]]
    for name in names:
        assert f"`{name}`" in page, name
