"""No control character of a user's text reaches a terminal."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from unicron.ctl.protocol.printable import clean, printable

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
