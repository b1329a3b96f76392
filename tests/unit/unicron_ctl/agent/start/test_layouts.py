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
    assert stated("auto F6", per_node=1, nodes=8, model=WORDS) == ["TP1", "F2", "F4"]
    assert stated("auto TP2 F2", per_node=2, nodes=2, model=WORDS) == ["TP1", "F2", "TP2", "TP2 F2"]


def test_shards_may_span_nodes_or_share_one():
    assert stated("F4, F2 TP2, F2", per_node=1) == ["F4", "TP2 F2", "F2"]
    assert stated("F4, F2", per_node=8, nodes=1, model=WORDS) == ["F4", "F2"]


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("TQ2", ""),
        ("TP2,,TP1", ""),
        ("TP2 TP4", ""),
        ("TP0", ""),
        ("TP2 VPP2", ""),
        ("TP2, PP1 TP2", ""),
        ("TP4 PP4", ""),
        ("TP3", ""),
        ("PP5", WORDS),
        ("PP4 VPP3", WORDS),
        ("F8", WORDS.replace("4096", "4092")),
        ("F16", ""),
        ("F2 F4", ""),
        ("auto TP2 PP2", ""),
        ("auto TP2 nonsense", WORDS),
    ],
    ids=lambda word: "model" if word.startswith("layers") else word,
)
def test_what_cannot_be_is_one_clear_line(text, model, snapshot):
    with pytest.raises(UserError) as error:
        stated(text, model=model)
    assert str(error.value).startswith("UNICRON_LAYOUTS: ") and "\n" not in str(error.value)
    assert str(error.value) == snapshot


@pytest.mark.parametrize(
    "text",
    [
        "layers=32",
        *(f"{WORDS} {more}" for more in ("depth=3", "layers=3")),
        *(WORDS.replace("=32", no) for no in ("=0", "=-1")),
    ],
    ids=["missing", "unknown", "twice", "zero", "negative"],
)
def test_a_model_that_cannot_be_is_one_clear_line(text, snapshot):
    with pytest.raises(UserError) as error:
        read_model({"UNICRON_MODEL": text})
    assert str(error.value).startswith("UNICRON_MODEL: ") and "\n" not in str(error.value)
    assert str(error.value) == snapshot


def test_they_are_part_of_the_settings():
    more = {"UNICRON_LAYOUTS": "TP2, TP1", "UNICRON_MODEL": f"{WORDS} recompute=1", "UNICRON_RANKS_PER_NODE": "2"}
    settings = read_place(SLURM | more, "tcp://127.0.0.1:7451").settings
    assert settings.layouts == ["TP2", "TP1"]
    assert settings.model["seq-length"] == 2048 and settings.model["recompute"] == 1
