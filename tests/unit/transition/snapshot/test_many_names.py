"""How many names a checkpoint may have, and how long they may be: what no model has is refused before it costs much."""

from __future__ import annotations

import gc
import json
import struct
import tomllib
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import torch.distributed.checkpoint as dcp_of_torch
from safetensors import safe_open
from safetensors.torch import save_file

from unicron_transition.snapshot import contents, reading
from unicron_transition.snapshot.checkpoint_file import folder_name, stem
from unicron_transition.snapshot.formats import convert, dcp, index, opening, safetensors
from unicron_transition.snapshot.formats.index import BadCheckpoint
from unicron_transition.snapshot.image_format import STATE, SUFFIX, BadImage, Key, digest, file_front, read_page

MOST = 10
MODELS = Path(__file__).parents[4] / "docs" / "behaviour" / "largest-models.toml"


@pytest.fixture
def few(monkeypatch):
    """A checkpoint may have so many tensors, and files."""
    for module in (reading, safetensors):
        monkeypatch.setattr(module, "MOST_NAMES", MOST)
    monkeypatch.setattr(safetensors, "MOST_FILES", MOST)


def header(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text.encode())) + text.encode())
    return path.parent


def empty(name: str) -> str:
    return f'{json.dumps(name)}:{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'


def named(path: Path, names: list[str], front: str = "") -> Path:
    return header(path, "{" + front + ",".join(map(empty, names)) + "}")


def refusal(folder: Path) -> str:
    with pytest.raises(BadCheckpoint) as caught:
        opening.index_of(folder)
    said = str(caught.value)
    assert 0 < len(said) < 600 and said.isprintable(), said
    return said


def numbered(count: int) -> list[str]:
    return [f"t{number}" for number in range(count)]


# ------------------------------------------------------------ the bound itself
def test_the_bounds_are_above_the_largest_models():
    models = tomllib.loads(MODELS.read_text())["model"]
    assert models
    for model in models:
        assert model["tensors"] * 1.4 < reading.MOST_NAMES, model
        assert model["files"] * 10 < reading.MOST_FILES, model


def test_as_many_tensors_as_the_largest_model_has_are_read(tmp_path):
    """And nothing for each of them is asked for again: blocks of one tensor are known to be a partition."""
    count = 60_000
    told, data = {}, bytes(4 * count)
    for number in range(count):
        name = f"model.layers.{number // 3}.mlp.experts.{number}.down_proj.weight_packed"
        told[name] = {"dtype": "I32", "shape": [1], "data_offsets": [4 * number, 4 * number + 4]}
    header(tmp_path / "model.safetensors", json.dumps(told))
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.write(data)
    found = opening.index_of(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert list(file.keys()) == sorted(found.tensors) and len(found.tensors) == count


# ------------------------------------------------------------ names in safetensors
def test_more_tensors_than_any_model_has_are_refused(tmp_path, few):
    assert len(opening.index_of(named(tmp_path / "most" / "model.safetensors", numbered(MOST))).tensors) == MOST
    assert "more than" in refusal(named(tmp_path / "more" / "model.safetensors", numbered(MOST + 1)))


def test_a_name_that_is_there_many_times_counts_each_time(tmp_path, few):
    assert "more than" in refusal(named(tmp_path / "model.safetensors", ["t"] * (MOST + 1)))


def test_the_tensors_of_all_files_are_counted(tmp_path, few):
    for number in (1, 2):
        names = [f"{number}.{name}" for name in numbered(6)]
        named(tmp_path / f"model-{number:05}-of-00002.safetensors", names)
    assert f"{tmp_path} has more than {MOST} tensors" in refusal(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":' + "[" * 300 + "]" * 300 + "}",
        '{"a":[' + "[]," * 300 + "0]}",
        '{"a":[' + "{}," * 300 + "0]}",
        '{"a":[' + "0," * 300 + "0]}",
        '{"a":{"dtype":"F32","shape":[' + "1," * 300 + '0],"data_offsets":[0,0]}}',
        '{"__metadata__":{' + ",".join(f'"{number}":"v"' for number in range(100)) + "}," + empty("t") + "}",
    ],
    ids=["deep", "lists", "objects", "numbers", "axes", "metadata"],
)
def test_a_header_with_more_values_than_names_need_is_not_parsed(tmp_path, few, text, monkeypatch):
    monkeypatch.setattr(reading.json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    assert "more than" in refusal(header(tmp_path / "model.safetensors", text))


def test_texts_beside_the_tensors_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "MOST_TEXTS", MOST)
    for count, refused in ((MOST, False), (2 * MOST, True)):
        save_file({"t": torch.ones(1)}, tmp_path / "model.safetensors", {str(number): "v" for number in range(count)})
        assert not refused or "more than" in refusal(tmp_path)
        assert refused or list(opening.index_of(tmp_path).tensors) == ["t"]


