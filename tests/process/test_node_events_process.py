"""What a node itself knows, with real agents and ranks and a real unicrond: its kernel log (a FIFO stands for it, and
once the real one), the out-of-memory killer of a real memory cgroup, its links (a folder stands for /sys/class).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.controller import Controller
from tests.support.jobs import FOREVER, Agent, Job, World
from tests.support.processes import wait_for
from unicron_ctl.agent.node.node_watch import NodeWatch
from unicron_ctl.shared.settings.config import AgentConfig
from unicron_detector.failures.classify import default_classifier
from unicron_detector.health.oom_kills import counter_file

pytestmark = pytest.mark.process
PAGE_FAULT = "NVRM: Xid (PCI:0000:3b:00): 31, pid={pid}, name=python, Ch 00000010, intr 00000000. MMU Fault"
GPU_LOST = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
HOG = "import time\nkept = []\nwhile True:\n    kept.append(b'x' * (8 << 20))\n    time.sleep(0.005)\n"
LIMIT_MB = 1000


class WatchedJob(World):
    """Two nodes, each with a kernel log and links of its own."""

    def start_agent(self, element: int, **settings: str) -> Agent:
        log, link = self.folder / f"kmsg{element}", self.folder / f"class{element}" / "net" / "ib0"
        os.mkfifo(log)
        (link / "device").mkdir(parents=True)
        (link / "carrier_changes").write_text("2\n")
        watched = {"UNICRON_KMSG": str(log), "UNICRON_LINKS": str(link.parent.parent)}
        return super().start_agent(element, **watched | settings)

    def kernel(self, element: int, text: str) -> None:
        """The node's kernel says something, as a record of /dev/kmsg."""
        with (self.folder / f"kmsg{element}").open("w") as log:
            log.write(f"3,1234,5678,-;{text}\n SUBSYSTEM=pci\n")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("node")
    with WatchedJob(folder, 2, TINY_ITERATIONS=FOREVER, TINY_SLOW="0.02") as running:
        running.wait(lambda: running.trains([0, 1], 3), "3 iterations")
        yield running


def test_an_xid_explains_the_death_of_the_rank_that_it_names(job):
    pid = job.rank(1)["pid"]
    began = time.time()
    job.kernel(1, "usb 1-1: new high-speed USB device")  # says nothing of interest and is not forwarded
    job.kernel(1, PAGE_FAULT.format(pid=pid))
    event = job.wait(lambda: job.events("node_event"), "the event")[-1]
    assert event["node"] == "n1" and event["code"] == "xid 31" and event["cause"] == "illegal_memory_access"
    assert event["time"] - began < 5.0, "it took so long"
    assert not job.failures(), "the line alone is no failure"
    os.kill(pid, signal.SIGABRT)
    failure = job.wait(lambda: job.failures(), "the death is seen")[0]
    assert (failure["slots"], failure["cause"], failure["severity"]) == ([1], "illegal_memory_access", 2), failure
    assert "Xid" in failure["reason"] and failure["action"] == "restart"
    job.wait(lambda: job.trains([0, 1]), "both train again")
    assert len(job.events("failure_detected")) == 1 and len(job.events("node_event")) == 1
    assert job.node("n1")["last_event"]["code"] == "xid 31" and job.node("n0")["last_event"] is None


def test_a_flapping_link_is_recorded_and_disturbs_nobody(job):
    generation, before = job.job()["generation"], len(job.failures())
    (job.folder / "class0" / "net" / "ib0" / "carrier_changes").write_text("4\n")
    event = job.wait(lambda: [e for e in job.events("node_event") if e["source"] == "link"], "the flap")[0]
    assert (event["node"], event["cause"], event["severity"], event["action"]) == ("n0", "link_flapping", 3, "report")
    assert event["text"].startswith("link ib0: carrier changes: 2")
    reached = job.job()["iteration"]
    job.wait(lambda: job.job()["iteration"] > reached + 3, "it trains on")
    assert job.job()["generation"] == generation and len(job.failures()) == before


