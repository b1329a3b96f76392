"""The figures that the project promises: `make bench`."""
