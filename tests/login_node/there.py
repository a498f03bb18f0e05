"""The command of the login node, as a process of tests.forked: it becomes the command line."""

import os
import sys

os.execv(sys.executable, [sys.executable, "-m", "scaletrain_cli", *sys.argv[1:]])
