"""The controller's parts one by one: event log, configuration, planning, placement, ledger."""

from __future__ import annotations

import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_ctl.config import Config, ControllerConfig, controller_address, load, problems
from unicron_ctl.controller.job.ledger import JobLedger
from unicron_ctl.controller.log.store import Event, Store, StoreError
from unicron_ctl.controller.log.thinning import KEPT_FIRST, KEPT_LAST
from unicron_ctl.controller.model.fold import fold, replay
from unicron_ctl.controller.plan.placement import Need, place, usable
from unicron_ctl.controller.plan.planning import JobInput, plan, scenario
from unicron_ctl.errors import UserError
from unicron_ctl.protocol.wire import Step
from unicron_ctl.slurm.client import ElementInfo, NodeInfo


# ---------------------------------------------------------------- event log
def event(number: int, kind: str = "note", job: str = "1", **payload) -> Event:
    return Event(number, 1000.0 + number, job, 0, kind, payload)


def test_what_was_appended_is_there_after_a_crash(tmp_path):
    store = Store(tmp_path / "events.sqlite")
    store.append([event(1, a=[1, None, "ü"]), event(2, job="2")])
    again = Store(tmp_path / "events.sqlite")  # the first one is not closed: its process was killed
    assert list(again.replay()) == [event(1, a=[1, None, "ü"]), event(2, job="2")]
    assert [e.id for e in again.tail(after=1)] == [2] and [e.id for e in again.tail(job="1")] == [1]


def test_the_tail_gives_the_newest_without_a_start_and_the_next_with_one(tmp_path):
    store = Store(tmp_path / "events.sqlite")
    store.append([event(n) for n in range(1, 11)])
    assert [e.id for e in store.tail(limit=3)] == [8, 9, 10]
    assert [e.id for e in store.tail(after=2, limit=3)] == [3, 4, 5]


def test_a_batch_is_stored_whole_or_not_at_all(tmp_path):
    store = Store(tmp_path / "events.sqlite")
    store.append([event(1)])
    with pytest.raises(StoreError):
        store.append([event(2), event(1)])
    assert [e.id for e in store.replay()] == [1]


