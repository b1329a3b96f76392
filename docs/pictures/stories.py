"""Records what `unicronctl` says of wrong numbers and of a slow rank, for docs/trusted.md.

    python -m docs.pictures.stories [STORY]...

Real ranks, agents and a controller, without Slurm. Each story is a job in which one fault is injected; its ranks
share this machine's cores. `draw.py` makes the pictures of what is recorded here.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import textwrap
from collections.abc import Callable
from pathlib import Path

from tests.support.jobs import World

HERE = Path(__file__).resolve().parent
COLUMNS, ROWS = 118, 60
JOB, SLOT, LIMIT = "7", 1, 240.0
FIRST = 40  # iteration from which on the fault may strike: by then a band of norms is known, and a state verified
COMPARE, MORE = 12, 30
SCRIPT = """
import os, time, torch, unicron
unicron.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

def fetch(iteration, index):
    return torch.rand(16, 32, generator=torch.Generator().manual_seed(64 * iteration + index))

def forward_step(data, model):
    time.sleep(0.05)
    return torch.nn.functional.mse_loss(model(data), data.sum(dim=1, keepdim=True).sin())

session = unicron.Session(
    model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.003),
    micro_batches=int(os.environ["STORY_MICRO_BATCHES"]),
    forward_step=forward_step, fetch=fetch, train_iterations=5000,
    checkpoints=unicron.Checkpoints(os.environ["STORY_FOLDER"], interval=10),
)
for step in session:
    pass
"""


class Story:
    """A job in which a fault strikes, and what is shown of it."""

    def __init__(self, folder: Path, ranks: int, micro_batches: int):
        script = folder / "train.py"
        script.write_text(SCRIPT)
        settings = {"UNICRON_COMPARE": str(COMPARE), "UNICRON_AUDIT": "256", "STORY_FOLDER": str(folder / "saved")}
        settings |= {"UNICRON_MODE": "session", "SLURM_JOB_NAME": "gpt", "STORY_MICRO_BATCHES": str(micro_batches)}
        self.members = list(range(ranks))
        self.job = World(folder, ranks, "allow_inject = true", [sys.executable, str(script)], **settings)
        self.lines: list[str] = []

    def show(self, *words: str) -> None:
        """Record a command as a terminal shows it."""
        self.lines += [f"\x1b[1m$ unicronctl {' '.join(words)}\x1b[0m", *told(self.job.address, *words), ""]

    def inject(self, fault: str) -> None:
        """Let a fault strike in a rank of the trained job."""
        self.job.wait(lambda: self.job.trains(self.members, FIRST), f"{FIRST} iterations", LIMIT)
        self.show("inject", "--job", JOB, "--slot", str(SLOT), fault)

    def strike(self, fault: str) -> int:
        """Do the same, and wait until it is found. Return the iteration before."""
        self.inject(fault)
        before = int(self.job.job()["iteration"])
        self.job.wait(self.job.failures, f"{fault} is found", LIMIT)
        return before

    def wait_for_iteration(self, iteration: int) -> None:
        """Wait until the job has come to an iteration."""
        self.job.wait(lambda: self.job.job()["iteration"] >= iteration, f"iteration {iteration}", LIMIT)


def told(address: str, *words: str) -> list[str]:
    """Return what a command of unicronctl prints on a terminal."""
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = os.environ | {"UNICRON_CONTROLLER": address, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    command = [str(Path(sys.executable).with_name("unicronctl")), *words]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=its, stderr=its, env=environment) as process:
        os.close(its)
        text = b""
        try:
            while piece := os.read(mine, 4096):
                text += piece
        except OSError:  # Linux says so at the end of a terminal
            pass
        os.close(mine)
    assert process.returncode == 0, text.decode(errors="replace")
    plain = re.sub(r"\x1b\[\?[0-9]+[hl]", "", text.decode())
    return plain.replace("\r", "").rstrip("\n").split("\n")


def nan(story: Story) -> None:
    """A rank's gradient has a NaN, once."""
    story.wait_for_iteration(story.strike("nan:gradient") + MORE)
    story.show("explain", JOB)


def flip(story: Story) -> None:
    """A bit flips in a weight, and the rank trains on."""
    story.wait_for_iteration(story.strike("flip:weight:22") + MORE)
    story.show("explain", JOB)


def slow(story: Story) -> None:
    """A rank becomes half as fast."""
    story.inject("slow:2")
    began = int(story.job.job()["iteration"])
    found = lambda: [line for line in story.job.array.logs.splitlines() if "shares by speed" in line]  # noqa: E731
    first = story.job.wait(found, "shares by speed", LIMIT)[0]
    story.wait_for_iteration(began + MORE)
    story.show("jobs")
    story.show("explain", JOB)
    story.lines += ["\x1b[1mthe job's log\x1b[0m", *textwrap.wrap(first, COLUMNS, subsequent_indent="    ")]


STORIES: dict[str, tuple[Callable[[Story], None], int, int]] = {
    "nan": (nan, 3, 9),
    "flip": (flip, 3, 9),
    "slow": (slow, 4, 32),
}


def main(names: list[str]) -> None:
    for name in names or STORIES:
        with tempfile.TemporaryDirectory(prefix="unicron-story-") as folder:
            tell, ranks, micro_batches = STORIES[name]
            story = Story(Path(folder), ranks, micro_batches)
            try:
                tell(story)
                print("\n".join(story.lines))
            except BaseException:
                print(story.job.told(), file=sys.stderr)
                raise
            finally:
                story.job.close()
        (HERE / f"trusted-{name}.ansi").write_text("\n".join(story.lines))


if __name__ == "__main__":
    main(sys.argv[1:])
