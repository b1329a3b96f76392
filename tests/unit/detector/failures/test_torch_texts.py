"""The error texts that torch 2.13's own libraries hold (gloo, TCPStore, c10d) become network faults, never a restart of
everybody: they are what the survivors of a dead rank see."""

from __future__ import annotations

import decimal
import pickle

import pytest
import torch
from megatron.core import rerun_state_machine

from unicron_detector.failures.classify import default_classifier
from unicron_detector.failures.severity import Severity

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
TEXTS = {
    f"{GLOO}pair.cc:547] Connection closed by peer [127.0.0.1]:1234": "connection_reset",
    f"{GLOO}pair.cc:589] Read error [127.0.0.1]:1234: Connection reset by peer": "connection_reset",
    f"{GLOO}pair.cc:430] writev [127.0.0.1]:1234: Broken pipe": "connection_reset",
    f"{GLOO}pair.cc:144] Connect timeout [none]": "other_network_error",
    f"{GLOO}device.cc:330] timed out connecting: SO_ERROR: Connection refused, remote=[::1]": "connection_refused",
    f"{GLOO}unbound_buffer.cc:81] Timed out waiting 2000ms for recv operation to complete": "nccl_timeout",
    f"{GLOO}unbound_buffer.cc:136] Timed out waiting 2000ms for send operation to complete": "nccl_timeout",
    f"{GLOO}pair.cc:780] Application timeout caused pair closure": "nccl_timeout",
    "Gloo connectFullMesh failed with [pair.cc:144] no error": "other_network_error",
    "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms": "nccl_timeout",
    "Rank 1 timed out in monitoredBarrier after 2000 ms": "nccl_timeout",
    "The client socket has timed out after 60000ms while trying to connect to (n1, 29500).": "other_network_error",
    "TCP client failed to connect/validate to host n1:29500 - timed out (try=1, timeout=9ms)": "other_network_error",
    "Timed out after 61 seconds waiting for clients. 1/2 clients joined.": "other_network_error",
    "wait timeout after 300000ms, keys: /default_pg/0//cpu//0/1": "other_network_error",
    "waitForInput: socket SocketImpl(fd=9) timed out after 300000ms": "other_network_error",
    "Failed to recv, got 0 bytes. Connection was likely closed.": "connection_reset",
}


@pytest.mark.parametrize("text", TEXTS)
def test_torch_texts(text):
    verdict = default_classifier().text(f"RuntimeError: {text}")
    assert (verdict.cause, verdict.severity) == (TEXTS[text], Severity.SEV3)
    assert default_classifier().match(text) is not None


ALLOWED = (
    "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so you have two options, "
    "\x1b[1mdo those steps only if you trust the source of the checkpoint\x1b[0m. \n\t(1) In PyTorch 2.6, we changed "
    "the default value of the `weights_only` argument in `torch.load` from `False` to `True`.\n\t(2) Alternatively, to "
    "load with `weights_only=True` please check the recommended steps in the following error message."
    "\n\tWeightsUnpickler error: Unsupported global: GLOBAL argparse.Namespace was not an allowed global by default."
)


def test_a_file_with_more_than_weights_is_not_called_corrupt(tmp_path):
    """Defect: it was, and with it a checkpoint that is whole."""
    torch.save(decimal.Decimal(1), tmp_path / "one.pt")
    with pytest.raises(pickle.UnpicklingError) as refused:
        torch.load(tmp_path / "one.pt", weights_only=True)
    for text in (ALLOWED, f"_pickle.UnpicklingError: {refused.value}"):
        for part in (text, text.splitlines()[0]):
            assert default_classifier().text(part).cause == "configuration_error"
    (tmp_path / "two.pt").write_bytes(b"<html>")
    with pytest.raises(pickle.UnpicklingError) as refused:
        torch.load(tmp_path / "two.pt", weights_only=True)
    assert default_classifier().text(f"_pickle.UnpicklingError: {refused.value}").cause == "checkpoint_corrupt"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("EXIT_CODE_RESUME_TO_DISAMBIGUATE", "resume from the checkpoint to rerun the last iteration"),
        ("EXIT_CODE_FAILED_ON_RESULT_VALIDATION", "failed on result validation"),
    ],
)
def test_the_statuses_of_megatrons_rerun_machine_are_known(name, says):
    verdict = default_classifier().exit(getattr(rerun_state_machine, name))
    assert verdict.cause == "numerical_error" and says in verdict.reason
