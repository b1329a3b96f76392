"""Of the stand-in: world, groups."""

import torch
from megatron.core import parallel_state

from .global_vars import get_args, set_global_variables
from .releases import SINCE_18, takes_more

if not SINCE_18:
    from .arguments import parse_args, validate_args


def initialize_megatron():
    if not SINCE_18:
        args = parse_args()
        validate_args(args)
        set_global_variables(args)
    _initialize_distributed(None, None, None)
    _compile_dependencies()


def _compile_dependencies():
    if torch.distributed.get_rank() == 0:
        print("> the helpers are compiled already", flush=True)
    torch.distributed.barrier()


@takes_more({"0.19": "skip_model_parallel_init"})
def _initialize_distributed(get_embedding_ranks, get_position_embedding_ranks, store):
    import gpt_options

    args = get_args()
    if torch.distributed.is_initialized():
        args.rank, args.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    else:
        torch.distributed.init_process_group(args.distributed_backend, world_size=args.world_size, rank=args.rank)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size, gpt_options.virtual_stages(args)
    )
