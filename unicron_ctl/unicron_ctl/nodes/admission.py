"""``python -m unicron_ctl.nodes.admission``: the admission test of this node, for Slurm's prolog and
HealthCheckProgram. It checks the node, drains it if its hardware is proven bad, and reports to the controller.

The exit status is 100 if the node is proven bad, 0 if it is not (or a check gave no result), 2 for wrong use. No other
status says anything about the node: Python ends with 1 if it cannot even import this program, and that must not drain a
cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import socket
import sys
import syslog
import threading
import time
from collections.abc import Sequence

import msgspec

from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.settings.config import Config, skip_problem
from unicron_ctl.shared.settings.config_file import load_valid_part
from unicron_ctl.shared.slurm import drains
from unicron_ctl.shared.system.errors import UserError, one_line
from unicron_detector.health.checks import Settings, checks_of
from unicron_detector.health.runner import Report, Result, run

PROVEN_BAD = 100
BUDGET_SECONDS = 8.0
USUAL_CONFIG = "/etc/unicron/unicron.toml"
REPORT_SECONDS = 2.0  # for the controller's answer: a node must not wait for a controller that is down


def report(controller: str, node: str, source: str, found: Report, began: float, drain: bool = False) -> None:
    """Report to the controller. Raises UserError.

    began: the time on this node's clock at which the checks began. drain: whether the controller should drain a bad
    node that could not drain itself.
    """
    question = {"kind": "health", "node": node, "source": source, "verdict": found.verdict, "at": began, "drain": drain}
    reason = one_line(found.reason)[: drains.REASON_LENGTH]
    ask_controller({**question, "reason": reason}, controller, timeout=REPORT_SECONDS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, drain and report. Return the exit status."""
    options = _parser().parse_args(arguments)
    log = _Log(options.log, f"unicron health: node {options.node}: ")
    status = [0]
    timer = threading.Timer(options.seconds, _out_of_time, (log, options.seconds, status))
    timer.daemon = True
    timer.start()
    try:
        return _examine(options, log, status)
    finally:
        timer.cancel()  # a caller that imports this function lives on


def _examine(options: argparse.Namespace, log: _Log, status: list[int]) -> int:
    """Check, drain and report. The process ends with `status` if its time runs out meanwhile."""
    began, mono = time.time(), time.monotonic()
    config, problems = _config(options.config)
    for line in problems:
        log(f"{options.config}: {line}")
    found = _check(options, config, log)
    if problems:  # so that an admin learns that the settings are not as meant
        warning = Result("unicron.toml", "warning", problems[0], 0.0, {})
        found = dataclasses.replace(found, results=(*found.results, warning))
    if found.verdict == "bad":
        status[0] = PROVEN_BAD
        log(f"proven bad: {found.reason}")
        if options.drain == "on" and not _drain(options, found, log):
            status[0] = 0
    try:
        if controller := options.controller or ",".join(config.controller.addresses):
            report(controller, options.node, options.at, found, began, options.drain == "on")
    except UserError as error:
        log(f"the controller was not told: {error}")
    if options.print:
        print(f"{found.verdict}: {found.reason} ({time.monotonic() - mono:.2f} s)")
    return status[0]


def _usual_config() -> str | None:
    """Return the default configuration file; None if it does not exist."""
    path = os.environ.get("UNICRON_CONFIG") or USUAL_CONFIG
    return path if os.path.isfile(path) else None


def _config(path: str | None) -> tuple[Config, list[str]]:
    """Return the valid part of the file, and the problems of the rest: a wrong line must not switch other checks
    off."""
    try:
        return load_valid_part(path) if path else (Config(), [])
    except UserError as error:
        return Config(), [f"{str(error).removeprefix(f'{path}: ')}; the defaults are used"]


def _check(options: argparse.Namespace, config: Config, log: _Log) -> Report:
    named = tuple(name.strip() for name in options.skip.split(",") if name.strip())
    if odd := skip_problem(named, config.health.programs):
        log(odd)
    share = options.seconds * 0.6  # the rest is for Slurm and the controller
    settings = msgspec.structs.asdict(config.health)
    settings |= {"skip": (*config.health.skip, *named), "timeout": min(config.health.timeout, share)}
    settings |= {"kernel_state": options.state} if options.state else {}
    checks = checks_of(config.health, options.at == "prolog")
    return run(Settings(**settings, severity=config.severity), checks=checks)


def _drain(options: argparse.Namespace, found: Report, log: _Log) -> bool:
    """Drain the node. Return False if that, or a failing prolog, would be one node too many."""
    from unicron_ctl.shared.slurm.command_line import CommandLineClient

    client = CommandLineClient(timeout=options.seconds * 0.25)
    reason = drains.drain_reason(drains.HEALTH, found.reason)
    try:
        log(drains.drain_node(client, options.node, reason, options.most_drained))
    except drains.TooMany as error:
        log(f"not drained: {error}")
        return False
    except UserError as error:
        log(f"could not drain: {error}")
    return True


def _out_of_time(log: _Log, seconds: float, status: list[int]) -> None:
    """End the process: a thread that hangs in the kernel cannot be ended."""
    log(f"gave up after {seconds:g} s; nothing more is concluded")
    os._exit(status[0])


class _Log:
    """Writes lines to a file, to syslog or to stderr. If that fails, the program goes on."""

    def __init__(self, target: str, prefix: str) -> None:
        self._target, self._prefix = target, prefix

    def __call__(self, text: str) -> None:
        line = self._prefix + one_line(text)
        with contextlib.suppress(OSError):
            if self._target == "syslog":
                syslog.openlog("unicron", 0, syslog.LOG_DAEMON)
                syslog.syslog(syslog.LOG_WARNING, line)
            elif self._target:
                with open(self._target, "a") as file:
                    file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {line}\n")
            else:
                print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    name, environment = "python -m unicron_ctl.nodes.admission", os.environ
    parser = argparse.ArgumentParser(name, description="Admission test of this node.")
    here = os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    parser.add_argument("--at", choices=("prolog", "interval"), default="interval", help="who calls")
    parser.add_argument("--node", default=here, metavar="NAME", help="Slurm's name of this node")
    parser.add_argument(
        "--config", metavar="FILE", default=_usual_config(), help=f"unicron.toml with a [health] table [{USUAL_CONFIG}]"
    )
    parser.add_argument("--skip", default="", metavar="NAMES", help="checks to leave out; all: every one")
    parser.add_argument("--seconds", type=_seconds, default=BUDGET_SECONDS, help="for everything together")
    parser.add_argument("--drain", choices=("on", "off"), default="on", help="drain a node that is proven bad")
    parser.add_argument("--state", default="", metavar="DIR", help="what the check of the kernel log keeps is there")
    parser.add_argument(
        "--most-drained", type=int, default=drains.MOST_DRAINED, metavar="N", help="then it drains no more"
    )
    controller = environment.get("UNICRON_CONTROLLER", "")
    parser.add_argument("--controller", metavar="ADDRESS", default=controller, help="[address of the configuration]")
    parser.add_argument("--log", default="", metavar="FILE", help="a file or syslog; default stderr")
    parser.add_argument("--print", action="store_true", help="print the verdict")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 50.0:  # slurmd ends a HealthCheckProgram after 60 s
        raise argparse.ArgumentTypeError(f"{text}: 0.1 to 50")
    return value


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
