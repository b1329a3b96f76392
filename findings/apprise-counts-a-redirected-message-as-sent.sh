#!/usr/bin/env bash
# apprise 2.3.0, requests 2.34.2, Python 3.11: a webhook behind a redirection loses the message, and the result is SUCCESS.
#
# Seen:
#   301: SUCCESS; POST /hook with 90 bytes, then GET /hook/ with 0 bytes
#   302: SUCCESS; POST /hook with 90 bytes, then GET /hook/ with 0 bytes
#   308: SUCCESS; POST /hook with 90 bytes, then POST /hook/ with 90 bytes
#   302?redirect=no: FAILURE; POST /hook with 90 bytes
# requests follows a redirection as browsers do: after 301 and 302 a POST becomes a GET without its body. The page at the
# new address answers 200, and apprise takes that for "sent".
# Why it matters: proxies redirect http to https, and servers add a slash at the end of a path. Alerts are then lost, and
# whoever sends them is told that they arrived. `?redirect=no` in the URL makes it FAILURE.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet apprise==2.3.0 requests==2.34.2
cd "$folder"
venv/bin/python - <<'PYTHON'
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import apprise

seen = []
status = 301


class Hook(BaseHTTPRequestHandler):
    def answer(self):
        size = int(self.headers.get("Content-Length") or 0)
        self.rfile.read(size)
        seen.append((self.command, self.path, size))
        self.send_response(200 if self.path.endswith("/") else status)
        if not self.path.endswith("/"):
            self.send_header("Location", f"{self.path}/")
        self.end_headers()

    do_GET = do_POST = answer

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Hook)
threading.Thread(target=server.serve_forever, daemon=True).start()
for status, option in ((301, ""), (302, ""), (308, ""), (302, "?redirect=no")):
    seen.clear()
    alert = apprise.Apprise()
    alert.add(f"json://127.0.0.1:{server.server_port}/hook{option}")
    result = bool(alert.notify(title="n7", body="is down"))
    steps = ", then ".join(f"{method} {path} with {size} bytes" for method, path, size in seen)
    print(f"{status}{option}: {'SUCCESS' if result else 'FAILURE'}; {steps}")
    assert result == (option == "")
    assert (seen[-1] == ("GET", "/hook/", 0)) == (result and status != 308), "only 308 keeps the message"
PYTHON
