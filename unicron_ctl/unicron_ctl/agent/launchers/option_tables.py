"""The options of the launchers, and what becomes of each where the agent starts the ranks instead. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

# What becomes of an option: the agent takes it over; Unicron does this itself, in its own way; nobody does it now, and
# the job's log says so.
TAKEN, REPLACED, LOST = "taken", "replaced", "lost"

# flags; what becomes of it; whether a value follows
Option = tuple[str, str, bool]

# Of all releases of torch that are supported (docs/behaviour/torchrun.toml).
TORCHRUN: tuple[Option, ...] = (
    ("--nnodes", TAKEN, True),
    ("--nproc-per-node --nproc_per_node", TAKEN, True),
    ("--rdzv-backend --rdzv_backend", REPLACED, True),
    ("--rdzv-endpoint --rdzv_endpoint", REPLACED, True),
    ("--rdzv-id --rdzv_id", REPLACED, True),
    ("--rdzv-conf --rdzv_conf", REPLACED, True),
    ("--standalone", REPLACED, False),
    ("--max-restarts --max_restarts", REPLACED, True),
    ("--monitor-interval --monitor_interval", REPLACED, True),
    ("--start-method --start_method", REPLACED, True),
    ("--event-log-handler --event_log_handler", LOST, True),
    ("--role", TAKEN, True),
    ("-m --module", TAKEN, False),
    ("--no-python --no_python", TAKEN, False),
    ("--run-path --run_path", TAKEN, False),
    ("--log-dir --log_dir", TAKEN, True),
    ("-r --redirects", TAKEN, True),
    ("-t --tee", TAKEN, True),
    ("--local-ranks-filter --local_ranks_filter", TAKEN, True),
    ("--log-line-prefix-template --log_line_prefix_template", LOST, True),
    ("--duplicate-stdout-filters --duplicate_stdout_filters", LOST, True),
    ("--duplicate-stderr-filters --duplicate_stderr_filters", LOST, True),
    ("--node-rank --node_rank", REPLACED, True),
    ("--master-addr --master_addr", REPLACED, True),
    ("--master-port --master_port", REPLACED, True),
    ("--local-addr --local_addr", REPLACED, True),
    ("--logs-specs --logs_specs", LOST, True),
    ("--numa-binding --numa_binding", LOST, True),
    ("--signals-to-handle --signals_to_handle", REPLACED, True),
    ("--shutdown-timeout --shutdown_timeout", REPLACED, True),
    ("--virtual-local-rank --virtual_local_rank", TAKEN, False),
    ("--print-completion --print_completion", TAKEN, True),
)
# torch's own rendezvous backends; others are registered by packages (the entry points torchrun.handlers).
BACKENDS = ("c10d", "etcd", "etcd-v2", "static")
# torch.distributed.launch has one more.
TORCH_LAUNCH: tuple[Option, ...] = (*TORCHRUN, ("--use-env --use_env", TAKEN, False))

DEEPSPEED: tuple[Option, ...] = (
    ("-H --hostfile", REPLACED, True),
    ("-i --include", TAKEN, True),
    ("-e --exclude", TAKEN, True),
    ("--num_nodes", TAKEN, True),
    ("--num_gpus --num_accelerators", TAKEN, True),
    ("--master_port", REPLACED, True),
    ("--master_addr", REPLACED, True),
    ("--node_rank", REPLACED, True),
    ("--launcher", REPLACED, True),
    ("--launcher_args", LOST, True),
    ("--module", TAKEN, False),
    ("--no_python", TAKEN, False),
    ("--no_local_rank", TAKEN, False),
    ("--no_ssh", REPLACED, False),
    ("--no_ssh_check", REPLACED, False),
    ("--force_multi", REPLACED, False),
    ("--save_pid", LOST, False),
    ("--enable_each_rank_log", TAKEN, True),
    ("--autotuning", TAKEN, True),
    ("--bind_cores_to_rank", LOST, False),
    ("--bind_core_list", LOST, True),
    ("--ssh_port", REPLACED, True),
    ("--venv_script", TAKEN, True),
    ("--log_level", REPLACED, True),
    ("-q --quiet", REPLACED, False),
)

# `fabric run`; click reads it, so its options may also stand behind the script.
FABRIC: tuple[Option, ...] = (
    ("--accelerator", TAKEN, True),
    ("--strategy", TAKEN, True),
    ("--devices", TAKEN, True),
    ("--num-nodes --num_nodes", TAKEN, True),
    ("--node-rank --node_rank", REPLACED, True),
    ("--main-address --main_address", REPLACED, True),
    ("--main-port --main_port", REPLACED, True),
    ("--precision", TAKEN, True),
)

# Open MPI's and MPICH's, those that people write in front of a Python program. Any other is refused.
MPIRUN: tuple[Option, ...] = (
    ("-n -np --np --n -c", TAKEN, True),
    ("-N -npernode --npernode -ppn --ppn", TAKEN, True),
    ("-x", TAKEN, True),
    ("-hostfile --hostfile -machinefile --machinefile -f", REPLACED, True),
    ("-H -host --host", REPLACED, True),
    ("-map-by --map-by", TAKEN, True),
    ("-rank-by --rank-by", LOST, True),
    ("-bind-to --bind-to", LOST, True),
    ("-oversubscribe --oversubscribe", REPLACED, False),
    ("-allow-run-as-root --allow-run-as-root", REPLACED, False),
    ("-tag-output --tag-output", LOST, False),
    ("-report-bindings --report-bindings", LOST, False),
    ("-q -quiet --quiet", REPLACED, False),
    ("-v -verbose --verbose", REPLACED, False),
)


class Unreadable(ValueError):
    """The options do not fit the launcher's; the text says which."""


