"""Training scripts, which import only torch and `core`: this project is not installed in the peers' environments."""
