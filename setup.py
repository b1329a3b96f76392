"""The packages of a wheel. Each of these folders is a source root with one package; the templates go with `unicron`."""

from pathlib import Path

from setuptools import find_packages, setup

ROOTS = sorted(path.parent.parent.name for path in Path().glob("*/unicron*/__init__.py"))
homes = {name: f"{root}/{name.replace('.', '/')}" for root in ROOTS for name in find_packages(root)}
homes["unicron.sbatch_templates"] = "sbatch_templates"
setup(packages=list(homes), package_dir=homes)
