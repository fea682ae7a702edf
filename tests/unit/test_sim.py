"""jap-sim as its user meets it: the report, the JSON, the plots, and one line for what cannot be."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_jap.gain import Assumptions
from slurm_jap.sim import main
from slurm_jap.sim_study import Cluster, coalesce, plain_units, run, size_cluster
from slurm_jap.traces import TraceJob

DATA = Path(__file__).resolve().parents[1] / "data"
SACCT = str(DATA / "sim_sacct.txt")
PHILLY = str(DATA / "sim_philly.csv")


def simulate(capsys, *arguments: str) -> dict:
    assert main([*arguments, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def sweep_trace(tmp_path: Path, seed: int = 1) -> str:
    """A CSV with arrays of uneven members among other jobs."""
    draw = random.Random(seed)
    rows = ["submit,duration,gpus,user,job_name,array_id,partition"]
    for array in range(12):
        gpus = draw.choice([1, 2, 4, 8])
        length = draw.randint(600, 7200)
        for _ in range(draw.randint(2, 7)):
            duration = round(length * draw.uniform(0.8, 1.2))
            rows.append(f"{array * 300},{duration},{gpus},u{array % 3},a{array},{array},p{array % 2}")
        for _ in range(3):
            rows.append(f"{array * 300 + 10},{draw.randint(60, 3600)},{draw.choice([1, 8, 12])},v,single,,p0")
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def test_sacct_array_is_coalesced(capsys):
    result = simulate(capsys, SACCT, "--nodes", "2", "--link", "0")
    siblings = result["trace"]["siblings"]
    assert (siblings["arrays"], siblings["jobs"], siblings["over_counts"]) == (1, 4, False)
    told = result["coalescing"]
    assert (told["arrays_coalesced"], told["coalesced_jobs"], told["members"]) == (1, 1, 4)
    # M = 8, S0 = 4: two members on 8 stages reach the limit, (8 + 3) / max(8, 15 / 2); so two groups of two.
    assert told["gain_predicted"] == pytest.approx(11 / 8)
    assert told["busy_alone"] == pytest.approx(8 / 11)
    # Three members of an hour and one of half an hour: the group of two long ones rules, and holds all 16 GPUs.
    assert told["gpu_hours_coalesced"] == pytest.approx(16 * 8 / 11, rel=1e-6)
    assert result["gpu_hours_saved"] == pytest.approx(4 * 3.5 - 16 * 8 / 11, rel=1e-6)
    assert result["with"]["scheduled_jobs"] == result["without"]["scheduled_jobs"] - 3
    assert {row["name"]: row["without"]["jobs"] for row in result["by_partition"]} == {"gpu": 5, "debug": 1}
    assert {row["name"]: row["without"]["jobs"] for row in result["by_size"]} == {"1": 1, "3-4": 4, "9-16": 1}


def test_report_for_people(capsys):
    assert main([PHILLY, "--nodes", "2"]) == 0
    out, err = capsys.readouterr()
    for words in ("job completion time, mean", "makespan", "GPU-hours saved", "By partition", "This counts too many"):
        assert words in out
    assert f"{PHILLY}:8: negative duration: duration is -5.0; left out" in err
    assert f"{PHILLY}:10: larger than the cluster: 64 GPUs on 2 nodes of 8; left out" in err
    assert f"{PHILLY}:14: torn row: 2 fields where the header has 5; left out" in err
    assert "left out 2 x not a number or time" in out


def test_totals_are_the_sums_of_the_parts(capsys, tmp_path):
    result = simulate(capsys, sweep_trace(tmp_path), "--nodes", "4")
    for side in ("without", "with"):
        for parts in ("by_size", "by_partition", "by_role"):
            assert sum(row[side]["jobs"] for row in result[parts]) == result[side]["jobs"]
            hours = sum(row[side]["gpu_hours"] for row in result[parts])
            assert hours == pytest.approx(result[side]["gpu_hours"])
            mean = sum(row[side]["completion"]["mean_s"] * row[side]["jobs"] for row in result[parts])
            assert mean / result[side]["jobs"] == pytest.approx(result[side]["completion"]["mean_s"])
    told = result["coalescing"]
    assert result["gpu_hours_saved"] == pytest.approx(told["gpu_hours_alone"] - told["gpu_hours_coalesced"])
    assert told["members"] + sum(told["kept_plain"].values()) == result["trace"]["siblings"]["jobs"]


def test_same_seed_same_numbers_and_larger_shares_only_add(capsys, tmp_path):
    trace = sweep_trace(tmp_path)
    arguments = (trace, "--nodes", "4", "--opt-in", "0.5", "--seed", "3")
    assert simulate(capsys, *arguments) == simulate(capsys, *arguments)
    seen = {json.dumps(simulate(capsys, trace, "--nodes", "4", "--opt-in", "0.5", "--seed", str(s))) for s in range(5)}
    assert len(seen) > 1
    members = [simulate(capsys, trace, "--opt-in", str(share))["coalescing"]["members"] for share in (0, 0.3, 0.6, 1)]
    assert members == sorted(members)
    assert members[0] == 0 < members[-1]


def test_without_opting_in_nothing_changes(capsys, tmp_path):
    result = simulate(capsys, sweep_trace(tmp_path), "--nodes", "4", "--opt-in", "0")
    assert result["without"] == result["with"]
    assert result["gpu_hours_saved"] == 0


def test_sensitivity_has_the_base_first_and_changes_one_thing(capsys, tmp_path):
    result = simulate(capsys, sweep_trace(tmp_path), "--nodes", "4", "--sensitivity", "--periods", "bound")
    rows = result["sensitivity"]
    assert [row["base"] for row in rows] == [True] + [False] * (len(rows) - 1)
    assert rows[0]["gpu_hours_saved"] == result["gpu_hours_saved"]
    assert {"microbatches", "stages", "opt_in", "link", "job_per"} <= {row["assumption"] for row in rows}
    alone = simulate(capsys, sweep_trace(tmp_path), "--nodes", "4", "--microbatches", "4", "--periods", "bound")
    (row,) = [row for row in rows if (row["assumption"], row["value"]) == ("microbatches", 4)]
    assert row["gpu_hours_saved"] == alone["gpu_hours_saved"]


def test_a_job_per_group_lets_go_of_finished_groups(capsys, tmp_path):
    trace = sweep_trace(tmp_path)
    per_array = simulate(capsys, trace, "--max-stages", "8")["coalescing"]
    per_group = simulate(capsys, trace, "--max-stages", "8", "--job-per", "group")["coalescing"]
    assert per_group["coalesced_jobs"] > per_array["coalesced_jobs"]
    assert per_group["gpu_hours_coalesced"] < per_array["gpu_hours_coalesced"]
    assert per_array["other_job_per"] == {"job_per": "group", "gain_achieved": per_group["gain_achieved"]}


def test_pools_keep_partitions_apart(capsys, tmp_path):
    trace = sweep_trace(tmp_path)
    result = simulate(capsys, trace, "--nodes", "3", "--pool", "p1=2")
    assert result["cluster"]["gpus"] == 5 * 8
    # What waits in the other pool never matters: p1 alone gives the same figures for p1.
    only = tmp_path / "p1.csv"
    lines = Path(trace).read_text().splitlines()
    only.write_text("\n".join([lines[0], *(line for line in lines if line.endswith(",p1"))]) + "\n")
    alone = simulate(capsys, str(only), "--nodes", "2")
    (row,) = [row for row in result["by_partition"] if row["name"] == "p1"]
    assert row["without"] == alone["by_partition"][0]["without"]


@pytest.mark.parametrize("job_per_group", [False, True])
@pytest.mark.parametrize("waves", [1, 3])
def test_every_job_runs_once_in_any_arrangement(job_per_group, waves):
    draw = random.Random(5)
    jobs, arrays = [], []
    for array in range(30):
        gpus = draw.choice([1, 2, 4, 8])
        members = []
        for _ in range(draw.randint(1, 12)):
            members.append(len(jobs))
            limit = draw.choice([None, 10**7])
            jobs.append(TraceJob(0, "", array * 1000, draw.randint(1, 10**6), gpus, 0, limit, "", "", "", ""))
        if len(members) > 1:
            arrays.append(members)
    cluster = Cluster(8, 6)
    assumptions = Assumptions(waves=waves, max_members=9, periods="bound")
    choices = {"opt_in": 0.9, "seed": 1, "overestimate": 1.5, "job_per_group": job_per_group}
    coalescing = coalesce(jobs, arrays, cluster, assumptions, **choices)
    assert sorted(index for unit in coalescing.units for index in unit.members) == list(range(len(jobs)))
    for unit in coalescing.units:
        assert unit.duration == max(unit.ends) <= unit.estimate
        assert unit.submit == max(jobs[index].submit for index in unit.members)
        assert unit.gpus <= sum(jobs[index].gpus for index in unit.members)
    outcome = run(coalescing.units, jobs, cluster)
    assert all(job.submit <= start <= end for job, start, end in zip(jobs, outcome.starts, outcome.ends, strict=True))
    plain = run(plain_units(jobs, 1.5), jobs, cluster)
    assert [end - start for start, end in zip(plain.starts, plain.ends, strict=True)] == [job.duration for job in jobs]
    assert sum(plain.gpu_ms) == sum(job.gpus * job.duration for job in jobs)


def test_cluster_is_sized_by_load_and_by_the_largest_job():
    def job(submit, duration, gpus):
        return TraceJob(0, "", submit, duration, gpus, 0, None, "", "", "", "")

    assert size_cluster([job(0, 1000, 8), job(1000, 1000, 8)], 8, 1.0) == 2
    assert size_cluster([job(0, 1000, 8), job(1000, 1000, 8)], 8, 0.5) == 4
    assert size_cluster([job(0, 1, 80), job(1000, 1, 1)], 8, 1.0) == 10
    assert size_cluster([job(0, 0, 1)], 8, 1.0) == 1


def test_compressed_and_piped_traces(capsys, tmp_path):
    packed = tmp_path / "trace.csv.gz"
    packed.write_bytes(gzip.compress(Path(PHILLY).read_bytes()))
    plain, unpacked = simulate(capsys, PHILLY), simulate(capsys, str(packed))
    done = subprocess.run(
        [sys.executable, "-m", "slurm_jap.sim", "-", "--json", "-"],
        input=Path(PHILLY).read_text(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    piped = json.loads(done.stdout)
    for key in ("without", "with", "coalescing", "by_size"):
        assert plain[key] == unpacked[key] == piped[key]


def test_a_quiet_cluster_and_empty_seconds(capsys, tmp_path):
    """No queueing to compare, jobs that last no time, no array: nothing to divide by."""
    trace = tmp_path / "t.csv"
    trace.write_text("submit,duration,gpus\n0,0,1\n5,0,2\n")
    for more in ([], ["--sensitivity", "--periods", "bound"]):
        assert main([str(trace), "--nodes", "1", *more]) == 0
    assert "GPU-hours saved: 0.00 (0.0% of all)" in capsys.readouterr().out


def test_names_in_a_trace_are_only_text(capsys, tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text(
        "submit,duration,gpus,partition\n0,60,1,[/red]\n0,60,1,\x1b[31mred\n0,-1,1,\x1b[2J\n0,1\x1b[2J,1,p\n"
    )
    assert main([str(trace)]) == 0
    out, err = capsys.readouterr()
    assert "[/red]" in out
    assert "\\x1b[31mred" in out
    assert "\x1b" not in out + err


def test_bytes_that_are_no_text(tmp_path):
    trace = b"submit,duration,gpus,partition\n0,60,1,caf\xe9\n"
    (tmp_path / "t.csv").write_bytes(trace)
    for name in ("-", str(tmp_path / "t.csv")):
        done = subprocess.run(
            [sys.executable, "-m", "slurm_jap.sim", name], input=trace, capture_output=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, b"")


def test_json_file_is_whole_or_absent(capsys, tmp_path):
    target = tmp_path / "out.json"
    assert main([SACCT, "--json", str(target)]) == 0
    assert json.loads(target.read_text())["trace"]["jobs"] == 6
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert "job completion time" in capsys.readouterr().out


def test_plots_are_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra [sim] is not installed")
    assert (
        main(
            [
                sweep_trace(tmp_path),
                "--nodes",
                "4",
                "--sensitivity",
                "--periods",
                "bound",
                "--plot",
                str(tmp_path / "plots"),
            ]
        )
        == 0
    )
    names = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert names == ["completion.png", "partition.png", "queue.png", "sensitivity.png", "size.png"]
    for name in names:
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")


def test_plots_without_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([SACCT, "--plot", str(tmp_path / "plots")]) == 2
    assert "pip install 'slurm-jap[sim]'" in capsys.readouterr().err
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-file"], "no-such-file: No such file or directory; give a readable trace file"),
        ([str(DATA)], "Is a directory; give a readable trace file"),
        ([SACCT, "--nodes", "0"], "--nodes is 0, but must be at least 1"),
        ([SACCT, "--nodes", "9999999999"], "--nodes is 9999999999, but must be at most 1,000,000"),
        ([SACCT, "--pool", "gpu=" + "9" * 5000], "is not a number of nodes from 1 to 1,000,000"),
        ([SACCT, "--gpus-per-node", "0"], "--gpus-per-node is 0"),
        ([SACCT, "--opt-in", "1.5"], "--opt-in is 1.5, but must be between 0 and 1"),
        ([SACCT, "--opt-in", "nan"], "--opt-in is nan"),
        ([SACCT, "--load", "0"], "--load is 0"),
        ([SACCT, "--gap", "-1"], "--gap is -1"),
        ([SACCT, "--alike", "0.5"], "--alike is 0.5"),
        ([SACCT, "--overestimate", "0.5"], "--overestimate is 0.5"),
        ([SACCT, "--microbatches", "0"], "--microbatches is 0, but must be a number of at least 1"),
        ([SACCT, "--microbatches", "many"], "invalid int value: 'many'; type jap-sim --help"),
        ([SACCT, "--pool", "gpu"], "--pool gpu: write it as --pool PARTITION=NODES"),
        ([SACCT, "--pool", "gpu=x"], "--pool gpu=x: 'x' is not a number of nodes"),
        ([SACCT, "--pool", "ghost=2"], "no job in partition 'ghost'; the trace has debug, gpu"),
        ([SACCT, "--column", "gpus"], "--column gpus: write it as --column WHAT=NAME"),
        ([SACCT, "--column", "weight=x"], "'weight' is none of submit, duration, gpus"),
        ([PHILLY, "--column", "gpus=cards"], "sim_philly.csv:1: no column 'cards' for gpus"),
        ([PHILLY, "--siblings", "array"], "no job has an array id; guess the siblings with --siblings gap"),
        ([SACCT, "--format", "csv"], "sim_sacct.txt:1: no column for submit, duration, gpus"),
        ([SACCT, "--json", "/no/such/folder/x.json"], "/no/such/folder is no folder to write in"),
        ([SACCT, "--nodes", "1", "--gpus-per-node", "1", "--pool", "debug=1"], None),
        ([PHILLY, "--frobnicate"], "unrecognized arguments: --frobnicate"),
        ([], "the following arguments are required: TRACE"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    if message is None:
        # Of the trace's jobs only the one of a single GPU is small enough.
        assert code == 0
        return
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("jap: ")
    assert message in err


def test_torn_archive(capsys, tmp_path):
    packed = tmp_path / "trace.csv.gz"
    packed.write_bytes(gzip.compress(os.urandom(2000))[:-700])
    assert main([str(packed)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert str(packed) in err
    whole = bytearray(gzip.compress(Path(PHILLY).read_bytes()))
    whole[60:70] = bytes(10)
    packed.write_bytes(whole)
    assert main([str(packed)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_every_job_larger_than_the_cluster(capsys, tmp_path):
    trace = tmp_path / "t.csv"
    trace.write_text("submit,duration,gpus\n0,60,9\n")
    assert main([str(trace), "--nodes", "1"]) == 2
    assert "every job is larger than the cluster" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m slurm_jap.sim {SACCT} | head -1", shell=True, capture_output=True, text=True, timeout=60
    )
    assert done.stderr.count("Traceback") == 0
    assert done.stdout.startswith("trace ")


def test_help_imports_neither_torch_nor_rich_nor_matplotlib():
    code = (
        "import sys\nfrom slurm_jap.sim import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print({'torch', 'rich', 'matplotlib', 'numpy'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "set()"
    assert "jap-sim" in done.stdout
