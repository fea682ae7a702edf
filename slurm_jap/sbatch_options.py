"""The options of a submission, as sbatch understands them: script directives < SBATCH_* variables < command line.

Pure: no I/O, no torch. The grammar is getopt_long's with the table of Slurm 22.05 to 26.05, and for scripts the rules
by which sbatch cuts ``#SBATCH`` lines into words. Whatever is not understood (an option of a site's SPANK plugin, say)
raises ``NotUnderstood``: such a submission is handed to sbatch as it is. No value is judged here.

All directives of a script form one list of words, so ``#SBATCH -J`` and ``#SBATCH name`` on two lines are one option.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from slurm_jap import jap_options
from slurm_jap.errors import JapError
from slurm_jap.jap_options import JapOptions

SCRIPT, ENVIRONMENT, COMMAND_LINE = "script", "environment", "command line"

NONE, REQUIRED, OPTIONAL = 0, 1, 2

_SPACES = " \t\n\v\f\r"


class NotUnderstood(JapError):
    """sbatch alone can judge this submission; the message is the reason for a plain array."""


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One row of sbatch's table."""

    name: str
    argument: int
    """NONE, REQUIRED, or OPTIONAL (only as ``--name=value`` or ``-xvalue``). Where versions differ: the wider."""
    short: str = ""
    since: tuple[int, int] = (22, 5)
    until: tuple[int, int] | None = None
    """The last version that has it; None: 26.05 still has."""


def _table() -> dict[str, Option]:
    required = """
        account:A acctg-freq array:a batch bb bbf begin:b chdir:D cluster cluster-constraint clusters:M comment
        constraint:C container context core-spec:S cores-per-socket cpu-freq cpus-per-gpu cpus-per-task:c deadline
        delay-boot dependency:d distribution:m error:e exclude:x export export-file extra-node-info:B gid gpu-bind
        gpu-freq gpus:G gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input:i job-name:J
        kill-on-invalid-dep licenses:L mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus
        network nodefile:F nodelist:w nodes:N ntasks:n ntasks-per-core ntasks-per-gpu ntasks-per-node
        ntasks-per-socket ntasks-per-tres open-mode output:o partition:p prefer priority profile qos:q reservation
        signal sockets-per-node switches tasks-per-node thread-spec threads-per-core time:t time-min tmp uid
        wait-all-nodes wckey wrap"""
    flags = """
        contiguous help:h hold:H ignore-pbs no-requeue overcommit:O oversubscribe:s parsable quiet:Q reboot spread-job
        test-only usage use-min-nodes verbose:v version:V wait:W"""
    optional = "exclusive get-user-env nice no-kill:k propagate requeue"
    rows = [
        Option("autocomplete", REQUIRED, since=(23, 2)),
        Option("consolidate-segments", NONE, since=(25, 11)),
        Option("container-id", REQUIRED, since=(23, 2)),
        Option("container-type", REQUIRED, since=(26, 5)),
        Option("external", NONE, since=(25, 5)),
        Option("extra", REQUIRED, since=(23, 2)),
        Option("mem-update", REQUIRED, since=(26, 5)),
        Option("oom-kill-step", OPTIONAL, since=(24, 11)),
        Option("power", REQUIRED, until=(23, 11)),
        Option("resources", REQUIRED, since=(25, 11)),
        Option("resv-ports", OPTIONAL, since=(24, 5)),
        Option("segment", REQUIRED, since=(24, 5)),
        Option("spread-segments", NONE, since=(25, 11)),
        Option("stepmgr", NONE, since=(24, 5)),
        Option("tres-bind", REQUIRED, since=(23, 11)),
        Option("tres-per-task", REQUIRED, since=(23, 2)),
    ]
    for words, argument in ((required, REQUIRED), (flags, NONE), (optional, OPTIONAL)):
        for word in words.split():
            name, _, short = word.partition(":")
            rows.append(Option(name, argument, short))
    return {row.name: row for row in sorted(rows, key=lambda row: row.name)}


OPTIONS: Mapping[str, Option] = _table()
"""Every option of sbatch 22.05 to 26.05, by long name."""

_BY_SHORT = {option.short: option for option in OPTIONS.values() if option.short}

SYNONYMS = {"tasks-per-node": "ntasks-per-node", "cluster": "clusters"}
"""Names under which sbatch knows another option."""

COMMAND_LINE_ONLY = frozenset({"help", "usage", "version", "quiet", "verbose", "wrap"})
"""Options that sbatch ignores in a script."""

_ODD_VARIABLES = {
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_BURST_BUFFER": "bb",
    "SBATCH_CPU_FREQ_REQ": "cpu-freq",
    "SBATCH_DEBUG": "verbose",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_SEGMENT_SIZE": "segment",
    "SBATCH_TIMELIMIT": "time",
    "SLURM_CLUSTERS": "clusters",
    "SLURM_HINT": "hint",
}

