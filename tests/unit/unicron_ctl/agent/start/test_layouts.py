"""The layouts and the model that a submission states, and what is wrong with them in one line."""

from __future__ import annotations

import pytest

from unicron_ctl.agent.connections.job_environment import read_place
from unicron_ctl.agent.connections.stated_layouts import read_layouts, read_model
from unicron_ctl.shared.system.errors import UserError

WORDS = "layers=32 hidden=4096 heads=32 seq-length=2048 vocab=51200 global-batch=512"
SLURM = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "4", "SLURMD_NODENAME": "n2"}


def stated(text: str, per_node: int = 2, nodes: int = 4, model: str = "") -> list[str]:
    return read_layouts({"UNICRON_LAYOUTS": text}, per_node, nodes, read_model({"UNICRON_MODEL": model}))


def test_layouts_have_one_way_to_be_written():
    assert stated("TP2 PP2, PP2 TP1 ,TP1, PP4 VPP2") == ["TP2 PP2", "PP2", "TP1", "PP4 VPP2"]
    assert stated("") == []


def test_all_that_fit_up_to_a_limit():
    found = stated("auto TP4 PP4", per_node=4, model=WORDS)
    assert found == ["TP1", "PP2", "TP2", "PP4", "TP2 PP2", "TP4", "TP2 PP4", "TP4 PP2", "TP4 PP4"]
    assert stated("auto", per_node=4, nodes=1, model=WORDS) == ["TP1", "PP2", "TP2", "PP4", "TP2 PP2", "TP4"]


@pytest.mark.parametrize(
    ("text", "model", "says"),
    [
        ("TQ2", "", 'TQ2 is no part of a layout: write it like "TP2 PP2 VPP2"'),
        ("TP2,,TP1", "", "a layout is missing"),
        ("TP2 TP4", "", "TP4 is one too many"),
        ("TP0", "", "TP0 is no part of a layout"),
        ("TP2 VPP2", "", "VPP needs PP2 or more"),
        ("TP2, PP1 TP2", "", "TP2 is there twice: name each layout once"),
        ("TP4 PP4", "", "TP4 PP4 needs 16 ranks, and the job has at most 8 (4 nodes of 2): leave it out"),
        ("TP3", "", "TP3 is a replica of 3 ranks, which neither fills nodes of 2 ranks nor shares one evenly"),
        ("PP5", WORDS, "PP5 is a replica of 5 ranks"),
        ("PP4 VPP3", WORDS, "PP4 VPP3 cannot share out the model's 32 layers"),
        ("auto TP2 PP2", "", "auto needs the sizes of the model: give UNICRON_MODEL="),
        ("auto TP2 nonsense", WORDS, "nonsense is no part of a layout"),
    ],
)
def test_what_cannot_be_is_one_clear_line(text, model, says):
    with pytest.raises(UserError) as error:
        stated(text, model=model)
    assert str(error.value).startswith("UNICRON_LAYOUTS: ") and says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layers=32", "hidden, heads, seq-length, vocab, global-batch are missing"),
        (f"{WORDS} depth=3", "depth=3 is no size of a model"),
        (f"{WORDS} layers=3", "layers=3 is there twice"),
        (WORDS.replace("=32", "=0"), "layers=0 is out of range"),
        (WORDS.replace("=32", "=-1"), "layers=-1 is no size of a model"),
    ],
)
def test_a_model_that_cannot_be_is_one_clear_line(text, says):
    with pytest.raises(UserError) as error:
        read_model({"UNICRON_MODEL": text})
    assert str(error.value).startswith(f"UNICRON_MODEL: {says}: write it like ") and "\n" not in str(error.value)


def test_they_are_part_of_the_settings():
    more = {"UNICRON_LAYOUTS": "TP2, TP1", "UNICRON_MODEL": f"{WORDS} recompute=1", "UNICRON_RANKS_PER_NODE": "2"}
    settings = read_place(SLURM | more, "tcp://127.0.0.1:7451").settings
    assert settings.layouts == ["TP2", "TP1"]
    assert settings.model["seq-length"] == 2048 and settings.model["recompute"] == 1
