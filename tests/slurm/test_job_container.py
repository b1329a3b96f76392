"""Jobs with a /tmp and a /dev/shm of their own, by Slurm's job_container/tmpfs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs import FOREVER
from tests.support.plugin_site import Site
from tests.support.processes import ROOT, wait_for
from unicron_ctl.lab.cluster import cluster_layout

# As slurmstepd does it: it holds the namespace of a child that has ended by a mount. Linux 6.18 may refuse that where
# slurmd itself is in a namespace, for a later one can have a lower number on another CPU.
HOLD = """
mount -t tmpfs none "$0" && touch "$0/held" || exit 1
for cpu in $(seq 0 $(($(nproc) - 1))); do
    taskset -c $cpu unshare --mount --propagation private sleep 60 & child=$!
    until [ "$(readlink /proc/$child/ns/mnt)" != "$(readlink /proc/self/ns/mnt)" ]; do sleep 0.01; done
    mount --bind /proc/$child/ns/mnt "$0/held"; status=$?
    kill $child
    [ $status = 0 ] && umount "$0/held" || break
done
umount "$0"
exit $status
"""
LINES = ["JobContainerType=job_container/tmpfs", "PrologFlags=Contain"]

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.wide,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a job a /tmp of its own"),
    pytest.mark.skipif(ROOT.is_relative_to("/tmp"), reason="this checkout is in /tmp, which such jobs do not see"),
]


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Nothing of it is in /tmp."""
    folder = Path(tempfile.mkdtemp(prefix="unicron-", dir="/var/tmp"))
    monkeypatch.setattr(cluster_layout, "SHORT_FOLDERS", folder.parent)
    base, settings = folder / "base", folder / "slurm/etc"
    try:
        base.mkdir()
        held = subprocess.run(["sh", "-c", HOLD, base], capture_output=True, text=True, timeout=60)
        if held.returncode:
            pytest.skip(f"this kernel lets no mount hold a namespace here: {held.stderr.strip().splitlines()[-1]}")
        settings.mkdir(parents=True)
        (settings / "job_container.conf").write_text(f"AutoBasePath=true\nBasePath={base}\n")
        made = Site(folder, config_lines=LINES)
        try:
            yield made
        finally:
            made.close()
    finally:
        unmount(base)
        shutil.rmtree(folder)


def unmount(folder: Path) -> None:
    """What steps that were killed have left mounted there."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in reversed(points):
        if Path(point).is_relative_to(folder):
            subprocess.run(["umount", "--lazy", point], check=True)


def test_a_job_with_private_tmp_and_shared_memory_is_healed(site: Site) -> None:
    """The agent's files and the ranks' saved states are in them."""
    templates = shutil.copytree(ROOT / "sbatch_templates", site.folder / "templates")
    words = f"python {templates}/train_plain.py --text {templates} --iterations {FOREVER} --save {site.folder}/saves"
    site.environment.pop("PYTHONPATH", None)
    of_job = {"OMP_NUM_THREADS": "1", "UNICRON_MEMORY_DIR": "/dev/shm", "TMPDIR": "/tmp"}
    number = site.submit("--unicron", "--array=0-1", "-N1", "--exclusive", "--wrap", f"srun {words}", **of_job)

    def trains(least: int) -> bool:
        job = site.job(number)
        return job.get("members") == [0, 1] and job["state"] == "running" and job["iteration"] >= least

    wait_for(lambda: trains(3), site.logs)
    before, victim = site.job(number), site.controller.rank(1, number)["pid"]
    of_a_job = Path(f"/proc/{victim}/root")
    for name, files in (("tmp", "unicron-*/ranks"), ("dev/shm", f"unicron.{number}.*")):
        assert list((of_a_job / name).glob(files))
        assert not (of_a_job / name).samefile(Path("/") / name)
    os.kill(victim, signal.SIGKILL)
    wait_for(
        lambda: trains(before["iteration"] + 5) and site.job(number)["generation"] > before["generation"], site.logs
    )
    assert not site.controller.events("reform", job=number)  # the other one has kept its work
    site.run("scancel", number)
    wait_for(lambda: site.job(number)["ended"], site.logs)
