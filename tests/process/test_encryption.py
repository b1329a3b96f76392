"""A controller with a key: whoever has its public key is served, whoever has none or another one is not."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from tests.process.test_controller_process import CONFIG, Agent, Controller
from unicron_ctl.errors import UserError
from unicron_ctl.protocol import wire
from unicron_ctl.protocol.client import ask
from unicron_ctl.protocol.encryption import SECRET_FILE, make_key, secure_client

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def controller(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "unicron_ctl.controller.main", "--make-key", "--state-dir", str(tmp_path / "state")],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        cwd=ROOT,
    )
    assert stat.S_IMODE((tmp_path / "state" / SECRET_FILE).stat().st_mode) == 0o600
    started = Controller(tmp_path, config=CONFIG + done.stdout)
    started.key = make_key(tmp_path / "state")
    assert done.stdout.startswith(f'public_key = "{started.key}"'), "a second time gives the same key"
    yield started
    started.close()


def test_only_peers_with_the_key_are_served(controller, monkeypatch, tmp_path):
    with pytest.raises(UserError, match="no controller answers"):
        ask({"kind": "status"}, controller.address, timeout=0.7)
    monkeypatch.setenv("UNICRON_PUBLIC_KEY", zmq.curve_keypair()[0].decode())
    with pytest.raises(UserError, match="see that public_key is the controller's"):
        ask({"kind": "status"}, controller.address, timeout=0.7)
    monkeypatch.setenv("UNICRON_PUBLIC_KEY", "short")
    with pytest.raises(UserError, match="'short' is no public key"):
        ask({"kind": "status"}, controller.address)
    monkeypatch.delenv("UNICRON_PUBLIC_KEY")
    monkeypatch.setenv("UNICRON_CONFIG", str(tmp_path / "unicron.toml"))
    assert ask({"kind": "status"}, controller.address)["jobs"] == []


def test_an_agent_with_the_key_registers_and_a_plain_one_does_not(controller):
    plain, secured = Agent("tcp://127.0.0.1:1", 0), Agent("tcp://127.0.0.1:1", 1)
    for agent, key in ((plain, ""), (secured, controller.key)):
        agent.socket.disconnect("tcp://127.0.0.1:1")
        secure_client(agent.socket, key)
        agent.socket.connect(controller.address)
        agent.register()
    try:
        secured.expect(wire.Welcome)
        assert not plain.socket.poll(300)
    finally:
        plain.close()
        secured.close()


@pytest.mark.parametrize("harm", ["missing", "readable", "foreign"])
def test_a_secret_that_cannot_be_used_is_one_clear_line(tmp_path, harm):
    state = tmp_path / "state"
    key = make_key(state)
    secret = state / SECRET_FILE
    if harm == "missing":
        secret.unlink()
    elif harm == "readable":
        secret.chmod(0o644)
    else:
        secret.write_bytes(zmq.curve_keypair()[1])
    (tmp_path / "unicron.toml").write_text(f'{CONFIG}public_key = "{key}"\n')
    command = [sys.executable, "-m", "unicron_ctl.controller.main", "--config", str(tmp_path / "unicron.toml")]
    done = subprocess.run(
        [*command, "--listen", "tcp://127.0.0.1:0", "--state-dir", str(state)],
        capture_output=True,
        text=True,
        timeout=30,
        env=os.environ,
        cwd=ROOT,
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "unicrond --make-key" in done.stderr, done.stderr
