"""A Llama of Hugging Face's names and shapes in plain torch, and the same weights in Megatron's GPTModel.

    llama.py FOLDER

makes the model in FOLDER/theirs (safetensors and config.json), begins from it as a session does, writes a checkpoint of
Unicron's in FOLDER/saves, and leaves both models' logits in FOLDER/logits.pt.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))
import torch  # noqa: E402

LAYERS, HIDDEN, HEADS, GROUPS, INNER, VOCABULARY, SEQUENCE = 4, 256, 8, 2, 688, 1024, 24
EPSILON, BASE = 1e-5, 10000.0
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "intermediate_size": INNER,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": EPSILON,
    "rope_theta": BASE,
}


def weights() -> dict[str, torch.Tensor]:
    """Random ones, the norms' too."""
    torch.manual_seed(7)
    size = HIDDEN // HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (GROUPS * size, HIDDEN),
        "self_attn.v_proj": (GROUPS * size, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    found = {name: torch.randn(VOCABULARY, HIDDEN) * 0.05 for name in ends}
    for layer in range(LAYERS):
        front = f"model.layers.{layer}."
        found |= {f"{front}{name}.weight": torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{front}{name}.weight"] = 1 + 0.3 * torch.randn(HIDDEN)
    found["model.norm.weight"] = 1 + 0.3 * torch.randn(HIDDEN)
    return found


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions, the halves of a head as pairs. Shape (batch, heads, sequence, size)."""
    size = x.shape[-1]
    angles = torch.outer(torch.arange(x.shape[-2]), BASE ** (-torch.arange(0, size, 2) / size))
    cos, sin = (torch.cat([each, each], -1) for each in (angles.cos(), angles.sin()))
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat([-other, one], -1) * sin


def forward(w: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """The logits of the tokens. Shapes (batch, sequence) and (batch, sequence, vocabulary)."""
    x = w["model.embed_tokens.weight"][tokens]
    batch, length = tokens.shape
    for layer in range(LAYERS):
        own = {name.removeprefix(f"model.layers.{layer}."): each for name, each in w.items()}
        y = norm(x, own["input_layernorm.weight"])
        q, k, v = (
            (y @ own[f"self_attn.{name}_proj.weight"].T).view(batch, length, -1, HIDDEN // HEADS).transpose(1, 2)
            for name in "qkv"
        )
        q, k = turned(q), turned(k)
        k, v = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).reshape(batch, length, HIDDEN) @ own["self_attn.o_proj.weight"].T
        y = norm(x, own["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(y @ own["mlp.gate_proj.weight"].T)
        x = x + (gate * (y @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def megatrons():
    """Megatron's model of that configuration, with other weights."""
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        ffn_hidden_size=INNER,
        normalization="RMSNorm",
        layernorm_epsilon=EPSILON,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        rotary_base=int(BASE),
        share_embeddings_and_output_weights=False,
    ).eval()


@torch.no_grad()
def main() -> None:
    """See above."""
    folder = Path(sys.argv[1])
    from safetensors.torch import save_file

    from sbatch_templates import cpu_adapter

    cpu_adapter.install()
    import torch.distributed as dist
    from megatron.core import parallel_state

    from unicron_transition.snapshot.checkpoint import Checkpoints
    from unicron_transition.snapshot.migrate import TrainingState

    (folder / "theirs").mkdir()
    save_file(weights(), folder / "theirs" / "model.safetensors", {"format": "pt"})
    (folder / "theirs" / "config.json").write_text(json.dumps(CONFIG))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model = megatrons()
    state = TrainingState([model], torch.optim.SGD(model.parameters(), lr=0.1), None)
    checkpoints = Checkpoints(folder / "saves", begin_from=folder / "theirs")
    assert checkpoints.load(state) == 0
    checkpoints.save_last(state, 0)
    tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE))
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).tril() < 0.5
    mine = model(tokens, torch.arange(SEQUENCE)[None].expand(2, -1), mask)
    torch.save({"theirs": forward(weights(), tokens), "mine": mine}, folder / "logits.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
