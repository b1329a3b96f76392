"""Tables of names: a model of Hugging Face's under Megatron's names, and back."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.texts import masked, raises_text
from unicron_transition.snapshot import foreign
from unicron_transition.snapshot.formats import convert, megatron_arguments, names, opening
from unicron_transition.snapshot.formats.index import BadCheckpoint
from unicron_transition.snapshot.model_facts import ModelFacts

HEADS, GROUPS, SIZE, HIDDEN, INNER, WORDS, LAYERS = 4, 2, 3, 12, 20, 11, 2
NAMED = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS}
BUFFERS = ("bias", "masked_bias")  # of old releases of transformers
QKV = "decoder.layers.self_attention.linear_qkv.weight"


def llama() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    made = {"model.embed_tokens.weight": (WORDS, HIDDEN), "model.norm.weight": (HIDDEN,)}
    made["lm_head.weight"] = (WORDS, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        made |= {f"{at}.input_layernorm.weight": (HIDDEN,), f"{at}.post_attention_layernorm.weight": (HIDDEN,)}
        made[f"{at}.self_attn.q_proj.weight"] = (HEADS * SIZE, HIDDEN)
        made |= {f"{at}.self_attn.{one}_proj.weight": (GROUPS * SIZE, HIDDEN) for one in "kv"}
        made[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * SIZE)
        made |= {f"{at}.mlp.{one}_proj.weight": (INNER, HIDDEN) for one in ("gate", "up")}
        made[f"{at}.mlp.down_proj.weight"] = (HIDDEN, INNER)
    return {name: torch.randn(shape).bfloat16() for name, shape in made.items()}


def gpt2() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    made = {"transformer.wte.weight": (WORDS, HIDDEN), "transformer.wpe.weight": (7, HIDDEN)}
    made |= {f"transformer.ln_f.{one}": (HIDDEN,) for one in ("weight", "bias")}
    for layer in range(LAYERS):
        at = f"transformer.h.{layer}"
        made |= {f"{at}.ln_{one}.{kind}": (HIDDEN,) for one in (1, 2) for kind in ("weight", "bias")}
        for name, inside, outside in (
            ("attn.c_attn", HIDDEN, 3 * HIDDEN),
            ("attn.c_proj", HIDDEN, HIDDEN),
            ("mlp.c_fc", HIDDEN, INNER),
            ("mlp.c_proj", INNER, HIDDEN),
        ):
            made |= {f"{at}.{name}.weight": (inside, outside), f"{at}.{name}.bias": (outside,)}
    return {name: torch.randn(shape) for name, shape in made.items()}


def saved(folder, tensors, **config):
    """A folder as Hugging Face has it."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def of_llama(tmp_path):
    return saved(tmp_path / "hf", llama(), **NAMED, head_dim=SIZE, vocab_size=WORDS)


def same(folder, wanted) -> None:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("pickled", [False, True])
def test_a_llama_comes_back_bit_for_bit(tmp_path, of_llama, pickled):
    if pickled:
        (of_llama / "model.safetensors").unlink()
        torch.save(llama(), of_llama / "pytorch_model.bin")
    convert.import_(opening.index_of(of_llama), tmp_path / "own")
    index = opening.index_of(tmp_path / "own")
    assert index.tensors[QKV].shape == (LAYERS, (HEADS + 2 * GROUPS) * SIZE, HIDDEN)
    convert.export(index, tmp_path / "back", "safetensors")
    same(tmp_path / "back", llama())


def test_queries_keys_and_values_lie_by_groups_in_megatron(of_llama):
    found = names.rename(opening.index_of(of_llama), "", ModelFacts())
    rows = torch.from_numpy(found.tensors[QKV].read().copy()).view(torch.bfloat16)[1]
    q, k, v = (llama()[f"model.layers.1.self_attn.{one}_proj.weight"].view(-1, SIZE, HIDDEN) for one in "qkv")
    wanted = torch.cat([torch.cat([q[2 * g : 2 * g + 2], k[g : g + 1], v[g : g + 1]]) for g in range(GROUPS)])
    assert torch.equal(rows, wanted.reshape(-1, HIDDEN))
    gate, up = (llama()[f"model.layers.0.mlp.{one}_proj.weight"] for one in ("gate", "up"))
    both = found.tensors["decoder.layers.mlp.linear_fc1.weight"].read((0, 0, 0), (1, 2 * INNER, HIDDEN)).copy()
    assert torch.equal(torch.from_numpy(both).view(torch.bfloat16)[0], torch.cat([gate, up]))


