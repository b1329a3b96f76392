"""The transfer of the training state between ranks that are threads: what arrives corrupted is never kept."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from tests.support.texts import raises_text
from unicron_transition.snapshot import migrate, tensor_transfer

SIZES = (20, 24, 44)  # bytes of the two tensors of a State, and of both


class World:
    """Collectives between threads, in place of torch.distributed. `damage(sender, number)` may spoil a broadcast."""

    class ReduceOp:
        MIN = MAX = None

    def __init__(self, size: int, damage=lambda sender, number: False):
        self.size, self.damage = size, damage
        self.ranks = threading.local()
        self.barrier = threading.Barrier(size, timeout=10)
        self.box: dict = {}
        self.number = 0

    def get_rank(self, group=None) -> int:
        return self.ranks.me

    def get_world_size(self, group=None) -> int:
        return self.size

    def broadcast(self, tensor: torch.Tensor, group=None, group_src: int = 0) -> None:
        source = group_src
        if self.get_rank() == source:
            sent = tensor.clone()
            if self.damage(source, self.number) and sent.numel() in SIZES:
                sent[0] ^= 1
            self.box["sent"] = sent
            self.number += 1
        self.barrier.wait()
        if self.get_rank() != source:
            tensor.copy_(self.box["sent"])
        self.barrier.wait()

    def all_reduce(self, tensor: torch.Tensor, group=None) -> None:
        self.box[self.get_rank()] = tensor.clone()
        self.barrier.wait()
        tensor.copy_(sum(self.box[rank] for rank in range(self.size)))
        self.barrier.wait()


class State:
    """A training state of two tensors."""

    def __init__(self, value: float):
        self.parts, self.rate = [torch.full((5,), value), torch.full((2, 3), value)], 3

    def header(self, iteration: int) -> bytes:
        return iteration.to_bytes(4, "big")

    def adopt(self, header: bytes) -> int:
        return int.from_bytes(header, "big")

    def tensors(self):
        return iter(self.parts)

    def settings(self) -> torch.Tensor:
        return torch.tensor([1, self.rate])

    @property
    def value(self) -> float:
        return float(self.parts[0][0])


def run(monkeypatch, values, newcomers, damage=lambda sender, number: False, moved=lambda size: None):
    """Transfers between ranks that hold `values`; returns each rank's state, its outcome and the notes."""
    size = len(values)
    world, states = World(size, damage), [State(value) for value in values]
    monkeypatch.setattr(migrate, "dist", world)
    monkeypatch.setattr(tensor_transfer, "dist", world)
    holders = [rank for rank in range(size) if rank not in newcomers]
    outcomes: list = [None] * size
    notes: list = []

    def rank(me: int) -> None:
        world.ranks.me = me
        try:
            outcomes[me] = migrate.transfer(
                states[me],
                7 if me in holders else 0,
                holders[0],
                me in newcomers,
                torch.device("cpu"),
                holders,
                None,
                lambda *what: notes.append((me, *what)),
                moved,
            )
        except (RuntimeError, threading.BrokenBarrierError) as error:
            outcomes[me] = error

    threads = [threading.Thread(target=rank, args=(me,)) for me in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return states, outcomes, notes


@pytest.fixture(params=[1, 2])
def parts(request, monkeypatch) -> int:
    """In how many parts the two tensors are sent: together, or each alone."""
    if request.param == 2:
        monkeypatch.setattr(migrate, "TOGETHER", SIZES[0])
    return request.param


def test_newcomers_get_the_state_and_the_iteration(monkeypatch, parts):
    states, outcomes, notes = run(monkeypatch, [1.5, 1.5, 0.0, 9.0], {2, 3})
    assert [state.value for state in states] == [1.5] * 4 and outcomes == [7] * 4 and not notes


def test_a_large_tensor_goes_in_pieces_and_each_is_told_of(monkeypatch):
    monkeypatch.setattr(tensor_transfer, "PIECE", 8)  # two float32
    moved: list[int] = []
    states, outcomes, _ = run(monkeypatch, [1.5, 0.0], {1}, moved=moved.append)
    assert [state.value for state in states] == [1.5] * 2 and outcomes == [7] * 2
    assert sorted(moved) == [4] * 2 + [8] * 10, "5 and 6 numbers, in both ranks"


def test_small_tensors_go_together_up_to_a_limit_and_in_their_order(monkeypatch):
    """As many waits for all members as there are megabytes, not as there are tensors."""
    monkeypatch.setattr(migrate, "TOGETHER", 24)
    sizes = [5, 1, 1, 9, 4, 2]  # of four bytes each
    made = torch.zeros(4)
    tensors = [made if size == 4 else torch.zeros(size) for size in sizes]
    found = list(migrate._parts(tensors, lambda tensor: tensor is made))
    assert [[each.numel() for each in part] for part in found] == [[5, 1], [1], [9], [4], [2]]
    assert list(migrate._parts([], lambda tensor: False)) == []


def test_tensors_of_any_kind_arrive(monkeypatch, parts):
    plain = State.__init__

    def mixed(state, value):
        plain(state, value)
        state.parts += [
            torch.full((3,), bool(value)),
            torch.tensor(value, dtype=torch.bfloat16),
            torch.empty(0),
            torch.tensor(value, dtype=torch.float64),
            (torch.arange(6.0).view(2, 3) + value).t(),
            torch.tensor([0, 1, 2, 255 if value else 0], dtype=torch.uint8).view(torch.bool),
        ]

    monkeypatch.setattr(State, "__init__", mixed)
    states, outcomes, notes = run(monkeypatch, [1.5, 1.5, 0.0], {2})
    assert outcomes == [7] * 3 and not notes
    assert not states[2].parts[-2].is_contiguous()
    assert states[2].parts[-1].view(torch.uint8).tolist() == [0, 1, 2, 255], "also what no comparison makes"
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(states[2].parts, states[0].parts, strict=True))


