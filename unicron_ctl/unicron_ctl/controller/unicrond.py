"""`unicrond`: configuration, state folder, event log, then the loop."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click

from unicron_ctl.controller.server import journal
from unicron_ctl.controller.server.sockets import Ports, bind
from unicron_ctl.controller.server.standby import (
    Isolation,
    Rival,
    SecondLeader,
    another_leader,
    claim_with_ports,
    other_hosts,
    wait_for_claim,
)
from unicron_ctl.controller.server.systemd import SystemdNotifier
from unicron_ctl.shared.log.state_copies import replace_damaged
from unicron_ctl.shared.log.store import LogDamaged
from unicron_ctl.shared.log.term import Claim, Renewal, Tenure
from unicron_ctl.shared.protocol import encryption
from unicron_ctl.shared.settings import limits
from unicron_ctl.shared.settings.config import Config, listen_problem, port_notes, rule_values
from unicron_ctl.shared.settings.config_file import examine, refuse, without_notify
from unicron_ctl.shared.settings.places import state_dir
from unicron_ctl.shared.slurm import CommandLineClient, SlurmClient, SlurmError, choose_client
from unicron_ctl.shared.system import descriptors
from unicron_ctl.shared.system.addresses import endpoint
from unicron_ctl.shared.system.collection import no_collection
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.one_thread import one_thread
from unicron_ctl.shared.system.printable import print_text
from unicron_ctl.shared.system.program import run
from unicron_ctl.shared.system.release import version_option
from unicron_ctl.shared.system.whole_file import write_whole

with one_thread(), no_collection():
    from unicron_ctl.controller.server.server import Server

PROGRAM = "unicrond"
Read = Callable[[], tuple[Config, list[str]]]  # `examine` of the same file
CALLS_END_SECONDS = 2.0  # for one of Slurm's programs to end after its time limit
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
    read = partial(examine, config_path, listen=listen)
    config, problems = read()
    if check:
        return report(config, problems)
    accept(config, problems)
    for line in port_notes(config.controller):
        log.warning("%s", line)
    folder = Path(state) if state else state_dir(config)
    if make_key:
        print_text(f'public_key = "{encryption.make_key(folder)}"  # into [controller] of unicron.toml on all nodes')
        return 0
    notifier = SystemdNotifier()
    client = slurm_client(config)  # Slurm may not answer for a while: no lease waits for it
    try:
        lead(config, read, folder, client, notifier)
    except LogDamaged as error:
        moved_to = replace_damaged(folder, error.why)
        text = "%s was damaged (%s): it is in %s, and a new one begins; jobs are adopted"
        log.error(text, error.path, error.why, moved_to)
        lead(config, read, folder, client, notifier)
    return 0


def lead(config: Config, read: Read, folder: Path, client: SlurmClient | None, notifier: SystemdNotifier) -> None:
    """Claims the state folder, at once or as soon as it can, and runs the controller. Raises LogDamaged."""
    if len(config.controller.addresses) < 2:
        section = config.controller
        claimed, ports = claim_with_ports(
            folder, False, lambda: bind(section.listen, section.metrics, section.addresses)
        )
    else:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it reads the configuration again when it leads
        claimed, ports = wait_for_claim(folder, config.controller, notifier.waiting)
        config = read_again(config, read)
    try:
        serve(config, read, claimed, ports, client, notifier)
    finally:
        claimed.close()


def accept(config: Config, problems: Sequence[str]) -> None:
    """Logs the problems of [notify], whose other targets are told all the same. Raises UserError for any other."""
    refuse(config.path, without_notify(problems))
    for line in problems:
        log.error("%s: %s; until that is mended, it is left out", config.path, line)


def read_again(config: Config, read: Read) -> Config:
    """Returns the configuration as it is by now, or the old one if the new one is wrong. Addresses stay the same."""
    try:
        fresh, problems = read()
        accept(fresh, problems)
    except UserError as error:
        log.error("the configuration was not read again, and the old one stays: %s", error)
        return config
    fresh.controller.listen, fresh.controller.metrics = config.controller.listen, config.controller.metrics
    return fresh


def report(config: Config, problems: list[str]) -> int:
    """Prints for `--check` every problem, or the rules with their values. Returns the exit status."""
    where = config.path or "defaults"
    try:
        encryption.public_key({}, config)
    except UserError as error:
        problems = [*problems, str(error).removeprefix(f"{config.path}: ")]
    for line in problems:
        print_text(f"{PROGRAM}: {where}: {line}", err=True)
    if problems:
        return WRONG_USE
    for line in port_notes(config.controller):
        print_text(f"{PROGRAM}: {where}: {line}", err=True)
    for line in limits.rule_lines(rule_values(config.controller, os.environ)[0], config.controller.slurm != "none"):
        print_text(line)
    print_text(f"{where}: no problem found")
    return 0


def serve(
    config: Config,
    read: Read,
    claimed: Claim,
    ports: Ports,
    client: SlurmClient | None,
    notifier: SystemdNotifier,
) -> None:
    """Runs the controller until a signal ends it. read: reads the configuration again."""
    granted = descriptors.raise_limit()
    if shortage := descriptors.shortage(granted):
        log.warning("%s", shortage)
    store = claimed.store
    connections = descriptors.connections(granted)
    tenure = Tenure(claimed.lease)

    def progress() -> None:
        notifier.starting(time.monotonic())
        claimed.renew()

    try:
        with no_collection():
            server = Server(config, store, ports, client, config.classifier(), connections, progress, tenure)
    except LogDamaged:
        ports.close()
        raise
    if claimed.stolen:
        server.worker.not_before = time.monotonic() + config.controller.slurm_timeout + CALLS_END_SECONDS
    renewal = keep_lease(config, claimed, tenure, server) if claimed.lease else None

    def reload() -> None:
        notifier.reloading()
        try:
            fresh, problems = read()
            accept(fresh, problems)
            server.apply_config(fresh, fresh.classifier())
        except UserError as error:
            server.keep_config(str(error))
        notifier.ready()

    server.reload = reload
    server.watchdog = notifier.watchdog
    server.catch_signals()
    address_file = store.path.with_name("address")
    write_whole(address_file, server.address + "\n")
    server.record_start()
    journal.announce(PROGRAM, f"listening on {server.address}")
    notifier.ready()
    try:
        server.run()
    finally:
        notifier.stopping()
        if tenure.valid:  # else it is another's
            address_file.unlink(missing_ok=True)
        server.close()
        if renewal is not None:
            renewal.close()


def keep_lease(config: Config, claimed: Claim, tenure: Tenure, server: Server) -> Renewal:
    """Renews the lease of the claimed term, and steps down where this host is cut off and a standby waits."""
    rival = Rival(claimed.store.path.parent)
    renewal = Renewal(claimed.store, tenure, rival.read_mark)
    addresses, believed = config.controller.addresses, config.agent.controller_users
    isolation = Isolation(rival, server.worker.call, lambda: server.heard_agents, lambda: other_hosts(addresses))
    port = endpoint(server.address)[1]
    second = SecondLeader(lambda: another_leader(addresses, port, believed), server.worker.call)

    def check_rivals(now: float) -> None:
        isolation.check_isolation(now)
        second.check_others(now)

    server.turned = check_rivals
    return renewal


def slurm_client(config: Config) -> SlurmClient | None:
    """The client of the configured backend; None for a controller without Slurm."""
    backend, seconds = config.controller.slurm, config.controller.slurm_timeout
    if backend == "none":
        return None
    if backend == "auto":
        try:
            return choose_client(timeout=seconds)
        except SlurmError as error:  # it may come up later; until then every poll says what is wrong
            log.warning("Slurm does not answer yet: %s", error)
    return CommandLineClient(timeout=seconds)


def main() -> None:
    """Entry point of the `unicrond` program."""
    faulthandler.enable()  # systemd ends a stalled loop with SIGABRT: the journal then has where it stood
    sys.exit(run(PROGRAM, unicrond, tell=journal.tell_error))


if __name__ == "__main__":
    main()
