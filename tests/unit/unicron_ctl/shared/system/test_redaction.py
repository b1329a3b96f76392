"""Secrets are taken out of a text by their values, however the text writes them."""

from __future__ import annotations

import base64
import json

import pytest

from unicron_ctl.shared.system.redaction import secret_values, without_values


def test_a_known_value_is_taken_out_wherever_it_stands() -> None:
    values = secret_values({"MY_TOKEN": "plainword", "HOME": "/home/ann", "PIN_TOKEN": "1"})
    assert values == ["plainword"]
    assert without_values("it said plainword, from /home/ann", values) == "it said ***, from /home/ann"


@pytest.mark.parametrize("before", ["", "a", "ab", "abc"])
def test_a_known_value_is_taken_out_as_json_urls_and_base64_write_it(before: str) -> None:
    value = 'horse "battery"/1'
    assert "battery" not in without_values(f"x {json.dumps(value)} x%20horse+%22battery%22%2F1 y", [value])
    encoded = base64.b64encode(f"{before}{value}{before}".encode()).decode()
    found = without_values(f"<{encoded}>", [value])
    assert "***" in found and len(found) < 16


def test_a_short_value_is_taken_out_only_where_it_is_asked_for() -> None:
    assert without_values("the pin is 12", ["12"]) == "the pin is 12"
    assert without_values("the pin is 12", ["12"], 1) == "the pin is ***"


@pytest.mark.parametrize(
    "name", "WANDB_API_KEY AWS_SECRET_ACCESS_KEY HF_TOKEN PGPASSWORD SLACK_WEBHOOK_URL MY_KEY SLURM_JWT DB_PASS".split()
)
def test_names_of_secrets(name: str) -> None:
    assert secret_values({name: "plainword"}) == ["plainword"]


@pytest.mark.parametrize("name", "HOME PATH PWD OLDPWD SLURM_JOB_ID MASTER_ADDR UNICRON_MODE KEYBOARD MONKEY".split())
def test_names_of_other_variables(name: str) -> None:
    assert secret_values({name: "plainword"}) == []
