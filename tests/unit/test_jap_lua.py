"""etc/jap.lua under plain Lua: it must judge as the Python side does, and leave alone what it does not coalesce.

The real slurmctld runs it in tests/slurm/test_plugin.py; here are the many cases. Each test sends all its cases to
one interpreter process. Slurm links Lua 5.1 on Debian, 5.3 or 5.4 elsewhere: every one that is installed is tried.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slurm_jap import array_spec, carried, coalesce, conf, filename_pattern, jap_options, resources, sbatch_options
from slurm_jap.errors import UsageError

REPOSITORY = Path(__file__).resolve().parents[2]
JAP_LUA = REPOSITORY / "etc" / "jap.lua"
DRIVER = Path(__file__).with_name("jap_lua_driver.lua")
INTERPRETERS = [name for name in ("lua5.1", "lua5.3", "lua5.4", "luajit") if shutil.which(name)]

PYTHON = "/opt/jap/bin/python"
CONF = f"""
Python={PYTHON}
Partition=gpu MaxTime=2-0 NodeCPUs=64 NodeMemory=256G NodeGPUs=4
Partition=small MaxTime=60
"""
NO_VAL, INFINITE = 4294967294, 4294967295
PARTS = {
    "gpu": {"total_nodes": 8, "total_cpus": 512, "max_time": 10080, "default_time": 60, "max_nodes": INFINITE},
    "small": {"total_nodes": 2, "total_cpus": 32, "max_time": INFINITE, "default_time": NO_VAL, "flag_default": 1},
    "plain": {"total_nodes": 2, "total_cpus": 32, "max_time": INFINITE, "default_time": 60},
}
SCRIPT = "#!/bin/bash\n#SBATCH --ntasks=1\n#JAP\npython train.py\n"


@dataclasses.dataclass(frozen=True)
class Answer:
    ok: bool
    answer: Any
    logged: list[str]

    @property
    def said(self) -> list[str]:
        """What the user reads."""
        return [line.removeprefix("user: ") for line in self.logged if line.startswith("user: ")]


Lua = Callable[[Sequence[dict[str, Any]]], list[Answer]]


def literal(value: Any) -> str:
    """A value as Lua source. Text becomes UTF-8, surrogate escapes become the bytes they stand for."""
    if value is None:
        return "nil"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogateescape")
    if isinstance(value, bytes):
        return '"' + "".join(f"\\{byte:03d}" for byte in value) + '"'
    if isinstance(value, dict):
        return "{" + ",".join(f"[{literal(k)}]={literal(v)}" for k, v in value.items() if v is not None) + "}"
    return "{" + ",".join(map(literal, value)) + "}"


@pytest.fixture(scope="module", params=INTERPRETERS or [None])
def lua(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lua:
    """Run cases of jap_lua_driver.lua."""
    if request.param is None:
        reason = "no Lua interpreter: install lua5.1 to try etc/jap.lua without a cluster"
        (pytest.fail if os.environ.get("CI", "").lower() == "true" else pytest.skip)(reason)
    folder = tmp_path_factory.mktemp("lua")
    (folder / "jap.conf").write_text(CONF)

    def run(cases: Sequence[dict[str, Any]]) -> list[Answer]:
        path = folder / "cases.lua"
        rows = [literal({"conf_path": str(folder / "jap.conf")} | case) for case in cases]
        # One function per case: a Lua 5.1 function holds few constants.
        calls = "".join(f"r[#r+1] = (function() return {row} end)()\n" for row in rows)
        path.write_text(f"local r = {{}}\n{calls}return r\n")
        done = subprocess.run(
            [request.param, DRIVER, JAP_LUA, path], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return [Answer(**row) for row in json.loads(done.stdout)]

    return run


def bytes_of(text: str) -> bytes:
    """A string that the driver printed."""
    return text.encode("latin-1")


# ------------------------------------------------------------------------------------------------------------ jap.conf

ODD_TIMES = [
    "0",
    "00:59",
    "1:00",
    "59:59",
    "1:0:0",
    "1-0",
    "1-",
    "-1",
    "1-2:3:4",
    "1-2:3:4:5",
    "1:2:3:4",
    "1:",
    ":1",
    "::",
    "1-:2",
    "INFINITE",
    "9999999",
    "99999999",
    "999999-9999999",
    "1000000-1",
    "1-1-1",
    "0-0:1",
    "0-0:0:59",
    "5m",
]
ODD_CONFS = [
    CONF, "", "\n", "#", "Python=/a", "Python=/a\nPartition=x MaxTime=1", "Python=/a\r\nPartition=x MaxTime=1\r\n",
    "python=/a\npartition=x maxtime=1 MAXMEMBERS=3", "Python=/a MaxArraySize=5\nPartition=x MaxTime=1 # c\n# MaxTime",
    "Python=/a\nPartition=x MaxTime=1\nPartition=x MaxTime=2",
    "Python=/a\nPartition=x MaxTime=1\nPartition=X MaxTime=2", "Partition=x MaxTime=1",
    "Partition=x MaxTime=1\nPython=a", "Python=/a\nPython=/b", "Python=/a\n\n\nPartition=x",
    "Python=/a\nMaxTime=1 Partition=x", "Python=/a\nPartition=x Python=/b MaxTime=1",
    "Python=/a\nPartition=x MaxTime=1 Partition=y", "Python=/a\nPartition=x MaxTime =1",
    "Python=/a\nPartition=x=y MaxTime=1", "Python=/a=b\nPartition=x MaxTime=1", "=", "=/a", "Python", "Python=",
    'Python="/a"', "Python=/a'b", "Python=/a`b", "Python=/a\\", "Python=/a!b", "Python=/a#b\nPartition=x MaxTime=1",
    "Python=/a\tMaxArraySize=7", "Python=/a\vMaxArraySize=7", "Python=/a\0\nPartition=x MaxTime=1",
    "Python=/a\nPartition=\xe9 MaxTime=1", "# \xe9\0\nPython=/a\nPartition=x MaxTime=1",
    "\ufeffPython=/a\nPartition=x MaxTime=1", "Python=/a\nPartition=x MaxTime=1 NodeMemory=1K",
    "Python=/a\nPartition=x MaxTime=1 NodeMemory=1025k NodeCPUs=01",
    "Python=/a\nPartition=x MaxTime=1 NodeMemory=999999999T",
    "Python=/a\nPartition=x MaxTime=1 NodeMemory=1000000000", "Python=/a\nPartition=x MaxTime=1 NodeGPUs=4000002",
    "Python=/a\nPartition=x MaxTime=1 NodeGPUs=0x4", "Python=/a\nPartition=x MaxTime=1 NodeGPUs=+4",
    "Python=/a\nPartition=x MaxTime=1 NodeGPUs=4.0", "Python=/a\nPartition=x MaxTime=1 NodeGPUs=4e0",
    "Python=/a\nPartition=" + "x" * 64 + " MaxTime=1", "Python=/a\nPartition=" + "x" * 65 + " MaxTime=1",
    "Python=/a\n" + "#" * conf.MAX_BYTES,
    *(f"Python=/a\nPartition=x MaxTime={time}" for time in ODD_TIMES),
]  # fmt: skip


def random_confs(count: int) -> list[str]:
    source = random.Random(7)
    words = [
        "Python=/a", "Partition=x", "Partition=y", "MaxTime=1-0", "MaxTime=0", "MaxMembers=3", "NodeCPUs=x", "#",
        "\t", "\r", "MaxArraySize=9", "NodeMemory=2g", "foo=1", "foo", "Python=b", " ", "defmempercpu=7",
    ]  # fmt: skip

    def line() -> str:
        return " ".join(source.choices(words, k=source.randrange(4)))

    return ["\n".join(line() for _ in range(source.randrange(1, 5))) for _ in range(count)]


def test_conf_agrees_with_the_checker(lua: Lua) -> None:
    texts = ODD_CONFS + random_confs(400)
    verdicts = set()
    for text, got in zip(texts, lua([{"run": "parse_conf", "text": text} for text in texts]), strict=True):
        problems = conf.check_text(text)
        verdicts.add(bool(problems))
        parsed = got.answer[0]
        if problems:
            assert parsed is None, text
            assert got.answer[1] == problems[0].line, text
            continue
        assert parsed is not None, (text, got.answer)
        expected = conf.parse(text)
        assert parsed.get("python") == expected.python
        assert parsed["max_array_size"] == expected.max_array_size
        assert parsed.get("default_memory_per_cpu_mb") == expected.default_memory_per_cpu_mb
        partitions = {
            name: {key: value for key, value in dataclasses.asdict(p).items() if value is not None}
            for name, p in expected.partitions.items()
        }
        assert (parsed["partitions"] or {}) == partitions, text
    assert verdicts == {True, False}


# -------------------------------------------------------------------------------------------------------------- arrays

ODD_SPECS = [
    "0-7", "1-10:2%3", "0-3,2-5", "3", "", ",", "3-1", "5:2", "1-", "-", "0-", "a", "0-3:0", "0-3:1000", "0-3:1001",
    "0-1000", "0-1001", "1000", "1001", "0-7%0", "0-7%", "%3", "0-7%x", "0-7%3%4", "0-3%2,5", "0-3,5%2", "[0-7]",
    "[0-7:2]", "[0,3]", "[1-3]%2", " 1-3", "1 -3", "+1-+3", "-1", "1--3", "0-7:2,1-7:3", "1,1,1", "0-3]", "]", "[",
    "0-3%-1", "0-3%+2", "0-3% 2", "9" * 30, "0-" + "9" * 30, "1-3,,5", "1-3,", "0x3", "1e2", "1.5", "0-3:2:2",
    "0-3:2%2:2", "%a", "%s%n", "1-3\n", "\t1", "0-7%4294967298", ",".join(["1"] * 3000),
]  # fmt: skip


def test_array_specifications_agree_with_array_spec(lua: Lua) -> None:
    source = random.Random(3)
    specs = ODD_SPECS + ["".join(source.choices("0123-:,%[]+ 9", k=source.randrange(1, 9))) for _ in range(800)]
    cases = [{"run": "members", "spec": spec, "max_size": 1001, "limit": 5000} for spec in specs]
    good = 0
    for spec, got in zip(specs, lua(cases), strict=True):
        try:
            expected = array_spec.parse(spec)
        except UsageError:
            expected = None
        if expected is None or not expected.indices:
            assert got.answer in ([], [None]), spec
        else:
            good += 1
            count, throttle = (*got.answer, None)[:2]
            assert (count, throttle) == (len(expected), expected.throttle), spec
    assert good > 100


def test_counting_stops_beyond_the_limit(lua: Lua) -> None:
    spec = ",".join(["0-4000000"] * 100)
    (got,) = lua([{"run": "members", "spec": spec, "max_size": 4000001, "limit": 64}])
    assert got.answer[0] == 65


# ---------------------------------------------------------------------------------------------------------------- #JAP

BODIES = [
    "", "#JAP", "#JAP\n", "#JAP\r\n", "#JAPAN is nice\n", "#JAP-CARRIED x\n", " #JAP\n", "##JAP\n", "# JAP\n",
    "#jap\n", "#JAP--stages=2\n", "#JAP --stages=4\n", "#JAP --stages 4\n", "#JAP --stages=4 --groups=2\n",
    "#JAP --stages\n", "#JAP --stages=\n", "#JAP --stages=0\n", "#JAP --stages=x\n", "#JAP --stages=1.5\n",
    "#JAP --stages=-1\n", "#JAP --stage=4\n", "#JAP stages=4\n", "#JAP 4\n", "#JAP -s 4\n", "#JAP --shared-job-id\n",
    "#JAP --shared-job-id=1\n", "#JAP --shared-job-id yes\n", "#JAP --member-mem=2G --member-cpus=3\n",
    "#JAP --memory-per-device=40G\n", "#JAP --memory-per-device=0\n", "#JAP --memory-per-device\n",
    "#JAP --member-mem=2GB\n", "#JAP --member-mem=1025K\n", "#JAP --member-mem=0\n", "#JAP --member-mem=2P\n",
    "#JAP --member-mem ' 2g '\n", "#JAP --stages=2\n#JAP --stages=3\n", "#JAP --stages\n#JAP 3\n",
    "#JAP --stages --groups=2\n", "#JAP --stages=2 # four would do\n", "#JAP --stages=2#3\n", "#JAP '--stages=2'\n",
    '#JAP --"stages"=2\n', "#JAP '--stages=2\n", "#JAP --stages=\\2\n", "#JAP --stages\\ 2\n", "#JAP --stages=2\\\n",
    "#JAP : x\n", "#JAP hetjob\n", "#JAP --=3\n", "#JAP \\# --stages=2\n", "#JAP ''\n", "#JAP '' --stages=2\n",
    "\n\n#JAP\n", "# hello\n   # there\n#JAP\n", "echo\n#JAP\n", "  echo\n#JAP\n", ":\n#JAP --x\n",
    "cat <<E\n#JAP --stages=2\nE\n", "\x0c\n#JAP\n", "#JAP\x0b--stages=2\n", "#SBATCH --x\n#JAP\n",
    "#JAP --stages=2\necho\n#JAP --y\n", "#JAP --stages=999999999\n", "#JAP --stages=1000000000\n",
    "#JAP --stages=007\n", "#JAP %s %d --stages=2\n", "#JAP --stages=%d\n", "#JAP --st\udce9ges=2\n", "#JAP \u0663\n",
    "#JAP --stages=\u0663\n",
]  # fmt: skip


def test_jap_lines_agree_with_sbatch_options(lua: Lua) -> None:
    source = random.Random(11)
    pieces = [
        "#JAP",
        "#JAP ",
        " ",
        "--stages",
        "=",
        "2",
        "--groups=3",
        "\n",
        "'",
        '"',
        "\\",
        "#",
        "echo",
        "--member-mem=1G",
        "x",
    ]
    texts = BODIES + ["".join(source.choices(pieces, k=source.randrange(1, 9))) for _ in range(800)]
    scripts = ["#!/bin/bash\n" + text for text in texts]
    verdicts = set()
    for script, got in zip(scripts, lua([{"run": "directives", "script": script} for script in scripts]), strict=True):
        found, fault = (*got.answer, None, None)[:2]
        try:
            expected = sbatch_options.jap_lines(script.encode("utf-8", "surrogateescape"))
        except (UsageError, sbatch_options.NotUnderstood):
            assert fault, script
            verdicts.add("fault")
            continue
        assert fault is None, (script, fault)
        if expected is None:
            assert found is None, script
            verdicts.add("no")
            continue
        verdicts.add("yes")
        said = {name.replace("_", "-"): v for name, v in dataclasses.asdict(expected).items() if v is not None}
        assert {name.removeprefix("--"): value for name, value in (found or {}).items()} == said, script
    assert verdicts == {"fault", "no", "yes"}


# ------------------------------------------------------------------------------------------------- patterns and script

PATTERNS = [
    "", "slurm-%A_%a.out", "%j", "%j_%a", "%4j", "%04a-%j", "%%j", "%%%j", "%", "%5", "%5%j", "a\\%j", "none", "NONE",
    "%J", "%x/%j.out", "/tmp/%%a%j", "%12345a%j", "/a/b/c.out", "/a/%A/c.out", "/a/b%A/c.out", "c.out", "logs/c.out",
    "/c.out", "/%j", "/dev/null", "/dev/shm/%a", "//x/%a", "logs/%%/x", "%1%2a", "% a", "%\udce9a",
]  # fmt: skip


@pytest.mark.parametrize("letters", ["a", "jJ"])
def test_patterns_agree_with_filename_pattern(lua: Lua, letters: str) -> None:
    source = random.Random(5)
    patterns = PATTERNS + ["".join(source.choices("%%%aj4x/\\", k=source.randrange(1, 8))) for _ in range(500)]
    cases = [{"run": "pattern_uses", "pattern": pattern, "letters": letters} for pattern in patterns if pattern]
    for case, got in zip(cases, lua(cases), strict=True):
        assert got.answer == [bool(filename_pattern.letters_in(case["pattern"]) & set(letters))], case["pattern"]


def test_own_output_lies_where_the_members_files_lie(lua: Lua) -> None:
    work_dirs = ["/home/a b", "/home/100%j", "/"]
    cases = [
        {"run": "own_output", "pattern": pattern or None, "work_dir": folder}
        for pattern in PATTERNS
        for folder in work_dirs
    ]
    for case, got in zip(cases, lua(cases), strict=True):
        (name,) = got.answer
        assert name.startswith("/")
        # As Slurm will expand it:
        path = filename_pattern.expand(
            name, job_id=7, array_job_id=7, index=0, job_name="x", user="u", node="n", slurm=(22, 5)
        )
        folder = filename_pattern.fixed_folder(case["pattern"] or "")
        assert os.path.normpath(path) == os.path.normpath(os.path.join(case["work_dir"], folder, "jap-7.out")), case


def test_own_output_is_relative_in_a_folder_with_a_backslash(lua: Lua) -> None:
    (got,) = lua([{"run": "own_output", "pattern": None, "work_dir": "/home/a\\b"}])
    assert got.answer == ["jap-%j.out"]


TEXTS = [
    "echo $SLURM_JOB_ID", "echo ${SLURM_JOBID}", "# SLURM_JOB_ID", "  # SLURM_JOB_ID", "echo # SLURM_JOB_ID",
    "SLURM_ARRAY_JOB_ID", "MY_SLURM_JOB_ID", "SLURM_JOB_IDS", "SLURM_JOB_NAME", "SLURM_JOB_", "xSLURM_JOBID",
    "\n\nSLURM_JOBID", "SLURM_JOB_ID", "'SLURM_JOB_ID'", "\x0b#SLURM_JOB_ID", "a\r\n#b SLURM_JOBID\r\n",
    "-SLURM_JOBID-", "", "SLURM_JOB__ID", "slurm_job_id", "\udce9SLURM_JOB_ID",
]  # fmt: skip


def test_use_of_the_job_id_is_seen_as_coalesce_sees_it(lua: Lua) -> None:
    for text, got in zip(TEXTS, lua([{"run": "uses_job_id", "script": text} for text in TEXTS]), strict=True):
        expected = coalesce.why_ids_collide({}, text.encode("utf-8", "surrogateescape"), (22, 5)) is not None
        assert got.answer == [expected], text


def test_the_carried_script_is_what_carried_builds(lua: Lua) -> None:
    full = carried.Carried(
        array="0-7%2", output="/a b/%A_%a.out", error="/e%%", input="in.%a", open_mode="append",
        script_name="it's a \"t\".sh", stages=4, groups=2,
        member_cpus=8, member_mem_mb=2**31, member_time_min=30, memory_per_device_mb=40960,
        gres="gpu:a100:4", at_once=3,
    )  # fmt: skip
    texts = [
        b"#!/bin/bash\n#JAP\n",
        b"no newline at the end",
        b"#JAP-USER-SCRIPT\nEOF\n'\"`$(x)\\\n",
        b"\xff\xfe\x80%s%n\r\n",
        b"",
    ]
    for facts in (full, carried.Carried(array="%a")):
        cases = [
            {"run": "carry", "python": PYTHON, "facts": dataclasses.asdict(facts), "script": text} for text in texts
        ]
        for text, got in zip(texts, lua(cases), strict=True):
            assert bytes_of(got.answer[0]) == carried.build(PYTHON, facts, text)


# -------------------------------------------------------------------------------------------------------------- sizing


def descriptor(options: dict[str, str], prefix: str = "gres:") -> dict[str, Any]:
    """The fields of a job descriptor as sbatch 22.05 fills them (tests/slurm/test_plugin.py asks the real one)."""
    fields: dict[str, Any] = {}
    nodes = int(options["nodes"]) if "nodes" in options else None
    if nodes:
        fields |= {"min_nodes": nodes, "max_nodes": nodes}
    tasks = int(options["ntasks"]) if "ntasks" in options else None
    if tasks:
        fields["num_tasks"] = tasks
    if "ntasks-per-node" in options:
        fields["ntasks_per_node"] = int(options["ntasks-per-node"])
        tasks = tasks or (nodes or 1) * fields["ntasks_per_node"]
    if "cpus-per-task" in options:
        fields |= {"cpus_per_task": int(options["cpus-per-task"]), "pn_min_cpus": int(options["cpus-per-task"])}
    if "mincpus" in options:
        fields["pn_min_cpus"] = max(int(options["mincpus"]), fields.get("pn_min_cpus", 0))
    fields["min_cpus"] = max(tasks or 0, nodes or 1) * fields.get("cpus_per_task", 1)
    for name, field in (("gpus", "job"), ("gpus-per-node", "node"), ("gpus-per-task", "task")):
        if name in options:
            fields[f"tres_per_{field}"] = f"{prefix}gpu:{options[name]}"
    if "gres" in options:
        fields["tres_per_node"] = ",".join(prefix + part for part in options["gres"].split(","))
    for name, field in (("cpus-per-gpu", "cpus_per_tres"), ("mem-per-gpu", "mem_per_tres")):
        if name in options:
            fields[field] = f"{prefix}gpu:{options[name]}"
    if "mem" in options:
        fields["min_mem_per_node"] = int(options["mem"])
    if "mem-per-cpu" in options:
        fields["min_mem_per_cpu"] = int(options["mem-per-cpu"])
    if "time" in options:
        fields["time_limit"] = INFINITE if options["time"] == "UNLIMITED" else int(options["time"])
    return fields


SIZES: list[dict[str, str]] = [
    {},
    {"time": "90"},
    {"time": "UNLIMITED"},
    {"cpus-per-task": "8", "mem": "4000", "gres": "gpu:4"},
    {"cpus-per-task": "48", "gres": "gpu:2"},
    {"gres": "gpu:a100:2", "mem": "60000"},
    {"gres": "gpu", "mem": "0"},
    {"gres": "gpu:1g.5gb:2"},
    {"gres": "gpu:0"},
    {"gres": "gpu:a:1,gpu:b:1"},
    {"gres": "gpu:a:1,gpu:a:3"},
    {"gres": "gpu:1,shard:3"},
    {"gres": "nvme:1"},
    {"gpus": "8", "nodes": "2", "ntasks": "2"},
    {"gpus": "6"},
    {"gpus": "1"},
    {"gpus": "4", "gpus-per-node": "4"},
    {"gpus": "8", "gpus-per-node": "4"},
    {"gpus": "v100:4", "cpus-per-gpu": "6", "mem-per-gpu": "8000"},
    {"gpus-per-node": "4", "nodes": "2"},
    {"gpus-per-task": "1", "ntasks": "4", "mem-per-cpu": "1000"},
    {"gpus-per-task": "1", "ntasks-per-node": "4", "nodes": "2", "cpus-per-task": "3"},
    {"ntasks": "5", "mem-per-cpu": "500"},
    {"ntasks": "4", "nodes": "2", "mem": "1000"},
    {"ntasks": "3", "nodes": "2", "mem": "1001"},
    {"mincpus": "6", "nodes": "2"},
    {"mem": "200000"},
    {"mem": "130000"},
    {"nodes": "8", "gres": "gpu:4"},
    {"nodes": "9"},
    {"cpus-per-task": "64"},
    {"cpus-per-task": "65"},
]
ASKED = [
    "", "--stages=2", "--stages=4 --groups=2", "--groups=3", "--stages=16", "--stages=64",
    "--member-mem=500 --member-cpus=2", "--memory-per-device=2G", "--member-cpus=40", "--member-mem=300G",
]  # fmt: skip
ARRAYS = ["0-7", "0-7%3", "5", "0-46"]
NODE = resources.NodeClass(count=8, cpus=64, memory_mb=256 * 1024)
LIMITS = resources.Limits(partition="gpu", max_time_min=2880, default_time_min=60, max_nodes=8)


@pytest.mark.parametrize("prefix", ["gres:", "gres/"], ids=["22.05", "23.11"])
def test_sizes_agree_with_resources(lua: Lua, prefix: str) -> None:
    arrays = ARRAYS if prefix == "gres:" else ARRAYS[1:2]
    table = [(options, asked, array) for options in SIZES for asked in ASKED for array in arrays]
    cases = []
    for options, asked, array in table:
        fields = {"array_inx": array, "script": f"#!/bin/sh\n#JAP {asked}\n:\n", "partition": "gpu", "work_dir": "/w"}
        cases.append({"run": "submit", "parts": PARTS, "fields": fields | descriptor(options, prefix)})
    verdicts = []
    for (options, asked, array), got in zip(table, lua(cases), strict=True):
        case = (options, asked, array, got.logged)
        assert got.ok, case
        spec = array_spec.parse(array)
        wishes = jap_options.parse([(word, "") for word in asked.split()])
        fields = got.answer["fields"]
        verdicts.append("admin_comment" in fields)
        try:
            member = resources.member_request(options)
            kinds = {member.gpu_type: 4}  # jap.conf says how many GPUs a node has, not which
            here = dataclasses.replace(LIMITS, node_classes=(dataclasses.replace(NODE, gpus=kinds),))
            expected = resources.plan(member, wishes, len(spec), here, throttle=spec.throttle)
        except resources.Unclear:
            assert not verdicts[-1], case
            assert got.said[-1].startswith("jap: plain array: "), case
            continue
        assert verdicts[-1], case
        facts, _ = carried.parse(bytes_of(fields["script"]))
        assert facts == carried.Carried(
            array=array,
            stages=expected.stages,
            groups=expected.groups,
            member_cpus=expected.member_cpus,
            member_mem_mb=expected.member_memory_mb,
            member_time_min=expected.member_time_min,
            memory_per_device_mb=wishes.memory_per_device,
            gres=expected.gres,
            at_once=expected.at_once,
        ), case
        assert fields["min_nodes"] == fields["max_nodes"] == fields["num_tasks"] == expected.nodes, case
        assert fields["ntasks_per_node"] == 1
        assert fields["cpus_per_task"] == fields["pn_min_cpus"] == expected.cpus_per_node, case
        assert fields["min_cpus"] == expected.nodes * expected.cpus_per_node
        assert fields.get("tres_per_node", "") == ("gres:" + expected.gres if expected.gres else ""), case
        assert not {"tres_per_job", "tres_per_task", "cpus_per_tres", "mem_per_tres"} & fields.keys(), case
        assert fields.get("min_mem_per_node") == expected.memory_per_node_mb, case
        assert fields["time_limit"] == (expected.time_min or NO_VAL), case
        assert fields.get("array_inx") is None
    assert {True, False} == set(verdicts)


# ------------------------------------------------------------------------------------------------- the hook as a whole


def job(**fields: Any) -> dict[str, Any]:
    """A case: an array of an opted-in script in an enabled partition, with some fields changed (None: taken away)."""
    usual = {
        "array_inx": "0-7", "script": SCRIPT, "partition": "gpu", "work_dir": "/home/a", "min_cpus": 1,
        "time_limit": 30, "std_in": "/dev/null", "argv": {0: "/home/a/t.sh", 1: "x"}, "name": "t.sh",
    }  # fmt: skip
    return {"run": "submit", "parts": PARTS, "fields": {k: v for k, v in (usual | fields).items() if v is not None}}


def reason(got: Answer) -> str:
    """Why the array stays plain, having checked that nothing was written."""
    assert got.ok, got
    assert got.answer["writes"] == []
    assert got.answer["returned"] == []
    assert len(got.said) <= 1
    return got.said[0].removeprefix("jap: plain array: ") if got.said else ""


NOT_OURS = {
    "no array": job(array_inx=None),
    "no script": job(script=None),
    "no #JAP line": job(script="#!/bin/sh\necho '#JAP'\n"),
    "#JAP after a command": job(script="#!/bin/sh\n:\n#JAP\n"),
    "JAP=0": job() | {"environment": {"JAP": "0"}},
    "a specification that Slurm refuses": job(array_inx="3-1"),
    "an index that Slurm refuses": job(array_inx="0-1001"),
    "no jap.conf": job() | {"conf_path": "/nonexistent/jap.conf"},
    "a folder for jap.conf": job() | {"conf_path": "/"},
    "a device for jap.conf": job() | {"conf_path": "/dev/null"},
}


@pytest.mark.parametrize("name", NOT_OURS)
def test_what_is_not_ours_passes_without_a_word(lua: Lua, name: str) -> None:
    (got,) = lua([NOT_OURS[name]])
    assert reason(got) == ""
    assert got.logged == []


PLAIN: dict[str, tuple[dict[str, Any], str]] = {
    "het job": (job(het_job_offset=0), "heterogeneous"),
    "two partitions": (job(partition="gpu,small"), "several partitions"),
    "two clusters": (job(clusters="a,b"), "several clusters"),
    "other partition": (job(partition="plain"), "'plain' is not enabled for coalescing (enabled: gpu, small)"),
    "unknown partition": (job(partition="gone"), "'gone' is not enabled"),
    "partition that the user may not use": (job() | {"parts": {}}, "'gpu' is not enabled"),
    "no default partition": (job(partition=None) | {"parts": {"gpu": PARTS["gpu"]}}, "'' is not enabled"),
    "unknown key": (job(script="#!/bin/sh\n#JAP --stage=2\n"), "unknown #JAP key '--stage=2' (the keys are --stages,"),
    "bad value": (job(script="#!/bin/sh\n#JAP --stages=0\n"), "#JAP --stages=0 is no value for it"),
    "open quote": (job(script="#!/bin/sh\n#JAP --stages='2\n"), "unmatched '"),
    "too many": (job(array_inx="0-64"), "more than the 64 members that may be coalesced"),
    "aftercorr": (job(dependency="afterok:3,aftercorr:7"), "aftercorr"),
    "time-min": (job(time_min=10), "--time-min"),
    "exclusive": (job(shared=0), "--exclusive"),
    "exclusive user": (job(shared=2), "--exclusive"),
    "container": (job(container="/bundle"), "container"),
    "burst buffer": (job(burst_buffer="#BB x"), "burst buffer"),
    "%j": (job(std_out="/home/a/%j.out"), "'/home/a/%j.out' has %j without %a"),
    "%j in -e": (job(std_out="/home/a/%A_%a", std_err="/home/a/%4j"), "has %j without %a"),
    "job id": (job(script="#!/bin/sh\n#JAP\nmkdir $SLURM_JOB_ID\n"), "its script uses SLURM_JOB_ID"),
    "MaxTime": (job(time_limit=361), "8 x 06:01:00 (members of a group one after the other) exceed the 2-00:00:00"),
    "partition's MaxTime": (job() | {"parts": {"gpu": PARTS["gpu"] | {"max_time": 239}}}, "exceed the 03:59:00"),
    "no time limit": (job(time_limit=INFINITE), "no time limit is asked for"),
    "no time at all": (job(partition="small", time_limit=NO_VAL), "no --time is given"),
    "node range": (job(min_nodes=1, max_nodes=2), "a range of nodes"),
    "per socket": (job(tres_per_socket="gres:gpu:1"), "--gpus-per-socket"),
    "tasks per GPU": (job(ntasks_per_tres=1, num_tasks=2, tres_per_job="gres:gpu:2"), "--ntasks-per-gpu"),
    "memory of a node unknown": (job(partition="small", min_mem_per_node=100, time_limit=1), "NodeMemory="),
    "GPUs of a node unknown": (job(partition="small", tres_per_job="gres:gpu:4", time_limit=1), "NodeGPUs="),
    "more GPUs on a node than a member's": (
        job(partition="small", tres_per_node="gres:gpu:2", time_limit=1, script="#!/bin/sh\n#JAP --groups=2\n"),
        "NodeGPUs=",
    ),
    "line break in a value": (job(std_out="/home/a\nb/%a"), "the value of output holds a line break"),
    "line break in the script's name": (job(argv={0: "/home/a\r.sh"}), "the value of script_name holds a line break"),
    "all comments": (job(script="#!/bin/sh\n#JAP\n" + "# x\n" * 20000), "more than 65536 bytes of comments"),
    "large script": (job(script=SCRIPT + "#" * (1 << 20)), "the script is larger than 1048576 bytes"),
}  # fmt: skip


def test_what_is_not_understood_stays_plain_with_one_line(lua: Lua) -> None:
    for (name, (_, says)), got in zip(PLAIN.items(), lua([case for case, _ in PLAIN.values()]), strict=True):
        assert says in reason(got), name
        assert "\n" not in got.said[0]
        assert [line for line in got.logged if line.startswith("error")] == [], name


def test_the_default_partition_is_found(lua: Lua) -> None:
    (got,) = lua([job(partition=None, time_limit=7)])
    assert got.answer["fields"]["time_limit"] == 56
    assert got.answer["fields"].get("partition") is None


def test_shared_job_id_lets_it_through(lua: Lua) -> None:
    (got,) = lua([job(std_out="/home/a/%j", script="#!/bin/sh\n#JAP --shared-job-id\nmkdir $SLURM_JOB_ID\n")])
    assert got.said[0].startswith("jap: 8 members in one job: ")


def test_partition_memory_defaults_limit_members(lua: Lua) -> None:
    (got,) = lua([job(cpus_per_task=2) | {"parts": {"gpu": PARTS["gpu"] | {"def_mem_per_cpu": 1000}}}])
    facts, _ = carried.parse(bytes_of(got.answer["fields"]["script"]))
    assert facts.member_mem_mb == 2000
    assert got.answer["fields"]["min_mem_per_node"] == 2000 * 9


def test_a_partitions_largest_memory_is_respected(lua: Lua) -> None:
    asked = {"min_mem_per_node": 10000}
    limits = [{}, {"max_mem_per_node": 30000}, {"max_mem_per_cpu": 500}]
    got = lua([job(**asked) | {"parts": {"gpu": PARTS["gpu"] | limit}} for limit in limits])
    assert [answer.answer["fields"]["min_mem_per_node"] for answer in got] == [90000, 30000, 30000]


def test_hints_about_threads_are_no_obstacle(lua: Lua) -> None:
    hinted, said = lua(
        [job(threads_per_core=1) | {"environment": {"SLURM_HINT": "nomultithread"}}, job(threads_per_core=1)]
    )
    assert hinted.answer["fields"].get("array_inx") is None
    assert reason(said).startswith("--threads-per-core")


def test_tasks_per_node_say_how_many_nodes(lua: Lua) -> None:
    (got,) = lua([job(num_tasks=8, ntasks_per_node=4, tres_per_node="gres:gpu:4")])
    assert got.answer["fields"]["min_nodes"] == got.answer["fields"]["max_nodes"] == 2


def test_gpus_per_task_binds_by_itself_from_24_11_on(lua: Lua) -> None:
    asked = {"num_tasks": 4, "tres_per_task": "cpu=2,gres/gpu:a100=1", "cpus_per_task": 2, "pn_min_cpus": 2}
    bindings = ["gres/gpu:per_task:1", "gres/gpu:a100:per_task:1", "gres/gpu:closest", "gres/gpu:single:1"]
    for binding, got in zip(bindings, lua([job(**asked, tres_bind=binding) for binding in bindings]), strict=True):
        if "per_task" not in binding:
            assert reason(got).startswith("--gpu-bind says nothing certain")
            continue
        fields = got.answer["fields"]
        assert fields["tres_per_node"] == "gres:gpu:a100:4"
        assert fields.get("tres_bind") is None
        assert fields.get("tres_per_task") is None


def test_an_administrators_comment_is_kept(lua: Lua) -> None:
    (got,) = lua([job(admin_comment="from the site's own rules")])
    comment = got.answer["fields"]["admin_comment"]
    assert comment == "jap:v1 array=0-7 members=8 stages=1 groups=1; from the site's own rules"


def test_hostile_text_is_carried_and_shown_as_it_is(lua: Lua) -> None:
    odd = '/home/a 0/a"=0"/a\'; echo foo/$(touch x)/`y`/%%s%n%1/\udcff/%x_%A_%a.out'
    script = "#!/bin/bash\n#JAP\n%s %d %n\n#JAP-USER-SCRIPT\n#JAP-CARRIED array=9\n\udcff'\"\\"
    (got,) = lua([job(array_inx="1,3%2", std_out=odd, script=script, argv={0: "/home/a b/%s'\".sh"}, name="%s%s%s")])
    assert got.said[0].startswith("jap: 2 members in one job")
    built = bytes_of(got.answer["fields"]["script"])
    head, _, user = built.partition(carried.MARKER)
    assert user == script.encode("utf-8", "surrogateescape")
    assert b"#JAP-CARRIED output=" + odd.encode("utf-8", "surrogateescape") + b"\n" in head
    assert b"#JAP-CARRIED script_name=/home/a b/%s'\".sh\n" in head
    assert head.startswith(b"#!/bin/bash\n")


def test_text_in_messages_is_one_printable_line(lua: Lua) -> None:
    (got,) = lua([job(partition="a\n\x1b[31m%s" + "x" * 999)])
    assert reason(got).startswith("partition 'a??[31m%sx")
    assert len(got.said[0]) < 400


WRITES = [
    "min_nodes",
    "cpus_per_task",
    "gres",
    "time_limit",
    "std_out",
    "admin_comment",
    "script",
    "array_inx",
    "min_mem_per_node",
]


@pytest.mark.parametrize("field", WRITES)
def test_an_edit_that_fails_leaves_the_job_as_it_was(lua: Lua, field: str) -> None:
    case = job(
        tres_per_job="gres/gpu:4", min_mem_per_node=1000, std_err="/e_%a", cpus_per_task=2, tres_per_task="cpu=2"
    )
    untouched, failed = lua([case | {"environment": {"JAP": "0"}}, case | {"fail_at": field}])
    assert field in failed.answer["writes"]
    assert failed.answer["fields"] == untouched.answer["fields"]
    assert failed.logged[0].startswith("error: jap: internal error, the job stays as it was: ")
    assert failed.said == ["jap: plain array: an internal error, see slurmctld's log"]


def test_a_faulty_jap_conf_is_logged_once_and_everything_stays_plain(lua: Lua, tmp_path: Path) -> None:
    faulty = tmp_path / "jap.conf"
    faulty.write_text(CONF + "Partitoin=x MaxTime=5\n")
    case = job() | {"conf_path": str(faulty), "times": 2}
    (got,) = lua([case])
    assert got.answer["writes"] == []
    errors = [line for line in got.logged if line.startswith("error")]
    assert len(errors) == 1
    assert f"jap: {faulty}:5: unknown key 'Partitoin'" in errors[0]
    assert got.said == ["jap: plain array: this site's jap.conf has a fault, tell the administrator"] * 2


def test_conf_changes_are_seen_without_a_restart(lua: Lua, tmp_path: Path) -> None:
    path = tmp_path / "jap.conf"
    path.write_text("# off\n")
    case = job() | {"conf_path": str(path), "times": 2, "then_write": {"path": str(path), "text": CONF}}
    (got,) = lua([case])
    assert got.said[0].startswith("jap: 8 members in one job")
    assert len(got.said) == 1


class TestExampleJobSubmit:
    """etc/job_submit.lua with a good, a missing and a broken jap.lua beside it."""

    def run(self, lua_name: str, folder: Path) -> tuple[str, list[str]]:
        (folder / "try.lua").write_text(
            "logged = {}\n"
            "local function log(...) logged[#logged + 1] = string.format(...) end\n"
            "slurm = { SUCCESS = 0, ERROR = -1, log_error = log, log_user = log, log_info = log }\n"
            f"assert(dofile({literal(str(folder / 'job_submit.lua'))}) == 0)\n"
            "local jd = { array_inx = '0-3', script = '#!/bin/sh\\n#JAP\\n', environment = {}, partition = 'gpu' }\n"
            "assert(slurm_job_submit(jd, {}, 0) == 0)\n"
            "assert(slurm_job_modify(jd, {}, {}, 0) == 0)\n"
            "print(jd.array_inx)\nprint(table.concat(logged, '\\n'))\n"
        )
        done = subprocess.run([lua_name, folder / "try.lua"], capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
        array, *lines = done.stdout.splitlines()
        return array, [line for line in lines if line]

    @pytest.fixture(params=INTERPRETERS or [None])
    def lua_name(self, request: pytest.FixtureRequest) -> str:
        if request.param is None:
            pytest.skip("no Lua interpreter")
        return str(request.param)

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        shutil.copy(REPOSITORY / "etc" / "job_submit.lua", tmp_path)
        (tmp_path / "jap.conf").write_text(CONF)
        return tmp_path

    def test_with_the_module(self, lua_name: str, folder: Path) -> None:
        shutil.copy(JAP_LUA, folder)
        array, lines = self.run(lua_name, folder)
        assert array == "0-3"
        assert len(lines) == 1
        assert lines[0].startswith("jap: plain array: partition 'gpu' is not enabled")

    def test_without_the_module(self, lua_name: str, folder: Path) -> None:
        array, lines = self.run(lua_name, folder)
        assert array == "0-3"
        assert len(lines) == 1
        assert lines[0].startswith("jap: not in use: cannot open")

    @pytest.mark.parametrize("text", ["syntax error here", "error('at load')", "return nil", "return {}", "return 5"])
    def test_with_a_broken_module(self, lua_name: str, folder: Path, text: str) -> None:
        (folder / "jap.lua").write_text(text)
        array, lines = self.run(lua_name, folder)
        assert array == "0-3"
        assert all(line.startswith("jap: not in use: ") for line in lines)


def test_the_module_starts_nothing_and_formats_no_foreign_text() -> None:
    text = JAP_LUA.read_text()
    for word in ("os.execute", "io.popen", "os.remove", "os.rename", "require", "loadstring", "slurm.ERROR"):
        assert word not in text, word
    calls = [line.strip() for line in text.splitlines() if "slurm.log_" in line]
    assert calls
    assert all('("%s", ' in line or "(message, " in line for line in calls), calls
