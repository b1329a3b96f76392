"""What the template's imports must not do: open the driver of a card."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from unicron_detector.processes import forkable


@pytest.fixture
def torch(monkeypatch) -> ModuleType:
    """The part of torch that asks the driver, which no import may do."""
    part = ModuleType("torch._C")

    def asked() -> int:
        raise AssertionError("the driver was asked")

    part._cuda_getDeviceCount = asked  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch._C", part)
    return part


def test_imports_count_cards_by_their_device_files(torch, tmp_path, monkeypatch):
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(forkable, "CARDS", str(tmp_path / "nvidia[0-9]*"))
    (tmp_path / "asks_at_import.py").write_text("import sys\nFOUND = sys.modules['torch._C']._cuda_getDeviceCount()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    original = torch._cuda_getDeviceCount
    with forkable.without_driver():
        assert importlib.import_module("asks_at_import").FOUND == 2
    assert torch._cuda_getDeviceCount is original and sys.meta_path == finders


def test_without_torch_nothing_is_changed(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._C", raising=False)
    with forkable.without_driver():
        importlib.import_module("colorsys")
    assert "torch._C" not in sys.modules
