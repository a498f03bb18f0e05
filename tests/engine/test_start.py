import os
import subprocess
import sys

_SPEC = """
schema: scaletrain/v1
name: start
model: {family: llama, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32,
  vocab_size: 32, seq_len: 8}
data: {source: synthetic}
training:
  {global_batch_size: 1, micro_batch_size: 1, steps: 10, precision: fp32, optimizer: {name: adamw, lr: 1.0e-3}}
layout: {zero_stage: 2, activation_checkpointing: none}
cluster: {scheduler: local, gpu: cpu, nodes: 1, gpus_per_node: 1}
"""

_A_STEP = """
import sys
import torch
import torch.distributed as dist
from scaletrain_cli.engine.compose import compose
from scaletrain_cli.engine.data.batches import MicroBatch
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.engine.step import build_stepper
from scaletrain_cli.plan import make_plan
from pathlib import Path
from scaletrain_cli.spec import parse_spec

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
spec, device = parse_spec(sys.argv[1], file="start.yaml", base_dir=Path()), torch.device("cpu")
composed = compose(spec, make_plan(spec).layout, Mesh(), device)
tokens = torch.arange(8).view(1, 8)
batch = MicroBatch(tokens, tokens, torch.arange(8), torch.zeros(1, dtype=torch.int64), torch.tensor(8.0))
build_stepper(composed, Mesh(), device, spec.training).train([batch])
print("loaded:", *sorted({"mlflow", "pandas", "torch._dynamo", "torch._inductor.graph"} & sys.modules.keys()))
import mlflow
"""


def test_a_rank_that_compiles_nothing_loads_no_compiler_of_torch_and_no_mlflow_and_can_load_it_later() -> None:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-c", _A_STEP, _SPEC]
    done = subprocess.run(command, env=os.environ | place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_a_checkpoint_is_exported_and_evaluated_and_a_run_is_rehearsed_without_pillow() -> None:
    modules = ("checkpoint.export", "evaluation.tasks", "rehearsal.run")
    imports = "".join(f"import scaletrain_cli.engine.{module}\n" for module in modules)
    program = f"import sys\nsys.modules['PIL'] = None\n{imports}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
