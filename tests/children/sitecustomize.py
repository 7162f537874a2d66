"""Python runs this first in every process that a test starts."""

import importlib.util
from pathlib import Path

path = Path(__file__).resolve().parent.parent / "offline.py"
spec = importlib.util.spec_from_file_location("offline", path)
offline = importlib.util.module_from_spec(spec)
spec.loader.exec_module(offline)
offline.block()
