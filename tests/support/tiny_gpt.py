"""A small GPT under a Session, with faults at exact points: what the rank tests run as a training script.

Environment: TINY_OUT a folder; TINY_FAULT a JSON list of {"slot", "incarnation", "iteration", "at", "count", "kind",
"delay"}; TINY_LAYOUT "TP PP VPP", by default 1 each; TINY_DISTOPT=1 for the distributed optimizer, TINY_GATHER=1 for
its gathers overlapped; TINY_SILENT=1: collectives of a broken generation return garbage; TINY_BF16=1; TINY_TOKENS=1
for a loss per token; TINY_DROPOUT; TINY_LAYERS; TINY_OVERLAP=1 for overlapped reduces of many buckets; TINY_SLOW
seconds per micro-batch; TINY_SAVE iterations whose gradients and parameters are saved; TINY_CHECKPOINTS a folder,
TINY_CHECKPOINT_EVERY so many iterations (2).

`at`, always before the count-th time in the iteration: "fetch" a micro-batch; "backward" of one; "reduce" an all-
reduce (the ledger's, one per bucket, the commit); "reduced" the same, after it; "step" the optimizer; "outside"
between it and the next iteration; "enter" a generation's groups are built; "world" its world is there, the other
groups are not; "entered" the groups are there; "transfer" of the state to newcomers; "save" a checkpoint's file is
written; "import". With `recovery` n in place of `count`: the first time after n recoveries. `iteration` "any" is any
but the time before the first. With `file` only once that file is in TINY_OUT.

`kind`: "kill"; "late" (killed `delay` seconds later, whatever it does then); "hang" (SIGSTOP); "sleep" (`delay`
seconds); "gloo" (the peers' connections break, nobody dies); "error" (they break, and the operation at hand fails
here); "raise" (a fault of the script); "loss" (for `delay` seconds nothing arrives here that peers
send); "lost" (wait until the generation is over, then fail); "stop" (ask for the end); "wait" for gate number `gate`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
from transition import layout

os.environ.setdefault("OMP_NUM_THREADS", "1")

OUT = Path(os.environ["TINY_OUT"])
SLOT = int(os.environ.get("UNICRON_SLOT", "0"))
INCARNATION = int(os.environ.get("UNICRON_INCARNATION", "0"))
WANTED = json.loads(os.environ.get("TINY_FAULT", "[]"))
FAULTS = [f for f in WANTED if f["slot"] == SLOT and f.get("incarnation", 0) == INCARNATION]
ITERATIONS = int(os.environ.get("TINY_ITERATIONS", "5"))
MICRO_BATCHES = int(os.environ.get("TINY_MICRO_BATCHES", "8"))
CHECKPOINTS, EVERY = os.environ.get("TINY_CHECKPOINTS", ""), int(os.environ.get("TINY_CHECKPOINT_EVERY", "2"))
SAVE = int(os.environ.get("TINY_SAVE", "8"))
SESSIONS: list = []
SLOW = float(os.environ.get("TINY_SLOW", "0"))
SEQUENCE, VOCABULARY, SIZE = 32, 128, 2
TENSOR, PIPELINE, VIRTUAL = map(int, os.environ.get("TINY_LAYOUT", "1 1 1").split())
if "UNICRON_LAYOUT" in os.environ:  # the job has stated several
    TOLD, VIRTUAL = layout.stated(os.environ["UNICRON_LAYOUT"])
    TENSOR, PIPELINE = TOLD.tensor, TOLD.pipeline
DROPOUT = float(os.environ.get("TINY_DROPOUT", "0"))
TOKENS, BF16, DISTOPT = (os.environ.get(f"TINY_{name}") == "1" for name in ("TOKENS", "BF16", "DISTOPT"))
LAYERS = int(os.environ.get("TINY_LAYERS", str(max(2, PIPELINE * VIRTUAL))))
COUNTED = ("fetch", "backward", "reduce", "reduced", "step", "outside", "enter", "world", "entered", "transfer")
COUNTED += ("save", "import")
BEGUN: list = []
now = {"iteration": -1, **dict.fromkeys(COUNTED, 0)}


def point(name: str) -> None:
    """A place where a fault may be wanted."""
    for fault in FAULTS:
        due = fault["recovery"] == now["entered"] if "recovery" in fault else fault.get("count", 0) == now[name]
        due = due and ("file" not in fault or (OUT / fault["file"]).exists())
        if due and fault["at"] == name and fault["iteration"] in (now["iteration"], "any" if BEGUN else None):
            FAULTS.remove(fault)
            strike(fault)
            break
    now[name] += 1


def strike(fault: dict) -> None:
    """Fail in the wanted way."""
    (OUT / f"fault.{SLOT}.{INCARNATION}.{now['iteration']}").write_text(repr(time.time() + fault.get("delay", 0)))
    kind = fault["kind"]
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "late":
        signal.setitimer(signal.ITIMER_REAL, fault["delay"])  # nobody handles SIGALRM: it ends the process
    elif kind == "hang":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "sleep":
        time.sleep(fault["delay"])
    elif kind == "wait":
        wait(lambda: (OUT / f"gate.{fault['gate']}").exists())
    elif kind == "loss":
        lose_packets(fault["delay"])
    elif kind == "raise":
        raise ValueError("an error of the training script")
    else:
        strike_session(kind)


def lose_packets(seconds: float) -> None:
    """For so long nothing that peers send arrives here; the program goes on."""
    from detector import blackhole

    hole = blackhole.dig(pace=False)
    threading.Timer(seconds, blackhole.fill, [hole]).start()


def strike_session(kind: str) -> None:
    """What needs the session."""
    from transition import process

    if kind == "stop":
        SESSIONS[0].request_stop()
    elif kind == "lost":
        wait(process.current().watch.lost)
        raise RuntimeError("an error of the training script")
    else:
        process.current().unblocker.unblock()
        if kind == "error":
            raise RuntimeError("Connection closed by peer")


def wait(condition) -> None:
    """Until it holds, 60 s at most."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)


