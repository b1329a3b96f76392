"""The Python that trains in the demo is looked at before anything is started, and needs no more than ranks need."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.fake_programs import program
from tests.support.processes import call
from unicron_ctl.lab.demo.stage import CHECK, check_python
from unicron_ctl.shared.system.errors import UserError


def test_one_that_trains_passes():
    check_python(Path(sys.executable))


def test_what_it_lacks_is_said(tmp_path):
    bare = program(tmp_path / "python", f'exec {sys.executable} -I -S "$@"')
    with pytest.raises(UserError, match=r"lacks megatron, msgpack, numpy, torch, xxhash, zmq.*--python"):
        check_python(bare)


@pytest.mark.parametrize("text", ["exit 0", "exit 1", "echo lacks; exit 1"])
def test_another_program_is_refused(tmp_path, text, snapshot):
    other = program(tmp_path / "python", text)
    with pytest.raises(UserError) as refused:
        check_python(other)
    assert str(refused.value).replace(str(other), "PYTHON") == snapshot


def test_a_file_that_is_not_there_is_refused(tmp_path, snapshot):
    with pytest.raises(UserError) as refused:
        check_python(tmp_path / "python")
    assert str(refused.value).replace(str(tmp_path), "FOLDER") == snapshot


def test_the_check_of_gradients_starts_without_what_only_the_programs_have(tmp_path):
    """The packages have click and msgspec in a folder of their own; an editable install has each root by itself."""
    lacks = "sys.modules |= dict.fromkeys(['click', 'msgspec', 'unicron_ctl'])"
    done = call(sys.executable, "-c", f"import runpy, sys; {lacks}; runpy.run_path({str(CHECK)!r}); print('starts')")
    assert done.stdout == "starts\n", done.stderr
