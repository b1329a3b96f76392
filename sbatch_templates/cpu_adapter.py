"""Run megatron-core on a machine without CUDA, for tests and demonstrations.

`install()` is the whole interface, and a training script calls it unconditionally. Where CUDA is available it only
defines a name that Megatron's experts look for without Transformer Engine. Elsewhere it replaces, in this process only,
what megatron-core asks of CUDA without a switch to turn it off. The rest of what a CPU run needs are ordinary options:
`use_cpu_initialization=True`, the local (non-TE) layer specification, gloo.

Tried with GPT training in fp32, bf16 and fp16, mixtures of experts with expert and sequence parallelism, and
multi-token prediction. Context parallelism, FSDP, CUDA graphs and checkpoints of the distributed optimizer need more
than this.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

WRITTEN_FOR = ("0.16", "0.17", "0.18", "0.19")

_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "full",
    "ones",
    "ones_like",
    "rand",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)


class _Stream:
    """The stream of a device that is done with everything at once, and any of its events."""

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


_MARK = "_unicron_cpu_adapter"  # on torch: this file may be imported under two names, `sbatch_templates.` and its own


def install() -> bool:
    """Patch torch and megatron-core for CPU; call it before anything else of megatron-core is used.

    Returns True when the patches are in place, False when CUDA is available and no patch is needed. Calling it again is
    harmless. Raises RuntimeError (one line) when megatron-core is absent or not a release that the patches were
    written for.
    """
    import torch

    if torch.cuda.is_available():
        if importlib.util.find_spec("megatron"):
            _patch_experts()
        return False
    if not hasattr(torch, _MARK):
        _check_release()
        _skip_fuser(torch)
        _patch_device(torch)
        _patch_factories(torch)
        _patch_tensor(torch)
        _patch_random(torch)
        _patch_experts()
        _patch_dispatchers()
        _patch_norms()
        setattr(torch, _MARK, True)
    return True


def _check_release() -> None:
    known = ", ".join(WRITTEN_FOR)
    try:
        found = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        raise RuntimeError(f"megatron-core is not installed; pip install megatron-core (one of {known})") from None
    if ".".join(found.split(".")[:2]) not in WRITTEN_FOR:
        raise RuntimeError(
            f"the CPU adapter was written for megatron-core {known}, not {found}; install one of these, or train on a "
            "GPU, where the adapter is not used"
        )


def _skip_fuser(torch: Any) -> None:
    # Megatron compiles its small functions for the GPU's sake. On a CPU nothing comes of it, but what torch.compile
    # imports for it is a third of a rank's start.
    def as_it_is(function: Callable | None = None, **_: Any) -> Callable:
        return function if function is not None else as_it_is

    compiler, torch.compile = torch.compile, as_it_is
    try:
        import megatron.core.jit  # noqa: F401
    finally:
        torch.compile = compiler


def _patch_device(torch: Any) -> None:
    cpu = torch.device("cpu")
    # Megatron allocates with device=torch.cuda.current_device() throughout; a torch.device serves there like an index.
    torch.cuda.current_device = lambda: cpu
    # Pipeline send and receive, and DDP's buffer off-loading, wait for the stream; on CPU everything is already done.
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.Stream = _Stream
    torch.cuda.current_stream = lambda device=None: _Stream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda self, stream: None


def _patch_factories(torch: Any) -> None:
    # Loss scale, gradient norm, token count and causal mask are created with a literal device='cuda'.
    cpu = torch.device("cpu")

    def on_cpu(factory: Callable) -> Callable:
        @functools.wraps(factory)
        def create(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            if device is not None and str(device).startswith("cuda"):
                kwargs["device"] = cpu
            return factory(*args, **kwargs)

        return create

    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _patch_tensor(torch: Any) -> None:
    # broadcast_data and the optimizers' reload move tensors with .cuda().
    torch.Tensor.cuda = lambda self, *args, **kwargs: self

    # Gradient clipping and the mixed precision optimizers tell dtypes apart by the text 'torch.cuda.FloatTensor'.
    plain_type = torch.Tensor.type

    @functools.wraps(plain_type)
    def type_as_cuda(self: Any, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is not None:
            return plain_type(self, dtype, **kwargs)
        return plain_type(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_as_cuda


def _patch_experts() -> None:
    # Without Transformer Engine the router looks for a name that is there only with it.
    from megatron.core.transformer.moe import moe_utils

    if not moe_utils.HAVE_TE:
        moe_utils.te_general_gemm = None


def _patch_dispatchers() -> None:
    # The all-to-all takes its sizes as numbers, of which Megatron makes an array only when it moves them from a GPU.
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and hasattr(tensor, "numpy") else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = numbers


def _patch_norms() -> None:
    # torch's norms do for sequence parallelism, too: Megatron only wants their parameters marked, whose gradients it
    # then sums over the tensor-parallel ranks. Mixtures of experts need it if there are several of these.
    from megatron.core.transformer import torch_norm

    build = torch_norm.WrappedTorchNorm.__new__

    def build_marked(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = build(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    torch_norm.WrappedTorchNorm.__new__ = build_marked


def _patch_random(torch: Any) -> None:
    # The RNG tracker saves, seeds and restores the CUDA generator; here the CPU generator takes its place.
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    def set_state(new_state: Any, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state

    class CpuRNGStatesTracker(megatron_random.CudaRNGStatesTracker):
        """Megatron's named generator states on the CPU generator.

        `add` and `fork` are overridden because Megatron's own read torch.cuda directly, and warn whenever the CPU
        generator moves inside a fork, which here is the purpose.
        """

        def add(self, name: str, seed: int) -> None:
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"random state {name!r} with seed {seed} exists already")
            self._is_initialized = True
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(int(seed)).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            if name not in self.states_:
                raise KeyError(f"random state {name!r} was never added")
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    megatron_random.CudaRNGStatesTracker = CpuRNGStatesTracker
