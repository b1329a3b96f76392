"""A controller with a key: whoever has its public key is served, whoever has none or another one is not."""

from __future__ import annotations

import stat

import pytest
import zmq

from tests.support.controller import COMMAND, Controller
from tests.support.processes import call
from tests.support.scripted import ScriptedAgent
from unicron_ctl.shared.protocol import wire
from unicron_ctl.shared.protocol.client import ask_controller
from unicron_ctl.shared.protocol.encryption import SECRET_FILE, make_key
from unicron_ctl.shared.system.errors import UserError

pytestmark = pytest.mark.process


class SecuredController(Controller):
    """A controller with a key. What is asked of it is asked without one, unless the test sets it."""

    def __init__(self, folder):
        done = call(*COMMAND, "--make-key", "--state-dir", folder / "state")
        assert done.returncode == 0, done.stderr
        assert stat.S_IMODE((folder / "state" / SECRET_FILE).stat().st_mode) == 0o600
        self.key = make_key(folder / "state")
        assert done.stdout.startswith(f'public_key = "{self.key}"'), "a second time gives the same key"
        super().__init__(folder, done.stdout)


@pytest.fixture
def controller(tmp_path):
    started = SecuredController(tmp_path)
    yield started
    started.close()


def test_only_peers_with_the_key_are_served(controller, monkeypatch):
    with pytest.raises(UserError, match="no controller answers"):
        ask_controller({"kind": "status"}, controller.address, timeout=0.7)
    monkeypatch.setenv("UNICRON_PUBLIC_KEY", zmq.curve_keypair()[0].decode())
    with pytest.raises(UserError, match="see that public_key is the controller's"):
        ask_controller({"kind": "status"}, controller.address, timeout=0.7)
    monkeypatch.setenv("UNICRON_PUBLIC_KEY", "short")
    with pytest.raises(UserError, match="'short' is not a public key"):
        ask_controller({"kind": "status"}, controller.address)
    monkeypatch.delenv("UNICRON_PUBLIC_KEY")
    monkeypatch.setenv("UNICRON_CONFIG", str(controller.config))
    assert ask_controller({"kind": "status"}, controller.address)["jobs"] == []


def test_an_agent_with_the_key_registers_and_a_plain_one_does_not(controller):
    plain, secured = (ScriptedAgent(controller.address, n, key=key) for n, key in enumerate(("", controller.key)))
    try:
        plain.register()
        secured.register()
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
    config = tmp_path / "unicron.toml"
    config.write_text(f'[controller]\nauth = "none"\nslurm = "none"\npublic_key = "{key}"\n')
    done = call(*COMMAND, "--config", config, "--listen", "tcp://127.0.0.1:0", "--state-dir", state)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "unicrond --make-key" in done.stderr, done.stderr
