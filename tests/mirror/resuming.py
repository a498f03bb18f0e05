"""A command line of one of two places; its jobs are taken and do not begin, and no data are prepared for them."""

import sys

from scaletrain_cli.__main__ import main
from scaletrain_cli.launch import preparation
from scaletrain_cli.launch.backends.local.backend import LocalBackend

LocalBackend.submit = lambda self, run, record: "7"  # type: ignore[method-assign]
preparation.reads_prepared_data = lambda *_: False
main(sys.argv[1:])
