"""A small GPT under a Session, with faults at exact points: what the rank tests run as a training script.

Environment: TINY_OUT a folder; TINY_FAULT a JSON list of {"slot", "incarnation", "iteration", "at", "count", "kind"}; TINY_OVERLAP=1.
`at` is "fetch" (before the count-th micro-batch), "reduce" (before the count-th all-reduce of the iteration), "step" (before the
optimizer), "import". `kind` is "kill", "raise", "hang" (SIGSTOP) or "gloo" (the peers' connections break, nobody dies).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

OUT = Path(os.environ["TINY_OUT"])
SLOT, INCARNATION = int(os.environ.get("UNICRON_SLOT", "0")), int(os.environ.get("UNICRON_INCARNATION", "0"))
FAULTS = [f for f in json.loads(os.environ.get("TINY_FAULT", "[]")) if f["slot"] == SLOT and f.get("incarnation", 0) == INCARNATION]
ITERATIONS, MICRO_BATCHES = int(os.environ.get("TINY_ITERATIONS", "5")), int(os.environ.get("TINY_MICRO_BATCHES", "8"))
SEQUENCE, VOCABULARY, SIZE = 32, 128, 2
now = {"iteration": -1, "fetch": 0, "reduce": 0, "step": 0, "import": 0}


def point(name: str) -> None:
    """A place where a fault may be wanted."""
    for fault in FAULTS:
        if fault["at"] == name and fault["iteration"] == now["iteration"] and fault.get("count", 0) == now[name]:
            FAULTS.remove(fault)
            strike(fault["kind"])
            break
    now[name] += 1


def strike(kind: str) -> None:
    """Fail in the wanted way."""
    import time

    (OUT / f"fault.{SLOT}.{INCARNATION}").write_text(repr(time.time()))
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "hang":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "gloo":
        from transition import session

        session._process.unblocker.unblock()
    else:
        raise ValueError("an error of the training script")


point("import")
import torch  # noqa: E402

torch.set_num_threads(1)
from sbatch_templates import cpu_adapter  # noqa: E402

cpu_adapter.install()
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

import transition  # noqa: E402


def build():
    """A two-layer GPT with Adam."""
    overlap = os.environ.get("TINY_OVERLAP") == "1"
    torch.manual_seed(1234)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=SEQUENCE, position_embedding_type="rope",
                     share_embeddings_and_output_weights=True)
    settings = DistributedDataParallelConfig(overlap_grad_reduce=overlap, bucket_size=20000 if overlap else None, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(config, settings, model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.01, clip_grad=1.0), [wrapped])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = wrapped.no_sync if overlap else None
    return wrapped, optimizer


POSITIONS = torch.arange(SEQUENCE)[None].expand(SIZE, -1)
MASK = torch.ones(1, 1, SEQUENCE, SEQUENCE).tril() < 0.5


def fetch(iteration: int, index: int):
    """Tokens of one micro-batch, shape (SIZE, SEQUENCE + 1)."""
    if iteration != now["iteration"]:
        now.update(iteration=iteration, fetch=0, reduce=0, step=0)
    point("fetch")
    generator = torch.Generator().manual_seed(1000003 * iteration + index)
    return torch.randint(0, VOCABULARY, (SIZE, SEQUENCE + 1), generator=generator)


def forward_step(data_iterator, model):
    """Megatron's forward step with the mean loss."""
    tokens = next(data_iterator)
    output = model(tokens[:, :-1].contiguous(), POSITIONS, MASK, labels=tokens[:, 1:].contiguous())

    def loss_function(values):
        loss = values.float().mean()
        return loss, {"lm loss": loss.detach().clone()}

    return output, loss_function


def main() -> None:
    """Train, and save each iteration's gradient, parameters and loss."""
    transition.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model, optimizer = build()
    all_reduce, step = dist.all_reduce, optimizer.step

    def counted_all_reduce(*arguments, **keywords):
        point("reduce")
        return all_reduce(*arguments, **keywords)

    def saving_step():
        point("step")
        gradient = torch.cat([p.main_grad.detach().float().reshape(-1) for p in model.module.parameters()]).clone()
        outcome = step()
        parameters = torch.cat([p.detach().float().reshape(-1) for p in model.module.parameters()])
        torch.save({"gradient": gradient, "parameters": parameters}, OUT / f"step.{now['iteration']}.{SLOT}")
        return outcome

    dist.all_reduce, optimizer.step = counted_all_reduce, saving_step
    session = transition.Session(model=[model], optimizer=optimizer, scheduler=None, micro_batches=MICRO_BATCHES, forward_step=forward_step, fetch=fetch,
                                 seq_length=SEQUENCE, micro_batch_size=SIZE, train_iterations=ITERATIONS)
    for result in session:
        with (OUT / f"losses.{SLOT}").open("a") as file:
            file.write(json.dumps({"iteration": result.iteration, "loss": result.loss, "generation": result.generation}) + "\n")


if __name__ == "__main__":
    main()
