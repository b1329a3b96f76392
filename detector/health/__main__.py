"""``python -m detector.health``: for the prolog and for HealthCheckProgram.

Exit status: 1 when the node's hardware is proven bad, else 0, also when a check gave no answer or the configuration
cannot be used (a slip in a file must not drain a cluster; it is said on stderr). 2 is wrong use of this command.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys

from detector.health.checks import CHECKS, Settings
from detector.health.runner import load_settings, run


def main(arguments: list[str] | None = None) -> int:
    """Runs the checks, prints the report, returns the exit status."""
    options = _parser().parse_args(arguments)
    overrides = {
        "timeout": options.timeout,
        "gpus": options.gpus,
        "clock_reference": options.clock_reference,
        "paths": tuple(options.path) or None,
        "nics": tuple(options.nic) or None,
    }
    try:
        settings = load_settings(options.config, **overrides)
    except (OSError, ValueError) as error:
        print(f"unicron-health: {error}; the defaults are used", file=sys.stderr)
        settings = load_settings(None, **overrides)
    off = _names(options.skip) + _names(os.environ.get("UNICRON_HEALTH_SKIP", ""))
    report = run(dataclasses.replace(settings, skip=(*settings.skip, *off)), _names(options.only))
    if options.json:
        print(json.dumps(report.as_dict()))
    else:
        for result in report.results:
            print(f"{result.verdict:8} {result.name:12} {result.seconds:7.3f} s  {result.reason}")
    return 1 if report.verdict == "bad" else 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _parser() -> argparse.ArgumentParser:
    defaults = Settings()
    parser = argparse.ArgumentParser("python -m detector.health", description="Check whether this node may run jobs.")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--config", metavar="FILE", help="unicron.toml with a [health] table")
    parser.add_argument("--only", metavar="NAMES", default="", type=_known, help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--skip", metavar="NAMES", default="", help="switch checks off ('all': every one)")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, help=f"per check, default {defaults.timeout:g}")
    parser.add_argument("--gpus", metavar="N", type=int, help="how many GPUs there must be")
    parser.add_argument("--nic", metavar="NAME", action="append", default=[], help="interface that must be up")
    parser.add_argument("--path", metavar="DIRECTORY", action="append", default=[], help="must be writable")
    parser.add_argument("--clock-reference", metavar="EPOCH", type=float, help="the controller's time")
    return parser


def _known(text: str) -> str:
    for name in _names(text):
        if name not in CHECKS:
            raise argparse.ArgumentTypeError(f"no check {name!r}; choose from {', '.join(CHECKS)}")
    return text


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a check that hangs in the kernel must not keep the prolog
