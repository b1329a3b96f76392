"""Health checks of others, with small real programs: exit status and first line count, and nothing hangs."""

from __future__ import annotations

import os
import time
import tomllib
from pathlib import Path

import pytest

from unicron_ctl.shared.settings.config import HealthConfig, problems
from unicron_ctl.shared.settings.config_file import parse_sections
from unicron_detector.health.checks import CHECKS, Settings, checks_of
from unicron_detector.health.programs import HealthProgram, check_program, judge
from unicron_detector.health.runner import run

DOCS = Path(__file__).resolve().parents[4] / "docs"
HEALTHY = """\
+---------------------------+----------------------------------------------------------+
| Health Monitor Report                                                                |
+===========================+==========================================================+
| Overall Health            | {overall:<57}|
+---------------------------+----------------------------------------------------------+
"""


def program(folder: Path, text: str, name: str = "check") -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("status", "verdict"), [(0, "good"), (1, "warning"), (2, "bad"), (3, "unknown"), (77, "unknown")]
)
def test_a_plugin_of_nagios_is_judged_by_its_status_and_its_first_line(
    tmp_path: Path, status: int, verdict: str
) -> None:
    found = check_program("mine", program(tmp_path, f"echo; echo 'disk sda: slow'; echo more; exit {status}"), 5.0)
    assert (found.verdict, found.reason) == (verdict, "disk sda: slow")


SMARTCTL = {0: "good", 1: "unknown", 2: "unknown", 4: "warning", 8: "bad", 64: "warning", 66: "unknown", 88: "bad"}


@pytest.mark.parametrize(("status", "verdict"), SMARTCTL.items())
def test_the_status_of_smartctl_is_a_mask(tmp_path: Path, status: int, verdict: str) -> None:
    """smartctl 7.3 ends with 1 for a file that is no device, and with 2 for a device that is not there."""
    found = check_program("disk", program(tmp_path, f"echo smartctl 7.3; exit {status}", "smartctl"), 5.0)
    assert found.verdict == verdict
    assert status == 0 or "smartctl 7.3" not in found.reason, "the reason says what the bits mean"


def test_every_status_of_nhc_but_0_is_a_failed_check(tmp_path: Path) -> None:
    failed = "echo 'checking' ; echo 'ERROR:  nhc:  Health check failed:  check_fs_mount:  /home not mounted'; exit 1"
    found = check_program("nhc", program(tmp_path, failed, "nhc"), 5.0)
    assert found.verdict == "bad" and found.reason.startswith("ERROR:  nhc:") and "/home" in found.reason
    assert check_program("nhc", program(tmp_path, "exit 0", "nhc"), 5.0).verdict == "good"


@pytest.mark.parametrize(
    ("said", "status", "verdict"),
    [
        (HEALTHY.format(overall="Healthy"), 0, "good"),
        (HEALTHY.format(overall="Warning"), 0, "warning"),
        (HEALTHY.format(overall="Failure"), 0, "bad"),  # `dcgmi health -c` ends with 0 all the same
        ("Error: Health watches not enabled. Please enable watches.", 255, "unknown"),
        ("Error: unable to establish a connection to the specified host: localhost", 255, "unknown"),
        ("| Deployment  | Pass |\n| Memory  | Fail - GPU: 3 |", 226, "bad"),
        ("| Deployment  | Pass |", 0, "good"),
        ("", 0, "unknown"),
    ],
)
def test_dcgm_says_it_in_its_table(tmp_path: Path, said: str, status: int, verdict: str) -> None:
    (tmp_path / "said").write_text(said)
    found = check_program("dcgm", program(tmp_path, f"cat {tmp_path}/said; exit {status}", "dcgmi") + " health -c", 5.0)
    assert found.verdict == verdict
    if verdict == "bad":
        assert "Fail" in found.reason and "|" not in found.reason


def test_a_program_that_is_missing_is_one_clear_warning_and_never_bad(tmp_path: Path, snapshot) -> None:
    settings = Settings(skip=tuple(CHECKS), programs={"nhc": "/no/nhc"})
    report = run(settings, checks=checks_of(settings))
    assert report.verdict == "warning"
    assert report.reason == snapshot


