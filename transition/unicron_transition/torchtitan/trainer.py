"""torchtitan's trainer with a session in place of its loop."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims
from torchtitan.tools.profiling import maybe_enable_memory_snapshot, maybe_enable_profiling
from torchtitan.train import Trainer

from unicron_transition.generations.layout import Layout
from unicron_transition.iteration import rank_process
from unicron_transition.iteration.ledger import StepResult
from unicron_transition.session.session import Session
from unicron_transition.torchtitan import job_config
from unicron_transition.torchtitan.streams import Streams


class HealedTrainer(Trainer):  # type: ignore[misc]  # torchtitan has no types
    """The trainer. Up to the loop it is torchtitan's own, in the meshes of one replica."""

    def __init__(self, config: Any):
        job_config.check(config)
        self._checkpoints = job_config.checkpoints(config)
        config.checkpoint.enable = False  # the session's take their place
        config.training.dataloader.num_workers = 0  # micro-batches are read as they are computed
        super().__init__(config)

    def init_distributed(self) -> ParallelDims:
        """Begin in a world without peers, in which this rank's part of the model is built."""
        shard = self.job_config.parallelism.data_parallel_shard_degree
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        rank_process.init_process_group(backend, Layout(shard=shard))
        return ReplicaDims(1, shard, 1, 1, 1, 1, 1, world_size=shard)

    def train(self) -> None:
        """Train: each step is an iteration of a session."""
        config, processor = self.job_config, self.metrics_processor
        processor.logger = _OfFirstRank(processor.logger)
        session = self._session()
        signal.signal(signal.SIGUSR1, lambda *_: session.request_stop())
        at = {"global_step": session.join(), "base_folder": config.job.dump_folder}
        profiler, memory = (
            each(config.profiling, **at) for each in (maybe_enable_profiling, maybe_enable_memory_snapshot)
        )
        with profiler as times, memory as snapshots:
            for result in session:
                self.step = result.iteration + 1
                self._log(result)
                self.gc_handler.run(self.step)
                for each in (times, snapshots):
                    if each:
                        each.step()

    def _session(self) -> Session:
        config = self.job_config
        training = config.training
        job_config.check_optimizers(self.optimizers)
        self._micro_batches = training.global_batch_size // training.local_batch_size
        return Session(
            model=self.model_parts[0],
            optimizer=self.optimizers.optimizers[0],
            scheduler=self.lr_schedulers.schedulers[0],
            micro_batches=self._micro_batches,
            forward_step=self._forward_step,
            fetch=Streams(self._loader, self._notes()),
            seq_length=training.seq_len,
            micro_batch_size=training.local_batch_size,
            train_iterations=training.steps,
            checkpoints=self._checkpoints,
            seed=config.debug.seed,
            clip_grad=training.max_norm,
        )

    # ------------------------------------------------------------ data
    def _loader(self, index: int) -> Any:
        return self.train_spec.build_dataloader_fn(
            dp_world_size=self._micro_batches, dp_rank=index, tokenizer=self.tokenizer, job_config=self.job_config
        )

    def _notes(self) -> Path:
        """Return the folder for the positions of these data; with others they mean something else."""
        training, model = self.job_config.training, self.job_config.model
        data = (training.dataset, training.dataset_path, model.hf_assets_path, training.seq_len)
        text = repr((*data, training.local_batch_size, self._micro_batches))
        name = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        return Path(self.job_config.job.dump_folder) / "data" / name

    def _forward_step(self, batch: Any, model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        begun = time.perf_counter()
        named, labels = batch
        moved = {name: each.to(self.device) for name, each in named.items()}
        inputs, labels, more, keywords = self.post_dataloading_process(moved, labels.to(self.device))
        self.metrics_processor.ntokens_since_last_log += labels.numel()
        self.metrics_processor.data_loading_times.append(time.perf_counter() - begun)
        with self.train_context(), self.maybe_enable_amp:
            losses = self.loss_fn(model(inputs, **more, **keywords), labels)
        return losses, (labels != IGNORE_INDEX).sum()

    # ------------------------------------------------------------ the log
    def _log(self, result: StepResult) -> None:
        training, processor = self.job_config.training, self.metrics_processor
        self.ntokens_seen = self.step * training.global_batch_size * training.seq_len
        if not processor.should_log(self.step):
            return
        processor.data_loading_times.append(0.0)  # it divides by their number, and some rank may have read nothing
        schedule = self.lr_schedulers.schedulers[0]
        rate = schedule.base_lrs[0] * schedule.lr_lambdas[0](result.iteration)
        processor.log(
            self.step,
            result.loss,
            math.nan,  # the largest loss of a rank depends on who computed what
            math.nan if result.grad_norm is None else result.grad_norm,
            extra_metrics={"n_tokens_seen": self.ntokens_seen, "lr": rate},
        )


class ReplicaDims(ParallelDims):  # type: ignore[misc]  # torchtitan has no types
    """The meshes of one replica: that over which parameters are sharded."""

    def build_mesh(self) -> Any:
        self._world_mesh = rank_process.shard_mesh()
        self._meshes = dict.fromkeys(("fsdp", "batch", "loss"), self._world_mesh)
        return self._world_mesh

    def get_optional_mesh(self, dims: str | list[str]) -> Any:
        if not self._meshes:
            self.build_mesh()
        names = [dims] if isinstance(dims, str) else dims
        return self._meshes.get(names[0]) if len(names) == 1 and self.dp_shard > 1 else None


class _OfFirstRank:
    """torchtitan's TensorBoard and W&B, written by the first rank of the present world alone."""

    def __init__(self, logger: Any):
        self._logger = logger

    def log(self, metrics: dict[str, Any], step: int) -> None:
        if dist.get_rank() == 0:
            self._logger.log(metrics, step)

    def close(self) -> None:
        self._logger.close()


def prepare_environment() -> None:
    """Set what torchtitan reads, for a single plain process, which needs no launcher."""
    os.environ.setdefault("LOCAL_RANK", "0")
