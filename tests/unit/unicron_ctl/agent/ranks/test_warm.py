"""Which commands can have a zygote, and what users may say of it."""

from __future__ import annotations

import sys

import pytest

from unicron_ctl.agent.ranks.warm_commands import common, named_modules, python_command, python_of, wanted
from unicron_ctl.shared.system.errors import UserError


@pytest.mark.parametrize(
    ("command", "python", "words"),
    [
        ("python train.py --lr 1", "python", "train.py --lr 1"),
        ("/opt/bin/python3.11 -u -W ignore -X dev train.py", "/opt/bin/python3.11 -u -W ignore -X dev", "train.py"),
        ("python -Wignore -OO -m pkg.train -m x", "python -Wignore -OO", "-m pkg.train -m x"),
        (
            "python3 -m unicron.transition.megatron_lm pretrain_gpt.py",
            "python3",
            "-m unicron.transition.megatron_lm pretrain_gpt.py",
        ),
    ],
)
def test_the_interpreters_words_are_told_from_the_scripts(command, python, words):
    assert python_command(command.split()) == (python.split(), words.split())


@pytest.mark.parametrize(
    "command",
    [
        "",
        "./train",
        "train.py",
        "bash run.sh train.py",
        "python",
        "python -c pass",
        "python -i train.py",
        "python -",
        "python -m",
        "python folder",
        "python-of-the-user train.py",
        "python --version",
        "python -x train.py",
        "torchrun train.py",
    ],
)
def test_other_commands_have_none(command):
    assert python_command(command.split()) is None


def test_what_users_may_say():
    assert wanted({}) and wanted({"UNICRON_WARM": ""}) and wanted({"UNICRON_WARM": "1"})
    assert not wanted({"UNICRON_WARM": "0"})
    with pytest.raises(UserError, match="UNICRON_WARM='no'"):
        wanted({"UNICRON_WARM": "no"})
    assert named_modules({}) == [] and named_modules({"UNICRON_PRELOAD": " torch, a.b_c ,"}) == ["torch", "a.b_c"]
    for wrong in ("a b", "a;b", "1a", "a..b", ".a", "a/b.py"):
        with pytest.raises(UserError, match="is not a module"):
            named_modules({"UNICRON_PRELOAD": wrong})


def test_a_zygote_has_what_two_ranks_have_in_common():
    assert common([{"A": "1", "RANK": "0", "MINE": ""}, {"A": "1", "RANK": "1"}]) == {"A": "1"}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("/opt/bin/python3 -u train.py", "/opt/bin/python3"),
        ("apptainer exec --nv image.sif python train.py", "apptainer exec --nv image.sif python"),
        ("numactl -l conda run -n torch python -m train", "conda run -n torch python"),
        ("nsys profile -o x python train.py", "python"),
        ("apptainer run image.sif --lr 1", sys.executable),
    ],
)
def test_the_store_starts_with_the_python_of_the_ranks(command, words):
    assert python_of(command.split()) == words.split()
