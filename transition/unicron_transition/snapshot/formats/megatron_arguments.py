"""Megatron-LM's arguments that a checkpoint was written with: its `--load` compares some of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unicron_transition.snapshot.formats.index import EMBEDDING, LAYERS, OUTPUT, BadCheckpoint, Index
from unicron_transition.snapshot.model_facts import ACTIVATIONS
from unicron_transition.snapshot.reading import parse_json, read_small

LOAD_COMPARES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
)  # by `--load`, without --finetune
WITH_VOCABULARY = ("max_position_embeddings", "make_vocab_size_divisible_by", "tokenizer_type")  # with --vocab-file too
POSITIONS = "embedding.position_embeddings.weight"


def arguments(index: Index) -> dict[str, Any]:
    """Return those that Megatron-LM reads, of an index with its names."""
    common, facts = index.common, index.common.facts
    sizes = {word: int(size) for word, size in re.findall(r"([A-Z]+)(\d+)", index.layout)}
    schedule = common.schedule or {}
    consumed = schedule["num_steps"] if "lr_warmup_steps" in schedule else 0
    found = {
        "tensor_model_parallel_size": sizes.get("TP", 1),
        "pipeline_model_parallel_size": sizes.get("PP", 1),
        "iteration": index.iteration,
        "consumed_train_samples": int(consumed),
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
    }
    if facts.get("heads"):
        found["num_attention_heads"] = facts["heads"]
        found["num_query_groups"] = facts.get("groups") or facts["heads"]
        found["group_query_attention"] = found["num_query_groups"] != facts["heads"]
    if facts.get("channels"):
        found["kv_channels"] = facts["channels"]
    found |= _of_tensors(index)
    found |= {name: value for name, value in common.args.items() if value is not None and name not in OURS}
    # Random numbers are not in it, nor is what is not: Megatron-LM would look for them.
    return found | {"no_save_rng": True, "no_save_optim": not index.has_optimizer(), "world_size": 0}


def unknown(index: Index) -> Iterator[str]:
    """Lines that say which of them nobody knows, and what to do about it."""
    known = arguments(index)
    if left := [name for name in LOAD_COMPARES if name not in known]:
        yield (
            f"{', '.join(left)}: not known, so that Megatron-LM takes it with --finetune alone: give the model's "
            "config.json with --config"
        )
    if index.iteration and not index.has_optimizer():
        yield "there is no optimizer's state in it: give --no-load-optim, or --finetune to begin at iteration 0"
    if known.get("use_rope_scaling"):
        yield (
            "config.json scales the rotary embedding, which Megatron-LM takes from its options alone: give "
            "--use-rope-scaling if the scale is Llama 3's"
        )
    if others := index.common.args.get(NO_COUNTERPART):
        yield f"config.json says {others}: Megatron-LM's model computes so only if its options say it"
    if left := [name for name in WITH_VOCABULARY if name not in known]:
        yield f"{', '.join(left)}: not known; Megatron-LM compares them if --vocab-file is given: give --finetune then"


def _of_tensors(index: Index) -> dict[str, Any]:
    """Return what names and shapes say, of layers that are stacked."""
    tensors = index.tensors
    inner = tensors.get(f"{LAYERS}mlp.linear_fc2.weight")
    if inner is None or len(inner.shape) != 3:
        return {}
    layers, hidden, width = inner.shape
    biased = f"{LAYERS}mlp.linear_fc1.bias" in tensors
    found: dict[str, Any] = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": width}
    found |= {
        "add_bias_linear": biased,
        "add_qkv_bias": not biased and f"{LAYERS}self_attention.linear_qkv.bias" in tensors,
        "qk_layernorm": f"{LAYERS}self_attention.q_layernorm.weight" in tensors,
        "untie_embeddings_and_output_weights": OUTPUT in tensors,
        "normalization": "LayerNorm" if "decoder.final_layernorm.bias" in tensors else "RMSNorm",
    }
    if EMBEDDING in tensors:
        found["padded_vocab_size"] = tensors[EMBEDDING].shape[0]
    if POSITIONS in tensors:
        found["position_embedding_type"] = "learned_absolute"
        found["max_position_embeddings"] = tensors[POSITIONS].shape[0]
    return found


# ------------------------------------------------------------ of Hugging Face's
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")  # model types whose arithmetic Megatron's options give
EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps")
# What layers of other models compute besides, and the values that change nothing.
FACTORS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), (1,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "attention_multiplier"), ()),
    **dict.fromkeys(("query_pre_attn_scalar", "scale_emb", "scale_depth"), ()),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
}
NO_COUNTERPART = "unmatched"  # among the arguments: a text of what has no counterpart in them
OURS = (NO_COUNTERPART, "activation")  # which Megatron-LM's are not


def of_config(path: Path) -> dict[str, Any]:
    """Read what a model's config.json says of them. Raises BadCheckpoint, OSError."""
    try:
        told = parse_json(read_small(path))
        found = {
            "max_position_embeddings": told.get("max_position_embeddings") or told.get("n_positions"),
            "attention_dropout": told.get("attention_dropout", told.get("attn_pdrop")),
            "hidden_dropout": told.get("resid_pdrop"),
        }
        found["activation"] = ACTIVATIONS.get(_activation(told))
        if "hidden_act" in told:
            found["swiglu"] = found["activation"] == "silu"
        found["layernorm_epsilon"] = next((float(told[name]) for name in EPSILONS if told.get(name)), None)
        found[NO_COUNTERPART] = ", ".join(_find_unmatched(told)) or None
        found |= _of_rotary(told)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadCheckpoint(f"{path}: not a model's configuration ({error})") from None
    return {name: value for name, value in found.items() if isinstance(value, bool | int | float | str)}


def _activation(told: dict[str, Any]) -> str:
    return str(told.get("hidden_act") or told.get("activation_function") or "")


def _find_unmatched(told: dict[str, Any]) -> Iterator[str]:
    """Name what changes the arithmetic, and no weight shows."""
    if told.get("model_type") and told["model_type"] not in MODEL_TYPES:
        yield f"model_type {told['model_type']}"
    if (activation := _activation(told)) and activation not in ACTIVATIONS:
        yield f"activation {activation}"
    for name, neutral in FACTORS.items():
        if told.get(name) is not None and told[name] not in neutral:
            yield f"{name} {told[name]}"
    if told.get("sliding_window") and told.get("use_sliding_window", True):
        yield f"sliding_window {told['sliding_window']}"


def _of_rotary(told: dict[str, Any]) -> dict[str, Any]:
    """Read what it says of the rotary embedding. Newer releases have it under `rope_parameters`, some models for each
    kind of layer, which Megatron has not."""
    rope = told.get("rope_parameters") or {}
    kinds = [each for each in rope.values() if isinstance(each, dict)]
    scaling = told.get("rope_scaling") or rope
    types = [each.get("rope_type") or each.get("type") or "default" for each in kinds or [scaling]]
    found: dict[str, Any] = {"use_rope_scaling": any(each != "default" for each in types)}
    if base := told.get("rope_theta") or rope.get("rope_theta"):
        percent = told.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
        found |= {"position_embedding_type": "rope", "rotary_base": int(base), "rotary_percent": float(percent)}
    return found
