#!/usr/bin/env bash
# mlflow-skinny 3.17.2, store in SQLite, Python 3.11: a run that has ended and is set back to RUNNING keeps its end time.
#
# Seen:
#   ended: FINISHED, end time set
#   again: RUNNING, end time set, the same
# MlflowClient.update_run(status="RUNNING") changes the status alone, and MlflowClient has no call that clears the end.
# Why it matters: a training that is healed goes on with its run. Who takes "has an end time" for "is over", or subtracts
# the start from it, reads a run that still trains as a short one that has ended. Ask for the status.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet mlflow-skinny==3.17.2 alembic==1.20.1 sqlalchemy==2.1.9
cd "$folder"
venv/bin/python - <<'PYTHON'
import time

import mlflow

client = mlflow.MlflowClient(tracking_uri="sqlite:///runs.db")
run = client.create_run("0").info.run_id
client.set_terminated(run, "FINISHED")
ended = client.get_run(run).info
print(f"ended: {ended.status}, end time {'set' if ended.end_time else 'not set'}")
time.sleep(0.1)
client.update_run(run, status="RUNNING")
again = client.get_run(run).info
same = "the same" if again.end_time == ended.end_time else "another"
print(f"again: {again.status}, end time {'set' if again.end_time else 'not set'}, {same}")
assert (ended.status, again.status) == ("FINISHED", "RUNNING")
assert ended.end_time is not None and again.end_time == ended.end_time
PYTHON
