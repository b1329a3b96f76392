"""`unicronctl` as a whole: quick, and every error one line with the right exit status."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from tests.support.processes import LIMIT
from unicron_ctl.cli import ping, unicronctl
from unicron_ctl.cli.plan import by_id
from unicron_ctl.shared.commands.options import DURATION
from unicron_ctl.shared.system.addresses import name_of, resolve
from unicron_ctl.shared.system.errors import UserError
from unicron_planner.problem.objective import PlanError


@click.group()
def program() -> None:
    pass


@program.command()
@click.option("--count", type=int)
@click.argument("kind")
def fail(count: int, kind: str) -> None:
    errors = {
        "use": UserError("no such thing; name another", 2),
        "plain": UserError("two\nlines  here"),
        "os": FileNotFoundError(2, "No such file or directory", "/x.toml"),
        "defect": ZeroDivisionError("division by zero"),
        "interrupt": KeyboardInterrupt(),
    }
    raise errors[kind]


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["fail", "use"], 2, "unicronctl: no such thing; name another\n"),
        (["fail", "plain"], 1, "unicronctl: two lines here\n"),
        (["fail", "os"], 1, "unicronctl: [Errno 2] No such file or directory: '/x.toml'\n"),
        (["fail", "interrupt"], 1, "\nunicronctl: interrupted\n"),  # click ends the line that shows ^C
        (
            ["fail", "--count", "x", "use"],
            2,
            "unicronctl: Invalid value for '--count': 'x' is not a valid integer. (see 'unicronctl fail --help')\n",
        ),
        (["fail"], 2, "unicronctl: Missing argument 'KIND'. (see 'unicronctl fail --help')\n"),
        (["--nix"], 2, "unicronctl: No such option '--nix'. (see 'unicronctl --help')\n"),
    ],
)
def test_errors_are_one_line(arguments: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert unicronctl.run("unicronctl", program, arguments) == status
    out, err = capsys.readouterr()
    assert (out, err) == ("", text)


def test_a_defect_hides_its_traceback_until_it_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UNICRON_DEBUG", raising=False)
    assert unicronctl.run("unicronctl", program, ["fail", "defect"]) == 1
    quiet = capsys.readouterr().err
    assert quiet.startswith("unicronctl: ZeroDivisionError: division by zero (") and quiet.count("\n") == 1
    monkeypatch.setenv("UNICRON_DEBUG", "1")
    assert unicronctl.run("unicronctl", program, ["fail", "defect"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_unknown_command_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert unicronctl.run("unicronctl", unicronctl.unicronctl, ["nix"]) == 2
    assert capsys.readouterr().err == "unicronctl: No such command 'nix'. (see 'unicronctl --help')\n"


@pytest.mark.parametrize("name", sorted(unicronctl.commands()))
def test_every_command_explains_itself_with_examples_on_lines_of_their_own(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert unicronctl.run("unicronctl", unicronctl.unicronctl, [name, "--help"]) == 0
    text = capsys.readouterr().out.split("Options:")[0]
    assert f"Usage: unicronctl {name}" in text
    assert not any(line.count("unicronctl") > 1 for line in text.splitlines()), text
    assert name != "classify" or "\n  dmesg | unicronctl classify --source kernel --lines -\n" in text


def cpu_seconds_of_children() -> float:
    """Does not depend on what else the machine does, as the time on the wall would."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_start_of_unicronctl_imports_no_paths_and_no_urls() -> None:
    """Each command pays for what this module imports; pathlib alone brings a dozen modules."""
    script = "import sys, click; had = set(sys.modules); import unicron_ctl.cli.unicronctl; print({*sys.modules} - had)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT)
    assert "unicron_ctl.shared.system.release" in done.stdout, done.stderr
    assert "'pathlib'" not in done.stdout and "'urllib" not in done.stdout, done.stdout


