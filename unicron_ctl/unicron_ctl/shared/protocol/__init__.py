"""The shared edge of controller, agents and commands: messages, encryption, munge credentials, the client."""
