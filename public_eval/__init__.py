"""The public evaluation as commands: generate, score, judge, grade, pack and tournament.

Run them from the repository root, for example `python -m public_eval.grade submission/`.
"""

import os
from pathlib import Path

# No telemetry unless the user asks for it. The libraries read this when they are imported.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

THRESHOLDS = Path(__file__).parent / "thresholds.json"