def test_a_program_that_hangs_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    began = time.monotonic()
    found = check_program("slow", program(tmp_path, f"sleep 100 & echo $! > {pid}; wait"), 0.6)
    assert found.verdict == "unknown" and "no answer within 0.6 s" in found.reason
    assert time.monotonic() - began < 20.0
    child, until = Path(f"/proc/{pid.read_text().strip()}/stat"), time.monotonic() + 20.0
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < until:
        time.sleep(0.01)
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_a_program_that_is_killed_or_prints_without_end_proves_nothing(tmp_path: Path) -> None:
    assert check_program("dies", program(tmp_path, "kill -9 $$"), 5.0).reason.endswith("was ended by SIGKILL")
    assert check_program("loud", program(tmp_path, "yes"), 5.0).verdict == "unknown"


def test_a_warning_hides_no_program_that_gave_no_answer(tmp_path: Path) -> None:
    """Defect: where another check warned, a program that hung at each run was never seen."""
    lines = {"warns": program(tmp_path, "echo slow; exit 1", "a"), "asks": program(tmp_path, "echo lost; exit 3", "b")}
    settings = Settings(programs=lines, timeout=5.0, skip=tuple(CHECKS))
    found = run(settings, checks=checks_of(settings))
    assert (found.verdict, found.reason) == ("warning", "warns: slow; asks: lost")


def test_no_shell_reads_the_command_and_little_of_the_environment_is_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    found = check_program("env", program(tmp_path, 'echo "$1 $SLURMD_NODENAME [$SECRET_TOKEN]"') + " '$(id); x'", 5.0)
    assert found.reason == "$(id); x n7 []"


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o1777])
def test_what_others_can_write_is_not_run(tmp_path: Path, mode: int) -> None:
    """Its group counts, and a sticky bit keeps no file's content."""
    path = program(tmp_path, "exit 2")
    os.chmod(path, mode)
    found = check_program("mine", path, 5.0)
    assert found.verdict == "warning" and f": `chmod go-w {path}`" in found.reason


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
@pytest.mark.parametrize("which", ["its own", "one above", "of a link"])
def test_what_others_can_put_into_its_place_is_not_run(tmp_path: Path, which: str, mode: int) -> None:
    """A user who may write any folder on the way to it, links included, could exchange it before the start."""
    folder = tmp_path / "site" / "checks"
    folder.mkdir(parents=True)
    links = tmp_path / "links"
    links.mkdir()
    path = program(folder, "exit 2")
    (links / "there").symlink_to("../site/./checks")
    path = f"{links}/there/{Path(path).name}"
    assert check_program("mine", path, 5.0).verdict == "bad"
    weak = {"its own": folder, "one above": folder.parent, "of a link": links}[which]
    weak.chmod(mode)
    found = check_program("mine", path, 5.0)
    assert found.verdict == "warning" and f"others can write {weak}:" in found.reason
    weak.chmod(0o1777)  # others put nothing into the place of what is there
    assert check_program("mine", path, 5.0).verdict == "bad"


