"""The list of environment variables names those that the sources read, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from unicron_ctl.cli.unicronctl import commands
from unicron_ctl.shared.settings.variables import OF_JOBS, OF_PROGRAMS

ROOT = Path(__file__).resolve().parents[5]
NAME = re.compile(r"""["'`]_?(UNICRON_[A-Z_]+)[="'`]""")
# Between the programs of Unicron, for tests, or keys of health.conf, prolog.conf and epilog.conf.
OTHERS = set(
    "UNICRON_ACCELERATE_TOLD UNICRON_AGENT UNICRON_BLOCK UNICRON_BY_DEFAULT UNICRON_CHECK_HEALTH UNICRON_COUNTERS "
    "UNICRON_GENERATION UNICRON_HEALTH_CONF UNICRON_HEALTH_SECONDS UNICRON_HEALTH_STATE UNICRON_IMAGE_FORMAT "
    "UNICRON_INCARNATION UNICRON_KEEP_MINUTES UNICRON_LAUNCH UNICRON_LAUNCHER UNICRON_LAUNCHERS UNICRON_LAUNCH_AGENT "
    "UNICRON_LAUNCH_COMMAND UNICRON_LAYOUT UNICRON_LINKS UNICRON_LOG UNICRON_MAX_RANKS UNICRON_MEMORY UNICRON_OF_JOB_ "
    "UNICRON_PAIR_FAULT UNICRON_PROLOG_CONF UNICRON_PYTHON UNICRON_SAID_TASKS UNICRON_SLOT UNICRON_STACKS "
    "UNICRON_TASK UNICRON_TASKS UNICRON_TEMPLATES UNICRON_USERS_".split()
)


def test_every_variable_of_the_sources_is_listed_and_the_other_way_round() -> None:
    folders = ("detector", "planner", "transition", "unicron_ctl")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path.name != "variables.py"]
    found = {name for path in sources for name in NAME.findall(path.read_text())}
    variables = (*OF_JOBS, *OF_PROGRAMS)
    listed = {variable.name for variable in variables}
    assert found - OTHERS - listed == set(), "list them in unicron_ctl/shared/settings/variables.py"
    of_commands = {each.name: re.match(r"`unicronctl (\S+)`: ", each.meaning) for each in variables}
    gone = {name for name, command in of_commands.items() if command and command[1] not in commands()}
    assert listed - found - gone == set(), "nobody reads them"
