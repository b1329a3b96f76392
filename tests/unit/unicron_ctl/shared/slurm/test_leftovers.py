"""What is taken back from Slurm when Unicron is removed."""

from __future__ import annotations

from click.testing import CliRunner

from tests.support.world import FakeSlurm
from unicron_ctl.cli.retire import command
from unicron_ctl.shared.slurm import CommandLineClient, SlurmError
from unicron_ctl.shared.slurm.admin_comment import HOLD_PREFIX
from unicron_ctl.shared.slurm.leftovers import leftovers, take_all_back
from unicron_ctl.shared.system.errors import UserError


def left() -> FakeSlurm:
    """A cluster from which a unicrond has gone."""
    slurm = FakeSlurm(3)
    slurm.drain("n1", "unicron[health]: gpu: 7 of 8")
    slurm.down("n2", "Not responding")
    slurm.submit("7", 5)
    slurm.requeue_hold("7", 0, f"{HOLD_PREFIX}: the plan has no node for it")
    slurm.pin("7", 0, "n3")
    slurm.queue["7", 1].update(state="RUNNING", node="n3", admin_comment="unicron: 2 failures healed | lab 7")
    slurm.queue["7", 2].update(reason="JobHeldUser", admin_comment=f"{HOLD_PREFIX}: once")
    slurm.queue["7", 3].update(reason="JobHeldAdmin", admin_comment="ask Bob")
    slurm.queue["7", 4].update(reason="JobHeldAdmin", admin_comment="unicron: 1 failure healed")
    return slurm


def test_all_that_is_unicrons_goes_and_nothing_else() -> None:
    slurm = left()
    found = leftovers(slurm.nodes(), slurm.elements())
    assert [(w.what, w.node, w.element) for w in found] == [
        ("node", "n1", -1),
        ("hold", "", 0),
        ("comment", "", 1),
        ("comment", "", 2),
        ("comment", "", 4),
    ]
    assert take_all_back(slurm, found) == []
    assert slurm.node_states["n1"] == {"IDLE"} and slurm.node_states["n2"] == {"DOWN"}
    assert {e: entry["admin_comment"] for (_, e), entry in slurm.queue.items()} == {
        0: "",
        1: "lab 7",
        2: "",
        3: "ask Bob",
        4: "",
    }
    assert slurm.queue["7", 0]["pin"] is None and "held" not in slurm.queue["7", 0]["reason"].lower()
    reasons = [slurm.queue["7", element]["reason"] for element in (2, 3, 4)]
    assert reasons == ["JobHeldUser", "JobHeldAdmin", "JobHeldAdmin"], "who else holds an element, goes on to"


def test_an_admins_hold_of_a_job_that_was_healed_stays() -> None:
    slurm = FakeSlurm(1)
    slurm.submit("7", 1)
    slurm.queue["7", 0].update(reason="JobHeldAdmin", admin_comment="unicron: 1 failure healed, 9 s lost")
    found = leftovers(slurm.nodes(), slurm.elements())
    assert [what.what for what in found] == ["comment"] and take_all_back(slurm, found) == []
    assert slurm.queue["7", 0]["reason"] == "JobHeldAdmin"


def test_one_refusal_does_not_keep_the_rest_from_being_undone() -> None:
    slurm = left()

    def refuse(node: str) -> None:
        raise SlurmError("Invalid user id")

    slurm.resume = refuse  # type: ignore[method-assign]
    assert take_all_back(slurm, leftovers(slurm.nodes(), slurm.elements())) == ["n1: Invalid user id"]
    assert slurm.queue["7", 1]["admin_comment"] == "lab 7"


def test_no_control_character_of_a_reason_reaches_the_terminal(monkeypatch) -> None:
    slurm = FakeSlurm(1)
    slurm.drain("n1", "unicron[x]: \x1b]0;gone\x07")
    for name in ("nodes", "elements"):
        monkeypatch.setattr(CommandLineClient, name, staticmethod(getattr(slurm, name)))
    said = CliRunner().invoke(command, ["--dry-run"]).output
    assert said.strip().isprintable() and "unicron[x]" in said


def test_the_command_asks_first(monkeypatch, snapshot) -> None:
    slurm = left()
    for name in ("nodes", "elements", "resume", "pin", "release", "comment"):
        monkeypatch.setattr(CommandLineClient, name, staticmethod(getattr(slurm, name)))
    controllers = [True]

    def ask(question: object) -> None:
        if not controllers:
            raise UserError("no controller answers")

    monkeypatch.setattr("unicron_ctl.cli.retire.ask_controller", ask)
    said = CliRunner().invoke(command, ["--dry-run"])
    assert said.exit_code == 0 and said.output.splitlines()[0] == snapshot
    refused = CliRunner().invoke(command, ["--yes"])
    assert "a controller answers" in str(refused.exception) and "DRAIN" in slurm.node_states["n1"]
    controllers.clear()
    assert CliRunner().invoke(command, [], input="n\n").exit_code == 1 and "DRAIN" in slurm.node_states["n1"]
    assert CliRunner().invoke(command, ["--yes"]).exit_code == 0 and slurm.node_states["n1"] == {"IDLE"}
