"""The modules of the second decoder, which was written from the specification alone."""

import importlib
import sys
from typing import Any

from tests.support.spec_support import SPEC

sys.path.insert(0, str(SPEC / "decoder"))
files: Any = importlib.import_module("ckptz_decode")
frames: Any = importlib.import_module("ckptz_frame")
links: Any = importlib.import_module("ckptz_wire")
