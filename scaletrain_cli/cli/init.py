"""`scaletrain init`: a complete run spec to start from, right as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from scaletrain_cli.cli.options import AsJson
from scaletrain_cli.errors import ExitCode, InfeasibleError, Problem, UsageError

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE, ExitCode.INFEASIBLE)
_USUAL_GPU = "h100-sxm-80gb"
_MOST_NODES = 1024
Scheduler = Literal["local", "slurm", "kubernetes"]


def command(
    preset: Annotated[
        str | None, typer.Option("--preset", metavar="NAME", help="A known model, such as llama-7b or gpt2.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="NAME", help=f"cpu, or a device such as {_USUAL_GPU}.")
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", metavar="N", min=1, max=1024, help="Devices in each node.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", min=1, max=100_000, help="Nodes; else the fewest that fit.")
    ] = None,
    scheduler: Annotated[
        Scheduler | None, typer.Option("--scheduler", help="Else slurm with a preset or several nodes, or local.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write it; - prints it.")
    ] = Path("run.yaml"),
    as_json: AsJson = False,
) -> None:
    """Write a complete, commented run spec that validates and plans as it stands.

    Without options: a Llama of 10 million parameters that trains on two CPU processes in minutes.
    With --preset: that model on Slurm, on as few nodes as it fits. With --scheduler kubernetes: a spec to which only
    your namespace, queue and image are to be added. An existing file is never overwritten.
    """
    from scaletrain_cli.ui.json import print_json
    from scaletrain_cli.ui.messages import say, suggest

    to_stdout = str(output) == "-"
    if not to_stdout and output.exists():
        raise UsageError(f"{output} exists and is not overwritten. Give another name with --output.")
    text = _fitting_spec(preset, gpu, gpus_per_node, nodes, scheduler)
    if to_stdout:
        if as_json:
            print_json({"file": None, "text": text})
        else:
            typer.echo(text, nl=False)
        return
    try:
        with output.open("x", encoding="utf-8") as file:  # x: not even one that appeared meanwhile
            file.write(text)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}.") from error
    if as_json:
        print_json({"file": str(output), "text": text})
    say(f"wrote {output}")
    if scheduler == "kubernetes":
        say("its namespace, queue and image are yours to put in: the lines below `kubernetes:`")
    suggest({"see what it takes": f"scaletrain plan {output}", "start it": f"scaletrain submit {output}"})


def _fitting_spec(
    preset: str | None, gpu: str | None, gpus_per_node: int | None, nodes: int | None, scheduler: Scheduler | None
) -> str:
    """The spec with the fewest nodes on which it can be planned, unless ``nodes`` says how many."""
    from scaletrain_cli.plan import make_plan
    from scaletrain_cli.spec import parse_spec, presets, starting_spec

    if preset is not None and preset not in presets():
        raise UsageError(
            f"no preset {preset}",
            (Problem("--preset", "", "is not known.", preset, f"Known: {', '.join(presets())}."),),
        )
    gpu = gpu or ("cpu" if preset is None and scheduler != "kubernetes" else _USUAL_GPU)
    scheduler = scheduler or ("local" if preset is None and nodes in (None, 1) else "slurm")
    if scheduler == "local" and nodes not in (None, 1):
        raise UsageError(f"--nodes {nodes} is for slurm and kubernetes: local is this machine alone.")
    per_node = gpus_per_node or (2 if gpu == "cpu" else 1 if scheduler == "local" else 8)
    count = nodes or 1
    while True:
        text = starting_spec(preset=preset, gpu=gpu, scheduler=scheduler, nodes=count, gpus_per_node=per_node)
        try:
            make_plan(parse_spec(text, file="the starting spec", base_dir=Path()))
        except InfeasibleError:
            if nodes is None and scheduler != "local" and count < _MOST_NODES:
                count *= 2
                continue
            raise
        return text
