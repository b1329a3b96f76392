"""`power_off` of [controller]: the site's program that switches a node's power off, as IPMI, Redfish or a PDU does.

If it ends with status 0 the node is off, so that none of its processes can write any more (docs/design/consensus.md).
"""

from __future__ import annotations

import os
import shlex

from unicron_detector.health.programs import why_unfit

NODE = "%n"  # stands for the node's name


def command_of(power_off: str, node: str) -> list[str]:
    """Return the words of the command for this node; no shell reads them. Raises ValueError for unbalanced quotes."""
    return [word.replace(NODE, node) for word in shlex.split(power_off)]


def power_off_problem(value: str) -> str:
    """Return the problem of the setting's form, or ""."""
    try:
        words = shlex.split(value)
    except ValueError as error:
        return f'power_off = "{value}": {error}'
    if value and not (words and os.path.isabs(words[0])):
        return f'power_off = "{value}": write the absolute path of a program, and its arguments'
    if value and not any(NODE in word for word in words[1:]):
        return f'power_off = "{value}": write {NODE} where the program takes the name of the node'
    return ""


def power_off_unfit(value: str, node: str = NODE) -> str:
    """Return why the program must not be run on this machine, or ""; for unicrond, whose rights it gets."""
    if not value or power_off_problem(value):
        return ""
    why = why_unfit(command_of(value, node))
    return f'power_off = "{value}": {why}' if why else ""
