"""The model of `tiny_gpt` with a distributed optimizer, trained over generations that the caller writes down; for the
sharded state's tests.

    sharded_gpt.py RANK FOLDER SETTINGS

SETTINGS is JSON: `phases`, a list of [ranks, iterations]; `tp`, `pp` and `virtual` (stages of a rank); `most` replicas;
`bf16`, `overlap`, `gather` (overlapped parameter gather), `tokens` (per-token loss), `undo` (each reduce is undone
once), `copies`, `piece` (bytes in a message), `spoil` (so many transfers of rank 0); `fresh`: plain Megatron, built
anew for each phase, with the state from the files of the phase before; `kills`: {"ranks", "iteration", "at"} for each
generation from the first on. Every rank writes what it holds after each phase, and after a recovery.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

SETTINGS = json.loads(sys.argv[3])
FLAGS = {"bf16": "BF16", "overlap": "OVERLAP", "gather": "GATHER", "tokens": "TOKENS"}
os.environ.update(
    {f"TINY_{name}": str(int(SETTINGS.get(key, False))) for key, name in FLAGS.items()},
    TINY_OUT=sys.argv[2],
    TINY_LAYOUT=" ".join(str(SETTINGS.get(name) or 1) for name in ("tp", "pp", "virtual")),
    TINY_DISTOPT="1",
    TINY_QUERY_NORMS="1",
    TINY_HIDDEN="32",
    TINY_SEQUENCE="16",
    TINY_RATE="3e-3",
)
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import finalize_model_grads  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.utils import get_model_config  # noqa: E402

from tests.support import tiny_gpt  # noqa: E402
from tests.support.sharded_states import merged  # noqa: E402
from tests.support.tiny_gpt import MASK, POSITIONS, SEQUENCE, SIZE  # noqa: E402
from unicron_detector.chaos.inject import injector  # noqa: E402
from unicron_transition.generations import groups, sharding, unblock  # noqa: E402
from unicron_transition.generations.layout import Layout  # noqa: E402
from unicron_transition.generations.meshes import Meshes  # noqa: E402
from unicron_transition.iteration.gradient_copies import Snapshots, Where  # noqa: E402
from unicron_transition.megatron.gradients import own_parts_only  # noqa: E402
from unicron_transition.seams import elastic_buckets, megatron_core, process_groups  # noqa: E402
from unicron_transition.seams.nccl import Aborter  # noqa: E402
from unicron_transition.sharded import shards  # noqa: E402
from unicron_transition.snapshot import tensor_transfer  # noqa: E402

MICRO_BATCHES = 12
LIMIT = 40.0  # seconds
SETTLE = 0.15  # seconds in which the others run into the collective that a rank dies before


class Training:
    """One rank."""

    def __init__(self, rank: int, folder: Path, settings: dict):
        self.rank, self.folder, self.settings = rank, folder, settings
        self.layout = Layout(tensor=settings.get("tp", 1), pipeline=settings.get("pp", 1))
        self.size, self.virtual = self.layout.size, settings.get("virtual")
        self.iteration, self.generation = 0, 0
        self.members: list[int] = []
        self.unblocker = unblock.Unblocker()
        self.slices = Snapshots(Where.CARD)
        self.kills: list[dict] = settings.get("kills", [])
        self.points: dict[str, int] = {}
        self.done: list[int] = []
        self.broken: RuntimeError | None = None

    # ------------------------------------------------------------ worlds
    def prepare(self) -> None:
        """The model is built in a world without peers."""
        os.environ["UNICRON_MAX_RANKS"] = str(self.settings["most"] * self.size)
        groups.init_without_peers(self.layout, self.rank)
        self.model_parallel()
        self.groups = groups.Groups(self.layout, self.unblocker, Aborter(), Meshes(self.layout, "cpu"))

    def model_parallel(self) -> None:
        parallel_state.initialize_model_parallel(self.layout.tensor, self.layout.pipeline, self.virtual)

    def world(self, members: list[int]) -> None:
        """The generation of `members`, replica by replica."""
        self.generation += 1
        self.points.clear()
        self.members = members
        store = dist.FileStore(str(self.folder / f"store.{self.generation}"), len(members))
        if self.settings.get("fresh"):
            place = self.rank % self.size
            rank = self.layout.megatron_rank(self.replica(), place, self.replicas())
            process_groups.init_world("gloo", store, rank, len(members), groups.ENTERING)
            parallel_state.destroy_model_parallel()
            self.model_parallel()
        else:
            with self.unblocker.building():
                self.groups.build("gloo", store, members, self.rank, lambda: False)

    def replica(self) -> int:
        return self.members.index(self.rank) // self.size

    def replicas(self) -> int:
        return len(self.members) // self.size

    # ------------------------------------------------------------ the model
    def build(self) -> None:
        self.model, self.optimizer = tiny_gpt.build()
        self.config = get_model_config(self.model[0])
        for group in self.bucket_groups():
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1.0
            self.wrap(group)

    def tie_embeddings(self) -> None:
        """What Megatron does while it builds: in a world without peers it could not."""
        if self.layout.pipeline > 1:
            weight = [p for chunk in self.model for p in chunk.parameters() if getattr(p, "shared_embedding", False)]
            dist.all_reduce(weight[0].data, group=parallel_state.get_embedding_group())
            self.optimizer.reload_model_params()

    def bucket_groups(self) -> list:
        return [group for chunk in self.model for group in chunk.bucket_groups]

    def buffers(self) -> list:
        return [buffer for chunk in self.model for buffer in chunk.buffers]

    def names(self) -> dict[torch.nn.Parameter, str]:
        return {p: f"{number}.{n}" for number, chunk in enumerate(self.model) for n, p in chunk.named_parameters()}

    def zero(self) -> None:
        for chunk in self.model:
            chunk.zero_grad_buffer()

    def wrap(self, group) -> None:
        reduce = group.start_grad_sync

        def start_grad_sync(*arguments, **keywords):
            if group.is_first_batch and group.grad_reduce_handle is not None:
                return
            for bucket in group.buckets:
                self.slices.copy_before_reduce(id(bucket), elastic_buckets.own_part(bucket, group))
            try:
                self.point("reduce")
                reduce(*arguments, **keywords)
            except RuntimeError as error:
                self.broken = error  # raising inside a backward hook would cut it short

        group.start_grad_sync = start_grad_sync
        self.before(group, "start_param_sync", "gather")

    def enter(self, members: list[int]) -> None:
        """The generation of `members`, with the objects that are there."""
        self.groups.tear_down()
        self.world(members)
        for group in self.bucket_groups():
            group.grad_reduce_handle = None
            group.is_last_microbatch, group.per_param_grad_ready_counts = True, {}
        self.shards.enter_generation(self.generation)

    # ------------------------------------------------------------ faults
    def before(self, owner, name: str, where: str) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments, **keywords):
            self.point(where)
            return original(*arguments, **keywords)

        setattr(owner, name, wrapped)

    def kill(self) -> dict:
        """Who dies in the present generation."""
        return self.kills[self.generation - 1] if 0 < self.generation <= len(self.kills) else {"ranks": []}

    def point(self, where: str) -> None:
        kill = self.kill()
        if self.rank not in kill["ranks"] or kill.get("iteration", self.iteration) != self.iteration:
            return
        count = self.points[where] = self.points.get(where, -1) + 1
        if kill["at"] == f"{where}:{count}":
            time.sleep(SETTLE)
            (self.folder / f"lost.{self.rank}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def over(self) -> bool:
        """The dead ranks of the present generation are known to be dead."""
        ranks = self.kill()["ranks"]
        return bool(ranks) and all((self.folder / f"lost.{rank}").exists() for rank in ranks)

    def watch(self) -> None:
        """Ends what the training thread waits for."""
        while True:
            time.sleep(0.005)
            generation = self.generation
            if self.over() and generation == self.generation:
                self.unblocker.unblock()

    # ------------------------------------------------------------ an iteration
    def mine(self) -> list[int]:
        return list(range(MICRO_BATCHES))[self.replica() :: self.replicas()]

    def compute(self, indices: list[int], again: bool = False) -> None:
        if not indices:
            if self.settings.get("gather"):
                elastic_buckets.gather_without_forward(self.model)
            return
        tokens = self.settings.get("tokens", False)
        weight = 1.0 if tokens else len(indices) / MICRO_BATCHES

        def forward_step(data, model):
            self.point("forward")
            ids = next(data)
            output = model(ids[:, :-1].contiguous(), POSITIONS, MASK, labels=ids[:, 1:].contiguous())

            def loss_function(values):
                if tokens:
                    return values.float().sum(), torch.tensor(values.numel(), dtype=torch.int), {}
                return values.float().mean() * weight, {}

            return output, loss_function

        self.config.finalize_model_grads_func = None
        whole = [chunk.no_sync for chunk in self.model]
        self.config.no_sync_func = None
        if self.settings.get("overlap") and not again:
            self.config.no_sync_func = whole if self.virtual else whole[0]
        with contextlib.ExitStack() as stack:
            for chunk in self.model if again else []:
                stack.enter_context(chunk.no_sync())
            data = [iter([tiny_gpt.data(self.iteration, index) for index in indices]) for _ in self.model]
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=data if self.virtual else data[0],
                model=self.model,
                num_microbatches=len(indices),
                seq_length=SEQUENCE,
                micro_batch_size=SIZE,
            )
        self.done += indices

    def reduce(self, explicit: bool = False) -> None:
        if explicit and self.settings.get("overlap"):
            for group in self.bucket_groups():
                if not group.is_first_batch and group.grad_reduce_handle is None:
                    group.start_grad_sync()
        if self.broken:
            raise self.broken
        tokens = None
        if self.settings.get("tokens"):
            tokens = torch.tensor(len(self.done) * SIZE * SEQUENCE, dtype=torch.int)
        with contextlib.nullcontext() if self.settings.get("fresh") else own_parts_only(self.model):
            finalize_model_grads(self.model, tokens)
        if self.broken:
            raise self.broken

    def iterate(self) -> None:
        self.zero()
        self.optimizer.zero_grad()
        self.slices.forget()
        self.done, self.broken = [], None
        self.compute(self.mine())
        if self.settings.get("undo"):
            self.undo_once()
        self.reduce()
        self.finish()

    def undo_once(self) -> None:
        before = [buffer.grad_data.clone() for buffer in self.buffers()]
        self.reduce()
        after = [buffer.grad_data.clone() for buffer in self.buffers()]
        self.slices.restore()
        for buffer, wanted, reduced in zip(self.buffers(), before, after, strict=True):
            assert not torch.equal(reduced, wanted)
            assert torch.equal(buffer.grad_data, wanted)

    def finish(self) -> None:
        self.commit("committed")
        self.optimizer.step()
        self.schedule(self.iteration + 1)
        if not self.settings.get("fresh"):
            self.save_copies(self.iteration + 1)
        self.iteration, self.done = self.iteration + 1, []
        if self.settings.get("record") and self.generation > len(self.kills):
            self.record(f"v{self.iteration}")

    def schedule(self, version: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate(version)

    def adopt(self, base: int, version: int) -> None:
        """Everything that belongs to the state comes with it."""
        assert self.shards.adopt(base, version) == str(version).encode()
        assert {group["lr"] for group in self.optimizer.param_groups} == {rate(version)}

    def save_copies(self, version: int) -> None:
        self.shards.export(version, extra=str(version).encode())
        self.send_copies(version)

    def send_copies(self, version: int) -> None:
        self.point("copy")
        self.shards.send_copies(
            version, sharding.partner_shifts([str(r) for r in range(self.replicas())], self.copies())
        )
        self.commit("ack")
        self.shards.confirm(version)
        kept = [room for found in self.shards._sets.values() for room in found.shards.values()]
        assert len(self.shards.held_shards()[-1][3]) == 1 + min(self.copies(), self.replicas() - 1)
        assert len(kept) + self.shards.pool.free <= 2 * (1 + self.copies())  # memory is used again

    def copies(self) -> int:
        return self.settings.get("copies", 1)

    def commit(self, what: str) -> None:
        self.point(what)
        dist.all_reduce(torch.zeros(1))

    # ------------------------------------------------------------ recovery
    def recover(self) -> None:
        """What the controller and the session do, in small: report, decide, enter, adopt, go on."""
        wait_for(*(self.folder / f"lost.{rank}" for rank in self.kill()["ranks"]))
        report = {"iteration": self.iteration, "done": self.done, "held": self.shards.held_shards()}
        with appears(self.folder / f"report.{self.generation}.{self.rank}") as part:
            part.write_text(json.dumps(report))
        members = [rank for rank in self.members if rank not in self.kill()["ranks"]]
        paths = [self.folder / f"report.{self.generation}.{rank}" for rank in members]
        wait_for(*paths)
        reports = [json.loads(path.read_text()) for path in paths]
        base, version = newest(reports)
        elastic_buckets.drain(self.model)
        self.slices.restore()
        self.enter(members)
        self.adopt(base, version)
        self.record("recovered", version)
        self.send_copies(version)
        if version > self.iteration:
            self.iteration, self.done = version, []
            return
        kept = {index for report in reports for index in report["done"]}
        left = [index for index in range(MICRO_BATCHES) if index not in kept]
        self.broken = None
        if not self.done:
            self.zero()
        self.compute(left[self.replica() :: self.replicas()], again=True)
        self.reduce(explicit=True)
        self.finish()

    # ------------------------------------------------------------ what it holds
    def record(self, name: str, version: int | None = None) -> None:
        if self.settings.get("gather"):
            for chunk in self.model:
                chunk.start_param_sync(force_sync=True)
        names = self.names()
        pieces = []
        for optimizer in elastic_buckets.distributed_optimizers(self.optimizer):
            for parameter in optimizer.model_param_gbuf_map:
                where = optimizer._get_model_param_range_map(parameter)["param"]
                tensors = optimizer._get_main_param_and_optimizer_states(parameter)
                kept = {key: tensors[key].detach().clone() for key in shards.STATES if key in tensors}
                pieces.append((names[parameter], where.start, where.end, kept, float(tensors.get("step", 0))))
        parameters = {name: p.detach().clone() for p, name in names.items()}
        place = self.rank % self.size
        with appears(self.folder / f"state.{name}.{self.rank}") as part:
            torch.save({"place": place, "pieces": pieces, "parameters": parameters, "version": version}, part)

    def take_up(self, phase: int, ranks: list[int]) -> None:
        """A freshly built optimizer gets the state of the files of a phase."""
        place = self.rank % self.size
        full, parameters, step = merged(self.folder, str(phase), ranks)[place]
        names = self.names()
        with torch.no_grad():
            for parameter, name in names.items():
                parameter.copy_(parameters[name])
            for optimizer in elastic_buckets.distributed_optimizers(self.optimizer):
                optimizer._init_optimizer_states_with_dummy_values()
                for parameter in optimizer.model_param_gbuf_map:
                    where = optimizer._get_model_param_range_map(parameter)["param"]
                    tensors = optimizer._get_main_param_and_optimizer_states(parameter)
                    for key in shards.STATES:
                        tensors[key].copy_(full[names[parameter]][key][where.start : where.end])
                    tensors["step"].fill_(step)

    # ------------------------------------------------------------ phases
    def run(self) -> None:
        fresh = self.settings.get("fresh", False)
        for _ in range(self.settings.get("spoil", 0) if self.rank == 0 else 0):
            injector.on_order({"fault": "corrupt-checkpoint"})
        tensor_transfer.PIECE = self.settings.get("piece", tensor_transfer.PIECE)
        if not fresh:
            elastic_buckets.prepare()
            self.prepare()
            self.build()
            self.groups.note_holders(megatron_core.group_holders(self.model, self.optimizer))
            self.shards = shards.Shards(self.model, self.optimizer, self.over)
            self.before(tensor_transfer, "send", "exchange")
            if self.kills:
                threading.Thread(target=self.watch, daemon=True).start()
        state: tuple[int, int] | None = None
        before: list[int] = []
        for number, (members, iterations) in enumerate(self.settings["phases"]):
            if self.rank not in members:
                self.generation += 1
            elif fresh:
                self.build_anew(members, number, before)
            else:
                self.enter(members)
                if state is None:
                    self.tie_embeddings()
                    self.save_copies(0)
                else:
                    self.adopt(*state)
                    self.iteration = state[1]
                    self.send_copies(self.iteration)
            if self.rank in members:
                self.train(iterations)
                self.record(str(number))
            state = (self.generation, sum(count for _, count in self.settings["phases"][: number + 1]))
            before = members
            self.wait_for(number, members)

    def build_anew(self, members: list[int], number: int, before: list[int]) -> None:
        process_groups.tear_down()
        self.world(members)
        self.build()
        if number:
            self.take_up(number - 1, before)
            self.iteration = sum(count for _, count in self.settings["phases"][:number])
            self.schedule(self.iteration)

    def train(self, iterations: int) -> None:
        end = self.iteration + iterations
        go_on = self.iterate
        while self.iteration < end:
            try:
                go_on()
                go_on = self.iterate
            except RuntimeError as error:
                if not self.kill()["ranks"]:
                    raise
                self.broken = error
                go_on = self.recover

    def wait_for(self, number: int, members: list[int]) -> None:
        dead = [rank for kill in self.kills for rank in kill["ranks"]]
        wait_for(*(self.folder / f"state.{number}.{rank}" for rank in members if rank not in dead))


@contextlib.contextmanager
def appears(path: Path):
    """A file that is there at once and whole."""
    part = path.with_name(f"{path.name}.part")
    yield part
    part.rename(path)


def wait_for(*paths: Path) -> None:
    """Until the files are there. Raises TimeoutError, so that a failed rank's peers end."""
    deadline = time.monotonic() + LIMIT
    while missing := [path.name for path in paths if not path.exists()]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {missing}")
        time.sleep(0.005)


def rate(version: int) -> float:
    """The learning rate of the step that follows a version."""
    return 3e-3 * 0.9**version


def newest(reports: list[dict]) -> tuple[int, int]:
    """The newest state of which a copy of every shard is left."""
    found: dict[tuple[int, int, int], set[int]] = {}
    for report in reports:
        for base, version, count, held in report["held"]:
            found.setdefault((base, version, count), set()).update(held)
    return max((base, version) for (base, version, count), held in found.items() if held == set(range(count)))


if __name__ == "__main__":
    Training(int(sys.argv[1]), Path(sys.argv[2]), SETTINGS).run()
