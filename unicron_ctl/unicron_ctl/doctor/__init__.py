"""Setting up: what an installation takes, and what is wrong with one. Facts are collected first and
judged afterwards."""
