"""A unicrond in a fork of the tests' zygote, which has imported what it needs:

    lent_controller.py ENVIRONMENT LOG OPTIONS...

ENVIRONMENT is its own (JSON), LOG the file of its standard error.
"""

from __future__ import annotations

import os
import sys

from tests.support.become import become

if __name__ == "__main__":
    environment, log, *options = sys.argv[1:]
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666), 2)
    become("unicrond", environment, options)