def test_a_damaged_a_locked_and_a_foreign_log_give_one_clear_line(tmp_path):
    (tmp_path / "damaged.sqlite").write_bytes(b"not a database at all, but long enough to be looked at" * 40)
    with pytest.raises(StoreError, match="damaged"):
        Store(tmp_path / "damaged.sqlite")
    store = Store(tmp_path / "locked.sqlite")
    other = sqlite3.connect(tmp_path / "locked.sqlite", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    store._db.execute("PRAGMA busy_timeout=50")
    with pytest.raises(StoreError, match="locked by another process"):
        store.append([event(1)])
    other.execute("ROLLBACK")
    store.append([event(1)])
    later = sqlite3.connect(tmp_path / "later.sqlite")
    later.execute("PRAGMA user_version=99")
    later.commit()
    with pytest.raises(StoreError, match="another release"):
        Store(tmp_path / "later.sqlite")


def test_the_log_does_without_the_steps_of_an_undisturbed_run(tmp_path):
    store = Store(tmp_path / "events.sqlite")
    kinds = ["entered", *["step"] * 100, "break", *["step"] * 5, "", *["step"] * 5]
    store.append(
        Event(number, float(number), "1" if kind else "2", 1, kind or "plan", {})
        for number, kind in enumerate(kinds, 1)
    )
    assert store.thin() == 100 - KEPT_FIRST - KEPT_LAST
    left = [event.id for event in store.replay()]
    assert left[:4] == [1, 2, 3, 92] and left[-12:] == list(range(102, 114)), "of a short run, or the last ones: all"
    assert store.thin() == 0 and store.thin(50) == 0


def test_an_event_of_a_later_release_changes_nothing():
    state = replay([event(1, "job_registered", settings={"name": "a", "user": "b"})])
    before = replay([event(1, "job_registered", settings={"name": "a", "user": "b"})])
    fold(state, event(2, "invented_later", anything=1))
    before.last_event = 2
    assert state == before


# ---------------------------------------------------------------- configuration
def test_the_defaults_contradict_nothing():
    assert problems(ControllerConfig()) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[controller]\nheartbeat_period = 0", "heartbeat_period"),
        ("[controller]\nlease_periods = 1.0", "lease_periods"),
        ("[controller]\nheartbeat_period = 20", "enter_timeout"),
        ("[controller]\nreport_timeout = 0.2", "report_timeout"),
        ("[controller]\nrestart_grace = 0.1", "restart_grace"),
        ("[controller]\nrepeat_seconds = inf", "repeat_seconds"),
        ("[controller]\nauth = 'trust'", "auth"),
        ("[controller]\nlisten = 'here'", "listen"),
        ("[controller]\nhearbeat_period = 1", "hearbeat_period"),
        ("[controler]\n", "unknown section"),
        ("[controller]\nobserve = 'yes'", "bool"),
        ("[controller", "not TOML"),
    ],
)
def test_a_wrong_file_gives_one_line_that_names_the_key(tmp_path, text, said):
    path = tmp_path / "unicron.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load(path)
    assert said in str(caught.value) and "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_where_the_file_and_the_controller_are_found(tmp_path):
    path = tmp_path / "u.toml"
    path.write_text(f"[controller]\nstate_dir = '{tmp_path}'\nlisten = 'tcp://0.0.0.0:7000'\nheartbeat_period = 2\n")
    assert load(environment={"UNICRON_CONFIG": str(path)}).controller.heartbeat_period == 2.0
    with pytest.raises(UserError, match="no such file"):
        load(environment={"UNICRON_CONFIG": str(tmp_path / "missing")})
    assert load(environment={"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}) is not None
    config = load(path)
    assert controller_address("tcp://a:1", config, {}) == "tcp://a:1"
    assert controller_address(None, config, {"UNICRON_CONTROLLER": "tcp://b:2"}) == "tcp://b:2"
    assert controller_address(None, config, {}) == "tcp://127.0.0.1:7000"
    (tmp_path / "address").write_text("tcp://c:3\n")
    assert controller_address(None, config, {}) == "tcp://c:3"
    assert isinstance(config, Config)


# ---------------------------------------------------------------- planning
job_inputs = st.builds(
    lambda name, weight, low, more, nodes, lost, rate: JobInput(
        name,
        weight,
        low,
        low + more,
        min(nodes, low + more),
        max(0, min(nodes, low + more) - lost),
        rate,
        max(1, nodes) if rate else 0,
    ),
    st.sampled_from("abcd"),
    st.floats(0.1, 10),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(0, 6),
    st.integers(0, 1),
    st.sampled_from([0.0, 1e9, 3e9]),
)


@given(st.lists(job_inputs, min_size=1, max_size=4, unique_by=lambda j: j.job), st.integers(0, 12))
def test_a_plan_fits_and_never_takes_a_running_jobs_last_nodes(jobs, spare):
    nodes = sum(job.alive for job in jobs) + spare
    found = plan(jobs, nodes, 1000.0, 5.0)
    assert set(found.assignment) == {job.job for job in jobs} and set(found.reasons) == set(found.assignment)
    assert sum(found.assignment.values()) <= nodes
    for job in jobs:
        assert 0 <= found.assignment[job.job] <= job.max_nodes
        assert found.assignment[job.job] >= 1 or job.alive == 0


def test_a_lost_node_is_replaced_from_the_lighter_job():
    jobs = [JobInput("heavy", 2.0, 1, 2, 2, 1, 2e9, 2), JobInput("light", 1.0, 1, 2, 2, 2, 2e9, 2)]
    assert plan(jobs, 3, 1000.0, 5.0).assignment == {"heavy": 2, "light": 1}


def test_an_unmeasured_job_is_taken_for_an_average_one():
    jobs = [JobInput("new", 1.0, 1, 3, 0, 0), JobInput("old", 1.0, 1, 3, 2, 2, 4e9, 2)]
    assert dict(scenario(jobs, 4, 1000.0, 5.0).job("new").flops) == {1: 2e9, 2: 4e9, 3: 6e9}


# ---------------------------------------------------------------- placement
def node(name: str, *states: str) -> NodeInfo:
    return NodeInfo(name, frozenset(states or {"IDLE"}), "", "127.0.0.1", 1, 1.0, 1)


def element(
    job: str,
    number: int,
    state: str = "RUNNING",
    where: str | None = None,
    reason: str = "",
    comment: str = "",
    restarts: int = 0,
):
    return ElementInfo(job, number, f"{job}{number}", state, where, reason, f"job{job}", "ann", comment, restarts)


def said(placement) -> list[str]:
    return [action.label for action in placement.actions]


def test_nothing_to_do_means_no_action():
    elements = [element("1", 0, where="a"), element("1", 1, where="b")]
    found = place([Need("1", 2, frozenset({0, 1}))], elements, [node("a"), node("b"), node("c")])
    assert found.actions == [] and found.allotted == {"1": [0, 1]} and found.leaving == {"1": []}


def test_a_requeued_element_goes_before_held_ones_and_home_if_it_can():
    elements = [
        element("1", 0, "PENDING", reason="JobHeldAdmin", comment="unicron: x"),
        element("1", 1, "PENDING", reason="BeginTime", restarts=1),
    ]
    found = place([Need("1", 1, home={1: "b"})], elements, [node("a"), node("b")])
    assert said(found) == ["pin 1_1 to b", "start_now 1_1"]


def test_what_a_user_holds_is_not_ours():
    elements = [element("1", 0, where="a"), element("1", 1, "PENDING", reason="JobHeldUser", comment="mine")]
    assert said(place([Need("1", 2, frozenset({0}))], elements, [node("a"), node("b")])) == []


def test_a_pinned_element_is_waited_for_then_pushed_then_moved():
    elements = [element("1", 0, "PENDING", reason="Priority")]
    pins = {"1_0": {"node": "a", "at": 100.0}}
    nodes = [node("a"), node("b")]
    assert said(place([Need("1", 1)], elements, nodes, pins, now=101.0)) == []
    assert said(place([Need("1", 1)], elements, nodes, pins, now=105.0)) == ["start_now 1_0"]
    assert "pin 1_0 to a" in said(place([Need("1", 1)], elements, nodes, pins, now=140.0))
    assert "pin 1_0 to b" in said(place([Need("1", 1)], elements, [node("a", "DOWN"), node("b")], pins, now=101.0))


def test_a_member_leaves_by_itself_before_its_node_is_taken():
    elements = [element("1", 0, where="a"), element("1", 1, where="b"), element("2", 0, "PENDING", reason="Resources")]
    needs = [Need("1", 1, frozenset({0, 1})), Need("2", 1)]
    first = place(needs, elements, [node("a"), node("b")])
    assert first.actions == [] and first.leaving["1"] == [1] and first.allotted["1"] == [0]
    then = place([Need("1", 1, frozenset({0})), Need("2", 1)], elements, [node("a"), node("b")])
    assert said(then) == ["pin 2_0 to b", "requeue_hold 1_1", "start_now 2_0"]


def test_nodes_of_other_peoples_jobs_are_not_given_out():
    elements = [element("1", 0, where="a"), element("9", 0, where="b")]
    assert usable([node("a"), node("b"), node("c"), node("d", "IDLE", "DRAIN")], elements, ["1"], {"c"}) == ["a"]


def test_an_element_on_a_draining_node_trains_on():
    found = place([Need("1", 0, frozenset({0}))], [element("1", 0, where="a")], [node("a", "MIXED", "DRAIN")])
    assert found.actions == [] and found.leaving["1"] == [] and found.allotted["1"] == [0]


@st.composite
def queues(draw):
    names = [f"n{i}" for i in range(draw(st.integers(1, 6)))]
    free = list(names)
    elements, needs = [], []
    for job in ("1", "2", "3")[: draw(st.integers(1, 3))]:
        members = set()
        for number in range(draw(st.integers(1, 4))):
            state = draw(st.sampled_from(["RUNNING", "PENDING", "HELD", "COMPLETED", "COMPLETING"]))
            if state in ("RUNNING", "COMPLETING") and free:
                elements.append(element(job, number, state, free.pop()))
                if state == "RUNNING" and draw(st.booleans()):
                    members.add(number)
            elif state == "HELD":
                elements.append(element(job, number, "PENDING", reason="JobHeldAdmin", comment="unicron: held"))
            else:
                elements.append(element(job, number, "PENDING" if state != "COMPLETED" else state, reason="Resources"))
        needs.append(Need(job, draw(st.integers(0, 4)), frozenset(members)))
    nodes = [node(name, *(["IDLE"] if draw(st.integers(0, 4)) else ["DOWN"])) for name in names]
    return needs, elements, nodes


@given(queues())
def test_placement_never_overbooks_and_never_stops_a_member(case):
    needs, elements, nodes = case
    found = place(needs, elements, nodes)
    members = {(need.job, number) for need in needs for number in need.members}
    pinned = [action for action in found.actions if action.action == "pin"]
    assert len({action.node for action in pinned}) == len(pinned), "one element per node"
    assert not [
        a
        for a in found.actions
        if a.action in ("requeue_hold", "requeue", "cancel", "down") and (a.job, a.element) in members
    ]
    given_up = {action.node for action in found.actions if action.action == "requeue_hold"}
    busy = {e.node for e in elements if e.node and e.state in ("RUNNING", "COMPLETING")}
    healthy = {n.name for n in nodes if n.healthy}
    assert all(action.node in healthy and (action.node not in busy or action.node in given_up) for action in pinned)
    for need in needs:
        assert not set(found.allotted[need.job]) & set(found.leaving[need.job])
    assert place(needs, elements, nodes) == found


# ---------------------------------------------------------------- ledger
def step(slot: int, iteration: int, indices: list[int], computed: list[int] | None = None) -> Step:
    return Step(
        job="1",
        slot=slot,
        generation=1,
        iteration=iteration,
        micro_batches=indices,
        computed=indices if computed is None else computed,
        total=4,
        seconds=1.0,
        loss=2.0,
        at=0.0,
    )


def test_an_iteration_is_closed_when_all_is_accounted_for():
    ledger = JobLedger()
    assert ledger.add(step(0, 0, [0, 2]), {0, 1}, lambda i: False) == []
    (account,) = ledger.add(step(1, 0, [1, 3]), {0, 1}, lambda i: False)
    assert account.problems == [] and account.computed == 4 and account.ranks == 2
    assert ledger.add(step(1, 0, [1, 3]), {0, 1}, lambda i: False) == [], "a repeated report counts once"


def test_a_dead_ranks_missing_report_is_named_and_no_violation():
    ledger = JobLedger()
    ledger.add(step(0, 0, [0, 2]), {0, 1}, lambda i: True)
    (account,) = ledger.add(step(1, 0, [1]), {0, 1}, lambda i: True)
    assert account.unreported == [3] and account.problems == []


def test_gaps_doubles_and_strangers_are_violations():
    ledger = JobLedger()
    reports = [
        step(0, 0, [0, 1, 9], [0, 0, 1]),
        step(1, 0, [1]),
        step(0, 1, [0]),
        step(1, 1, [1]),
        step(0, 2, [0, 2]),
        step(1, 2, [1, 3]),
    ]
    accounts = [account for report in reports for account in ledger.add(report, {0, 1}, lambda i: False)]
    assert [account.iteration for account in accounts] == [0, 1, 2] and accounts[2].problems == []
    text = "; ".join(problem for account in accounts for problem in account.problems)
    assert "micro-batch 1 is in 2 gradients" in text and "computed 2 times" in text and "9 does not exist" in text
    assert "micro-batches [2, 3] are in nobody's gradient" in text
