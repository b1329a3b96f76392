"""Notices for people outside: made of the log, and sent by mail, hooks and chats."""