def test_what_arrives_corrupted_is_taken_from_another_member(monkeypatch, parts):
    states, outcomes, notes = run(monkeypatch, [1.5, 1.5, 0.0], {2}, damage=lambda sender, number: sender == 0)
    assert [state.value for state in states] == [1.5] * 3 and outcomes == [7] * 3
    assert [(me, sender, following) for me, sender, parts, following in notes] == [(2, 0, 1)]
    assert notes[0][2] == parts


def test_the_only_member_sends_again(monkeypatch, parts):
    states, outcomes, notes = run(monkeypatch, [1.5, 0.0], {1}, damage=lambda sender, number: number < 4 + parts)
    assert states[1].value == 1.5 and outcomes == [7, 7] and notes == [(1, 0, parts, 0)]


def test_a_newcomer_that_never_gets_it_ends_and_no_member_is_harmed(monkeypatch):
    states, outcomes, notes = run(monkeypatch, [1.5, 1.5, 0.0], {2}, damage=lambda sender, number: True)
    assert isinstance(outcomes[2], migrate.CorruptTransfer) and "checksum mismatch 4 times" in str(outcomes[2])
    assert outcomes[:2] == [7, 7] and [state.value for state in states[:2]] == [1.5, 1.5]
    assert len(notes) == migrate.TRIES - 1


def test_a_member_that_differs_from_most_ends_alone(monkeypatch):
    states, outcomes, _ = run(monkeypatch, [1.5, 1.5, 2.5, 0.0], {3})
    assert isinstance(outcomes[2], migrate.StateMismatch) and "corrupt here" in str(outcomes[2])
    assert outcomes[0] == outcomes[1] == outcomes[3] == 7 and states[3].value == 1.5


def test_a_source_that_differs_from_most_is_found_out(monkeypatch):
    states, outcomes, _ = run(monkeypatch, [2.5, 1.5, 1.5, 0.0], {3})
    assert isinstance(outcomes[0], migrate.StateMismatch) and states[1].value == states[2].value == 1.5
    assert states[3].value == 1.5, "the newcomer was given what most hold"