def test_more_text_than_names_need_is_not_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_TEXT", 400)
    assert len(opening.index_of(named(tmp_path / "ascii" / "model.safetensors", ["t" * 200])).tensors) == 1
    assert "text" in refusal(named(tmp_path / "long" / "model.safetensors", ["t" * 400]))
    text = '{"' + "é" * 100 + '":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    assert "text" in refusal(header(tmp_path / "wide" / "model.safetensors", text)), "each letter takes four bytes"


@pytest.mark.parametrize("name", ["n" * (index.MOST_LETTERS + 1), "two\nlines", "\x1b[2Jclears", "\x00"])
def test_a_name_that_fits_into_no_line_is_refused(tmp_path, name):
    assert "no name of" in refusal(named(tmp_path / "a" / "model.safetensors", [name]))
    (tmp_path / "b").mkdir()
    dcp_of_torch.save({name: torch.ones(1)}, checkpoint_id=str(tmp_path / "b"), no_dist=True)
    assert "no name of" in refusal(tmp_path / "b")


def test_names_of_other_alphabets_and_tensors_called_as_parts_of_a_header_are_read(tmp_path):
    names = ["слой.вес", "層", "data_offsets", "shape", "n" * index.MOST_LETTERS, 'quoted "name"', "a:b{c}[d],e"]
    save_file({name: torch.ones(1) for name in names}, tmp_path / "model.safetensors")
    assert sorted(opening.index_of(tmp_path).tensors) == sorted(names)


