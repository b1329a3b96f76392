"""Which steps get an agent, and what they are given, on a real Slurm with nodes of two GPUs."""

from __future__ import annotations

import re

import pytest

from tests.support.plugin_site import Site
from tests.support.processes import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.site(gpus=2)]
RANK = "import os; print('rank {RANK} of {WORLD_SIZE}\\n'.format(**os.environ), end='', flush=True)"
PREPARES = "import torch, os\nprint('prepares as', os.environ.get('RANK'), 'of', os.environ.get('WORLD_SIZE'))\n"
# Its second rank fails the first time.
FROM_INPUT = f"""{RANK}
import pathlib
if os.environ["RANK"] == "1" and not pathlib.Path("failed").exists():
    pathlib.Path("failed").touch()
    os._exit(3)
"""
JOB = f"""#!/bin/bash
#SBATCH -N1 --exclusive --gres=gpu:2
srun -n1 bash setup.sh
srun sleep 0.1
srun --ntasks-per-node=1 python prepare.py
UNICRON_RANKS_PER_NODE=2 srun python - <<END
{FROM_INPUT}END
echo from input: $?
srun bash -s <<END
echo in a shell
END
printf 'a\\nb\\n' | while read line; do srun -n1 -c1 cat > /dev/null; echo line $line; done
echo '0 python -c pass' > programs
srun -n1 --multi-prog programs
srun --overlap perl -e 'sleep 1 while 1' &
sleep 2
srun --overlap python train.py
kill %1
wait
sbatch -n1 -o other.out --wrap 'env | grep UNICRON || echo nothing' 2>&1
echo END
"""
SWEEP = """#!/bin/bash
#SBATCH -N1 --exclusive --array=0-3
rates=(1 2 3 4)
srun python -c "print('rate', $*)" --lr ${rates[$SLURM_ARRAY_TASK_ID]}
"""


def submit(site: Site, script: str, text: str, *options: str) -> str:
    (site.folder / script).write_text(text)
    return site.submit("--unicron", *options, script)


def test_each_step_runs_as_it_is_meant(site: Site) -> None:
    """Defects: helpers ran once a GPU; a restarted rank read an empty standard input and the job was complete; a
    monitor took the agent; a sweep became one world, and what did not fit in it never ran."""
    (site.folder / "setup.sh").write_text("mkdir -p made\necho set up\n")
    (site.folder / "prepare.py").write_text(PREPARES)
    (site.folder / "train.py").write_text("import msgspec, " + RANK.replace("'rank", "'train").removeprefix("import "))
    job = submit(site, "job.sh", JOB)
    # Of a sweep that has submitted these.
    site.environment |= dict.fromkeys(("UNICRON_SWEEP", "_UNICRON_OF_JOB_UNICRON_SWEEP"), "submit.sh")
    sweep = submit(site, "sweep.sh", SWEEP.replace("$*", "*__import__('sys').argv"))
    hidden = site.folder / "hidden.sh"
    hidden.write_text("srun python train.py --lr $1 $SLURM_JOB_ID\n")
    alone = submit(site, "alone.sh", "#!/bin/sh\npython3 -c 'print(5)'\n")
    unknown = submit(site, "unknown.sh", "#!/bin/sh\nmake --version\n")  # it may run srun
    branch = submit(site, "branch.sh", "#!/bin/sh\nif false; then srun python train.py; fi\n")
    site_idle(site)
    other = submit(site, "other.sh", "#!/bin/sh\n. ./hidden.sh\n", "--array=0-1", "-N1", "--exclusive")
    site_idle(site)

    lines = (site.folder / f"slurm-{job}.out").read_text().splitlines()

    def count(line: str) -> int:
        return lines.count(line)

    assert count("set up") == 1 and count("in a shell") == 1 and count("END") == 1, site.logs()
    assert [line for line in lines if line.startswith("prepares")] == ["prepares as 0 of 1"], site.logs()
    assert count("from input: 0") == 1 and count("rank 1 of 2") == 2 and count("rank 0 of 2") >= 1, site.logs()
    assert count("line a") == 1 and count("line b") == 0, "srun reads a loop's input, as without an agent"
    said = [line for line in lines if "this step runs unprotected" in line]
    assert len(said) == 2 and "standard input" in said[0] and "--multi-prog" in said[1], site.logs()
    assert count("train 0 of 2") == count("train 1 of 2") == 1, site.logs()
    assert (
        count(
            "unicron: nothing protects the new job, for --unicron was said of the job that submits it: if it trains, "
            "submit it with --unicron, too"
        )
        == 1
    ), site.logs()
    inherited = (site.folder / "other.out").read_text()
    assert not re.search(r"^_?UNICRON(_OF_JOB_|=|_(MODE|WEIGHT)=)", inherited, re.MULTILINE), inherited
    assert "no controller answers" not in "\n".join(lines)
    for element in range(4):
        text = (site.folder / f"slurm-{sweep}_{element}.out").read_text()
        assert f"rate -c --lr {element + 1}\n" in text and text.count("rate") == 1, text
        assert "unicron: this step runs unprotected: its batch script names SLURM_ARRAY_TASK_ID" in text
    for element in range(2):
        text = (site.folder / f"slurm-{other}_{element}.out").read_text()
        assert "its command is another one than that of the other elements" in text, text
    text = (site.folder / f"slurm-{alone}.out").read_text()
    assert text.startswith("unicron: nothing protects this job, for no srun in its script starts a training"), text
    text = (site.folder / f"slurm-{unknown}.out").read_text()
    assert "nothing protects" not in text and "unicron: no step of this job was protected" in text, text
    text = (site.folder / f"slurm-{branch}.out").read_text()
    assert text.startswith("unicron: no step of this job was protected, for its script has run no srun"), text
    assert site.logs().count("no step of this job was protected") == 2, site.logs()


def site_idle(site: Site) -> None:
    """All jobs have ended."""
    wait_for(lambda: not site.run("squeue", "-h"), site.logs, limit=180.0)
