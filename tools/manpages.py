"""Writes man pages and shell completion into a folder laid out as /usr/share is, from what `--help` is made from.

python tools/manpages.py FOLDER

    man/man1/unicronctl.1, unicronctl-COMMAND.1    a page for each command of unicronctl
    man/man5/unicron.toml.5                        the settings, from the structs that read them
    man/man8/unicrond.8, unicron-agent.8           from the programs' options
    man/man8/unicron-plugin.8                      from the plugin's table of options and its plugstack.conf
    bash-completion/completions/, zsh/vendor-completions/, fish/vendor_completions.d/

The files are the same each time: their date is SOURCE_DATE_EPOCH's, or today's where that is not set.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from inspect import cleandoc
from pathlib import Path
from typing import NamedTuple

import click
from click.shell_completion import get_completion_class
from reference_tables import SECTIONS, fields

from unicron_ctl.agent.start.agent_main import cli as agent
from unicron_ctl.cli.unicronctl import commands as every_command
from unicron_ctl.cli.unicronctl import unicronctl
from unicron_ctl.controller.unicrond import unicrond
from unicron_ctl.shared.settings.variables import OF_JOBS, OF_PROGRAMS, Variable
from unicron_ctl.shared.system.errors import FAILURE, PROBLEM_FOUND, WRONG_USE

ROOT = Path(__file__).resolve().parent.parent
SPANK, PLUGSTACK = ROOT / "slurm_plugin/spank", ROOT / "slurm_plugin/plugstack.conf.d/zz-unicron.conf"
COMPLETION = {
    "bash": "bash-completion/completions/{}",
    "zsh": "zsh/vendor-completions/_{}",
    "fish": "fish/vendor_completions.d/{}.fish",
}
STATUS = (
    ("0", "success"),
    (str(FAILURE), "an error; one line on standard error says what to do next"),
    (str(WRONG_USE), "wrong use: an option, an input file, the configuration"),
    (str(PROBLEM_FOUND), "the command did what it is for, and found something that needs somebody"),
)
OPTION = re.compile(r'\{\s*"([\w-]+)",\s*(NULL|"\w+"),\s*((?:"(?:[^"\\]|\\.)*"\s*)+),')
ARGUMENT = re.compile(r"^#   (\w+=)\s+(.*)$", re.MULTILINE)
LEFT = ".nh\n.ds AD l\n.ad l\n"  # AD: how groff 1.23 adjusts each paragraph, whatever was set before
Rows = Iterable[tuple[str, str]]  # term, text


class Page(NamedTuple):
    """A man page. text: what follows its head."""

    name: str
    section: int
    summary: str
    text: str


# ---------------------------------------------------------------- roff
def plain(text: str) -> str:
    """The text as roff shows it, with no character that means something to roff."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    escaped = escaped.replace('"', "\\(dq").replace("^", "\\(ha").replace("~", "\\(ti")
    escaped = re.sub(r"[^\x00-\x7f]", lambda found: f"\\[u{ord(found[0]):04X}]", escaped)
    escaped = re.sub(r"([|,])(?=\S)", r"\1\\:", escaped)  # where a line may end within a word
    return "\n".join(f"\\&{line}" if line.startswith(".") else line for line in escaped.split("\n"))


def marked(text: str) -> str:
    """Makes roff of Markdown: names in backticks become bold, of links only the words stay."""
    text = re.sub(r"\[([^\]]+)\]\([^)\s]+\)", r"\1", text)
    parts = text.split("`")
    return "".join(f"\\fB{plain(part)}\\fR" if place % 2 else plain(part) for place, part in enumerate(parts))


def head(name: str) -> str:
    """The line above a section."""
    return f'.SH "{plain(name)}"\n'


def terms(rows: Rows) -> str:
    """A list of terms, each with its text; terms are roff, texts too."""
    return "".join(f".TP\n{term}\n{text}\n" for term, text in rows)


def bold(text: str) -> str:
    return f"\\fB{plain(text)}\\fR"


def paragraphs(text: str) -> str:
    """The text of a docstring as click reads it: \\b in front of a paragraph keeps its lines."""
    made = []
    for paragraph in cleandoc(text).split("\f")[0].split("\n\n"):
        lines = [line for line in paragraph.split("\n") if line != "\b"]
        if lines != paragraph.split("\n"):
            made.append(".PP\n.nf\n" + "\n".join(plain(f"    {line}") for line in lines) + "\n.fi\n")
        elif paragraph.strip():
            made.append(f".PP\n{plain(' '.join(paragraph.split()))}\n")
    return "".join(made)


# ---------------------------------------------------------------- commands of click
def context(command: click.Command, name: str, above: click.Context | None = None) -> click.Context:
    """A context in which the command has this name, below that of its group."""
    return click.Context(command, above, name, **command.context_settings)


