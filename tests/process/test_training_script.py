"""The training script as a user runs it, without an agent: bad input, and the same losses on any number of ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sbatch_templates import build_dataset, train_gpt
from sbatch_templates.training_metrics import read_metrics
from tests.support.processes import call, of_a_world, outside_slurm
from tests.support.warm import Script

SCRIPT = Path(train_gpt.__file__)
ITERATIONS = 8
SMALL = f"--num-layers 2 --hidden-size 64 --seq-length 64 --micro-batches 6 --train-iterations {ITERATIONS}".split()
SMALL += ["--micro-batch-seconds", "0.001"]  # what is not paced lets all others go first, and other tests run beside
# fp32: ranks add the same gradients in another order. Seen: 3e-8 in 12 iterations of the default model.
TOLERANCE = 1e-5

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Real text: this project's own Python files."""
    prefix = tmp_path_factory.mktemp("dataset") / "text"
    build_dataset.build(build_dataset.find_files(SCRIPT.parent, [".py"], recursive=False), prefix)
    return prefix


def train(ranks: int, *arguments: object) -> list[str]:
    """Run the script in `ranks` processes; returns the first one's log lines."""
    started = [Script(SCRIPT, *arguments, environment=each) for each in of_a_world(ranks)]
    ended = [script.wait(60) for script in started]
    assert [each.returncode for each in ended] == [0] * ranks, ended
    return (ended[0].stdout + ended[0].stderr).splitlines()


@pytest.fixture(scope="module")
def reference(dataset, tmp_path_factory):
    """In an interpreter of its own, as a user starts it; the other runs are forks (`tests.support.warm`)."""
    prefix = tmp_path_factory.mktemp("reference") / "metrics"
    done = call(sys.executable, SCRIPT, "--data-path", dataset, "--metrics", prefix, *SMALL)
    assert done.returncode == 0, done
    return done.stdout.splitlines(), read_metrics(prefix)  # torch may warn on the other one


def test_losses_fall_and_are_logged_as_megatron_does(reference):
    log, records = reference
    assert [each["iteration"] for each in records] == list(range(ITERATIONS))
    assert records[-1]["loss"] < records[0]["loss"] - 0.3
    assert 5.0 < records[0]["loss"] < 6.5  # ln 384 = 5.95: an untrained model knows nothing
    assert len(log) == ITERATIONS, log
    assert f"iteration {ITERATIONS:8d}/{ITERATIONS:8d} | consumed samples: {ITERATIONS * 12:12d} |" in log[-1]
    assert f"| lm loss: {records[-1]['loss']:.6E} | grad norm: {records[-1]['grad_norm']:.3f} |" in log[-1]


def test_the_learning_rate_warms_up_and_decays(reference):
    rates = [each["learning_rate"] for each in reference[1]]
    assert rates[:5] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3])
    assert rates[4] > rates[5] > rates[6] > rates[7] == pytest.approx(1e-4)


LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer".split()


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        pytest.param(2, [], marks=pytest.mark.long),
        pytest.param(3, ["--overlap-grad-reduce"], marks=pytest.mark.long),
        pytest.param(4, LAYOUT, marks=pytest.mark.wide),
    ],
)
def test_any_number_of_ranks_gives_the_same_losses(dataset, reference, tmp_path, ranks, more):
    log = train(ranks, "--data-path", dataset, "--metrics", tmp_path / "metrics", *SMALL, *more)
    assert len(log) == ITERATIONS, log
    assert len(list(tmp_path.glob("metrics.slot*"))) == ranks
    records = read_metrics(tmp_path / "metrics")
    assert {each["world_size"] for each in records} == {ranks}
    assert [each["loss"] for each in records] == pytest.approx([each["loss"] for each in reference[1]], rel=TOLERANCE)


