"""Facts about a model that an export of its checkpoint needs and no tensor shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unicron_transition.snapshot.reading import PlainValues, number_in, values_in

# The arguments that Megatron-LM's `--load` compares and `--use-checkpoint-args` takes. Megatron's configuration has
# these under the same names.
OF_CONFIG = """
    num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels normalization layernorm_epsilon
    add_bias_linear add_qkv_bias rotary_interleaved apply_query_key_layer_scaling qk_layernorm
    attention_dropout hidden_dropout moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax
    moe_grouped_gemm moe_shared_expert_intermediate_size moe_latent_size moe_token_dispatcher_type
    moe_router_score_function moe_router_enable_expert_bias moe_router_topk_scaling_factor
    mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads is_hybrid_model
""".split()
# Argument -> the name in the configuration, or of an attribute of the model.
OTHER_NAMES = {"num_experts": "num_moe_experts", "apply_layernorm_1p": "layernorm_zero_centered_gamma"}
OF_MODEL = {
    "max_position_embeddings": "max_sequence_length",
    "position_embedding_type": "position_embedding_type",
    "rotary_base": "rotary_base",
    "rotary_percent": "rotary_percent",
    "padded_vocab_size": "vocab_size",
}
OTHERS = """
    num_query_groups group_query_attention swiglu squared_relu untie_embeddings_and_output_weights seq_length
    add_position_embedding use_rotary_position_embeddings make_vocab_size_divisible_by tokenizer_type tokenizer_model
    tiktoken_pattern spec hybrid_override_pattern hybrid_attention_ratio hybrid_mlp_ratio
    heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json
""".split()

# The cut of attention's heads, which no shape of a weight shows: fact -> Megatron-LM's argument.
HEADS = {"heads": "num_attention_heads", "groups": "num_query_groups", "channels": "kv_channels"}
# Arguments that change the arithmetic without changing any weight.
UNPROVEN = """
    swiglu squared_relu activation layernorm_epsilon apply_layernorm_1p
    position_embedding_type rotary_base rotary_percent rotary_interleaved
""".split()
UNPROVEN_OF_EXPERTS = """
    moe_router_topk moe_router_pre_softmax moe_router_score_function moe_router_topk_scaling_factor
""".split()
ALMOST = 1e-5  # relative difference of a number that was once rounded to 32 bits
# Activations, by their names in torch, Megatron and Hugging Face's config.json. All approximations of gelu are equal.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu": "relu", "relu2": "squared_relu", "squared_relu": "squared_relu"}
ACTIVATIONS |= dict.fromkeys(("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "fast_gelu"), "gelu")


@dataclass
class ModelFacts:
    """The facts about one model. 0, "" and None stand for unknown ones."""

    dtype: str = ""
    """The type of its parameters, if they have one."""
    heads: int = 0
    groups: int = 0
    """Groups of heads that share keys and values."""
    channels: int = 0
    """The size of a head."""
    gated: bool | None = None
    """Its layers are gated."""
    vocabulary: int = 0
    """The size without padding."""
    arguments: PlainValues = field(default_factory=dict)
    """Megatron-LM's arguments for it."""

    @classmethod
    def of(cls, saved: Mapping[str, object]) -> ModelFacts:
        """Read the facts of a checkpoint. Raises TypeError."""
        dtype, gated = saved.get("dtype"), saved.get("gated")
        return cls(
            dtype if isinstance(dtype, str) else "",
            number_in(saved, "heads"),
            number_in(saved, "groups"),
            number_in(saved, "channels"),
            gated if isinstance(gated, bool) else None,
            number_in(saved, "vocabulary"),
            values_in(saved, "arguments"),
        )

    def or_else(self, others: ModelFacts) -> ModelFacts:
        """Return these facts, with those of `others` in place of unknown ones."""
        unknown = vars(ModelFacts())
        known = {name: value for name, value in vars(self).items() if value != unknown[name]}
        arguments = {name: value for name, value in self.arguments.items() if value is not None}
        return replace(others, **known | {"arguments": others.arguments | arguments})


