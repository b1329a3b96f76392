"""`unicronctl checkpoint`: what it prints and refuses. What it reads and writes: tests/unit/transition/snapshot."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import click.testing
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.support.fake_programs import program
from unicron_ctl.shared.protocol import client
from unicron_ctl.shared.system.errors import PROBLEM_FOUND, UserError
from unicron_ctl.tools.checkpoint import command
from unicron_transition.snapshot.checkpoint import Checkpoints
from unicron_transition.snapshot.formats import opening
from unicron_transition.snapshot.migrate import TrainingState

ALICE, BOB = 65533, 65534
EVERY = ["show", "verify", "export", "import"]


@pytest.fixture
def saved(tmp_path):
    """(the state, the folder of its checkpoint)."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.rand(6, 5)).square().sum().backward()
    optimizer.step()
    state = TrainingState([model], optimizer, None)
    Checkpoints(tmp_path / "saves").save_last(state, 7)
    return state, tmp_path / "saves"


def invoke(*words: object):
    return click.testing.CliRunner().invoke(command, [str(word) for word in words], standalone_mode=False)


def given(name: str, folder: Path, out: Path):
    """One of the commands, as it is given a folder."""
    words = {"export": [out, "--format", "safetensors"], "import": [out]}.get(name, [])
    return invoke(name, folder, *words)


def refusal(name: str, folder: Path, out: Path) -> str:
    """The line with which a command refuses a folder, of which nothing is written; empty where it does not."""
    done = given(name, folder, out)
    assert done.exception is None or isinstance(done.exception, UserError), done.exception
    said = str(done.exception) if done.exception else done.stderr if done.return_value else ""
    assert out.exists() == (name in ("export", "import") and not said) and "\n" not in said.strip()
    return said


def test_the_command_shows_converts_and_verifies(tmp_path, saved):
    _, saves = saved
    shown = json.loads(invoke("show", saves, "--json").output)
    assert (shown["format"], shown["iteration"]) == ("unicron", 7)
    assert {"name": "0.weight", "shape": [8, 5], "dtype": "float32"} in shown["tensors"]
    assert invoke("export", saves, tmp_path / "out", "--format", "dcp").exit_code == 0
    again = json.loads(invoke("show", tmp_path / "out", "--json").output)
    assert sorted(again["tensors"], key=str) == sorted(shown["tensors"], key=str)
    assert "all" in invoke("verify", tmp_path / "out").output
    assert invoke("import", tmp_path / "out", tmp_path / "back").exit_code == 0
    refused = invoke("export", saves, tmp_path / "out", "--format", "dcp")
    assert isinstance(refused.exception, UserError) and "is there already" in str(refused.exception)
    nothing = invoke("show", tmp_path / "nothing")
    assert isinstance(nothing.exception, UserError) and "no whole checkpoint" in str(nothing.exception)


@pytest.mark.parametrize("to", ["export", "import"])
@pytest.mark.parametrize("form", ["unicron", "dcp"])
def test_a_damaged_checkpoint_is_found_and_not_copied(tmp_path, saved, to, form):
    """Defect: the copy had checksums of the damaged bytes, and was whole."""
    _, folder = saved
    if form == "dcp":
        assert invoke("export", folder, tmp_path / "dcp", "--format", "dcp").exit_code == 0
        folder = tmp_path / "dcp"
    (data,) = [*folder.rglob("*.state"), *folder.rglob("*.distcp")] or [*folder.rglob("*")][-1:]
    whole = data.read_bytes()
    place = whole.find(bytes(opening.index_of(folder).tensors["0.weight"].read().tobytes())) + 5
    data.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    found = invoke("verify", folder)
    assert found.return_value == PROBLEM_FOUND and "checksum" in found.stderr and not found.stdout
    refused = invoke(to, folder, tmp_path / "copy")
    assert isinstance(refused.exception, UserError) and "checksum" in str(refused.exception)
    assert not (tmp_path / "copy").exists()


@pytest.fixture
def scancel(tmp_path, monkeypatch):
    """scancel(line): from now on it writes its words to a file, and does what the line says; that file is returned."""

    def made(line: str) -> Path:
        (tmp_path / "bin").mkdir()
        program(tmp_path / "bin" / "scancel", f'echo "$@" > {tmp_path}/words\n{line}')
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        return tmp_path / "words"

    return made


def test_a_running_job_is_asked_for_a_checkpoint_which_is_exported(tmp_path, saved, scancel):
    state, saves = saved
    Checkpoints(tmp_path / "later").save_last(state, 9)
    words = scancel(f"cp -r {tmp_path}/later/iteration-00000009 {saves}")
    done = invoke("export", "4711_2", tmp_path / "out", "--format", "dcp", "--from", saves, "--wait", 60)
    assert done.exit_code == 0 and "iteration 9" in done.output
    assert words.read_text().split() == ["--state=RUNNING", "--signal=USR2", "4711_2"]
    assert opening.index_of(tmp_path / "out").iteration == 9


