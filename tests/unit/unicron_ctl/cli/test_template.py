"""`unicronctl template`: the files of the package, printed or copied."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from syrupy.assertion import SnapshotAssertion

from unicron_ctl.cli import templates
from unicron_ctl.shared.system.errors import UserError


def call(*words: str) -> str:
    done = CliRunner().invoke(templates.command, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_templates_are_listed_and_printed_as_they_are() -> None:
    assert [line.split()[:2] for line in call().splitlines()] == [
        ["rigid", "rigid.sbatch"],
        ["array", "array.sbatch"],
        ["conda", "conda.sbatch"],
        ["container", "container.sbatch"],
        ["lightning", "lightning.sbatch"],
        ["accelerate", "accelerate.sbatch"],
        ["plain", "array.sbatch"],
        ["gpt", "gpt_elastic.sbatch"],
        ["megatron", "megatron_lm.sbatch"],
    ]
    assert call("array") == (templates.FOLDER / "array.sbatch").read_text()


@pytest.mark.parametrize(("name", "script"), [("gpt", "train_gpt.py"), ("plain", "train_plain.py")])
def test_a_copy_has_all_that_it_needs_and_overwrites_nothing(
    tmp_path: Path, name: str, script: str, snapshot: SnapshotAssertion
) -> None:
    folder = tmp_path / "my" / "run"
    copied = call(name, "--copy", str(folder)).split()
    assert {Path(name).name for name in copied} == {path.name for path in folder.iterdir()}
    # The neighbours that the scripts import or start are there.
    names = {path.name for path in templates.FOLDER.iterdir() if path.suffix in (".py", ".sbatch")}
    text = "".join(path.read_text() for path in folder.iterdir())
    used = {name for name in names if name in text or f"import {Path(name).stem}" in text}
    assert used <= {path.name for path in folder.iterdir()}
    (folder / script).write_text("mine")
    with pytest.raises(UserError) as refused:
        call(name, "--copy", str(folder))
    assert str(refused.value).replace(str(folder), "FOLDER") == snapshot
    assert (folder / script).read_text() == "mine"


def test_an_unknown_name_is_wrong_use(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(UserError) as caught:
        call("gtp")
    assert (caught.value.exit_code, str(caught.value)) == (2, snapshot)
