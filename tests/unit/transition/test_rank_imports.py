"""Ranks import three wheels beside torch and Megatron, because they run in the user's Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import unicron
from tests.support.texts import raises_text

ALL = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in ("msgspec", "click", "rich", "prometheus_client") or name == "unicron_ctl":
            raise AssertionError(f"a rank imports {name}")

sys.meta_path.insert(0, Refused())
import unicron
for name in unicron.__all__:
    getattr(unicron, name)
import unicron_detector.processes.zygote
import unicron_transition.megatron_lm
print("all")
"""


def test_they_need_nothing_of_the_agents():
    done = subprocess.run([sys.executable, "-P", "-c", ALL], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "all\n", done.stderr


def test_a_wheel_that_is_missing_is_named_with_the_command(monkeypatch, snapshot):
    def without_zmq(name: str) -> None:
        raise ModuleNotFoundError("No module named 'zmq'", name="zmq")

    monkeypatch.setattr(unicron, "import_module", without_zmq)
    with raises_text(ModuleNotFoundError, snapshot, Path(sys.executable)):
        _ = unicron.Session


def test_what_else_is_missing_stays_as_it_is(monkeypatch):
    def without_torch(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(unicron, "import_module", without_torch)
    with pytest.raises(ModuleNotFoundError, match="No module named 'torch'"):
        _ = unicron.Session
