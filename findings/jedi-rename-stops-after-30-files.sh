#!/usr/bin/env bash
# jedi 0.20.1: rename and references stop after 30 files, and say nothing.
#
# Seen: a function that 40 modules import is renamed in 30 of them, and in the module that defines it. `rename` returns a refactoring
# like any other: no error, no mark that it is incomplete. After `apply` ten modules import a name that is gone. With 20
# modules all are renamed. `_PARSED_FILE_LIMIT` in jedi/inference/references.py is the number; no setting has it.
#
# Why it matters: editors take rename and "find references" from jedi. In a project of some size "nobody else uses it" is not what
# the answer means: compare with `git grep -w NAME`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check jedi==0.20.1 > "$folder/pip.log" 2>&1 || {
    cat "$folder/pip.log" >&2
    exit 1
}
cd "$folder"
cat > look.py <<'PY'
import subprocess
import sys
from pathlib import Path

import jedi


def left_behind(count: int) -> int:
    """How many of so many modules that import a function cannot be imported after it was renamed."""
    root = Path(f"project{count}").resolve()
    (root / "shop").mkdir(parents=True)
    (root / "shop/__init__.py").touch()
    home = root / "shop/prices.py"
    home.write_text("def price(number):\n    return number * 2\n")
    users = [f"user{number:02}" for number in range(count)]
    for name in users:
        (root / f"shop/{name}.py").write_text("from shop.prices import price\n\nprint(price(1))\n")
    script = jedi.Script(path=home, project=jedi.Project(root))
    found = {each.module_path for each in script.get_references(1, 4)}
    script.rename(1, 4, new_name="cost").apply()
    assert "def cost" in home.read_text()
    broken = [name for name in users if subprocess.run([sys.executable, "-m", f"shop.{name}"], cwd=root, capture_output=True).returncode]
    print(f"{count} modules import it: references in {len(found) - 1}, broken by the rename: {len(broken)}")
    return len(broken)


assert left_behind(20) == 0
assert left_behind(40) == 10
PY
env/bin/python look.py
