"""The arguments of Megatron-LM that a checkpoint was written with. `--load` compares some of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unicron_transition.snapshot.formats.index import EMBEDDING, LAYERS, OUTPUT, BadCheckpoint, Index
from unicron_transition.snapshot.model_facts import ACTIVATIONS
from unicron_transition.snapshot.reading import PlainValues, number_in, parse_json, read_small

LOAD_COMPARES = ("num_layers", "hidden_size", "num_attention_heads")  # `--load` without --finetune does
WITH_VOCABULARY = ("max_position_embeddings", "make_vocab_size_divisible_by", "tokenizer_type")  # with --vocab-file too
POSITIONS = "embedding.position_embeddings.weight"


def arguments(index: Index) -> PlainValues:
    """Return the arguments that Megatron-LM reads from a checkpoint. The index has Megatron's names."""
    common, facts = index.common, index.common.facts
    sizes = {word: int(size) for word, size in re.findall(r"([A-Z]+)(\d+)", index.layout)}
    schedule = common.schedule or {}
    found: PlainValues = {
        "tensor_model_parallel_size": sizes.get("TP", 1),
        "pipeline_model_parallel_size": sizes.get("PP", 1),
        "iteration": index.iteration,
        "consumed_train_samples": number_in(schedule, "num_steps") if "lr_warmup_steps" in schedule else 0,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
    }
    if facts.heads:
        found["num_attention_heads"] = facts.heads
        found["num_query_groups"] = facts.groups or facts.heads
        found["group_query_attention"] = found["num_query_groups"] != facts.heads
    if facts.channels:
        found["kv_channels"] = facts.channels
    found |= _of_tensors(index)
    found |= {name: value for name, value in facts.arguments.items() if value is not None and name not in OURS}
    # Without these, Megatron-LM would look for random states, and for an optimizer's state that is not there.
    return found | {"no_save_rng": True, "no_save_optim": not index.has_optimizer(), "world_size": 0}


def unknown(index: Index) -> Iterator[str]:
    """Yield a line for each missing argument that matters, with the remedy."""
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
    if others := index.common.facts.arguments.get(NO_COUNTERPART):
        yield f"config.json says {others}: Megatron-LM's model computes so only if its options say it"
    if left := [name for name in WITH_VOCABULARY if name not in known]:
        yield f"{', '.join(left)}: not known; Megatron-LM compares them if --vocab-file is given: give --finetune then"


def _of_tensors(index: Index) -> PlainValues:
    """Derive arguments from the names and shapes of stacked layers."""
    tensors = index.tensors
    inner = tensors.get(f"{LAYERS}mlp.linear_fc2.weight")
    if inner is None or len(inner.shape) != 3:
        return {}
    layers, hidden, width = inner.shape
    biased = f"{LAYERS}mlp.linear_fc1.bias" in tensors
    found: PlainValues = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": width}
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


# ------------------------------------------------------------ from Hugging Face's config.json
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")  # Megatron's options can express their arithmetic
EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps")
# Factors in the layers of other models, with the values that change nothing.
FACTORS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), (1,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "attention_multiplier"), ()),
    **dict.fromkeys(("query_pre_attn_scalar", "scale_emb", "scale_depth"), ()),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
}
NO_COUNTERPART = "unmatched"  # our own argument: the settings of config.json for which Megatron-LM has no argument
OURS = (NO_COUNTERPART, "activation")


def of_config(path: Path) -> PlainValues:
    """Translate a model's config.json to arguments. Raises BadCheckpoint, OSError."""
    try:
        config = parse_json(read_small(path))
        found = {
            "max_position_embeddings": config.get("max_position_embeddings") or config.get("n_positions"),
            "attention_dropout": config.get("attention_dropout", config.get("attn_pdrop")),
            "hidden_dropout": config.get("resid_pdrop"),
        }
        found["activation"] = ACTIVATIONS.get(_activation(config))
        if "hidden_act" in config:
            found["swiglu"] = found["activation"] == "silu"
        found["layernorm_epsilon"] = next((float(config[name]) for name in EPSILONS if config.get(name)), None)
        found[NO_COUNTERPART] = ", ".join(_find_unmatched(config)) or None
        found |= _of_rotary(config)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadCheckpoint(f"{path}: not a model's configuration ({error})") from None
    return {name: value for name, value in found.items() if isinstance(value, bool | int | float | str)}


def _activation(config: Mapping[str, object]) -> str:
    return str(config.get("hidden_act") or config.get("activation_function") or "")


def _find_unmatched(config: Mapping[str, object]) -> Iterator[str]:
    """Name the settings that change the arithmetic without changing any weight."""
    if config.get("model_type") and config["model_type"] not in MODEL_TYPES:
        yield f"model_type {config['model_type']}"
    if (activation := _activation(config)) and activation not in ACTIVATIONS:
        yield f"activation {activation}"
    for name, neutral in FACTORS.items():
        if config.get(name) is not None and config[name] not in neutral:
            yield f"{name} {config[name]}"
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        yield f"sliding_window {config['sliding_window']}"


def _of_rotary(config: dict[str, Any]) -> PlainValues:
    """Translate the rotary embedding. Newer releases have it under `rope_parameters`, and some models have one for each
    kind of layer, which Megatron does not support."""
    rope = config.get("rope_parameters") or {}
    kinds = [each for each in rope.values() if isinstance(each, dict)]
    scaling = config.get("rope_scaling") or rope
    types = [each.get("rope_type") or each.get("type") or "default" for each in kinds or [scaling]]
    found: PlainValues = {"use_rope_scaling": any(each != "default" for each in types)}
    if base := config.get("rope_theta") or rope.get("rope_theta"):
        percent = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
        found |= {"position_embedding_type": "rope", "rotary_base": int(base), "rotary_percent": float(percent)}
    return found
