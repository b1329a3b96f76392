"""What torch's own releases and options write, and what all of them read: kinds of elements, checksums, fields."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata

from unicron_transition.snapshot.checkpoint import Checkpoints
from unicron_transition.snapshot.formats import convert, opening, pickles
from unicron_transition.snapshot.formats.index import RAW
from unicron_transition.snapshot.migrate import TrainingState

RARE = {name: getattr(torch, name) for name in RAW if hasattr(torch, name)}


def some(kind: torch.dtype) -> torch.Tensor:
    """A tensor of any bytes."""
    count = 12 * torch.empty(0, dtype=kind).element_size()
    told = torch.randint(0, 2 if kind == torch.bool else 100, (3, count // 3), dtype=torch.uint8)
    return told.view(kind)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def read_by_torch(folder: Path, told: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: torch.empty_like(each) for name, each in told.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def test_every_kind_of_elements_comes_through_each_format_bit_for_bit(tmp_path):
    """Defect: one tensor of float8, uint16 or complex32 made a whole checkpoint unreadable."""
    torch.manual_seed(1)
    told = {name: some(kind) for name, kind in RARE.items()}
    assert len(told) > 20
    dcp.save(told | {"step": 3}, checkpoint_id=tmp_path / "there", no_dist=True)
    index = opening.index_of(tmp_path / "there")
    assert {tensor.name: tensor.read().tobytes() for tensor in index.parameters()} == {
        name: as_bytes(each) for name, each in told.items()
    }
    convert.import_(index, tmp_path / "own")
    convert.export(opening.index_of(tmp_path / "own"), tmp_path / "dcp", "dcp")
    found = read_by_torch(tmp_path / "dcp", told)
    assert all(as_bytes(found[name]) == as_bytes(each) for name, each in told.items())


def test_buffers_of_rare_kinds_are_resumed(tmp_path):
    def made(seed: int) -> TrainingState:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 3)
        for name, kind in RARE.items():
            model.register_buffer(f"of_{name}", some(kind))
        return TrainingState([model], torch.optim.SGD(model.parameters()), None)

    before, after, third = made(1), made(2), made(3)
    Checkpoints(tmp_path / "own").save_last(before, 3)
    Checkpoints(tmp_path / "own").load(after)
    dcp.save({"model": before.model[0].state_dict()}, checkpoint_id=tmp_path / "there", no_dist=True)
    Checkpoints(tmp_path / "new", begin_from=tmp_path / "there").load(third)
    for name, buffer in before.model[0].named_buffers():
        for each in (after, third):
            assert as_bytes(each.model[0].get_buffer(name)) == as_bytes(buffer), name


def test_a_kind_that_is_not_known_is_named_and_the_rest_is_read(tmp_path, snapshot):
    dcp.save({"a": torch.ones(3), "b": torch.ones(3).half()}, checkpoint_id=tmp_path / "there", no_dist=True)
    path = tmp_path / "there" / ".metadata"
    path.write_bytes(
        path.read_bytes().replace(b"\x8c\x07float16", b"\x8c\x07float12").replace(b"float16\n", b"float12\n")
    )
    index = opening.index_of(tmp_path / "there")
    assert list(index.tensors) == ["a"]
    assert index.common.losses() == snapshot


@pytest.fixture
def without_checksums():
    """An option of torch's."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(before)


def test_files_without_checksums_are_read(tmp_path, without_checksums):
    """Defect: they were no archive of torch.save, since the checksum of one of their members was wrong."""
    told = {"a": torch.arange(100.0), "step": 5}
    dcp.save(told, checkpoint_id=tmp_path / "there", no_dist=True)
    torch.save(told, tmp_path / "one.pt")
    with zipfile.ZipFile(tmp_path / "one.pt") as packed:
        assert not any(each.CRC for each in packed.infolist())
    index, wrong = opening.verify(tmp_path / "there")
    assert index is not None and wrong == [] and index.iteration == 5
    archive = pickles.archive(tmp_path / "one.pt")
    assert pickles.plain(archive.content, archive)["step"] == 5


def test_what_is_written_under_a_release_with_more_fields_is_read_by_all(tmp_path, monkeypatch):
    """Defect: torch 2.15 has six fields of a tensor's properties, and no release before it reads six."""
    dcp.save({"a": torch.arange(5.0)}, checkpoint_id=tmp_path / "there", no_dist=True)
    of_torch = metadata.TensorProperties.__getstate__
    monkeypatch.setattr(metadata.TensorProperties, "__getstate__", lambda self: (*of_torch(self)[:5], None))
    convert.export(opening.index_of(tmp_path / "there"), tmp_path / "dcp", "dcp")
    monkeypatch.undo()
    found = pickles.unpickle((tmp_path / "dcp" / ".metadata").read_bytes(), tmp_path)
    assert len(found.state_dict_metadata["a"].properties.state) == 5
    assert read_by_torch(tmp_path / "dcp", {"a": torch.zeros(5)})["a"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    six = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    monkeypatch.setattr(metadata.TensorProperties, "__getstate__", lambda self: (*of_torch(self)[:5], None))
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(six))
    assert opening.index_of(tmp_path / "dcp").tensors["a"].read().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