_VARIABLE_NAMES = """
    account acctg-freq batch cluster-constraint clusters consolidate-segments container container-id container-type
    constraint core-spec cpus-per-gpu delay-boot distribution error exclusive export get-user-env gpu-bind gpu-freq
    gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint ignore-pbs input job-name mem-bind
    mem-per-cpu mem-per-gpu network no-kill no-requeue open-mode output overcommit partition power profile qos requeue
    reservation signal spread-job spread-segments thread-spec threads-per-core tres-bind tres-per-task use-min-nodes
    wait wait-all-nodes wckey"""

VARIABLES: Mapping[str, str] = {
    **{"SBATCH_" + name.upper().replace("-", "_"): name for name in _VARIABLE_NAMES.split()},
    **_ODD_VARIABLES,
}
"""The option that each environment variable sets (SBATCH_REQ_SWITCH and SBATCH_WAIT4SWITCH have no option)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """One option, as somebody gave it."""

    name: str
    """Its full name, synonyms resolved."""
    value: str | None
    """None: a flag, or an optional argument left out."""
    source: str
    """SCRIPT, ENVIRONMENT or COMMAND_LINE."""
    words: tuple[str, ...]
    """The words that say it again, alone, on a command line."""
    place: str
    """For messages: ``train.sh, line 3``, ``SBATCH_PARTITION`` or ``command line``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Submission:
    """All options of a submission, nothing judged, nothing lost."""

    script: tuple[Given, ...]
    environment: tuple[Given, ...]
    command_line: tuple[Given, ...]

    def effective(self) -> dict[str, Given]:
        """By name, the option that is in force. A flag's variable that says no takes back what the script said."""
        found: dict[str, Given] = {}
        for given in (*self.script, *self.environment, *self.command_line):
            if given.source == SCRIPT and given.name in COMMAND_LINE_ONLY:
                continue
            if given.source == ENVIRONMENT and _says_no(given):
                found.pop(given.name, None)
                continue
            found[given.name] = given
        return found


def _says_no(given: Given) -> bool:
    """Whether a flag's variable switches it off: not empty, not ``yes``, not a number other than 0."""
    if OPTIONS[given.name].argument != NONE and given.name != "requeue":
        return False
    value = given.value or ""
    if value == "" or value.lower() == "yes":
        return False
    try:
        return int(value) == 0
    except ValueError:
        return given.name != "requeue" or value != "expedite"


def _find_long(name: str) -> Option:
    if name in OPTIONS:
        return OPTIONS[name]
    candidates = [option for option in OPTIONS.values() if option.name.startswith(name)] if name else []
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise NotUnderstood(f"option --{name} could be --{' or --'.join(o.name for o in candidates[:3])}")
    raise NotUnderstood(f"option --{name} is not one of sbatch's own")


def parse_words(
    words: Sequence[str], source: str, places: Sequence[str] | None = None, *, until: str | None = None
) -> tuple[list[Given], int]:
    """The options at the head of a list of words, and the number of the first word that is none.

    Args:
        words: without the program's name.
        places: where each word stands; None: the source's name for all.
        until: a word with this beginning, where an option could stand, ends the list too.

    Raises:
        NotUnderstood: an option that is not in the table, or without its argument.
    """
    found: list[Given] = []
    position = 0

    def place(number: int) -> str:
        return places[number] if places is not None else source

    def argument_of(option: Option, spelled: str, start: int) -> str:
        nonlocal position
        if position >= len(words):
            raise NotUnderstood(f"{place(start)}: option {spelled} needs an argument")
        position += 1
        return words[position - 1]

    def add(option: Option, value: str | None, again: tuple[str, ...], start: int) -> None:
        found.append(Given(SYNONYMS.get(option.name, option.name), value, source, again, place(start)))

    while position < len(words):
        start, word = position, words[position]
        if until is not None and word.startswith(until):
            return found, position
        if word == "--":
            return found, position + 1
        if not word.startswith("-") or word == "-":
            return found, position
        position += 1
        value: str | None
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            try:
                option = _find_long(name)
            except NotUnderstood as error:
                raise NotUnderstood(f"{place(start)}: {error}") from None
            if equals and option.argument == NONE:
                raise NotUnderstood(f"{place(start)}: option --{option.name} takes no argument")
            if equals:
                add(option, text, (word,), start)
            elif option.argument == REQUIRED:
                value = argument_of(option, word, start)
                add(option, value, (word, value), start)
            else:
                add(option, None, (word,), start)
            continue
        cluster = word[1:]
        while cluster:
            letter, cluster = cluster[0], cluster[1:]
            known = _BY_SHORT.get(letter)
            if known is None:
                raise NotUnderstood(f"{place(start)}: option -{letter} is not one of sbatch's own")
            if known.argument == NONE:
                add(known, None, (f"-{letter}",), start)
                continue
            if known.argument == OPTIONAL:
                add(known, cluster or None, (f"-{letter}{cluster}",), start)
            else:
                value = cluster or argument_of(known, f"-{letter}", start)
                add(known, value, (f"-{letter}", value), start)
            cluster = ""
    return found, position


