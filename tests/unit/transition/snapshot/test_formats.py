"""Checkpoints of other formats: what is read of them, what is written, and what is refused."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.support import kept
from tests.support.kept import everything, training
from tests.support.texts import masked, raises_text
from unicron_transition.snapshot import foreign
from unicron_transition.snapshot.checkpoint import CheckpointError, Checkpoints
from unicron_transition.snapshot.formats import convert, format_table, opening, pickles, write_dcp
from unicron_transition.snapshot.formats.index import BadCheckpoint, Index
from unicron_transition.snapshot.formats.written import cast
from unicron_transition.snapshot.migrate import TrainingState

LIMIT = 120.0


def same(one: TrainingState, other: TrainingState) -> bool:
    return kept.same(everything(one), everything(other))


def same_model(one: TrainingState, other: TrainingState) -> bool:
    return kept.same(list(one.model_tensors()), list(other.model_tensors()))


@pytest.fixture
def saved(tmp_path):
    """(the state, the folder of its checkpoint)."""
    state = training(1)
    Checkpoints(tmp_path / "saves").save_last(state, 7)
    return state, tmp_path / "saves"


def torch_dist(folder: Path, out: Path) -> Path:
    """The checkpoint in a folder as `torch_dist`, whatever its names; returns that of the iteration."""
    index = opening.index_of(folder)
    at = out / f"iter_{index.iteration:07d}"
    at.mkdir(parents=True)
    write_dcp.write_torch_dist(at, index)
    (out / opening.TRACKER).write_text(str(index.iteration))
    return at


def exported(saves: Path, out: Path, form: str) -> Path:
    """The checkpoint in another format, under its own names."""
    if form == "torch_dist":
        torch_dist(saves, out)
    else:
        convert.export(opening.index_of(saves), out, form)
    return out


# ------------------------------------------------------------ there and back
@pytest.mark.parametrize("form", ["dcp", "torch_dist"])
def test_a_training_begins_from_what_another_has_exported_bit_for_bit(tmp_path, saved, form):
    state, saves = saved
    other = training(2)
    assert Checkpoints(tmp_path / "new", begin_from=exported(saves, tmp_path / "out", form)).load(other) == 7
    assert same(state, other)


def test_an_imported_checkpoint_is_one_of_unicrons_own(tmp_path, saved):
    state, saves = saved
    convert.export(opening.index_of(saves), tmp_path / "out", "dcp")
    convert.import_(opening.index_of(tmp_path / "out"), tmp_path / "back")
    other = training(2)
    assert Checkpoints(tmp_path / "back").load(other) == 7
    assert same(state, other)


def test_torch_loads_what_is_exported_and_unicron_reads_what_torch_saves(tmp_path, saved):
    _, saves = saved
    index = opening.index_of(saves)
    convert.export(index, tmp_path / "out", "dcp")
    wanted = {name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for name, t in index.tensors.items()}
    dcp.load(wanted, checkpoint_id=tmp_path / "out", no_dist=True)
    for name, tensor in index.tensors.items():
        assert np.array_equal(wanted[name].numpy(), tensor.read())
    made = {"a": torch.randn(3, 4).bfloat16(), "deep": {"b": torch.arange(5)}, "iteration": 9}
    dcp.save(made, checkpoint_id=tmp_path / "torchs", no_dist=True)
    found = opening.index_of(tmp_path / "torchs")
    assert (found.format, found.iteration, sorted(found.tensors)) == ("dcp", 9, ["a", "deep.b"])
    assert np.array_equal(found.tensors["a"].read().view(np.int16), made["a"].view(torch.int16).numpy())


def test_safetensors_has_the_models_names_and_their_library_reads_it(tmp_path, saved):
    state, saves = saved
    convert.export(opening.index_of(saves), tmp_path / "out", "safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in state.model[0].module.state_dict().items():
        assert torch.equal(found[name], tensor)
    other = training(2)
    assert Checkpoints(tmp_path / "new", begin_from=tmp_path / "out", begin_with="model").load(other) == 0
    assert same_model(state, other)


def test_a_plain_module_begins_under_names_of_a_table(tmp_path, saved, snapshot):
    """Defect: begin_names was left out without a word for a plain module."""
    state, saves = saved
    names = [tensor.name for tensor in opening.index_of(saves).parameters()]
    table = tmp_path / "theirs.toml"
    table.write_text("".join(f'"{name}" = "their.{name[::-1]}"\n' for name in names))
    convert.export(opening.index_of(saves), tmp_path / "theirs", "safetensors", str(table))
    assert set(load_file(tmp_path / "theirs" / "model.safetensors")) == {f"their.{name[::-1]}" for name in names}
    other = training(2)
    with pytest.raises(CheckpointError, match="is of another model"):
        Checkpoints(tmp_path / "new", begin_from=tmp_path / "theirs").load(other)
    begun = Checkpoints(tmp_path / "new", begin_from=tmp_path / "theirs", begin_names=str(table)).load(other)
    assert begun == 7 and same_model(state, other)
    table.write_text(f'"{names[0]}" = "their.{names[0][::-1]}"\n')
    with raises_text(CheckpointError, snapshot, tmp_path):
        Checkpoints(tmp_path / "new", begin_from=tmp_path / "theirs", begin_names=str(table)).load(other)


def test_a_table_of_names_that_would_not_be_used_is_refused(tmp_path, saved, snapshot):
    _, saves = saved
    with pytest.raises(ValueError, match="give begin_from, too"):
        Checkpoints(tmp_path / "new", begin_names="llama")
    with pytest.raises(CheckpointError, match="leave begin_names out"):
        Checkpoints(tmp_path / "new", begin_from=saves, begin_names="llama").load(training(2))
    convert.export(opening.index_of(saves), tmp_path / "out", "dcp")
    with pytest.raises(CheckpointError, match='give begin_with="model" with it'):
        Checkpoints(tmp_path / "new", begin_from=tmp_path / "out", begin_names="llama").load(training(2))
    checkpoints = Checkpoints(tmp_path / "new", begin_from=tmp_path / "out", begin_names="llama", begin_with="model")
    with raises_text(CheckpointError, snapshot, tmp_path):
        checkpoints.load(training(2))


def test_precisions_are_rounded_as_torch_does():
    values = torch.cat([torch.randn(5000) * 10.0**n for n in (-30, -3, 0, 3, 30)])
    values = torch.cat([values, torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3.4e38])])
    found = torch.from_numpy(cast(values.numpy(), "float32", "bfloat16")).view(torch.bfloat16)
    assert torch.equal(found.nan_to_num(7.0), values.bfloat16().nan_to_num(7.0))
    back = torch.from_numpy(cast(found.view(torch.uint16).numpy(), "bfloat16", "float32"))
    assert torch.equal(back.nan_to_num(7.0), values.bfloat16().float().nan_to_num(7.0))


# ------------------------------------------------------------ what is refused
class Hostile:
    def __reduce__(self):
        return os.system, ("touch hostile-was-here",)


@pytest.mark.parametrize("where", [".metadata", "common.pt", "a chunk"])
def test_a_hostile_pickle_is_refused_by_the_name_that_it_names(tmp_path, saved, where, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, saves = saved
    at = torch_dist(saves, tmp_path / "out")
    if where == ".metadata":
        (at / where).write_bytes(pickle.dumps(Hostile()))
    elif where == "common.pt":
        torch.save({"args": Hostile()}, at / where)
    else:
        torch.save(Hostile(), at / "__0_0.distcp")
        told = pickle.loads((at / ".metadata").read_bytes())
        for each in told.storage_data.values():
            each.offset, each.length = 0, (at / "__0_0.distcp").stat().st_size
        (at / ".metadata").write_bytes(pickle.dumps(told))
    _, wrong = opening.verify(tmp_path / "out")
    assert any("names posix.system" in line for line in wrong), wrong
    assert not (tmp_path / "hostile-was-here").exists()
    with pytest.raises(CheckpointError, match=r"names posix\.system"):
        Checkpoints(tmp_path / "new", begin_from=tmp_path / "out").load(training(2))


@pytest.mark.parametrize("name", ["builtins\neval", "builtins\n__import__", "subprocess\nPopen", "torch\nload"])
def test_no_other_name_is_looked_up(name):
    with pytest.raises(BadCheckpoint, match="which no checkpoint needs"):
        pickles.unpickle(f"c{name}\n(S'1'\ntR.".encode(), Path("x"))


@pytest.mark.parametrize("form", ["dcp", "torch_dist", "safetensors"])
def test_damage_is_found(tmp_path, saved, form):
    assert opening.verify(exported(saved[1], tmp_path / "out", form))[1] == []
    path = max((path for path in (tmp_path / "out").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[:-40])
    assert "cut off" in opening.verify(tmp_path / "out")[1][0]


def test_a_flipped_bit_is_found_where_there_is_a_checksum(tmp_path, saved, snapshot):
    _, saves = saved
    convert.export(opening.index_of(saves), tmp_path / "out", "dcp")
    index = opening.index_of(tmp_path / "out")
    raw = index.tensors["0.weight"].blocks[0].find()
    data = bytearray(raw.path.read_bytes())
    data[raw.offset + 5] ^= 4
    raw.path.write_bytes(data)
    assert [masked(line, tmp_path) for line in opening.verify(tmp_path / "out")[1]] == snapshot


def test_another_model_is_refused(tmp_path, saved, snapshot):
    _, saves = saved
    convert.export(opening.index_of(saves), tmp_path / "out", "safetensors")
    state = training(3)
    del state.model[0].module[1]
    with pytest.raises(CheckpointError, match="is of another model"):
        Checkpoints(tmp_path / "new", begin_from=tmp_path / "out", begin_with="model").load(state)
    with raises_text(CheckpointError, snapshot, tmp_path):
        Checkpoints(tmp_path / "new", begin_from=tmp_path / "nothing").load(state)


@pytest.mark.parametrize("root", ["", "app."])
@pytest.mark.parametrize("optim", ["optim", "optimizer"])
def test_an_optimizer_as_torch_saves_it_is_read(tmp_path, root, optim):
    """Defect: a training began with a new optimizer, and the log said that the checkpoint had none."""
    model = torch.nn.Linear(5, 8)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(torch.ones(2, 5)).sum().backward()
    adam.step()
    told = dict(zip(("model", optim), get_state_dict(model, adam), strict=True))
    dcp.save({root.rstrip("."): told} if root else told, checkpoint_id=tmp_path / "there")
    index = opening.index_of(tmp_path / "there")
    heads = ("", *(f"optimizer.state.{key}." for key in ("exp_avg", "exp_avg_sq", "step")))
    assert sorted(index.tensors) == sorted(f"{head}model.{name}" for head in heads for name in ("weight", "bias"))
    assert index.common.step == 1 and not index.common.unread
    assert np.array_equal(index.states("model.weight")["exp_avg"].read(), adam.state[model.weight]["exp_avg"].numpy())


def test_an_optimizer_with_other_names_is_refused(tmp_path, snapshot):
    there = {"model": {"weight": torch.ones(3)}, "optim": {"slots": {"a": torch.ones(3)}}}
    dcp.save(there, checkpoint_id=tmp_path / "there")
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        foreign.found_in(tmp_path / "there", foreign.Selection())
    assert foreign.found_in(tmp_path / "there", foreign.Selection(optimizer=False)) is not None


def test_the_newest_of_a_folder_is_the_newest_of_both_kinds(tmp_path, saved):
    _, folder = saved
    theirs = torch_dist(folder, tmp_path / "theirs")
    for iteration, format_ in ((8, "torch_dist"), (6, "unicron")):
        shutil.copytree(theirs, folder / f"iter_{iteration:07d}")
        (folder / opening.TRACKER).write_text(str(iteration))
        assert opening.index_of(folder).format == format_


@pytest.mark.parametrize("said", [b"\xff\xfe", "²".encode(), b"9" * 5000])
def test_a_tracker_without_a_number_is_refused_in_a_line(tmp_path, said):
    (tmp_path / opening.TRACKER).write_bytes(said)
    with pytest.raises(BadCheckpoint, match="is no iteration"):
        opening.index_of(tmp_path)


def test_a_half_written_checkpoint_of_megatrons_is_refused(tmp_path, saved):
    _, folder = saved
    theirs = torch_dist(folder, tmp_path / "theirs")
    common = theirs / "common.pt"
    whole = common.read_bytes()
    common.unlink()
    with pytest.raises(BadCheckpoint, match="half-written"):
        opening.index_of(tmp_path / "theirs")
    common.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) // 2))
    with pytest.raises(BadCheckpoint):
        opening.index_of(tmp_path / "theirs")


@pytest.fixture
def little_room():
    """No file grows over 256 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("form", ["torch_dist", "dcp", "safetensors", "import"])
