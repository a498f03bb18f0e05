"""`scaletrain init`: write a complete run spec, copy a recipe, or copy the files for cluster administrators."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaletrain_cli.cli.models import USUAL_GPU, find_model
from scaletrain_cli.cli.options import AsJson, GpusPerNode, complete_gpu, complete_preset, complete_recipe, nodes_option
from scaletrain_cli.errors import ExitCode, InfeasibleError, Problem, UsageError
from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.project_files import FOLDERS, project_file, recipes
from scaletrain_cli.safe_files import create_file
from scaletrain_cli.text import did_you_mean, either, visible
from scaletrain_cli.ui.console import document, say, suggest
from scaletrain_cli.ui.json import print_json

if TYPE_CHECKING:
    from scaletrain_cli.spec.starting_spec import GivenData, GivenModel

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE, ExitCode.INFEASIBLE)
_MOST_NODES = 1024
_USUAL_NAME = Path("run.yaml")


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[hf://ORG/NAME] [FILE]",
            help="Model of the Hugging Face Hub; file to create (default: run.yaml), - writes to stdout.",
        ),
    ] = None,
    given_model: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="DIR|hf://ORG/NAME",
            help="Model to fine-tune: a folder with config.json and *.safetensors, or one of the Hugging Face Hub.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="With --from: files of rows or text, or hf://datasets/ORG/NAME."),
    ] = None,
    lora: Annotated[bool, typer.Option("--lora", help="With --from: train a LoRA adapter.")] = False,
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Model preset, e.g. llama-7b or gpt2.", autocompletion=complete_preset),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Copy a recipe that comes with ScaleTrain.", autocompletion=complete_recipe),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Accelerator, e.g. {USUAL_GPU}, or cpu.", autocompletion=complete_gpu),
    ] = None,
    gpus_per_node: GpusPerNode = None,
    nodes: Annotated[int | None, nodes_option("Number of nodes (default: the fewest that fit).")] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="local, slurm, kubernetes or a plug-in (default: the one found on this machine).",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Same as the argument FILE.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List recipes, presets and accelerators, and exit.")] = False,
    files: Annotated[
        tuple[str, Path] | None,
        typer.Option(metavar="slurm|k8s DIR", help="Copy the files for cluster administrators to a new folder."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a complete, commented run spec that is valid as written; with --preset, once data.source is set.

    Without options: a Llama with 10 million parameters that trains on two CPU processes in minutes.
    With --from DIR or hf://org/name: fine-tuning of that model, by its config.json, on the rows of --data; the
    columns of the first row decide the objective: sft, or dpo for pairs. With --preset: that model from random
    weights, with the learning rate, batch and schedule of its authors, on 20 tokens per parameter. Both are on the
    fewest nodes that fit, for Slurm if sbatch is installed, else for Kubernetes if there is a kubeconfig. A
    fine-tuning that fits is for this machine if there is neither.
    With --scheduler kubernetes: add your queue and image to the spec.
    Never overwrites an existing file.
    """
    from scaletrain_cli.spec.backend_traits import DEFAULT, installed_backends

    models, paths = [n for n in names or () if is_reference(n)], [Path(n) for n in names or () if not is_reference(n)]
    if len(models) > 1 or len(paths) > 1:
        raise UsageError(f"{' '.join(names or ())}: give at most one hf://org/name and one FILE.")
    model, file = next(iter(models), None), next(iter(paths), None)
    if model is not None and given_model is not None:
        raise UsageError(f"{model} and --from {given_model} are both given. Give only one.")
    model = model or given_model
    if model is None and (data is not None or lora):
        raise UsageError(f"{'--lora' if data is None else '--data'} needs a model to fine-tune. Give --from.")
    if listed:
        from scaletrain_cli.plan.catalogue.hardware import accelerator_names
        from scaletrain_cli.spec.presets import presets

        known = {"recipes": [*recipes()], "presets": [*presets()], "accelerators": [*accelerator_names()]}
        if as_json:
            print_json(known)
        for title, names in () if as_json else known.items():
            typer.echo(visible(f"{title}: {', '.join(names)}"))
        return
    if files is not None:
        written = _copy_folder(*files)
        if as_json:
            print_json({"files": [str(path) for path in written]})
        for path in written:
            say(f"wrote {path}")
        return
    if file is not None and output is not None and file != output:
        raise UsageError(f"{file} and --output {output} are both given. Give only one.")
    target = file or output or _USUAL_NAME
    to_stdout = str(target) == "-"
    if recipe is not None:
        if any(other is not None for other in (model, data, preset, gpu, gpus_per_node, nodes, scheduler)):
            raise UsageError("--recipe copies a complete spec. Remove the other options; use --set to change a key.")
        contents = _recipe(recipe, target)
    else:
        tuned = None if model is None else find_model(model, reads_tokenizer=True)
        rows = None if model is None else _rows(data)
        contents = {target: _fitting_spec(preset, tuned, rows, lora, gpu, gpus_per_node, nodes, scheduler)}
    if to_stdout:
        if as_json:
            print_json({"file": None, "text": contents[target]})
        else:
            typer.echo(document(contents[target]), nl=False)
        return
    for path in contents:  # none of them is written where one exists
        if path.is_dir():
            raise UsageError(f"{path} is a folder. Give the path of a file, e.g. {path / _USUAL_NAME}.")
        if path.exists():
            raise UsageError(f"{path} already exists. Give another name: scaletrain init FILE.")
    for path, text in contents.items():
        try:
            create_file(path, text, public=True)  # replaces nothing, not even a file that appeared meanwhile
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror or error}.") from error
    if as_json:
        print_json({"file": str(target), "text": contents[target]})
    for path in contents:
        say(f"wrote {path}")
    for traits in installed_backends():
        if traits.section.starting_note and f"scheduler: {traits.name}" in contents[target]:
            say(traits.section.starting_note)
    if preset is not None:
        say("Set data.source to your corpus; python-stdlib is enough to try the spec.")
    here = f"scheduler: {DEFAULT}" in contents[target]
    has_rows = any(f"objective: {objective}" in contents[target] for objective in ("sft", "dpo"))
    suggest(
        {
            **({"look at its rows": f"scaletrain data show {target}"} if has_rows else {}),
            "plan it": f"scaletrain plan {target}",
            **({"run it here": f"scaletrain train {target}"} if here else {}),
            "submit it": f"scaletrain submit {target}",
        }
    )


