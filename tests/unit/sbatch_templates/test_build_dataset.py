"""The dataset builder: determinism, limits, bad input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sbatch_templates import build_dataset
from tests.support.processes import LIMIT

SCRIPT = Path(build_dataset.__file__)


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, content in (("b.py", b"bb\n"), ("a.py", "aé\n".encode()), ("c.txt", b"no"), ("empty.py", b"")):
        (folder / name).write_bytes(content)
    (folder / "deep").mkdir()
    (folder / "deep" / "d.py").write_bytes(b"d")
    return folder


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)


def test_the_order_of_creation_does_not_matter(texts, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for path in sorted((path for path in texts.iterdir() if path.is_file()), reverse=True):
        (other / path.name).write_bytes(path.read_bytes())
    for folder in (texts, other):
        files = build_dataset.find_files(folder, [".py", ".txt"], recursive=False)
        assert build_dataset.build(files, tmp_path / f"of-{folder.name}") == (3, 12)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"of-texts{suffix}").read_bytes() == (tmp_path / f"of-other{suffix}").read_bytes()


def test_limit_and_sub_folders(texts, tmp_path):
    files = build_dataset.find_files(texts, [".py"], recursive=True)
    assert [path.name for path in files] == ["a.py", "b.py", "d.py"]
    assert build_dataset.build(files, tmp_path / "data", limit_bytes=7) == (2, 9)
    with pytest.raises(build_dataset.InputError, match="raise the limit"):
        build_dataset.build(files, tmp_path / "none", limit_bytes=1)
    assert not list(tmp_path.glob("none*"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"--input": "absent"}, "is not a folder"),
        ({"--suffix": ".c"}, "no files ending in .c"),
        ({"--output": "texts/a.py/data"}, "cannot write"),
        ({"--limit-mb": "0"}, "must be above 0"),
    ],
)
def test_bad_input_is_one_clear_line(texts, tmp_path, change, says):
    options = {"--input": "texts", "--output": "data", **change}
    command = [sys.executable, str(SCRIPT), *(word for pair in options.items() for word in pair)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=tmp_path)
    assert result.returncode == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert not list(tmp_path.glob("data*"))


def test_a_failed_build_leaves_the_old_dataset(texts, tmp_path):
    output = tmp_path / "data"
    build_dataset.build(build_dataset.find_files(texts, [".py"], False), output)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("data*")}
    with pytest.raises(build_dataset.InputError, match="cannot read"):
        build_dataset.build([texts / "a.py", texts / "gone.py"], output)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("data*")} == before
