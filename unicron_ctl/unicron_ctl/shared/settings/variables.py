"""Lists the environment variables that people set, for docs/reference.md. A test compares the names with those that the
sources read (tests/unit/unicron_ctl/shared/settings/test_variables.py)."""

from __future__ import annotations

from typing import NamedTuple

from unicron_ctl.shared.settings.limits import VARIABLES, number


class Variable(NamedTuple):
    """One variable; its default is a text for people."""

    name: str
    meaning: str
    default: str


_WARM = "[user guide](user-guide.md#ranks-start-warm)"
_MEMORY = "[user guide](user-guide.md#memory-use)"

OF_JOBS = (
    Variable("UNICRON_CONTROLLER", "the controller's address", "the plugin's"),
    Variable("UNICRON_MODE", "auto, session or restart", "auto"),
    Variable(
        "UNICRON_MIN_NODES",
        "the fewest nodes with which the job runs (`--unicron-min-nodes`)",
        "what the launcher says, else 1",
    ),
    Variable("UNICRON_WEIGHT", "the job's weight in the plan (`--unicron-weight`)", "1"),
    Variable("UNICRON_SPARES", "nodes that wait as hot spares (`--unicron-spares`)", "0"),
    Variable("UNICRON_SWEEP", "`0`: a job array is one training, whatever its scripts name", "by their text"),
    Variable(
        "UNICRON_TRUST_VERSIONS",
        "`1`: a release of torch or Megatron that is not in the table of docs/install.md is tried",
        "it is refused",
    ),
    Variable("UNICRON_LAYOUTS", "layouts in which the job can run", "one, the script's"),
    Variable("UNICRON_MODEL", "sizes of its model, for the planner", "none"),
    Variable("UNICRON_RANKS_PER_NODE", "ranks that the agent starts", "`SLURM_GPUS_ON_NODE`, else 1"),
    Variable(
        "UNICRON_PRELOAD",
        f"modules that are already imported when a rank starts, separated by commas ({_WARM})",
        "the script's first imports",
    ),
    Variable(
        "UNICRON_LOG_DIR",
        "folder for the files `JOB/rank-N.log`, one for each rank, which `unicronctl logs JOB` merges",
        "none",
    ),
    Variable(
        "UNICRON_CONSOLE_RANKS",
        "the local ranks whose output the job's own log shows, as in `0,1`, or `none`",
        "all",
    ),
    Variable("UNICRON_WARM", "0: ranks start cold", "1"),
    Variable(
        "UNICRON_FIRST_STEP",
        "Slurm steps that a restarted element only uses up before the training's own (the template says why)",
        "0",
    ),
    Variable("UNICRON_REGISTER_TIMEOUT", "seconds to find the controller", "10"),
    Variable(
        "UNICRON_PLAN_TIMEOUT",
        "seconds that a stopped rank waits for a plan",
        number(VARIABLES["UNICRON_PLAN_TIMEOUT"]),
    ),
    Variable(
        "UNICRON_COLLECTIVE_TIMEOUT",
        "time-out of collectives, seconds",
        number(VARIABLES["UNICRON_COLLECTIVE_TIMEOUT"]),
    ),
    Variable(
        "UNICRON_SNAPSHOT",
        f"where to keep the gradient copies that can undo a reduce: `card`, `host` or `none` ({_MEMORY})",
        "card",
    ),
    Variable(
        "UNICRON_SHARES",
        "`speed`: a slow replica gets fewer micro-batches; `equal`: all get equally many "
        "([user guide](user-guide.md#shares-by-speed))",
        "speed",
    ),
    Variable(
        "UNICRON_MEMORY_EVERY",
        "iterations between two copies of the state to the node's memory; 0 for none",
        "1",
    ),
    Variable("UNICRON_MEMORY_DIR", "where that memory is", "/dev/shm"),
    Variable(
        "UNICRON_MEMORY_RATE",
        "limit for an agent's copies to other nodes, in megabytes a second, and the same for files; at least 0.1, or "
        "0 for no limit",
        "1000",
    ),
    Variable(
        "UNICRON_STATE_COPIES",
        "number of other nodes with a copy of each part of the state in memory; 0 for none, at most 64",
        "1",
    ),
    Variable(
        "UNICRON_AUDIT",
        "one in so many micro-batches of each rank of a session is computed again by another rank, to find silent "
        "corruption; it costs that share of an iteration's compute; 0 for none",
        "`[agent] audit`",
    ),
    Variable(
        "UNICRON_COMPARE",
        "iterations between two comparisons of what replicas must have in common; each reads all parameters and the "
        "optimizer's state once; 0 for none",
        "`[agent] compare`",
    ),
    Variable(
        "UNICRON_CHECKPOINT_MINUTES",
        "minutes between two checkpoints of a session, in place of the script's `minutes`; `auto`: as their cost and "
        "the failures call for; 0: none by the clock",
        "the script's",
    ),
    Variable(
        "UNICRON_CHECKPOINT_EXPORT",
        "a format (torch_dist, dcp, safetensors) in which a checkpoint that SIGUSR2 asks for is written as well, in "
        "place of the script's `export`",
        "the script's",
    ),
    Variable(
        "UNICRON_NODE_ADDRESS", "the address at which others reach this node", "that of its way to the controller"
    ),
)

OF_PROGRAMS = (
    Variable(
        "UNICRON_CONTROLLER", "`unicronctl`: the controller's address, `tcp://HOST:PORT`", "that of `unicron.toml`"
    ),
    Variable(
        "UNICRON_CONFIG", "all: the configuration file", "`~/.config/unicron/unicron.toml`, `/etc/unicron/unicron.toml`"
    ),
    Variable("UNICRON_LOG_FORMAT", "`unicrond`: text, or json for an object a line", "text"),
    Variable(
        "UNICRON_LOG_LEVEL",
        "`unicrond`: the least important messages that are logged: debug, info, warning or error",
        "info",
    ),
    Variable(
        "UNICRON_PUBLIC_KEY", "agents, `unicronctl`: the only controller's key to believe", "munge says whose key it is"
    ),
    Variable("UNICRON_KMSG", "agents: where the kernel log is read", "`[agent] kmsg`"),
    Variable(
        "UNICRON_NODE_EVENTS",
        "agents: 0 switches off the watch over the kernel log, memory and links",
        "`[agent] node_events`",
    ),
    Variable(
        "UNICRON_CLUSTER_DIR",
        "`unicronctl cluster`: the folder of the private cluster",
        "`~/.local/state/unicron/cluster`",
    ),
    Variable("UNICRON_DEBUG", "all: 1 prints the traceback of an error before its line", "0"),
)
