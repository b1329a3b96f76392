"""docs/programs.md names every program: the commands, the modules that are started, the scripts, the units."""

from __future__ import annotations

import configparser
import re

from tests.support.documents import tracked
from tests.support.processes import ROOT, SOURCES

PAGE = (ROOT / "docs" / "programs.md").read_text()
ROOTS = tuple(name for name in SOURCES if name != "sbatch_templates")
# `-m MODULE` of a shell, and the two words of a list in Python or C
STARTED = re.compile(r"""-m["',\s]+(unicron[\w.]*\w)""")


def started_modules() -> set[str]:
    """Modules with a line for when they are run, and those that others run with -m."""
    found = set()
    for path in tracked("*"):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith((*(f"{root}/" for root in ROOTS), "slurm_plugin/", "packaging/", "sbatch_templates/")):
            continue
        text = path.read_text(errors="replace")
        found |= set(STARTED.findall(text)) if path.suffix != ".md" else set()
        if name.startswith(ROOTS) and re.search(r"^if __name__ == .__main__.:", text, re.MULTILINE):
            found.add(".".join(path.relative_to(ROOT).with_suffix("").parts[1:]))
    return found


def is_named(module: str) -> bool:
    """By its own name, or by the end of the path by which it is imported."""
    path = "/" + module.replace(".", "/") + ".py"
    words = [word for part in re.findall(r"`([^`\n]+)`", PAGE) for word in part.split()]
    return any(word == module or (word.endswith(".py") and path.endswith(f"/{word}")) for word in words)


def test_every_command_is_named() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.entry_points"]["console_scripts"].strip().splitlines()
    names = {line.partition("=")[0].strip() for line in lines}
    assert len(names) >= 3
    for name in names:
        assert re.search(rf"^#+ .*\b{name}$", PAGE, re.MULTILINE), f"docs/programs.md has no section for {name}"


def test_every_module_that_is_started_is_named() -> None:
    found = started_modules()
    assert {
        "unicron_ctl.nodes.admission",
        "unicron_detector.health.sampler",
        "unicron_detector.processes.zygote",
    } <= found
    missing = sorted(module for module in found if not is_named(module))
    assert not missing, f"docs/programs.md does not name {missing}"
    assert not is_named("unicron_ctl.nodes.admissions")


def test_every_unit_and_script_of_slurms_side_is_named() -> None:
    files = [
        path for part in ("systemd", "prolog.d", "epilog.d", "health") for path in tracked(f"slurm_plugin/{part}/*")
    ]
    assert len(files) >= 8
    for path in files:
        assert path.name in PAGE, f"docs/programs.md does not name {path.relative_to(ROOT)}"
