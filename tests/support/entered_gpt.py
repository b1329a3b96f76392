"""`tiny_gpt.py` in a process that notes which files of the product it enters (`entered`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

UNICRON_PRELOAD = ("sbatch_templates.gpt_imports",)
sys.path.append(str(Path(__file__).resolve().parents[2]))

import unicron  # noqa: E402, F401  # what makes it a script of session mode
from tests.support import entered, tiny_gpt  # noqa: E402

if __name__ == "__main__":
    entered.watch("rank" if os.environ["UNICRON_INCARNATION"] == "0" else "newcomer")
    tiny_gpt.main()
