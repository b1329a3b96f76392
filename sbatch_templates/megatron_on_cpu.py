"""Runs a program of Megatron-LM's own (`pretrain_gpt.py`) on a machine without CUDA, for tests and demonstrations.

    python megatron_on_cpu.py pretrain_gpt.py --distributed-backend gloo --use-cpu-initialization ...
    python megatron_on_cpu.py -m unicron.transition.megatron_lm pretrain_gpt.py ...           (healed within the
    iteration)

Where CUDA is available it only runs the program. Elsewhere `cpu_adapter.py` does its part for megatron-core, and this
file the rest, for `megatron.training`. The Megatron-LM must be of the megatron-core release that is installed, whose
compiled dataset helpers take the place of its own. It imports triton, pydantic, pyyaml, six and regex, too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import runpy
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HELPERS = "megatron.core.datasets.helpers_cpp"
# Megatron's options without which nothing goes on a CPU; `--mock-data --tokenizer-type NullTokenizer` need no files.
OPTIONS = (
    "--distributed-backend gloo --use-cpu-initialization --transformer-impl local --attention-backend unfused "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion "
    "--num-workers 0 --rerun-mode disabled"
).split()


def install() -> bool:
    """Let `megatron.training` train without CUDA. False where CUDA is available, and nothing was done."""
    from cpu_adapter import install as adapt

    if not adapt():
        return False
    import torch

    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    _pretend_device(torch)
    _take_installed_helpers()
    _skip_kernels()
    return True


def _pretend_device(torch: Any) -> None:
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    # Megatron-LM asks older ones for CUDA_DEVICE_MAX_CONNECTIONS=1, which is about the order of kernels.
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(major=10, minor=0)


def _take_installed_helpers() -> None:
    """The compiled helpers of the installed megatron-core: a checkout has their source only."""
    for folder in sys.path:
        for path in Path(folder, "megatron", "core", "datasets").glob("helpers_cpp.*.so"):
            spec = importlib.util.spec_from_file_location(HELPERS, path)
            assert spec is not None and spec.loader is not None
            sys.modules[HELPERS] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            import megatron.core.datasets.utils as utils

            utils.compile_helpers = lambda: None
            return


def _skip_kernels() -> None:
    """CUDA kernels that Megatron-LM compiles at its start (not since 0.17), and its question whether there is CUDA."""
    with contextlib.suppress(ImportError):
        from megatron.legacy import fused_kernels

        fused_kernels.load = lambda args: None
    training = importlib.import_module("megatron.training.training")
    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)


def main() -> None:
    """`[-m MODULE | SCRIPT] ARGUMENTS`, as Python takes them."""
    words = sys.argv[1:]
    if not words or words == ["-m"]:
        sys.exit("megatron_on_cpu: write `python megatron_on_cpu.py pretrain_gpt.py ...`")
    module = words.pop(0) if words[0] == "-m" else None
    script = next((word for word in words if word.endswith(".py")), None)
    if script is not None:
        sys.path.insert(1, str(Path(script).resolve().parent))
    warnings.filterwarnings("ignore", module="megatron")
    install()
    sys.argv = words
    if module is None:
        del sys.path[0]
        runpy.run_path(words[0], run_name="__main__")
    else:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
