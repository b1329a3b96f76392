"""Man pages and completion: tools/manpages.py makes them from the programs themselves, and roff reads them."""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Iterator
from configparser import ConfigParser
from types import ModuleType

import click
import pytest
from click.testing import CliRunner

from tests.support.processes import LIMIT, ROOT
from unicron_ctl.agent.start.agent_main import cli as agent
from unicron_ctl.cli.unicronctl import commands, unicronctl
from unicron_ctl.controller.unicrond import unicrond
from unicron_ctl.shared.settings.config import ControllerConfig, fields_of
from unicron_ctl.shared.system import release

SHELLS = {
    "bash": "bash-completion/completions/",
    "zsh": "zsh/vendor-completions/_",
    "fish": "fish/vendor_completions.d/",
}


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        yield importlib.import_module("manpages")


@pytest.fixture(scope="module")
def files(tool: ModuleType) -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "86400")
        return tool.files()


def shown(text: str) -> str:
    """The text of a page without its escapes."""
    return re.sub(r"\\f[BR]|\\:", "", text).replace("\\-", "-")


def setup_version() -> str:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup["metadata"]["version"]


def test_each_command_has_a_page_with_every_option_of_its_help(files: dict[str, str]) -> None:
    for name in commands():
        command = unicronctl.get_command(click.Context(unicronctl), name)
        assert command is not None
        page = shown(files[f"man/man1/unicronctl-{name}.1"])
        groups = command.commands.values() if isinstance(command, click.Group) else [command]
        shown_ones = [p for each in groups for p in each.params if not getattr(p, "hidden", False)]
        options = [option for param in shown_ones for option in param.opts if option[0] == "-"]
        missing = [option for option in options if option not in page]
        assert not missing, f"{name}: {missing}"
        assert f"unicronctl-{name}(1)" in shown(files["man/man1/unicronctl.1"])
    for name, program in (("unicrond", unicrond), ("unicron-agent", agent)):
        assert "--version" in shown(files[f"man/man8/{name}.8"])
        assert isinstance(program, click.Command)


def test_each_setting_and_each_option_of_the_plugin_is_described(files: dict[str, str]) -> None:
    settings = shown(files["man/man5/unicron.toml.5"])
    for field in fields_of(ControllerConfig):
        assert field.name in ("partitions", "planner") or f"\n{field.name} (default: " in settings, field.name
    plugin = shown(files["man/man8/unicron-plugin.8"])
    registered = re.findall(r'^\t\t"((?:no-)?unicron[\w-]*)",', (ROOT / "slurm_plugin/spank/args.c").read_text(), re.M)
    assert "unicron" in registered and len(registered) == len(set(registered)) > 3
    for option in registered:
        assert f"\n--{option}" in plugin, option
    for argument in ("agent=", "controller=", "config=", "default="):
        assert f"\n{argument}\n" in plugin, argument


def test_the_files_are_the_same_each_time(
    tool: ModuleType, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert tool.files() == files
    assert '"1970-01-02"' in shown(files["man/man1/unicronctl.1"])
    assert all(str(ROOT) not in text for text in files.values()), "a path of this machine"


def test_roff_has_nothing_to_warn_of(files: dict[str, str]) -> None:
    for path, text in files.items():
        if path.startswith("man/"):
            command = ["groff", "-ww", "-man", "-Tutf8", "-Z", "-k"]
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=LIMIT, check=False)
            assert (done.returncode, done.stderr) == (0, ""), path


def test_shells_complete_what_the_programs_know(files: dict[str, str]) -> None:
    for name in ("unicronctl", "unicrond"):
        for shell, folder in SHELLS.items():
            path = f"{folder}{name}" + (".fish" if shell == "fish" else "")
            assert f"_{name.upper()}_COMPLETE={shell}_complete" in files[path]
    asked = {"_UNICRONCTL_COMPLETE": "bash_complete", "COMP_WORDS": "unicronctl st", "COMP_CWORD": "1"}
    assert CliRunner().invoke(unicronctl, env=asked, prog_name="unicronctl").output == "plain,status\n"
    asked |= {"COMP_WORDS": "unicronctl status --wa", "COMP_CWORD": "2"}
    assert CliRunner().invoke(unicronctl, env=asked, prog_name="unicronctl").output == "plain,--watch\n"


def test_all_programs_have_the_release_of_setup_cfg() -> None:
    number = setup_version()
    assert release.release() == number
    for name, program in (("unicronctl", unicronctl), ("unicrond", unicrond), ("unicron-agent", agent)):
        assert CliRunner().invoke(program, ["--version"], prog_name=name).output == f"{name} {number}\n"
    command = ["make", "-s", "-C", str(ROOT / "slurm_plugin/spank"), "version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    assert done.stdout.startswith(f"unicron {number}, built for Slurm ")
