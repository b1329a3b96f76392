"""`unicronctl classify`: what an error line, an exit status, an Xid or a Slurm state would become, and why."""

from __future__ import annotations

import re
import sys

import click
import msgspec
from msgspec import UNSET, UnsetType

from unicron_ctl.shared.commands.options import print_json
from unicron_ctl.shared.settings.config_file import load
from unicron_ctl.shared.system.printable import print_text
from unicron_detector.failures.classify import Classifier
from unicron_detector.failures.severity import Verdict
from unicron_detector.failures.statements import lines_outside_frames

_XID_LINE = re.compile(r"\bNVRM:? .{0,120}\bXid\b ?\(", re.IGNORECASE)
"""Only NVIDIA's driver writes this, so a text with it needs no `--source kernel`."""


@click.command(name="classify")
@click.argument("text", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line of input.")
@click.option(
    "--config", metavar="FILE", help="unicron.toml with [[severity.rule]] tables [default: as unicrond finds it]."
)
@click.option(
    "--source",
    metavar="NAME",
    help="Where the text comes from: exception, stderr, kernel, nccl, watchdog [default: kernel for an Xid's line, "
    "exception for any other].",
)
@click.option("--exit", "status", metavar="STATUS", help="An exit status: 1, -9, SIGKILL or Slurm's 0:9.")
@click.option("--oom", is_flag=True, help="With --exit: the kernel counted an out-of-memory kill.")
@click.option("--xid", type=int, metavar="CODE", help="An NVIDIA Xid.")
@click.option("--slurm", metavar="STATE", help="A Slurm job or node state.")
@click.option("--lines", is_flag=True, help="Judge each line by itself (a log), and leave out lines that are no fault.")
def command(
    text: str | None,
    as_json: bool,
    config: str | None,
    source: str | None,
    status: str | None,
    oom: bool,
    xid: int | None,
    slurm: str | None,
    lines: bool,
) -> None:
    """Say what TEXT would become: cause, severity, first action, and the rule that decides.

    TEXT is an error text, "-" reads it from standard input.

    \b
    unicronctl classify "RuntimeError: CUDA error: an illegal memory access was encountered"
    dmesg | unicronctl classify --source kernel --lines -
    unicronctl classify --exit 0:9 --oom
    """
    codes = sum(value is not None for value in (status, xid, slurm))
    needless = text is not None and (xid is not None or slurm is not None)
    if codes > 1 or needless or (text is None and not codes):
        raise click.UsageError("give a TEXT (or - for standard input), or one of --exit, --xid, --slurm")
    if lines and codes:
        raise click.UsageError("--lines goes with a TEXT only")
    classifier = load(config).classifier()
    words = sys.stdin.read() if text == "-" else text or ""
    if lines:
        return _print_lines(classifier, words, source, as_json)
    try:
        if status is not None:
            verdict = classifier.exit(status, words, oom)
        elif xid is not None:
            verdict = classifier.xid(xid)
        else:
            verdict = classifier.slurm(slurm) if slurm is not None else classifier.text(words, source or _source(words))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    _print(verdict, as_json)


def _print_lines(classifier: Classifier, text: str, source: str | None, as_json: bool) -> None:
    for line in lines_outside_frames(text):
        if verdict := classifier.match(line, source or _source(line)):
            _print(verdict, as_json, line)


def _source(text: str) -> str:
    """Tell the source of a text from its first line, if there is no `--source`."""
    return "kernel" if _XID_LINE.search(text.strip().split("\n", 1)[0]) else "exception"


class TextVerdict(msgspec.Struct, kw_only=True):
    """A verdict on one text."""

    cause: str
    severity: int
    action: str
    reason: str
    rule: str
    scope: str
    text: str | UnsetType = UNSET
    """The line of the input, with `--lines`."""


def _print(verdict: Verdict, as_json: bool, line: str | None = None) -> None:
    if as_json:
        text_verdict = msgspec.convert(verdict, TextVerdict, from_attributes=True)
        text_verdict.text = UNSET if line is None else line
        print_json(text_verdict)
        return
    print_text(f"SEV{int(verdict.severity)} {verdict.cause} -> {verdict.action}  [rule {verdict.rule}]")
    print_text(f"  {verdict.reason}")
