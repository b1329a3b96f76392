"""What cannot be healed is refused at the start, by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from megatron.core import parallel_state

from tests.support.texts import raises_text
from unicron_transition.generations.layout import Layout
from unicron_transition.megatron import supported
from unicron_transition.seams.table import UnsupportedLayout


def session_of(monkeypatch, sizes: dict[str, int], tied: bool = True, **settings) -> None:
    """Checks a model with these settings in Megatron's groups of these sizes; others are 1."""
    for kind in ("tensor_model", "context", "pipeline_model", "expert_model", "expert_tensor"):
        name = f"get_{kind}_parallel_world_size"
        monkeypatch.setattr(parallel_state, name, lambda kind=kind: sizes.get(kind, 1))
    tensor, pipeline = sizes.get("tensor_model", 1), sizes.get("pipeline_model", 1)
    config = SimpleNamespace(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        moe_router_load_balancing_type="aux_loss",
    )
    vars(config).update(settings)
    ddp = SimpleNamespace(use_distributed_optimizer=False, average_in_collective=False)
    module = SimpleNamespace(share_embeddings_and_output_weights=tied)
    chunk = SimpleNamespace(config=config, ddp_config=ddp, modules=lambda: [module])
    layout = Layout(tensor=tensor, context=sizes.get("context", 1), pipeline=pipeline)
    supported.check([chunk], SimpleNamespace(config=None), layout)


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ({}, {"fp16": True}),
        ({"pipeline_model": 2}, {"num_moe_experts": 4}),
        ({}, {"num_moe_experts": 4, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}),
        ({"tensor_model": 2, "expert_tensor": 2}, {"mtp_num_layers": 1}),
        ({"tensor_model": 2, "expert_tensor": 2}, {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall"}),
        ({"pipeline_model": 2}, {"mtp_num_layers": 1, "tied": False}),
    ],
)
def test_what_can_be_healed_is_not_refused(monkeypatch, sizes, settings):
    with pytest.raises(UnsupportedLayout, match="fp8"):
        session_of(monkeypatch, sizes, **settings, fp8="hybrid")
    session_of(monkeypatch, sizes, **settings)


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ({"context": 2}, {}),
        ({"expert_model": 2}, {"num_moe_experts": 4}),
        ({"expert_tensor": 2}, {"num_moe_experts": 4}),
        ({}, {"num_moe_experts": 4, "moe_router_load_balancing_type": "global_aux_loss"}),
        ({}, {"num_moe_experts": 4, "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]}),
        ({}, {"num_moe_experts": 4, "moe_enable_routing_replay": True}),
        ({}, {"num_moe_experts": 4, "moe_token_dispatcher_type": "flex"}),
        ({}, {"num_moe_experts": 4, "overlap_moe_expert_parallel_comm": True}),
        ({}, {"dsa_indexer_loss_coeff": 0.01}),
        ({"pipeline_model": 2}, {"mtp_num_layers": 1}),
        ({}, {"num_moe_experts": 4, "qk_clip": True}),
        ({}, {"fp8": "hybrid"}),
    ],
    ids=lambda given: "-".join(given) or "plain",
)
def test_what_cannot_be_healed_is_one_line_that_names_it(monkeypatch, snapshot, sizes, settings):
    with raises_text(UnsupportedLayout, snapshot) as refused:
        session_of(monkeypatch, sizes, **settings)
    assert "\n" not in str(refused.value)