warnings.filterwarnings("ignore", category=FutureWarning)  # torch's, of what Megatron calls
faulthandler.register(signal.SIGUSR2, all_threads=True)
point("import")
import torch  # noqa: E402

torch.set_num_threads(1)
from sbatch_templates import cpu_adapter  # noqa: E402

cpu_adapter.install()
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

import transition  # noqa: E402


def build():
    """This rank's chunks of a small GPT, and Adam."""
    overlap = os.environ.get("TINY_OVERLAP") == "1"
    torch.manual_seed(1234)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    dtype = torch.bfloat16 if BF16 else torch.float32
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=int(os.environ.get("TINY_HIDDEN", "64")),
        num_attention_heads=4,
        use_cpu_initialization=True,
        hidden_dropout=DROPOUT,
        attention_dropout=DROPOUT,
        tensor_model_parallel_size=TENSOR,
        pipeline_model_parallel_size=PIPELINE,
        virtual_pipeline_model_parallel_size=VIRTUAL if VIRTUAL > 1 else None,
        bf16=BF16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        calculate_per_token_loss=TOKENS,
        overlap_p2p_comm=VIRTUAL > 1,  # Megatron's own training refuses two stages without it
        batch_p2p_comm=VIRTUAL == 1,
    )
    chunks = [wrap(config, part(config, stage if VIRTUAL > 1 else None), overlap) for stage in range(VIRTUAL)]
    settings = OptimizerConfig(optimizer="adam", lr=5e-3, min_lr=5e-4, weight_decay=0.01, clip_grad=1.0, bf16=BF16)
    settings.use_distributed_optimizer = DISTOPT
    optimizer = get_megatron_optimizer(settings, chunks)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if overlap:
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if VIRTUAL > 1 else chunks[0].no_sync
    return chunks, optimizer