@pytest.mark.parametrize("there", [False, True])
def test_nothing_is_left_of_what_finds_no_room(tmp_path, form, there, request, snapshot):
    """Defect: an import left its folder, and the error did not say which file found no room."""
    words = "embedding.word_embeddings.weight"
    (tmp_path / "in").mkdir()
    save_file({words: torch.ones(100, 1000)}, tmp_path / "in" / "model.safetensors")
    out = tmp_path / "deep" / "out"
    if there:
        out.mkdir(parents=True)
    request.getfixturevalue("little_room")
    index = opening.index_of(tmp_path / "in")
    with pytest.raises(BadCheckpoint) as refused:
        convert.import_(index, out, "megatron") if form == "import" else convert.export(index, out, form)
    assert masked(str(refused.value), tmp_path) == snapshot
    left = {path.name for path in tmp_path.rglob("*")}
    assert left == {"in", "model.safetensors", *(["deep", "out"] if there else [])}


def test_a_plain_module_is_not_written_for_megatron(tmp_path, saved, snapshot):
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        convert.export(opening.index_of(saved[1]), tmp_path / "out", "torch_dist")
    assert not (tmp_path / "out").exists()
    with pytest.raises(BadCheckpoint, match="leave --names out"):
        convert.export(opening.index_of(saved[1]), tmp_path / "out", "dcp", "llama")


