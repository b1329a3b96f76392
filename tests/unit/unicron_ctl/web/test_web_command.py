"""`unicronctl web` and `web link`: their options, before anything listens."""

from __future__ import annotations

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from unicron_ctl.cli.unicronctl import unicronctl
from unicron_ctl.shared.protocol import claims, munge
from unicron_ctl.shared.settings.config import ControllerConfig, problems
from unicron_ctl.shared.system.program import run
from unicron_ctl.web import page_server


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration, which a test may write anew."""
    path = tmp_path / "unicron.toml"
    path.write_text('[controller]\nweb_url = "https://Unicron.example.org/"\n')
    monkeypatch.setenv("UNICRON_CONFIG", str(path))
    return path


@pytest.mark.parametrize(
    ("words", "reason", "status"),
    [
        (["--listen", "7454"], "write HOST:PORT", 2),
        (["--listen", "127.0.0.1:99999"], "write HOST:PORT", 2),
        (["--listen", "no such host:1"], "give another --listen", 1),
        (["--url", "unicron.example.org"], "write https://HOST", 2),
        (["--url", "https://unicron.example.org/page"], "write https://HOST", 2),
        (["link", "--url", "javascript:alert(1)"], "write https://HOST", 2),
    ],
)
def test_a_wrong_address_is_a_line(words, reason, status, capsys) -> None:
    assert run("unicronctl", unicronctl, ["web", *words]) == status
    message = capsys.readouterr().err
    assert reason in message and message.count("\n") == 1


def test_the_network_needs_munge_and_a_name(config: Path, capsys, snapshot: SnapshotAssertion) -> None:
    config.write_text("[controller]\n")
    assert run("unicronctl", unicronctl, ["web", "--listen", "0.0.0.0:0"]) == 2
    assert "--url" in capsys.readouterr().err
    config.write_text('[controller]\nauth = "none"\nlisten = "tcp://127.0.0.1:7451"\n')
    assert run("unicronctl", unicronctl, ["web", "--listen", "0.0.0.0:0", "--url", "https://x"]) == 1
    assert capsys.readouterr().err == snapshot


def test_a_link_names_the_page_and_its_maker(monkeypatch, capsys, snapshot: SnapshotAssertion) -> None:
    monkeypatch.setattr(munge, "make_credential", lambda payload: f"MUNGE:{payload}:")
    assert run("unicronctl", unicronctl, ["web", "link"]) == 0
    origin = "https://unicron.example.org"
    assert capsys.readouterr().out == f"{origin}/#MUNGE:{claims.of_viewer(origin)}:\n"

    def no_munge(payload: str) -> str:
        raise munge.MungeError("munge: no socket", outage=True)

    monkeypatch.setattr(munge, "make_credential", no_munge)
    assert run("unicronctl", unicronctl, ["web", "link"]) == 1
    assert capsys.readouterr().err == snapshot


def test_the_page_is_known_by_its_own_names_on_this_host_only() -> None:
    names = page_server.own_origins("localhost", "127.0.0.1", 7454)
    assert names == ["http://127.0.0.1:7454", "http://[::1]:7454", "http://localhost:7454"]
    assert page_server.own_origins("0.0.0.0", "0.0.0.0", 7454) == []
    assert page_server.own_origins("::1", "::1", 1)[-1] == "http://localhost:1"


@pytest.mark.parametrize(
    "value", ["unicron.example.org", "ftp://x", "https://", "https://x/y", "https://a b", "http://x:y"]
)
def test_the_settings_address_is_checked(value: str) -> None:
    assert [line for line in problems(ControllerConfig(web_url=value)) if line.startswith("web_url")]
    assert not [line for line in problems(ControllerConfig(web_url="http://head:7454")) if line.startswith("web_url")]
