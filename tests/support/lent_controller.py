"""A unicrond in a fork of the tests' template, which has imported what it needs:

    lent_controller.py ENVIRONMENT LOG OPTIONS...

ENVIRONMENT is its own (JSON), LOG the file of its standard error.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """See the module's own words."""
    environment, log, *options = sys.argv[1:]
    os.environ.clear()
    os.environ.update(json.loads(environment))
    os.chdir(ROOT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666), 2)
    sys.path[0] = str(ROOT)  # as `python -m` has it there
    sys.argv = ["unicrond", *options]
    from unicron_ctl.controller.main import main as unicrond

    unicrond()


if __name__ == "__main__":
    main()
