"""Scripts that import torch anew, in processes of their own: `make test` runs the unit tests at a low priority, where
such an import may take minutes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

from tests.support.processes import COLD_LIMIT, ROOT
from unicron_ctl.agent.ranks.counted import Folder, Progress

pytestmark = pytest.mark.process

SCRIPT = """
import warnings
import torch
from nvidia_resiliency_ext import fault_tolerance

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def iteration():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()

for _ in range(5):
    iteration()
torch.save(model.state_dict(), "/dev/null")
assert torch.autograd.backward.__name__ == "backward" and torch.save.__doc__, "who looks at them sees torch's own"
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    quick = torch.compile(iteration, backend="eager")
    quick(), quick()
seen = [str(each.message) for each in seen]
assert not any("how to trace" in each for each in seen), seen
client = fault_tolerance.RankMonitorClient()
client.init_workload_monitoring()
client.start_section("step")
client.end_section("step")
for _ in range(3):
    client.send_heartbeat()
client.start_section("checkpointing")
"""
# NVRx's client in outline, as the wheel of 0.7.0 has it, whose glibc this machine need not have.
CLIENT = """
import os, socket
FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR = "FT_RANK_MONITOR_IPC_SOCKET"
class OkMsg: pass
def write_object_to_ipc_socket(message, line): raise ConnectionError("no server")
def read_obj_from_ipc_socket(line): raise ConnectionError("no server")
class RankMonitorClient:
    def _connect_to_rmon_server(self, num_warmup_iters=None):
        raise RuntimeError(os.environ[FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR])
    def init_workload_monitoring(self, num_warmup_iters=None):
        self._connect_to_rmon_server(num_warmup_iters=num_warmup_iters)
    def send_heartbeat(self): write_object_to_ipc_socket(None, self.rank_monitor_socket)
    def start_section(self, section): write_object_to_ipc_socket(section, self.rank_monitor_socket)
    def end_section(self, section): write_object_to_ipc_socket(section, self.rank_monitor_socket)
    def end_all_sections(self): write_object_to_ipc_socket(None, self.rank_monitor_socket)
"""


def test_an_unmodified_script_that_starts_cold_is_counted(tmp_path):
    """Its steps, waits, saves, and the calls for another launcher, which is not there."""
    home = tmp_path / "nvidia_resiliency_ext" / "fault_tolerance"
    home.mkdir(parents=True)
    (home.parent / "__init__.py").touch()
    (home / "__init__.py").write_text("from .rank_monitor_client import RankMonitorClient\n")
    (home / "config.py").write_text("class FaultToleranceConfig:\n    skip_section_response = True\n")
    (home / "rank_monitor_client.py").write_text(CLIENT)
    (tmp_path / "script.py").write_text(SCRIPT)
    with contextlib.closing(Folder(str(tmp_path))) as folder:
        counted = Progress(folder, 0)
        path = os.pathsep.join((folder.autoload, str(tmp_path)))
        environment = {**os.environ, **counted.start(1, 0), "PYTHONPATH": path}
        command = [sys.executable, str(tmp_path / "script.py")]
        done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=COLD_LIMIT)
        assert done.returncode == 0, done.stderr
        page = counted.page.read()
        assert (page.done, page.waits, page.saves, page.saved_done) == (7, 7, 1, 5)
        assert (page.heartbeats, page.outside) == (6, 1) and not counted.complaint()


def test_what_belongs_to_models_fits_what_is_installed():
    """In a process of its own: these modules compile functions when they are imported."""
    program = (
        "import torch, unicron_transition.seams.table as t; print(t.difference(t.TORCH_MODELS, torch.__version__))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=COLD_LIMIT)
    assert done.stdout.strip() == "None", done.stderr


def test_a_script_may_import_megatron_after_the_world_is_made():
    """Nothing imports it before: that takes seconds, and a plain module never needs it."""
    code = """
import sys
from unicron_transition.seams import elastic_buckets
elastic_buckets.prepare_when_imported()
elastic_buckets.prepare_when_imported()
assert not any(name.startswith("megatron") for name in sys.modules)
sys.path.insert(0, "sbatch_templates")
import cpu_adapter
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.distributed import param_and_grad_buffer
assert param_and_grad_buffer._ParamAndGradBuffer.unicron_roomy
assert not any(type(finder).__name__ == "_Waiting" for finder in sys.meta_path)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=COLD_LIMIT)
