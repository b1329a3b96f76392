"""Texts of scripts that a user may write: reading them takes time by their length, and no more files than a few. Most
of these took hours before, and the suite ends what hangs."""

from __future__ import annotations

import base64
import os
import random
from pathlib import Path

import pytest

from unicron_ctl.agent.launchers import readers, shells
from unicron_ctl.agent.start import agent_main, command_mode

LENGTH = 1 << 17  # bytes: what takes time by their square takes minutes
LONG = {
    "base64": base64.b64encode(random.Random(1).randbytes(3 * LENGTH // 4)).decode(),
    "hex": random.Random(1).randbytes(LENGTH // 2).hex(),
    "a path": "../a" * (LENGTH // 4),
    "blank lines": "\n" * LENGTH,
    "lines of blanks": " \n" * (LENGTH // 2),
    "blanks": " \t" * (LENGTH // 2),
    "settings": "A=1 " * (LENGTH // 4),
    "settings in one word": "A=!" * (LENGTH // 3),
    "wrappers": "env " * (LENGTH // 4),
    "commands of wrappers": "!env " * (LENGTH // 5),
    "execs": "exec x " * (LENGTH // 7),
    "paths of Python": "/python " * (LENGTH // 8),
    "Pythons": "python" * (LENGTH // 6),
    "digits": "/python" + "1." * (LENGTH // 2),
    "keywords": "then " * (LENGTH // 5),
    "modules": "-m " * (LENGTH // 3),
    "quotes": "\"'" * (LENGTH // 2),
    "imports": "import " + "a, " * (LENGTH // 3),
    "imports with names": "from unicron import " + "memory as a, " * (LENGTH // 13),
    "imports of torch": "from torch import a\n" * (LENGTH // 20),
    "signs": "${`(&|;<>" * (LENGTH // 9),
}


@pytest.mark.timeout(25)  # each takes a fraction of a second
@pytest.mark.parametrize("text", LONG.values(), ids=list(LONG))
def test_a_long_text_of_any_kind_is_read_once(tmp_path: Path, text: str) -> None:
    assert not shells.read_names(text).by_path
    command_mode.scripts_of(text, tmp_path)
    command_mode.is_python(["./solver"], text)
    agent_main.why_one_rank({}, True, text)
    readers.USES_MPI.search(text)
    for name in ("train.py", "run.sh"):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}")
    command_mode.choose_mode("auto", "", ["python", "train.py"], tmp_path, [])
    command_mode.only_helps(text)
    command = ["bash", str(tmp_path / "run.sh")]
    shells.launches(command)
    shells.kept_in_container(command)


STARTS = ("apptainer exec ", 'apptainer exec "', "docker run 'x' ", "apptainer exec a\n", "podman 'a\n' ")


@pytest.mark.timeout(25)
@pytest.mark.parametrize("start", STARTS)
def test_many_starts_of_containers_are_read_once(start: str) -> None:
    shells.kept_in_container(["bash", "-c", start * (LENGTH // len(start))])


def test_of_the_scripts_that_a_text_names_a_few_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(100):
        Path(f"{number}.py").write_text("#" * 200_000)
        Path(f"{number}.sh").write_text("#!/bin/sh\ntrue\n")
    opened = list[str]()
    really = os.open

    def count(path: str, *more: int, **options: int) -> int:
        opened.append(str(path))
        return really(path, *more, **options)

    monkeypatch.setattr(os, "open", count)
    text = " ".join(f"{number}.py gone{number}.py" for number in range(5000))
    assert (
        len(command_mode.scripts_of(text, tmp_path)) <= command_mode.MAX_BYTES
        and len(opened) <= command_mode.MOST_SCRIPTS
    )
    opened.clear()
    names = " ".join(f"{number % 100}.sh" for number in range(5000))
    assert not shells.kept_in_container(["bash", "-c", f"cd x; apptainer exec i.sif {names}"])
    assert len(opened) <= shells.MOST_SCRIPTS


def test_what_is_no_plain_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe would keep the agent waiting, or miss what was read of it: `bash /dev/stdin`."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "run.sh"):
        os.mkfifo(name)
    assert shells.shell_text(["bash", "run.sh"]) is None and not shells.launches(["bash", "run.sh"])
    assert not shells.kept_in_container(["apptainer", "exec", "i.sif", "bash", "run.sh"])
    assert command_mode.choose_mode("auto", "", ["python", "train.py"], tmp_path, []).name == "restart"
    assert command_mode.scripts_of("python train.py", tmp_path) == "python train.py"
    assert readers.read_launcher(["mpirun", "-n", "2", "python", "train.py"]) is not None


def test_a_name_that_is_too_long_for_a_file_is_none(tmp_path: Path) -> None:
    word = "a" * 5000 + ".py"
    assert command_mode.scripts_of(f"python {word}", tmp_path) == f"python {word}"
    assert command_mode.choose_mode("auto", "", ["python", word], tmp_path, []).name == "restart"


def test_many_words_of_a_command(tmp_path: Path) -> None:
    """As many as Linux lets a command have."""
    script = tmp_path / "run.sh"
    script.write_text('#!/bin/sh\nexec "$@"\n')
    assert not shells.launches(["bash", str(script), *["python"] * 200_000])
    assert shells.shell_text([*["nice"] * 200_000, "bash", str(script)]) is not None
    taken = readers.read_launcher(["mpirun", "-genv", "B", "2", *["-genv", "A", "1"] * 60_000, "train.py"])
    assert taken is not None and (taken.environment["A"], taken.environment["B"]) == ("1", "2")
