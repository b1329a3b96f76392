"""What people outside are told: made of the log, and sent by mail, hooks and chats."""
