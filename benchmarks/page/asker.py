"""``python -m benchmarks.page.asker ADDRESS QUESTION SECONDS``: puts a question (JSON) to the controller as the page
does, more often than the page, and prints how many answers came."""

from __future__ import annotations

import json
import sys
import time

from unicron_ctl.shared.protocol.client import ask_controller

EVERY = 0.6  # seconds: longer than the controller keeps an answer


def main() -> None:
    address, question, until = sys.argv[1], json.loads(sys.argv[2]), time.monotonic() + float(sys.argv[3])
    count = 0
    while time.monotonic() < until:
        ask_controller(question, address, timeout=20.0)
        count += 1
        time.sleep(EVERY)
    print(count)


if __name__ == "__main__":
    main()