def _split_line(text: str, place: str) -> Iterator[str]:
    """The words of a directive, as sbatch cuts them: quotes group, ``\\`` protects, ``#`` begins a comment."""
    position, length = 0, len(text)
    while True:
        while position < length and text[position] in _SPACES:
            position += 1
        if position == length:
            return
        if text[position] == ":":
            raise NotUnderstood(f"{place}: unexpected ':'")
        head = text[position : position + 7].lower()
        for separator in ("packjob", "hetjob"):
            after = position + len(separator)
            if head.startswith(separator) and (after == length or text[after] in _SPACES):
                raise NotUnderstood(f"{place}: a heterogeneous job")
        word: list[str] = []
        quote, escaped = "", False
        while position < length:
            character = text[position]
            if not quote and character in _SPACES:
                if escaped:
                    raise NotUnderstood(f"{place}: a backslash before a space, which Slurm's versions read differently")
                break
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
                position += 1
                continue
            elif quote:
                if character == quote:
                    quote = ""
                    position += 1
                    continue
            elif character in "\"'":
                quote = character
                position += 1
                continue
            elif character == "#":
                break
            word.append(character)
            position += 1
        if quote:
            raise NotUnderstood(f"{place}: unmatched {quote}")
        if not word:
            return
        yield "".join(word)


def quote_for_directive(word: str) -> str:
    """A word as it must stand in a ``#SBATCH`` line so that sbatch reads it back unchanged.

    Raises:
        ValueError: it holds a line break, or it is empty: no line can say that.
    """
    if not word or any(character in word for character in "\n\0"):
        raise ValueError(f"{word!r} cannot stand in a #SBATCH line")
    if not any(character in word for character in _SPACES + "\"'\\#"):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _directives(script: bytes, name: str) -> Iterator[tuple[str, str, str]]:
    """Keyword, rest of the line and place of every ``#SBATCH`` and ``#JAP`` line before the script's first command."""
    start, number = 0, 0
    while start < len(script):
        end = script.find(b"\n", start)
        end = len(script) if end < 0 else end
        line = script[start:end].decode("utf-8", "surrogateescape")
        start, number = end + 1, number + 1
        place = f"{name}, line {number}"
        for word in ("#SBATCH", "#SLURM"):
            if line.startswith(word):
                yield "#SBATCH", line[len(word) :], place
                break
        else:
            rest = line[len(jap_options.WORD) :]
            if line.startswith(jap_options.WORD) and (not rest or rest[0] in _SPACES or rest.startswith("--")):
                yield jap_options.WORD, rest, place
                continue
            stripped = line.lstrip(_SPACES)
            if stripped and not stripped.startswith("#"):
                return


def from_script(script: bytes, name: str = "script") -> list[Given]:
    """The options of a batch script's directives.

    Args:
        name: the script's name, for messages.

    Raises:
        NotUnderstood: a directive that only sbatch can judge.
    """
    words: list[str] = []
    places: list[str] = []
    for keyword, rest, place in _directives(script, name):
        if keyword == "#SBATCH":
            for word in _split_line(rest, place):
                words.append(word)
                places.append(place)
    found, end = parse_words(words, SCRIPT, places)
    if end < len(words):
        raise NotUnderstood(f"{places[end]}: {words[end]!r} is not an option")
    return found


def jap_lines(script: bytes, name: str = "script") -> JapOptions | None:
    """What the ``#JAP`` lines of a batch script say; None: it has none, and was not written for us.

    Raises:
        UsageError: an unknown key or a wrong value.
    """
    words: list[tuple[str, str]] = []
    opted_in = False
    for keyword, rest, place in _directives(script, name):
        if keyword == jap_options.WORD:
            opted_in = True
            words += [(word, place) for word in _split_line(rest, place)]
    return jap_options.parse(words) if opted_in else None


def other_systems_lines(script: bytes) -> str | None:
    """``#PBS`` or ``#BSUB``, if sbatch would translate such lines of the script (wherever they stand); else None."""
    for word in (b"#BSUB", b"#PBS"):
        if script.startswith(word) or b"\n" + word in script:
            return word.decode()
    return None


def from_environment(environment: Mapping[str, str]) -> list[Given]:
    """The options that environment variables set."""
    return [
        Given(name, environment[variable], ENVIRONMENT, (), variable)
        for variable, name in VARIABLES.items()
        if variable in environment
    ]


def why_no_batch_script(script: bytes) -> str | None:
    """Why sbatch refuses this text as a batch script; None: it takes it."""
    if not script:
        return "the batch script is empty"
    if not script.strip(_SPACES.encode()):
        return "the batch script contains only white space"
    if not script.startswith(b"#!"):
        return "the batch script has no #! line"
    if b"\0" in script:
        return "the batch script contains a NUL character"
    if b"\r\n" in script:
        return "the batch script has DOS line breaks"
    return None