def part(config, stage: int | None):
    """One chunk of the model; the same seed wherever it is built."""
    torch.manual_seed(1234 + 100 * parallel_state.get_pipeline_model_parallel_rank() + (stage or 0))
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        vp_stage=stage,
    )
    return Float16Module(config, model) if BF16 else model


def wrap(config, model, overlap: bool):
    """A chunk in Megatron's DDP; overlapped reduces have many buckets."""
    settings = DistributedDataParallelConfig(
        overlap_grad_reduce=overlap,
        bucket_size=20000 if overlap else None,
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=DISTOPT,
        overlap_param_gather=os.environ.get("TINY_GATHER") == "1",
    )
    return DistributedDataParallel(config, settings, model)


def schedule(optimizer):
    """A learning rate that falls from the first iteration on, so that a rank with another one is found out."""
    samples = MICRO_BATCHES * SIZE
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=5e-3,
        min_lr=5e-4,
        lr_warmup_steps=0,
        lr_decay_steps=100 * samples,
        lr_decay_style="linear",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=100 * samples,
        wd_incr_style="constant",
    )


POSITIONS = torch.arange(SEQUENCE)[None].expand(SIZE, -1)
MASK = torch.ones(1, 1, SEQUENCE, SEQUENCE).tril() < 0.5


def fetch(iteration: int, index: int):
    """Tokens of one micro-batch, shape (SIZE, SEQUENCE + 1)."""
    if iteration != now["iteration"]:
        BEGUN.append(iteration)
        now.update({"iteration": iteration, **dict.fromkeys(COUNTED, 0)})
    point("fetch")
    with (OUT / f"fetched.{SLOT}").open("a") as file:
        file.write(f"{INCARNATION} {iteration} {index}\n")
    if SLOW:
        time.sleep(SLOW)
    generator = torch.Generator().manual_seed(1000003 * iteration + index)
    return torch.randint(0, VOCABULARY, (SIZE, SEQUENCE + 1), generator=generator)


def forward_step(data_iterator, model):
    """Megatron's forward step with the mean loss; every stage fetches, so that faults strike there too."""
    tokens = next(data_iterator)
    output = model(tokens[:, :-1].contiguous(), POSITIONS, MASK, labels=tokens[:, 1:].contiguous())

    if output.requires_grad:
        output.register_hook(lambda _: point("backward"))

    def loss_function(values):
        loss = values.float().mean()
        if TOKENS:  # as many count as the micro-batch's first token says
            count = 1 + tokens[0, 0] % (SEQUENCE - 1)
            return values[:, :count].float().sum(), (SIZE * count).int(), {}
        return loss, {"lm loss": loss.detach().clone()}

    return output, loss_function


def gather_gradients(chunks) -> None:
    """With a distributed optimizer each rank has reduced its own part only: the others' come beside it, and what was
    there is put back, since a recovery goes on from it."""
    from transition import groups
    from transition.elastic_buckets import own_part

    for chunk in chunks:
        for group in groups.bucket_groups(chunk):
            for bucket in group.buckets:
                full = torch.empty_like(bucket.grad_data)
                members = group.intra_distributed_optimizer_instance_group
                dist.all_gather_into_tensor(full, own_part(bucket, group).clone(), group=members)
                GATHERED.append((bucket.grad_data, bucket.grad_data.clone()))
                bucket.grad_data.copy_(full)


GATHERED: list = []


