"""The `unicron-agent` program: `unicron-agent run -- COMMAND...` in front of a training command."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from unicron_ctl.agent.connections.containment import reason
from unicron_ctl.agent.connections.step_tasks import others
from unicron_ctl.agent.launchers import shells, world
from unicron_ctl.agent.launchers.commands import LauncherStays, is_submitit
from unicron_ctl.agent.launchers.readers import read_launcher
from unicron_ctl.agent.ranks.rank_logs import shown_ranks
from unicron_ctl.agent.ranks.static_world import LAUNCHER, SUBMITIT
from unicron_ctl.agent.ranks.warm_commands import wanted
from unicron_ctl.agent.start import bare, untouched
from unicron_ctl.agent.start.bare import without_agent
from unicron_ctl.agent.start.command_mode import (
    Mode,
    add_launcher,
    asked_mode,
    choose_mode,
    is_python,
    only_helps,
    scripts_of,
)
from unicron_ctl.agent.start.resources import shortage
from unicron_ctl.shared.protocol.structs import SESSION
from unicron_ctl.shared.system import program as programs
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.release import OF_RANKS, version_option

if TYPE_CHECKING:
    from unicron_ctl.agent.connections.job_environment import Place
    from unicron_ctl.agent.loop.agent import Agent
    from unicron_detector.processes.job_output import JobOutput

REGISTER_TIMEOUT = "10"  # seconds to find the controller before the job runs unprotected
FLUSH_SECONDS = 2.0  # without progress, for the last lines of a job's log
NO_ADDRESS = (errno.EINVAL, errno.EPROTONOSUPPORT, errno.ENODEV)  # ZeroMQ's errors for an invalid address
SAID_TASKS = "_UNICRON_SAID_TASKS"  # names the option that set the number of tasks (slurm_plugin/spank/submit.c)
# A program that is one of several processes: it reads its rank, or imports a library that does
_SEVERAL = re.compile(
    r"\btorch\.distributed\b|^[ \t]*from[ \t]+torch[ \t]+import\b.*\bdistributed\b"
    r"|\binit_(?:process_group|distributed)\b|\b(?:LOCAL_RANK|RANK|WORLD_SIZE|SLURM_LOCALID)\b|\blocal[-_]rank\b"
    r"|^[ \t]*(?:from|import)[ \t]+(?:accelerate|deepspeed|lightning|megatron|nemo|pytorch_lightning|torchtitan|trl"
    r"|unicron)\b"
    r"|\b\w*Trainer\(",
    re.MULTILINE,
)
# A program that uses all GPUs of its node by itself
_ALONE = re.compile(
    r"\b(?:mp|multiprocessing)\.(?:spawn|Process)\b|\bspawn\(|\bstart_processes\b|\bDataParallel\(|\bdevice_map\b"
    r"|\b(?:notebook|debug)_launcher\b|\btensor_parallel_size\b|^[ \t]*(?:from|import)[ \t]+(?:jax|vllm)\b",
    re.MULTILINE,
)


@dataclass(frozen=True)
class RankCommand:
    """The command of each rank, without a launcher in front of it."""

    words: list[str]
    """The command."""
    news: str = ""
    """The job's log line about the launcher."""
    warning: str = ""
    """The job's log line about a part of the launcher's work that nothing does now."""


@dataclass(frozen=True)
class Preparation:
    """All that an agent needs before it begins."""

    mode: Mode
    place: Place
    words: Sequence[str]
    """The command of each rank."""
    seconds: float
    """For finding the controller."""
    why_one: str
    """Why one task is one rank (:func:`why_one_rank`)."""


def import_folders(command: Sequence[str], folder: str, python_path: str) -> list[Path]:
    """Return the folders in which the command's Python looks before Unicron's: its script's, then PYTHONPATH."""
    beside = Path(folder)
    for word in command:
        if word in ("-m", "-c"):  # then the working folder comes first
            break
        if word.endswith(".py"):
            beside = Path(folder, word).resolve().parent
            break
    return [beside.resolve(), *(Path(folder, part).resolve() for part in python_path.split(os.pathsep) if part)]


