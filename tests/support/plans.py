"""A scenario of two jobs, and `unicronctl` called in this process."""

from __future__ import annotations

from unicron_ctl.cli.unicronctl import unicronctl
from unicron_ctl.shared.system.program import run

SCENARIO = """
[cluster]
nodes = 16
[[job]]
name = "gpt-7b"
min_nodes = 2
nodes = 4
node_names = ["n1", "n2", "n3", "n4"]
flops = { 2 = 1.0e15, 4 = 1.9e15 }
[[job]]
name = "gpt-13b"
nodes = 8
flops = { 4 = 1.9e15, 8 = 3.6e15, 12 = 5e15 }
"""


def call(capsys, *arguments):
    status = run("unicronctl", unicronctl, list(arguments))
    out = capsys.readouterr()
    return status, out.out, out.err
