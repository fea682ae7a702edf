"""What a test cluster is asked for, and the configuration files that make Slurm be so."""

from __future__ import annotations

import dataclasses
import shutil
import socket
import sys
from pathlib import Path

from slurm_testbed.machine import CGROUP_ROOT, REPOSITORY, slurm_version

FIRST_PORT = 21000
PORTS_PER_CLUSTER = 40
MAX_ARRAY_SIZE = 1001
MEM_PER_CPU_MB = 1000
KILL_WAIT = 3


@dataclasses.dataclass(kw_only=True)
class Settings:
    """What ``up`` was asked for."""

    directory: str
    nodes: int = 4
    gpus: int = 4
    cpus: int = 16
    memory_mb: int = 16000
    fence: bool = False
    python: str = sys.executable
    """Interpreter that jap.conf names: it has slurm_jap, and the users can run it."""
    owner: int | None = None
    """The cluster ends when this process does."""


def write_configuration(settings: Settings, base: Path, block: int, prefix: str) -> None:
    """All files of ``DIR/etc``. ``base`` is DIR by a name short and plain enough for sockets and for slurm.conf."""
    etc = Path(settings.directory, "etc")
    host = socket.gethostname().partition(".")[0]
    port = FIRST_PORT + block * PORTS_PER_CLUSTER
    nodes = f"{prefix}[1-{settings.nodes}]"
    # An AuthInfo socket is not enough: the accounting client looks for munge by AccountingStoragePass.
    munge = f"{base}/munge/socket"
    if settings.fence:
        confinement = [
            "ProctrackType=proctrack/cgroup",
            "TaskPlugin=task/affinity,task/cgroup",
            "JobAcctGatherFrequency=task=2",
        ]
    else:
        confinement = [
            "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none",
            "JobAcctGatherFrequency=task=1", "JobAcctGatherParams=OverMemoryKill",
        ]  # fmt: skip
    slurm = f"""
ClusterName=japtest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=slurm
AuthType=auth/munge
AuthInfo=socket={munge}
CredType=cred/munge
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/state/slurmctld.pid
SlurmdPidFile={base}/spool/%n.pid
SlurmctldLogFile={base}/log/slurmctld.log
SlurmdLogFile={base}/log/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
MailProg=/bin/true
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
PriorityType=priority/multifactor
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=50000
GresTypes=gpu
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port + 1}
AccountingStoragePass={munge}
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,limits,qos
AccountingStoreFlags=job_comment
JobAcctGatherType=jobacct_gather/linux
JobSubmitPlugins=lua
JobRequeue=1
KillWait={KILL_WAIT}
MinJobAge=600
MaxArraySize={MAX_ARRAY_SIZE}
FirstJobId={block * 1000 + 1}
DefMemPerCPU={MEM_PER_CPU_MB}
NodeName={nodes} NodeHostName={host} NodeAddr=127.0.0.1 Port=[{port + 2}-{port + 1 + settings.nodes}] \
CPUs={settings.cpus} RealMemory={settings.memory_mb} Gres=gpu:fake:{settings.gpus} State=UNKNOWN
PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60
PartitionName=jap Nodes=ALL MaxTime=7-0 DefaultTime=60
"""
    write(etc / "slurm.conf", slurm.lstrip() + "\n".join(confinement) + "\n")
    write(etc / "gres.conf", f"NodeName={nodes} Name=gpu Type=fake File={base}/dev/gpu[0-{settings.gpus - 1}]\n")
    if settings.fence:
        cgroup = "CgroupPlugin=cgroup/v1\nConstrainDevices=yes\nConstrainRAMSpace=yes\nConstrainCores=no\n"
        if (CGROUP_ROOT / "memory" / "memory.memsw.limit_in_bytes").exists():
            cgroup += "ConstrainSwapSpace=yes\nAllowedSwapSpace=0\n"
    elif slurm_version() >= (24, 5):
        cgroup = "CgroupPlugin=disabled\n"
    else:
        cgroup = "CgroupPlugin=cgroup/v1\n"  # named, so that nothing is looked for; no other plugin here uses it
    write(etc / "cgroup.conf", cgroup)
    slurmdbd = f"""
AuthType=auth/munge
AuthInfo=socket={munge}
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port + 1}
SlurmUser=slurm
LogFile={base}/log/slurmdbd.log
PidFile={base}/state/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StorageLoc=slurm_acct
"""
    write(etc / "slurmdbd.conf", slurmdbd.lstrip(), mode=0o600, owner="slurm")
    install_plugin(etc, settings)


PASS_THROUGH = """\
-- No plugin in this repository: every job passes as it is.
function slurm_job_submit(job_desc, part_list, submit_uid) return slurm.SUCCESS end
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""


def install_plugin(etc: Path, settings: Settings) -> None:
    """Do what an administrator does: the plugin's files beside slurm.conf, the partition ``jap`` enabled."""
    source = REPOSITORY / "etc"
    for name in ("job_submit.lua", "jap.lua"):
        if (source / name).exists():
            write(etc / name, (source / name).read_text())
        elif name == "job_submit.lua":
            write(etc / name, PASS_THROUGH)
    jap = f"""
Python={settings.python}
MaxArraySize={MAX_ARRAY_SIZE}
DefMemPerCPU={MEM_PER_CPU_MB}M
Partition=jap MaxMembers=64 MaxTime=2-00:00:00 NodeCPUs={settings.cpus} NodeMemory={settings.memory_mb}M \
NodeGPUs={settings.gpus}
"""
    write(etc / "jap.conf", jap.lstrip())


def write(path: Path, text: str, mode: int = 0o644, owner: str | None = None) -> None:
    path.write_text(text)
    path.chmod(mode)
    if owner is not None:
        shutil.chown(path, owner)