def test_a_gpt2_comes_back_bit_for_bit_and_its_columns_are_rows(tmp_path):
    folder = saved(tmp_path / "hf", gpt2(), n_head=HEADS)
    index = names.rename(opening.index_of(folder), "", ModelFacts())
    proj = index.tensors["decoder.layers.mlp.linear_fc2.weight"].read()
    assert np.array_equal(proj[1], gpt2()["transformer.h.1.mlp.c_proj.weight"].numpy().T)
    convert.import_(opening.index_of(folder), tmp_path / "own")
    convert.export(opening.index_of(tmp_path / "own"), tmp_path / "back", "safetensors")
    same(tmp_path / "back", gpt2())


@pytest.mark.parametrize("made", [llama, gpt2])
def test_a_model_that_is_saved_without_its_head_lacks_a_prefix(tmp_path, made, snapshot):
    whole = made()
    whole.pop("lm_head.weight", None)
    base = {name.partition(".")[2]: tensor for name, tensor in whole.items()}
    buffers = {f"h.{layer}.attn.{name}": torch.ones(1, 1, 7, 7) for layer in range(LAYERS) for name in BUFFERS}
    about = NAMED | ({} if made is llama else {"num_key_value_heads": HEADS})
    folder = saved(tmp_path / "hf", base | (buffers if made is gpt2 else {}), **about)
    convert.import_(opening.index_of(folder), tmp_path / "own")
    convert.export(opening.index_of(tmp_path / "own"), tmp_path / "back", "safetensors", made.__name__)
    same(tmp_path / "back", whole)
    save_file(base | {"extra.weight": torch.ones(2)}, folder / "model.safetensors")
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        names.rename(opening.index_of(folder), "", ModelFacts())


@pytest.mark.parametrize("through", ["", "own", "dcp"])
@pytest.mark.parametrize("made", [llama, gpt2])
def test_megatron_lm_finds_the_arguments_that_it_compares(tmp_path, made, through, snapshot):
    """Defect: num_layers was None and swiglu False, so that it was loaded with --finetune alone."""
    about = NAMED | ({} if made is llama else {"num_key_value_heads": HEADS})
    about |= {"max_position_embeddings": 77, "hidden_act": "silu", "rope_theta": 5e5} if made is llama else {}
    folder = saved(tmp_path / "hf", made(), **about)
    if through:
        convert.import_(opening.index_of(folder), tmp_path / "own")
        folder = tmp_path / "own"
    if through == "dcp":
        convert.export(opening.index_of(folder), tmp_path / "dcp", "dcp")
        folder = tmp_path / "dcp"
    lines: list[str] = []
    convert.export(opening.index_of(folder), tmp_path / "out", "torch_dist", say=lines.append)
    told = torch.load(tmp_path / "out" / "release" / "common.pt", weights_only=False)["args"]
    wanted = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "ffn_hidden_size": INNER}
    wanted |= {"padded_vocab_size": WORDS, "no_save_optim": True}
    if made is llama:
        wanted |= {"num_query_groups": GROUPS, "group_query_attention": True, "swiglu": True, "rotary_base": 500000}
        wanted |= {"normalization": "RMSNorm", "add_bias_linear": False, "position_embedding_type": "rope"}
        wanted |= {"untie_embeddings_and_output_weights": True, "max_position_embeddings": 77}
    else:
        wanted |= {"group_query_attention": False, "normalization": "LayerNorm", "add_bias_linear": True}
        wanted |= {"untie_embeddings_and_output_weights": False, "max_position_embeddings": 7}
        wanted |= {"position_embedding_type": "learned_absolute"}
    assert {name: getattr(told, name, "missing") for name in wanted} == wanted
    assert lines == snapshot


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_scaled_rotary_embedding_is_said(tmp_path, key):
    lines: list[str] = []
    about = NAMED | {key: {"rope_type": "llama3", "factor": 8.0}}
    index = opening.index_of(saved(tmp_path / "hf", llama(), **about))
    convert.export(index, tmp_path / "out", "torch_dist", say=lines.append)
    assert sum("--use-rope-scaling" in line for line in lines) == 1


def test_arguments_that_are_not_known_are_said(tmp_path, snapshot):
    tensors = {"embedding.word_embeddings.weight": torch.ones(3, 2)}
    lines: list[str] = []
    convert.export(opening.index_of(saved(tmp_path / "in", tensors)), tmp_path / "out", "torch_dist", say=lines.append)
    assert lines == snapshot


def test_gpt2_as_it_is_on_the_hub_with_a_head_beside_it(tmp_path):
    base = {name.removeprefix("transformer."): tensor for name, tensor in gpt2().items()}
    folder = saved(tmp_path / "hf", base | {"lm_head.weight": torch.ones(WORDS, HIDDEN)}, n_head=HEADS)
    found = names.rename(opening.index_of(folder), "", ModelFacts())
    assert found.tensors["output_layer.weight"].read().all()
    assert found.tensors[QKV].shape == (LAYERS, 3 * HIDDEN, HIDDEN)


