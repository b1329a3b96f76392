"""What is wrong with links, as the switch's rules; without a switch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from unicron_ctl.lab.cluster import link_faults as links
from unicron_ctl.lab.cluster.link_faults import Faults, Links, share_of
from unicron_ctl.lab.cluster.network import Network
from unicron_ctl.shared.system.errors import UserError

NODES = ("n1", "n2", "n3")
ALL_WHOLE = "table bridge links { chain forward { type filter hook forward priority 0; }; }\n"


class Switch(Network):
    """Keeps the rules that it is given."""

    def __init__(self, folder: Path) -> None:
        super().__init__("0123456789", folder)
        self.given: list[str] = []

    def rules(self, text: str) -> None:
        self.given.append(text)


@pytest.fixture
def switch(tmp_path: Path) -> Switch:
    return Switch(tmp_path)


def test_rules_drop_both_directions_and_replace_all_before() -> None:
    text = links.rules(Faults(off=["n3"], cut=["head"], apart=[("n1", "n2")], loss={"n1": 0.105}))
    assert text == (
        "add table bridge links\ndelete table bridge links\ntable bridge links { chain forward { "
        "type filter hook forward priority 0; iifname { head, n3 } drop; oifname { head, n3 } drop; "
        "iifname n1 oifname n2 drop; iifname n2 oifname n1 drop; "
        "iifname n1 numgen random mod 10000 < 1050 drop; oifname n1 numgen random mod 10000 < 1050 drop; }; }\n"
    )
    assert links.rules(Faults()).endswith(ALL_WHOLE)


def test_what_is_wrong_adds_up_is_kept_and_is_healed_by_host(switch: Switch) -> None:
    Links(switch, NODES).cut(["n1", "head"])
    Links(switch, NODES).cut(["n3", "n2"], ["n1"])
    Links(switch, NODES).loss(["n2"], 0.1)
    Links(switch, NODES).power(["n3"], on=False)
    seen = Links(switch, NODES).faults()
    assert seen == Faults(["n3"], ["head", "n1"], [("n1", "n2"), ("n1", "n3")], {"n2": 0.1})
    assert switch.given[-1] == links.rules(seen)
    Links(switch, NODES).heal(["n1"], ["n3"])
    Links(switch, NODES).heal(["n2"])
    assert Links(switch, NODES).faults() == Faults(["n3"], ["head", "n1"])
    Links(switch, NODES).heal()
    assert Links(switch, NODES).faults() == Faults(["n3"]), "power is not a matter of links"
    Links(switch, NODES).power(["n3"], on=True)
    assert switch.given[-1].endswith(ALL_WHOLE)


def test_no_loss_is_no_rule(switch: Switch) -> None:
    Links(switch, NODES).loss(NODES, 0.2)
    Links(switch, NODES).loss(["n1", "n3"], 0.0)
    assert Links(switch, NODES).faults().loss == {"n2": 0.2}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda links: links.cut(["n4"]),
        lambda links: links.loss(["outside"], 0.1),
        lambda links: links.cut(["n1", "n2"], ["n2"]),
    ],
    ids=["unknown", "outside", "itself"],
)
def test_other_hosts_are_wrong_use(switch: Switch, wrong: Callable[[Links], None], snapshot: SnapshotAssertion) -> None:
    with pytest.raises(UserError) as raised:
        wrong(Links(switch, NODES))
    assert (raised.value.exit_code, str(raised.value)) == (2, snapshot) and switch.given == []


def test_shares() -> None:
    assert [share_of(text) for text in ("10%", "0.5 %", "100%", "0%")] == [0.1, 0.005, 1.0, 0.0]
    for text in ("10", "101%", "-1%", "x%", ""):
        with pytest.raises(UserError, match="0% to 100%"):
            share_of(text)
