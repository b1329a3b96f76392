"""What an editor finds: from where a name is defined, all files that use it. Jedi is behind several of them. It reads
at most 30 files for a name, so these are none that more use."""

from __future__ import annotations

import re
import tokenize
from pathlib import Path

import jedi
import pytest

import unicron
from tests.support.documents import tracked
from tests.support.processes import ROOT

NAMES = (  # one of each package
    ("detector/unicron_detector/health/kernel_log.py", "KernelLog"),
    ("planner/unicron_planner/problem/gpus.py", "node_peak"),
    ("transition/unicron_transition/iteration/ledger.py", "Ledger"),
    ("unicron_ctl/unicron_ctl/shared/slurm/slurm_client.py", "Needs"),
)
MORE = (
    ("detector/unicron_detector/failures/classify.py", "default_classifier"),
    ("detector/unicron_detector/failures/severity.py", "Severity"),
    ("planner/unicron_planner/solver/plan.py", "Plan"),
    ("transition/unicron_transition/generations/layout.py", "compose"),
    ("unicron_ctl/unicron_ctl/controller/plan/eligible_nodes.py", "misfit"),
    ("unicron_ctl/unicron_ctl/shared/system/columns.py", "Listing"),
)


def using(name: str, module: str) -> set[Path]:
    """The files that import the name from its module, and this one."""
    package, _, last = module.rpartition(".")
    line = re.compile(
        rf"from {module} import (?:\([^)]*|[^\n(]*)\b{name}\b|from {package} import (?:\([^)]*|[^\n(]*)\b{last}\b"
    )
    found = set()
    for path in tracked("*.py"):
        if line.search(path.read_text()):
            with tokenize.open(path) as file:
                if any(token.string == name for token in tokenize.generate_tokens(file.readline)):
                    found.add(path)
    return found


@pytest.mark.parametrize(
    ("path", "name"),
    [*NAMES, *(pytest.param(*each, marks=pytest.mark.long) for each in MORE)],
    ids=lambda value: value.rpartition("/")[2],
)
def test_an_editor_finds_who_uses_a_name(path: str, name: str) -> None:
    file = ROOT / path
    module = path.partition("/")[2].removesuffix(".py").replace("/", ".")
    wanted = using(name, module)
    assert len(wanted) > 1, f"{module} has no {name} that others use"
    text = file.read_text()
    defined = re.search(rf"^(?:def |class )?({name})\b", text, re.MULTILINE)
    assert defined, f"{path} defines no {name}"
    line, column = (
        text.count("\n", 0, defined.start(1)) + 1,
        defined.start(1) - text.rfind("\n", 0, defined.start(1)) - 1,
    )
    found = jedi.Script(path=file, project=jedi.Project(ROOT)).get_references(line, column)
    assert wanted <= {each.module_path for each in found}, wanted - {each.module_path for each in found}


@pytest.mark.parametrize(
    ("name", "home"), [*unicron._HOMES.items(), *((each, f"unicron.{each}") for each in unicron._MODULES)]
)
def test_an_editor_finds_what_scripts_import(name: str, home: str) -> None:
    """`unicron` itself finds it when it is first used, which no editor can follow."""
    script = jedi.Script(f"import unicron\nunicron.{name}", project=jedi.Project(ROOT))
    (found,) = script.goto(2, len("unicron.") + 1, follow_imports=True)
    assert found.full_name is not None and found.full_name.startswith(home)