def hidden_packages(folders: Sequence[Path]) -> list[Path]:
    """Return the user's files that Python would import in place of the packages of session mode."""
    found = []
    for package in OF_RANKS:
        for folder in folders:
            if (folder / package.__name__).resolve() == Path(str(package.__file__)).resolve().parent:
                break  # later folders are not reached
            for path in (folder / f"{package.__name__}{end}" for end in (".py", "")):
                if path.is_file() or (path / "__init__.py").is_file():
                    found.append(path)
    return found


def check_command(command: Sequence[str], option: str | None = None) -> Mode:
    """Return the mode in which the command is healed. Raises UserError for a command that cannot work."""
    asked = asked_mode(option, os.environ)
    if not command:
        raise UserError("no command: write `unicron-agent run -- python train.py ...`", WRONG_USE)
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]}: no such program on this node; check the path, or PATH", WRONG_USE)
    folders = import_folders(command, os.getcwd(), os.environ.get("PYTHONPATH", ""))
    mode = choose_mode(*asked, command, Path.cwd(), folders)
    if not mode.text and (text := shells.shell_text(command)):
        mode = replace(mode, text=scripts_of(text, Path.cwd()))
    if mode.name == SESSION and (paths := hidden_packages(folders)):
        hidden = f"{paths[0]} hides unicron's package '{paths[0].stem}'"
        raise UserError(f"{hidden}: rename it, or run with --unicron-mode=restart or --no-unicron", WRONG_USE)
    return mode


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@version_option
def cli() -> None:
    """Supervise the ranks of one node."""


