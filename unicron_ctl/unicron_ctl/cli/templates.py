"""`unicronctl template`: the batch scripts that users copy, from wherever the package is installed."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from unicron_ctl.shared.settings.places import TEMPLATES as FOLDER
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.printable import print_text

# Name -> (the file, the files that it needs, a line for the list).
TEMPLATES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "rigid": ("rigid.sbatch", (), "any script on N nodes, with or without torchrun: restart mode"),
    "array": ("array.sbatch", (), "any script on as many nodes as there are, one array element each: restart mode"),
    "conda": ("conda.sbatch", (), "rigid, with a conda environment"),
    "container": ("container.sbatch", (), "rigid, with each rank in a container of Apptainer's"),
    "lightning": ("lightning.sbatch", (), "Lightning, with its requeue before the time limit"),
    "accelerate": ("accelerate.sbatch", (), "Hugging Face's Accelerate, with its launcher's options"),
    "plain": (
        "array.sbatch",
        ("train_plain.py", "training_metrics.py"),
        "a model in plain PyTorch that is healed within the iteration: session mode",
    ),
    "gpt": (
        "gpt_elastic.sbatch",
        (
            "train_gpt.py",
            "gpt_options.py",
            "gpt_model.py",
            "build_dataset.py",
            "training_metrics.py",
            "gpt_imports.py",
            "cpu_adapter.py",
        ),
        "a GPT with Megatron-core that is healed within the iteration: session mode",
    ),
    "megatron": ("megatron_lm.sbatch", (), "NVIDIA's Megatron-LM as it is (pretrain_gpt.py): session mode"),
}


@click.command()
@click.argument("name", required=False)
@click.option(
    "--copy",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Copy the template and the files that it needs into FOLDER.",
)
def command(name: str | None, folder: Path | None) -> None:
    """Print the batch script NAME, or copy it with what it needs; without NAME, list them.

    \b
    unicronctl template rigid > train.sbatch
    unicronctl template plain --copy my-run
    """
    if name is None:
        for known, (file, _, line) in TEMPLATES.items():
            print_text(f"{known:10} {file:20} {line}")
        return
    if name not in TEMPLATES:
        raise UserError(f"no template {name!r}: there are {', '.join(TEMPLATES)}", WRONG_USE)
    file, neighbours, _ = TEMPLATES[name]
    if folder is None:
        print_text((FOLDER / file).read_text(), lines=True, nl=False)
        return
    folder.mkdir(parents=True, exist_ok=True)
    there = [each for each in (file, *neighbours) if (folder / each).exists()]
    if there:
        raise UserError(f"{folder / there[0]} is there already: remove it, or choose another folder", WRONG_USE)
    for each in (file, *neighbours):
        shutil.copyfile(FOLDER / each, folder / each)
        print_text(folder / each)
