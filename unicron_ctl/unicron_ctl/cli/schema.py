"""`unicronctl schema`: the JSON Schema of what the commands print with `--json`."""

from __future__ import annotations

import pkgutil

import click
import msgspec

from unicron_ctl.shared.commands.options import print_json
from unicron_ctl.shared.commands.table import rooms
from unicron_ctl.shared.settings.meanings import meanings
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.printable import print_text

_ANSWERS = "unicron_ctl.shared.protocol.answer_schema"
# Command -> `module:attribute` of the type of its JSON. Each room behind the fence has its own SCHEMAS.
SCHEMAS = {
    "status": f"{_ANSWERS}:Status",
    "jobs": f"{_ANSWERS}:Jobs",
    "nodes": f"{_ANSWERS}:Nodes",
    "events": f"{_ANSWERS}:Event",
    "logs": "unicron_ctl.cli.logs:LogLine",
    "explain": f"{_ANSWERS}:Explanation",
    "pause": f"{_ANSWERS}:PauseState",
    "resume": f"{_ANSWERS}:PauseState",
    "classify": "unicron_ctl.cli.classify:TextVerdict",
    "plan": f"{_ANSWERS}:Assignment",
    "config check": "unicron_ctl.cli.config_check:ConfigReport",
}


@click.command(name="schema")
@click.argument("words", nargs=-1, metavar="[COMMAND]")
def command(words: tuple[str, ...]) -> None:
    """Print the JSON Schema of COMMAND's JSON; without COMMAND, list the commands that have one.

    The schema of a command that prints a line for each item, such as `events`, is that of one line.
    """
    types, name = dict(SCHEMAS), " ".join(words)
    for room in rooms():
        types |= getattr(room, "SCHEMAS", {})
    if not name:
        print_text("\n".join(types), lines=True)
    elif name in types:
        print_json(schema(types[name]), indent=2)
    else:
        raise UserError(f"{name} has no schema: there are {', '.join(types)}", WRONG_USE)


def schema(where: str) -> object:
    """Return the JSON Schema of the type at `module:attribute`, with the docstrings of fields as descriptions."""
    schema_of_type = msgspec.json.schema(pkgutil.resolve_name(where))
    module = pkgutil.resolve_name(where.partition(":")[0])
    for name, definition in schema_of_type["$defs"].items():
        for field, text in meanings(getattr(module, name)).items():
            definition["properties"][field]["description"] = text
    return schema_of_type