def test_a_running_job_says_itself_where_it_saves(tmp_path, saved, scancel, monkeypatch):
    state, saves = saved
    asked = []
    told = iter(["", "/no/such", str(saves)])
    monkeypatch.setattr(
        client, "ask_controller", lambda question: asked.append(question) or {"checkpoints": next(told)}
    )
    Checkpoints(tmp_path / "later").save_last(state, 9)
    scancel(f"cp -r {tmp_path}/later/iteration-00000009 {saves}")
    for says in ("does not say where it saves", "there is no such folder here"):
        refused = invoke("export", "4711_2", tmp_path / "out")
        assert isinstance(refused.exception, UserError) and says in str(refused.exception)
        assert "--from" in str(refused.exception) and not (tmp_path / "words").exists()
    assert invoke("export", "4711_2", tmp_path / "out", "--wait", 60, "--format", "dcp").exit_code == 0
    assert asked[-1] == {"kind": "explain", "job": "4711"} and opening.index_of(tmp_path / "out").iteration == 9


@pytest.mark.parametrize("line", ["true", "echo Invalid job id >&2; exit 1"])
def test_a_job_that_writes_none_is_told_of_and_no_old_one_is_exported(tmp_path, saved, scancel, line, snapshot):
    scancel(line)
    refused = invoke("export", "4711", tmp_path / "out", "--from", saved[1], "--wait", 0.1)
    assert isinstance(refused.exception, UserError)
    assert str(refused.exception).replace(str(saved[1]), "FOLDER") == snapshot
    assert not (tmp_path / "out").exists()
    unnamed = invoke("export", "4711", tmp_path / "out")
    assert isinstance(unnamed.exception, UserError) and "with --from" in str(unnamed.exception)


@pytest.mark.parametrize("name", EVERY)
def test_a_tensor_that_is_a_hole_is_not_read(tmp_path, name, snapshot):
    size = 4 << 33
    head = json.dumps({"a": {"dtype": "F32", "shape": [1 << 33], "data_offsets": [0, size]}}).encode()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head)
    os.truncate(tmp_path / "in" / "model.safetensors", 8 + len(head) + size)
    assert refusal(name, tmp_path / "in", tmp_path / "out").replace(str(tmp_path), "FOLDER") == snapshot


@pytest.mark.parametrize("name", EVERY)
def test_a_file_that_cannot_be_read_is_named_in_a_line(tmp_path, name):
    (tmp_path / "in").mkdir()
    os.mkfifo(tmp_path / "in" / "model.safetensors")
    said = refusal(name, tmp_path / "in", tmp_path / "out")
    assert "model.safetensors" in said and "not a plain file" in said and "Errno" not in said


@pytest.mark.parametrize("name", ["show", "export", "import"])
def test_what_is_left_out_is_said_beside_what_is_asked_for(tmp_path, name, snapshot):
    """Defect: `import` lost it without a word."""
    told = {"model": {"weight": torch.ones(3)}, "rng": {"python": (1, 2)}, "loader": {"at": 5}, "step": 4}
    dcp.save(told, checkpoint_id=tmp_path / "in", no_dist=True)
    done = given(name, tmp_path / "in", tmp_path / "out")
    said = (done.stderr + done.stdout if name == "show" else done.stderr).replace(str(tmp_path), "FOLDER")
    assert (done.exit_code, said) == (0, snapshot) and "rng, loader" in said


def test_what_verify_doubts_is_said_and_is_no_damage(tmp_path, snapshot):
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    at = tmp_path / "model.safetensors.index.json"
    at.write_text(json.dumps({"weight_map": {name: "model-00001-of-00001.safetensors" for name in "ab"}}))
    done = invoke("verify", tmp_path)
    assert done.return_value == 0
    assert [text.replace(str(tmp_path), "FOLDER") for text in (done.stderr, done.stdout)] == snapshot


def test_what_is_no_number_is_a_problem_though_every_byte_is_whole(tmp_path, saved):
    """Defect: of a training whose loss was NaN, it said "all whole"."""
    state, _ = saved
    state.model[0][0].weight.data[0, 0] = torch.nan
    Checkpoints(tmp_path / "nan").save_last(state, 7)
    done = invoke("verify", tmp_path / "nan")
    assert done.return_value == PROBLEM_FOUND and not done.stdout
    assert done.stderr == "0.weight: 1 of 40 numbers is not finite (1 NaN)\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root reads for another user")
@pytest.mark.parametrize("name", EVERY)
def test_root_reads_what_is_the_users_own_and_nothing_else(tmp_path, name, snapshot):
    tmp_path.chmod(0o755)
    folder, out = tmp_path / "bob", tmp_path / "out"
    folder.mkdir()
    save_file({"w": torch.ones(4)}, folder / "model.safetensors")
    for path in (folder, folder / "model.safetensors"):
        os.chown(path, BOB, BOB)
    (tmp_path / "link").symlink_to(folder)
    os.chown(tmp_path / "link", ALICE, ALICE, follow_symlinks=False)
    assert not refusal(name, folder, out)
    said = [refusal(name, tmp_path / "link", tmp_path / "none")]
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/etc/hostname")
    said.append(refusal(name, folder, tmp_path / "none"))
    assert [text.replace(str(tmp_path), "FOLDER") for text in said] == snapshot


def test_a_name_is_escaped_whoever_has_given_it(tmp_path):
    evil = "x\x1b]0;owned\x07\x9b2J\u202e"
    said = refusal("verify", tmp_path / evil, tmp_path / "out")
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(said) and "\\x1b]0;owned" in said
