"""The model of train_gpt.py: one pipeline stage's part of a GPT in Megatron's DistributedDataParallel, its optimizer,
and its forward step. The same seed gives the same model in every layout.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpt_options import virtual_stages

Batch = dict[str, Any]  # name -> tensor [micro-batch size, sequence length]


def build_model(options: argparse.Namespace, device: Any) -> list[Any]:
    """This rank's model chunks: one, or several in an interleaved pipeline. Waits for no other rank."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import finalize_model_grads

    tensor_parallel.model_parallel_cuda_manual_seed(options.seed)
    config = transformer_config(options)
    count = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    stages: Sequence[int | None] = [None] if count is None else range(count)
    chunks = [_wrap(options, config, _build_chunk(options, config, stage).to(device), stage) for stage in stages]
    config.finalize_model_grads_func = finalize_model_grads
    if options.overlap_grad_reduce:  # as Megatron's own training does
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
        config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in chunks])
    return chunks


def _one_or_all(functions: list[Callable[..., Any]]) -> Any:
    return functions[0] if len(functions) == 1 else functions


def transformer_config(options: argparse.Namespace) -> Any:
    """Megatron's configuration of the model, its layout and its schedules."""
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch.float16 if options.fp16 else torch.bfloat16 if options.bf16 else torch.float32
    interleaved = virtual_stages(options) is not None
    return TransformerConfig(
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        num_attention_heads=options.num_attention_heads,
        hidden_dropout=options.hidden_dropout,
        attention_dropout=options.attention_dropout,
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_stages(options),
        num_layers_in_first_pipeline_stage=options.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=options.decoder_last_pipeline_num_layers,
        sequence_parallel=options.sequence_parallel,
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        calculate_per_token_loss=options.calculate_per_token_loss,
        recompute_granularity=options.recompute_granularity,
        recompute_method=options.recompute_method,
        recompute_num_layers=options.recompute_num_layers,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=options.bf16,
        fp16=options.fp16,
        mtp_num_layers=options.mtp_num_layers,
        mtp_loss_scaling_factor=options.mtp_loss_scaling_factor,
        **(_experts(options) if options.num_experts else {}),
    )


def _experts(options: argparse.Namespace) -> dict[str, object]:
    return {
        "num_moe_experts": options.num_experts,
        "moe_router_topk": options.moe_router_topk,
        "moe_router_load_balancing_type": options.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": options.moe_aux_loss_coeff,
        "moe_z_loss_coeff": options.moe_z_loss_coeff,
        "moe_input_jitter_eps": options.moe_input_jitter_eps,
        "moe_router_score_function": options.moe_router_score_function,
        "moe_router_enable_expert_bias": options.moe_router_enable_expert_bias,
        "moe_router_bias_update_rate": options.moe_router_bias_update_rate,
        "moe_ffn_hidden_size": options.moe_ffn_hidden_size,
        "moe_expert_capacity_factor": options.moe_expert_capacity_factor,
        "add_bias_linear": False,  # Megatron's experts have none
    }


