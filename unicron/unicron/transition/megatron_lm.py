"""`python -m unicron.transition.megatron_lm SCRIPT ARGUMENTS`: see :mod:`unicron_transition.megatron_lm`."""

from __future__ import annotations

import sys

from unicron_transition.megatron_lm.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
