"""``python -m benchmarks.page.watchers ADDRESS COUNT SECONDS``: asks for the page's data as so many open browsers do,
and prints as JSON how many answers came, and the seconds between two questions to the controller, of each answer."""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from urllib.parse import urlsplit


class Refused(Exception):
    """The page has no answer; the text says why."""


def ask(host: str, tag: str) -> tuple[str, float]:
    """The answer's tag, and after how many seconds to ask again."""
    connection = http.client.HTTPConnection(host, timeout=20)
    try:
        connection.request("GET", "/view", headers={"If-None-Match": tag} if tag else {})
        answer = connection.getresponse()
        data = answer.read()
        if answer.status not in (200, 304):
            raise Refused(data.decode())
        return answer.headers["ETag"], float(answer.headers["Unicron-Every"])
    finally:
        connection.close()


def watch(host: str, until: float, told: list[float]) -> None:
    """One browser."""
    tag = ""
    while time.monotonic() < until:
        try:
            tag, every = ask(host, tag)
            told.append(every)
        except (Refused, OSError) as error:
            print(f"a watcher got no answer: {error}", file=sys.stderr)
            every = 1.0
        time.sleep(every)


def main() -> None:
    host, count, until = urlsplit(sys.argv[1]).netloc, int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
    told: list[float] = []
    threads = [threading.Thread(target=watch, args=(host, until, told)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not told:
        raise SystemExit("no watcher got an answer")
    print(json.dumps({"answers": len(told), "every": told}))


if __name__ == "__main__":
    main()