def test_consolidated_files_of_mistrals_are_not_read_beside_others_and_alone_refused(tmp_path, of_llama):
    save_file({"tok_embeddings.weight": torch.ones(3, 2)}, of_llama / "consolidated.safetensors")
    assert "tok_embeddings.weight" not in opening.index_of(of_llama).tensors
    (of_llama / "model.safetensors").unlink()
    index = opening.index_of(of_llama)
    for refused in (
        lambda: names.rename(index, "", ModelFacts()),
        lambda: convert.import_(index, tmp_path / "own"),
        lambda: convert.export(index, tmp_path / "out", "torch_dist"),
    ):
        with pytest.raises(BadCheckpoint, match=r"take the repository's model\*\.safetensors"):
            refused()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_a_tensor_without_a_place_is_no_tensor_left_out(tmp_path, snapshot):
    folder = saved(tmp_path / "hf", llama() | {"model.extra.weight": torch.ones(2)}, **NAMED)
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        names.rename(opening.index_of(folder), "llama", ModelFacts(groups=GROUPS))


def test_a_table_of_ones_own(tmp_path, of_llama):
    (tmp_path / "mine.toml").write_text('like = "llama"\n"decoder.final_layernorm.weight" = "model.last.weight"\n')
    convert.import_(opening.index_of(of_llama), tmp_path / "own")
    convert.export(opening.index_of(tmp_path / "own"), tmp_path / "out", "safetensors", str(tmp_path / "mine.toml"))
    wanted = llama()
    wanted["model.last.weight"] = wanted.pop("model.norm.weight")
    same(tmp_path / "out", wanted)
    (tmp_path / "bad.toml").write_text('[x]\n"decoder.final_layernorm.weight" = { lines = ["a"] }\n')
    with pytest.raises(BadCheckpoint, match="write rows or qkv"):
        names.tables(tmp_path / "bad.toml")


def test_the_number_of_heads_has_to_be_known(tmp_path, snapshot):
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        names.rename(opening.index_of(saved(tmp_path / "hf", llama())), "", ModelFacts())


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 1), (2, 2), (8, 2)])
def test_heads_that_the_tensors_do_not_have_are_refused(tmp_path, heads, groups, snapshot):
    """Defect: with too few groups queries were read out of the bytes that follow them, without a word."""
    folder = saved(tmp_path / "hf", llama(), num_attention_heads=heads, num_key_value_heads=groups)
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        convert.import_(opening.index_of(folder), tmp_path / "own")
    assert not (tmp_path / "own").exists()


