"""A torch-free engine and member that speak the control protocol, for tests of the launchers.

    python standin.py member [SECONDS]      joins as a member's training process would, trains for SECONDS
    standin-engine -m slurm_jap.engine      what ``write_engine`` makes: the interpreter that such a member claims to be

The engine's behaviour is STANDIN in its environment, which it has from the member that joined first: ``good``,
``exit`` (ends at once), ``silent`` (never ready), ``fatal`` (an engine says why, before it is ready), ``die`` (one is
killed once ready), ``deaf`` (ignores ``stop``).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from slurm_jap import wire


def write_engine(folder: Path, python: str = sys.executable) -> Path:
    """An executable that runs the stand-in engine whatever its arguments are."""
    path = folder / "standin-engine"
    path.write_text(f'#!/bin/sh\nexec "{python}" "{Path(__file__).absolute()}" engine\n')
    path.chmod(0o755)
    return path


def connect():
    return wire.connect(os.environ[wire.ENV_CONTROL], wire.read_key(os.environ[wire.ENV_SWEEP_DIR]))


def engine() -> int:
    mode = os.environ.get("STANDIN", "good")
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    print(f"stand-in engine on {os.environ.get('JAP_NODE')}: {mode}, devices {devices}", flush=True)
    if mode == "exit":
        sys.exit("OSError: the stand-in cannot find its library")
    control = connect()
    wire.send_json(control, {"kind": "node", "node": os.environ["JAP_NODE"], "pid": os.getpid()})
    children = {}
    order = wire.recv_json(control)
    if order["kind"] == "stop":
        return 0
    for place in order["engines"]:
        child = os.fork()
        if child == 0:
            control.close()
            os._exit(one_engine(mode, place))
        children[child] = place
    while True:
        readable, _, _ = select.select([control], [], [], 0.05)
        if readable:
            try:
                order = wire.recv_json(control)
            except wire.WireError:
                order = {"kind": "gone"}
            if mode == "deaf" and order["kind"] == "stop":
                continue
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            return 0 if order["kind"] == "stop" else 1
        for child in list(children):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                place = children.pop(child)
                code = os.waitstatus_to_exitcode(status)
                wire.send_json(
                    control, {"kind": "engine_died", "group": place["group"], "stage": place["stage"], "code": code}
                )


def one_engine(mode: str, place: dict) -> int:
    control = connect()
    wire.send_json(
        control,
        {
            "kind": "engine",
            "group": place["group"],
            "stage": place["stage"],
            "pid": os.getpid(),
            "addresses": [f"unix:/none/{place['device']}"],
        },
    )
    topology = wire.recv_json(control)
    assert [e["stage"] for e in topology["engines"]] == list(range(len(topology["engines"])))
    if mode == "silent":
        time.sleep(3600)
    if mode == "fatal":
        wire.send_json(control, {"kind": "fatal", "reason": "the stand-in has no luck"})
        return 7
    wire.send_json(control, {"kind": "ready"})
    if mode == "die" and place["stage"] == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGSEGV)
    wire.recv_json(control)
    return 0


def member(seconds: float) -> int:
    control = connect()
    join = {
        "kind": "join",
        "member": int(os.environ[wire.ENV_MEMBER]),
        "pid": os.getpid(),
        "versions": wire.versions() | {"torch": os.environ.get("STANDIN_TORCH")},
        "executable": os.environ["STANDIN_ENGINE"],
        "path": sys.path,
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "blocks": int(os.environ.get("STANDIN_BLOCKS", "8")),
    }
    wire.send_json(control, join)
    answer = wire.recv_json(control)
    print(answer["kind"], answer.get("reason", ""), len(answer.get("engines", [])), flush=True)
    if answer["kind"] != "group":
        return 2
    if os.environ.get("STANDIN_TWICE"):
        second = connect()
        wire.send_json(second, join)
        answer = wire.recv_json(second)
        print("second", answer["kind"], answer.get("reason", ""), flush=True)
        second.close()
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([control], [], [], left)[0]:
            answer = wire.recv_json(control)
            print(answer["kind"], answer.get("reason", ""), flush=True)
            if answer["kind"] == "fault":
                return 3
    return 0


if __name__ == "__main__":
    sys.exit(engine() if sys.argv[1] == "engine" else member(float(sys.argv[2])))
