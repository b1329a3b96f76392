"""The examples in the docstrings of what training scripts import do what they say."""

from __future__ import annotations

import doctest
import inspect

import pytest

import unicron
from unicron_transition.iteration import rank_process

PUBLIC = [getattr(unicron, name) for name in unicron.__all__ if not inspect.ismodule(getattr(unicron, name))]


@pytest.mark.parametrize("found", [one for one in PUBLIC if ">>>" in (one.__doc__ or "")], ids=lambda one: one.__name__)
def test_an_example_runs(found, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_process, "_process", None)
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(found, found.__name__, globs={"folder": tmp_path / "shared", "unicron": unicron})
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert results.attempted and not results.failed


def test_the_loop_has_an_example():
    assert ">>> for" in unicron.Session.__doc__ or "for result in session" in unicron.Session.__doc__