def test_a_run_goes_on_from_its_newest_sound_checkpoint(dataset, reference, tmp_path):
    """Bit for bit, whichever it is: each holds all that the next iterations depend on."""
    saves = ["--save", tmp_path / "saves", "--save-interval", "3", "--save-keep", "3"]
    losses = [each["loss"] for each in reference[1]]

    def run(name):
        train(1, "--data-path", dataset, "--metrics", tmp_path / name, *SMALL, *saves)
        return {each["iteration"]: each["loss"] for each in read_metrics(tmp_path / name)}

    def folder(iteration):
        return tmp_path / "saves" / f"iteration-{iteration:08d}"

    assert list(run("first").values()) == losses
    assert sorted((tmp_path / "saves").iterdir()) == [folder(3), folder(6), folder(8)]
    shutil.rmtree(folder(8))
    assert run("second") == dict(enumerate(losses[6:], 6))
    shutil.rmtree(folder(8))
    (path,) = folder(6).iterdir()
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    assert run("third") == dict(enumerate(losses[3:], 3))


def test_checkpoints_that_cannot_be_used_are_one_clear_line(dataset, tmp_path):
    saves = tmp_path / "saves"
    two = ["--data-path", dataset, *SMALL, "--train-iterations", "2", "--warmup", "1", "--save", saves]
    train(1, *two)
    (tmp_path / "file").touch()
    changes = (
        (["--num-layers", "3"], "give the options that it was written with"),
        (["--save", tmp_path / "file" / "saves"], "the last checkpoint was not written"),
        ([], "can be read"),
    )
    for change, says in changes:
        if not change:
            (path,) = (saves / "iteration-00000002").iterdir()
            path.write_bytes(b"torn")
        result = Script(SCRIPT, *two, *change, environment=outside_slurm()).wait(60)
        assert result.returncode == 1 and says in result.stderr and "Traceback" not in result.stderr, result.stderr
        assert result.stderr.splitlines()[-1].startswith("train_gpt: ")


@pytest.mark.wide
def test_bf16_trains_and_a_run_can_be_repeated_bit_for_bit(dataset, tmp_path):
    runs = []
    for name in ("one", "two"):
        options = [*SMALL, "--train-iterations", "6", "--bf16", "--data-cache-path", tmp_path / "cache"]
        train(1, "--data-path", dataset, "--metrics", tmp_path / name, *options)
        runs.append([each["loss"] for each in read_metrics(tmp_path / name)])
    assert runs[0] == runs[1]
    assert runs[0][-1] < runs[0][0]


LIGHT = """import runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    assert not {"torch", "megatron"} & sys.modules.keys()
"""


def test_bad_input_is_one_clear_line_at_once(dataset):
    command = [
        sys.executable,
        "-c",
        LIGHT,
        str(SCRIPT),
        "--data-path",
        str(dataset),
        "--tensor-model-parallel-size",
        "3",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert result.returncode == 2
    assert "is not a multiple of --tensor-model-parallel-size 3" in result.stderr
    assert result.stderr.count("\n") == 1, result.stderr


def test_a_vocabulary_that_is_too_small_is_one_clear_line(dataset):
    options = ["--data-path", dataset, "--vocab-size=60", "--eod-token=0", *SMALL]
    result = Script(SCRIPT, *options, environment=outside_slurm()).wait(60)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("train_gpt: the dataset holds token ")
    assert "Traceback" not in result.stderr


def test_the_adapter_refuses_another_release_of_megatron(monkeypatch):
    from sbatch_templates import cpu_adapter

    monkeypatch.setattr(cpu_adapter.metadata, "version", lambda name: "0.99.0")
    with pytest.raises(RuntimeError, match=r"written for megatron-core 0\.16, .*, not 0\.99\.0"):
        cpu_adapter._check_release()


@pytest.mark.wide
def test_what_the_dataset_builder_writes_is_what_megatron_reads(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    texts, output = tmp_path / "texts", tmp_path / "new" / "data"
    texts.mkdir()
    for name, content in (("b.py", b"bb\n"), ("a.py", "aé\n".encode()), ("c.txt", b"no"), ("empty.py", b"")):
        (texts / name).write_bytes(content)
    done = call(
        sys.executable, build_dataset.__file__, "--input", texts, "--suffix", ".py", "--output", output, cwd=tmp_path
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "2 documents, 9 tokens" in done.stdout
    read = IndexedDataset(str(output))
    assert [list(document) for document in read] == [[*"aé\n".encode(), 256], [*b"bb\n", 256]]
    assert sorted(os.listdir(output.parent)) == ["data.bin", "data.idx"]