@pytest.mark.parametrize("owned", ["", "..", "../..", "/", "check", "link"])
def test_what_belongs_to_another_is_not_run(tmp_path: Path, owned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file, a folder on the way, and a link that another has put into a folder like /tmp."""
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    program(folder, "exit 2")
    (folder / "link").symlink_to("check")
    others = os.path.normpath(folder / owned)
    looked = os.lstat

    def lstat(path: str) -> os.stat_result:
        found = looked(path)
        uid = os.geteuid() + 1 if path == others else found.st_uid
        return os.stat_result((found.st_mode, found.st_ino, found.st_dev, found.st_nlink, uid, *found[5:10]))

    assert check_program("mine", str(folder / "link"), 5.0).verdict == "bad"
    monkeypatch.setattr(os, "lstat", lstat)
    found = check_program("mine", str(folder / "link"), 5.0)
    assert found.verdict == "warning" and f"`chown root {others}`" in found.reason


def test_the_interpreter_of_a_script_is_looked_at_too(tmp_path: Path) -> None:
    shell = tmp_path / "shell"
    shell.write_bytes(Path("/bin/sh").read_bytes())
    shell.chmod(0o755)
    path = program(tmp_path, "exit 2")
    Path(path).write_text(f"#! {shell} -e\nexit 2\n")
    assert check_program("mine", path, 5.0).verdict == "bad"
    shell.chmod(0o775)
    assert f"others can write {shell}:" in check_program("mine", path, 5.0).reason
    Path(path).write_text(f"#!{path}\n")
    assert "one interpreter too many" in check_program("mine", path, 5.0).reason
    Path(path).write_text("#!sh\n")
    assert "no absolute path" in check_program("mine", path, 5.0).reason


@pytest.mark.parametrize("front", ["/bin/sh", "/usr/bin/env bash -e", "/usr/bin/timeout 5 sh"])
def test_the_script_of_an_interpreter_is_looked_at_too(tmp_path: Path, front: str) -> None:
    path = tmp_path / "check.sh"
    path.write_text("exit 2\n")
    path.chmod(0o644)
    assert check_program("mine", f"{front} {path}", 5.0).verdict == "bad"
    path.chmod(0o664)
    assert f"others can write {path}:" in check_program("mine", f"{front} {path}", 5.0).reason
    assert check_program("mine", f"/bin/echo {path}", 5.0).verdict == "good", (
        "an argument that nobody runs may be anybody's"
    )


@pytest.mark.parametrize(
    "front",
    [
        "/bin/sh -c '. {}; true'",
        "/bin/sh -c '{} --quick'",
        "/bin/sh {relative}",
        "/usr/bin/chrt -o 0 {}",
        "/usr/bin/xargs -a /dev/null {}",
    ],
)
def test_what_a_command_runs_besides_is_looked_at_too(tmp_path: Path, front: str) -> None:
    path = Path(program(tmp_path, "exit 0"))
    command = front.format(path, relative=str(path)[1:])
    assert check_program("mine", command, 5.0).verdict == "good"
    path.chmod(0o777)
    assert f"others can write {path}:" in check_program("mine", command, 5.0).reason


def test_a_path_of_links_without_end_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    found = check_program("mine", f"{tmp_path}/loop", 5.0)
    assert found.verdict == "warning" and "Too many levels" in found.reason


def test_a_script_hears_its_own_name(tmp_path: Path) -> None:
    """NHC makes the name of its configuration of it, by this line of its own."""
    line = tomllib.loads((DOCS / "behaviour" / "health-programs.toml").read_text())["name"]["nhc"]
    path = program(tmp_path, f'{line}\necho "reads $NAME.conf"')
    Path(path).write_text(Path(path).read_text().replace("#!/bin/sh", "#!/bin/bash"))
    (tmp_path / "nhc").symlink_to(path)
    assert check_program("mine", f"{tmp_path}/nhc", 5.0).reason == "reads nhc.conf"


def test_statuses_can_be_named() -> None:
    one = HealthProgram(command="/x", bad=(7,), warning=(8,))
    verdicts = {status: judge(one, "x", status, ["a line"]).verdict for status in (0, 7, 8, 1, 2)}
    assert verdicts == {0: "good", 7: "bad", 8: "warning", 1: "unknown", 2: "unknown"}


def test_before_a_job_only_those_run_that_say_so() -> None:
    config = HealthConfig(programs={"a": "/a", "b": HealthProgram(command="/b", prolog=True)})
    assert {"a", "b"} <= checks_of(config).keys()
    assert "b" in checks_of(config, at_prolog=True) and "a" not in checks_of(config, at_prolog=True)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"programs": {"gpu": "/x"}}, "a check of Unicron's own"),
        ({"programs": {"a b": "/x"}}, "write a name of up to 40 letters"),
        ({"programs": {"nhc": "nhc -a"}}, "begin with the absolute path"),
        ({"programs": {"nhc": "/x 'y"}}, "No closing quotation"),
        ({"programs": {"nhc": {"command": "/x", "bad": [1], "warning": [1]}}}, "both bad and a warning"),
        ({"programs": {"nhc": {"command": "/x", "bda": [1]}}}, "bda"),
        ({"programs": {"nhc": "/usr/sbin/nhc"}, "skip": ["nch"]}, "gpu, memory"),
    ],
)
def test_a_wrong_line_is_said(section: dict[str, object], says: str) -> None:
    config, found = parse_sections({"health": section})
    assert any(says in line for line in found + problems(config.health))


def test_a_right_line_is_taken() -> None:
    section = {
        "programs": {"nhc": "/usr/sbin/nhc MARK_OFFLINE=0", "dcgm": {"command": "/x", "user": "nobody"}},
        "skip": ["nhc"],
    }
    config, found = parse_sections({"health": section})
    assert not found and not problems(config.health)
    assert config.health.programs["dcgm"] == HealthProgram(command="/x", user="nobody")