def _build_chunk(options: argparse.Namespace, config: Any, stage: int | None) -> Any:
    """The layers of one chunk, with the embedding in the first of all and the output layer in the last.

    Each part draws its weights from a seed of its own, by its layer's number in the whole model, so that they do not
    depend on where it is. A last stage has the tied embedding once more: it draws the same numbers, since Megatron's
    copy from the first stage would need that stage to be there.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.tensor_parallel import VocabParallelEmbedding
    from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset

    class SeededLayer(TransformerLayer):
        def __init__(self, config: Any, *arguments: Any, layer_number: int = 1, **keywords: Any):
            number = layer_number + get_transformer_layer_offset(config, keywords.get("vp_stage"))
            torch.manual_seed(options.seed + number)
            super().__init__(config, *arguments, layer_number=layer_number, **keywords)

    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    further = get_gpt_mtp_block_spec(config, layer, False, vp_stage=stage) if options.mtp_num_layers else None
    layer.module = SeededLayer
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
    torch.manual_seed(options.seed)
    model = GPTModel(
        config,
        layer,
        vocab_size=padded_vocabulary(options),
        max_sequence_length=options.seq_length,
        pre_process=first,
        post_process=last,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=not options.untie_embeddings_and_output_weights,
        mtp_block_spec=further,
        vp_stage=stage,
    )
    if last and not first and (further or not options.untie_embeddings_and_output_weights):
        torch.manual_seed(options.seed)
        tied = VocabParallelEmbedding(
            padded_vocabulary(options),
            config.hidden_size,
            init_method=config.embedding_init_method,
            config=config,
        )
        model.shared_embedding_or_output_weight().data.copy_(tied.weight.data)
    return model


def padded_vocabulary(options: argparse.Namespace) -> int:
    """Rows of the embedding: whole tiles, and the same number for each tensor rank. Megatron pads to 128 x TP; what
    does not depend on the layout lets a checkpoint of one layout be loaded in another."""
    tile = math.lcm(128, options.tensor_model_parallel_size)
    return -(-options.vocab_size // tile) * tile


def _wrap(options: argparse.Namespace, config: Any, model: Any, stage: int | None) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        use_distributed_optimizer=options.use_distributed_optimizer,
        bucket_size=options.ddp_bucket_size,
    )
    wrapped = Float16Module(config, model) if options.bf16 or options.fp16 else model
    return DistributedDataParallel(config, settings, wrapped, disable_bucketing=bool(stage))


def build_optimizer(options: argparse.Namespace, chunks: list[Any]) -> tuple[Any, Any]:
    """Megatron's optimizer and its learning-rate schedule, which counts samples as Megatron's own training does."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.utils import get_model_config

    config = get_model_config(chunks[0])
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=options.optimizer,
            lr=options.lr,
            min_lr=options.min_lr,
            weight_decay=options.weight_decay,
            clip_grad=options.clip_grad,
            bf16=options.bf16,
            fp16=options.fp16,
            loss_scale=options.loss_scale,
            initial_loss_scale=options.initial_loss_scale,
            min_loss_scale=options.min_loss_scale,
            loss_scale_window=options.loss_scale_window,
            hysteresis=options.hysteresis,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=options.use_distributed_optimizer,
        ),
        chunks,
    )
    config.grad_scale_func = optimizer.scale_loss
    samples = options.micro_batches * options.micro_batch_size
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.lr_warmup_iterations * samples,
        lr_decay_steps=options.train_iterations * samples,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=options.train_iterations * samples,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def make_forward_step(
    options: argparse.Namespace, device: Any, seconds: float = 0.0
) -> Callable[[Iterator[Batch], Any], tuple[Any, Callable[..., Any]]]:
    """Megatron's forward_step_func: (data_iterator, chunk) -> (output, loss_func). The output of the last chunk is the
    losses [micro-batch, sequence]. Only the first and the last take a micro-batch from the iterator.

    A micro-batch takes `seconds` at least, over all stages. loss_func gives (loss, {...}), or with
    --calculate-per-token-loss (sum over tokens, number of tokens, {...}).
    """
    seconds /= options.pipeline_model_parallel_size * (virtual_stages(options) or 1)

    def forward_step(data_iterator: Iterator[Batch], chunk: Any) -> tuple[Any, Callable[..., Any]]:
        from megatron.core.utils import get_attr_wrapped_model

        end = time.monotonic() + seconds
        model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        batch: Batch = {}
        if model.pre_process or model.post_process:
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in next(data_iterator).items()}
        output = chunk(batch.get("tokens"), batch.get("position_ids"), None, labels=batch.get("labels"))
        time.sleep(max(0.0, end - time.monotonic()))
        return output, lambda losses: _loss(losses, batch["loss_mask"], options.calculate_per_token_loss)

    return forward_step


def _loss(losses: Any, mask: Any, per_token: bool) -> tuple[Any, ...]:
    total, tokens = (losses.float() * mask).sum(), mask.sum()
    if per_token:
        return total, tokens.int(), {"lm loss": total.detach().clone()}
    loss = total / tokens
    return loss, {"lm loss": loss.detach().clone()}
