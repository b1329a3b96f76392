"""`[partition.NAME]` of unicron.toml: what each says, what it leaves to the default, and what is wrong."""

from __future__ import annotations

import tomllib

import pytest

from unicron_ctl.shared.settings.config_file import parse, parse_sections
from unicron_ctl.shared.settings.partitions import ACT, OBSERVE, OFF, PERMISSION_OF, PERMISSIONS, Rules, strictest
from unicron_ctl.shared.slurm import SlurmClient
from unicron_ctl.shared.system.errors import UserError

FILE = """
[partition.default]
mode = "observe"
spare_nodes = 2
[partition.default.account.lab]
max_weight = 3
[partition.gpu]
mode = "act"
actions = ["drain", "requeue"]
max_weight = 2
[partition.gpu.qos.high]
max_weight = 8
[partition.debug]
mode = "off"
"""


def _rules(text: str, name: str) -> Rules:
    return parse(tomllib.loads(text)).controller.rules(name)


def test_a_partition_says_what_it_does_and_leaves_the_rest_to_the_default() -> None:
    gpu, other, debug = (_rules(FILE, name) for name in ("gpu", "other", "debug"))
    assert (gpu.mode, sorted(gpu.actions), gpu.max_weight, gpu.spare_nodes) == (ACT, ["drain", "requeue"], 2.0, 2)
    assert (other.mode, other.actions, other.max_weight) == (OBSERVE, frozenset(PERMISSIONS), 1.0)
    assert debug.mode == OFF and gpu.most_weight("lab", "high") == 8.0 and gpu.most_weight("lab", "") == 3.0
    assert gpu.may("drain") and gpu.may("requeue") and not gpu.may("down") and not other.may("drain")


def test_observe_is_the_default() -> None:
    assert _rules("", "gpu").mode == OBSERVE
    assert _rules("[partition.default]\nmode = 'act'", "gpu").mode == ACT
    assert _rules("[partition.default]\nmode = 'act'\n[partition.gpu]\nmode = 'observe'", "gpu").mode == OBSERVE


def test_every_call_of_slurm_needs_a_permission_that_can_be_given() -> None:
    assert {one for needed in PERMISSION_OF.values() for one in needed} == set(PERMISSIONS)
    reads = {"nodes", "elements", "others", "private_data", "kill_wait", "grace", "shrinks", "domains"}
    calls = {name for name in vars(SlurmClient) if not name.startswith("_")} - reads
    assert calls | {"power_off"} == PERMISSION_OF.keys(), "that one calls the site's program"


def test_a_job_of_several_partitions_has_the_least_of_them() -> None:
    both = strictest([_rules(FILE, "gpu"), _rules(FILE, "other")])
    assert both.mode == OBSERVE and both.actions == {"drain", "requeue"} and both.max_weight == 1.0
    assert both.most_weight("", "high") == 1.0 and both.most_weight("lab", "") == 3.0


WRONG = (
    "[partition.gpu]\nmode = 'on'",
    "[partition.gpu]\nactions = ['kill']",
    "[partition.gpu]\nmod = 'act'",
    "[partition]\nmode = 'act'",
    "[partition.gpu]\nmax_weight = -1",
    "[partition.gpu]\nmax_weight = nan",
    "[partition.gpu]\nspare_nodes = 1.5",
    "[partition.gpu.account.lab]\nweight = 2",
    "partition = 3",
)


def test_what_is_wrong_is_one_line_that_names_the_key(snapshot) -> None:
    messages = {}
    for text in WRONG:
        with pytest.raises(UserError) as caught:
            parse(tomllib.loads(text))
        assert "\n" not in str(caught.value)
        messages[text.replace("\n", " ")] = str(caught.value)
    assert messages == snapshot


def test_what_has_no_meaning_keeps_its_default() -> None:
    config, found = parse_sections(tomllib.loads("[partition.gpu]\nmode = 'act'\nmax_weight = 'much'"))
    assert len(found) == 1 and config.controller.rules("gpu").mode == ACT
    assert config.controller.rules("gpu").max_weight == 1.0
