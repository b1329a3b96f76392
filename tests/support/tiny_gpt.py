"""A small GPT under a Session, with faults at exact points: what the rank tests run as a training script.

Environment, beside that of `fault_points`: TINY_LAYOUT "TP PP VPP", by default 1 each, or "TP PP VPP EP ETP";
TINY_DISTOPT=1 for the distributed optimizer, TINY_GATHER=1 for its gathers overlapped; TINY_SILENT=1: collectives of a
broken generation give garbage; TINY_BF16=1; TINY_FP16 the first loss scale; TINY_TOKENS=1 for a loss per token;
TINY_EXPERTS how a mixture of experts is balanced, by a loss ("aux_loss", "seq_aux_loss") or "bias"; TINY_EXPERT_COUNT
experts (4), TINY_DISPATCHER of tokens ("allgather", "alltoall"); TINY_MTP layers of multi-token prediction;
TINY_GATED=1 for SwiGLU, RMSNorm, an output layer of its own, and no biases; TINY_QUERY_NORMS=1; TINY_DROPOUT;
TINY_LAYERS, TINY_HIDDEN; TINY_SEQUENCE tokens, TINY_SIZE sequences of a micro-batch; TINY_RATE of learning; TINY_RULE:
this part of the tokens follows from the one before; TINY_OVERLAP=1 for overlapped reduces of many buckets; TINY_SAVE
iterations whose gradients and parameters are saved; TINY_CHECKPOINTS a folder, TINY_CHECKPOINT_EVERY so many
iterations (2), TINY_BEGIN a checkpoint of another format to begin from. TINY_FROZEN=1: two parameters are not trained,
one of them split by tensor parallelism, and have their values from the slot's first process alone; "built": the same
two, as they are built.

`at` has two more places: "norm" of the gradients, in the optimizer's step, and "tokens" on their way to experts.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

UNICRON_PRELOAD = ("sbatch_templates.gpt_imports",)
sys.path.append(str(Path(__file__).resolve().parents[2]))
from unicron_transition.generations import layout  # noqa: E402
from unicron_transition.megatron import limits  # noqa: E402

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support.fault_points import (  # noqa: E402
    CHECKPOINTS,
    EVERY,
    INCARNATION,
    ITERATIONS,
    MICRO_BATCHES,
    OUT,
    SAVE,
    SLOT,
    around,
    around_generations,
    around_reduces,
    fetching,
    now,
    point,
    save,
    silent,
    silent_reduces,
    train,
)

RATE, RULE = float(os.environ.get("TINY_RATE", "5e-3")), float(os.environ.get("TINY_RULE", "0"))
SEQUENCE, VOCABULARY, SIZE = int(os.environ.get("TINY_SEQUENCE", "32")), 128, int(os.environ.get("TINY_SIZE", "2"))
TENSOR, PIPELINE, VIRTUAL, *SHARED = map(int, os.environ.get("TINY_LAYOUT", "1 1 1").split())
if "UNICRON_LAYOUT" in os.environ:  # the job has stated several
    TOLD, VIRTUAL = layout.parse_layout(os.environ["UNICRON_LAYOUT"])
    TENSOR, PIPELINE = TOLD.tensor, TOLD.pipeline
BEGIN = os.environ.get("TINY_BEGIN")
DROPOUT = float(os.environ.get("TINY_DROPOUT", "0"))
TOKENS, BF16, DISTOPT, GATED, QUERY_NORMS = (
    os.environ.get(f"TINY_{name}") == "1" for name in ("TOKENS", "BF16", "DISTOPT", "GATED", "QUERY_NORMS")
)
DISPATCHER = os.environ.get("TINY_DISPATCHER", "allgather")
EXPERT_RANKS, EXPERT_TENSOR = SHARED or (1, TENSOR)
EXPERTS, MTP = os.environ.get("TINY_EXPERTS", ""), int(os.environ.get("TINY_MTP", "0"))
FP16 = float(os.environ.get("TINY_FP16", "0"))
LAYERS = int(os.environ.get("TINY_LAYERS", str(max(2, PIPELINE * VIRTUAL))))
warnings.filterwarnings("ignore", category=FutureWarning)  # torch's, of what Megatron calls
point("import")
import torch  # noqa: E402

torch.set_num_threads(1)
from sbatch_templates import cpu_adapter  # noqa: E402

cpu_adapter.install()
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

import unicron  # noqa: E402


def build():
    """This rank's chunks of a small GPT, and Adam."""
    overlap = os.environ.get("TINY_OVERLAP") == "1"
    torch.manual_seed(1234)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    dtype = torch.float16 if FP16 else torch.bfloat16 if BF16 else torch.float32
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
        fp16=bool(FP16),
        **experts(),
        **predictions(),
        **gated(),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        calculate_per_token_loss=TOKENS,
        qk_layernorm=QUERY_NORMS,
        overlap_p2p_comm=VIRTUAL > 1,  # Megatron's own training refuses two stages without it
        batch_p2p_comm=VIRTUAL == 1,
    )
    chunks = [wrap(config, part(config, stage if VIRTUAL > 1 else None), overlap) for stage in range(VIRTUAL)]
    settings = OptimizerConfig(optimizer="adam", lr=RATE, min_lr=RATE / 10, weight_decay=0.01, clip_grad=1.0, bf16=BF16)
    settings.use_distributed_optimizer, settings.fp16 = DISTOPT, bool(FP16)
    settings.adam_eps = 1e-4  # with 1e-8 the order of sums that are all but zero becomes steps
    settings.initial_loss_scale, settings.loss_scale_window = FP16 or 1.0, 2
    settings.hysteresis = 1  # one overflow halves the scale
    optimizer = get_megatron_optimizer(settings, chunks)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if overlap:
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if VIRTUAL > 1 else chunks[0].no_sync
    return chunks, optimizer


