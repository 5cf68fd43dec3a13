"""Commands of ``jev`` that are more than a few lines. Each module has ``run``, which takes the parsed command line and
returns the exit status; ``jev.cli`` has the parser and the commands ``serve`` and ``check``."""
