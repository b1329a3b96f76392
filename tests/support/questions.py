"""Questions to a core in the test's own process, with the plain data that `unicronctl --json` prints."""

from __future__ import annotations

from typing import Any

import msgspec

from unicron_ctl.controller.api import answers
from unicron_ctl.controller.core.core import Core
from unicron_ctl.controller.model.asker import EVERYBODY, Asker
from unicron_ctl.shared.log.store import Store


def told(core: Core, what: str, asker: Asker = EVERYBODY, store: Store | None = None, **args: Any) -> Any:
    """The answer to a question. Raises answers.Unanswerable."""
    return msgspec.to_builtins(answers.answer(core, store, what, args, asker))  # type: ignore[arg-type]
