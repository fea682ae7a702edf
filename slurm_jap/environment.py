"""Names of the variables by which a member and the engine find their sweep. Pure: no I/O, no torch."""

from __future__ import annotations

ENV_CONTROL = "JAP_CONTROL"
"""Addresses of jap-run's control socket, with commas between them."""
ENV_SWEEP_DIR = "JAP_SWEEP_DIR"
"""The attempt's folder (key, manifest, events)."""
ENV_MEMBER = "JAP_MEMBER"
"""Array index of the member whose script runs."""
ENV_JOB_ID = "JAP_JOB_ID"
"""Job id that the other JAP_* variables belong to: a job submitted from inside a member inherits them, in vain."""
ENV_NODE = "JAP_NODE"
"""Name of the node a process was started on, as the launcher knows it: same name, unix sockets; else TCP."""
ENV_DEVICE_MEMORY = "JAP_DEVICE_MEMORY"
"""Bytes that members' states may take on each device; unset: no bound. For engines."""
ENV_SOCKET_DIR = "JAP_SOCKET_DIR"
"""Node-local 0700 folder for unix sockets; unset: the process makes its own."""

SWEEP_VARIABLES = frozenset({ENV_CONTROL, ENV_SWEEP_DIR, ENV_MEMBER, ENV_JOB_ID, ENV_NODE, ENV_SOCKET_DIR})
"""All of them."""