def test_a_fatal_line_without_slurm_is_recorded_and_the_job_trains_on(job):
    generation = job.job()["generation"]
    for _ in range(50):  # a broken card repeats itself
        job.kernel(0, GPU_LOST)
    verdict = job.wait(lambda: job.events("node_verdict"), "what becomes of it")[0]
    assert verdict["node"] == "n0" and verdict["action"] == "report" and "no Slurm" in verdict["reason"]
    assert len([e for e in job.events("node_event") if e["code"] == "xid 79"]) == 1, "a burst is one event"
    assert job.job()["generation"] == generation


def own_cgroup(name: str) -> Path:
    """A memory cgroup below this process's own, with a limit. Skips with the reason where none can be made."""
    file = counter_file()
    if file is None:
        pytest.skip("this process has no memory cgroup with an oom_kill count (Linux 4.13 or later, cgroup mounted)")
    folder = file.parent / f"{name}-{os.getpid()}"
    limit = "memory.limit_in_bytes" if file.name == "memory.oom_control" else "memory.max"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(LIMIT_MB << 20))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"cannot make a memory cgroup with {limit} below {file.parent}: {error.strerror}")
    return folder


def test_a_rank_that_the_out_of_memory_killer_ends_is_known_for_it(tmp_path):
    """A real limit, a real kill: the reason reaches the controller with the exit."""
    folder = own_cgroup("unicron-test")
    controller, job = Controller(tmp_path), None
    try:
        job = Job(tmp_path, controller.address, "8", 1, [sys.executable, "-c", HOG], UNICRON_KMSG="/dev/null")
        (folder / "cgroup.procs").write_text(str(job.agents[0].process.pid))
        known = wait_for(lambda: controller.job("8").get("last_failure"), lambda: f"the kill is seen\n{job.logs}")
        assert known["cause"] == "host_out_of_memory" and known["severity"] == 2, (known, job.logs)
        assert "out-of-memory kill" in known["reason"], known
        detected = controller.events("failure_detected", job="8")[0]
        assert detected["exit_code"] == -signal.SIGKILL
    finally:
        if job is not None:
            job.close()
        controller.close()
        wait_for(lambda: not (folder / "cgroup.procs").read_text().split(), "the cgroup is empty")
        folder.rmdir()


def test_the_real_kernel_log_is_read_from_now_on(tmp_path):
    """A harmless marked line goes through the real /dev/kmsg, and only a rule of this test knows it."""
    try:
        log = open("/dev/kmsg", "w")
    except OSError as error:
        pytest.skip(f"/dev/kmsg cannot be written here: {error.strerror}; the FIFO tests above read the same format")
    mark = f"unicron-test harmless marker {os.getpid()} {time.time_ns()}"
    rule = {"id": "marker", "cause": "hardware_warning", "pattern": mark, "only_from": ["kernel"]}
    said: list[str] = []
    with log:
        log.write(f"<6>{mark} too early\n")
        log.flush()
        watch = NodeWatch(said.append, AgentConfig(), default_classifier().load({"severity": {"rule": [rule]}}))
        try:
            if said:
                pytest.skip(said[0])
            log.write(f"<6>{mark}\n")
            log.flush()
            found = wait_for(lambda: watch.new_events("1", 0, "a"), "the line")
        finally:
            watch.close()
    assert [(event.source, event.text, event.code) for event in found] == [("kernel", mark, "marker")]


def test_events_of_a_restarted_controllers_gap_are_not_lost(job):
    """They are sent again when the agent registers anew; those that were known before are not told twice."""
    before = len(job.events("node_event"))
    job.kill()
    job.kernel(1, PAGE_FAULT.format(pid=99999999))
    time.sleep(0.5)
    job.start()
    found = job.wait(lambda: job.events("node_event")[before:], "the event of the gap")
    assert [event["pid"] for event in found] == [99999999]
    job.wait(lambda: job.job()["state"] == "running", "the job goes on")
    assert len(job.events("node_event")) == before + 1
