"""The base of all errors that a person may see: ``jev`` ends with their message and status, whichever command raised them.

The classes stand where they are raised; each also keeps the built-in class that it is a kind of.
"""

from __future__ import annotations


class JevError(Exception):
    """Something that whoever runs the program has to know. The message says all of it, without a traceback."""

    status = 1          # of the command that ends with it


class UsageError(JevError):
    """The command was called wrongly: a flag, an argument or a variable."""

    status = 2
