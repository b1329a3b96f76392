#!/usr/bin/env bash
# lm-resiliency 0.2.0 with torch 2.13.0: SCOUT and GEMINI on a healthy model of two layers, three steps, two ranks on CPUs.
#
# Seen (2026-11-29): the embedding is called `tokens`, which is not among the names that SCOUT looks for (embed_tokens, wte,
#   tok_embeddings, embed ...). So its recipe "embedding" is never ready, each check is inconclusive, and each is reported as
#   silent corruption of all ranks: {"kind": "sdc", "failed_ranks": [0, 1], ...}. A step that is not accepted is not captured
#   either, so there is never a checkpoint. Nothing says which name was missing.
# Expected: the recipe is left out, or one line at the start; as it is, embedding_check_interval=0 must be set by hand.
# Why it matters: a manager that acts on such a report takes healthy nodes, and the job has no state to go back to. On CPUs
#   the replay itself cannot run (it calls torch.cuda); the comparison that fails here comes before it.
#
# Needs python3 (3.10 to 3.12) with venv, and PyPI. Fails if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir torch==2.13.0 numpy lm-resiliency==0.2.0
cat >train.py <<'PYTHON'
import os

import torch
import torch.distributed as dist
from lm_resiliency import InMemoryCkptConfig
from lm_resiliency.integrations.pytorch import enable_resiliency
from lm_resiliency.manager_api import OrchestrationHooks
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 16)

    def forward(self, tokens):
        states = self.tokens(tokens)
        for layer in self.layers:
            states = layer(states)
        return self.head(states)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters())
    reports = []
    handle = enable_resiliency(
        model,
        optimizer,
        interval=1,
        checkpoint=InMemoryCkptConfig(pin_memory=False, disk_folder="gemini"),
        group=dist.new_group(backend="gloo"),
        nccl_group=dist.new_group(backend="gloo"),
        device=torch.device("cpu"),
        orchestration=OrchestrationHooks(report_fault=reports.append),
    )
    for _ in range(3):
        model(torch.arange(16)).sum().backward()
        optimizer.step()
    captured = handle.flush_for_restart()
    if os.environ["RANK"] == "0":
        print(len(reports), "reports in 3 steps:", reports[-1])
        print("step of the newest checkpoint:", captured)
    assert [(each["kind"], each["failed_ranks"]) for each in reports] == [("sdc", [0, 1])] * 3
    assert captured == -1
    handle.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
PYTHON
timeout 600 env/bin/torchrun --standalone --nproc-per-node 2 train.py 2>err || { tail -n 30 err; exit 1; }
