"""What a node is said to be too small for, and what Slurm does with elements that are pinned to it: random nodes of a
real cluster, random requests."""

from __future__ import annotations

import os
import random
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.controller import Controller, quick_on_slurm
from tests.support.jobs import sleepers
from tests.support.processes import call, outside_slurm, wait_for
from unicron_ctl.controller.model.view import Listing
from unicron_ctl.controller.plan.eligible_nodes import Ground, misfit
from unicron_ctl.controller.plan.placement import PIN_SECONDS
from unicron_ctl.lab.cluster import LocalCluster, configuration
from unicron_ctl.lab.cluster.cluster_layout import Layout, Spec
from unicron_ctl.shared.slurm import ElementInfo, SlurmClient, SlurmError, pending_reasons, squeue
from unicron_ctl.shared.slurm.slurm_client import NodeInfo

pytestmark = pytest.mark.slurm
NODES = 10
# squeue shows none of this. After a requeue 24.11 starts it on no node (docs/behaviour/squeue-formats.md).
HIDDEN = ["--ntasks=4", "--ntasks-per-gpu=2"]
SEED = os.environ.get("FIT_SEED", "")  # other nodes and requests than those of each run
FEATURES = (
    *("a", "b", "a&b", "a|b", "a|b&c", "a&b|c", "[a|b]", "[a|c|b]", "(a|c)&b", "a|(b&c)", "c|(a&b)", "a,b"),
    *("a&[b|c]", "[b|c]&a", "[(a&b)|c]", "[c|(a&b)]", "a*1", "a*2", "[a*1]", "[a*1&b*1]", "[(a&b)*1&c*1]"),
)
PARTITIONS = (
    "PartitionName=short Nodes=n[1-6] MaxTime=10 State=UP",
    "PartitionName=narrow Nodes=n[4-10] MaxCPUsPerNode=3 State=UP",
    "PartitionName=lean Nodes=n[3-9] MaxMemPerNode=1500 State=UP",
)


def _release(environment: Mapping[str, str]) -> str:
    return call("squeue", "--version", environment=environment).stdout.split()[-1]


def _node(rng: random.Random) -> str:
    """The rest of a node's line of slurm.conf."""
    sockets, cores, threads = rng.choice([1, 1, 2]), rng.randint(1, 4), rng.choice([1, 1, 2])
    memory = rng.choice([800, 1000, 2000, 3000, 4000])
    gpus = rng.choice(["", "gpu:1", "gpu:2", "gpu:a100:1", "gpu:a100:2", "gpu:h100:2"])
    features = rng.sample("abc", rng.randint(0, 3))
    return " ".join(
        [
            f"CPUs={sockets * cores * threads} Boards=1 SocketsPerBoard={sockets} CoresPerSocket={cores}",
            f"ThreadsPerCore={threads} RealMemory={memory} TmpDisk={rng.choice([0, 500, 2000])}",
            rng.choice(["", "", "MemSpecLimit=300"]),
            "CoreSpecCount=1" if cores > 2 and rng.random() < 0.3 else "",
            f"Gres={gpus}" if gpus else "",
            f"Feature={','.join(features)}" if features else "",
        ]
    )


