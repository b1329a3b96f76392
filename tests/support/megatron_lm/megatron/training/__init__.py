"""Of the stand-in: what a script imports."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[5]
sys.path += [str(ROOT / "sbatch_templates"), str(ROOT)]

import cpu_adapter  # noqa: E402

cpu_adapter.install()

from .arguments import parse_and_validate_args  # noqa: E402, F401
from .global_vars import get_args, get_signal_handler, get_timers  # noqa: E402, F401
from .initialize import initialize_megatron  # noqa: E402, F401
from .releases import SINCE_18  # noqa: E402, F401
from .training import (  # noqa: E402, F401
    forward_step,
    model_provider,
    pretrain,
    print_rank_last,
    train_valid_test_datasets_provider,
)
