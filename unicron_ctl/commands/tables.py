"""The controller's answers as rich tables; shared by status, jobs, nodes, events, explain and the demo's live view."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
STATE_STYLES = {
    "running": "green",
    "offering": "green",
    "breaking": "red",
    "entering": "yellow",
    "forming": "yellow",
    "ended": "dim",
}


def console() -> Console:
    """One that does not colour names and numbers by guesswork."""
    return Console(highlight=False)


def status(data: dict[str, Any]) -> RenderableType:
    """Everything that `ask({"kind": "status"})` tells."""
    parts: list[RenderableType] = [jobs(data["jobs"]), nodes(data["nodes"])]
    if data["failures"]:
        parts.append(failures(data["failures"][-8:]))
    parts += [Text(f"needs an admin: {item['reason']}", style="red") for item in data.get("attention", ())]
    parts += [Text(line, style="yellow") for line in data.get("observed", ())]
    parts.append(Text(_foot(data), style="dim"))
    return Group(*parts)


def _foot(data: dict[str, Any]) -> str:
    controller = data["controller"]
    words = [f"WAF {rate(data['waf'])}", f"unicrond up {duration(controller['time'] - controller['since'])}"]
    words.append(", ".join(f"{name}: {mode}" for name, mode in controller["modes"].items()))
    slurm = controller["slurm"]
    if slurm["error"]:
        words.append(f"Slurm: {slurm['error']}")
    elif slurm["used"] and slurm["last_answer"]:
        words.append(f"Slurm answered {duration(controller['time'] - slurm['last_answer'])} ago")
    return ", ".join(words)


def jobs(listed: list[dict[str, Any]]) -> Table:
    table = Table(
        "job",
        "name",
        "state",
        "nodes",
        "generation",
        "iteration",
        "s/iteration",
        "loss",
        "weight",
        "WAF",
        "last failure",
        title="jobs",
        title_justify="left",
    )
    for job in listed:
        wanted = f"/{job['train_iterations']}" if job["train_iterations"] else ""
        plan = (
            f" -> {job['planned_nodes']}"
            if job["planned_nodes"] not in (None, job["nodes"]) and not job["ended"]
            else ""
        )
        state = f"ended ({job['ended']['code']})" if job["ended"] else job["state"] + _slow(job)
        if job["set_aside"] and not job["ended"]:
            state = f"set aside: see `unicronctl explain {job['job']}`"
        table.add_row(
            job["job"],
            Text(job["name"] + (" (restart mode)" if job.get("mode") == "restart" else "")),
            Text(state, style=STATE_STYLES.get(job["state"], "")),
            f"{job['nodes']} of {job['max_nodes']}{plan}",
            str(job["generation"]),
            f"{job['iteration']}{wanted}" if job["iteration"] >= 0 else "-",
            number(job["iteration_seconds"], 3),
            number(job["loss"], 4),
            f"{job['weight']:g}",
            rate(job["waf"]),
            Text(failure_text(job["last_failure"])),
        )
    if not listed:
        table.add_row("-", "none yet: submit with `sbatch --unicron`", *["-"] * 9)
    return table


def _slow(job: dict[str, Any]) -> str:
    """The straggler of a degraded job, and who stands out among its peers, in a few words."""
    slow, odd = job.get("degraded"), ""
    if job.get("anomalies"):
        odd = ", odd: " + ", ".join(f"{item['peer']} {item['metric']}" for item in job["anomalies"][:3])
    if not slow:
        return odd
    factor = f" {slow['slowdown']:.1f}x" if slow["slowdown"] else ""
    who = f"slot {slow['slot']}{factor} in {slow['phase']}"
    return f", slow: {who if slow['slot'] is not None else slow['phase'] or 'all ranks'}{odd}"


def nodes(listed: list[dict[str, Any]]) -> Table:
    said = any(node.get("last_event") for node in listed)  # most clusters' nodes have nothing to tell: no empty column
    columns = ("node", "state", "used by", "health", "reason", *(["last event"] if said else []))
    table = Table(*columns, title="nodes", title_justify="left")
    for node in listed:
        style = "" if node["healthy"] else "red"
        table.add_row(
            node["node"],
            Text("+".join(node["states"]).lower() or "-", style=style),
            " ".join(node["used_by"]) or "-",
            health(node),
            Text(_remarks(node)),
            *([Text(node_event(node.get("last_event")))] if said else []),
        )
    return table


def _remarks(node: dict[str, Any]) -> str:
    """Slurm's reason, and by what the node stands out among its peers."""
    odd = [anomaly["reason"] for anomaly in node.get("anomalies", ())]
    return "; ".join([node["reason"], *odd] if node["reason"] else odd)


