"""New memory for a state is asked for in huge pages."""

from __future__ import annotations

import errno
import io
import mmap
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.support.kept import kept
from unicron_transition.snapshot import parts
from unicron_transition.snapshot.checkpoint import load_image
from unicron_transition.snapshot.image_format import ALIGN, RAW, inventory
from unicron_transition.snapshot.migrate import TrainingState
from unicron_transition.snapshot.parts import HUGE, NewMemory

CPU = torch.device("cpu")
KERNEL_HAS_SOME = Path("/sys/kernel/mm/transparent_hugepage").exists()


def is_asked(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor was asked for in huge pages, by the kernel's own flags of it."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        if end:
            inside = int(begin, 16) <= tensor.data_ptr() < int(end, 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("memory of the process is in its list")


def bytes_of(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    return sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors)


def test_small_and_large_tensors_lie_apart_in_memory_that_is_asked_for_in_huge_pages(monkeypatch):
    monkeypatch.setattr(parts, "CHUNK", 2 * HUGE)
    memory, sizes = NewMemory(), [1, HUGE, 3, 5 * HUGE // 2, HUGE // 4, 7, 9 * HUGE, 0, 1]
    made = [memory.tensor(torch.Size([size]), torch.uint8, CPU).fill_(number) for number, size in enumerate(sizes)]
    assert [each.numel() for each in made] == sizes
    assert all((each == number).all() for number, each in enumerate(made)), "none writes to another one"
    used = [each for each in made if each.numel()]
    assert all(end <= begin for (_, end), (begin, _) in zip(bytes_of(used), bytes_of(used)[1:], strict=False))
    for each in used:
        assert each.data_ptr() % ALIGN == 0
        assert is_asked(each) == KERNEL_HAS_SOME


def test_each_tensor_has_its_own_storage_and_outlives_the_others():
    memory = NewMemory()
    made = {kind: memory.tensor(torch.Size([3, 5]), getattr(torch, kind), CPU) for kind in RAW}
    del memory
    for kind, each in made.items():
        assert each.shape == (3, 5) and each.dtype == getattr(torch, kind)
        assert each.untyped_storage().nbytes() == each.nbytes
    one = made.pop("float32").fill_(2.0)
    made.clear()
    torch.save(one, file := io.BytesIO())
    assert one.sum() == 30.0 and len(file.getvalue()) < 4096, "a saved moment takes no other one along"


def test_a_kernel_that_refuses_changes_nothing(monkeypatch):
    class Refuses(mmap.mmap):
        def madvise(self, *about: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refuses)
    assert NewMemory().tensor(torch.Size([3, HUGE]), torch.float32, CPU).fill_(2.0).sum() == 6 * HUGE


def test_a_tensor_elsewhere_is_torchs_own():
    assert NewMemory().tensor(torch.Size([2, 3]), torch.float32, torch.device("meta")).is_meta


def state_of_large_tensors() -> TrainingState:
    model = torch.nn.Linear(1024, 3 * HUGE // 4096, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    return TrainingState([SimpleNamespace(module=model)], optimizer, None)


def places_of(state: TrainingState) -> list[int]:
    (values,) = state.optimizer.state.values()
    return [values[key].data_ptr() for key in ("exp_avg", "exp_avg_sq")]


def test_a_new_process_fills_its_optimizer_there_and_one_that_has_its_memory_fills_that(tmp_path: Path):
    state, other = state_of_large_tensors(), state_of_large_tensors()
    kept(tmp_path, state, 4)
    (found,) = inventory(tmp_path)
    before = places_of(other)
    load_image(other, found.path)
    assert places_of(other) == before
    other.optimizer.state.clear()
    load_image(other, found.path)
    for mine, its in zip(state.optimizer.state.values(), other.optimizer.state.values(), strict=True):
        assert all(torch.equal(mine[key], its[key]) for key in ("step", "exp_avg", "exp_avg_sq"))
        assert all(is_asked(its[key]) == KERNEL_HAS_SOME for key in ("exp_avg", "exp_avg_sq"))
