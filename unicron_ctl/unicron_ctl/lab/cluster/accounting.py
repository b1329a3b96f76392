"""Accounting for a local cluster: slurmdbd on a private MariaDB, for `sacct`. See slurmdbd.conf(5)."""

from __future__ import annotations

import secrets

from unicron_ctl.lab.cluster.cluster_layout import Layout, Spec

DAEMONS = ("mariadbd", "slurmdbd")
PROGRAMS = (*DAEMONS, "mariadb-install-db", "sacctmgr")
_ADDRESS, _DATABASE, _USER = "127.0.0.1", "slurm_acct_db", "slurm"


def slurm_lines(layout: Layout, spec: Spec) -> list[str]:
    """Return the lines for slurm.conf."""
    if not spec.accounting:
        return ["AccountingStorageType=accounting_storage/none"]
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={_ADDRESS}",
        f"AccountingStoragePort={_slurmdbd_port(spec)}",
        *([f"AccountingStoragePass={layout.munge_socket}"] if spec.auth == "munge" else []),  # munge needs no password
    ]


def ports_needed(spec: Spec) -> int:
    """Return the number of ports besides those of slurmctld and the nodes."""
    return 2 if spec.accounting else 0


def _slurmdbd_port(spec: Spec) -> int:
    return spec.ports[-2]


def _database_port(spec: Spec) -> int:
    return spec.ports[-1]


def write_files(layout: Layout, spec: Spec, user: str) -> None:
    """Write slurmdbd.conf and MariaDB's first commands. Both contain the password of the database, which only this
    machine reaches."""
    password = secrets.token_hex(16)
    auth_info = f"AuthInfo=socket={layout.munge_socket}" if spec.auth == "munge" else ""
    lines = [
        f"AuthType=auth/{spec.auth}",
        auth_info,
        "DbdHost=localhost",
        f"DbdPort={_slurmdbd_port(spec)}",
        f"SlurmUser={user}",
        f"LogFile={layout.log_dir}/slurmdbd.log",
        f"PidFile={layout.short_dir}/slurmdbd.pid",
        "DebugLevel=info",
        "StorageType=accounting_storage/mysql",
        f"StorageHost={_ADDRESS}",
        f"StoragePort={_database_port(spec)}",
        f"StorageUser={_USER}",
        f"StoragePass={password}",
        f"StorageLoc={_DATABASE}",
    ]
    _write_private(layout, "slurmdbd.conf", "\n".join(line for line in lines if line) + "\n")
    _write_private(
        layout,
        "database.sql",
        f"CREATE DATABASE IF NOT EXISTS {_DATABASE};\n"
        f"CREATE OR REPLACE USER '{_USER}'@'{_ADDRESS}' IDENTIFIED BY '{password}';\n"
        f"GRANT ALL ON {_DATABASE}.* TO '{_USER}'@'{_ADDRESS}';\n",
    )


def _write_private(layout: Layout, name: str, text: str) -> None:
    path = layout.etc_dir / name
    path.touch(mode=0o600)  # slurmdbd refuses a file that other users may read
    path.write_text(text)


def install_command(program: str, layout: Layout, user: str) -> list[str]:
    """Return the command that makes an empty database."""
    options = ("--skip-test-db", "--auth-root-authentication-method=normal", "--skip-name-resolve")
    return [program, "--no-defaults", f"--datadir={layout.database_dir}", f"--user={user}", *options]


def database_command(program: str, layout: Layout, spec: Spec, user: str) -> list[str]:
    """Return the command that runs MariaDB, with the settings of slurmdbd.conf(5) and small sizes."""
    return [
        program,
        "--no-defaults",
        f"--datadir={layout.database_dir}",
        f"--user={user}",
        f"--socket={layout.database_dir}/socket",
        f"--pid-file={layout.database_dir}/pid",
        f"--bind-address={_ADDRESS}",
        f"--port={_database_port(spec)}",
        f"--init-file={layout.etc_dir}/database.sql",
        "--skip-name-resolve",
        "--innodb-buffer-pool-size=128M",
        "--innodb-lock-wait-timeout=900",
        "--innodb-flush-log-at-trx-commit=0",
    ]
