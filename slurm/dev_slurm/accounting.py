"""The accounting database of a dev cluster: MariaDB, slurmdbd and one account, all in the cluster's directory.

Starts daemons through processes.
"""

from __future__ import annotations

import getpass
import shlex
import socket
import subprocess

from dev_slurm import processes
from dev_slurm.settings import Cluster, ClusterError

PROGRAMS = ("mariadbd", "mariadb", "mariadb-install-db", "slurmdbd", "sacctmgr")
ACCOUNT = "lab"
GRANT = """create database slurm_acct;
create user 'slurm'@'127.0.0.1' identified by 'slurm'; grant all on slurm_acct.* to 'slurm'@'127.0.0.1';
create user 'slurm'@'localhost' identified by 'slurm'; grant all on slurm_acct.* to 'slurm'@'localhost';
"""


def slurm_conf(cluster: Cluster) -> str:
    """Return the lines of slurm.conf for accounting with enforced limits, including limits of GPUs."""
    return f"""AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={cluster.controller_address}
AccountingStoragePort={cluster.port + 1}
AccountingStoragePass={cluster.directory}/run/munge.socket
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu
JobAcctGatherFrequency=5"""


def write(cluster: Cluster) -> None:
    """Write slurmdbd.conf, readable only by its owner, as it contains a password."""
    run, path = cluster.directory / "run", cluster.directory / "etc" / "slurmdbd.conf"
    path.touch(mode=0o600)
    path.write_text(f"""AuthType=auth/munge
AuthInfo=socket={run}/munge.socket
DbdHost={socket.gethostname()}
DbdAddr={cluster.controller_address}
DbdPort={cluster.port + 1}
SlurmUser={getpass.getuser()}
LogFile={cluster.directory}/log/slurmdbd.log
PidFile={run}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={cluster.port + 2}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
""")


def start(cluster: Cluster) -> None:
    """Start the database and slurmdbd, before slurmctld, and add this user to the account `lab`."""
    directory, user = cluster.directory, getpass.getuser()
    database, socket_file = directory / "db", directory / "run" / "my.sock"
    _run(
        cluster,
        "mariadb-install-db",
        *("--no-defaults", f"--user={user}", f"--datadir={database}"),
        *("--auth-root-authentication-method=normal", "--skip-test-db"),
    )
    tuning = ("--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M", "--innodb-flush-log-at-trx-commit=0")
    processes.spawn(
        directory,
        "mariadbd",
        [
            *("mariadbd", "--no-defaults", f"--user={user}", f"--datadir={database}", f"--socket={socket_file}"),
            *(f"--pid-file={directory}/run/my.pid", "--bind-address=127.0.0.1", f"--port={cluster.port + 2}"),
            *(*tuning, "--innodb-lock-wait-timeout=900", "--skip-log-bin", "--performance-schema=OFF"),
        ],
    )
    client = ("mariadb", "--no-defaults", f"--socket={socket_file}", "-uroot")
    processes.wait_for(directory, "mariadbd", lambda: bool(processes.query(directory, *client, "-e", "select 1")))
    _run(cluster, *client, "-e", GRANT)
    processes.spawn(directory, "slurmdbd", ["slurmdbd", "-D"])
    listed = ("sacctmgr", "-nP", "show", "cluster", "format=cluster")
    processes.wait_for(directory, "slurmdbd", lambda: _answers(cluster, *listed))
    _run(cluster, "sacctmgr", "-i", "add", "cluster", "dev")
    _run(cluster, "sacctmgr", "-i", "add", "account", ACCOUNT, "Cluster=dev")
    _run(cluster, *("sacctmgr", "-i", "add", "user", user, f"Account={ACCOUNT}", "Cluster=dev", "AdminLevel=Admin"))
    modified = ("sacctmgr", "-i", "modify", "user", user, "where", "Cluster=dev", "set", f"DefaultAccount={ACCOUNT}")
    _run(cluster, *modified)


def _answers(cluster: Cluster, *argv: str) -> bool:
    environment = processes.environment(cluster.directory)
    return subprocess.run(argv, env=environment, capture_output=True, check=False).returncode == 0


def _run(cluster: Cluster, *argv: str) -> None:
    environment = processes.environment(cluster.directory)
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"{shlex.join(argv)} failed:\n{done.stdout}{done.stderr}")
