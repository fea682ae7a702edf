#!/bin/sh
# Prints the Python that .venv is made with: the first of python3.11, python3, ... that is 3.10 or newer and can make
# virtual environments. For root, one that every user can run comes first: the test cluster runs jobs as other users.

usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

everybody_can_run() {
    real=$("$1" -c 'import os, sys; print(os.path.realpath(sys.executable))' 2>/dev/null) || return 1
    # By way of a shell: setpriv itself still has root's capabilities when it looks the program up.
    setpriv --reuid=65534 --regid=65534 --clear-groups /bin/sh -c 'exec "$0" -c ""' "$real" >/dev/null 2>&1
}

CANDIDATES="python3.11 python3 /usr/bin/python3.11 /usr/bin/python3 python3.12 python3.13 python3.14 python3.10"
first=
for python in $CANDIDATES; do
    usable "$python" || continue
    : "${first:=$python}"
    if [ "$(id -u)" != 0 ] || everybody_can_run "$python"; then
        first=$python
        break
    fi
done
if [ -z "$first" ]; then
    echo "no Python >= 3.10 with the venv module: install python3 and python3-venv, or call make PYTHON=/path/to/python3" >&2
    exit 1
fi
command -v "$first"