@cli.command(context_settings={"allow_interspersed_args": False})
@click.option("--controller", metavar="ADDRESS", help="tcp://HOST:PORT [default: UNICRON_CONTROLLER].")
@click.option(
    "--mode",
    metavar="MODE",
    help="session: COMMAND uses unicron.Session and is healed within the iteration; restart: any program, started "
    "again in a new world; auto: by the text of its script [default: UNICRON_MODE, auto].",
)
@click.option("--session", "mode", flag_value=SESSION, help="The same as --mode session.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(controller: str | None, mode: str | None, command: tuple[str, ...]) -> int:
    """Run COMMAND once per rank of this node, protected; the exit status is COMMAND's."""
    replace_variables(shells.leave_shell(os.environ))
    outside = dict(os.environ)
    if command and (why := untouched.why_by_shape(os.environ, others.count)):
        untouched.become(command, outside, why)
    replaced = replace_launcher(command, outside)
    if isinstance(replaced, int):
        return replaced
    ready = prepare_or_become(controller, mode, replaced.words, command, outside)
    from unicron_ctl.agent.start.unprotected import run_unprotected

    place, words, address = ready.place, ready.words, controller or os.environ.get("UNICRON_CONTROLLER", "")
    if not address:
        return run_unprotected(place, words, "no controller is configured (UNICRON_CONTROLLER)")
    agent = begin_agent(ready, address)
    if isinstance(agent, str):
        return run_unprotected(place, words, agent)
    try:
        connected = agent.connect(ready.seconds)
    except Exception as error:  # no rank has begun
        agent.close()
        return run_unprotected(place, words, f"the agent failed: {reason(error)}")
    if connected:
        status = run_agent(agent, ready, replaced)
    else:
        agent.close()
        flush()
        status = agent.exit_code
    if status is not None:
        return status
    if agent.registration.apart:
        untouched.become(command, outside, agent.registration.refusal)
    place = place.alone() if agent.registration.alone else place
    return run_unprotected(place, words, agent.registration.why_not(address))


def prepare_or_become(
    controller: str | None, mode: str | None, words: list[str], command: Sequence[str], outside: Mapping[str, str]
) -> Preparation:
    """Prepare the agent; or become the command, with the environment `outside`, if it should have no agent. Raises
    UserError for a wrong option or variable."""
    try:
        ready = prepare(controller, mode, words)
        import unicron_ctl.agent.start.unprotected  # noqa: F401  (a user's file may hide a module that it imports)
    except UserError:
        if os.environ.get(untouched.BY_DEFAULT) == "1":
            untouched.become(command, outside)  # the user has not asked for an agent
        raise
    except Exception as error:
        replace_variables(outside)
        without_agent(["--", *command], reason(error))
    why = untouched.why_sweep(os.environ, "its script", ready.mode.text)
    why = why or untouched.why_by_ranks(ready.place, ready.mode, os.environ)
    if why or not untouched.meant(ready.mode, ready.place.settings.ranks_per_node, os.environ):
        untouched.become(command, outside, why)
    return ready


def run_agent(agent: Agent, ready: Preparation, launch: RankCommand) -> int | None:
    """Run the ranks until the element is over; return its exit status, None if the agent was released."""
    place = ready.place
    for line in (
        untouched.describe_array(os.environ, place.settings.max_nodes // place.settings.block),
        f"{ready.mode.name} mode: {ready.mode.reason}",
        launch.news,
        describe_ranks(place, ready.why_one, os.environ),
        place.warning,
    ):
        if line:
            agent.log.inform(line)
    if launch.warning:
        agent.log.warn(launch.warning)
    status = agent.run()
    around = [rank.surroundings for rank in agent.ranks.values()]
    flush(*(each.out for each in around), *(each.err for each in around))
    return status


def flush(*outputs: JobOutput) -> None:
    """Write these outputs and this process's own, for as long as the job's log takes text."""
    from unicron_detector.processes.job_output import standard_error, standard_output

    for output in {standard_output, standard_error, *outputs}:
        output.flush(FLUSH_SECONDS)


def replace_variables(environment: Mapping[str, str]) -> None:
    """Give this process another environment."""
    if environment != os.environ:
        os.environ.clear()
        os.environ.update(environment)


def replace_launcher(command: Sequence[str], outside: Mapping[str, str]) -> RankCommand | int:
    """Return the command of each rank. A shell that calls a launcher is run here, and its exit status returned. If the
    launcher stays, this process becomes the command, with the environment `outside`."""
    try:
        text = shells.shell_text(command)
        if why := untouched.why_sweep(os.environ, "its shell script", text or ""):
            raise LauncherStays(why)
        if shells.launches(command):
            check_tasks()
            with shells.meaning_the_agent(os.environ) as environment:
                return bare.run_all([command], [environment])
        return without_launcher(command)
    except LauncherStays as error:
        untouched.become(command, outside, str(error))
    except Exception as error:  # such as no room for the folder of the launchers' names
        untouched.become(command, outside, f"its launcher could not be read: {reason(error)}")


def check_tasks() -> None:
    """Raise LauncherStays if several tasks of this node would each run a launcher."""
    if others.count > 1:
        many = f"it has {others.count} tasks on a node, and each would start the ranks of a node by its launcher"
        raise LauncherStays(f"{many}: give it one (--ntasks-per-node=1)")


def without_launcher(command: Sequence[str]) -> RankCommand:
    """Return the command of each rank; the launcher's options go into this process's environment. Raises
    LauncherStays."""
    environment = os.environ
    if is_submitit(command):
        if "SLURM_ARRAY_TASK_ID" in environment:
            raise LauncherStays("each element of submitit's array is a job of its own: submit one with nodes=N")
        environment[LAUNCHER] = SUBMITIT
        return RankCommand(list(command))
    launch = read_launcher(command)
    if launch is None:
        return RankCommand(list(command), shells.kept_in_container(command) or shells.starts_own_ranks(command))
    if why := untouched.why_alone(environment, launch):
        raise LauncherStays(why)
    check_tasks()
    environment[LAUNCHER] = launch.launcher
    sizes = (environment.get(name, "1") for name in ("SLURM_ARRAY_TASK_COUNT", "SLURM_NNODES"))
    elements, nodes = (int(size) if size.isdecimal() else 1 for size in sizes)
    spares = environment.get("UNICRON_SPARES", "0")
    devices = sum(path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia[0-9]*"))
    count = nodes if launch.nodes[1] == nodes > 1 else elements * nodes  # one of its element alone, or of the job
    ranks = world.count_ranks(launch, environment, count, len(os.sched_getaffinity(0)), devices)
    array = "SLURM_ARRAY_TASK_ID" in environment
    fewest = world.fewest_nodes(launch, elements, nodes, int(spares) if spares.isdecimal() else 0, array)
    news = world.describe(launch, ranks)
    if (chosen := environment.get("UNICRON_RANKS_PER_NODE")) and chosen != str(ranks):
        news += f"; UNICRON_RANKS_PER_NODE={chosen} counts"
    added = {"UNICRON_RANKS_PER_NODE": str(ranks)} | ({"UNICRON_MIN_NODES": str(fewest)} if fewest else {})
    environment.update({name: value for name, value in added.items() if not environment.get(name)})
    environment.update(launch.environment)
    return RankCommand(launch.command, news, launch.warning)


def prepare(controller: str | None, asked: str | None, command: Sequence[str]) -> Preparation:
    """Read the mode, the place and the settings of this agent. Raises UserError for a wrong option or variable."""
    chosen = check_command(command, asked)
    # Only now: they import `transition`, which a user's file may hide.
    from unicron_ctl.agent.connections.job_environment import number, read_place
    from unicron_ctl.agent.connections.stated_layouts import LAYOUTS

    address = controller or os.environ.get("UNICRON_CONTROLLER", "")
    trains = is_python(command, shells.shell_text(command) or "") and not only_helps(chosen.text)
    why_one = why_one_rank(os.environ, trains, chosen.text)
    place = read_place(os.environ, address, others.receive(), by_gpus=not why_one)
    place = place.in_mode(chosen.name, chosen.reason, trains, untouched.digest(command, os.environ))
    if place.settings.layouts and chosen.name != SESSION:
        why = f"{LAYOUTS} is for session mode, and this job is healed in {chosen.name} mode ({chosen.reason})"
        raise UserError(f"{why}: unset it, or say --unicron-mode=session", WRONG_USE)
    if place.settings.layouts and chosen.launched:
        why = f"{LAYOUTS} is for scripts that take their layout from UNICRON_LAYOUT, and Megatron-LM's own do not"
        raise UserError(f"{why}: unset it", WRONG_USE)
    shown_ranks(os.environ)  # wrong values are refused before anything starts
    wanted(os.environ)
    seconds = number(os.environ, "UNICRON_REGISTER_TIMEOUT", REGISTER_TIMEOUT, float, 0.0)
    return Preparation(chosen, place, add_launcher(command) if chosen.launched else command, seconds, why_one)


def why_one_rank(environment: Mapping[str, str], python: bool, text: str) -> str:
    """Return why one task is one rank; empty if it stands for a rank for each GPU. text: of its script."""
    if option := environment.get(SAID_TASKS):
        return f"{option} says so"
    if not python:
        return "its command names no Python program that trains"
    if found := _ALONE.search(text):
        return f"its script names {found[0].strip(' (')}, which uses a node's GPUs by itself"
    if _SEVERAL.search(text):
        return ""
    if not text:
        return "its command names no script that can be read here"
    return "its script names neither torch.distributed nor RANK, nor a library that does"


def describe_ranks(place: Place, why_one: str, environment: Mapping[str, str]) -> str:
    """Return the line about the ranks of one task on a node with several GPUs; empty if the user has chosen them."""
    gpus, ranks = environment.get("SLURM_GPUS_ON_NODE", ""), place.settings.ranks_per_node
    if not gpus.isdecimal() or int(gpus) < 2 or place.tasks or environment.get("UNICRON_RANKS_PER_NODE"):
        return ""
    if not why_one:
        return f"{ranks} ranks on each node, one for each GPU (`export UNICRON_RANKS_PER_NODE=1` starts one)"
    return (
        f"one rank on each node, for {why_one}; for one on each of its {gpus} GPUs write "
        f"`export UNICRON_RANKS_PER_NODE={gpus}`, or --ntasks-per-node={gpus}"
    )


def begin_agent(ready: Preparation, address: str) -> Agent | str:
    """Return the agent, or why there is none and what to do about it; then the command runs without."""
    place = ready.place
    if short := shortage(len(place.slots)):
        return short
    try:
        if place.tasks:  # the agent works for all tasks, and needs more than its own task's CPUs
            os.sched_setaffinity(0, frozenset[int]().union(*(task.cpus for task in place.tasks)))
        from unicron_ctl.agent.loop.agent import Agent
        from unicron_ctl.agent.loop.plain_ranks import RestartAgent

        return (Agent if ready.mode.name == SESSION else RestartAgent)(place, ready.words, address)
    except UserError as error:  # a wrong configuration
        return str(error)
    except Exception as error:
        if getattr(error, "errno", None) in NO_ADDRESS:
            return f"{address} is no address of a controller (tcp://HOST:PORT)"
        return f"the agent cannot begin: {reason(error)}"


def main() -> None:
    """Entry point of the `unicron-agent` program."""
    code = programs.run("unicron-agent", cli)
    others.end(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