def _recipe(name: str, target: Path) -> dict[Path, str]:
    """Return the files of a recipe by the path to write: its spec at ``target``, its programs in the same folder."""
    known = recipes()
    if name not in known:
        hint = f"{did_you_mean(name, known)}Known: {', '.join(known)}."
        raise UsageError(f"no recipe {name}", (Problem("--recipe", "", "unknown recipe.", name, hint),))
    spec = known[name]
    programs = "*.py" if spec.name == "run.yaml" else f"{name.replace('-', '_')}.py"
    beside = sorted(spec.parent.glob(programs))
    texts = {target: spec.read_text(encoding="utf-8")}
    return texts | {target.parent / path.name: path.read_text(encoding="utf-8") for path in beside}


def _copy_folder(name: str, target: Path) -> list[Path]:
    """Copy the project's folder of that name into a new folder, and return what was written. Raises UsageError."""
    if name not in FOLDERS:
        problem = Problem("--files", "", "unknown folder.", name, f"Use {either(list(FOLDERS))}.")
        raise UsageError(f"no files named {name}", (problem,))
    try:
        shutil.copytree(project_file(name), target, ignore=shutil.ignore_patterns("__pycache__"))
    except FileExistsError as error:
        raise UsageError(f"{target} already exists. Give the name of a new folder.") from error
    return sorted(path for path in target.rglob("*") if path.is_file())


def _rows(path: str | None) -> GivenData | None:
    """Return data with the objective that fits its first row; text for other files. Raises UsageError."""
    from scaletrain_cli.data.sources.rows import Tally, rows_in
    from scaletrain_cli.spec.corpus_files import ROW_FORMATS, NoCorpusError, find_files, find_text
    from scaletrain_cli.spec.data import FieldsSpec
    from scaletrain_cli.spec.row_examples import RowError
    from scaletrain_cli.spec.row_formats import format_of
    from scaletrain_cli.spec.starting_spec import GivenData

    if path is None or is_reference(path):
        return None if path is None else GivenData(path, "sft")
    try:
        file = find_files(path, kinds=ROW_FORMATS).files[0]
    except NoCorpusError:
        find_text(path, key="--data")
        return GivenData(path, "causal_lm")
    if (row := next(rows_in(file, Tally()), None)) is None:
        raise UsageError(f"--data {path}: {file} holds no rows.")
    errors = []
    for objective in ("dpo", "sft"):
        try:
            row_format = format_of(row.content, objective, FieldsSpec())
            return GivenData(path, objective if row_format != "text" else "causal_lm")
        except RowError as error:
            errors.append(error)
    raise UsageError(errors[-1].at(row.where))


