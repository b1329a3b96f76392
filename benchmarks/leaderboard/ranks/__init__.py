"""Scripts of the training processes: `core` is shared by all systems, each of which has a thin script beside it.
These run in environments in which nothing of this project is installed, so they import torch and `core` only."""