def test_help_is_instant_and_imports_nothing_heavy() -> None:
    script = (
        "import sys; from unicron_ctl.cli.unicronctl import run, unicronctl; run('u', unicronctl, ['--help']); "
        "print([m for m in ('torch', 'numpy', 'zmq', 'msgspec', 'rich', 'sqlite3') if m in sys.modules])"
    )
    took = []
    for _ in range(3):
        began = cpu_seconds_of_children()
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT)
        took.append(cpu_seconds_of_children() - began)
        assert done.stdout.splitlines()[-1] == "[]", done.stdout
    assert all(name in done.stdout for name in unicronctl.commands())
    assert statistics.median(took) < 0.5  # 0.1 s on an idle machine


def test_a_reader_that_goes_away_is_no_error() -> None:
    script = (
        "import sys; from unicron_ctl.cli.unicronctl import run, unicronctl; sys.exit(run('u', unicronctl, ['--help']))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=out, stderr=subprocess.PIPE, text=True, timeout=LIMIT
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_jobs_of_a_live_plan_go_by_name_or_id():
    names = {"7": "gpt", "8": "gpt", "9": "gpt-large", "10": "9"}
    assert by_id("job gpt-large loses a node", names) == "job 9 loses a node"
    assert by_id("job 7 finishes", names) == "job 7 finishes"
    assert by_id("job 9 finishes", names) == "job 9 finishes", "an id goes before another job's name"
    assert by_id("node gpt-large fails", names) == "node gpt-large fails"
    with pytest.raises(PlanError, match=r"\bgpt\b.*\(7, 8\)"):
        by_id("job gpt finishes", names)


def test_durations_are_written_as_people_write_them() -> None:
    texts = {"90": 90, "90s": 90, "30m": 1800, "2h": 7200, "1h30m": 5400, "0.5d": 43200, "1w": 604800}
    assert {text: DURATION.convert(text, None, None) for text in texts} == texts


@pytest.mark.parametrize("text", ["", "soon", "2 h", "-2h", "2y", "h"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="30m, 2h"):
        DURATION.convert(text, None, None)


def options_of(command: click.Command, path: str) -> Iterator[tuple[str, click.Parameter]]:
    """All parameters of a command and of those below it."""
    yield from ((f"{path} {one.opts[-1]}", one) for one in command.params)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from options_of(below, f"{path} {name}")


def test_no_number_of_an_option_is_infinite_or_none() -> None:
    """Defect: click takes nan within every range, so `ping --seconds nan` ended with a word of Python's."""
    found = dict(options_of(unicronctl.unicronctl, "unicronctl"))
    numbers = {
        name: one for name, one in found.items() if isinstance(one.type, type(DURATION) | click.types.FloatParamType)
    }
    assert {"unicronctl ping --seconds", "unicronctl top --interval", "unicronctl pause --for"} <= numbers.keys()
    for name, one in numbers.items():
        for text in ("nan", "inf", "-inf", "-5", "9" * 400):
            with pytest.raises(click.BadParameter):
                one.type.convert(text, one, None)
                pytest.fail(f"{name} takes {text}")


def test_ping_says_which_controller_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both, answers = "tcp://localhost:1,tcp://127.0.0.2:2", resolve("127.0.0.2", 2)[0]
    monkeypatch.setattr(ping, "ask_and_see", lambda *_, **more: ({}, answers))
    assert unicronctl.run("unicronctl", unicronctl.unicronctl, ["ping", "--controller", both]) == 0
    assert capsys.readouterr().out.startswith("tcp://127.0.0.2:2 answers after ")
    monkeypatch.setattr(ping, "ask_and_see", lambda *_, **more: ({}, resolve("127.0.0.1", 1)[0]))
    assert unicronctl.run("unicronctl", unicronctl.unicronctl, ["ping", "--controller", both]) == 0
    assert capsys.readouterr().out.startswith("tcp://localhost:1 answers after ")
    assert name_of(both, resolve("127.0.0.3", 3)[0]) == "tcp://127.0.0.3:3", "its name leads elsewhere by now"
