"""The `unicron-agent` program: `unicron-agent run -- COMMAND...` in front of a training command."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from unicron_ctl.agent.start import bare, rank_count, untouched
from unicron_ctl.agent.start.bare import without_agent
from unicron_ctl.agent.start.command_mode import (
    Mode,
    asked_mode,
    choose_mode,
    is_python,
    launched,
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
NO_ADDRESS = (errno.EINVAL, errno.EPROTONOSUPPORT, errno.ENODEV)  # what ZeroMQ says of one


def import_folders(command: Sequence[str], folder: str, python_path: str) -> list[Path]:
    """The folders in which the command's Python looks before it comes to unicron: beside its script, then
    PYTHONPATH."""
    beside = Path(folder)
    for word in command:
        if word in ("-m", "-c"):  # the working folder leads then
            break
        if word.endswith(".py"):
            beside = Path(folder, word).resolve().parent
            break
    return [beside.resolve(), *(Path(folder, part).resolve() for part in python_path.split(os.pathsep) if part)]


def hidden_packages(folders: Sequence[Path]) -> list[Path]:
    """The user's files that Python would import in place of the packages of session mode."""
    found = []
    for package in OF_RANKS:
        for folder in folders:
            if (folder / package.__name__).resolve() == Path(str(package.__file__)).resolve().parent:
                break  # what comes later is not reached
            for path in (folder / f"{package.__name__}{end}" for end in (".py", "")):
                if path.is_file() or (path / "__init__.py").is_file():
                    found.append(path)
    return found


