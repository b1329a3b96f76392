"""Copies of what scripts without a session keep: between which nodes, and when a cut of it is good."""

from __future__ import annotations

from unittest.mock import Mock

from msgspec.structs import replace

from tests.support.plain_agent import PlainAgent
from tests.support.world import World
from unicron_ctl.controller.job import modes
from unicron_ctl.controller.replication import script_states
from unicron_ctl.controller.replication.cuts import CUT_LIMIT_SECONDS
from unicron_ctl.controller.replication.receivers import targets_by_element
from unicron_ctl.shared.protocol import structs, wire
from unicron_transition.snapshot.image_format import SAME, USER


class Node(PlainAgent):
    """An agent of a job in restart mode, whose node has a memory."""

    memory, mark = True, ""

    def __init__(self, world: World, element: int, nodes: int, **settings):
        super().__init__(world, "1", element, f"n{element + 1}", nodes=nodes)
        self.settings = replace(self.settings, **settings)

    def image(self, iteration: int, place: int) -> structs.Image:
        world = self.world.job()
        size, base = len(world.members), world.plan.generation
        return structs.Image(USER, place, iteration, place, size, 0, 1, base, self.mark)

    def saves(self, iteration: int) -> None:
        """The newest that its rank has saved."""
        self.user = self.image(iteration, self.element)
        self.status()

    def has(self, iteration: int, *places: int) -> None:
        """What stays, of these ranks."""
        self.images = [*self.images, *(self.image(iteration, place) for place in places)]
        self.status()


def started(nodes: int, mark: str = "", **settings) -> tuple[World, list[Node]]:
    world = World()
    agents = [Node(world, element, nodes, **settings) for element in range(nodes)]
    for agent in agents:
        agent.mark = mark
        agent.register()
        agent.status()
    world.run(3.0)
    assert world.job().phase == "running" and not world.job().mode.reports
    return world, agents


def save_on(world: World, agents: list[Node], seconds: float, begin: int = 1, rate: int = 10) -> int:
    """They save so many iterations a second; returns the last one."""
    iteration = begin
    for second in range(round(seconds)):
        iteration = begin + rate * (second + 1)
        for agent in agents:
            agent.saves(iteration)
        world.run(1.0)
    return iteration


def elements(order: wire.Cut) -> list[int]:
    return [target.element for target in order.targets]


def test_worlds_that_save_more_than_those_before_may_break_any_number_of_times(monkeypatch):
    monkeypatch.setattr(modes, "MOST_RESTARTS", 3)
    world, agents = started(2)

    def breaks(turn: int, *iterations: int) -> None:
        for iteration in iterations:
            agents[0].saves(iteration)
            world.run(1.0)
        agents[turn % 2].die(turn % 2, code=1, lived=130.0, last_line="Connection reset by peer")
        world.run(8.0)

    for turn in range(8):
        breaks(turn, 100 + 5 * turn, 140 + 5 * turn)
        assert world.job().phase == "running" and world.job().restarts <= 1
    for turn in range(2):
        assert not world.job().ended
        breaks(turn, 130, 175)  # it begins from an older state, and comes no further than before
    assert "broke 3 times in a row" in world.job().ended.reason and "saved nothing new" in world.job().ended.reason
    assert [event.kind for event in world.log].count("steady") == 8, "one of each world, however often it saves"


def test_each_node_gives_its_own_to_the_next_one_once_something_is_saved():
    world, agents = started(3)
    world.run(10.0)
    assert not any(agent.orders(wire.Cut) for agent in agents), "the script saves nothing"
    last = save_on(world, agents, 4.0)
    first = [agent.orders(wire.Cut)[0] for agent in agents]
    assert [elements(order) for order in first] == [[1], [2], [0]] and len({order.iteration for order in first}) == 1
    assert last < first[0].iteration + 20 and first[0].good == -1
    _, agents = started(1)
    assert not agents[0].orders(wire.Cut), "there is no other node"


def test_who_takes_nothing_from_a_node_is_passed_over_by_that_one():
    world, agents = started(3)
    last = save_on(world, agents, 4.0)
    first = agents[0].orders(wire.Cut)[0]
    agents[0].refusing = {"n2:70": structs.Failing(1, "timed out")}
    save_on(world, agents, 2.0, begin=last)
    orders = [agent.orders(wire.Cut)[-1] for agent in agents]
    assert [elements(order) for order in orders] == [[2], [2], [0]] and orders[0].number > first.number
    assert "copies_refused" in world.kinds()


def test_the_next_cut_comes_when_every_ranks_part_is_in_enough_nodes():
    world, agents = started(2)
    save_on(world, agents, 4.0)
    cut = agents[0].orders(wire.Cut)[-1].iteration
    for agent in agents:
        agent.has(cut + 3, agent.element)
    save_on(world, agents, 8.0, begin=41)
    assert {agent.orders(wire.Cut)[-1].iteration for agent in agents} == {cut}, "nobody has a copy yet"
    agents[0].has(cut + 3, 1)
    agents[1].has(cut + 3, 0)
    last = save_on(world, agents, 6.0, begin=121)
    order = agents[0].orders(wire.Cut)[-1]
    assert order.good == cut + 3 and order.iteration > last - 60