def experts() -> dict:
    """Of the configuration, for a mixture of experts: a balance with an auxiliary loss, or by biases."""
    if not EXPERTS:
        return {}
    by_bias = EXPERTS == "bias"
    return {
        "num_moe_experts": int(os.environ.get("TINY_EXPERT_COUNT", "4")),
        "moe_token_dispatcher_type": DISPATCHER,
        "expert_model_parallel_size": EXPERT_RANKS,
        "expert_tensor_parallel_size": EXPERT_TENSOR,
        "sequence_parallel": TENSOR > 1,  # Megatron wants it
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none" if by_bias else EXPERTS,
        "moe_aux_loss_coeff": 0.0 if by_bias else 0.1,
        "moe_z_loss_coeff": 0.01,
        "moe_router_score_function": "sigmoid" if by_bias else "softmax",
        "moe_router_enable_expert_bias": by_bias,
        "moe_router_bias_update_rate": 0.01,
        "moe_input_jitter_eps": 0.01,
        "add_bias_linear": False,
    }


def predictions() -> dict:
    """Of the configuration, for multi-token prediction."""
    return {"mtp_num_layers": MTP, "mtp_loss_scaling_factor": 0.5} if MTP else {}


def gated() -> dict:
    """Of the configuration, for layers as Llama has them, with fewer keys than queries."""
    if not GATED:
        return {}
    return {
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "num_query_groups": 2,
        "bias_activation_fusion": False,
    }


def part(config, stage: int | None):
    """One chunk of the model; the same seed wherever it is built."""
    torch.manual_seed(1234 + 100 * parallel_state.get_pipeline_model_parallel_rank() + (stage or 0))
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization=config.normalization, qk_layernorm=QUERY_NORMS
    )
    model = GPTModel(
        config,
        layer,
        mtp_block_spec=get_gpt_mtp_block_spec(config, layer, False, vp_stage=stage) if MTP else None,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=not (MTP or GATED),
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        vp_stage=stage,
    )
    if (how := os.environ.get("TINY_FROZEN", "0")) != "0":
        layer = model.decoder.layers[0]
        mlp = layer.mlp.experts.local_experts[0] if EXPERTS else layer.mlp
        for frozen in (layer.input_layernorm.weight, mlp.linear_fc1.weight):
            frozen.requires_grad_(False)
            if how == "1" and INCARNATION == 0:
                own = SLOT % EXPERT_RANKS if frozen is mlp.linear_fc1.weight else 0  # lanes have other experts
                frozen.mul_(torch.linspace(0.5, 2.0 + own, frozen.numel()).view_as(frozen))
    return Float16Module(config, model) if BF16 or FP16 else model


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
        max_lr=RATE,
        min_lr=RATE / 10,
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
    fetching(iteration, index)
    return data(iteration, index)


def data(iteration: int, index: int):
    generator = torch.Generator().manual_seed(1000003 * iteration + index)
    tokens = torch.randint(0, VOCABULARY, (SIZE, SEQUENCE + 1), generator=generator)
    return follow(tokens, generator) if RULE else tokens


