"""What of torchtitan's configuration is refused, and its checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unicron_transition.seams.table import UnsupportedLayout
from unicron_transition.torchtitan import job_config


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that can be healed."""
    monkeypatch.setattr(job_config, "version", lambda _: job_config.RELEASES[0])
    one = {f"{name}_parallel_degree": 1 for name in ("tensor", "pipeline", "context", "expert")}
    return SimpleNamespace(
        training=SimpleNamespace(global_batch_size=8, local_batch_size=2, enable_cpu_offload=False),
        parallelism=SimpleNamespace(data_parallel_shard_degree=2, data_parallel_replicate_degree=1, **one),
        model=SimpleNamespace(converters=[]),
        optimizer=SimpleNamespace(early_step_in_backward=False),
        validation=SimpleNamespace(enable=False),
        fault_tolerance=SimpleNamespace(enable=False),
        job=SimpleNamespace(dump_folder=str(tmp_path)),
        checkpoint=SimpleNamespace(
            enable=True,
            folder="checkpoint",
            interval=50,
            keep_latest_k=3,
            initial_load_path=None,
            initial_load_model_only=True,
            initial_load_in_hf=False,
            create_seed_checkpoint=False,
            load_step=-1,
            exclude_from_loading=[],
            last_save_in_hf=False,
        ),
    )


REFUSED = {
    "training.global_batch_size": (-1, "give --training.global_batch_size"),
    "training.local_batch_size": (3, "a multiple of --training.local_batch_size"),
    "training.enable_cpu_offload": (True, "restart mode"),
    "parallelism.data_parallel_shard_degree": (-1, "give --parallelism.data_parallel_shard_degree"),
    "parallelism.data_parallel_replicate_degree": (2, "leave --parallelism.data_parallel_replicate_degree out"),
    "parallelism.tensor_parallel_degree": (2, "tensor parallelism: leave it out, or leave the session out"),
    "parallelism.expert_parallel_degree": (2, "expert parallelism"),
    "model.converters": (["float8"], "float8"),
    "optimizer.early_step_in_backward": (True, "early_step_in_backward"),
    "validation.enable": (True, "validation"),
    "fault_tolerance.enable": (True, "fault_tolerance"),
    "checkpoint.create_seed_checkpoint": (True, "seed checkpoint"),
    "checkpoint.load_step": (0, "load_step"),
    "checkpoint.exclude_from_loading": (["lr_scheduler"], "exclude_from_loading"),
    "checkpoint.last_save_in_hf": (True, "last_save_in_hf"),
}


def test_what_can_be_healed_is_not_refused(config: Any) -> None:
    job_config.check(config)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_is_refused_in_one_line(config: Any, name: str) -> None:
    (part, option), (value, words) = name.split("."), REFUSED[name]
    setattr(getattr(config, part), option, value)
    with pytest.raises(UnsupportedLayout, match=words) as found:
        job_config.check(config)
    assert "\n" not in str(found.value)


def test_another_release_is_refused(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_config, "version", lambda _: "0.3.0")
    with pytest.raises(UnsupportedLayout, match=r"torchtitan 0\.2\.2, not 0\.3\.0"):
        job_config.check(config)


def test_its_checkpoints_are_the_sessions(config: Any, tmp_path: Path) -> None:
    found = job_config.checkpoints(config)
    assert found is not None
    assert (found.folder, found.interval, found.keep) == (tmp_path / "checkpoint", 50, 3)
    config.checkpoint.enable = False
    assert job_config.checkpoints(config) is None


def test_torchtitans_own_checkpoints_are_not_overlooked(config: Any, tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / "step-100").mkdir(parents=True)
    with pytest.raises(UnsupportedLayout, match="initial_load_path"):
        job_config.checkpoints(config)


def test_experts_whose_biases_a_step_would_change_are_refused() -> None:
    """torchtitan does it in a hook of its container of optimizers, whose step a session does not call."""
    container = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    container.register_step_post_hook(lambda *_: None)  # torchtitan always has this one, for converters
    job_config.check_optimizers(container)
    container.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UnsupportedLayout, match="load_balance_coeff") as found:
        job_config.check_optimizers(container)
    assert "\n" not in str(found.value)
