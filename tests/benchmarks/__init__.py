"""Make the modules beside the benchmark scripts importable, as they are when a script runs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
