"""etc/jap.lua under plain Lua interpreters: it must judge as the Python side does, and leave alone what it does not change.

The real slurmctld runs it in tests/slurm/test_plugin.py; here are the many cases. Each test sends all its cases to
one interpreter process. Slurm links Lua 5.1 on Debian, 5.3 or 5.4 elsewhere: every one that is installed is tried.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slurm_jap import array_spec, carried, conf, filename_pattern, jap_options, resources, sbatch_options
from slurm_jap.errors import UsageError

REPOSITORY = Path(__file__).resolve().parents[2]
JAP_LUA = REPOSITORY / "etc" / "jap.lua"
DRIVER = Path(__file__).with_name("jap_lua_driver.lua")
INTERPRETERS = [name for name in ("lua5.1", "lua5.3", "lua5.4", "luajit") if shutil.which(name)]

PYTHON = "/opt/jap/bin/python"
CONF = f"Python={PYTHON}\nPartition=gpu MaxTime=2-0 NodeCPUs=64 NodeMemory=256G NodeGPUs=4\nPartition=small MaxTime=60\n"
PARTS = {
    "gpu": {"total_nodes": 8, "total_cpus": 512, "max_time": 10080, "default_time": 60, "max_nodes": 4294967295},
    "small": {"total_nodes": 2, "total_cpus": 32, "max_time": 4294967295, "default_time": 4294967294, "flag_default": 1},
    "plain": {"total_nodes": 2, "total_cpus": 32, "max_time": 4294967295, "default_time": 60},
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
        path.write_text("local r = {}\n" + "".join(f"r[#r+1] = (function() return {row} end)()\n" for row in rows) + "return r\n")
        done = subprocess.run(
            [request.param, DRIVER, JAP_LUA, path], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return [Answer(**row) for row in json.loads(done.stdout)]

    return run


def bytes_of(text: str) -> bytes:
    """A string that the driver printed."""
    return text.encode("latin-1")


# ------------------------------------------------------------------------------------------------------------- jap.conf

ODD_CONFS = [
    CONF,
    "",
    "\n",
    "#",
    "Python=/a",
    "Python=/a\nPartition=x MaxTime=1",
    "Python=/a\r\nPartition=x MaxTime=1\r\n",
    "python=/a\npartition=x maxtime=1 MAXMEMBERS=3",
    "Python=/a MaxArraySize=5\nPartition=x MaxTime=1 # c\n# MaxTime",
    "Python=/a\nPartition=x MaxTime=1\nPartition=x MaxTime=2",
    "Python=/a\nPartition=x MaxTime=1\nPartition=X MaxTime=2",
    "Partition=x MaxTime=1",
    "Partition=x MaxTime=1\nPython=a",
    "Python=/a\nPython=/b",
    "Python=/a\n\n\nPartition=x",
    "Python=/a\nMaxTime=1 Partition=x",
    "Python=/a\nPartition=x Python=/b MaxTime=1",
    "Python=/a\nPartition=x MaxTime=1 Partition=y",
    "Python=/a\nPartition=x MaxTime =1",
    "Python=/a\nPartition=x=y MaxTime=1",
    "Python=/a=b\nPartition=x MaxTime=1",
    "=",
    "=/a",
    "Python",
    "Python=",
    'Python="/a"',
    "Python=/a'b",
    "Python=/a`b",
    "Python=/a\\",
    "Python=/a!b",
    "Python=/a#b\nPartition=x MaxTime=1",
    "Python=/a\tMaxArraySize=7",
    "Python=/a\vMaxArraySize=7",
    "Python=/a\0\nPartition=x MaxTime=1",
    "Python=/a\nPartition=\xe9 MaxTime=1",
    "# \xe9\0\nPython=/a\nPartition=x MaxTime=1",
    "\ufeffPython=/a\nPartition=x MaxTime=1",
    "Python=/a\nPartition=x MaxTime=1 NodeMemory=1K",
    "Python=/a\nPartition=x MaxTime=1 NodeMemory=1025k NodeCPUs=01",
    "Python=/a\nPartition=x MaxTime=1 NodeMemory=999999999T",
    "Python=/a\nPartition=x MaxTime=1 NodeMemory=1000000000",
    "Python=/a\nPartition=x MaxTime=1 NodeGPUs=4000002",
    "Python=/a\nPartition=x MaxTime=1 NodeGPUs=0x4",
    "Python=/a\nPartition=x MaxTime=1 NodeGPUs=+4",
    "Python=/a\nPartition=x MaxTime=1 NodeGPUs=4.0",
    "Python=/a\nPartition=x MaxTime=1 NodeGPUs=4e0",
    "Python=/a\nPartition=" + "x" * 64 + " MaxTime=1",
    "Python=/a\nPartition=" + "x" * 65 + " MaxTime=1",
    "Python=/a\n" + "#" * conf.MAX_BYTES,
    *(f"Python=/a\nPartition=x MaxTime={t}" for t in
      ("0", "00:59", "1:00", "59:59", "1:0:0", "1-0", "1-", "-1", "1-2:3:4", "1-2:3:4:5", "1:2:3:4", "1:", ":1", "::", "1-:2",
       "INFINITE", "9999999", "99999999", "999999-9999999", "1000000-1", "1-1-1", "0-0:1", "0-0:0:59", "5m")),
]  # fmt: skip


def random_confs(count: int) -> list[str]:
    source = random.Random(7)
    words = ["Python=/a", "Partition=x", "Partition=y", "MaxTime=1-0", "MaxTime=0", "MaxMembers=3", "NodeCPUs=x", "#", "\t", "\r",
             "MaxArraySize=9", "NodeMemory=2g", "foo=1", "foo", "Python=b", " ", "defmempercpu=7"]  # fmt: skip
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


# --------------------------------------------------------------------------------------------------------------- arrays

ODD_SPECS = [
    "0-7", "1-10:2%3", "0-3,2-5", "3", "", ",", "3-1", "5:2", "1-", "-", "0-", "a", "0-3:0", "0-3:1000", "0-3:1001", "0-1000",
    "0-1001", "1000", "1001", "0-7%0", "0-7%", "%3", "0-7%x", "0-7%3%4", "0-3%2,5", "0-3,5%2", "[0-7]", "[0-7:2]", "[0,3]", "[1-3]%2",
    " 1-3", "1 -3", "+1-+3", "-1", "1--3", "0-7:2,1-7:3", "1,1,1", "0-3]", "]", "[", "0-3%-1", "0-3%+2", "0-3% 2", "9" * 30,
    "0-" + "9" * 30, "1-3,,5", "1-3,", "0x3", "1e2", "1.5", "0-3:2:2", "0-3:2%2:2", "%a", "%s%n", "1-3\n", "\t1", "0-7%4294967298",
    ",".join(["1"] * 3000),
]  # fmt: skip


def test_array_specifications_agree_with_array_spec(lua: Lua) -> None:
    source = random.Random(3)
    specs = ODD_SPECS + ["".join(source.choices("0123-:,%[]+ 9", k=source.randrange(1, 9))) for _ in range(1500)]
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


# ----------------------------------------------------------------------------------------------------------------- #JAP

BODIES = [
    "", "#JAP", "#JAP\n", "#JAP\r\n", "#JAPAN is nice\n", "#JAP-CARRIED x\n", " #JAP\n", "##JAP\n", "# JAP\n", "#jap\n",
    "#JAP--stages=2\n", "#JAP --stages=4\n", "#JAP --stages 4\n", "#JAP --stages=4 --groups=2\n", "#JAP --stages\n", "#JAP --stages=\n",
    "#JAP --stages=0\n", "#JAP --stages=x\n", "#JAP --stages=1.5\n", "#JAP --stages=-1\n", "#JAP --stage=4\n", "#JAP stages=4\n",
    "#JAP 4\n", "#JAP -s 4\n", "#JAP --shared-job-id\n", "#JAP --shared-job-id=1\n", "#JAP --shared-job-id yes\n",
    "#JAP --member-mem=2G --member-cpus=3\n", "#JAP --member-mem=2GB\n", "#JAP --member-mem=1025K\n", "#JAP --member-mem=0\n",
    "#JAP --member-mem=2P\n", "#JAP --member-mem ' 2g '\n", "#JAP --stages=2\n#JAP --stages=3\n", "#JAP --stages\n#JAP 3\n",
    "#JAP --stages --groups=2\n", "#JAP --stages=2 # four would do\n", "#JAP --stages=2#3\n", "#JAP '--stages=2'\n", '#JAP --"stages"=2\n',
    "#JAP '--stages=2\n", "#JAP --stages=\\2\n", "#JAP --stages\\ 2\n", "#JAP --stages=2\\\n", "#JAP : x\n", "#JAP hetjob\n", "#JAP --=3\n",
    "#JAP \\# --stages=2\n", "#JAP ''\n", "#JAP '' --stages=2\n", "\n\n#JAP\n", "# hello\n   # there\n#JAP\n", "echo\n#JAP\n", "  echo\n#JAP\n",
    ":\n#JAP --x\n", "cat <<E\n#JAP --stages=2\nE\n", "\x0c\n#JAP\n", "#JAP\x0b--stages=2\n", "#SBATCH --x\n#JAP\n", "#JAP --stages=2\necho\n#JAP --y\n",
    "#JAP --stages=999999999\n", "#JAP --stages=1000000000\n", "#JAP --stages=007\n", "#JAP %s %d --stages=2\n", "#JAP --stages=%d\n",
    "#JAP --st\udce9ges=2\n", "#JAP \u0663\n", "#JAP --stages=\u0663\n",
]  # fmt: skip


def test_jap_lines_agree_with_sbatch_options(lua: Lua) -> None:
    source = random.Random(11)
    pieces = ["#JAP", "#JAP ", " ", "--stages", "=", "2", "--groups=3", "\n", "'", '"', "\\", "#", "echo", "--member-mem=1G", "x"]
    texts = BODIES + ["".join(source.choices(pieces, k=source.randrange(1, 9))) for _ in range(1500)]
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


# ---------------------------------------------------------------------------------------------------- patterns and script

PATTERNS = [
    "", "slurm-%A_%a.out", "%j", "%j_%a", "%4j", "%04a-%j", "%%j", "%%%j", "%", "%5", "%5%j", "a\\%j", "none", "NONE", "%J", "%x/%j.out",
    "/tmp/%%a%j", "%12345a%j", "/a/b/c.out", "/a/%A/c.out", "/a/b%A/c.out", "c.out", "logs/c.out", "/c.out", "/%j", "/dev/null",
    "/dev/shm/%a", "//x/%a", "logs/%%/x", "%1%2a", "% a", "%\udce9a",
]  # fmt: skip


@pytest.mark.parametrize("letters", ["a", "jJ"])
def test_patterns_agree_with_filename_pattern(lua: Lua, letters: str) -> None:
    source = random.Random(5)
    patterns = PATTERNS + ["".join(source.choices("%%%aj4x/\\", k=source.randrange(1, 8))) for _ in range(500)]
    cases = [{"run": "pattern_uses", "pattern": pattern, "letters": letters} for pattern in patterns if pattern]
    for case, got in zip(cases, lua(cases), strict=True):
        assert got.answer == [bool(filename_pattern.letters_in(case["pattern"]) & set(letters))], case["pattern"]


def test_own_output_lies_where_the_members_files_lie(lua: Lua) -> None:
    patterns = [pattern for pattern in PATTERNS if "\\" not in pattern]
    cases = [{"run": "own_output", "pattern": pattern or None, "work_dir": "/home/a b"} for pattern in patterns]
    for pattern, got in zip(patterns, lua(cases), strict=True):
        folder = filename_pattern.fixed_folder(pattern)
        assert got.answer == [os.path.join("/home/a b", folder, "jap-%j.out")], pattern


def test_own_output_is_relative_where_slurm_would_expand_the_folder(lua: Lua) -> None:
    cases = [{"run": "own_output", "pattern": None, "work_dir": folder} for folder in ("/home/100%j", "/home/a\\b")]
    assert [got.answer for got in lua(cases)] == [["jap-%j.out"]] * 2


def test_the_carried_script_is_what_carried_builds(lua: Lua) -> None:
    full = carried.Carried(
        array="0-7%2", output="/a b/%A_%a.out", error="/e%%", input="in.%a", open_mode="append", script_name="it's a \"t\".sh",
        stages=4, groups=2, member_cpus=8, member_mem_mb=2**31, member_time_min=30, gres="gpu:a100:4", at_once=3,
    )  # fmt: skip
    texts = [b"#!/bin/bash\n#JAP\n", b"no newline at the end", b"#JAP-USER-SCRIPT\nEOF\n'\"`$(x)\\\n", b"\xff\xfe\x80%s%n\r\n", b""]
    for facts in (full, carried.Carried(array="%a")):
        cases = [
            {"run": "carry", "python": PYTHON, "facts": dataclasses.asdict(facts), "script": text} for text in texts
        ]
        for text, got in zip(texts, lua(cases), strict=True):
            assert bytes_of(got.answer[0]) == carried.build(PYTHON, facts, text)