def _request(rng: random.Random) -> list[str]:
    """Options of sbatch, few at a time: most of many at once no node could meet."""
    memory = [f"--mem={rng.choice([500, 900, 1500, 2500])}", f"--mem-per-cpu={rng.choice([200, 400, 900])}", "--mem=0"]
    tasks, most = rng.randint(1, 5), rng.randint(1, 3)
    cpus = [
        *(f"--ntasks={rng.randint(1, 8)}", f"--cpus-per-task={rng.randint(1, 6)}"),
        *(f"--ntasks-per-node={rng.randint(1, 4)}", f"--mincpus={rng.randint(1, 6)}"),
        f"--ntasks={rng.randint(1, 3)} --cpus-per-task={rng.randint(1, 3)}",
        f"--cpus-per-task={rng.randint(1, 5)} --hint=nomultithread",
        f"--ntasks={tasks} --ntasks-per-core={most}",
        f"--ntasks={tasks} --ntasks-per-core=1 --cpus-per-task={most}",
        *(f"--ntasks-per-node={most} --ntasks-per-core={rng.randint(1, 4)}", f"--ntasks-per-core={tasks}"),
        f"--ntasks={tasks} --ntasks-per-socket={most}",
        f"--ntasks={tasks} --ntasks-per-socket={most} --cpus-per-task={rng.randint(1, 2)}",
        f"--ntasks={tasks} --mincpus={rng.randint(2, 6)}",
        *(f"--sockets-per-node={rng.randint(1, 2)}", f"--cores-per-socket={rng.randint(1, 4)}"),
        f"--threads-per-core={rng.randint(1, 2)}",
    ]
    kind = rng.choice(["", "", "a100:", "h100:"])
    gpus = [
        *(f"--gres=gpu:{kind}{rng.randint(1, 2)}", f"--gpus-per-node={kind}{rng.randint(1, 2)}"),
        *(f"--gpus={kind}{rng.randint(1, 2)}", f"--gpus-per-task={kind}1 --ntasks={rng.randint(1, 2)}"),
        f"--gpus-per-socket={kind}{rng.randint(1, 2)} --sockets-per-node={rng.randint(1, 2)}",
        f"--gpus-per-socket=1 --sockets-per-node=2 --gpus={rng.randint(1, 2)}",
        f"--gpus={rng.randint(1, 2)} --cpus-per-gpu={rng.randint(1, 3)}",
        f"--gpus={rng.randint(1, 2)} --mem-per-gpu={rng.choice([400, 900])}",
        f"--tres-per-task=gres/gpu:{kind}1 --ntasks={rng.randint(1, 2)}",  # 22.05 does not know it
    ]
    others = [
        *(f"--tmp={rng.choice([100, 500, 1000])}", f"--exclude=n{rng.randint(1, NODES)}"),
        *(f"--constraint={text}" for text in rng.sample(FEATURES, 4)),
        *("--partition=short", "--partition=short --time=20", "--partition=short,main --time=20"),
        *("--partition=narrow", "--partition=lean,narrow"),
    ]
    chosen = [rng.choice(group) for group in (memory, cpus, gpus, others) if rng.random() < 0.45]
    return " ".join(chosen or [rng.choice(rng.choice([memory, cpus, gpus, others]))]).split()


Make = Callable[[Sequence[str], str], LocalCluster]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """make(shapes, select) starts a cluster with such nodes and SelectTypeParameters."""
    made: list[LocalCluster] = []
    as_usual = configuration.slurm_conf

    def call(shapes: Sequence[str], select: str) -> LocalCluster:
        def slurm_conf(layout: Layout, spec: Spec, user: str, hostname: str, version: tuple[int, int]) -> str:
            lines = as_usual(layout, spec, user, hostname, version).splitlines()
            found = iter(shapes)
            lines = [f"{line} {next(found)}" if line.startswith("NodeName=n") else line for line in lines]
            kept = [line for line in lines if not line.startswith(("NodeName=DEFAULT", "SelectTypeParameters"))]
            kept = [line.replace("OverSubscribe=EXCLUSIVE", "OverSubscribe=NO") for line in kept]
            others = PARTITIONS if len(shapes) == NODES else ()
            return "\n".join([*kept, f"SelectTypeParameters={select}", *others]) + "\n"

        def gres_conf(layout: Layout, spec: Spec) -> str:
            files, lines = configuration.gpu_files(layout, spec), []
            for number, shape in enumerate(shapes, start=1):
                gres = next((word for word in shape.split() if word.startswith("Gres=")), "").split(":")[1:]
                kind = f"Type={gres[0]} " if len(gres) == 2 else ""
                count = int(gres[-1]) if gres else 0
                lines += [f"NodeName=n{number} Name=gpu {kind}File={path}\n" for path in files[:count]]
            return "".join(lines)

        monkeypatch.setattr(configuration, "slurm_conf", slurm_conf)
        monkeypatch.setattr(configuration, "gres_conf", gres_conf)
        made.append(LocalCluster(tmp_path / "state", nodes=len(shapes), gpus_per_node=2))
        made[-1].up()
        return made[-1]

    yield call
    for cluster in made:
        cluster.down()


@pytest.fixture(params=["CR_Core", "CR_Core_Memory"])
def mixed(request: pytest.FixtureRequest, make: Make) -> LocalCluster:
    """A cluster whose nodes all differ."""
    rng = random.Random(f"nodes {request.node.name}{SEED}")
    return make([_node(rng) for _ in range(NODES)], request.param)


