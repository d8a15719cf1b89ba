"""Random programs over an optimizer, beside a slow, plain model of FusedAdam that shares no code with it."""

import sys
from pathlib import Path

# The judges of payloads and of storage are in a folder that is no package.
_NUMBERS = str(Path(__file__).parents[1] / "numbers")
if _NUMBERS not in sys.path:
    sys.path.append(_NUMBERS)
