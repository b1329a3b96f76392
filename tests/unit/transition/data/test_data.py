"""Micro-batches by iteration and index, from any dataset and from shards."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import struct
import sys
import tarfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.texts import raises_text
from unicron.data import MDS, Fetch, Permutation, Tars, megatron


# ------------------------------------------------------------ order
@given(size=st.integers(1, 3000), key=st.integers(0, 2**62), epoch=st.integers(0, 5))
def test_each_sample_has_a_place_of_its_own(size, key, epoch):
    order = Permutation(size, key, epoch)
    assert sorted(map(order, range(size))) == list(range(size))


@given(size=st.integers(1, 2**50), data=st.data())
def test_no_table_is_needed_for_any_size(size, data):
    number = data.draw(st.integers(0, size - 1))
    assert 0 <= Permutation(size, 1)(number) < size


def test_orders_are_shuffled_and_differ():
    one, other, again = ([*map(Permutation(1000, *key), range(1000))] for key in ((7, 0), (7, 1), (7, 0)))
    assert one == again != other
    assert sum(place == number for number, place in enumerate(one)) < 10
    steps = [abs(a - b) for a, b in itertools.pairwise(one)]
    assert 250 < sum(steps) / len(steps) < 420, "a third of the size, in a random order"
    with pytest.raises(IndexError):
        Permutation(10, 1)(10)


@pytest.mark.parametrize("seed", [None, 5])
def test_each_epoch_has_each_sample_once(seed):
    fetch = Fetch(range(20), micro_batch_size=3, micro_batches=4, seed=seed)
    taken = [int(n) for iteration in range(5) for index in range(4) for n in fetch(iteration, index)]
    epochs = [taken[first : first + 20] for first in range(0, 60, 20)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert (epochs[0] == epochs[1]) == (seed is None)
    assert fetch(1, 2).tolist() == taken[18:21], "the same micro-batch whenever it is asked for"


def test_a_dataset_of_megatrons_is_taken_in_its_own_order_and_has_an_end(snapshot):
    fetch = megatron([{"tokens": torch.tensor([n])} for n in range(12)], micro_batch_size=2, micro_batches=3)
    assert fetch(1, 1)["tokens"].flatten().tolist() == [8, 9]
    with raises_text(IndexError, snapshot):
        fetch(2, 0)


def test_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match="micro_batch_size 0"):
        Fetch([1], micro_batch_size=0, micro_batches=1)
    with pytest.raises(ValueError, match="no samples"):
        Fetch([], micro_batch_size=1, micro_batches=1)
    with pytest.raises(IndexError, match="no micro-batch 4 of 4"):
        Fetch([1], micro_batch_size=1, micro_batches=4)(0, 4)


# ------------------------------------------------------------ tar files
def tar(path: Path, samples: dict[str, dict[str, bytes]]) -> None:
    with tarfile.open(path, "w") as file:
        for key, parts in samples.items():
            for name, data in parts.items():
                info = tarfile.TarInfo(f"{key}.{name}")
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))


@pytest.fixture
def tars(tmp_path):
    for shard in range(3):
        samples = {
            f"images/{shard}.dir/{number:03}": {"jpg": bytes([shard, number]) * 9, "Meta.json": b"{}", "cls": b"7"}
            for number in range(4)
        }
        tar(tmp_path / f"train-{shard}.tar", samples)
    return tmp_path


def test_a_sample_of_a_tar_file_is_what_shares_a_name(tars):
    found = Tars(tars / "train-*.tar")
    assert len(found) == 12
    assert found[6] == {"__key__": "images/1.dir/002", "jpg": bytes([1, 2]) * 9, "meta.json": b"{}", "cls": b"7"}
    decoded = Tars([tars / "train-2.tar"], decode=lambda sample: int(sample["cls"]))
    fetch = Fetch(decoded, micro_batch_size=2, micro_batches=1, seed=1)
    assert fetch(3, 0).tolist() == [7, 7]
    assert pickle.loads(pickle.dumps(found))[6] == found[6], "for workers"


def keys(samples: Tars) -> list[str]:
    return [samples[number]["__key__"] for number in range(len(samples))]


def test_the_index_is_made_once_and_anew_for_another_file(tars, monkeypatch):
    first = keys(Tars(tars / "*.tar"))
    with monkeypatch.context() as patch:
        patch.setattr(tarfile, "open", None)
        assert keys(Tars(tars / "*.tar")) == first
    tar(tars / "train-0.tar", {"other": {"txt": b"new"}})
    assert Tars(tars / "*.tar")[0] == {"__key__": "other", "txt": b"new"}
    (tars / "train-0.tar.unicron-index").write_bytes(b"half of it")
    assert len(Tars(tars / "*.tar", index=tars / "elsewhere")) == 9
    assert (tars / "elsewhere" / "train-1.tar.unicron-index").exists()


def test_files_of_metadata_are_no_samples(tmp_path):
    """WebDataset 1.0.2 reads this file in the same way."""
    files = {
        "__meta__/info": {"json": b"{}"},
        "a.b/0001": {"cls": b"1"},
        "__key__": {"txt": b"2"},
        "x/__meta__/0": {"txt": b"3"},
    }
    tar(tmp_path / "t.tar", files)
    assert keys(Tars(tmp_path / "t.tar")) == ["a.b/0001", "__key__", "x/__meta__/0"]


def test_tar_files_that_cannot_be_used_are_one_line(tars):
    with pytest.raises(ValueError, match="no tar files"):
        Tars(tars / "none-*.tar")
    with tarfile.open(tars / "packed.tar", "w:gz") as file:
        file.add(tars / "train-0.tar")
    with pytest.raises(ValueError, match=r"packed\.tar is .*: unpack"):
        Tars([tars / "packed.tar"])
    found = Tars(tars / "train-*.tar")
    with (tars / "train-0.tar").open("r+b") as file:
        file.truncate(600)
    with pytest.raises(OSError, match="it is not whole"):
        found[2]


# ------------------------------------------------------------ MDS
COLUMNS = {
    "tokens": ("ndarray:uint16", None),
    "label": ("int", 8),
    "text": ("str", None),
    "fixed": ("ndarray:float32:2,2", 16),
    "free": ("ndarray", None),
    "weight": ("float32", 4),
    "more": ("json", None),
}


def mds_sample(number: int) -> tuple[dict, bytes]:
    """Return (a sample, its bytes in a shard)."""
    tokens, fixed = np.arange(number + 1, dtype="uint16"), np.full((2, 2), number, "float32")
    free = np.arange(6, dtype="int64").reshape(2, 3) * number
    values = {"tokens": tokens, "label": -number, "text": "ä" * number, "fixed": fixed, "free": free}
    values |= {"weight": np.float32(number / 2), "more": {"n": number}}
    data = [
        bytes([1 << 2]) + bytes([number + 1]) + tokens.tobytes(),
        struct.pack("<q", -number),
        values["text"].encode(),
        fixed.tobytes(),
        bytes([65, 2 << 2, 2, 3]) + free.tobytes(),
        values["weight"].tobytes(),
        json.dumps(values["more"]).encode(),
    ]
    sizes = [len(part) for part, (_, size) in zip(data, COLUMNS.values(), strict=True) if size is None]
    return values, struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(data)


def mds(folder: Path, shards: list[range], pack=None, compression=None, encodings=None) -> None:
    entries = []
    columns = {name: encoding for name, (encoding, _) in COLUMNS.items()} | (encodings or {})
    for number, samples in enumerate(shards):
        written, config = [mds_sample(each)[1] for each in samples], b"{}" * 20
        begin = 4 * (len(written) + 2) + len(config)
        offsets = np.cumsum([begin, *map(len, written)], dtype="uint32")
        data = struct.pack("<I", len(written)) + offsets.tobytes() + config + b"".join(written)
        name, packed = f"shard.{number:05}.mds", pack(data) if pack else data
        (folder / (f"{name}.zstd" if pack else name)).write_bytes(packed)
        shard = {"format": "mds", "version": 2, "compression": compression, "hashes": [], "samples": len(written)}
        shard |= {"column_names": list(columns), "column_encodings": list(columns.values())}
        shard |= {"column_sizes": [size for _, size in COLUMNS.values()], "raw_data": {"basename": name}}
        entries.append(shard | {"zip_data": {"basename": f"{name}.zstd"} if pack else None})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))


def test_samples_of_mds_shards(tmp_path):
    mds(tmp_path, [range(0, 3), range(3, 4), range(4, 9)])
    found = MDS(tmp_path)
    assert len(found) == 9
    for number in (8, 0, 3, 5):
        wanted, got = mds_sample(number)[0], found[number]
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            assert np.array_equal(got[name], value), name
            assert getattr(got[name], "dtype", None) == getattr(value, "dtype", None)
    with pytest.raises(IndexError):
        found[9]
    labels = Fetch(MDS(tmp_path, decode=lambda each: each["label"]), micro_batch_size=3, micro_batches=3, seed=2)
    assert Counter(int(n) for index in range(3) for n in labels(0, index)) == Counter(range(-8, 1))


def test_compressed_shards_need_their_package(tmp_path, monkeypatch, snapshot):
    mds(tmp_path, [range(3)], pack=lambda data: data[::-1], compression="zstd:3")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with raises_text(ValueError, snapshot, tmp_path):
        MDS(tmp_path)

    decompressor = SimpleNamespace(stream_reader=lambda file: io.BytesIO(file.read()[::-1]))
    monkeypatch.setitem(sys.modules, "zstandard", SimpleNamespace(ZstdDecompressor=lambda: decompressor))
    assert MDS(tmp_path)[2]["text"] == "ää"
    mds(tmp_path, [range(3)], pack=bytes, compression="br")
    with raises_text(ValueError, snapshot, tmp_path):
        MDS(tmp_path)


def test_columns_that_are_not_read_are_named(tmp_path, snapshot):
    mds(tmp_path, [range(2)], encodings={"more": "pkl"})
    with raises_text(ValueError, snapshot, tmp_path):
        MDS(tmp_path)
    with raises_text(ValueError, snapshot, tmp_path):
        MDS(tmp_path / "none")
