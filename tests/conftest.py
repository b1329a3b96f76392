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


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pytest's own has the test's name in it: with that of a worker before it, too long for the path of a socket."""
    return tmp_path_factory.mktemp("t")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The groups that take longest come first."""
    items.sort(key=lambda item: TIERS.index(item.path.relative_to(TESTS).parts[0]))


class Together(LoadScopeScheduling):
    """For pytest-xdist: what runs on a Slurm is one group, and what starts processes another, each one after the other;
    else a file is one."""

    def _split_scope(self, nodeid: str) -> str:
        path = Path(nodeid.partition("::")[0])
        return next((tier for tier in TIERS[:2] if tier in path.parts[:2]), str(path))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Together:
    """Called where tests run side by side."""
    return Together(config, log)
