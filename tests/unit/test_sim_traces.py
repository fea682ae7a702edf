"""Trace readers: what is read, what is left out and under which rule, and when there is nothing to simulate."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_jap.errors import UsageError
from slurm_jap.traces import (
    CSV_NAMES,
    RULE_NEGATIVE,
    RULE_NEVER_RAN,
    RULE_NO_GPU,
    RULE_NOT_ENDED,
    RULE_NUMBER,
    RULE_PARTIAL,
    RULE_REPEATED,
    RULE_STATE,
    RULE_TORN,
    read_trace,
    siblings_by_array,
    siblings_by_gap,
    tres_gpus,
)

DATA = Path(__file__).resolve().parents[1] / "data"


def read(name: str, **options):
    with open(DATA / name) as lines:
        return read_trace(lines, name, **options)


def left_out(trace) -> dict[str, tuple[int, int]]:
    return {rule: (skipped.count, skipped.first_row) for rule, skipped in trace.skipped.by_rule.items()}


def test_sacct_dump():
    trace = read("sim_sacct.txt")
    assert trace.format == "sacct"
    assert [job.job for job in trace.jobs] == ["101_0", "101_1", "101_2", "101_3", "110", "105"]
    task = trace.jobs[2]
    assert (task.row, task.submit, task.duration, task.gpus, task.nodes) == (4, 0, 3_600_000, 4, 1)
    assert (task.partition, task.user, task.name, task.array, task.limit) == ("gpu", "ada", "sweep", "101", 7_200_000)
    big = trace.jobs[-1]
    # Counted from when it was eligible; a name may hold the delimiter; UNLIMITED is no limit.
    assert (big.submit, big.gpus, big.nodes, big.name, big.limit) == (40 * 60_000, 16, 2, "big|job", None)
    assert left_out(trace) == {
        RULE_NO_GPU: (1, 8),
        RULE_NOT_ENDED: (2, 9),
        RULE_NEVER_RAN: (1, 10),
        RULE_REPEATED: (1, 13),
        RULE_TORN: (1, 15),
    }
    assert trace.rows == len(trace.jobs) + 6


def test_sacct_arrays_are_told_by_their_id():
    siblings = siblings_by_array(read("sim_sacct.txt"))
    assert siblings.arrays == ((0, 1, 2, 3),)
    assert not siblings.inferred


def test_sacct_with_few_columns_in_another_order():
    rows = ["Elapsed|Submit|ReqTRES|JobID", "1-00:00:30|2025-03-01T08:00:00|gres/gpu=2|7"]
    trace = read_trace([*rows, "05:10|2025-03-01T08:00:01|gres/gpu=1|8"], "f")
    assert [(job.duration, job.gpus) for job in trace.jobs] == [(86_430_000, 2), (310_000, 1)]
    assert any("ReqTRES" in note for note in trace.notes)
    assert any("State" in note for note in trace.notes)


def test_sacct_times_as_seconds_since_1970():
    text = "JobID|Submit|ElapsedRaw|AllocTRES\n1|1740816000|60|gres/gpu=1\n2|1740816010|60|gres/gpu=1\n"
    assert [job.submit for job in read_trace(text.splitlines(True), "f").jobs] == [0, 10_000]


def test_sacct_words_it_does_not_know_are_left_out():
    text = "JobID|Submit|ElapsedRaw|AllocTRES|State\n1|2025-03-01T08:00:00|60|gres/gpu=1|BEWITCHED\n"
    with pytest.raises(UsageError, match=f"{RULE_STATE}.*row 2.*BEWITCHED"):
        read_trace(text.splitlines(True), "f")


@pytest.mark.parametrize(
    ("tres", "gpus"),
    [
        ("cpu=2,gres/gpu=4,mem=1G", 4),
        ("gres/gpu:a100=3,gres/gpu:v100=1", 4),
        ("gres/gpu:a100=3,gres/gpu=3", 3),
        ("cpu=2,gres/gpumem=4,gres/gpuutil=7", 0),
        ("gres/shard=4", 0),
        ("", 0),
    ],
)
def test_gpus_of_a_tres_list(tres, gpus):
    assert tres_gpus(tres) == gpus


def test_philly_csv():
    trace = read("sim_philly.csv")
    assert trace.format == "csv"
    assert len(trace.jobs) == 8
    first = trace.jobs[0]
    assert (first.submit, first.duration, first.gpus, first.partition, first.row) == (0, 3_600_000, 4, "aaaaaa", 2)
    assert [job.submit for job in trace.jobs] == sorted(job.submit for job in trace.jobs)
    assert left_out(trace) == {RULE_NEGATIVE: (1, 8), RULE_NUMBER: (2, 11), RULE_NO_GPU: (1, 12), RULE_TORN: (1, 14)}
    assert trace.notes == ["sim_philly.csv:1: columns not used: gpu_time"]


def test_siblings_of_a_csv_are_guessed_and_say_so():
    trace = read("sim_philly.csv")
    siblings = siblings_by_gap(trace, 60_000)
    groups = [[trace.jobs[index].row for index in array] for array in siblings.arrays]
    assert groups == [[2, 3, 4], [6, 7]]  # the fourth of the first came 70 s after the third
    assert siblings.inferred
    assert "too many" in siblings.rule
    assert "no user" in siblings.rule
    assert [len(array) for array in siblings_by_gap(trace, 70_000).arrays] == [4, 2]
    alike = siblings_by_gap(trace, 70_000, 1.5)
    assert [[trace.jobs[index].row for index in array] for array in alike.arrays] == [[2, 3, 4], [6, 7]]
    assert "at most 1.5 times the shortest" in alike.rule


def test_csv_with_other_names_and_units():
    text = "when,len,n,who\n0,60000,2,x\n1500,250,1,y\n"
    columns = {"submit": "when", "duration": "len", "gpus": "n", "user": "who"}
    trace = read_trace(text.splitlines(True), "f", columns=columns, time_unit="ms")
    assert [(job.submit, job.duration, job.gpus, job.user) for job in trace.jobs] == [
        (0, 60_000, 2, "x"),
        (1500, 250, 1, "y"),
    ]


def test_quoted_csv_fields():
    text = 'submit,duration,gpus,job_name\n0,60,1,"a, b"\n'
    assert read_trace(text.splitlines(True), "f").jobs[0].name == "a, b"


def test_swf():
    trace = read("sim.swf")
    assert trace.format == "swf"
    assert [(job.job, job.submit, job.duration, job.gpus, job.limit) for job in trace.jobs] == [
        ("1", 0, 3_600_000, 4, 7_200_000),
        ("2", 10_000, 3_600_000, 4, 7_200_000),
        ("3", 20_000, 1_800_000, 8, None),
    ]
    assert left_out(trace) == {RULE_PARTIAL: (1, 6), RULE_NEVER_RAN: (1, 7), RULE_NEGATIVE: (1, 8), RULE_TORN: (1, 9)}
    assert siblings_by_gap(trace, 60_000).arrays == ((0, 1),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f: the trace is empty; give"),
        ("\n \n\n", "f: the trace is empty; give"),
        ("once upon a time\n", "f:1: 'once upon a time' is neither .* --format"),
        ("\x00\x01\x02\n", "f:1: .* is neither"),
        ("timestamp,duration,num_gpus\n", "f: no job to simulate among 0 rows; the file ends after its header"),
        ("a,b,c\n1,2,3\n", r"f:1: no column for submit, duration, gpus among a, b, c; name it with --column submit="),
        ("timestamp,duration\n1,2\n", "f:1: no column for gpus among timestamp, duration"),
        ("JobID|State\n1|COMPLETED\n", "f:1: no column Submit, ElapsedRaw or Elapsed, AllocTRES .* sacct -a -X -P"),
        (
            "timestamp,duration,num_gpus\n0,-1,2\n0,nan,2\n0,1e400,2\n",
            "negative duration: 1 .row 2: .*number or time: 2",
        ),
        ("timestamp,duration,num_gpus\n0,5,1.5\n", "not a whole number"),
        ("timestamp,duration,num_gpus\n0,5\n", "torn row: 1 .row 2: 2 fields where the header has 3"),
        ("; only a comment\n", "no job to simulate among 0 rows"),
    ],
)
def test_nothing_to_simulate(text, message):
    with pytest.raises(UsageError, match=message):
        read_trace(text.splitlines(True), "f")


def test_fields_that_the_csv_reader_refuses():
    trace = read_trace(["timestamp,duration,num_gpus", "0,5,2", '0",\r5,2'], "f")
    assert left_out(trace) == {RULE_TORN: (1, 3)}
    with pytest.raises(UsageError, match=r"f:1: new-line character .* mend it"):
        read_trace(['timestamp",\rduration,num_gpus', "0,5,2"], "f")


def test_a_column_that_is_not_there():
    with pytest.raises(UsageError, match="f:1: no column 'n' for gpus; the file has timestamp, duration"):
        read_trace(["timestamp,duration\n"], "f", columns={"gpus": "n"})


def test_byte_order_mark_and_windows_line_ends():
    trace = read_trace(["\ufefftimestamp,duration,num_gpus\r\n", "5,60,2\r\n"], "f")
    assert (trace.jobs[0].gpus, trace.jobs[0].duration) == (2, 60_000)


HEADERS = {
    "timestamp,duration,num_gpus,cluster": ",",
    "JobID|Submit|ElapsedRaw|AllocTRES|State": "|",
    "; SWF": " ",
    "": " ",
}
FRAGMENTS = st.sampled_from(
    ["0", "1", "-1", "60", "", "x", "2025-03-01T08:00:00", "1_[2]", "gres/gpu=2", "COMPLETED", "1:2:3"]
)


@st.composite
def files(draw: st.DrawFn) -> list[str]:
    header = draw(st.sampled_from(sorted(HEADERS)))
    width = {",": 4, "|": 5, " ": 18}[HEADERS[header]]
    row = st.lists(FRAGMENTS, min_size=width, max_size=width) | st.lists(FRAGMENTS | st.text(max_size=6), max_size=19)
    return [header, *(HEADERS[header].join(fields).replace("\n", " ") for fields in draw(st.lists(row, max_size=6)))]


@given(files())
def test_any_rows_are_read_or_counted_or_refused(lines):
    """Whatever stands in a file: jobs with sane values, the rest counted, or one UsageError."""
    try:
        trace = read_trace(lines, "f")
    except UsageError:
        return
    assert trace.jobs[0].submit == 0
    assert all(job.duration >= 0 and job.gpus >= 1 and job.submit >= 0 for job in trace.jobs)
    assert len(trace.jobs) + sum(skipped.count for skipped in trace.skipped.by_rule.values()) == trace.rows


def test_the_keys_of_column_are_those_the_command_knows():
    from slurm_jap.sim import _COLUMN_KEYS

    assert set(_COLUMN_KEYS) == set(CSV_NAMES)
