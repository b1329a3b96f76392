"""The five multi-task cases of Unicron's evaluation (recalled): six GPT-3 tasks on 16 nodes of eight A800.

T(t,x) is not in the paper's text that we have: it comes from the analytic cost model (problem.megatron_costs), with the
layer counts and widths of GPT-3 (arXiv 2005.14165, table 2.1).
"""

from __future__ import annotations

from functools import lru_cache

from unicron_planner.problem.megatron_costs import A800, Gpt
from unicron_planner.problem.objective import Job, Scenario
from unicron_planner.problem.throughput import model_flops

MODELS = {
    "1.3b": Gpt(24, 2048, 16, global_batch=512),
    "7b": Gpt(32, 4096, 32, global_batch=512),
    "13b": Gpt(40, 5120, 40, global_batch=512),
}
MIXTURE = ("1.3b", "1.3b", "1.3b", "7b", "7b", "13b")
WEIGHTS = (0.5, 0.8, 1.1, 1.4, 1.7, 2.0)
CASES: dict[int, tuple[tuple[str, ...], tuple[float, ...]]] = {
    1: (("7b",) * 6, (1.0,) * 6),
    2: (MIXTURE, (1.0,) * 6),
    3: (("7b",) * 6, WEIGHTS),
    4: (MIXTURE, WEIGHTS),
    5: (MIXTURE, WEIGHTS[::-1]),
}
NODES, CASE = 16, 5
MTBF_NODE_HOURS = 24 * 1000 / 6.50  # Meta RSC-1 (arXiv 2410.21680): 6.50 failures per 1,000 node-days
TRANSITION_SECONDS = 60.0  # our target for one transition of a model of these sizes


@lru_cache(maxsize=16)
def _flops(model: str, nodes: int) -> dict[int, float]:
    return model_flops(MODELS[model], A800, range(1, nodes + 1))


def case(number: int = CASE, nodes: int = NODES, all_run: bool = False) -> Scenario:
    """One of the five cases. Jobs are named after their place and size, for example task4-7b.

    all_run: each job keeps a node, as in the controller's plans (`unicron_ctl.controller.plan.planning`). Without it
    the plan of most FLOP/s of cases 3 to 5 leaves four of the six jobs without any.
    """
    models, weights = CASES[number]
    jobs = tuple(
        Job(name=f"task{i}-{model}", weight=weight, flops=_flops(model, nodes), must_run=all_run)
        for i, (model, weight) in enumerate(zip(models, weights, strict=True), 1)
    )
    return Scenario(nodes=nodes, jobs=jobs, mtbf_node_hours=MTBF_NODE_HOURS, transition_seconds=TRANSITION_SECONDS)
