"""`unicronctl schema`: the JSON Schema of what the commands print with `--json`."""

from __future__ import annotations

import json

import click
import msgspec

from unicron_ctl.shared.protocol import answer_schema
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.printable import print_text


def _types() -> dict[str, object]:
    """Command -> the type of its JSON."""
    from unicron_ctl.cli.checkpoint import CheckpointReport
    from unicron_ctl.cli.classify import Classified
    from unicron_ctl.cli.config_check import ConfigReport
    from unicron_ctl.cli.doctor import DoctorReport
    from unicron_ctl.cli.logs import LogLine
    from unicron_ctl.cli.pair_test import PairReport
    from unicron_ctl.cli.simulate import PolicyResult
    from unicron_ctl.lab.cluster.cluster_status import ClusterStatus
    from unicron_ctl.lab.demo.report import DemoResult

    return {
        "status": answer_schema.Status,
        "jobs": list[answer_schema.Job],
        "nodes": list[answer_schema.Node],
        "events": answer_schema.Event,
        "logs": LogLine,
        "explain": answer_schema.Explanation,
        "inject": answer_schema.Injected,
        "punish": answer_schema.Injected,
        "report week": answer_schema.Report,
        "pause": answer_schema.Paused,
        "resume": answer_schema.Paused,
        "classify": Classified,
        "plan": answer_schema.Assignment,
        "simulate": list[PolicyResult],
        "checkpoint show": CheckpointReport,
        "cluster status": ClusterStatus,
        "config check": ConfigReport,
        "doctor": DoctorReport,
        "pair-test": PairReport,
        "demo": DemoResult,
    }


@click.command(name="schema")
@click.argument("words", nargs=-1, metavar="[COMMAND]")
def command(words: tuple[str, ...]) -> None:
    """Print the JSON Schema of COMMAND's JSON; without COMMAND, list the commands that have one.

    The schemas of `events`, `logs`, `punish` and `classify` are those of one line.
    """
    types, name = _types(), " ".join(words)
    if not name:
        print_text("\n".join(types), lines=True)
    elif name in types:
        print_text(json.dumps(msgspec.json.schema(types[name]), indent=2), lines=True)
    else:
        raise UserError(f"{name} has no schema: there are {', '.join(types)}", WRONG_USE)