def other_heads(there: ModelFacts, mine: ModelFacts, here: str = "here") -> str:
    """Describe how the other model's heads are cut differently; "" if they are not, or it is unknown. here: the place
    of this model, in words."""
    for fact, argument in HEADS.items():
        one, other = getattr(there, fact), getattr(mine, fact)
        if one and other and one != other:
            return f"its {argument} is {one}, and {here} it is {other}"
    return ""


def other_arithmetic(there: Mapping[str, object], mine: Mapping[str, object], here: str = "here") -> list[str]:
    """List differences between the arithmetic of two models that no weight shows. there, mine: Megatron-LM's arguments.
    here: the place of this model, in words."""
    names = [*UNPROVEN, *(UNPROVEN_OF_EXPERTS if mine.get("num_experts") else ())]
    if there.get("activation") and mine.get("activation"):
        names = [name for name in names if name not in ("swiglu", "squared_relu")]
    if {there.get("position_embedding_type"), mine.get("position_embedding_type")}.isdisjoint({"rope", "yarn"}):
        names = [name for name in names if not name.startswith("rotary_")]
    return [
        f"{name} is {there[name]} there, and {here} it is {mine[name]}"
        for name in names
        if there.get(name) is not None and mine.get(name) is not None and not _equal(there[name], mine[name])
    ]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=ALMOST)
    return bool(one == other)


def model_facts(model: Sequence[Any]) -> ModelFacts:
    """Return the facts about a model: the type of its parameters, and the others for a Megatron model."""
    kinds: set[str] = set()
    config, found_in = None, None
    for chunk in model:
        module = getattr(chunk, "module", chunk)
        kinds |= {str(each.dtype).removeprefix("torch.") for each in module.parameters()}
        if hasattr(module, "sharded_state_dict"):
            config, found_in = getattr(module, "config", None), module
    dtype = kinds.pop() if len(kinds) == 1 else ""
    if config is None or not getattr(config, "num_attention_heads", None):
        return ModelFacts(dtype)
    heads = int(config.num_attention_heads)
    return ModelFacts(
        dtype,
        heads,
        groups=int(getattr(config, "num_query_groups", None) or heads),
        channels=int(getattr(config, "kv_channels", None) or 0),
        gated=bool(getattr(config, "gated_linear_unit", False)),
        arguments=_arguments(config, getattr(found_in, "module", found_in)),
    )


def _arguments(config: Any, model: Any) -> PlainValues:
    """Return the arguments with which Megatron-LM would build the model, whose script need not be Megatron-LM's."""
    found = {name: getattr(config, name, None) for name in OF_CONFIG}
    found |= {name: getattr(config, its, None) for name, its in OTHER_NAMES.items()}
    found |= {name: getattr(model, its, None) for name, its in OF_MODEL.items()}
    groups, heads = getattr(config, "num_query_groups", None), config.num_attention_heads
    activation = getattr(getattr(config, "activation_func", None), "__name__", "")
    found |= {"num_query_groups": groups or heads, "group_query_attention": (groups or heads) != heads}
    found["swiglu"] = bool(getattr(config, "gated_linear_unit", False)) and activation == "silu"
    found["squared_relu"] = activation == "squared_relu"
    found["activation"] = ACTIVATIONS.get(activation)
    if (shared := getattr(model, "share_embeddings_and_output_weights", None)) is not None:
        found["untie_embeddings_and_output_weights"] = not shared
    return {name: value for name, value in found.items() if _plain(value)}


def of_megatron_lm(args: Any) -> PlainValues:
    """Return the arguments of Megatron-LM that describe the model."""
    names = (*OF_CONFIG, *OTHER_NAMES, *OF_MODEL, *OTHERS)
    return {name: value for name in names if _plain(value := getattr(args, name, None))}


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_plain(each) for each in value)
    return isinstance(value, bool | int | float | str)
