"""Secrets are taken out of what leaves the cluster, and what support needs stays."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest

from unicron_ctl.shared.system.redaction import is_secret_name, redacted, secret_values, without_secrets

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


NETRC = base64.encodebytes(
    b"machine api.wandb.ai\nlogin user\npassword 0123456789abcdef0123456789abcdef01234567\n"
).decode()
PEM_BODY = "MIIEowIBAAKCAQEAxgNSPdJw2XbQy7Vn8kF3hZr1uT6oWc9eLmKpS0dGjA4vBxYi\n"
PEM_BODY += "5tHqRzN/2aEfU+lCgDwMbXsOyJkP7iVh3rTn6oQu1cZ8eLpKmS0dGvA4BxYi9f=="
# Forms of lists, commands, headers and files: the text around a secret, and the secret.
FORMS = {
    "JSON words": ('["train.py", "--token", "{}"]', "wolfwolf"),
    "JSON words, next": ('{{"argv":["--password","{}","--lr","1"]}}', "wolfwolf"),
    "Python words": ("cmd: ['train.py', '--api-key', '{}']", "wolf-wolf"),
    "spaced words in quotes": ("'--token' '{}'", "wolf wolf"),
    "YAML words": ("args:\n  - --token\n  - {}\n  - --lr", "wolfwolf"),
    "YAML flow": ("args: [--token, {}, --lr]", "wolfwolf"),
    "JSON in JSON": (r'{{"out": "{{\"api_token\": \"{}\"}}"}}', "wolf wolf"),
    "JSON in JSON in JSON": (r"{{\\\"api_token\\\": \\\"{}\\\"}}", "wolf wolf"),
    "words in JSON in JSON": (r'"[\"--token\", \"{}\"]"', "wolf wolf"),
    "escaped quote": (r'"password": "wo\"{}"', "lfwolf"),
    "option with =": ("train --token={} --lr 1", "wolfwolf"),
    "option with =, quoted": ("train --token='{}' --lr 1", "wolf wolf"),
    "option, one dash": ("train -token {} -lr 1", "wolfwolf"),
    "option in quotes": ('run("--token {}")', "wolfwolf"),
    "next line of a command": ("train --token \\\n    {} \\\n   --lr 1", "wolfwolf"),
    "mysql": ("mysql -h db -uann -p{} jobs", "wolf;wolf"),
    "mysql, words": ('["mysqldump", "-u", "ann", "-p{}", "jobs"]', "wolfwolf"),
    "mariadb": ("mariadb -u ann -p'{}' jobs", "wolf wolf"),
    "sshpass": ("sshpass -p {} ssh n1", "wolfwolf"),
    "sshpass, attached": ("sshpass -p'{}' ssh n1", "wolf wolf"),
    "ipmitool": ("ipmitool -I lanplus -H bmc1 -U admin -P {} power off", "wolfwolf"),
    "ipmitool, words": ("['ipmitool', '-H', 'bmc1', '-P', '{}', 'power']", "wolfwolf"),
    "redis": ("redis-cli -h r -a {} ping", "wolfwolf"),
    "ldap": ("ldapsearch -x -D cn=ann -w {}", "wolfwolf"),
    "docker": ("docker login -u ann -p {} registry", "wolfwolf"),
    "curl": ("curl -s -u ann:{} https://x", "wolfwolf"),
    "curl, long": ("curl --user 'ann:{}' https://x", "wolf wolf"),
    "curl, header": ("curl -H 'Authorization: Token {}' https://x", "wolfwolf"),
    "wandb login": ("wandb login {}", "4f6c1c2a9b3d4e5f60718293a4b5c6d7e8f90123"),
    "wandb.login": ('wandb.login(key="{}")', "4f6c1c2a9b3d4e5f60718293a4b5c6d7e8f90123"),
    "openssl": ("openssl enc -k x -pass pass:{} -in f", "wolfwolf"),
    "stdin": ("echo {} | docker login --password-stdin", "wolf wolf"),
    "aws": ("export AWS_SECRET_ACCESS_KEY={}", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
    "aws, bare": ("key: {} end", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
    "aws configure": ("aws configure set aws_secret_access_key {}", "wolfwolf"),
    "csh": ("setenv HF_TOKEN {}", "wolfwolf"),
    "fish": ("set -gx HF_TOKEN {}", "wolfwolf"),
    "Dockerfile": ("ENV HF_TOKEN {}", "wolfwolf"),
    "Lua": ('setenv("HF_TOKEN", "{}")', "wolf wolf"),
    "srun": ("srun --export=ALL,HF_TOKEN={} x", "wolfwolf"),
    "declare": ('declare -x HF_TOKEN="{}"', "wolf wolf"),
    "env dump": ("MY_PASSWORD={}\nHOME=/root", "correct horse battery"),
    "environ, NUL": ("A=1\0MY_PASSWORD={}\0HOME=/root", "wolfwolf"),
    "os.environ": ('os.environ["HF_TOKEN"] = "{}"', "wolf wolf"),
    "dollar quote": ("TOKEN=$'{}'", "wolf wolf"),
    "backslash": ("x PASSWORD={} y", "wolf\\ wolf"),
    "punctuation": ("x DB_PASSWORD={} y", "wolf,wolf;wolf)wolf"),
    "quote within": ("x DB_PASSWORD={} y", "wolf'wolf\"wolf"),
    "no end of the string": ('"password": "{}', "correct horse battery"),
    "bytes": ("token=b'{}'", "wolf wolf"),
    "SecretStr": ("password=SecretStr('{}')", "wolf wolf"),
    "strings together": ("{{'token': 'wolf'\n          '{}'}}", "bear"),
    "three quotes": ('password = """{}"""', "wolf\nbear"),
    "string over lines": ('x export TOKEN="{}"', "wolf\nbear"),
    "walrus": ("password := {}", "wolfwolf"),
    "arrow": ("x password -> {}", "wolfwolf"),
    "equals": ("x password == {}", "wolfwolf"),
    "URL-encoded": ("body token%3D{}", "wolfwolf"),
    "HTML": ("&quot;password&quot;: &quot;{}&quot;", "wolf wolf"),
    "XML": ("<password>{}</password>", "wolf wolf"),
    "XML attributes": ('<add key="ApiKey" value="{}"/>', "wolf wolf"),
    "list of values": ('{{"tokens": ["{}"]}}', 'wolf", "bear'),
    "object of values": ('{{"credentials": {{"user": "{}"}}}}', 'wolf", "x": "bear'),
    "YAML": ("a:\n  password: {}\n  user: x", "correct horse battery"),
    "YAML, list": ("- password: {}\n  user: x", "correct horse battery"),
    "YAML tag": ("password: !!str {}", "wolfwolf"),
    "YAML block": ("password: |\n  {}\nuser: x", "correct horse\n  battery"),
    "YAML folded": ("  password: >-\n    {}\n  user: x", "wolf\n    bear"),
    "YAML list": ("tokens:\n  - {}\nuser: x", "wolf\n  - bear"),
    "YAML, empty line": ("password:\n\n  {}\nuser: x", "wolf\n  bear"),
    "strings, continued": ("token = 'wolf' \\\n  '{}'", "bear"),
    "container env": ("env:\n  - name: HF_TOKEN\n    value: {}", "wolfwolf"),
    "container env, JSON": ('{{"name": "HF_TOKEN", "value": "{}"}}', "wolf wolf"),
    "INI": ("[x]\npassword = {}", "correct horse battery"),
    "Slurm": ("StoragePass={}", "wolfwolf"),
    "Azure": ("AccountName=a;AccountKey={};EndpointSuffix=x", "wolfwolf=="),
    "ODBC": ("Server=x;Uid=sa;Pwd={};", "wolfwolf"),
    "header list": ('[["Authorization", "Bearer {}"]]', "wolf.wolf"),
    "header tuples": ("[(b'authorization', b'Bearer {}')]", "wolf.wolf"),
    "header strings": ('["Authorization: Bearer {}", "Accept: x"]', "wolf.wolf"),
    "header, values": ("{{'Authorization': ['Bearer {}']}}", "wolf.wolf"),
    "curl -v": ("> Authorization: Basic {}", "YW5uOndvbGY="),
    "digest": ('x Authorization: Digest username="ann", response="{}"', "wolf wolf"),
    "AWS signature": ("x authorization: AWS4-HMAC-SHA256 Credential=a/b, Signature={}", "0123456789abcdef"),
    "cookies": ("x Cookie: a=wolf; session={}; c=d", "bearbear"),
    "api key header": ("X-Api-Key: {}", "wolfwolf"),
    "bearer alone": ("sent Bearer {}", "wolf.wolf"),
    "basic alone": ("sent Basic {}", "YW5uOndvbGY="),
    "URL": ("postgres://ann:{}@db/jobs", "wolf/wolf@wolf"),
    "URL, token": ("git+https://{}@git.example.org/x.git", "wolfwolf"),
    "URL in YAML": ("url: amqp://ann:{}@mq:5672/", "wolfwolf"),
    "redis URL": ("redis://:{}@r:6379", "wolfwolf"),
    "SAS": ("az://box/x?sv=1&sig={}", "wolfwolf%3D"),
    "netrc, lines": ("machine x\n  login ann\n  password {}", "wolf"),
    "netrc, base64": ("auth {}x", NETRC),
    "pgpass": ("db.example.org:5432:jobs:ann:{}", "wolfwolf"),
    "git credentials": ("https://ann:{}@git.example.org", "wolfwolf"),
    "npmrc": ("//registry/:_auth={}", "YW5uOndvbGY="),
    "docker config": ('{{"auths": {{"r": {{"auth": "{}"}}}}}}', "YW5uOndvbGY="),
    "prompt": ("ann@n1's password: {}", "wolf"),
    "prompt, named": ("Password for ann: {}", "wolfwolf"),
    "prompt, of git": ("Password for 'https://ann@git.example.org': {}", "wolfwolf"),
    "prose": ("the password is '{}'", "wolf wolf"),
    "PEM": ("-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----", PEM_BODY),
    "PEM, JSON": (
        '{{"private_key": "-----BEGIN PRIVATE KEY-----\\n{}\\n-----END PRIVATE KEY-----\\n"}}',
        PEM_BODY.replace("\n", "\\n"),
    ),
    "PEM, no end": ("-----BEGIN EC PRIVATE KEY-----\n{}", PEM_BODY),
    "PEM, no beginning": ("{}\n-----END RSA PRIVATE KEY-----", PEM_BODY),
    "PEM, in a log": (
        "12:00 -----BEGIN OPENSSH PRIVATE KEY-----\n12:00 {}\n12:00 -----END OPENSSH PRIVATE KEY-----",
        PEM_BODY,
    ),
    "PGP": ("-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{}\n-----END PGP PRIVATE KEY BLOCK-----", PEM_BODY),
    "PuTTY": ("Private-Lines: 2\n{}\nPrivate-MAC: 01", PEM_BODY),
    "kubeconfig": ("    client-key-data: {}", "TFMwdExTMUNS"),
    "shadow": ("root:$6${}:19000:", "saltsalt$abcdefghijklmnop"),
    "coloured": ("\x1b[36mtoken\x1b[0m=\x1b[35m{}\x1b[0m", "wolfwolf"),
    "structlog in JSON": (r"\u001b[36mtoken\u001b[0m=\u001b[35m{}\u001b[0m", "wolfwolf"),
    "NGC": ("using {}", "nvapi-abcdefghijklmnopqrstuvwxyz-012345"),
    "telegram": ("using {}", "1234567890:AAabcdefghijklmnopqrstuvwxyz0123456"),
    "end of a sentence": ("it was {}.", "aB3dE5gH7jK9mN1pQ3sT5vW7yZ" + "aB3"),
    "base64 with a slash": ("blob {} end", "bWF/aGluZSBhcGkud2FuZGIuYWkg+G9naW4gdXNlciBwYXNz"),
    "WireGuard": ("PrivateKey = {}", "wolf+wolf="),
    "vault": ("vault login {}", "s.wolfwolfwolf"),
    "short names": ("DB_PW={} otp=x", "wolfwolf"),
    "keys of ciphers": ("aes_key={}", "wolfwolf"),
    "hyphens before key": ("train --wandb-key {} --lr 1", "wolfwolf"),
    "signature": ("X-Amz-Signature={}", "wolfwolf"),
    "wandb, short": ("wandb.login(key='{}')", "wolfwolf"),
    "wandb, said": ("wandb: key {}", "wolfwolf"),
    "user and secret": ("mlflow --auth ann:{} x", "wolfwolf"),
    "proxy": ("pip install --proxy-user ann:{} x", "wolfwolf"),
    "ssh-keygen": ("ssh-keygen -t ed25519 -N {} -f x", "wolfwolf"),
    "openssl, option": ("openssl enc -aes-256-cbc -k {} -in f", "wolfwolf"),
    "smbclient": ("smbclient //h/s -U ann%{}", "wolfwolf"),
    "lftp": ("lftp -u ann,{} h", "wolfwolf"),
    "net use": ("net use x: {} /user:ann", "wolfwolf"),
    "kinit": ("kinit ann <<< {}", "wolfwolf"),
    "expect": (r'expect: send "{}\r"', "wolfwolf"),
    "conda": ("conda token set {}", "wolfwolf"),
    "rclone": ("rclone config create r s3 secret_access_key {}", "wolfwolf"),
    "oracle": ("jdbc:oracle:thin:ann/{}@h", "wolfwolf"),
    "telegram URL": ("https://api.telegram.org/bot1:{}/sendMessage", "wolfwolf"),
    "ntfy": ("https://ntfy.sh/{}", "wolfwolf"),
}


def words(secret: str) -> list[str]:
    """What must not be left of a secret: no word of it."""
    return re.findall(r"[\w+/]{4,}", secret)


@pytest.mark.parametrize("kind", [*SECRETS, *FORMS])
def test_a_secret_is_taken_out(kind: str) -> None:
    form, secret = (SECRETS | FORMS)[kind]
    text = without_secrets("before\n" + form.format(secret) + "\nafter")
    assert [word for word in words(secret) if word in text] == [] and "***" in text
    assert text.startswith("before\n") and (text.endswith("\nafter") or kind == "PEM, no end")
    assert without_secrets(text) == text, "what is left holds no secret"


@pytest.mark.parametrize(
    "data",
    [
        ["train.py", "--token", "wolfwolf"],
        ["mysql", "-uann", "-pwolfwolf", "jobs"],
        ["ipmitool", "-P", "wolfwolf"],
        [["Authorization", "wolfwolf"], ["Accept", "x"]],
        {"argv": ["--password", 'wolf"wolf']},
        {"name": "HF_TOKEN", "value": "wolfwolf"},
        {"credentials": {"user": "wolf", "others": ["wolf"]}},
        {"tokens": ["wolf", "wolf"]},
        {"password": 1000000000000066600000000000},
        {"password=wolfwolf": [1], "password=wolf": [2]},
    ],
)
def test_a_secret_is_taken_out_of_data(data: Any) -> None:
    found = redacted(data)
    assert type(found) is type(data) and len(found) == len(data), "its shape stays"
    assert "wolf" not in json.dumps(found) and "666" not in json.dumps(found)


def test_long_words_in_a_log_do_not_keep_its_reader_busy() -> None:
    for word in ("secret", "secret.", '\\"secret', "--secret ", "aA1", "authorization:"):
        assert without_secrets(word * (65536 // len(word))), "it takes hours where a form is not bounded"
    rare = """token=' | token="x" | token=( | token:\n  | - token: | mysql - | docker login | \\ | password for | http://a:
        | aA1/ | name: token | env | echo a | set token | x://u:p | a.b:1: | -----BEGIN PRIVATE KEY----- | -----BEGIN
        | \x1b[ | SecretStr( | &quot;token&quot;: | token=a,b; | Private-Lines: 1\n
        | key= | auth= | ['--token', | <token | net use x: | kinit a | config create | jdbc:oracle:thin: | --auth a
        | wandb.login( | send "a | smbclient a | ssh-keygen a"""
    for word in rare.split("|"):
        assert without_secrets(word * (2048 // len(word)))


def test_a_known_value_is_taken_out_wherever_it_stands() -> None:
    values = secret_values({"MY_TOKEN": "plainword", "HOME": "/home/ann", "PIN_TOKEN": "1"})
    assert values == ["plainword"]
    assert without_secrets("it said plainword, from /home/ann", values) == "it said ***, from /home/ann"


def test_a_long_word_is_taken_out_whole() -> None:
    assert without_secrets("x " + "aB3dE5gH7jK9" * 1000 + " y") == "x *** y"


@pytest.mark.parametrize("before", ["", "a", "ab", "abc"])
def test_a_known_value_is_taken_out_as_json_urls_and_base64_write_it(before: str) -> None:
    value = 'horse "battery"/1'
    assert "battery" not in without_secrets(f"x {json.dumps(value)} x%20horse+%22battery%22%2F1 y", [value])
    encoded = base64.b64encode(f"{before}{value}{before}".encode()).decode()
    told = without_secrets(f"<{encoded}>", [value])
    assert "***" in told and len(told) < 16


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
        "--max-tokens 2048 --tokenizer-model /data/tokenizer.json --calculate-per-token-loss --bf16",
        "n_tokens=300_000_000, tokens_per_second: 5123.4, tokenizer_type=GPTSentencePieceTokenizer",
        "AuthInfo=cred_expire=5 PWD=/home/ann auth = munge pin_memory=True",
        "ACCELERATE_MIXED_PRECISION_MODE=bf16 in /home/Ann/Experiments2024/LargeModel_175B/Checkpoints",
        "tests/unit/test_credentials.py::test_of_credentials pass: 3 fail: 0",
        '{"options": ["password", 1], "b": 2}',
        "srun -p gpu -P 4 docker run -p 80:80; KeyError: 'token'",
        "docker run --user 1000:1000 x; the net use of memory; wandb: keys of the run; neural net -u 3 enc=1",
        "models/GPT3_175B/TransformerLayer/SelfAttention/QueryKeyValueProjection.py",
    ],
)
def test_what_support_needs_stays(text: str) -> None:
    assert without_secrets(text) == text


def test_names_of_secrets() -> None:
    secret = "WANDB_API_KEY AWS_SECRET_ACCESS_KEY HF_TOKEN PGPASSWORD SLACK_WEBHOOK_URL MY_KEY".split()
    assert all(map(is_secret_name, secret))
    assert not any(
        map(is_secret_name, "HOME PATH PWD OLDPWD SLURM_JOB_ID MASTER_ADDR UNICRON_MODE KEYBOARD MONKEY".split())
    )