def name_of(flags: str) -> str:
    """The name of an option: its first long flag, without dashes."""
    words = flags.split()
    return next((flag for flag in words if flag.startswith("--")), words[0]).lstrip("-")


class Options:
    """What a launcher's command line says: its options by name, its program, and the program's words."""

    def __init__(
        self, table: Sequence[Option], given: Mapping[str, str | list[str] | bool], program: str, words: list[str]
    ) -> None:
        self._table, self._given = table, given
        self.program, self.words = program, words

    def __contains__(self, name: str) -> bool:
        return bool(self._given.get(name))

    def text(self, name: str, default: str = "") -> str:
        """The value of the option, the last one where it was given several times."""
        value = self._given.get(name)
        value = value[-1] if isinstance(value, list) else value
        return value if isinstance(value, str) else default

    def all(self, name: str) -> list[str]:
        """All values of an option that may be given several times."""
        value = self._given.get(name)
        return value if isinstance(value, list) else []

    def that_are(self, fate: str) -> list[str]:
        """The given options that share this fate, each as `--name`."""
        names = [name_of(flags) for flags, becomes, _ in self._table if becomes == fate]
        return [f"--{name}" for name in names if name in self]


def read_options(
    table: Sequence[Option],
    words: Sequence[str],
    defaults: Mapping[str, str] | None = None,
    abbreviated: bool = True,
    anywhere: bool = False,
) -> Options:
    """The options of a launcher, its program, and the words that are the program's.

    defaults: of options that are not given, by name. abbreviated: the launcher takes `--rdzv-e` for `--rdzv-endpoint`.
    anywhere: its options may stand behind the program, too, and those that it does not know are the program's. Raises
    Unreadable.
    """
    flags = {flag: option for option in table for flag in option[0].split()}
    given: dict[str, str | list[str] | bool] = {}
    rest: list[str] = []
    waiting = deque(words)
    while waiting and (anywhere or not rest):
        word = waiting.popleft()
        if word == "--":
            break
        flag, value = _split_option(word, flags, abbreviated)
        if flag is None:
            if word.startswith("-") and len(word) > 1 and not anywhere:
                raise Unreadable(f"it has no option {word}")
            rest.append(word)
            continue
        names, _, has_value = flags[flag]
        if not has_value:
            given[name_of(names)] = True
            continue
        if value is None and not waiting:
            raise Unreadable(f"{word} needs a value")
        values = given.setdefault(name_of(names), [])
        assert isinstance(values, list)
        values.append(waiting.popleft() if value is None else value)
    rest += waiting
    at = next((number for number, word in enumerate(rest) if not (anywhere and word.startswith("-"))), None)
    if at is None:
        raise Unreadable("it names no script")
    return Options(table, dict(defaults or {}) | given, rest[at], rest[:at] + rest[at + 1 :])


def _split_option(word: str, flags: Mapping[str, Option], abbreviated: bool) -> tuple[str | None, str | None]:
    """(flag, value within the word) of an option; (None, None) of any other word."""
    flag, equals, value = word.partition("=")
    if flag in flags:
        return flag, value if equals else None
    if len(word) > 2 and word[0] == "-" and word[1] != "-" and word[:2] in flags and flags[word[:2]][2] and abbreviated:
        return word[:2], word[2:]
    if abbreviated and flag.startswith("--"):
        fitting = [known for known in flags if known.startswith(flag)]
        if len({flags[known] for known in fitting}) == 1:
            return fitting[0], value if equals else None
    return None, None


def torch_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """The options that torchrun reads from variables: PET_NPROC_PER_NODE for --nproc-per-node, and so on."""
    found = {}
    for flags, _, has_value in TORCHRUN:
        value = environment.get("PET_" + name_of(flags).upper().replace("-", "_"), "")
        if value and (has_value or value != "0"):
            found[name_of(flags)] = value
    return found
