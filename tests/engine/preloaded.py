"""What every rank of a test needs, imported once in the process that the ranks are forked from. Knows no test."""

import gc
import os
import warnings

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch loads; ranks share the cores
warnings.simplefilter("ignore")  # DeepSpeed's import warns, and no test is there to hear it

import pytest  # noqa: E402, F401  test modules import it, and ranks import test modules

import scaletrain_cli.engine.assembly  # noqa: E402
import scaletrain_cli.plan  # noqa: E402, F401

os.environ["DS_ACCELERATOR"] = "cpu"

gc.collect()
gc.freeze()  # a collection in a rank must not touch, and so copy, the pages that it shares
