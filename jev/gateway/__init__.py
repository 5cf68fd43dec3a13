"""The gateway in front of one or more workers."""
