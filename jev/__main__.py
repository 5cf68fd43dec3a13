"""``python -m jev`` and the command ``jev``."""

import signal
import sys

# Ctrl-C ends the process at once, without a traceback, until a command has begun that can say more; see jev.signals.
if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> int:
    from jev.cli import main as run
    return run()


if __name__ == "__main__":
    sys.exit(main())
