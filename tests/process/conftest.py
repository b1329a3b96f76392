"""What several process tests train with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sbatch_templates import build_dataset, gpt_options
from tests.support.controller import Controller
from tests.support.jobs import Job


@pytest.fixture(scope="session", autouse=True)
def lent_zygotes() -> Iterator[None]:
    """Agents of this tier are lent their first zygotes, and controllers are forks. Those of benchmarks import all by
    themselves, as users' do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "lent", True)
        patch.setattr(Controller, "lent", True)
        yield


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """The templates' own text: the prefix of its files."""
    prefix = tmp_path_factory.mktemp("dataset") / "text"
    files = build_dataset.find_files(Path(gpt_options.__file__).parent, [".py"], recursive=False)
    build_dataset.build(files, prefix)
    return prefix
