"""Imports that every rank of a test needs, done once in the process that the ranks are forked from."""

import gc
import importlib
import os
import warnings

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch loads; ranks share the cores
warnings.simplefilter("ignore")  # DeepSpeed's import warns, and no test is there to hear it

for _name in (
    "pytest",  # test modules import it, and ranks import test modules
    "torch._dynamo",  # torch.optim loads it when an optimizer is made
    "deepspeed.runtime.zero.muon.muon_optimizer",  # ZeRO looks for it in any optimizer's place
    "deepspeed.pipe",
    "scaletrain_cli.plan",
    "scaletrain_cli.engine.assembly",
):
    importlib.import_module(_name)
importlib.import_module("scaletrain_cli.spec").RunSpec.model_rebuild()  # which pydantic puts off

gc.collect()
gc.freeze()  # a collection in a rank must not touch, and so copy, the pages that it shares
