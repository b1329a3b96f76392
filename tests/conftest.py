"""For all tests: Hypothesis tries the same cases on every machine, and a busy one is no failure; the garbage collector
leaves alone what the imports have made, torch's above all, over which it would go a thousand times, and looks seldom
at the rest: the worlds of pure tests have many objects and few circles."""

from __future__ import annotations

import gc
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.amber import AmberSnapshotExtension
from syrupy.location import PyTestLocation

# Files of tests/process and tests/slurm that take longest. They begin first, so that no worker has one of them left
# when the others have nothing more to do (`make test` lets workers take the files in this order).
LONGEST = (
    "test_memory",
    "test_layouts",
    "test_shard_copies",
    "test_links",
    "test_remembered_shards",
    "test_copies",
    "test_template_layouts",
    "test_sharded_state",
    "test_memory_user",
    "test_copies_faults",
    "test_training_script",
    "test_rank_recovery",
    "test_plain_template",
    "test_spares",
    "test_local_cluster",
    "test_warm_ranks",
    "test_layout_checkpoints",
    "test_agent",
    "test_megatron_lm",
    "test_injection_process",
    "test_plain_modules",
)

settings.register_profile("unicron", deadline=None, derandomize=True)
settings.load_profile("unicron")
gc.disable()


def pytest_collection_finish() -> None:
    """The files of the tests are imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


class Texts(AmberSnapshotExtension):
    """Keep the texts for people in one folder, tests/texts, below the paths of their tests."""

    @classmethod
    def dirname(cls, *, test_location: PyTestLocation) -> str:
        tests = Path(__file__).parent
        return str(tests / "texts" / Path(test_location.filepath).parent.relative_to(tests))

    @classmethod
    def matches_test_location(cls, *, test_location: PyTestLocation, snapshot_location: str) -> bool:
        """Whether the file is this test's: syrupy goes by its name alone, also in the folders below, and would remove
        the texts of another test file of that name."""
        own = Path(snapshot_location).parent == Path(cls.dirname(test_location=test_location))
        return own and super().matches_test_location(test_location=test_location, snapshot_location=snapshot_location)


@pytest.fixture
def snapshot(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    """Compare with the text in tests/texts; `make accept-texts` writes them anew."""
    return snapshot.use_extension(Texts)


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pytest's own has the test's name in it: with that of a worker before it, too long for the path of a socket."""
    return tmp_path_factory.mktemp("t")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The files that take longest come first. The tests of the real Megatron-LM, DeepSpeed and Apptainer are left out
    where these are not (CONTRIBUTING.md)."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    there = {
        "megatron_lm": "UNICRON_MEGATRON_LM" in os.environ,
        "deepspeed": bool(find_spec("deepspeed")),
        "apptainer": bool(shutil.which("apptainer")),
    }
    missing = [name for name, is_there in there.items() if not is_there]
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in missing)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
