"""Installed by the document to the letter, used, upgraded with a job running, and purged without a trace."""

from __future__ import annotations

import hashlib
import re
import time
from pathlib import Path

import pytest

from tests.packages.conftest import build
from tests.support.booted_root import BootedRoot
from tests.support.processes import ROOT
from unicron_ctl.shared.system.release import release

pytestmark = pytest.mark.timeout(1800)

MOST_COMMANDS, MOST_MINUTES = 8, 10.0
RELEASE = release()
NAMES = ("unicron-agent", "unicron-client", "unicron-controller", "unicron-plugin")
ITERATIONS = re.compile(r"iteration (\d+): loss ([\d.]+), (\d) ranks")
# Where a trace could be; not the user's own files, nor what dpkg, apt and systemd's journal note of every package.
TRACES = r"""find / -xdev \( -path /proc -o -path /sys -o -path "$HOME/packages" -o -path /home -o -path /var/log \
    -o -path /var/cache -o -path '/var/lib/dpkg/*' -o -path /var/lib/apt \) -prune -o -iname '*unicron*' -print
ls -d /dev/shm/*unicron* /tmp/unicron* /run/*unicron* 2>/dev/null; true"""


def commands(heading: str) -> list[tuple[str, str]]:
    """(user, command) of each line of the section's shell blocks in docs/install.md."""
    text = (ROOT / "docs/install.md").read_text()
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]
    found = [(line[0], line[2:].partition("  #")[0].strip()) for line in lines if line[:2] in ("# ", "$ ")]
    assert found and len(found) == len(lines), f"a line of {heading} begins with neither # nor $"
    return [("root" if sign == "#" else "alice", command) for sign, command in found]


def losses(site: BootedRoot) -> list[tuple[int, str, int]]:
    """(iteration, loss, ranks) of each line in the log of the job's first element."""
    return [
        (int(i), loss, int(n))
        for i, loss, n in ITERATIONS.findall(site.run("cat ~/run/*_0.log 2>/dev/null || true", "alice"))
    ]


def wait_for_iteration(site: BootedRoot, number: int, seconds: float = 180.0) -> None:
    """Returns when the job has trained so far."""
    until = time.monotonic() + seconds
    while not any(i >= number for i, _, _ in losses(site)):
        assert time.monotonic() < until, site.run("tail -n 30 ~/run/*.log; unicronctl status", "alice", check=False)
        time.sleep(1.0)


def test_a_second_build_gives_the_same_bytes(packages: dict[str, Path]) -> None:
    assert sorted(packages) == list(NAMES)
    again = build("unicron-again")
    sums = [
        {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in lot.items()} for lot in (packages, again)
    ]
    assert sums[0] == sums[1]


def test_from_nothing_to_a_protected_job(site: BootedRoot) -> None:
    todo = commands("Ten minutes to a protected job")
    assert len(todo) <= MOST_COMMANDS
    began = time.monotonic()
    for user, command in todo:
        where = "cd run 2>/dev/null || true" if user == "alice" else "cd packages"
        print(user, command, site.run(f"{where}; {command}", user), sep="\n")
    wait_for_iteration(site, 3)
    assert time.monotonic() - began < MOST_MINUTES * 60
    said = site.run("unicronctl status", "alice")
    assert "observe" in said and "running" in said
    assert {n for _, _, n in losses(site)} == {2}
    assert site.run("dpkg -V " + " ".join(NAMES)) == ""
    assert "enabled" in site.run("systemctl is-enabled unicrond") and "active" in site.run(
        "systemctl is-active unicrond"
    )
    # The root has no man(1).
    units = "unicrond.service unicron-web.service unicron-report.timer"
    said = site.run(f"systemd-analyze verify --man=no {units}", check=False)
    assert not [line for line in said.splitlines() if "unicron" in line], said


