"""For all tests: Hypothesis tries the same cases on every machine, and a busy one is no failure. What shares a cluster
or a fixture of its module stays together when tests run side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("unicron", deadline=None, derandomize=True)
settings.load_profile("unicron")

TESTS = Path(__file__).resolve().parent
TIERS = ("slurm", "process", "unit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The groups that take longest come first."""
    items.sort(key=lambda item: TIERS.index(item.path.relative_to(TESTS).parts[0]))


class Together(LoadScopeScheduling):
    """For pytest-xdist: all that runs on a Slurm is one group, so one after the other; else each file is one."""

    def _split_scope(self, nodeid: str) -> str:
        path = Path(nodeid.partition("::")[0])
        return "slurm" if "slurm" in path.parts[:2] else str(path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Together:
    """Called where tests run side by side."""
    return Together(config, log)