def test_places_of_many_tensors_are_not_too_many(tmp_path, few):
    told = {name: {"saved_offsets": [0]} for name in numbered(MOST)}
    front = f'"__metadata__":{{"DCP_SHARDING_INFO":{json.dumps(json.dumps(told))}}},'
    for number in (1, 2):
        named(tmp_path / f"shard-{number:05}-model-00001-of-00001.safetensors", numbered(MOST // 2), front)
    assert len(opening.index_of(tmp_path).tensors) == MOST // 2


# ------------------------------------------------------------ Hugging Face's index and configuration
def listed(folder: Path, files: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    told = {"metadata": {}, "weight_map": {f"t{number}": name for number, name in enumerate(files)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(told))
    return folder


def test_an_index_of_more_names_than_any_model_has_is_refused_before_a_file_is_looked_for(tmp_path, few):
    assert "more than" in refusal(listed(tmp_path, ["a.safetensors"] * (MOST + 1)))


def test_an_index_of_more_files_than_any_model_has_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "MOST_FILES", MOST)
    assert f"more than {MOST} files" in refusal(listed(tmp_path, [f"{n}.safetensors" for n in range(MOST + 1)]))
    assert "No such file" in refusal(listed(tmp_path, [f"{n}.safetensors" for n in range(MOST)]))


def test_a_folder_of_more_files_than_any_model_has_is_refused(tmp_path, few):
    for number in range(MOST + 1):
        named(tmp_path / f"{number}.safetensors", [])
    assert f"more than {MOST} files" in refusal(tmp_path)


def test_an_index_is_read_once(tmp_path, monkeypatch):
    """Defect: it was parsed twice, and a third time for the names that are in no file."""
    named(tmp_path / "a.safetensors", ["t0"])
    listed(tmp_path, ["a.safetensors"])
    read: list[Path] = []
    real = safetensors.read_small
    monkeypatch.setattr(safetensors, "read_small", lambda path: read.append(path) or real(path))
    assert list(opening.index_of(tmp_path).tensors) == ["t0"] and len(read) == 1


@pytest.mark.parametrize("text", ['{"a":[' + "{}," * 100 + "0]}", "[" * 100])
def test_a_configuration_that_describes_too_much_is_refused(tmp_path, few, text):
    named(tmp_path / "model.safetensors", ["t"])
    (tmp_path / "config.json").write_text(text)
    assert "more than" in refusal(tmp_path)


# ------------------------------------------------------------ torch's metadata
def metadata(folder: Path, spare: int) -> Path:
    """Some of torch's, with the data that are there less so many bytes."""
    content: dict[str, Any] = {f"layers.{number}.weight": torch.tensor(1.0) for number in range(200)}
    content |= {f"objects.{number}": number for number in range(200)}
    dcp_of_torch.save(content, checkpoint_id=str(folder), no_dist=True)
    data = folder / "__0_0.distcp"
    if spare:
        with data.open("wb") as file:
            file.truncate(data.stat().st_size + spare)
    return folder


def test_metadata_larger_than_all_that_they_describe_are_not_read(tmp_path, monkeypatch):
    """Each MB of them takes a second. What torch writes is smaller than the smallest tensors."""
    monkeypatch.setattr(dcp, "FREE", 0)
    assert len(opening.index_of(metadata(tmp_path / "whole", 0)).tensors) == 200
    folder = metadata(tmp_path / "hole", 1 << 30)
    monkeypatch.setattr(dcp, "unpickle", lambda *_: pytest.fail("they were read"))
    assert "larger than all" in refusal(folder)
    (folder / "__0_0.distcp").unlink()
    assert "larger than all" in refusal(folder)


# ------------------------------------------------------------ Unicron's own
def image(folder: Path, about: bytes) -> Path:
    """One of Unicron's own without data, of which its head says this."""
    key = Key(STATE, 0, 0, mark="00000000")
    told = {"iteration": 0, "layout": "", "groups": [], "scheduler": None, "scales": [], "seed": 0, "loss": None}
    head = msgpack.packb({**told, "step": 0.0, "untrained": "", "about": about, "facts": {}})
    at = folder / folder_name(0)
    at.mkdir(parents=True)
    (at / f"{stem(key)}{SUFFIX}").write_bytes(file_front(key, head, 0, digest(b"")))
    return folder


@pytest.mark.parametrize("empty", [b"\x90", b"\x80"], ids=["lists", "maps"])
def test_a_head_of_ours_that_describes_far_more_than_itself_is_refused(tmp_path, empty):
    count = 10 * reading.LEAST_LISTS
    folder = image(tmp_path, b"\xdd" + count.to_bytes(4, "big") + empty * count)
    assert "far more than itself" in refusal(folder)
    with pytest.raises(BadImage, match="far more than itself"):
        contents.open_image(read_page(next(folder.glob(f"*/*{SUFFIX}"))))


def test_the_smallest_tensors_that_ranks_write_are_not_far_more(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LEAST_LISTS", 0)
    save_file({str(number): torch.tensor(1.0) for number in range(300)}, tmp_path / "model.safetensors")
    convert.import_(opening.index_of(tmp_path), tmp_path / "own")
    assert len(opening.index_of(tmp_path / "own").tensors) == 300


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_of_garbage_is_left_as_it_was(tmp_path, enabled):
    named(tmp_path / "a" / "model.safetensors", ["t"])
    (gc.enable if enabled else gc.disable)()
    try:
        opening.index_of(tmp_path / "a")
        assert gc.isenabled() == enabled
        refusal(tmp_path / "none")
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
