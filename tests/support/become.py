"""A fork of the tests' zygote becomes one of the product's programs, as if it had been started."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence

from tests.support import entered
from tests.support.processes import ROOT

PROGRAMS = {"unicron-agent": "unicron_ctl.agent.start.agent_main", "unicrond": "unicron_ctl.controller.unicrond"}


def become(name: str, environment: str, words: Sequence[str]) -> None:
    """Run it to its end. environment: its own (JSON); what is imported already has read the zygote's."""
    os.chdir(ROOT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(json.loads(environment))
    tempfile.tempdir = None  # TMPDIR may be another
    sys.path[0] = str(ROOT)  # as `python -m` has it there
    sys.argv = [name, *words]
    entered.watch(name)
    try:
        importlib.import_module(PROGRAMS[name]).main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # to tear an interpreter full of Megatron down takes 0.2 s of CPU