def usage(here: click.Context) -> str:
    pieces = here.command.collect_usage_pieces(here)
    return f".PP\n{bold(here.command_path)} {plain(' '.join(pieces))}\n"


def options(here: click.Context) -> str:
    """The options, and what `--help` tells of arguments."""
    records = [record for param in here.command.get_params(here) if (record := param.get_help_record(here))]
    return terms((bold(names), plain(text)) for names, text in records if text)


def subcommands(here: click.Context) -> Iterator[click.Context]:
    """The contexts of the commands of a group, in the order of `--help`."""
    assert isinstance(here.command, click.Group)
    for name in here.command.list_commands(here):
        command = here.command.get_command(here, name)
        assert command is not None
        if not command.hidden:
            yield context(command, name, here)


def described(command: click.Command) -> str:
    """What it does, and below that what its help has at the end."""
    return paragraphs(command.help or "") + paragraphs(command.epilog or "")


def command_page(here: click.Context, section: int, more: str = "") -> Page:
    """The page of a command, and of those below it. more: sections at its end."""
    text = head("SYNOPSIS") + usage(here) + head("DESCRIPTION") + described(here.command)
    text += head("OPTIONS") + options(here)
    if isinstance(here.command, click.Group):
        text += head("COMMANDS")
        for below in subcommands(here):
            text += f'.SS "{plain(below.info_name or "")}"\n' + usage(below) + described(below.command) + options(below)
    return Page(here.command_path.replace(" ", "-"), section, summary(here.command), text + more)


def summary(command: click.Command) -> str:
    """The first sentence of its help, without the full stop."""
    first = " ".join((command.help or "").split("\f")[0].split("\n\n")[0].split())
    return re.split(r"(?<=[\w)])\.(?:\s|$)", first)[0]


def main_page() -> Page:
    """unicronctl(1): its commands with the page of each."""
    here = context(unicronctl, "unicronctl")
    commands = (
        (f"\\fBunicronctl\\-{plain(name)}\\fR(1)", plain(one.line)) for name, one in sorted(every_command().items())
    )
    text = head("SYNOPSIS") + usage(here) + head("DESCRIPTION") + described(unicronctl)
    text += head("OPTIONS") + options(here) + head("COMMANDS") + terms(commands)
    text += statuses() + variables(OF_PROGRAMS) + see("unicron.toml(5)", "unicrond(8)", "unicron-plugin(8)")
    return Page("unicronctl", 1, summary(unicronctl), text)


# ---------------------------------------------------------------- parts of several pages
def statuses() -> str:
    return head("EXIT STATUS") + terms((bold(number), plain(text)) for number, text in STATUS)


def variables(listed: Iterable[Variable]) -> str:
    """The variables, each with its default."""
    rows = ((bold(one.name), f"{marked(one.meaning)} [default: {marked(one.default)}]") for one in listed)
    return head("ENVIRONMENT") + terms(rows)


def see(*pages: str) -> str:
    names = (f"\\fB{plain(name)}\\fR({number}" for name, _, number in (page.partition("(") for page in pages))
    return head("SEE ALSO") + ",\n".join(names) + "\n"


# ---------------------------------------------------------------- settings
def settings_page() -> Page:
    """unicron.toml(5): each section with its keys."""
    text = head("DESCRIPTION")
    text += paragraphs(
        """
        unicron.toml has the settings of unicrond, of the agents and of the health checks, in TOML. A section or a key
        that nobody knows is an error. "unicronctl config check" and "unicrond --check" print everything that is wrong.
        A key that is left out has its default.
        """
    )
    for name, struct in SECTIONS.items():
        text += head(f"[{name}]") + f".PP\n{marked(' '.join(cleandoc(struct.__doc__ or '').split()))}\n"
        text += terms(
            (f"{marked(key)} (default: {marked(default)})", " ".join(filter(None, (ranged(kind), marked(meaning)))))
            for key, default, kind, meaning in fields("", struct)
        )
    text += head("[severity]")
    text += paragraphs("Rules of your own for failures; they come before those that are shipped.")
    files = ("$UNICRON_CONFIG", "~/.config/unicron/unicron.toml", "/etc/unicron/unicron.toml")
    text += head("FILES") + paragraphs("The first of these that exists is read:")
    text += "".join(f".PP\n{bold(path)}\n" for path in files)
    text += see("unicrond(8)", "unicronctl-config(1)", "unicron-agent(8)")
    return Page("unicron.toml", 5, "the configuration of Unicron", text)


def ranged(text: str) -> str:
    return f"Values: {marked(text)}." if text else ""


