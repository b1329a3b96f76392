"""What a program of the packages starts is of the packages, too: `python -m` does not find their modules."""

from __future__ import annotations

import sys

import unicron
from unicron_ctl.shared.settings.places import nodes_python, program

MODULE = "unicron_ctl.controller.unicrond"


def test_here_it_is_this_python():
    assert program("unicrond", MODULE) == [sys.executable, "-m", MODULE]
    assert nodes_python() == sys.executable


def test_in_the_packages_it_is_their_program(monkeypatch):
    monkeypatch.setattr(unicron, "__file__", "/usr/lib/unicron/python/unicron/__init__.py")
    assert program("unicrond", MODULE) == ["/usr/bin/unicrond"]
    assert nodes_python() == "/opt/unicron/bin/python"
