"""The controller's sockets, threads and limits."""
