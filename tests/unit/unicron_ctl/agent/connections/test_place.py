"""What an agent reads of its place in Slurm's environment."""

from __future__ import annotations

import pytest

from unicron_ctl.agent.connections.job_environment import audits, memory_rate, read_place
from unicron_ctl.agent.snapshots import image_stream
from unicron_ctl.shared.protocol.ranges import LAUNCHES
from unicron_ctl.shared.settings.config import AgentConfig
from unicron_ctl.shared.system.errors import UserError

SLURM = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURMD_NODENAME": "n2", "SLURM_STEP_ID": "3"}


@pytest.mark.parametrize(("first", "step"), [("0", 3), ("3", 0), ("2", 1), ("9", 0)])
def test_steps_that_a_restart_only_uses_up_are_not_counted(first, step):
    assert read_place(SLURM | {"UNICRON_FIRST_STEP": first}, "tcp://127.0.0.1:7451").step == step * LAUNCHES


@pytest.mark.parametrize(("most", "requeues"), [("1", 2), ("2", 0)])
def test_only_a_requeue_of_the_whole_job_counts(most, requeues):
    said = SLURM | {"SLURM_ARRAY_TASK_COUNT": most, "SLURM_RESTART_COUNT": "2"}
    assert read_place(said, "tcp://127.0.0.1:7451").requeues == requeues


@pytest.mark.parametrize("own", ["-5", "-6", "4294967291", "4294967290"])
def test_a_batch_script_counts_as_the_first_step_whatever_number_slurm_gives_it(own):
    """From 26.05 on Slurm sets SLURM_STEP_ID for batch and interactive scripts, to a number of its own."""
    assert read_place(SLURM | {"SLURM_STEP_ID": own}, "tcp://127.0.0.1:7451").step == 0


@pytest.mark.parametrize("said", ["batch", "-17", "1.5", "99999999999999999999"])
def test_a_step_that_makes_no_sense_is_refused_in_one_line(said):
    with pytest.raises(UserError, match=r"^SLURM_STEP_ID=[^\n]* 0$"):
        read_place(SLURM | {"SLURM_STEP_ID": said}, "tcp://127.0.0.1:7451")


ARRAY = SLURM | {"SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_ID": "0"}


@pytest.mark.parametrize(("said", "spares"), [({}, 0), ({"UNICRON_SPARES": "0"}, 0), ({"UNICRON_SPARES": "1"}, 1)])
def test_the_number_of_spares_is_read(said, spares):
    place = read_place(ARRAY | said, "tcp://127.0.0.1:7451")
    assert place.settings.spares == spares and place.warning == ""


@pytest.mark.parametrize("said", ["one", "-1", "1.5", "", "99999999999999999999"])
def test_a_number_of_spares_that_makes_no_sense_is_refused_in_one_line(said):
    with pytest.raises(UserError, match=r"UNICRON_SPARES=.* 0$"):
        read_place(ARRAY | {"UNICRON_SPARES": said}, "tcp://127.0.0.1:7451")


def test_too_many_spares_are_a_warning_of_one_element(snapshot):
    said = {"UNICRON_SPARES": "3", "UNICRON_MIN_NODES": "2"}
    place = read_place(ARRAY | said, "tcp://127.0.0.1:7451")
    assert (place.settings.spares, place.warning) == (3, snapshot)
    assert read_place(ARRAY | said | {"SLURM_ARRAY_TASK_ID": "1"}, "tcp://127.0.0.1:7451").warning == ""


@pytest.mark.parametrize(("least", "warns"), [("4", False), ("9", True)])
def test_a_minimum_above_the_jobs_nodes_is_a_warning(least, warns):
    place = read_place(ARRAY | {"SLURM_ARRAY_TASK_ID": "0", "UNICRON_MIN_NODES": least}, "tcp://127.0.0.1:7451")
    assert ("=9 of 4 nodes" in place.warning) is warns


@pytest.mark.parametrize(("said", "rate"), [("0", 0.0), ("0.1", image_stream.LEAST_RATE), ("", 1e9)])
def test_a_rate_of_copies_that_the_other_side_would_wait_for_is_read(said, rate):
    assert memory_rate({"UNICRON_MEMORY_RATE": said}) == pytest.approx(rate)


