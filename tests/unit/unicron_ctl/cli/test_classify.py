"""unicronctl classify."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from unicron_ctl.cli.classify import command
from unicron_ctl.shared.system.errors import UserError


def call(*arguments, stdin=None, code=0):
    result = CliRunner(env={"UNICRON_CONFIG": ""}).invoke(command, arguments, input=stdin)
    if isinstance(result.exception, UserError):  # unicronctl prints it
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def test_a_text_is_explained(snapshot):
    assert call("RuntimeError: CUDA error: an illegal memory access was encountered").output == snapshot


def test_json():
    found = json.loads(call("--json", "Connection refused").output)
    assert (found["cause"], found["severity"], found["action"]) == ("connection_refused", 3, "reattempt")
    assert found["rule"] == "refused" and found["reason"]


def test_an_xids_line_needs_no_source():
    line = "[ 12.5] NVRM: Xid (PCI:0000:4e:00): 95, pid=221, name=pt_main, Uncontained: LTC TAG (0x2,0x0)"
    assert "SEV1 ecc_error" in call(line).output
    assert "SEV1 ecc_error" in call("--lines", "-", stdin=f"step 7\n{line}\n").output
    source = '  File "a.py", line 246, in f\n    store = _create_c10d_store(address, rank, world_size, timeout)\n'
    assert (
        call(
            "--lines", "-", stdin=f"{source}n1:1:1 [0] NCCL INFO librccl-net.so: cannot open shared object file\n"
        ).output
        == ""
    )
    assert "SEV1" not in call("--source", "stderr", line).output
    assert "SEV1" not in call(f"ValueError: bad line in the data\n{line}").output, "an application quotes it"


def test_a_log_line_by_line():
    log = "usb 1-1: new device\nNVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus\nnothing\n"
    out = call("--lines", "--json", "--source", "kernel", "-", stdin=log).output.splitlines()
    assert len(out) == 1
    assert json.loads(out[0])["cause"] == "gpu_lost" and "Xid" in json.loads(out[0])["text"]


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (("--exit", "0:9"), "killed_from_outside"),
        (("--exit", "137", "--oom"), "host_out_of_memory"),
        (("--exit", "1", "CUDA out of memory"), "cuda_out_of_memory"),
        (("--xid", "48"), "ecc_error"),
        (("--slurm", "NODE_FAIL"), "node_failed"),
        (("-",), "ecc_error"),
    ],
)
def test_other_signals(arguments, cause):
    stdin = "line\nCUDA error: uncorrectable ECC error encountered\n"
    assert json.loads(call("--json", *arguments, stdin=stdin).output)["cause"] == cause


@pytest.mark.parametrize(
    "arguments", [(), ("--exit", "0:9", "--xid", "3"), ("--exit", "nonsense"), ("--xid", "3", "text")]
)
def test_wrong_use_is_two(arguments):
    assert call(*arguments, code=2).output


def test_rules_of_the_admin_win(tmp_path):
    path = tmp_path / "unicron.toml"
    path.write_text(
        '[[severity.rule]]\nid = "ours"\npattern = "flux capacitor"\ncause = "gpu_lost"\nwhy = "seen twice"\n'
    )
    found = json.loads(call("--config", str(path), "--json", "the flux capacitor is empty").output)
    assert (found["severity"], found["cause"], found["action"], found["rule"]) == (1, "gpu_lost", "isolate", "ours")
    assert "seen twice" in found["reason"]


def test_a_wrong_rule_is_one_line_and_one(tmp_path):
    path = tmp_path / "unicron.toml"
    path.write_text('[[severity.rule]]\npattern = "("\ncause = "gpu_lost"\n')
    with pytest.raises(UserError, match=r"^[^\n]*not a regular expression[^\n]*$"):
        call("--config", str(path), "x")
    with pytest.raises(UserError, match="No such file"):
        call("--config", str(tmp_path / "gone"), "x")