# ---------------------------------------------------------------- the plugin
def plugin_options() -> list[tuple[str, str, str]]:
    """(name, value or nothing, meaning) of the plugin's options, from its source. Raises ValueError where none are
    found."""
    found = OPTION.findall((SPANK / "args.c").read_text())
    rows = []
    for name, value, pieces in found:
        text = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', pieces))
        rows.append((name, "" if value == "NULL" else value.strip('"'), text.removeprefix("[unicron] ")))
    if len(rows) < 2:
        raise ValueError(f"{SPANK / 'args.c'}: no table of options was found: see OPTION in {__file__}")
    return rows


def plugin_arguments() -> list[tuple[str, str]]:
    """(NAME=, meaning) of the arguments in plugstack.conf, from the file that is shipped. Raises ValueError where they
    are not those that the plugin reads."""
    rows = ARGUMENT.findall(PLUGSTACK.read_text())
    read = re.findall(r'strncmp\(av\[i\], "(\w+=)"', (SPANK / "config.c").read_text())
    if sorted(name for name, _ in rows) != sorted(read):
        raise ValueError(f"{PLUGSTACK} describes {[name for name, _ in rows]}, and the plugin reads {read}")
    return rows


def plugin_page() -> Page:
    """unicron-plugin(8): what the SPANK plugin adds to srun, sbatch and salloc, and its line in plugstack.conf."""
    line = next(line for line in PLUGSTACK.read_text().splitlines() if line and not line.startswith("#"))
    comment = re.findall(r"^# (?! )(.*)$", PLUGSTACK.read_text(), re.MULTILINE)
    text = head("SYNOPSIS") + f".PP\n{plain(line)}\n"
    text += head("DESCRIPTION") + f".PP\n{plain(' '.join(comment))}\n"
    text += head("ARGUMENTS IN PLUGSTACK.CONF")
    text += terms((bold(name), plain(meaning)) for name, meaning in plugin_arguments())
    text += head("OPTIONS OF SRUN, SBATCH AND SALLOC")
    text += terms(
        (bold(f"--{name}" + (f"={value}" if value else "")), plain(meaning))
        for name, value, meaning in plugin_options()
    )
    text += variables(OF_JOBS)
    files = (plain("/etc/slurm/plugstack.conf.d/zz-unicron.conf"), plain("/etc/unicron/plugstack.conf"))
    text += head("FILES") + "".join(f".PP\n\\fB{path}\\fR\n" for path in files)
    text += see("srun(1)", "sbatch(1)", "salloc(1)", "spank(7)", "unicron-agent(8)", "unicron.toml(5)")
    return Page("unicron-plugin", 8, "Slurm's plugin that has Unicron heal a job", text)


# ---------------------------------------------------------------- all
def pages() -> list[Page]:
    """All man pages."""
    made = [main_page(), settings_page(), plugin_page()]
    for here in subcommands(context(unicronctl, "unicronctl")):
        made.append(command_page(here, 1, statuses() + see("unicronctl(1)", "unicron.toml(5)")))
    programs = [variable for variable in OF_PROGRAMS if "unicronctl" not in variable.meaning]
    of_unicrond = statuses() + variables(programs) + see("unicronctl(1)", "unicron.toml(5)", "unicron-agent(8)")
    made.append(command_page(context(unicrond, "unicrond"), 8, of_unicrond))
    of_agent = variables(OF_JOBS) + see("unicron-plugin(8)", "unicron.toml(5)", "unicrond(8)")
    made.append(command_page(context(agent, "unicron-agent"), 8, of_agent))
    return made


def version() -> str:
    """The release, from setup.cfg."""
    found = re.search(r"^version = (\S+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert found, "setup.cfg has no version"
    return found[1]


def rendered(page: Page, date: str) -> str:
    """The whole file."""
    parts = (page.name.upper(), str(page.section), date, f"Unicron {version()}", "Unicron")
    title = " ".join(f'"{plain(part)}"' for part in parts)
    return f".TH {title}\n{LEFT}{head('NAME')}{plain(page.name)} \\- {plain(page.summary)}\n{page.text}"


def completions() -> Iterator[tuple[str, str]]:
    """(path, text) of what each shell reads."""
    for name in ("unicronctl", "unicrond"):
        variable = f"_{name.upper()}_COMPLETE"
        for shell, path in COMPLETION.items():
            kind = get_completion_class(shell)
            assert kind is not None, f"click knows no {shell}"
            values = {"complete_func": f"_{name}_completion", "complete_var": variable, "prog_name": name}
            yield path.format(name), kind.source_template % values


def files() -> dict[str, str]:
    """All that there is to write: path, text."""
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
    date = time.strftime("%Y-%m-%d", time.gmtime(seconds))
    made = {f"man/man{page.section}/{page.name}.{page.section}": rendered(page, date) for page in pages()}
    return made | dict(completions())


def main() -> int:
    """Entry point."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: python tools/manpages.py FOLDER", file=sys.stderr)
        return WRONG_USE
    for path, text in files().items():
        target = Path(sys.argv[1], path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
