"""A rank that trains one configuration after another in one process, which saves starting Python for each.

torchrun --nproc-per-node N train_in_turn.py '[["override", …], …]'
"""

from __future__ import annotations

import json
import sys

import fw

for overrides in json.loads(sys.argv[1]):
    done = fw.train("tiny.yaml", *overrides)
    assert done.exit_code == 0, (overrides, done)
