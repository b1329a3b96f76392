"""The tables of tools/mutants.py: all that they name is there, so a mutant that was equal once is not taken for one
after its line has changed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = tomllib.loads((ROOT / "tools/mutants.toml").read_text())["tests"]
EQUAL = tomllib.loads((ROOT / "tools/equal_mutants.toml").read_text())


def test_the_modules_and_their_tests_are_there():
    assert all((ROOT / path).is_file() for path in [*TESTS, *(one for tests in TESTS.values() for one in tests)])


@pytest.mark.parametrize("path", EQUAL)
def test_each_equal_mutant_is_of_a_line_that_is_there(path):
    assert path in TESTS
    lines = {line.strip() for line in (ROOT / path).read_text().splitlines()}
    assert not [key for key in EQUAL[path] if key.rpartition(" | ")[0] not in lines]
    assert all(EQUAL[path].values())
