"""A stand-in for Megatron-LM's `pretrain_gpt.py`, which is no package that tests could install.

The model, its optimizer, schedules and datasets are megatron-core's own; `megatron/training` beside this file has the
seams of the real one, by the same names and parameters, and waits for other ranks where that does. It knows nothing
of Unicron. What it takes are the options of `sbatch_templates/train_gpt.py`, and a few of the real one's.
"""

from megatron.training import (
    SINCE_18,
    forward_step,
    model_provider,
    parse_and_validate_args,
    pretrain,
    train_valid_test_datasets_provider,
)

if __name__ == "__main__":
    if SINCE_18:
        parse_and_validate_args()
    pretrain(train_valid_test_datasets_provider, model_provider, None, forward_step)
