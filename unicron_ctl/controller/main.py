"""`unicrond`: configuration, state folder, event log, then the loop."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from pathlib import Path

import click

from detector.classify import Classifier, default_classifier
from detector.severity import SeverityTableError
from unicron_ctl.cli import run
from unicron_ctl.config import Config, load, problems, state_dir
from unicron_ctl.controller.server import Server, say
from unicron_ctl.controller.store import Store
from unicron_ctl.errors import WRONG_USE, UserError
from unicron_ctl.protocol import encryption
from unicron_ctl.slurm.client import SlurmClient


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    "config_path",
    type=click.Path(),
    help="unicron.toml [default: UNICRON_CONFIG, ~/.config/unicron, /etc/unicron].",
)
@click.option("--listen", metavar="ADDRESS", help="For example tcp://0.0.0.0:7451; port 0 takes any free one.")
@click.option("--state-dir", "state", type=click.Path(), help="Folder of the event log.")
@click.option("--check", is_flag=True, help="Check the configuration and end.")
@click.option(
    "--make-key", is_flag=True, help="Make the secret of encrypted connections, print its public key, and end."
)
def unicrond(config_path: str | None, listen: str | None, state: str | None, check: bool, make_key: bool) -> None:
    """The controller of Unicron: heals and plans training jobs on Slurm."""
    config = load(config_path)
    classifier = classifier_of(config)
    if listen:
        config.controller.listen = listen
        for problem in problems(config.controller):
            raise UserError(f"--listen: {problem}", WRONG_USE)
    if check:
        click.echo(f"{config.path or 'defaults'}: no problem found")
        return
    folder = Path(state) if state else state_dir(config)
    if make_key:
        click.echo(f'public_key = "{encryption.make_key(folder)}"  # into [controller] of unicron.toml on all nodes')
        return
    lock = claim(folder)
    try:
        serve(config, config_path, folder, classifier)
    finally:
        os.close(lock)


def serve(config: Config, config_path: str | None, folder: Path, classifier: Classifier) -> None:
    """Runs the controller until a signal ends it."""
    server = Server(config, Store(folder / "events.sqlite"), config.controller.listen, slurm_client(config), classifier)

    def reload() -> None:
        try:
            fresh = load(config_path)
            server.take_config(fresh, classifier_of(fresh))
        except UserError as error:
            say(f"configuration not reloaded, the old one stays: {error}")

    server.reload = reload
    server.catch_signals()
    written = folder / "address"
    write_atomically(written, server.address + "\n")
    jobs = sum(1 for job in server.engine.state.jobs.values() if not job.ended)
    server.engine.emit(
        "started",
        pid=os.getpid(),
        address=server.address,
        jobs=jobs,
        reason=f"controller started with {jobs} jobs from its log",
    )
    print(f"unicrond: listening on {server.address}", flush=True)
    notify("READY=1")
    try:
        server.run()
    finally:
        notify("STOPPING=1")
        written.unlink(missing_ok=True)
        server.close()


def claim(folder: Path) -> int:
    """A lock on the state folder, held until the descriptor is closed. Raises UserError when another controller has
    it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; choose another folder with --state-dir") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise UserError(
            f"{folder}: another unicrond runs on this state folder; stop it first or choose another with --state-dir"
        ) from None
    return lock


def slurm_client(config: Config) -> SlurmClient | None:
    """The client of the configured backend; None for a controller without Slurm."""
    from unicron_ctl.slurm import CommandLineClient

    match config.controller.slurm:
        case "none":
            return None
        case "command":
            return CommandLineClient(timeout=config.controller.slurm_timeout)
        case _:
            from unicron_ctl.slurm import SlurmError, choose_client

            try:
                return choose_client(timeout=config.controller.slurm_timeout)
            except SlurmError as error:  # it may come up later; until then every poll says what is wrong
                say(f"Slurm does not answer yet: {error}")
                return CommandLineClient(timeout=config.controller.slurm_timeout)


def classifier_of(config: Config) -> Classifier:
    """The shipped severity table with the admin's rules before it. Raises UserError."""
    try:
        return default_classifier().load({"severity": config.severity}) if config.severity else default_classifier()
    except SeverityTableError as error:
        raise UserError(f"{config.path}: {error}", WRONG_USE) from None


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old text or the new one."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


def notify(state: str) -> None:
    """Tells systemd (Type=notify), where it is there (sd_notify(3))."""
    where = os.environ.get("NOTIFY_SOCKET")
    if not where:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.sendto(state.encode(), "\0" + where[1:] if where.startswith("@") else where)
    except OSError as error:
        say(f"couldn't notify systemd: {error.strerror}")


def main() -> None:
    """Entry point of the `unicrond` program."""
    sys.exit(run("unicrond", unicrond))


if __name__ == "__main__":
    main()
