"""Scripts that surely train nothing, by what they import."""

from __future__ import annotations

import pytest

from unicron.ctl.agent.start.command_mode import only_helps


@pytest.mark.parametrize(
    "text",
    [
        "import os, time\nwhile True:\n    print(os.getloadavg()); time.sleep(1)\n",
        "import psutil\nfrom pynvml import nvmlInit\nimport csv\n",
        "import socket; print(socket.gethostname())",
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
        "import os\nos.execvp('python', ['python', 'train.py'])\n",
        "import runpy\nrunpy.run_path('train.py')\n",
        "import sys\n__import__(sys.argv[1])\n",
        "import sys\nexec(open('train.py').read())\n",
        "def :\n",
        "import os\nif os.environ.get('X'):\n    import jax\n",
    ],
)
def test_what_may_train(text: str) -> None:
    assert not only_helps(text)
