"""The probe of the paired test: real processes that connect, check and measure, healthy and faulty."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from unicron_detector.health.pair_probe import MARK, ports

pytestmark = pytest.mark.process


def probe(nodes: str, token: str, backend: str = "sockets", fault: str = "") -> dict[str, tuple[int, dict]]:
    """Node -> (exit status, its last line)."""
    options = ["--nodes", nodes, "--address", "127.0.0.1", "--token", token, "--backend", backend]
    running = {
        node: subprocess.Popen(
            [
                sys.executable,
                "-m",
                "unicron_detector.health.pair_probe",
                *options,
                "--node",
                node,
                "--seconds",
                "0.1",
                "--patience",
            ]
            + (["4"] if fault.endswith(":hang") else ["60"]),  # a busy machine starts one long after the other
            env=os.environ | {"UNICRON_PAIR_FAULT": fault},
            stdout=subprocess.PIPE,
            text=True,
        )
        for node in nodes.split(",")
    }
    found = {}
    try:
        for node, process in running.items():
            if f"{node}:hang" == fault:
                continue
            out, _ = process.communicate(timeout=100)
            found[node] = process.returncode, json.loads(out.splitlines()[-1].removeprefix(MARK))
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
                process.communicate()
    return found


@pytest.mark.parametrize("nodes", ["a,b", "a,b,c"])
def test_healthy_nodes_pass(nodes: str) -> None:
    found = probe(nodes, f"healthy-{nodes}-{os.getpid()}")
    assert all(status == 0 and said["ok"] for status, said in found.values())
    assert found["a"][1]["bandwidth"] > 1e6 and 0 < found["a"][1]["latency"] < 1


def test_over_gloo() -> None:
    found = probe("a,b", f"gloo-{os.getpid()}", "gloo")
    assert all(status == 0 and said["backend"] == "gloo" for status, said in found.values()), found


@pytest.mark.parametrize(
    ("fault", "words"),
    [("corrupt", "wrong sum"), ("crash", "closed the connection"), ("hang", "does not answer within")],
)
def test_a_faulty_node_fails_its_peer(fault: str, words: str) -> None:
    status, said = probe("a,b", f"{fault}-{os.getpid()}", fault=f"b:{fault}")["a"]
    assert status == 1 and words in said["error"]


def test_a_slow_node_shows_in_the_bandwidth() -> None:
    fast = probe("a,b", f"fast-{os.getpid()}")["a"][1]
    slow = probe("a,b", f"slow-{os.getpid()}", fault="b:slow:0.05")["a"][1]
    assert slow["ok"] and slow["bandwidth"] < fast["bandwidth"] and slow["latency"] > 0.02


def test_a_taken_port_is_passed_over() -> None:
    token = f"taken-{os.getpid()}"
    with socket.create_server(("", ports(token)[0])):
        found = probe("a,b", token)
    assert all(status == 0 for status, _ in found.values()), found


def test_wrong_use() -> None:
    line = [
        sys.executable,
        "-m",
        "unicron_detector.health.pair_probe",
        "--nodes",
        "a,b",
        "--address",
        "x",
        "--token",
        "t",
    ]
    done = subprocess.run([*line, "--node", "c"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and "must be one of" in done.stderr
