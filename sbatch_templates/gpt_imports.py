"""The imports of train_gpt.py before it trains, all at once, so that its ranks can start warm (UNICRON_PRELOAD
there)."""

from __future__ import annotations

import importlib
import os
import warnings

MODULES = (
    "torch.distributed",
    "torch.utils.data",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel",
    "unicron_transition.session.session",
)

warnings.filterwarnings("ignore", module="megatron")  # optional packages that a small model does without
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of what Megatron calls
if not os.path.exists("/dev/nvidiactl"):  # to ask torch for a GPU would open it, and then no process may be forked
    importlib.import_module(f"{__package__}.cpu_adapter" if __package__ else "cpu_adapter").install()
for name in MODULES:
    importlib.import_module(name)