def follow(tokens, generator):
    """Most tokens follow from the one before: something that can be learnt."""
    obeys = torch.rand(tokens.shape, generator=generator) < RULE
    for place in range(1, SEQUENCE + 1):
        tokens[:, place] = torch.where(obeys[:, place], (5 * tokens[:, place - 1] + 17) % VOCABULARY, tokens[:, place])
    return tokens


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
    from unicron_transition.seams.elastic_buckets import own_part
    from unicron_transition.seams.megatron_core import bucket_groups

    for chunk in chunks:
        for group in bucket_groups(chunk):
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

    def reduced(group, *rest):
        group.grad_reduce_handle = None
        return [bucket.grad_data for bucket in group.buckets]

    for name in ("start_grad_sync", "finish_grad_sync"):
        setattr(_ParamAndGradBucketGroup, name, silent(getattr(_ParamAndGradBucketGroup, name), reduced))
    silent_reduces()


def reduces(group) -> bool:
    """Whether a reduce over the group is one of gradients or of the proof: not of tensor parallelism of one rank, which
    has no peer and no fault. Shared experts have a group of their own."""
    if group is None or group == parallel_state.get_data_parallel_group(with_context_parallel=True):
        return True
    return EXPERT_RANKS > 1 and group == parallel_state.get_expert_data_parallel_group()


def install_points(chunks, optimizer) -> None:
    """Fault points around everything that a generation does; the optimizer also saves what it got and what it made."""
    step = optimizer.step

    def every():
        return [parameter for chunk in chunks for parameter in chunk.module.parameters()]

    def saving_step():
        point("step")
        try:
            if DISTOPT:
                gather_gradients(chunks)
            gradients = [p.main_grad.detach().float().reshape(-1) for p in every() if p.requires_grad]
            gradient = torch.cat(gradients)
        finally:
            while GATHERED:
                data, was = GATHERED.pop()
                data.copy_(was)
        outcome = step()
        parameters = torch.cat([p.detach().float().reshape(-1) for p in every()])
        if now["iteration"] < SAVE:
            save({"gradient": gradient, "parameters": parameters}, OUT / f"step.{now['iteration']}.{SLOT}")
        return outcome

    optimizer.step = saving_step
    around_reduces(reduces)
    around(optimizer.chained_optimizers[0], "get_grad_norm", "norm")
    around(dist, "all_to_all_single", "tokens")
    around_generations()


def new_session(chunks, optimizer, iterations, **more):
    """The session of this model, which trains for so many iterations. more: for :class:`unicron.Session`."""
    return unicron.Session(
        model=chunks,
        seed=1234,
        optimizer=optimizer,
        scheduler=schedule(optimizer),
        micro_batches=MICRO_BATCHES,
        forward_step=forward_step,
        fetch=fetch,
        seq_length=SEQUENCE,
        micro_batch_size=SIZE,
        train_iterations=iterations,
        **more,
    )


def plain_iteration(chunks, optimizer, scheduler, number: int, mine) -> list[dict]:
    """One iteration over the micro-batches `mine`, as Megatron's own training loop does it: nothing of this project is
    in it. Returns their losses, in the last stage."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    iterators = [(fetch(number, index) for index in mine) for _ in chunks]
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks,
        num_microbatches=len(mine),
        seq_length=SEQUENCE,
        micro_batch_size=SIZE,
    )
    optimizer.step()
    scheduler.step(increment=MICRO_BATCHES * SIZE)
    return losses


def initialize(backend: str) -> None:
    """The groups of the layout."""
    lanes = limits.lanes_of(TENSOR, EXPERT_RANKS, EXPERT_TENSOR)
    unicron.init_process_group(backend, unicron.Layout(tensor=TENSOR, pipeline=PIPELINE, expert=lanes))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=TENSOR,
        pipeline_model_parallel_size=PIPELINE,
        virtual_pipeline_model_parallel_size=VIRTUAL if VIRTUAL > 1 else None,
        expert_model_parallel_size=EXPERT_RANKS,
        expert_tensor_parallel_size=EXPERT_TENSOR if EXPERTS else None,
    )


def main() -> None:
    """Train, and save each iteration's gradient, parameters and loss."""
    initialize("gloo")
    if os.environ.get("TINY_SILENT") == "1":
        fail_silently()
    chunks, optimizer = build()
    install_points(chunks, optimizer)
    session = new_session(
        chunks,
        optimizer,
        ITERATIONS,
        checkpoints=unicron.Checkpoints(CHECKPOINTS, interval=EVERY, begin_from=BEGIN) if CHECKPOINTS else None,
    )
    from unicron_transition.megatron import auxiliary

    more = lambda: {"scale": float(optimizer.get_loss_scale()), "biases": str(auxiliary.biases(chunks))}  # noqa: E731
    train(session, more, data)


if __name__ == "__main__":
    if "ENTERED_FILES" in os.environ:
        from tests.support import entered

        entered.watch("rank" if INCARNATION == 0 else "newcomer")
    main()
