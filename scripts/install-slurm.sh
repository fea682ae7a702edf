#!/usr/bin/env bash
# Installs, where it may (root, apt-get) and must (something is missing), what scripts/slurm_cluster.py and the plugin's
# tests need: Slurm with accounting, munge, MariaDB, Lua. Starts none of their services. Never fails for want of rights:
# the tests say themselves what is missing.
set -euo pipefail

absent=()
for program in slurmctld slurmd slurmdbd sbatch sacctmgr munged mariadbd mariadb-install-db lua5.1; do
    PATH=/usr/sbin:/usr/bin:/sbin:/bin command -v "$program" >/dev/null || absent+=("$program")
done
compgen -G '/usr/lib/*/slurm*/accounting_storage_mysql.so' >/dev/null || absent+=(accounting_storage_mysql.so)
compgen -G '/usr/lib/*/slurm*/job_submit_lua.so' >/dev/null || absent+=(job_submit_lua.so)
[ ${#absent[@]} = 0 ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "slurm: not installed (no ${absent[*]}), and installing it needs root and apt-get"
    exit 0
fi

echo "slurm: installing (no ${absent[*]})"
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy" # the packages' own services stay off
    chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
if ! { apt-get update && apt-get install -y --no-install-recommends \
    slurm-wlm slurmdbd slurm-wlm-mysql-plugin slurm-wlm-basic-plugins munge mariadb-server lua5.1; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "slurm: apt-get could not install it; its whole output is in $log" >&2
    exit 1
fi
rm -f "$log"
