"""`unicronctl schema`, and that what is printed fits it and keeps its keys."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click
import msgspec
import pytest
from click.testing import CliRunner

from tests.support.questions import told
from tests.support.world import FakeSlurm, World
from unicron_ctl.cli.unicronctl import unicronctl
from unicron_ctl.controller.model.asker import EVERYBODY, NOBODY
from unicron_ctl.shared.protocol import answer_schema, audience
from unicron_ctl.shared.protocol.answer_schema import ADMIN, OWNER, Explanation, Job, Node, Status
from unicron_ctl.shared.protocol.audience import without_fields

# What programs rely on; keys may be added.
JOB_KEYS = set(
    "job name user mode state since generation nodes min_nodes max_nodes planned_nodes members layout layouts "
    "planned_layout replica replicas standbys spares spares_wanted spares_ready iteration train_iterations "
    "iteration_seconds loss nan_since degraded anomalies weight flops waf ledger_violations ended set_aside waits "
    "silent left_out failures last_failure reason elements barred".split()
)
NODE_KEYS = set(
    "node states healthy reason used_by downed_by_unicron lost_at last_heard asked_since anomalies spare_of metrics "
    "last_event health pair_test unverified suspect admission".split()
)
EXPLAIN_KEYS = set(
    "job name mode mode_reason log_dir state generation layout layouts planned_layout replica replicas standbys spares "
    "spares_wanted spares_ready ended set_aside waits nan_since cold forgets planned_nodes plan_reason plan_trigger "
    "checkpoints bounds waiting decisions failures".split()
)
STATUS_KEYS = set("controller jobs nodes failures attention observed waf plan".split())
OPEN = "name user state nodes members iteration weight waf failures replicas".split()


@pytest.fixture
def world() -> World:
    slurm = FakeSlurm(3)
    world = World(slurm)
    slurm.submit("1", 2)
    world.start_job(nodes=2)
    world.run(3.0)
    return world


def schema(*words: str) -> dict:
    done = CliRunner().invoke(unicronctl, ["schema", *words], catch_exceptions=False)
    assert done.exit_code == 0
    found: dict = json.loads(done.output)
    return found


def commands_with_json(group: click.Group, before: str = "") -> Iterator[str]:
    """The commands that have an option --json."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from commands_with_json(command, f"{before}{name} ")
        elif command is not None and any("--json" in option.opts for option in command.params):
            yield f"{before}{name}"


def test_every_command_of_the_list_has_a_schema() -> None:
    listed = CliRunner().invoke(unicronctl, ["schema"]).output.splitlines()
    assert {"status", "jobs", "nodes", "events", "explain", "plan", "config check"} <= set(listed)
    assert set(listed) == set(commands_with_json(unicronctl))
    for name in listed:
        assert "$defs" in schema(*name.split()), name


def test_a_schema_says_what_a_field_is_and_for_whom() -> None:
    job = schema("jobs")["$defs"]["Job"]["properties"]
    assert "audience" in job["loss"] and "audience" not in job["iteration"]
    assert job["members"]["description"] == "Slots that train." and job["replica"]["description"]  # of the base class


@pytest.mark.parametrize("asker", [EVERYBODY, NOBODY], ids=["an admin", "nobody"])
def test_the_answers_have_the_promised_keys_for_everybody(world: World, asker) -> None:
    answer = told(world.core, "status", asker)
    assert answer.keys() >= STATUS_KEYS
    assert answer["jobs"][0].keys() >= JOB_KEYS and answer["nodes"][0].keys() >= NODE_KEYS
    msgspec.convert(answer, Status)


def test_an_explanation_has_the_promised_keys(world: World) -> None:
    answer = told(world.core, "explain", job="1")
    assert answer.keys() >= EXPLAIN_KEYS
    msgspec.convert(answer, Explanation)


def test_others_get_the_defaults_of_what_is_not_for_them(world: World) -> None:
    (full,) = told(world.core, "jobs")
    (seen,) = told(world.core, "jobs", NOBODY)
    assert full["elements"] and full["ledger_violations"] == 0 and full["spares_wanted"] == 0
    assert seen["elements"] == [] and seen["ledger_violations"] is None and seen["spares_wanted"] is None
    assert all(full[key] == seen[key] for key in OPEN if key not in ("name", "user"))


@pytest.mark.parametrize(("kind", "of"), [(Job, OWNER), (Node, ADMIN)])
def test_a_field_that_is_not_for_all_has_a_default_that_says_nothing(kind, of) -> None:
    defaults = audience._defaults(kind, (of,))
    assert defaults and all(value in (None, "", [], {}) for value in defaults.values())


def test_redaction_leaves_the_answer_itself_alone() -> None:
    ending = answer_schema.Ending(code=1, reason="secret", time=0.0, disowned=False)
    assert without_fields(ending, OWNER).reason == "" and ending.reason == "secret"