def test_a_gate_and_its_up_projection_have_as_many_rows(tmp_path, snapshot):
    cut = llama() | {"model.layers.0.mlp.gate_proj.weight": torch.zeros(INNER - 2, HIDDEN).bfloat16()}
    folder = saved(tmp_path / "hf", cut, **NAMED)
    with raises_text(BadCheckpoint, snapshot, tmp_path):
        convert.import_(opening.index_of(folder), tmp_path / "own")


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"rope_theta": 5e5}, {"rotary_base": 500000, "rotary_percent": 1.0, "use_rope_scaling": False}),
        ({"rope_theta": 5e5, "partial_rotary_factor": 0.5}, {"rotary_percent": 0.5}),
        (
            {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.25, "rope_type": "llama3"}},
            {"rotary_base": 500000, "rotary_percent": 0.25, "use_rope_scaling": True},
        ),
        ({"rope_parameters": {"full": {"rope_type": "yarn"}, "sliding": {}}}, {"use_rope_scaling": True}),
    ],
)
def test_what_config_json_says_of_the_rotary_embedding(tmp_path, config, wanted):
    """Defect: a partial one under `rope_parameters` counted as a whole one."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found = megatron_arguments.of_config(path)
    assert {name: found.get(name) for name in wanted} == wanted


def test_another_model_in_config_json_is_said_at_the_begin(tmp_path, capfd, snapshot):
    config = {"rope_theta": 5e5, "hidden_act": "gelu"}
    folder = saved(tmp_path / "hf", llama(), **config)
    mine = {"rotary_base": 10000, "rotary_percent": 1.0, "swiglu": True}
    foreign._say_unproven(folder, opening.index_of(folder), mine)
    said = capfd.readouterr().err
    assert sorted(masked(said, tmp_path).splitlines()) == snapshot
    foreign._say_unproven(folder, opening.index_of(folder), {"rotary_base": 500000, "swiglu": False})
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llama", "rms_norm_eps": 1e-5}, ["layernorm_epsilon is 1e-05 there, and here it is 1e-06"]),
        ({"model_type": "gemma", "rms_norm_eps": 1e-6}, ["says model_type gemma: does the model here compute so?"]),
        (
            {"model_type": "granite", "residual_multiplier": 0.22, "logits_scaling": 1.0},
            ["says model_type granite, residual_multiplier 0.22: does"],
        ),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, []),
        ({"model_type": "mistral", "sliding_window": 4096}, ["says sliding_window 4096: does"]),
        ({"model_type": "llama", "rms_norm_eps": 9.999999974752427e-07, "hidden_act": "silu"}, []),
        ({"model_type": "llama", "hidden_act": "relu"}, ["activation is relu there, and here it is silu"]),
        ({"model_type": "gpt2", "activation_function": "mish"}, ["says activation mish: does"]),
    ],
)
def test_what_no_weight_shows_of_another_models_arithmetic_is_said(tmp_path, capfd, config, said):
    """Defect: Gemma's and Granite's weights have Llama's names, and were trained as if they were Llama's."""
    folder = saved(tmp_path / "hf", llama(), **config)
    foreign._say_unproven(folder, opening.index_of(folder), {"layernorm_epsilon": 1e-6, "activation": "silu"})
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == len(said) and all(text in line for text, line in zip(said, lines, strict=True))
    lines = []
    folder = saved(tmp_path / "again", llama(), **NAMED, **config)
    convert.export(opening.index_of(folder), tmp_path / "out", "torch_dist", say=lines.append)
    assert sum("its options say" in line for line in lines) == sum("does" in each for each in said)
    told = torch.load(tmp_path / "out" / "release" / "common.pt", weights_only=False)["args"]
    assert not hasattr(told, megatron_arguments.NO_COUNTERPART)


def test_a_config_of_another_model_is_refused_and_fills_what_is_not_known(tmp_path, of_llama, snapshot):
    """Defect: it took the place of what the checkpoint itself said, and queries were cut at other places."""
    convert.import_(opening.index_of(of_llama), tmp_path / "own")
    config = tmp_path / "config.json"
    about = {"num_attention_heads": 2 * HEADS, "num_key_value_heads": GROUPS, "rope_theta": 77.0}
    config.write_text(json.dumps(about))
    for form in ("torch_dist", "safetensors"):
        with raises_text(BadCheckpoint, snapshot, tmp_path):
            convert.export(opening.index_of(tmp_path / "own"), tmp_path / form, form, config=config)
        assert not (tmp_path / form).exists()
    config.write_text(json.dumps(about | {"num_attention_heads": HEADS}))
    convert.export(opening.index_of(tmp_path / "own"), tmp_path / "out", "torch_dist", config=config)
    told = torch.load(tmp_path / "out" / "release" / "common.pt", weights_only=False)["args"]
    assert told.rotary_base == 77 and told.num_attention_heads == HEADS


def test_a_config_does_not_hide_that_the_layers_are_not_gated(tmp_path, of_llama):
    """Defect: the layer of another model was cut into Llama's gate and up projections."""
    convert.import_(opening.index_of(of_llama), tmp_path / "own")
    index, lines = opening.index_of(tmp_path / "own"), list[str]()
    index.common.facts.gated = False
    convert.export(index, tmp_path / "out", "safetensors", config=of_llama / "config.json", say=lines.append)
    assert any("no table of names fits this model" in line for line in lines)


def test_what_no_weight_shows_is_said_by_an_import_and_kept(tmp_path, capfd, snapshot):
    """Defect: it was lost on the way, and a training from there said nothing."""
    folder = saved(tmp_path / "hf", llama(), **NAMED, model_type="gemma", rope_theta=5e5)
    lines: list[str] = []
    convert.import_(opening.index_of(folder), tmp_path / "own", say=lines.append)
    assert lines == snapshot
    index = opening.index_of(tmp_path / "own")
    foreign._say_unproven(tmp_path / "own", index, {"rotary_base": 10000, "position_embedding_type": "rope"})
    said = capfd.readouterr().err
    assert "rotary_base is 500000 there" in said and "says model_type gemma: does" in said


def test_a_table_for_names_that_are_megatrons_already_is_refused(tmp_path, of_llama):
    """Defect: it was not read, whatever it said."""
    convert.import_(opening.index_of(of_llama), tmp_path / "own")
    with pytest.raises(BadCheckpoint, match="leave --names out"):
        convert.export(opening.index_of(tmp_path / "own"), tmp_path / "out", "torch_dist", "no-such-file.toml")
