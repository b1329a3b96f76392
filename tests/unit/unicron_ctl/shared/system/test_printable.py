"""No control character of a user's text reaches a terminal."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from unicron_ctl.cli.unicronctl import unicronctl
from unicron_ctl.shared.system import columns
from unicron_ctl.shared.system.printable import clean, print_text, printable

TEXTS = st.text(alphabet=st.characters(), max_size=30)


@given(TEXTS)
def test_whatever_is_said_is_one_line_without_control_characters(text):
    shown = printable(text)
    assert not any(unicodedata.category(char) in ("Cc", "Cf", "Cs") for char in shown)
    assert not {"\n", "\r", "\x1b", "\x9b", "\u202e", "\u2028"} & set(shown)


def test_escapes_are_written_out_and_plain_text_stays():
    assert printable("\x1b]0;owned\x07") == "\\x1b]0;owned\\x07" and printable("gpt 🚀 ü") == "gpt 🚀 ü"
    assert printable("7_1\n8_1|root") == "7_1 8_1|root"


def test_an_answer_is_cleaned_throughout():
    said = {"name": "a\nb", "text": "line\nline\x1b[2J", "elements": [{"node\x07": "\x1b", "n": 1.5}], "ended": None}
    assert clean(said) == {
        "name": "a b",
        "text": "line\nline\\x1b[2J",
        "elements": [{"node\\x07": "\\x1b", "n": 1.5}],
        "ended": None,
    }


EVIL = "x\x1b]0;owned\x07\x9b2J\u202e"


def spoken(*words: str) -> str:
    done = CliRunner().invoke(unicronctl, list(words), standalone_mode=False)
    return f"{done.output}{done.stderr}{done.exception or ''}"


def test_what_a_command_prints_is_escaped_whoever_has_named_it(tmp_path: Path) -> None:
    """Defect: `classify` printed the names and texts that it was given."""
    config = tmp_path / "unicron.toml"
    rule = {"id": "mine", "kind": "text", "pattern": "boom", "cause": "link_flapping", "why": EVIL}
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in rule.items())
    config.write_text(f"[[severity.rule]]\n{lines}\n")
    said = [spoken("classify", "--config", str(config), "boom")]
    (tmp_path / "7").mkdir()
    (tmp_path / "7/rank-0.log").write_text(f"2026-11-27T17:39:15.123 {EVIL}\n")
    said.append(spoken("logs", "7", "--dir", str(tmp_path)))
    for text in said:
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(text) and "\\x1b]0;owned" in text, text


def test_tables_and_texts_are_escaped_and_keep_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    table = columns.Listing("name", "why")
    table.add_row(EVIL, Text(EVIL))
    table.add_note(EVIL)
    columns.show([table, f"one\n{EVIL}"])
    print_text("one\ntwo")
    print_text("one\ntwo", lines=True)
    shown = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(shown) and shown.count("\\x1b]0;owned") == 4
    assert shown.endswith("one two\none\ntwo\n")
