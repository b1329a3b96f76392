"""The examples in the docstrings of the public interface work."""

from __future__ import annotations

import doctest
import inspect
from itertools import chain

import pytest

import unicron
from unicron_transition.iteration import rank_process

ROOMS = (unicron, unicron.data, unicron.loggers)
PUBLIC = chain.from_iterable((getattr(room, name) for name in room.__all__) for room in ROOMS)
WITH_EXAMPLES = [one for one in PUBLIC if not inspect.ismodule(one) and ">>>" in (one.__doc__ or "")]


@pytest.mark.parametrize("found", WITH_EXAMPLES, ids=lambda one: one.__name__)
def test_an_example_runs(found, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_process, "_process", None)
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(found, found.__name__, globs={"folder": tmp_path / "shared", "unicron": unicron})
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert results.attempted and not results.failed


def test_the_loop_has_an_example():
    assert "for result in session" in unicron.Session.__doc__
