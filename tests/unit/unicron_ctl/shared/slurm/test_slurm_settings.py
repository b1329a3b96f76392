"""What `scontrol show config` prints, of old and new releases."""

from __future__ import annotations

from unicron_ctl.shared.slurm.slurm_settings import parse_settings

TEXT = """Configuration data as of 2026-11-27T17:45:01
AuthInfo                = socket=/run/munge/socket,cred_expire=5
AuthType                = auth/munge
BatchStartTimeout       = 10 sec
HealthCheckProgram      = (null)
PowerPlugin             =
Prolog[0]               = /etc/slurm/prolog.d/*
Prolog[1]               = /opt/site/prolog
SlurmUser               = slurm(64030)
SlurmctldHost[0]        = head1(10.0.0.1)
SlurmctldHost[1]        = head2
SLURM_VERSION           = 24.11.5

Slurmctld(primary) at head1 is UP
"""


def test_settings_are_read_as_slurm_prints_them() -> None:
    found = parse_settings(TEXT)
    assert found.user() == ("slurm", 64030)
    assert found.release == "24.11.5"
    assert found.seconds("BatchStartTimeout") == 10.0 and found.seconds("KillWait") is None
    assert found.option("AuthInfo", "cred_expire") == "5" and found.option("AuthInfo", "ttl") == ""
    assert found.words("Prolog") == ("/etc/slurm/prolog.d/*", "/opt/site/prolog")
    assert found.head_hosts() == ["head1", "head2"]
    assert found.text("HealthCheckProgram") == "" and found.text("PowerPlugin") == ""


def test_an_answer_that_is_none_has_no_settings() -> None:
    found = parse_settings("slurm_load_ctl_conf error: Unable to contact slurm controller")
    assert found.texts == {} and found.user() == ("", None)