def _fitting_spec(
    preset: str | None,
    tuned: GivenModel | None,
    data: GivenData | None,
    lora: bool,
    gpu: str | None,
    gpus_per_node: int | None,
    nodes: int | None,
    scheduler: str | None,
) -> str:
    """Return the spec with ``nodes`` nodes, or with the fewest that the planner accepts.

    ``tuned``: a model to fine-tune on ``data``, with ``lora`` by an adapter.
    """
    from scaletrain_cli.launch.backends.registry import all_backends
    from scaletrain_cli.plan import make_plan
    from scaletrain_cli.plan.advice.recipe_checks import starting_preset
    from scaletrain_cli.plan.data_size import data_size
    from scaletrain_cli.spec import parse_spec, set_steps
    from scaletrain_cli.spec.backend_traits import DEFAULT, backend_traits
    from scaletrain_cli.spec.presets import presets
    from scaletrain_cli.spec.starting_spec import starting_spec

    if preset is not None and tuned is not None:
        raise UsageError(f"{tuned.reference} and --preset {preset} are both given. Give only one.")
    if preset is not None and preset not in presets():
        hint = f"{did_you_mean(preset, presets())}Known: {', '.join(presets())}."
        raise UsageError(f"no preset {preset}", (Problem("--preset", "", "unknown preset.", preset, hint),))
    if scheduler is None and preset is None and tuned is None and nodes in (None, 1):
        scheduler = DEFAULT
    if scheduler is None:  # of several nodes, if this machine can submit to one
        several = (backend for backend in all_backends() if backend.traits.max_nodes != 1 and backend.is_available())
        scheduler = next((backend.name for backend in several), None)
    if scheduler is None:
        say("found neither sbatch nor a kubeconfig.")
        if tuned is not None and nodes in (None, 1):
            with contextlib.suppress(InfeasibleError):
                text = _fitting_spec(preset, tuned, data, lora, gpu, gpus_per_node, nodes, DEFAULT)
                say("The spec is for this machine. Use --scheduler slurm or --scheduler kubernetes for a cluster.")
                return text
        scheduler = "slurm"
        say("The spec uses slurm. Use --scheduler local for this machine or --scheduler kubernetes for Kubernetes.")
    traits = backend_traits(scheduler)
    is_small = preset is None and tuned is None and traits.shared_run_directory
    has_gpus = not traits.runs_here or gpus_per_node is not None or any(Path("/dev").glob("nvidia[0-9]*"))
    on_cpus = is_small or (tuned is not None and not has_gpus)
    gpu = gpu or ("cpu" if on_cpus else USUAL_GPU)
    if traits.max_nodes is not None and nodes is not None and nodes > traits.max_nodes:
        raise UsageError(
            f"--nodes {nodes} requires slurm or kubernetes; {scheduler} runs on {traits.display_name} only."
        )
    per_node = gpus_per_node or (2 if gpu == "cpu" else 1 if traits.max_nodes == 1 else 8)
    count = nodes or 1
    given_preset = None if preset is None else starting_preset(preset)
    while True:
        settings: dict[str, Any] = {"gpu": gpu, "scheduler": scheduler, "nodes": count, "gpus_per_node": per_node}
        text = starting_spec(preset=given_preset, model=tuned, data=data, lora=lora, **settings)
        spec = parse_spec(text, file="the starting spec", base_dir=Path())
        if data is not None and not data.samples and (size := data_size(spec)) is not None and size.train:
            data = replace(data, samples=size.train)
            continue
        if data is not None and spec.training.epochs is not None:
            spec = set_steps(spec, data.steps_of(spec.world_size), file="the starting spec")
        try:
            make_plan(spec)
        except InfeasibleError:
            if nodes is None and traits.max_nodes != 1 and count < _MOST_NODES:
                count *= 2
                continue
            raise
        return text
