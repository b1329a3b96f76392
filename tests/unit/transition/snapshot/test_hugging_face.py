"""Folders of Hugging Face's, and of others with safetensors: which of their files are the model. What transformers'
`from_pretrained` takes of each is in docs/behaviour/checkpoint-layouts.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.texts import masked, raises_text
from unicron_transition.snapshot.checkpoint import CheckpointError, Checkpoints
from unicron_transition.snapshot.formats import convert, opening
from unicron_transition.snapshot.formats.index import BadCheckpoint
from unicron_transition.snapshot.migrate import TrainingState

NAMES = ("head.weight", "layers.0.weight", "layers.1.weight")
MODEL, PICKLE = "model.safetensors", "pytorch_model.bin"
ADAPTER = "is an adapter, and no whole model: merge it"


def write(path: Path, value: float, names: tuple[str, ...] = NAMES, kind: torch.dtype = torch.float32) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.full((2, 2), value, dtype=kind) for name in names}, path, metadata={"format": "pt"})


def shards(folder: Path, value: float, variant: str = "") -> None:
    """A model in a file for each tensor, with their index."""
    files = [f"model{variant}-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for file, name in zip(files, NAMES, strict=True):
        write(folder / file, value, (name,))
    index = {"metadata": {"total_size": 48}, "weight_map": dict(zip(NAMES, files, strict=True))}
    (folder / f"model.safetensors.index{variant}.json").write_text(json.dumps(index))


def adapter(folder: Path, config: bool = True) -> None:
    write(folder / "adapter_model.safetensors", 9.0, ("base_model.model.layers.0.lora_A.weight",))
    if config:
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))


def pickle(folder: Path, value: float, names: tuple[str, ...] = NAMES) -> None:
    torch.save({name: torch.full((2, 2), value) for name in names}, folder / PICKLE)


def pickles(folder: Path, value: float) -> None:
    """A model in a pickle for each tensor, with their index."""
    files = [f"pytorch_model-0000{number}-of-00003.bin" for number in (1, 2, 3)]
    for file, name in zip(files, NAMES, strict=True):
        torch.save({name: torch.full((2, 2), value)}, folder / file)
    pickle_index(folder, dict(zip(NAMES, files, strict=True)))


def pickle_index(folder: Path, files: dict[str, str]) -> None:
    (folder / f"{PICKLE}.index.json").write_text(json.dumps({"metadata": {"total_size": 48}, "weight_map": files}))


def without(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink()


def stale_index(folder: Path) -> None:
    write(folder / MODEL, 1.0)
    shards(folder, 2.0)
    without(folder, *(path.name for path in folder.glob("model-*")))


def variants_alone(folder: Path) -> None:
    write(folder / "model.fp16.safetensors", 1.0)
    write(folder / "model.bf16.safetensors", 2.0)


def a_variant_in_shards_beside(folder: Path) -> None:
    write(folder / MODEL, 1.0)
    shards(folder, 2.0, ".fp16")


Made = Callable[[Path], object]
LIKE_TRANSFORMERS: dict[str, Made] = {
    "single and shards": lambda at: (write(at / MODEL, 1.0), shards(at, 2.0)),
    "stale index": stale_index,
    "shards alone": lambda at: shards(at, 1.0),
    "shards and another file": lambda at: (shards(at, 1.0), write(at / "model-extra.safetensors", 2.0)),
    "variant beside": lambda at: (write(at / MODEL, 1.0), write(at / "model.fp16.safetensors", 2.0, kind=torch.half)),
    "variant in shards beside": a_variant_in_shards_beside,
    "shards beside a variant in shards": lambda at: (shards(at, 1.0), shards(at, 2.0, ".bf16")),
    "consolidated beside": lambda at: (write(at / MODEL, 1.0), write(at / "consolidated.safetensors", 2.0)),
    "named by the config": lambda at: (
        write(at / "weights.safetensors", 1.0),
        write(at / MODEL, 2.0),
        (at / "config.json").write_text(json.dumps({"transformers_weights": "weights.safetensors"})),
    ),
    "adapter beside": lambda at: (write(at / MODEL, 1.0), adapter(at)),
    "adapter without a config beside": lambda at: (write(at / MODEL, 1.0), adapter(at, config=False)),
    "adapter beside shards": lambda at: (shards(at, 1.0), adapter(at)),
    "pickle alone": lambda at: pickle(at, 1.0),
    "pickles alone": lambda at: pickles(at, 1.0),
    "pickle and pickles": lambda at: (pickle(at, 1.0), pickles(at, 2.0)),
    "pickles beside": lambda at: (write(at / MODEL, 1.0), pickle(at, 2.0), pickles(at, 3.0)),
    "pickle beside shards": lambda at: (shards(at, 1.0), pickle(at, 2.0)),
    "pickle and another file": lambda at: (pickle(at, 1.0), write(at / "weights.safetensors", 2.0)),
    "pickle and an adapter": lambda at: (pickle(at, 1.0), adapter(at)),
    # transformers refuses this one and the next, because their names are unusual
    "another name": lambda at: write(at / "weights.safetensors", 1.0),
    "one variant alone": lambda at: write(at / "model.fp16.safetensors", 1.0),
}


@pytest.mark.parametrize("made", LIKE_TRANSFORMERS)
def test_the_weights_of_a_folder_are_those_that_transformers_takes(tmp_path, made):
    """Defect: weights of another file without a word, a mixture of both, or a folder that could not be read."""
    LIKE_TRANSFORMERS[made](tmp_path)
    index = opening.index_of(tmp_path)
    assert sorted(index.tensors) == sorted(NAMES)
    assert all((tensor.read() == 1.0).all() for tensor in index.tensors.values())
    with_adapter = (tmp_path / "adapter_config.json").exists()
    assert any("an adapter" in line for line in index.common.losses()) == with_adapter


class Own:
    """Of a class that nothing here knows."""


LAST = "model-00003-of-00003.safetensors"
LAST_PICKLE = "pytorch_model-00003-of-00003.bin"
REFUSED: dict[str, tuple[Made, str]] = {
    "pickle gone": (lambda at: (pickles(at, 1.0), without(at, LAST_PICKLE)), f"{LAST_PICKLE}: No such file"),
    "pickle and index gone": (
        lambda at: (pickles(at, 1.0), without(at, LAST_PICKLE, f"{PICKLE}.index.json")),
        "put pytorch_model.bin.index.json beside the parts",
    ),
    "name in two pickles": (
        lambda at: (pickles(at, 1.0), pickle(at, 1.0), (at / PICKLE).rename(at / LAST_PICKLE)),
        f"{LAST_PICKLE}: head.weight is in another file too",
    ),
    "pickles outside": (
        lambda at: pickle_index(at, {"w": f"../{PICKLE}"}),
        "pytorch_model.bin.index.json: names files outside of its folder",
    ),
    "many pickles": (
        lambda at: pickle_index(at, {f"w{number}": f"{number}.bin" for number in range(10_001)}),
        "pytorch_model.bin.index.json has more than 10000 files",
    ),
    "no pickles": (lambda at: pickle_index(at, {}), "has no whole checkpoint of a format that is known"),
    "legacy pickle": (
        lambda at: torch.save({"w": torch.ones(1)}, at / PICKLE, _use_new_zipfile_serialization=False),
        "pytorch_model.bin: not an archive of torch.save .* of a torch before 1.6",
    ),
    "pickle of an adapter": (lambda at: pickle(at, 1.0, ("a.lora_A.weight",)), ADAPTER),
    "pickle with a class": (
        lambda at: torch.save({"w": torch.ones(1), "own": Own()}, at / PICKLE),
        r"pytorch_model.bin: its pickle names .*Own, which no checkpoint needs: it is not read",
    ),
    "variants alone": (variants_alone, "has variants of a model .*: name the file that you mean"),
    "variant in shards alone": (lambda at: shards(at, 1.0, ".fp16"), "has variants of a model .*index.VARIANT.json"),
    "adapter alone": (adapter, ADAPTER),
    "adapter under another name": (lambda at: write(at / MODEL, 1.0, ("a.lora_A.weight", "a.lora_B.weight")), ADAPTER),
    "shard gone": (lambda at: (shards(at, 1.0), without(at, LAST)), f"{LAST}: No such file"),
    "shard and index gone": (
        lambda at: (shards(at, 1.0), without(at, LAST, f"{MODEL}.index.json")),
        f"{LAST} is missing",
    ),
}


@pytest.mark.parametrize("made", REFUSED)
def test_what_is_no_whole_model_is_refused_in_a_line(tmp_path, made):
    make, why = REFUSED[made]
    make(tmp_path)
    with pytest.raises(BadCheckpoint, match=why) as refused:
        opening.index_of(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_pickle_or_its_index_is_read_by_name_and_a_part_of_a_model_is_not(tmp_path, snapshot):
    pickles(tmp_path, 1.0)
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model.fp16.bin")
    index = opening.index_of(tmp_path / "pytorch_model.bin.index.json")
    assert (index.format, sorted(index.tensors), index.common.losses()) == ("torch", sorted(NAMES), [])
    assert list(opening.index_of(tmp_path / "pytorch_model.fp16.bin").tensors) == ["w"]
    assert opening.index_of(tmp_path).common.losses() == []
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        opening.index_of(tmp_path / "pytorch_model-00001-of-00003.bin")


def test_a_folder_of_pickles_is_found_below_and_says_what_its_config_says(tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    pickles(tmp_path / "checkpoint-5", 1.0)
    (tmp_path / "checkpoint-5" / "config.json").write_text(json.dumps({"num_attention_heads": 4, "vocab_size": 9}))
    assert opening.hint(tmp_path).endswith(f" show {tmp_path / 'checkpoint-5'}")
    facts = opening.index_of(tmp_path / "checkpoint-5").common.facts
    assert (facts.heads, facts.vocabulary) == (4, 9)


@pytest.mark.parametrize(
    ("index", "by_folder"),
    [(f"{MODEL}.index.json", True), (f"{MODEL}.index.fp16.json", False)]
    + [(f"{PICKLE}.index.json", by_folder) for by_folder in (True, False)],
)
def test_a_tensor_that_an_index_names_and_no_file_has_is_said(tmp_path, index, by_folder):
    """Defect: it was lost without a word, and `verify` found nothing. transformers loads the others, and says so."""
    pickles(tmp_path, 1.0) if PICKLE in index else shards(tmp_path, 1.0, ".fp16" if "fp16" in index else "")
    at = tmp_path / index
    place = tmp_path if by_folder else at
    assert opening.index_of(place).common.losses() == []
    told = json.loads(at.read_text())
    told["weight_map"]["mtp.weight"] = told["weight_map"]["head.weight"]
    at.write_text(json.dumps(told))
    found = opening.index_of(place)
    assert sorted(found.tensors) == sorted(NAMES)
    said = f"{at} names tensors that are in none of its files: mtp.weight"
    assert found.common.losses() == [said]
    read, wrong = opening.verify(place)
    assert read is not None and read.common.doubt == said and not wrong


def test_an_index_of_files_that_are_not_taken_counts_for_nothing(tmp_path):
    stale_index(tmp_path)
    assert opening.index_of(tmp_path).common.losses() == []


def test_a_variant_is_read_by_its_file_or_its_index(tmp_path):
    variants_alone(tmp_path / "files")
    found = opening.index_of(tmp_path / "files" / "model.bf16.safetensors")
    assert (found.tensors["head.weight"].read() == 2.0).all()
    a_variant_in_shards_beside(tmp_path / "shards")
    found = opening.index_of(tmp_path / "shards" / "model.safetensors.index.fp16.json")
    assert len(found.tensors) == 3 and (found.tensors["head.weight"].read() == 2.0).all()


# ------------------------------------------------------------ torch DCP's, by rank
WHOLE = {"weight": torch.arange(35.0).reshape(7, 5), "bias": torch.arange(7.0)}


def by_rank(folder: Path, cuts: list[int], kept: list[int]) -> Path:
    """As torch 2.13 to 2.15 write them (`HuggingFaceStorageWriter(save_distributed=True)`), of some ranks."""
    folder.mkdir()
    for rank in kept:
        rows = slice(cuts[rank], cuts[rank + 1])
        told = {"weight": {"saved_offsets": [cuts[rank], 0]}, "bias": {"saved_offsets": [cuts[rank]]}}
        about = {"DCP_SHARDING_INFO": json.dumps(told), "DCP_VERSION": "1.0", "format": "pt"}
        path = folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
        save_file({name: each[rows].clone() for name, each in WHOLE.items()}, path, about)
    return folder


@pytest.mark.parametrize("cuts", [[0, 4, 7], [0, 3, 6, 7], [0, 2, 4, 6, 7]])
def test_files_by_rank_are_one_model(tmp_path, cuts):
    folder = by_rank(tmp_path / "there", cuts, list(range(len(cuts) - 1)))
    index = opening.index_of(folder)
    assert index.layout == f"{len(cuts) - 1} ranks" and "whether there were more" in index.common.losses()[0]
    convert.export(index, tmp_path / "out", "safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], each) for name, each in WHOLE.items())
    read = {name: torch.zeros_like(each) for name, each in WHOLE.items()}
    dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert all(torch.equal(read[name], each) for name, each in WHOLE.items()), "torch reads the same"


@pytest.mark.parametrize("kept", [[0], [1], [1, 2], [0, 2]])
def test_some_of_the_ranks_files_are_refused(tmp_path, kept, snapshot):
    """Defect: one half alone was exported as a whole."""
    folder = by_rank(tmp_path / "there", [0, 3, 6, 7], kept)
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        opening.index_of(folder)
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        opening.index_of(next(folder.iterdir()))


# ------------------------------------------------------------ kinds of elements
def test_rare_kinds_go_through_safetensors(tmp_path):
    kinds = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2", "uint16", "uint32", "uint64")
    told = {kind: torch.arange(48, dtype=torch.uint8).reshape(2, 24).view(getattr(torch, kind)) for kind in kinds}
    (tmp_path / "there").mkdir()
    save_file(told, tmp_path / "there" / "model.safetensors")
    index = opening.index_of(tmp_path / "there")
    assert {tensor.name: tensor.shape for tensor in index.parameters()} == {k: tuple(t.shape) for k, t in told.items()}
    convert.export(index, tmp_path / "out", "safetensors")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as found:
        for kind, each in told.items():
            there = found.get_tensor(kind)
            assert (there.dtype, there.shape) == (each.dtype, each.shape)
            assert np.array_equal(there.view(torch.uint8).numpy(), each.view(torch.uint8).numpy())


# ------------------------------------------------------------ one level up
def test_a_folder_above_says_which_one_it_is(tmp_path, snapshot):
    write(tmp_path / "run" / "checkpoint-500" / MODEL, 1.0)
    shards(tmp_path / "run" / "checkpoint-1000", 1.0)
    (tmp_path / "run" / "runs").mkdir()
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        opening.index_of(tmp_path / "run")
    model = torch.nn.Linear(2, 2)
    state = TrainingState([model], torch.optim.SGD(model.parameters()), None)
    with raises_text(CheckpointError, snapshot, tmp_path):
        Checkpoints(tmp_path / "new", begin_from=tmp_path / "run").load(state)


def test_a_link_is_not_followed_for_a_hint(tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "elsewhere" / "step-100", no_dist=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-5").symlink_to(tmp_path / "elsewhere" / "step-100")
    with pytest.raises(BadCheckpoint, match=r"known \([^()]*\)$"):
        opening.index_of(tmp_path / "run")


def test_a_file_without_a_tensor_that_is_read_is_refused(tmp_path, snapshot):
    save_file({}, tmp_path / "model.safetensors")
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        opening.index_of(tmp_path)
    head = json.dumps({"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(3))
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        opening.index_of(tmp_path)


def test_the_hint_names_the_model_and_not_its_optimizer(tmp_path, snapshot):
    """As accelerate writes them with FSDP."""
    for name in ("optimizer_0", "pytorch_model_fsdp_0", "optimizer_1"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / name, no_dist=True)
    assert masked(opening.hint(tmp_path), tmp_path) == snapshot
