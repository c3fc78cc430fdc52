"""``python -m fw`` is the console script ``fw``: what launchers start on every rank."""

import sys

from fw.cli import main

sys.exit(main())