def test_a_smaller_world_lets_the_cut_of_the_one_before_it_stay_for_the_next_one_of_its_size():
    world, agents = started(2)
    save_on(world, agents, 4.0, begin=1000)
    cut = agents[0].orders(wire.Cut)[-1].iteration
    for agent in agents:
        agent.has(cut, 0, 1)
    agents[1].silent = agents[1].killed = True
    world.run(20.0)
    assert len(world.job().members) == 1
    successor = Node(world, 1, 2)
    successor.register()
    successor.status()
    save_on(world, agents[:1], 4.0)
    order = agents[0].orders(wire.Cut)[-1]
    assert order.iteration < 1000 < cut == order.good, "it has begun anew, and cannot use it"
    save_on(world, [agents[0], successor], 8.0)
    assert len(world.job().members) == 2 and agents[0].orders(wire.Cut)[-1].good == cut


def test_where_the_word_came_too_late_for_some_the_next_cut_is_named_at_once_and_further_ahead():
    world, agents = started(2)
    newest = save_on(world, agents, 4.0)
    first = agents[0].orders(wire.Cut)[-1].iteration
    agents[0].has(first, 0)
    agents[1].has(first + 1, 1)
    again = save_on(world, agents, 6.0, begin=newest)
    second = agents[0].orders(wire.Cut)[-1]
    assert second.iteration > first and second.good == -1
    assert second.iteration - again < 60 and len({agent.orders(wire.Cut)[-1].iteration for agent in agents}) == 1


def test_what_all_ranks_have_alike_is_copied_where_too_few_nodes_have_it():
    world, agents = started(2, SAME)
    save_on(world, agents, 6.0)
    assert not any(agent.orders(wire.Cut) for agent in agents)
    world, agents = started(2, SAME, copies=2)
    save_on(world, agents, 4.0)
    assert [elements(agent.orders(wire.Cut)[0]) for agent in agents] == [[1], [0]]


def test_a_node_of_the_world_is_given_copies_before_one_that_waits_even_behind_another_switch():
    """A world that begins anew without the one that waits could not get what that has."""
    world, _ = started(2)
    spare = Node(world, 2, 3)
    spare.register()
    spare.status()
    job = world.core.view.job(world.job())
    assert sorted(job.state.members) == [0, 1] and len(job.alive()) == 3
    domains = {"n1": "s1", "n2": "s1", "n3": "s2"}
    found = targets_by_element(job.alive(), {0, 1}, 1, domains, inside_first=True)
    assert {giver: [one.element for one in to] for giver, to in found.items()} == {0: [1], 1: [0]}
    found = targets_by_element(job.alive(), {0, 1}, 1, domains)
    assert {giver: [one.element for one in to] for giver, to in found.items()} == {0: [2], 1: [2]}


def test_who_gives_what_to_whom_is_worked_out_when_somebody_changed_and_not_at_every_look(monkeypatch):
    chooser = Mock(wraps=targets_by_element)
    monkeypatch.setattr(script_states, "targets_by_element", chooser)
    world, agents = started(3)
    save_on(world, agents, 6.0)
    assert agents[0].orders(wire.Cut) and chooser.call_count == 1
    spare = Node(world, 3, 3)
    spare.register()
    save_on(world, agents, 3.0, begin=61)
    assert chooser.call_count == 2


def test_a_cut_that_nobody_has_kept_is_named_anew_soon():
    world, agents = started(2)
    save_on(world, agents, 4.0)
    first = agents[0].orders(wire.Cut)[-1].iteration
    save_on(world, agents, 8.0, begin=41)
    assert agents[0].orders(wire.Cut)[1].iteration > first


def test_a_cut_whose_copies_get_on_is_given_time():
    world, agents = started(2)
    last = save_on(world, agents, 4.0)
    first = agents[0].orders(wire.Cut)[-1].iteration
    for agent in agents:
        agent.has(first, agent.element)
    agents[0].images = [replace(one, bytes=int(100e9)) for one in agents[0].images]
    for _ in range(4):
        last = save_on(world, agents, CUT_LIMIT_SECONDS / 2, begin=last)
        agents[0].moved += 1
        agents[0].status()
    assert [order.iteration for order in agents[0].orders(wire.Cut)] == [first]
    save_on(world, agents, CUT_LIMIT_SECONDS + 2.0, begin=last)
    assert len(agents[0].orders(wire.Cut)) == 2


def test_what_scripts_save_is_copied_to_another_block():
    world, agents = started(4, block=2, min_nodes=2)
    save_on(world, agents, 5.0)
    given = [{to.element for order in agent.orders(wire.Cut) for to in order.targets} for agent in agents]
    assert given == [{2}, {3}, {0}, {1}]
