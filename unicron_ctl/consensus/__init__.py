"""How a job goes on after a Break, and how its agents agree on that while the controller is away; pure, no sockets.

Shared by the controller and the agents; knows neither (docs/design/agreement.md).
"""