def test_settings_that_differ_are_a_difference(monkeypatch):
    """A learning rate is no tensor, and a wrong one parts the replicas all the same."""
    monkeypatch.setattr(State, "settings", lambda self: torch.tensor([1, 3 + (migrate.dist.get_rank() == 2)]))
    _, outcomes, _ = run(monkeypatch, [1.5, 1.5, 1.5, 0.0], {3})
    assert isinstance(outcomes[2], migrate.StateMismatch) and outcomes[0] == outcomes[1] == outcomes[3] == 7


@pytest.mark.parametrize("own_steps", [0, 40])
def test_the_schedule_is_the_senders_whatever_the_receiver_did_before(own_steps):
    """A rank that went on from a checkpoint, or that had left, has a schedule that is under way."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    def state(steps: int) -> migrate.TrainingState:
        module = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(module.parameters(), lr=1.0)
        scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=1.0,
            min_lr=0.1,
            lr_warmup_steps=0,
            lr_decay_steps=1000,
            lr_decay_style="cosine",
            start_wd=0.0,
            end_wd=0.0,
            wd_incr_steps=1000,
            wd_incr_style="constant",
        )
        module(torch.ones(3)).sum().backward()
        optimizer.step()
        scheduler.step(increment=steps)
        return migrate.TrainingState([SimpleNamespace(module=module)], optimizer, scheduler)

    sender, receiver = state(300), state(own_steps)
    for _ in range(2):  # a transfer may have to be made again
        assert receiver.adopt(sender.header(7)) == 7
        assert receiver.scheduler.num_steps == 300
        assert receiver.optimizer.param_groups[0]["lr"] == sender.optimizer.param_groups[0]["lr"]
        assert torch.equal(receiver.settings(), sender.settings())


class Scaler:
    """The state of Megatron's dynamic gradient scaler."""

    def __init__(self, scale: float, good: int):
        self.load_state_dict({"scale": torch.tensor([scale]), "growth_tracker": good})

    def state_dict(self) -> dict:
        return dict(self.held)

    def load_state_dict(self, state: dict) -> None:
        self.held = state


def scaled(*scalers: Scaler) -> migrate.TrainingState:
    chained = [SimpleNamespace(grad_scaler=scaler, param_groups=[], state={}) for scaler in scalers]
    return migrate.TrainingState([], SimpleNamespace(chained_optimizers=chained, param_groups=[]), None)


def test_the_loss_scale_is_part_of_the_state(snapshot):
    sender, receiver = scaled(Scaler(2.0**20, 3)), scaled(Scaler(2.0**32, 0))
    assert not torch.equal(receiver.settings(), sender.settings())
    assert receiver.adopt(sender.header(7)) == 7
    found = receiver.optimizer.chained_optimizers[0].grad_scaler.held
    assert found["scale"].equal(torch.tensor([2.0**20])) and found["growth_tracker"] == 3
    assert torch.equal(receiver.settings(), sender.settings())
    with raises_text(migrate.StateMismatch, snapshot):
        scaled().adopt(sender.header(7))


def test_two_members_that_differ_cannot_be_told_apart(monkeypatch):
    _, outcomes, _ = run(monkeypatch, [2.5, 1.5, 0.0], {2})
    assert all(isinstance(outcome, RuntimeError) for outcome in outcomes)


def test_a_header_that_arrives_corrupted_is_sent_again(monkeypatch):
    checksum, spoiled = tensor_transfer.checksum, []

    def once(*tensors):
        found = checksum(*tensors)
        if tensors[0].numel() == 4 and threading.current_thread().name != "MainThread" and migrate.dist.get_rank() == 1:
            spoiled.append(tensors)
            if len(spoiled) == 1:
                return found ^ 1
        return found

    monkeypatch.setattr(tensor_transfer, "checksum", once)
    states, outcomes, _ = run(monkeypatch, [1.5, 0.0], {1})
    assert states[1].value == 1.5 and outcomes == [7, 7] and len(spoiled) == 2
