"""Scripts that surely train nothing, by what they import; commands that are Python's."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron_ctl.agent.start.command_mode import is_python, only_helps


@pytest.mark.parametrize(
    "text",
    [
        "import os, time\nwhile True:\n    print(os.getloadavg()); time.sleep(1)\n",
        "import psutil\nfrom pynvml import nvmlInit\nimport csv\n",
        "import socket; print(socket.gethostname())",
        "import subprocess, time\nprint(subprocess.run(['nvidia-smi', '-q'], stdout=subprocess.PIPE).stdout)\n",
        "import subprocess as sp\ntry: sp.check_output('nvidia-smi -L', shell=True)\nexcept sp.TimeoutExpired: pass\n",
        "from subprocess import PIPE, check_output\nprint(check_output(['/usr/bin/nvidia-smi']))\n",
        "import os\nos.system('nvidia-smi')\n",
        "import os\nx = os" + ".a()" * 400 + "\n",
    ],
)
def test_monitors_and_helpers(text: str) -> None:
    assert only_helps(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "print(1)",
        "import torch\n",
        "import os\nfrom mine.training import main\nmain()\n",
        "from . import train\n",
        "import subprocess\nsubprocess.run(['python', 'train.py'])\n",
        "import os\nos.system('python train.py')\n",
        "import os\nos.system('nvidia-smi; python train.py')\n",
        "import subprocess\nsubprocess.run(['nvidia-smi'])\nstart = subprocess.run\n",
        "import subprocess\nsubprocess.run(['nvidia-smi'])\ngetattr(subprocess, 'run')(['python'])\n",
        "import subprocess\nsubprocess.run(['nvidia-smi'], executable='train')\n",
        "import subprocess, sys\nsubprocess.run(sys.argv[1:])\n",
        "from subprocess import *\nrun(['nvidia-smi'])\n",
        "from subprocess import run\nrun(['nvidia-smi'])\nrun(['./train'])\n",
        "import os\nos.execvp('python', ['python', 'train.py'])\n",
        "import runpy\nrunpy.run_path('train.py')\n",
        "import sys\n__import__(sys.argv[1])\n",
        "import sys\nexec(open('train.py').read())\n",
        "def :\n",
        "import os\nx = os" + ".a()" * 5000 + "\n",
        "import os\nx = " + "-" * 50000 + "1\n",
        "import os\nos" + ".a()" * 400 + ".system('python train.py')\n",
        "import subprocess\nsubprocess.Popen(['./train']).communicate('ls')\n",
        "import os\n" + "a = 1\n" * 30000,
        "import os\nif os.environ.get('X'):\n    import jax\n",
    ],
)
def test_what_may_train(text: str) -> None:
    assert not only_helps(text)


@pytest.mark.parametrize(
    ("command", "shell", "found"),
    [
        ("python train.py", "", True),
        ("nice /opt/env/bin/python3.11 -m train", "", True),
        ("bash run.sh", "cd x\nA=1 python -u train.py", True),
        ("bash run.sh", "./solver pythonic", False),
        ("./train.py", "", True),
        ("numactl -N 0 FOLDER/console-script run", "", True),
        ("FOLDER/shell-script", "", False),
        ("./solver in.txt", "", False),
        ("bash -c TEXT", "NODE_RANK=$SLURM_NODEID console-script train x.yaml", True),  # by PATH, as without the shell
        ("bash -c TEXT", "cd x && shell-script a; ./solver --with=console-script", False),
    ],
)
def test_commands_of_pythons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, shell: str, found: bool
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, first in (("console-script", "#!/opt/env/bin/python3.11"), ("shell-script", "#!/bin/sh")):
        (tmp_path / name).write_text(f"{first}\n")
        (tmp_path / name).chmod(0o700)
    assert is_python(command.replace("FOLDER", str(tmp_path)).split(), shell) is found