MEASURED = """
import sys
from pathlib import Path
from unicron_transition.snapshot.formats import convert, opening
def most():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
index = opening.index_of(Path(sys.argv[1]))
if sys.argv[3] != "safetensors":
    import torch.distributed.checkpoint
before = most()
convert.export(index, Path(sys.argv[2]), sys.argv[3])
print(most() - before)
assert ("torch" in sys.modules) == (sys.argv[3] != "safetensors")
"""


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_an_export_takes_less_memory_than_two_of_its_largest_tensors(tmp_path, form):
    size = 5 << 20
    (tmp_path / "in").mkdir()
    save_file({f"{n}": torch.full((size,), float(n)) for n in range(8)}, tmp_path / "in" / "model.safetensors")
    words = [sys.executable, "-c", MEASURED, str(tmp_path / "in"), str(tmp_path / "out"), form]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=True)
    assert int(done.stdout) * 1024 < 2 * 4 * size, "all of them are eight"


def test_a_new_format_is_a_row_of_the_table(tmp_path, monkeypatch):
    def read(folder: Path) -> Index | None:
        return Index("toy", int((folder / "toy").read_text()), "", {}) if (folder / "toy").is_file() else None

    row = format_table.Format("toy", "toys", lambda folder, files, inner: "toy" in files, read)
    for iteration in (3, 12):
        (tmp_path / f"step-{iteration}").mkdir()
        (tmp_path / f"step-{iteration}" / "toy").write_text(str(iteration))
    assert opening.find(tmp_path / "step-12") is None and "step-12" not in opening.hint(tmp_path)
    monkeypatch.setattr(format_table, "FORMATS", (*format_table.FORMATS, row))
    assert opening.index_of(tmp_path / "step-12").iteration == 12
    assert "step-12" in opening.hint(tmp_path)
