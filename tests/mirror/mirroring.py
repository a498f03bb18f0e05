"""The process that mirrors a run, as a child of what starts it; its input has ended, so it mirrors once."""

import os
import sys

from scaletrain_cli.launch.mirroring import main

sys.exit(main([*sys.argv[1:], "--parent-pid", str(os.getppid())]))
