"""The directory of a run of many steps and ranks: attempt, nodes, events, metrics, telemetry. No tests here."""

import json
from collections.abc import Sequence
from pathlib import Path

from scaletrain_cli.launch.attempts import begin_attempt
from scaletrain_cli.launch.node.record import NodeRecord, RankRecord, write_node_record
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.plan import make_plan
from scaletrain_cli.rundir.journal import append_lines
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.spec import parse_spec
from scaletrain_cli.telemetry.run import node_file
from scaletrain_cli.telemetry.series import SeriesWriter

BEGAN = 1_700_000_000.0
GB = 10**9
_SPEC = """
schema: scaletrain/v1
name: large
model: {family: llama, preset: llama-7b}
data: {source: /data/tokens}
training: {global_batch_size: 8192, micro_batch_size: 2, steps: %d, optimizer: {name: adamw, lr: 3.0e-4},
  schedule: {name: cosine, warmup_steps: 2000}}
evaluation: {every: 1000}
checkpoint: {every: 1000}
layout: {zero_stage: 1, tensor_parallel: 8, activation_checkpointing: full}
cluster: {scheduler: slurm, nodes: %d, gpus_per_node: 8, gpu: h100-sxm-80gb, price_per_gpu_hour: 2.0}
"""


def make_large_run(root: Path, *, steps: int, nodes: int, seconds: float = 0.5) -> RunDir:
    """Return a run that has trained all of its steps but a thousand; rank 5 has the most memory, GPU 3 is hot."""
    spec = parse_spec(_SPEC % (steps + 1000, nodes), file="large.yaml", base_dir=root)
    run = create_run(spec, make_plan(spec), "large", root=root).run
    names = [f"gpu{number:04d}" for number in range(nodes)]
    begin_attempt(run, spec, scheduler="slurm", job_id="77", nodes=names)
    for number, name in enumerate(names):
        ranks = tuple(RankRecord(8 * number + rank, 1000 + rank, BEGAN) for rank in range(8))
        write_node_record(run, 1, NodeRecord(f"node-{number:04d}-{name}", name, number, 999, 5, BEGAN, ranks))
    write_metrics(run.metrics, steps, seconds)
    saves = range(1000, steps + 1, 1000)
    append_lines(run.events, [{"time": BEGAN, "event": "started", "attempt": 1, "step": 0, "metrics_bytes": 0}])
    saved = {"event": "checkpoint", "attempt": 1, "bytes": 80 * GB, "seconds": 20.0, "blocked_seconds": 0.5}
    append_lines(run.events, [{"time": BEGAN + seconds * step, "step": step, **saved} for step in saves])
    write_telemetry(run, names, steps, BEGAN + seconds * steps)
    return run


def write_metrics(path: Path, steps: int, seconds: float, every: int = 1000) -> None:
    """Write metrics.jsonl in blocks of lines with the same values, so that it is soon made; 200 bytes a step."""
    values = {"grad_norm": 0.51234567, "learning_rate": 0.0003, "data_wait": 0.001, "step_seconds": seconds}
    values |= {"tokens_per_second": 3.3e7, "memory_bytes": 60 * GB, "mfu": 0.41, "attempt": 1}
    rest = json.dumps(values, separators=(",", ":"))[1:-1]
    with path.open("w") as file:
        for begin in range(0, steps, every):
            loss = f"{10.4 * (begin + 1) ** -0.08:.6f}"
            time = f'{rest},"time":{BEGAN + seconds * begin}}}\n'
            last = min(steps, begin + every)
            file.writelines(f'{{"step":{step},"loss":{loss},{time}' for step in range(begin + 1, last + 1))
            file.write(f'{{"step":{last},"validation_loss":{loss},"validation_sequences":64,"attempt":1}}\n')


def write_telemetry(run: RunDir, names: Sequence[str], step: int, last: float, rows: int = 4) -> None:
    """Write the series of each node: eight ranks, eight GPUs and the node, ``rows`` seconds up to ``last``."""
    for number, name in enumerate(names):
        writer = SeriesWriter(node_file(run, 1, f"node-{number:04d}-{name}"))
        for second in range(rows):
            at = last - rows + second
            for local in range(8):
                rank = 8 * number + local
                own = {"step_seconds": 0.5, "own_seconds": 0.4}
                own |= {"communication_seconds": 0.1, "data_wait_seconds": 0.001}
                memory = {"memory_bytes": (66 if rank == 5 else 60) * GB, "memory_reserved_bytes": 68 * GB}
                writer.add(f"rank {rank}", at, step, own | memory)
                heat = 86 if rank == 3 else 60
                gpu = {"utilization": 0.97, "sm_clock_hertz": 1.98e9, "temperature_celsius": heat, "power_watts": 650}
                writer.add(f"gpu {local}", at, step, gpu | {"throttled_by_heat": 0.5 if rank == 3 else 0.0})
            writer.add("node", at, step, {"cpu_utilization": 0.1, "memory_available_bytes": 1500 * GB})
        writer.close()
