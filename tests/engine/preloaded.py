"""Imports that every rank of a test needs, done once in the process that the ranks are forked from."""

import gc
import importlib
import os
import warnings

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch loads; ranks share the cores
warnings.simplefilter("ignore")  # DeepSpeed's import warns, and no test is there to hear it

from scaletrain_cli.engine import deepspeed_engine  # noqa: E402

with deepspeed_engine._without_mlflow():  # as prepare_deepspeed does
    importlib.import_module("deepspeed.pipe")
deepspeed_engine._load_muon_uncompiled()
for _name in (
    *("pytest", "hypothesis"),  # test modules import them, and ranks import test modules
    "torch._dynamo",  # torch.optim loads it when an optimizer is made
    "torch._inductor.compile_fx",  # bitsandbytes loads it
    "torch.profiler._cupti_monitor",
    *(f"deepspeed.{name}" for name in ("comm.mori", "module_inject.auto_ep_layer", "moe.ep_repack")),  # by its engine
    "ruamel.yaml",
    "scaletrain_cli.plan.planning",
    "scaletrain_cli.engine.assembly",
    "scaletrain_cli.launch.submit",
    "scaletrain_cli.launch.backends.local.backend",
):
    importlib.import_module(_name)
importlib.import_module("scaletrain_cli.spec").RunSpec.model_rebuild()  # which pydantic puts off

gc.collect()
gc.freeze()  # a collection in a rank must not touch, and so copy, the pages that it shares
