"""`unicronctl backup` and `restore`; what a copy has: tests/unit/unicron_ctl/shared/log/test_state_copies.py."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner
from syrupy.assertion import SnapshotAssertion

from unicron_ctl.shared.log import records
from unicron_ctl.shared.log.records import Event
from unicron_ctl.shared.log.term import claim
from unicron_ctl.shared.protocol.encryption import make_key
from unicron_ctl.tools import backup as commands


def test_the_commands(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    folder = tmp_path / "state"
    make_key(folder)
    begun = claim(folder, False)
    begun.store.append([Event(number, 1000.0, "1", 0, records.WorldProved(reason="")) for number in range(1, 11)])
    begun.close()
    run = CliRunner().invoke
    made = run(commands.command, [str(tmp_path / "copy"), "--state-dir", str(folder)])
    assert made.exit_code == 0
    back = run(commands.restore, [str(tmp_path / "copy"), "--state-dir", str(folder)])
    assert back.exit_code == 0
    said = [one.output.replace(str(tmp_path), "FOLDER") for one in (made, back)]
    assert [re.sub(r"\d{4}-\d\d-\d\dT[\d:.+-]*|\d{8}\S*", "TIME", text) for text in said] == snapshot