@pytest.mark.parametrize("said", ["0.05", "1e-9", "-1", "nan", "fast"])
def test_a_rate_at_which_no_copy_arrives_is_refused_in_one_line(said):
    with pytest.raises(UserError, match=r"^UNICRON_MEMORY_RATE=[^\n]* 1000$"):
        read_place(ARRAY | {"UNICRON_MEMORY_RATE": said}, "tcp://127.0.0.1:7451")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({}, ("9", "0")),
        ({"UNICRON_AUDIT": "0", "UNICRON_COMPARE": ""}, ("0", "0")),
        ({"UNICRON_COMPARE": "5"}, ("9", "5")),
    ],
)
def test_a_job_says_what_is_audited_else_its_nodes_configuration_does(said, told):
    variables = audits(said, AgentConfig(audit=9, compare=0))
    assert (variables["UNICRON_AUDIT"], variables["UNICRON_COMPARE"]) == told
    assert audits({}, AgentConfig()) == {"UNICRON_AUDIT": "256", "UNICRON_COMPARE": "64"}


@pytest.mark.parametrize("said", ["-1", "often", "0.5"])
def test_a_share_of_audits_that_is_no_whole_number_is_refused_in_one_line(said):
    with pytest.raises(UserError, match=r"^UNICRON_AUDIT=[^\n]* 256$"):
        read_place(ARRAY | {"UNICRON_AUDIT": said}, "tcp://127.0.0.1:7451")


BLOCK = ARRAY | {"SLURM_ARRAY_TASK_ID": "2", "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "n[7-8],m2"}


@pytest.mark.parametrize(("node", "element"), [("n7", 6), ("n8", 7), ("m2", 8)])
def test_each_node_of_an_arrays_element_has_a_number(node, element):
    place = read_place(BLOCK | {"SLURMD_NODENAME": node}, "tcp://127.0.0.1:7451")
    settings = place.settings
    assert (place.element, place.label, settings.block, settings.allocation) == (element, "7_2", 3, False)
    assert (settings.min_nodes, settings.max_nodes) == (3, 12), "both count nodes"


@pytest.mark.parametrize(
    ("said", "least", "stated"),
    [({}, 1, False), ({"UNICRON_MIN_NODES": ""}, 1, False), ({"UNICRON_MIN_NODES": "1"}, 1, True)],
)
def test_the_owners_1_is_not_the_default(said, least, stated):
    settings = read_place(ARRAY | said, "tcp://127.0.0.1:7451").settings
    assert (settings.min_nodes, settings.min_stated) == (least, stated)


@pytest.mark.parametrize(("said", "least"), [("1", 3), ("4", 6), ("6", 6)])
def test_the_least_is_whole_elements(said, least):
    assert read_place(BLOCK | {"UNICRON_MIN_NODES": said}, "tcp://127.0.0.1:7451").settings.min_nodes == least


@pytest.mark.parametrize(
    ("said", "by_gpus", "ranks"),
    [
        ({}, True, 8),
        ({}, False, 1),
        ({"UNICRON_RANKS_PER_NODE": "4"}, True, 4),
        ({"UNICRON_RANKS_PER_NODE": "4"}, False, 4),
    ],
)
def test_a_task_is_a_rank_for_each_gpu_where_nobody_says_otherwise(said, by_gpus, ranks):
    place = read_place(SLURM | {"SLURM_GPUS_ON_NODE": "8"} | said, "tcp://127.0.0.1:7451", by_gpus=by_gpus)
    assert place.settings.ranks_per_node == ranks


@pytest.mark.parametrize(
    ("more", "outlives"),
    [
        ({}, False),
        ({"SLURM_NO_KILL": "set"}, True),
        ({"SLURM_NO_KILL": "set", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}, False),
    ],
)
def test_an_allocation_may_lose_nodes_where_its_srun_is_known_to_go_on(more, outlives):
    said = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "3", "SLURMD_NODENAME": "n1", "SLURM_JOB_NODELIST": "n[1-3]"}
    assert read_place(said | more, "tcp://127.0.0.1:7451").settings.no_kill is outlives
