"""`python -m unicron.torchtitan ...` is torchtitan's trainer, with its options, in a session (docs/trainers.md)."""

from __future__ import annotations

import signal
import sys

UNICRON_PRELOAD = ("torch", "torchtitan.train")


def main() -> int:
    """Train. Exit status 1, with one line, if the training cannot be healed."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is a training that could end
    from torchtitan.train import main as run

    from unicron_transition.seams.table import UnsupportedLayout
    from unicron_transition.snapshot.checkpoint import CheckpointError
    from unicron_transition.torchtitan.trainer import HealedTrainer, prepare_environment

    prepare_environment()
    try:
        run(HealedTrainer)
    except (UnsupportedLayout, CheckpointError) as error:
        print(f"unicron: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
