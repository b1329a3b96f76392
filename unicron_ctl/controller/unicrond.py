"""`unicrond`: configuration, state folder, event log, then the loop."""

from __future__ import annotations

import faulthandler
import fcntl
import logging
import os
import sys
import time
from pathlib import Path

import click

from unicron.ctl.controller.log.store import Store
from unicron.ctl.controller.server import journal
from unicron.ctl.controller.server.systemd import SystemdNotifier
from unicron.ctl.protocol import encryption
from unicron.ctl.settings import limits
from unicron.ctl.settings.config import Config, listen_problem, rule_values
from unicron.ctl.settings.config_file import examine, refuse
from unicron.ctl.settings.places import state_dir
from unicron.ctl.slurm.slurm_client import SlurmClient
from unicron.ctl.system import descriptors
from unicron.ctl.system.errors import WRONG_USE, UserError
from unicron.ctl.system.one_thread import one_thread
from unicron.ctl.system.program import run
from unicron.ctl.system.release import version_option
from unicron.detector.failures.classify import Classifier

with one_thread():
    from unicron.ctl.controller.server.server import Server

PROGRAM = "unicrond"
log = logging.getLogger("unicron.controller")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    "config_path",
    type=click.Path(),
    help="unicron.toml [default: UNICRON_CONFIG, ~/.config/unicron, /etc/unicron].",
)
@click.option("--listen", metavar="ADDRESS", help="For example tcp://0.0.0.0:7451; port 0 takes any free one.")
@click.option("--state-dir", "state", type=click.Path(), help="Folder of the event log.")
@click.option("--check", is_flag=True, help="Check the configuration, print every problem or the time-outs, and end.")
@click.option(
    "--make-key", is_flag=True, help="Make the secret of encrypted connections, print its public key, and end."
)
@click.option(
    "--log-level",
    type=click.Choice(journal.LEVELS),
    default="info",
    envvar="UNICRON_LOG_LEVEL",
    show_default=True,
    help="The least important messages that are written to standard error.",
)
@click.option(
    "--log-format",
    type=click.Choice(list(journal.FORMATS)),
    default="text",
    envvar="UNICRON_LOG_FORMAT",
    show_default=True,
    help="How they are written: json is an object a line.",
)
@version_option
def unicrond(
    config_path: str | None,
    listen: str | None,
    state: str | None,
    check: bool,
    make_key: bool,
    log_level: str,
    log_format: str,
) -> int:
    """The controller of Unicron: heals and plans training jobs on Slurm."""
    journal.start(PROGRAM, log_level, form=log_format)
    if listen and (problem := listen_problem(listen)):
        raise UserError(f"--listen: {problem}", WRONG_USE)
    config, found = examine(config_path, listen=listen)
    if check:
        return report(config, found)
    refuse(config.path, found)
    classifier = config.classifier()
    folder = Path(state) if state else state_dir(config)
    if make_key:
        click.echo(f'public_key = "{encryption.make_key(folder)}"  # into [controller] of unicron.toml on all nodes')
        return 0
    lock = claim(folder)
    try:
        serve(config, config_path, folder, classifier)
    finally:
        os.close(lock)
    return 0


def report(config: Config, found: list[str]) -> int:
    """Prints for `--check` every problem, or the rules with their values. Returns the exit status."""
    where = config.path or "defaults"
    try:
        encryption.public_key({}, config)
    except UserError as error:
        found = [*found, str(error).removeprefix(f"{config.path}: ")]
    for line in found:
        click.echo(f"{PROGRAM}: {where}: {line}", err=True)
    if found:
        return WRONG_USE
    for line in limits.rule_lines(rule_values(config.controller, os.environ)[0], config.controller.slurm != "none"):
        click.echo(line)
    click.echo(f"{where}: no problem found")
    return 0


def serve(config: Config, config_path: str | None, folder: Path, classifier: Classifier) -> None:
    """Runs the controller until a signal ends it."""
    notifier = SystemdNotifier()
    granted = descriptors.raise_limit()
    if shortage := descriptors.shortage(granted):
        log.warning("%s", shortage)
    store, listen = Store(folder / "events.sqlite"), config.controller.listen
    connections = descriptors.connections(granted)
    client = slurm_client(config)
    server = Server(config, store, listen, client, classifier, connections, lambda: notifier.starting(time.monotonic()))

    def reload() -> None:
        notifier.reloading()
        try:
            fresh, found = examine(config_path, listen=listen)
            refuse(fresh.path, found)
            server.apply_config(fresh, fresh.classifier())
        except UserError as error:
            server.keep_config(str(error))
        notifier.ready()

    server.reload = reload
    server.watchdog = notifier.watchdog
    server.catch_signals()
    written = folder / "address"
    write_atomically(written, server.address + "\n")
    server.started()
    print(f"{PROGRAM}: listening on {server.address}", flush=True)
    notifier.ready()
    try:
        server.run()
    finally:
        notifier.stopping()
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
    from unicron.ctl.slurm import CommandLineClient

    match config.controller.slurm:
        case "none":
            return None
        case "command":
            return CommandLineClient(timeout=config.controller.slurm_timeout)
        case _:
            from unicron.ctl.slurm import SlurmError, choose_client

            try:
                return choose_client(timeout=config.controller.slurm_timeout)
            except SlurmError as error:  # it may come up later; until then every poll says what is wrong
                log.warning("Slurm does not answer yet: %s", error)
                return CommandLineClient(timeout=config.controller.slurm_timeout)


def write_atomically(path: Path, text: str) -> None:
    """Writes the file so that readers see the old text or the new one."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


def main() -> None:
    """Entry point of the `unicrond` program."""
    faulthandler.enable()  # systemd ends a stalled loop with SIGABRT: the journal then has where it stood
    mark = journal.mark(logging.ERROR) if journal.is_journal(sys.stderr) else ""
    sys.exit(run(PROGRAM, unicrond, mark=mark))


if __name__ == "__main__":
    main()
