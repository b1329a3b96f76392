"""Secrets are taken out of what leaves the cluster, and what support needs stays."""

from __future__ import annotations

import pytest

from unicron.ctl.system.redaction import is_secret_name, secret_values, without_secrets

SECRETS = {
    "curve": ('secret_key = "{}"', "JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6"),
    "curve, bare": ("key {} of the server", "JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6"),
    "variable": ("export WANDB_API_KEY={}", "4f6c1c2a9b3d4e5f60718293a4b5c6d7e8f90123"),
    "database": ("DB_PASS={} MYSQL_PWD=x", "horse-battery"),
    "json": ('{{"smtp_password": "{}"}}', "correct horse battery"),
    "option": ("python train.py --api-token {} --lr 0.1", "abcdefgh12345678"),
    "slack": ("posting to https://hooks.slack.com/services/{}", "T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX"),
    "webhook": ('webhook = "https://ops.example.org/in/{}"', "9a8b7c6d5e"),
    "URL": ("git clone https://ann:{}@git.example.org/x.git", "hunter2hunter2"),
    "query": ("GET https://api.example.org/v1?sig={} failed", "c2lnbmF0dXJl"),
    "bearer": ("Authorization: Bearer {}", "opaque-token-value"),
    "github": ("cloned with {}", "ghp_0123456789abcdefghijABCDEFGHIJ012345"),
    "hugging face": ("token is {}", "hf_abcdefghijABCDEFGHIJ0123456789abcd"),
    "AWS": ("using {} in eu-1", "AKIAIOSFODNN7EXAMPLE"),
    "JWT": ("sent {}", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"),
    "munge": ("credential {}", "MUNGE:AwQDAACtRjRxVmJd0lZ9wq3y8ZrB1aQ=:"),
    "PEM": (
        "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",
        "MIIEowIBAAKCAQEAxgNSPdJw2Xb",
    ),
    "netrc": ("machine api.wandb.ai login user password {}", "0123456789abcdef"),
    "environment": ("env: HF_TOKEN='{}'", "short1"),
}


@pytest.mark.parametrize("kind", SECRETS)
def test_a_secret_is_taken_out(kind: str) -> None:
    form, secret = SECRETS[kind]
    text = without_secrets("before\n" + form.format(secret) + "\nafter")
    assert secret not in text and "***" in text
    assert text.startswith("before\n") and text.endswith("\nafter")


def test_long_words_in_a_log_do_not_keep_its_reader_busy() -> None:
    for word in ("secret", "secret.", '\\"secret', "--secret ", "aA1", "authorization:"):
        assert without_secrets(word * (65536 // len(word))), "it takes hours where a form is not bounded"


def test_a_known_value_is_taken_out_wherever_it_stands() -> None:
    values = secret_values({"MY_TOKEN": "plainword", "HOME": "/home/ann", "PIN_TOKEN": "1"})
    assert values == ["plainword"]
    assert without_secrets("it said plainword, from /home/ann", values) == "it said ***, from /home/ann"


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: CUDA error: an illegal memory access was encountered (rank 3, node n7)",
        '  File "/home/ann/conda/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1518, in _call_impl',
        '{"id": 12, "time": 1795245907.25, "job": "7", "kind": "failure_detected", "slots": [3]}',
        "agent 3f2504e04f8941d39a0c0305e82c3301 registered for element 7_3 at tcp://10.0.0.7:20123",
        "tokens per second: 51234, 8192 tokens",
        "max_requeues_per_minute = 60",
        "commit 4f6c1c2a9b3d4e5f60718293a4b5c6d7e8f90123",
        "ProcessGroupNCCL.cpp:1234 WatchdogTimeout after 600000 ms",
        'controller = "tcp://head:7451"',
    ],
)
def test_what_support_needs_stays(text: str) -> None:
    assert without_secrets(text) == text


def test_names_of_secrets() -> None:
    secret = "WANDB_API_KEY AWS_SECRET_ACCESS_KEY HF_TOKEN PGPASSWORD SLACK_WEBHOOK_URL MY_KEY".split()
    assert all(map(is_secret_name, secret))
    assert not any(map(is_secret_name, "HOME PATH SLURM_JOB_ID MASTER_ADDR UNICRON_MODE KEYBOARD MONKEY".split()))
