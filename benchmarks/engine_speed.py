"""Speed of the engine: its loop beside loops on DeepSpeed and DDP, and the use of a GPU beside the plan.

``make bench-engine`` runs both parts, the second if there is a GPU (``--tiny`` runs a trial on the CPU).
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

from engine_loops.gpu_table import MODELS, cases, gpu_of_this_machine, rows
from engine_loops.start import made_run, on_ranks

from scaletrain_cli import __version__

RECIPE = Path(__file__).parents[1] / "recipes" / "llama-10m-cpu.yaml"
BLOCK = 2  # steps that a loop trains in its turn
# So small that the time is mostly the overhead of the loop on the host.
TINY = (
    *("model.hidden_size=32", "model.num_hidden_layers=2", "model.num_attention_heads=4"),
    *("model.num_key_value_heads=2", "model.intermediate_size=64", "model.seq_len=32"),
    *("training.global_batch_size=4", "training.micro_batch_size=2"),
)
TINY_BLOCK = 40
SMALL = (
    *("model.hidden_size=256", "model.num_hidden_layers=4", "model.num_attention_heads=8"),
    *("model.num_key_value_heads=4", "model.intermediate_size=704"),
)
LOOPS = """\
All loops train the same model code from the same weights on the same batches in the same order, with the same AdamW.

- *DeepSpeed, bare*: `forward`, `backward` and `step` with the engine's configuration and batches in memory; it never
  reads the loss, and neither clips nor follows a schedule.
- *DDP, bare*: the same with torch's DDP, without broadcasts of buffers and without copies out of its buckets; it clips.
- *same work*: batches are read from the files by a thread, the learning rate follows the schedule, the gradient is
  clipped, one that is not finite ends the run, the loss is averaged over the ranks and read, all ranks agree whether to
  stop, and rank 0 logs each step. Loss, norm and rate of the first steps are checked to be those of the engine.
- *engine*: that, heartbeats, telemetry and its checks for spikes and slow ranks; no checkpoint, no evaluation.

ZeRO-1 and 2 share the optimizer's work among the ranks and gather the weights after it, which DDP does not."""
QUIET = ("evaluation.every=1000000", "checkpoint.every=1000000", "checkpoint.keep=1")


def paired(rounds: int, zero_stage: int, overrides: list[str], *, tiny: bool = False) -> Iterator[str]:
    """Return a table with the median step of each loop, and the median and the quartiles over rounds of the engine's
    time over the loop's, by the clock and on the processor.
    """
    block = TINY_BLOCK if tiny else BLOCK
    size = [*SMALL, *(TINY if tiny else ())]
    settings = [*size, *QUIET, f"layout.zero_stage={zero_stage}", f"training.steps={block * rounds + 1}"]
    run, spec = made_run(RECIPE, [*settings, *overrides])
    blocks = on_ranks("engine_loops.paired", run, spec.world_size, str(block))
    model, tokens = spec.transformer, spec.training.global_batch_size * spec.transformer.seq_len
    yield (
        f"{spec.world_size} ranks, ZeRO-{zero_stage}, {spec.training.precision}, {tokens} tokens a step, "
        f"{model.num_hidden_layers} layers of {model.hidden_size}; {rounds - 2} rounds of {block} steps each"
    )
    yield ""
    columns = ("loop", "ms a step", "CPU ms a step", "tokens/s")
    compared = ("engine slower by", "half of the rounds", "by CPU time", "half of the rounds")
    yield f"| {' | '.join((*columns, *compared))} |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    ours = blocks["engine"][1:]
    for name, theirs in blocks.items():
        step, used = (statistics.median(each[clock] for each in theirs[1:]) / block for clock in (0, 1))
        shown = f"| {name} | {step * 1e3:.1f} | {used * 1e3:.2f} | {tokens / step:.0f} |"
        if name == "engine":
            yield f"{shown} | | | |"
            continue
        for clock in (0, 1):
            low, middle, high = (
                quantile - 1 for quantile in statistics.quantiles(ratios(ours, theirs[1:], clock), n=4)
            )
            shown += f" {middle:+.1%} | {low:+.1%} to {high:+.1%} |"
        yield shown


def ratios(ours: list[list[float]], theirs: list[list[float]], clock: int) -> list[float]:
    """Return the ratio of each of the engine's blocks to the mean of the rival's before and after it, which cancels
    drift.
    """
    means = [(before[clock] + after[clock]) / 2 for before, after in itertools.pairwise(theirs)]
    return [mine[clock] / mean for mine, mean in zip(ours, means, strict=False)]


def lines(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Yield the results in Markdown."""
    gpu = options.gpu or gpu_of_this_machine()
    yield "# Speed of the engine"
    yield ""
    versions = f"scaletrain {__version__}, " + ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed"))
    yield f"{time.strftime('%Y-%m-%d')}, {gpu or f'no GPU, {os.cpu_count()} cores'}, Python {platform.python_version()}"
    yield f"({versions}): `benchmarks/engine_speed.py {' '.join(sys.argv[1:])}`"
    if options.part != "gpu":
        yield ""
        yield LOOPS
        for stage in options.zero or (1, 2):
            yield ""
            yield from paired(options.rounds, stage, options.set)
        yield ""
        yield from paired(options.rounds, 1, options.set, tiny=True)
    if options.part == "loops":
        return
    yield ""
    if gpu is None and not options.tiny:
        yield "No GPU here, so nothing is measured on one."
        return
    compiled = {"both": [False, True], "yes": [True], "no": [False]}[options.compile]
    chosen = cases(options.model or list(MODELS), compiled, options.recompute or ["none", "selective", "full"])
    yield from rows(chosen, None if options.tiny else gpu, folder)


def print_page(found: Iterable[str], page: Path | None) -> None:
    """Print each line when it is there; write all of them to ``page``, too, if it is given."""
    kept = []
    for line in found:
        print(line, flush=True)
        kept.append(line)
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text("\n".join(kept) + "\n", encoding="utf-8")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", choices=("all", "loops", "gpu"), default="all", help="which tables")
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep them as a page, too")
    loops = parser.add_argument_group("loops")
    loops.add_argument("--rounds", type=int, default=24, help="turns of each loop")
    loops.add_argument("--zero", type=int, action="append", help="ZeRO stage, again for more (default 1 and 2)")
    loops.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the compared run's spec")
    on_gpu = parser.add_argument_group("GPU")
    on_gpu.add_argument("--gpu", help="its name in the catalogue, if it is not found out")
    on_gpu.add_argument("--model", action="append", choices=list(MODELS), help="again for more (default all)")
    on_gpu.add_argument("--compile", choices=("both", "yes", "no"), default="both")
    on_gpu.add_argument("--recompute", action="append", choices=("none", "selective", "full"), help="again for more")
    on_gpu.add_argument("--tiny", action="store_true", help="small models on the CPU, to try the table out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SCALETRAIN_RUNS"] = str(Path(folder) / "runs")
        print_page(lines(options, Path(folder)), options.write)


if __name__ == "__main__":
    main()
