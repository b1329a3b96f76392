"""Runs a script whose `unicron.data.Fetch` waits: python slow_script.py SCRIPT"""

from __future__ import annotations

import runpy
import sys

import unicron
from tests.support.gates import slow

if __name__ == "__main__":
    slow(unicron.data.Fetch)
    runpy.run_path(sys.argv[1], run_name="__main__")