def node_event(event: dict[str, Any] | None) -> str:
    """What the node said last, and what became of it."""
    if not event:
        return "-"
    times = f" ({event['count']} times)" if event["count"] > 1 else ""
    return f"{clock(event['time'])} {event['source']}: {event['text'][:70]}{times}: {event['cause']}, {event['action']}"


def health(node: dict[str, Any]) -> Text:
    """What the admission checks and the paired test say, how old that is, and whether the node is a suspect."""
    words, style, now = [], "", time.time()
    for name, report in (("", node.get("health")), ("pair test ", node.get("pair_test"))):
        if report is None:
            continue
        age = duration(max(0.0, now - report["at"]))
        verdict = {"good": "ok", "warning": "ok", "bad": "bad: ", "unknown": "unknown: "}[report["verdict"]]
        words.append(f"{name}{verdict}{'' if verdict == 'ok' else report['reason']} ({age})")
        style = "red" if verdict == "bad: " else style
    words = words or ["unknown"]
    words += ["unverified"] if node.get("unverified") else []
    words += [node["admission"]] if node.get("admission") else []
    if node.get("suspect"):
        words.append(f"suspect ({node['suspect']}): unicronctl pair-test --nodes {node['node']}")
        style = style or "yellow"
    return Text("; ".join(words), style=style)


def failures(listed: list[dict[str, Any]]) -> Table:
    table = Table(
        "when",
        "job",
        "what",
        "severity",
        "detected by",
        "training again",
        "kept",
        "computed again",
        "done",
        title="last failures",
        title_justify="left",
    )
    for failure in listed:
        where = failure["node"] if failure["kind"] == "node" else f"slot {failure['slot']}"
        resumed = failure["stepped_at"] or failure["resumed_at"]
        after = f"{resumed - failure['detected_at']:.2f} s" if resumed else "-"
        table.add_row(
            clock(failure["detected_at"]),
            failure["job"],
            Text(f"{failure['kind']} {where}: {failure['cause']}"),
            f"SEV{failure['severity']}",
            failure["detected_by"],
            after,
            str(failure["reused_micro_batches"]),
            str(failure["recomputed_micro_batches"]),
            Text("; ".join(failure["actions"]) or failure["action"]),
        )
    return table


def explanation(data: dict[str, Any]) -> RenderableType:
    lines = [f"job {data['job']} ({data['name']}): {data['state']}, generation {data['generation']}"]
    if data.get("mode") == "restart":
        lines.append(f"restart mode: all processes start again when one fails ({data['mode_reason']})")
    if data["ended"]:
        lines.append(f"ended with {data['ended']['code']}: {data['ended']['reason']}")
    if data.get("set_aside") and not data["ended"]:
        lines.append(f"set aside: {data['set_aside']}")
    if data.get("bounds"):
        lines.append(f"bounds: {data['bounds']}")
    if data["plan_reason"]:
        lines.append(f"plan: {data['planned_nodes']} nodes; {data['plan_reason']} ({data['plan_trigger']})")
    if data.get("alternative"):
        lines.append(f"now: {data['alternative']['text']}")
    table = Table("when", "generation", "what", "why", title="decisions", title_justify="left")
    for decision in data["decisions"]:
        table.add_row(
            clock(decision["time"]), str(decision["generation"] or ""), decision["kind"], Text(decision["reason"])
        )
    parts: list[RenderableType] = [Text("\n".join(lines)), table]
    if data["failures"]:
        parts.append(failures(data["failures"]))
    return Group(*parts)


def event_line(event: dict[str, Any]) -> str:
    """One event on one line."""
    job = f" job {event['job']}" if event["job"] else ""
    generation = f" g{event['generation']}" if event["generation"] else ""
    rest = event.get("reason") or ", ".join(
        f"{k}={v}" for k, v in event.items() if k not in ("id", "time", "job", "generation", "kind")
    )
    return f"{clock(event['time'])} {event['kind']}{job}{generation}: {' '.join(str(rest).split())}"


def failure_text(failure: dict[str, Any] | None) -> str:
    """A failure and its remedy in a few words."""
    if failure is None:
        return "-"
    where = failure["node"] if failure["kind"] == "node" else f"slot {failure['slot']}"
    resumed = failure["stepped_at"] or failure["resumed_at"]
    done = f", trained again after {resumed - failure['detected_at']:.2f} s" if resumed else ""
    return f"{clock(failure['detected_at'])} {failure['kind']} {where} SEV{failure['severity']}{done}"


def rate(flops: float | None) -> str:
    """1.9 PFLOP/s."""
    if not flops:
        return "-"
    for size, prefix in PREFIXES:
        if flops >= size:
            return f"{flops / size:.3g} {prefix}FLOP/s"
    return f"{flops:.3g} FLOP/s"


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"


def duration(seconds: float) -> str:
    """90 -> 1m30s."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