def _submit(cluster: LocalCluster, options: Sequence[str]) -> str:
    """The job's number; empty where no node at all, or no release, can meet the request."""
    form = ["--parsable", "--array=0-0", "--nodes=1", "--hold", "--output=/dev/null", *options, "--wrap=sleep 300"]
    env = os.environ | cluster.env()
    done = subprocess.run(["sbatch", *form], env=env, capture_output=True, text=True, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else ""


def _wave(cluster: LocalCluster, client: SlurmClient, nodes: Sequence[NodeInfo], rng: random.Random) -> list[str]:
    """One request for each node. Returns those of which Slurm makes something else than was said."""
    asked: dict[str, tuple[list[str], NodeInfo]] = {}
    for node in nodes:
        job = ""
        while not job:
            job = _submit(cluster, options := _request(rng))
        asked[job] = (options, node)
    said: dict[str, str] = {}
    for e in client.elements(set(asked)):
        node = asked[e.job][1]
        why = misfit(e, node, time.time())
        said[e.job] = why or ("excluded" if node.name in e.excluded_nodes else "")
        try:
            client.pin(e.job, e.element, node.name)
        except SlurmError as error:  # within no partition's limits: then nothing of it starts anywhere
            assert "Requested partition configuration not available now" in str(error), asked[e.job]
            client.cancel(e.job)
            del asked[e.job]
            continue
        client.release(e.job, e.element)
    found: dict[str, ElementInfo] = {}
    began = time.monotonic()

    def decided() -> bool:
        found.update({e.job: e for e in client.elements(set(asked))})
        # Of an element of several partitions Slurm gives no reason when it starts in none of them, and sometimes it
        # calls an idle node busy. After so many seconds such a pin is taken back.
        silent = {e.job for e in found.values() if "," in e.partition and not e.reason and said[e.job]}
        if time.monotonic() - began > PIN_SECONDS:
            silent |= {e.job for e in found.values() if e.reason == "Resources"}
        return all(_is_decided(e) or e.job in silent for e in found.values()) and len(found) == len(asked)

    wait_for(decided, "Slurm has decided on all", now=lambda: [e for e in found.values() if not _is_decided(e)])
    wrong = []
    for job, e in found.items():
        options, node = asked[job]
        starts = e.state != "PENDING"
        if not starts and _untold(options, node, e):
            client.cancel(job)
            continue
        if starts == bool(said[job]) or (starts and list(squeue.nodes_of(e)) != [node.name]):
            wrong.append(
                f"{' '.join(options)} on {node.name}: said {said[job] or 'fits'!r}, {e.state} {e.reason} ({e})"
            )
        client.cancel(job)
    wait_for(lambda: not any(e.state in ("RUNNING", "COMPLETING") for e in client.elements()), "all have ended")
    return wrong


def _untold(options: Sequence[str], node: NodeInfo, e: ElementInfo) -> bool:
    """Whether columns cannot tell that the node is none for it, or not in each release: Slurm's refusal counts
    (docs/behaviour/squeue-formats.md)."""
    asked, counts = e.asked, re.findall(r"\*(\d+)", e.features)
    return (
        (asked.cpus_in_all == 1 and any(text.startswith("--mem-per-cpu") for text in options))
        or (asked.tasks_per_socket > 0 and node.size.threads > 1)
        or (asked.sockets > 1 and any(text.startswith("--gpus-per-socket") for text in options))
        or (e.features.startswith("[") and "(" in e.features)
        or (max(asked.tasks_per_socket, asked.tasks_per_core) > 1 and bool(e.gres))
        or (bool(e.gres) and any(text.startswith("--mincpus") for text in options))
        or asked.nodes > 1  # of --nodes=1: no node at all has so many CPUs
        or counts == ["1"]
        or e.reason == "PartitionTimeLimit"  # of its only partition; a QOS might have allowed it
    )


def _is_decided(e: ElementInfo) -> bool:
    return (
        e.state == "RUNNING" or pending_reasons.refusal_seconds(e.reason) > 0 or pending_reasons.barred(e, time.time())
    )


def _agrees(cluster: LocalCluster, waves: int) -> None:
    client = cluster.client()
    nodes = client.nodes()
    assert len({node.size for node in nodes}) > NODES // 2 and all(node.size.cpus for node in nodes)
    rng = random.Random(f"requests{SEED}")
    wrong = [text for _ in range(waves) for text in _wave(cluster, client, nodes, rng)]
    assert not wrong, "\n".join(wrong)


def test_what_is_said_to_fit_is_what_slurm_starts(mixed: LocalCluster) -> None:
    """An element that is pinned to a node that cannot take it would wait for ever."""
    _agrees(mixed, 3)


@pytest.mark.wide
def test_what_is_said_of_many_requests_is_what_slurm_does(mixed: LocalCluster) -> None:
    _agrees(mixed, 15)


@pytest.mark.parametrize("answer", ["BadConstraints", "ReqNodeNotAvail"])
def test_a_pin_that_is_taken_back_lets_the_element_start(mixed: LocalCluster, answer: str) -> None:
    """Slurm sets the priority to 0 with BadConstraints and gives it back when the pin changes: no release is needed."""
    client = mixed.client()
    bad = {"BadConstraints": "n1", "ReqNodeNotAvail": "n2"}[answer]
    if answer == "ReqNodeNotAvail":
        client.drain("n2", "test")
    job = _submit(mixed, ["--exclude=n1"])
    client.pin(job, 0, bad)
    client.release(job, 0)

    def element() -> ElementInfo:
        return client.elements({job})[0]

    wait_for(lambda: element().reason.startswith(answer), f"Slurm says {answer}", now=element)
    assert element().required_nodes == {bad} and pending_reasons.refusal_seconds(element().reason)
    assert pending_reasons.explain_pending(element(), time.time()).startswith(f"it must start on {bad} (ReqNodeList)")
    client.pin(job, 0, None)
    assert element().reason == "" or element().state == "RUNNING"
    wait_for(lambda: element().state == "RUNNING", "it starts elsewhere", now=element)


def test_the_first_form_of_each_listing_is_read(mixed: LocalCluster, caplog: pytest.LogCaptureFixture) -> None:
    """Defect: no release knows squeue's ReservationName, and 22.05 no ExcNodes: the whole queue was read in a second
    form, without what others ask for, and squeue ran twice for each listing."""
    client, env = mixed.client(), os.environ | mixed.env()
    job = _submit(mixed, ["--constraint=a|b|c", "--exclude=n1", "--mem-per-cpu=100", "--cpus-per-task=2", "--gpus=1"])
    client.pin(job, 0, "n2")
    (other,) = [e for e in client.others().elements if e.state == "PENDING"]
    (own,) = client.elements({job})
    assert not caplog.records
    for e in (own, other):
        assert (e.features, e.gres, e.required_nodes) == ("a|b|c", "gpu:1", {"n2"})
        assert (e.asked.nodes, e.asked.cpus, e.asked.memory, e.asked.in_all) == (1, 2, 100, 200)
    assert own.excluded_nodes == {"n1"}
    assert other.excluded_nodes == (set() if _release(env).startswith("22.") else {"n1"})


def test_a_heterogeneous_job_that_can_never_start_keeps_no_more_nodes_than_slurm_keeps_for_it(make: Make) -> None:
    """Defect: its second component, for which Slurm plans nothing, kept every idle node from a held job, for ever."""
    cluster = make(
        ["CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=4000"] * 3, "CR_Core"
    )
    client, env = cluster.client(), os.environ | cluster.env()
    words = ["sbatch", "-N2", "-n2", "-o", "/dev/null", ":", "-N2", "-n2", "--wrap=sleep 300"]
    assert subprocess.run(words, env=env, capture_output=True, timeout=30).returncode == 0

    def components() -> list[ElementInfo]:
        return sorted((e for e in client.others().elements if e.hetero), key=lambda e: int(e.job))

    wait_for(lambda: [bool(e.planned_nodes) for e in components()] == [True, False], "Slurm plans", now=components)
    assert len({e.hetero for e in components()}) == 1
    job = _submit(cluster, [])
    (own,) = client.elements({job})
    nodes = client.nodes()
    listing = Listing(time.time(), nodes, [own, *components()])
    everywhere = {node.name for node in nodes}
    (free,) = Ground(listing, {job}, time.time()).reach([own], everywhere, ()).nodes
    assert {free} == everywhere - components()[0].planned_nodes
    client.pin(job, 0, free)
    client.release(job, 0)
    wait_for(lambda: client.elements({job})[0].state == "RUNNING", "it starts there", now=components)


def test_a_job_that_waits_for_nodes_with_the_same_feature_keeps_no_others_idle(make: Make) -> None:
    """Defect: each node was looked at by itself. One with a is busy, so that `[a|b|c]` waits for it; b and c are on one
    node each, which a job of lower priority may have."""
    shape = "CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=4000 Feature="
    cluster = make([shape + feature for feature in "aabc"], "CR_Core")
    client, env = cluster.client(), os.environ | cluster.env()

    def submit(*words: str) -> str:
        form = ["sbatch", "--parsable", "--exclusive", "-o", "/dev/null", *words, "--wrap=sleep 300"]
        return subprocess.run(form, env=env, capture_output=True, text=True, timeout=30, check=True).stdout.strip()

    def state(job: str) -> str:
        return next((e.state for e in client.others().elements if e.job == job), "")

    first = submit("-N1", "-w", "n1")
    wait_for(lambda: state(first) == "RUNNING", "the first has its node", now=client.others)
    rival = submit("-N2", "-C", "[a|b|c]", "-t", "60")
    own = submit("-N1", "--array=0-0", "--hold", "--nice=1000")

    def listing() -> Listing:
        return Listing(time.time(), client.nodes(), [*client.elements({own}), *client.others().elements])

    waiting = wait_for(lambda: (found := listing()).waiting and found, "the rival waits", now=client.others)
    (element,) = client.elements({own})
    found = Ground(waiting, {own}, time.time()).reach([element], {"n2", "n3", "n4"}, ())
    assert found.nodes == {"n3", "n4"} and found.barred == {f"about to go to pending job {rival}": 1}
    client.pin(own, 0, "n3")
    client.release(own, 0)
    wait_for(lambda: client.elements({own})[0].state == "RUNNING", "it starts there", now=client.others)
    client.cancel(first)
    wait_for(lambda: state(rival) == "RUNNING", "the rival starts", now=client.others)
    (started,) = (e for e in client.others().elements if e.job == rival)
    assert set(squeue.nodes_of(started)) == {"n1", "n2"}


@pytest.mark.parametrize(
    ("options", "pins"),
    [pytest.param(["--mem=1500"], ["n4"], marks=pytest.mark.wide), (HIDDEN, ["n3", "n4"])],
)
def test_a_lost_element_goes_to_a_node_that_can_take_it(
    make: Make, tmp_path: Path, options: list[str], pins: list[str]
) -> None:
    """Defect: it was pinned to n3, which has too little, and waited there for ever while n4 was idle."""
    shape = "CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory={} Gres=gpu:{}"
    large, small = shape.format(8000, 2), shape.format(1000, 1)
    cluster = make([large, large, small, large], "CR_Core")
    environment = outside_slurm() | cluster.env()
    controller = Controller(tmp_path, quick_on_slurm("act"), environment)
    cluster.client().drain("n4", "for the test")
    try:
        form = ["--parsable", "-N1", "--array=0-1", "--exclusive", "--requeue", "-o", "/dev/null", *options]
        done = call("sbatch", *form, sleepers(tmp_path, controller), environment=environment)
        assert done.returncode == 0, done.stderr

        def nodes() -> dict[int, str]:
            return {e["element"]: e["node"] for e in controller.job().get("elements", []) if not e["gone"]}

        controller.wait(lambda: sorted(nodes().values()) == ["n1", "n2"], "two agents")
        controller.wait(lambda: controller.job()["state"] == "running", "the job runs")
        cluster.client().resume("n4")
        lost = next(element for element, name in nodes().items() if name == "n1")
        cluster.power_off("n1")

        def asked() -> list[str]:
            return [e["node"] for e in controller.events("slurm_action") if e["action"] == "pin"]

        def refused() -> list[str]:
            bounds = controller.ask("explain", job=done.stdout.strip())["bounds"]
            return re.findall(r"(\d+) refused by Slurm \(BadConstraints\)", bounds)

        if options == HIDDEN and not _release(environment).startswith("22."):
            controller.wait(lambda: refused() == ["2"], "both are out of reach")
            controller.wait(lambda: asked() == [*pins, ""], "and it waits for neither")
        else:
            controller.wait(lambda: nodes().get(lost) == "n4", "the lost element is on n4")
            assert asked() == pins and refused() == (["1"] if "n3" in pins else [])
    finally:
        controller.close()
