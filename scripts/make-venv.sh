#!/usr/bin/env bash
# make-venv.sh PYTHON EXTRAS: makes or completes .venv with this package (editable), its EXTRAS and a CPU build of torch.
# Environment: TORCH (requirement), TORCH_INDEX (package index for torch alone; default: the official CPU index where it
# answers, else pip's own). pip's configuration and PIP_* variables stay in force.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$1 extras=$2
torch=${TORCH:?} index=${TORCH_INDEX:-}
official=https://download.pytorch.org/whl/cpu

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    echo "venv: making .venv with $python"
    rm -rf .venv
    "$python" -m venv .venv
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check -q --no-input "$@"; }

if ! .venv/bin/python - "$torch" <<'PROBE'
import sys
from importlib.metadata import PackageNotFoundError, version
wanted = sys.argv[1].partition("==")[2]
try:
    found = version("torch").partition("+")[0]
except PackageNotFoundError:
    sys.exit(1)
sys.exit(0 if wanted in ("", found) else 1)
PROBE
then
    if [ -z "$index" ] && timeout 4 .venv/bin/python - "$official/" <<'PROBE' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=3).close()
PROBE
    then
        index=$official
    fi
    echo "venv: installing $torch${index:+ from $index}"
    pip install ${index:+--index-url "$index"} "$torch"
fi
echo "venv: installing slurm-jap [$extras]"
pip install -e ".[$extras]"
