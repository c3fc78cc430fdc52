"""A rank that tries one configuration after another in one process, refused ones too; the first rank prints what came of each as JSON.

torchrun --nproc-per-node N try_in_turn.py '{"name": ["override", …], …}'
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import redirect_stdout

import fw
from fw.errors import UserError

came: dict[str, str] = {}
for name, overrides in json.loads(sys.argv[1]).items():
    try:
        with redirect_stdout(sys.stderr):
            done = fw.train("tiny.yaml", *overrides, f"train.run_dir={name}")
        came[name] = "" if done.exit_code == 0 else f"exit code {done.exit_code}"
    except UserError as error:
        came[name] = f"refused: {error}"
    except Exception:
        came[name] = traceback.format_exc()
        break  # ranks may not be at one place any more
if os.environ.get("RANK", "0") == "0":
    print(json.dumps(came))
