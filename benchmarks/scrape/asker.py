"""``python -m benchmarks.scrape.asker PORT SECONDS PERIOD``: scrapes as Prometheus does, and prints how long each took.

One line of JSON: seconds and bytes of each scrape. A process of its own, so that nothing else here delays it.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request

ACCEPT = "application/openmetrics-text;version=1.0.0"
LIMIT = 10.0  # Prometheus' own


def scrape(port: int) -> tuple[float, int]:
    """Seconds and bytes of one. Raises OSError."""
    place = f"http://127.0.0.1:{port}/metrics"
    request = urllib.request.Request(place, headers={"Accept": ACCEPT, "Accept-Encoding": "gzip"})
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=LIMIT) as page:
        size = len(page.read())
    return time.monotonic() - began, size


def main(port: int, seconds: float, period: float) -> None:
    """Scrapes once a period."""
    found, end = [], time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        found.append(scrape(port))
        time.sleep(max(0.0, now + period - time.monotonic()))
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