def check_command(command: Sequence[str], option: str | None = None) -> Mode:
    """The mode in which the command is healed. Raises UserError for a command that cannot work."""
    asked = asked_mode(option, os.environ)
    if not command:
        raise UserError("no command: write `unicron-agent run -- python train.py ...`", WRONG_USE)
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]}: no such program on this node; check the path, or PATH", WRONG_USE)
    folders = import_folders(command, os.getcwd(), os.environ.get("PYTHONPATH", ""))
    mode = choose_mode(*asked, command, Path.cwd(), folders)
    if not mode.text and (text := shells.shell_text(command)):
        mode = replace(mode, text=scripts_of(text, Path.cwd()))
    for path in hidden_packages(folders) if mode.name == SESSION else ():
        hidden = f"{path} hides unicron's package '{path.stem}'"
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
    rank_command, told_launcher, warning = replaced
    try:
        chosen, place, words, seconds, why_one = prepare(controller, mode, rank_command)
        from unicron_ctl.agent.start.unprotected import run_unprotected
        from unicron_detector.processes.job_output import standard_error, standard_output
    except UserError:
        if os.environ.get(untouched.BY_DEFAULT) == "1":
            untouched.become(command, outside)  # nobody has asked for what cannot be done
        raise
    except Exception as error:
        replace_variables(outside)
        without_agent(["--", *command], reason(error))
    why = untouched.why_sweep(os.environ, "its script", chosen.text)
    why = why or untouched.why_by_ranks(place, chosen, os.environ)
    if why or not untouched.meant(chosen, place.settings.ranks_per_node, os.environ):
        untouched.become(command, outside, why)
    address = controller or os.environ.get("UNICRON_CONTROLLER", "")
    if not address:
        return run_unprotected(place, words, "no controller is configured (UNICRON_CONTROLLER)")
    agent = begin_agent(chosen.name == SESSION, place, words, address)
    if isinstance(agent, str):
        return run_unprotected(place, words, agent)
    try:
        connected = agent.connect(seconds)
    except Exception as error:  # no rank has begun
        agent.close()
        return run_unprotected(place, words, f"the agent failed: {reason(error)}")
    if connected:
        told_ranks = rank_count.describe_ranks(place, why_one, os.environ)
        told_array = untouched.describe_array(os.environ, place.settings.max_nodes // place.settings.block)
        said = (told_array, f"{chosen.name} mode: {chosen.reason}", told_launcher, told_ranks, place.warning)
        say_all(agent, said, warning)
        status = agent.run()
        around = [rank.surroundings for rank in agent.ranks.values()]
        flush(standard_output, standard_error, *(each.out for each in around), *(each.err for each in around))
        if status is not None:
            return status
    else:
        agent.close()
        standard_error.flush(FLUSH_SECONDS)
        if agent.exit_code is not None:
            return agent.exit_code
    if agent.registration.apart:
        untouched.become(command, outside, agent.registration.refusal)
    place = place.alone() if agent.registration.alone else place
    return run_unprotected(place, words, agent.registration.why_not(address))


def say_all(agent: Agent, said: Sequence[str], warning: str) -> None:
    """Write these lines, and the warning, to the job's log."""
    for told in filter(None, said):
        agent.log.inform(told)
    if warning:
        agent.log.warn(warning)


def flush(*outputs: JobOutput) -> None:
    """Write what waits for the job's log, as long as that takes it."""
    for output in set(outputs):
        output.flush(FLUSH_SECONDS)


def replace_variables(environment: Mapping[str, str]) -> None:
    """Give this process another environment."""
    if environment != os.environ:
        os.environ.clear()
        os.environ.update(environment)


def replace_launcher(command: Sequence[str], outside: Mapping[str, str]) -> tuple[list[str], str, str] | int:
    """(what each rank runs, what the job's log says of the launcher that is left out, of what it warns). A shell with a
    launcher in it is run here: its exit status. A command whose launcher stays is executed, with the environment
    `outside`."""
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
    except Exception as error:  # no folder for the launchers' names, and whatever nobody has thought of
        untouched.become(command, outside, f"its launcher could not be read: {reason(error)}")


def check_tasks() -> None:
    """Raise LauncherStays where several tasks of this node would each run a launcher."""
    if others.count > 1:
        many = f"it has {others.count} tasks on a node, and each would start the ranks of a node by its launcher"
        raise LauncherStays(f"{many}: give it one (--ntasks-per-node=1)")


def without_launcher(command: Sequence[str]) -> tuple[list[str], str, str]:
    """(what each rank runs, what the job's log says of the launcher that is left out, of what it warns). What the
    launcher was told goes into this process's environment. Raises LauncherStays."""
    environment = os.environ
    if is_submitit(command):
        if "SLURM_ARRAY_TASK_ID" in environment:
            raise LauncherStays("each element of submitit's array is a job of its own: submit one with nodes=N")
        environment[LAUNCHER] = SUBMITIT
        return list(command), "", ""
    launch = read_launcher(command)
    if launch is None:
        return list(command), shells.kept_in_container(command) or shells.starts_own_ranks(command), ""
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
    told = world.describe(launch, ranks)
    if (said := environment.get("UNICRON_RANKS_PER_NODE")) and said != str(ranks):
        told += f"; UNICRON_RANKS_PER_NODE={said} counts"
    added = {"UNICRON_RANKS_PER_NODE": str(ranks)} | ({"UNICRON_MIN_NODES": str(fewest)} if fewest else {})
    os.environ.update({name: value for name, value in added.items() if not environment.get(name)})
    os.environ.update(launch.environment)
    return launch.command, told, launch.warning


def prepare(
    controller: str | None, asked: str | None, command: Sequence[str]
) -> tuple[Mode, Place, Sequence[str], float, str]:
    """The job's mode, this agent's place, the command to run, seconds to find the controller, and why one task is one
    rank (:func:`rank_count.why_one_rank`). Raises UserError for what makes no sense."""
    chosen = check_command(command, asked)
    # Only now: they import `transition`, which a file of the user's may hide.
    from unicron_ctl.agent.connections.job_environment import number, read_place
    from unicron_ctl.agent.connections.stated_layouts import LAYOUTS

    address = controller or os.environ.get("UNICRON_CONTROLLER", "")
    trains = is_python(command, shells.shell_text(command) or "") and not only_helps(chosen.text)
    why_one = rank_count.why_one_rank(os.environ, trains, chosen.text)
    place = read_place(os.environ, address, others.receive(), by_gpus=not why_one)
    place = place.in_mode(chosen.name, chosen.reason, trains, untouched.digest(command, os.environ))
    if place.settings.layouts and chosen.name != SESSION:
        said = f"{LAYOUTS} is for session mode, and this job is healed in {chosen.name} mode ({chosen.reason})"
        raise UserError(f"{said}: unset it, or say --unicron-mode=session", WRONG_USE)
    if place.settings.layouts and chosen.launched:
        said = f"{LAYOUTS} is for scripts that take their layout from UNICRON_LAYOUT, and Megatron-LM's own do not"
        raise UserError(f"{said}: unset it", WRONG_USE)
    shown_ranks(os.environ)
    wanted(os.environ)  # a value that makes no sense is refused before anything starts
    seconds = number(os.environ, "UNICRON_REGISTER_TIMEOUT", REGISTER_TIMEOUT, float, 0.0)
    return chosen, place, launched(command) if chosen.launched else command, seconds, why_one


def begin_agent(session: bool, place: Place, command: Sequence[str], address: str) -> Agent | str:
    """The agent, or why there is none and what to do. Whatever this node is short of, and whatever is broken: the
    command runs all the same."""
    if short := shortage(len(place.slots)):
        return short
    try:
        if place.tasks:  # this one's CPUs alone would be too few for what it does for all
            os.sched_setaffinity(0, frozenset[int]().union(*(task.cpus for task in place.tasks)))
        from unicron_ctl.agent.loop.agent import Agent
        from unicron_ctl.agent.loop.plain_ranks import RestartAgent

        return (Agent if session else RestartAgent)(place, command, address)
    except UserError as error:  # of the configuration
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