def test_the_demo_runs_on_them(site: BootedRoot) -> None:
    more = "'megatron-core>=0.16.1,<0.20' einops"
    site.run(f"/opt/train/bin/python -m pip install -q --disable-pip-version-check {more}", seconds=900)
    demo = "unicronctl demo --python /opt/train/bin/python 2>&1"
    # The private cluster's slurmd would not start where this machine has control groups of both versions.
    old = "mkdir /sys/fs/cgroup/systemd; mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd"
    only_old = f"if grep -q name=systemd /proc/self/cgroup; then mount -t tmpfs tmpfs /sys/fs/cgroup; {old}; fi"
    said = site.run(f"unshare -m bash -c \"{only_old}; su - alice -c '{demo}'\"", seconds=900)
    assert "What you saw: when a rank or a node died" in said


def test_an_upgrade_leaves_the_running_job_alone(site: BootedRoot) -> None:
    before = losses(site)[-1][0]
    agents = site.run("pgrep -f '/opt/unicron/lib/interpreter' | sort")
    for name in NAMES:  # the next release: the same with a higher number
        rename = f"sed -i 's/{RELEASE}-1/{RELEASE}-2/g' next/DEBIAN/control"
        pack = f"dpkg-deb -Zgzip -b next newer/{name}.deb >/dev/null"
        site.run(f"cd packages && rm -rf next && dpkg-deb -R {name}_*.deb next && {rename} && mkdir -p newer && {pack}")
    old = site.run("systemctl show -p MainPID unicrond")
    site.run("apt-get install -y -q ~/packages/newer/*.deb")
    assert f"{RELEASE}-2" in site.run("dpkg-query -W unicron-agent")
    assert site.run("systemctl show -p MainPID unicrond") != old, "unicrond goes on with the new files"
    wait_for_iteration(site, before + 2)
    # What the old agent starts now is the new release's.
    rank = site.run("pgrep -u alice -f 'train_plain.py' | tail -n 1").split()[0]
    site.run(f"kill -9 {rank}")
    wait_for_iteration(site, losses(site)[-1][0] + 3)
    assert set(agents.split()) & set(site.run("pgrep -f '/opt/unicron/lib/interpreter'").split())
    assert "trained again after" in site.run("unicronctl status", "alice")
    numbers = [i for i, _, _ in losses(site)]
    assert numbers == sorted(set(numbers)), "no iteration was done twice"


def test_a_release_can_be_taken_back(site: BootedRoot) -> None:
    site.run("cd packages && apt-get install -y -q --allow-downgrades ./unicron-*.deb")
    before = losses(site)[-1][0]
    wait_for_iteration(site, before + 2)
    assert "tcp://" in site.run("unicronctl ping", "alice")


def test_a_purge_leaves_no_trace(site: BootedRoot) -> None:
    site.run("scancel -u alice; sleep 3")
    site.run("scontrol update NodeName=n2 State=DRAIN Reason='unicron[node_problem]: n2 is lost'")
    job = site.run("sbatch --parsable --begin=now+1hour --wrap 'sleep 1'", "alice").strip()
    comment = "unicron: held, the plan has no node | billed to lab 7"
    site.run(f"scontrol hold {job}; scontrol update JobId={job} AdminComment='{comment}'")
    print(site.run("apt-get purge -y -q 'unicron-*' && apt-get autoremove --purge -y -q"))
    assert "ii  unicron" not in site.run("dpkg -l | grep unicron || true")
    assert site.run(TRACES).split() == []
    assert "unicron" not in site.run("getent passwd; getent group; systemctl list-unit-files --no-legend; srun --help")
    assert site.run("sinfo -h -R").strip() == "" and site.run("sinfo -h -t idle -o %D").strip() == "2"
    shown = site.run(f"scontrol show job {job}")
    assert "AdminComment=billed to lab 7" in shown and "JobHeld" not in shown
    assert "unicron" not in site.run("cat /etc/slurm/*.conf /etc/slurm/plugstack.conf.d/* 2>/dev/null || true")
    assert site.run("srun -N2 hostname", "alice").split(), "Slurm works as before"