def fail_silently() -> None:
    """Collectives whose peers are gone end as NCCL's do: not before they are aborted, without an error, and with
    garbage where the result should be."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    from transition import process

    def garble(tensors) -> None:
        wait(process.current().watch.lost)
        for tensor in tensors:
            tensor.copy_(torch.randint(0, 99, tensor.shape).to(tensor.dtype))

    def silent(original, result):
        def call(*arguments, **keywords):
            try:
                return original(*arguments, **keywords)
            except RuntimeError:
                garble(result(*arguments))

        return call

    def reduced(group, *rest):
        group.grad_reduce_handle = None
        return [bucket.grad_data for bucket in group.buckets]

    for name in ("start_grad_sync", "finish_grad_sync"):
        setattr(_ParamAndGradBucketGroup, name, silent(getattr(_ParamAndGradBucketGroup, name), reduced))
    dist.all_reduce = silent(dist.all_reduce, lambda tensor, *rest: [tensor])


def install_points(chunks, optimizer) -> None:
    """Fault points around everything that a generation does; the optimizer also saves what it got and what it made."""
    from transition import checkpoint, groups, migrate

    step = optimizer.step

    def every():
        return [parameter for chunk in chunks for parameter in chunk.module.parameters()]

    def around(owner, name: str, before: str, after: str = "") -> None:
        original = getattr(owner, name)

        def wrapped(*arguments, **keywords):
            point(before)
            outcome = original(*arguments, **keywords)
            if after:
                point(after)
            return outcome

        setattr(owner, name, wrapped)

    def saving_step():
        point("step")
        try:
            if DISTOPT:
                gather_gradients(chunks)
            gradient = torch.cat([p.main_grad.detach().float().reshape(-1) for p in every()]).clone()
        finally:
            while GATHERED:
                data, was = GATHERED.pop()
                data.copy_(was)
        outcome = step()
        parameters = torch.cat([p.detach().float().reshape(-1) for p in every()])
        if now["iteration"] < SAVE:
            torch.save({"gradient": gradient, "parameters": parameters}, OUT / f"step.{now['iteration']}.{SLOT}")
        return outcome

    optimizer.step = saving_step
    original = dist.all_reduce

    def all_reduce(*arguments, **keywords):
        if keywords.get("group") not in (None, parallel_state.get_data_parallel_group(with_context_parallel=True)):
            return original(*arguments, **keywords)  # tensor parallel, of one rank: no peer, no fault
        point("reduce")
        outcome = original(*arguments, **keywords)
        point("reduced")
        return outcome

    dist.all_reduce = all_reduce
    around(groups.Groups, "build", "enter", "entered")
    around(groups.Groups, "_connect_roles", "world")
    around(migrate, "transfer", "transfer")
    around(checkpoint.Checkpoints, "_write", "save")


def main() -> None:
    """Train, and save each iteration's gradient, parameters and loss."""
    transition.init_process_group("gloo", transition.Layout(tensor=TENSOR, pipeline=PIPELINE))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=TENSOR,
        pipeline_model_parallel_size=PIPELINE,
        virtual_pipeline_model_parallel_size=VIRTUAL if VIRTUAL > 1 else None,
    )
    if os.environ.get("TINY_SILENT") == "1":
        fail_silently()
    chunks, optimizer = build()
    install_points(chunks, optimizer)
    session = transition.Session(
        model=chunks,
        seed=1234,
        optimizer=optimizer,
        scheduler=schedule(optimizer),
        micro_batches=MICRO_BATCHES,
        forward_step=forward_step,
        fetch=fetch,
        seq_length=SEQUENCE,
        micro_batch_size=SIZE,
        train_iterations=ITERATIONS,
        checkpoints=transition.Checkpoints(CHECKPOINTS, interval=EVERY) if CHECKPOINTS else None,
    )
    signal.signal(signal.SIGUSR1, lambda *_: session.request_stop())
    SESSIONS.append(session)
    for result in session:
        point("outside")
        with (OUT / f"losses.{SLOT}").open("a") as file:
            step = {"iteration": result.iteration, "loss": result.loss, "generation": result.generation}
            file.write(json.dumps(step | {"time": time.time(), "world_size": result.world_size}) + "\n")


if __name__ == "__main__":
    main()
