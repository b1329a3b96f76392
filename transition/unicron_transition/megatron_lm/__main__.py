"""`python -m unicron.transition.megatron_lm SCRIPT ARGUMENTS` runs a program of Megatron-LM's under a session."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path


def main() -> int:
    """Run the program. Exit status 1, with one line, if it cannot be healed."""
    if len(sys.argv) < 2:
        print("unicron: write `python -m unicron.transition.megatron_lm pretrain_gpt.py ...`", file=sys.stderr)
        return 2
    sys.argv = sys.argv[1:]
    script = Path(sys.argv[0])
    if not script.is_file():
        print(f"unicron: {script}: no such file; check the path", file=sys.stderr)
        return 2
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is a training that could end
    sys.path[0] = str(script.resolve().parent)  # as for `python SCRIPT`
    # A single plain process needs no launcher.
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    from unicron_transition.megatron_lm import data, loop, world
    from unicron_transition.seams import megatron_lm
    from unicron_transition.seams.table import UnsupportedLayout
    from unicron_transition.snapshot.checkpoint import CheckpointError

    try:
        megatron_lm.check()
        data.install()
        of_the_job = world.World()
        of_the_job.install()
        of_the_script = loop.Loop(of_the_job)
        of_the_script.install()
        runpy.run_path(str(script), run_name="__main__")
        of_the_script.close()
    except (megatron_lm.CannotHeal, UnsupportedLayout, CheckpointError) as error:
        print(f"unicron: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
