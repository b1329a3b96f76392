"""Of the stand-in: arguments. From 0.18 on the script reads them, before it begins the training."""

import os
import sys

from .global_vars import set_global_variables

OWN = {  # of the real script's options those that the template has not
    "--eval-iters": ("eval_iters", 0),
    "--eval-interval": ("eval_interval", 1000),
    "--non-persistent-save-interval": ("non_persistent_save_interval", None),
    "--exit-interval": ("exit_interval", None),
    "--save-dir": ("save", None),
    "--load-dir": ("load", None),
    "--tensorboard-dir": ("tensorboard_dir", None),
    "--finetune": ("finetune", 0),
    "--dies": ("dies", None),  # the test's: rank 0 between two iterations; "iteration file", which it touches
    "--log-params-norm": ("log_params_norm", 0),
    "--log-straggler": ("log_straggler", 0),
    "--check-weight-hash-across-dp-replicas-interval": ("check_weight_hash_across_dp_replicas_interval", None),
    "--rampup-batch-size": ("rampup_batch_size", None),  # from 0.18 on nothing reads it
}


def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    import gpt_options

    words, own = [], {name: default for name, default in OWN.values()}
    given = iter(sys.argv[1:])
    for word in given:
        if word in OWN:
            text = next(given)
            own[OWN[word][0]] = int(text) if text.isdigit() else text.split() if " " in text else text
        else:
            words.append(word)
    args = gpt_options.parse(words)
    vars(args).update(own)
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args.local_rank, args.distributed_backend = 0, "gloo"
    args.train_iters = args.train_iterations
    args.global_batch_size = args.micro_batches * args.micro_batch_size
    args.context_parallel_size, args.dataloader_type = 1, "single"
    args.exit_signal_handler, args.exit_duration_in_mins = True, None
    args.iteration = args.consumed_train_samples = args.consumed_valid_samples = 0
    return args


def validate_args(args, defaults=None):
    total = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    assert args.world_size % total == 0
    args.data_parallel_size = args.world_size // total
    return args


def parse_and_validate_args():
    args = parse_args()
    validate_args(args)
    set_global_variables(args)
