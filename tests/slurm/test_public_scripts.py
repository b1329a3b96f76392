"""Batch scripts as public projects have them (ours in wording), and the templates, under `sbatch --unicron`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.jobs import json_lines
from tests.support.plugin_site import Site
from tests.support.processes import ROOT, call, wait_for

SCRIPTS = ROOT / "tests" / "data" / "public_scripts"
# The ranks of the world that each forms, on two nodes; the words that its ranks get.
WORLDS = {
    "torchtitan": (4, ["--job.config_file", "llama.toml"]),
    "torchtitan_run_train": (4, ["--job.config_file", "llama.toml", "--training.steps", "10"]),
    "accelerate": (4, ["--lr", "1e-4"]),
    "bigscience": (4, ["--micro-batch-size", "1"]),
    "lightning": (4, ["--devices", "2", "--num_nodes", "2"]),
    "nemo_run": (4, ["-n", "pretrain"]),
    "megatron_lm": (4, ["--num-layers", "96", "--save", "checkpoints"]),
    "pytorch_tutorial": (2, ["50", "10"]),
    "one_task_a_rank": (4, ["--data", "imagenet"]),
}
# The templates: sbatch's options, which count more than the file's; the words behind it; the world's ranks.
SHAPE = ("-N2", "--gres=gpu:1")
TEMPLATES = {
    "rigid": (SHAPE, ("torchrun", "--nproc-per-node", "2", "train.py", "x"), 4),
    "conda": (SHAPE, ("python", "train.py", "x"), 2),
    "lightning": ((*SHAPE, "--ntasks-per-node=2"), ("train.py", "x"), 4),
    "accelerate": (SHAPE, ("train.py", "x"), 2),
    "array": (("--array=0-1", "-N1", "--gres=gpu:1", "--unicron-min-nodes=2"), ("python", "train.py", "x"), 2),
}
UNPROTECTED = {"nanogpt": (2, ["config/train_gpt2.py"])}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("public"), nodes=4)
    try:
        yield made
    finally:
        made.close()


class Submitted:
    """A job of one of the scripts, in a folder of its own, where the projects' files are."""

    def __init__(self, site: Site, name: str, options: Sequence[str] = (), *more: str) -> None:
        self._site = site
        self.folder = site.folder / f"{name}{len(more)}"
        shutil.copytree(SCRIPTS, self.folder)
        (self.folder / "titan").mkdir()
        shutil.copy(SCRIPTS / "train.py", self.folder / "titan" / "train.py")
        if more:
            shutil.copy(ROOT / "sbatch_templates" / f"{name}.sbatch", self.folder)
        words = ["sbatch", "--parsable", "--unicron", "--output=log", *options, f"{name}.sbatch", *more]
        done = call(*words, cwd=self.folder, environment=site.environment)
        assert done.returncode == 0, done.stderr
        self.number = done.stdout.strip()

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text() if (self.folder / "log").is_file() else ""

    def ranks(self) -> list[dict[str, Any]]:
        return json_lines(self.folder / "ranks.jsonl")

    def stop(self) -> None:
        (self.folder / "stop").touch()

        def over() -> bool:
            asked = ("squeue", "-h", "-j", self.number, "-o", "%T")
            done = call(*asked, cwd=self.folder, environment=self._site.environment)
            return done.stdout.strip() in ("", "COMPLETED")

        wait_for(over, lambda: f"{self.folder.name} ends\n{self.log}")


@pytest.mark.wide
@pytest.mark.parametrize("name", [*WORLDS, *UNPROTECTED])
def test_it_trains_as_one_world_or_says_that_it_is_not_protected(site: Site, name: str) -> None:
    size, words = (WORLDS | UNPROTECTED)[name]
    job = Submitted(site, name)
    found = wait_for(lambda: len(job.ranks()) >= size and job.ranks(), lambda: f"{name}\n{job.log}\n{site.logs()}")
    assert sorted(rank["RANK"] for rank in found) == [str(rank) for rank in range(size)], job.log
    assert {rank["WORLD_SIZE"] for rank in found} == {str(size)} and found[0]["words"] == words
    assert all(("UNICRON_GENERATION" in rank) is (name in WORLDS) for rank in found), job.log
    if name in WORLDS:
        assert site.job(job.number)["state"] == "running" and site.job(job.number)["mode"] == "restart"
    else:
        assert any(line.startswith("unicron:") for line in job.log.splitlines()), job.log
    if name == "accelerate":
        assert {rank["ACCELERATE_MIXED_PRECISION"] for rank in found} == {"bf16"}
    job.stop()
    if name in WORLDS:
        wait_for(lambda: site.job(job.number)["state"] == "ended", site.logs)
        assert site.job(job.number)["ended"]["code"] == 0, job.log
    assert len(job.ranks()) == size, "each rank has begun once"


@pytest.mark.wide
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_trains_as_one_world(site: Site, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: the templates' conda line stood behind `set -u`, with which conda's own scripts end."""
    options, words, size = TEMPLATES[name]
    conda = site.folder / "conda" / "etc" / "profile.d"
    conda.mkdir(parents=True, exist_ok=True)
    (conda / "conda.sh").write_text(
        'conda() { [ "$1" = activate ] && export CONDA_DEFAULT_ENV="$2$UNSET_VARIABLE"; }\n'
    )
    monkeypatch.setitem(site.environment, "CONDA_BASE", str(site.folder / "conda"))
    job = Submitted(site, name, options, *words)
    found = wait_for(lambda: len(job.ranks()) >= size and job.ranks(), lambda: f"{name}\n{job.log}\n{site.logs()}")
    assert sorted(rank["RANK"] for rank in found) == [str(rank) for rank in range(size)], job.log
    assert {rank["WORLD_SIZE"] for rank in found} == {str(size)} and found[0]["words"] == ["x"]
    assert all("UNICRON_GENERATION" in rank for rank in found), job.log
    job.stop()
    wait_for(lambda: site.job(job.number)["state"] == "ended", site.logs)
