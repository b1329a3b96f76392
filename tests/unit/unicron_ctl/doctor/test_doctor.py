"""unicronctl doctor: its options, exit statuses and lines. tests/slurm/doctor/test_doctor.py has it with a Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from syrupy.assertion import SnapshotAssertion

from unicron_ctl.doctor import host_facts
from unicron_ctl.doctor.doctor_command import _print, command
from unicron_ctl.doctor.facts import ControllerFacts, HostFacts, Question
from unicron_ctl.shared.slurm import CommandLineClient, SlurmError
from unicron_ctl.shared.system import program


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostFacts:
    """A host whose facts are these. No Slurm answers there."""
    facts = HostFacts(name="login1", role="login", release="0.1.0", python="3.11.2", controller=ControllerFacts())
    facts.config.path, facts.config.address = "/etc/unicron/unicron.toml", "tcp://head:7451"
    facts.config.auth, facts.controller.release = "none", "0.1.0"
    facts.plugin.line, facts.plugin.is_there = "optional", True
    facts.plugin.release, facts.plugin.controller = "0.1.0", "tcp://head:7451"

    def collect(question: Question) -> HostFacts:
        facts.role = question.role
        return facts

    def silent(self: CommandLineClient) -> None:
        raise SlurmError("scontrol show config: no answer")

    monkeypatch.setattr(host_facts, "collect", collect)
    monkeypatch.setattr(CommandLineClient, "settings", silent)
    monkeypatch.setenv("UNICRON_CONFIG", str(tmp_path / "unicron.toml"))
    (tmp_path / "unicron.toml").write_text('[controller]\naddress = "tcp://192.0.2.1:7451"\n')
    return facts


def call(*words: str) -> Result:
    return CliRunner().invoke(command, list(words), standalone_mode=False)


def test_a_problem_is_a_line_with_what_to_type_and_status_3(here: HostFacts, snapshot: SnapshotAssertion) -> None:
    done = call("--as", "login")
    lines = done.output.splitlines()
    assert done.return_value == 3 and lines[-1].split()[0] == "11" and "good     " not in done.output
    assert lines == snapshot
    assert "good     config: /etc/unicron/unicron.toml" in call("--as", "login", "-v").output


@pytest.mark.parametrize(("others", "words"), [(0, "login"), (1, "login, and 1 node"), (2, "login, and 2 nodes")])
def test_the_first_line_says_who_answered(
    here: HostFacts, capsys: pytest.CaptureFixture[str], others: int, words: str
) -> None:
    _print([here, *[HostFacts(name=f"n{i}", role="compute") for i in range(others)]], [], False)
    assert capsys.readouterr().out.startswith(f"login1 ({words}), Unicron ")


def test_what_a_host_says_is_text_to_the_terminal_and_one_word_to_the_shell(here: HostFacts) -> None:
    here.config.path, here.config.problems = "/x;id", ["\x1b]0;gone\x07"]
    said = call("--as", "login").output
    assert all(line.isprintable() for line in said.splitlines()) and "> edit '/x;id'; unicronctl" in said


def test_its_json_has_every_result(here: HostFacts) -> None:
    here.munge = "no socket"
    here.config.auth = "munge"
    done = call("--as", "head", "--json")
    told = json.loads(done.output)
    assert (told["role"], told["hosts"]) == ("head", ["login1"])
    (munge,) = [result for result in told["results"] if result["check"] == "munge"]
    assert (munge["verdict"], munge["text"], munge["hosts"]) == ("problem", "no socket", ["login1"])


@pytest.mark.parametrize(
    ("words", "status", "about"),
    [
        (["--all"], 1, "scontrol show config: no answer"),
        (["--as", "gate"], 2, "'gate'"),
        (["--partition", "gpu"], 2, "--all"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    here: HostFacts, words: list[str], status: int, about: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.run("unicronctl", command, words) == status
    err = capsys.readouterr().err
    assert about in err and err.count("\n") == 1
