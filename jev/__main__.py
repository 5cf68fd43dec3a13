"""``python -m jev``."""

import sys

from jev.cli import main

sys.exit(main())
