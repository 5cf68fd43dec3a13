"""``python -m jev`` and the command ``jev``."""

import _signal  # type: ignore[import-not-found]  # the module signal takes milliseconds, in which a signal would be a traceback
import sys

# Ctrl-C ends the process at once, without a traceback, until a command has begun that can say more; see jev.signals.
if _signal.getsignal(_signal.SIGINT) == _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)


def main() -> int:
    from jev.cli import main as run
    return run()


if __name__ == "__main__":
    sys.exit(main())
