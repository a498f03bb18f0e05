"""`scaletrain checkpoint`: list, verify, export, sample, average, mirror and prune the checkpoints of a run."""

from __future__ import annotations

import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from scaletrain_cli.cli.options import AsJson, RunName, RunOrNewest, TrustOwner, Yes, confirm, describe, verb_group
from scaletrain_cli.errors import ExitCode, ScaletrainError, UsageError
from scaletrain_cli.hub.reference import is_reference, parse_reference
from scaletrain_cli.launch import engine_process
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import RunDir, find_run_or_newest
from scaletrain_cli.safe_files import create_file, expand_home
from scaletrain_cli.text import bytes_text, counted, visible, whole_text
from scaletrain_cli.ui.console import document, say, suggest
from scaletrain_cli.ui.json import print_json

if TYPE_CHECKING:
    from scaletrain_cli.rundir.checkpoints import Checkpoint, Entry
    from scaletrain_cli.rundir.record import RunRecord

app = verb_group("List, verify, export, sample, average, mirror and prune checkpoints.")
READING = (ExitCode.DONE, ExitCode.USAGE)
VERIFYING = (ExitCode.DONE, ExitCode.CRASHED, ExitCode.USAGE)
_NEEDS = ("torch", "safetensors")
Output = Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to create; must not exist.")]
_Dtype = Literal["bf16", "fp16", "fp32"]
Dtype = Annotated[_Dtype, typer.Option("--dtype", help="Data type of the exported weights.")]
PRUNING = (ExitCode.DONE, ExitCode.CRASHED, ExitCode.USAGE, ExitCode.SCHEDULER)


@app.command("list", epilog=describe(READING))
def list_them(run: RunOrNewest = None, as_json: AsJson = False) -> None:
    """List a run's checkpoints, including invalid ones. Checks names and sizes; `verify` reads the files."""
    from scaletrain_cli.rundir.checkpoints import take_inventory
    from scaletrain_cli.rundir.mirror_state import read_mirror_state
    from scaletrain_cli.ui.checkpoints import entry_json, show_entries

    run_dir, record, folder, is_seen = _read(run)
    if not is_seen:
        if as_json:
            print_json({"folder": str(folder), "checkpoints": None, "only_in_mirror": None})
        say(f"checkpoints of {run_dir.run_id}: {Reason('launch.view-not-seen')}")
        return
    entries, state = take_inventory(folder), read_mirror_state(run_dir)
    mirrored = None if record.spec.checkpoint.mirror.to is None else [] if state is None else state.steps
    only_there = sorted(set(mirrored or ()) - {entry.step for entry in entries if entry.checkpoint})
    if as_json:
        answer = {"folder": str(folder), "checkpoints": [entry_json(entry, mirrored) for entry in entries]}
        print_json(answer | {"only_in_mirror": None if mirrored is None else only_there})
        return
    if entries:
        show_entries(entries, mirrored)
    else:
        say(f"no checkpoints in {folder}")
    if only_there:
        say(f"only in the mirror: {', '.join(map(str, only_there))}")


@app.command(epilog=describe(VERIFYING))
def mirror(run: RunName, trust_owner: TrustOwner = False, as_json: AsJson = False) -> None:
    """Copy the newest checkpoint and the history to the mirror of the run now, and wait for it.

    For a run that has ended before its last checkpoint was copied: while a run trains, it does this itself.
    """
    from scaletrain_cli.launch.mirroring import mirror_now
    from scaletrain_cli.rundir.record import require_changeable

    run_dir, record, _ = _own_run(run, trust_owner, "mirror")
    require_changeable(run_dir, f"{run_dir.run_id} cannot be mirrored")
    state = mirror_now(run_dir, record)
    if as_json:
        print_json(state.to_json())
        return
    say(f"step {state.step} of {run_dir.run_id} is in {state.to}")


@app.command(epilog=describe(VERIFYING))
def verify(
    run: RunName,
    step: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Verify only the checkpoint of this step.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read a run's checkpoints and compare the hash of every file. Prints one line per problem, with the file name."""
    from scaletrain_cli.rundir.checkpoints import take_inventory, verify_files
    from scaletrain_cli.ui.live import BytesLine

    _, record, folder = _own_run(run, True, "verify")  # reads only
    entries = take_inventory(folder)
    # Incomplete checkpoints and those moved aside are never resumed from.
    chosen = [entry for entry in entries if entry.path.name.startswith("step-") and entry.path.parent == folder]
    if step is not None:
        chosen = [entry for entry in chosen if entry.step == step]
        if not chosen:
            known = ", ".join(str(entry.step) for entry in entries) or "none"
            raise UsageError(f"--step {step}: no such checkpoint in {folder}. Available steps: {known}.")
    total_bytes = sum(entry.checkpoint.size_bytes for entry in chosen if entry.checkpoint)
    problems: dict[str, list[str]] = {}
    with BytesLine(total_bytes) as line:
        for entry in chosen:
            line.begin(entry.path.name)
            checkpoint = entry.checkpoint
            problems[entry.path.name] = verify_files(checkpoint, line.advance) if checkpoint else [entry.problem]
    _add_base_problems(record, chosen, problems)
    if as_json:
        print_json({"folder": str(folder), "problems": problems, "sound": not any(problems.values())})
    for name, of_checkpoint in problems.items():
        for problem in () if as_json else of_checkpoint:
            typer.echo(visible(f"{name}/{problem}"))
    bad = sum(bool(of_checkpoint) for of_checkpoint in problems.values())
    say(f"{len(problems) - bad} of {len(problems)} checkpoints are valid")
    raise typer.Exit(ExitCode.CRASHED if bad else ExitCode.DONE)


@app.command(epilog=describe(VERIFYING))
def export(
    run: RunName,
    output: Output,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Step to export (default: the latest valid checkpoint)."),
    ] = None,
    dtype: Annotated[
        _Dtype | None, typer.Option(help="Data type of the exported weights (default: bf16; peft: fp32).")
    ] = None,
    averaged: Annotated[
        bool, typer.Option("--averaged", help="Export the averaged weights (training.averaging).")
    ] = False,
    adapter_format: Annotated[
        Literal["merged", "peft"],
        typer.Option("--format", help="merged: a whole model, with its adapter; peft: the adapter alone, for PEFT."),
    ] = "merged",
    trust_owner: TrustOwner = False,
    as_json: AsJson = False,
) -> None:
    """Export a checkpoint in Hugging Face format: safetensors, config.json, the tokenizer and its special tokens.

    The checkpoint is verified first and may have any parallel layout. Prints the folder to stdout.
    """
    if adapter_format == "peft" and dtype not in (None, "fp32"):
        raise UsageError(f"--dtype {dtype}: an adapter is exported in fp32, as it was trained. Remove --dtype.")
    exported_dtype = dtype or ("fp32" if adapter_format == "peft" else "bf16")
    run_dir, record, folder = _own_run(run, trust_owner, "export")
    checkpoint = _valid_checkpoint(run_dir.run_id, folder, step)
    options = ["--format", adapter_format, *(["--averaged"] if averaged else [])]
    exported = _export(run_dir, record, [checkpoint], output, exported_dtype, *options)
    exported |= {"step": checkpoint.step, "dtype": exported_dtype}
    _report_export(exported, f"step {checkpoint.step}", output, as_json)


@app.command(epilog=describe(VERIFYING))
def average(
    run: RunName,
    output: Output,
    last: Annotated[int, typer.Option(metavar="N", min=2, help="Number of latest valid checkpoints to average.")] = 5,
    steps: Annotated[
        list[int] | None,
        typer.Option("--step", metavar="N", min=0, help="Step to average, instead of the latest ones; repeatable."),
    ] = None,
    dtype: Dtype = "bf16",
    trust_owner: TrustOwner = False,
    as_json: AsJson = False,
) -> None:
    """Export the mean weights of several checkpoints in Hugging Face format (arXiv:1803.05407).

    Each checkpoint is verified first; a damaged one is an error with --step, and is passed over without it. The mean is
    computed in fp32 and rounded once. The run and its checkpoints are not changed. Prints the folder to stdout.
    """
    run_dir, record, folder = _own_run(run, trust_owner, "average")
    if steps is not None and len(set(steps)) < 2:
        raise UsageError("--step: a mean needs at least two different steps. Give --step again.")
    chosen = (
        _latest_valid_checkpoints(run_dir.run_id, folder, last)
        if steps is None
        else [_valid_checkpoint(run_dir.run_id, folder, step) for step in sorted(set(steps))]
    )
    exported = _export(run_dir, record, chosen, output, dtype)
    exported |= {"steps": [checkpoint.step for checkpoint in chosen], "dtype": dtype}
    _report_export(exported, f"the mean of steps {', '.join(map(str, exported['steps']))}", output, as_json)


@app.command(epilog=describe(VERIFYING))
def sample(
    run: RunName,
    prompts: Annotated[
        list[str],
        typer.Argument(metavar="PROMPT...", help="Messages of a user, or with --raw the beginnings of texts."),
    ],
    step: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Step to sample (default: the latest valid checkpoint)."),
    ] = None,
    averaged: Annotated[
        bool, typer.Option("--averaged", help="Sample the averaged weights (training.averaging).")
    ] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompts without a chat template; always so with causal_lm.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of tokens of an answer.")] = 256,
    temperature: Annotated[
        float, typer.Option(metavar="T", min=0.0, help="Sampling temperature; 0: likeliest tokens.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the sampling.")] = 0,
    trust_owner: TrustOwner = False,
    as_json: AsJson = False,
) -> None:
    """Print what a checkpoint answers to prompts, as transformers generates it on this machine.

    The checkpoint is verified and exported to a temporary folder (below TMPDIR), and loaded from there on one GPU, or
    on the CPU. Prompts are written as in training, with data.chat_template_date and data.chat_template_kwargs. Prints
    the answers to stdout.
    """
    from scaletrain_cli.spec import ModelSpec

    run_dir, record, checkpoints = _own_run(run, trust_owner, "sample")
    spec = record.spec
    if not isinstance(spec.model, ModelSpec):
        raise UsageError(
            f"{run_dir.run_id} has model.family = {spec.model.family}. Only language models can be sampled."
        )
    raw = raw or spec.training.objective == "causal_lm"
    if raw and system is not None:
        raise UsageError("--system: a text that is continued has no system message. Put it into the prompt.")
    engine_process.require_installed(needs := (*_NEEDS, "transformers"))  # before an export that may take minutes
    checkpoint = _valid_checkpoint(run_dir.run_id, checkpoints, step)
    dtype = "fp32" if spec.training.precision in ("fp32", "tf32") else "bf16"
    with tempfile.TemporaryDirectory(prefix="scaletrain-") as folder:
        output, request = Path(folder) / "model", Path(folder) / "request.json"
        exported = _export(run_dir, record, [checkpoint], output, dtype, *(["--averaged"] if averaged else []))
        if exported["tokenizer"] is None:
            raise UsageError(Reason("engine.sample-without-tokenizer"))
        prompt = {"prompts": prompts, "system": system, "raw": raw, "variables": spec.data.chat_template_kwargs}
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        create_file(request, json.dumps({**prompt, "date": spec.data.chat_template_date, **sampling}))
        sampled = engine_process.run_engine_command("sample", str(output), str(request), needs=needs)
    sampled |= {"step": checkpoint.step, "dtype": dtype}
    if as_json:
        print_json(sampled)
        return
    for number, answer in enumerate(sampled["answers"]):
        if len(prompts) > 1:
            say(f"{'' if number == 0 else chr(10)}{answer['prompt']}")
        typer.echo(document(answer["text"]))
        if not answer["stopped"]:
            say(f"not ended after {answer['tokens']} tokens: see --max-tokens")


def _read(run: str | None) -> tuple[RunDir, RunRecord, Path, bool]:
    """Return a run, its record, the folder of its checkpoints, and whether this machine sees that folder."""
    from scaletrain_cli.rundir.record import checkpoint_folder, is_elsewhere, read_record

    run_dir = find_run_or_newest(run)
    record = read_record(run_dir)
    folder = checkpoint_folder(run_dir, record.spec)
    return run_dir, record, folder, folder.is_dir() or not is_elsewhere(run_dir, record)


def _own_run(run: str, trust_owner: bool, action: str) -> tuple[RunDir, RunRecord, Path]:
    """Return a run, its record and the folder of its checkpoints. Raises UsageError if this machine does not see it."""
    from scaletrain_cli.rundir.record import require_own_run

    run_dir, record, folder, is_seen = _read(run)
    if not is_seen:
        raise UsageError(Reason("runs.checkpoints-unseen", {"run": run, "folder": str(folder)}))
    require_own_run(run_dir, trust_owner=trust_owner, remedy=f"Ask that user to {action} it")
    return run_dir, record, folder


def _export(
    run: RunDir, record: RunRecord, chosen: list[Checkpoint], output: Path, dtype: str, *options: str
) -> dict[str, Any]:
    """Export in a separate process, which keeps torch out of the command line; its stderr is passed on."""
    from scaletrain_cli.cli.options import show_fetch
    from scaletrain_cli.hub.cache import HubSettings
    from scaletrain_cli.launch.hub_fetch import environment_here, fetched_spec
    from scaletrain_cli.rundir.checkpoints import read_base
    from scaletrain_cli.spec.hub_files import with_local_files

    # Files of the hub that are still in the cache; without them, files are written that the tokenizer gives.
    settings = HubSettings.from_environment(environment_here(record.spec, os.environ))
    spec = record.spec
    # Checkpoints lack the weights that never train.
    if record.hub and any(read_base(checkpoint) is not None for checkpoint in chosen):
        spec = fetched_spec(spec, "model.weights", show_fetch(), record.hub)
    more = ["--run", str(run.path), "--dtype", dtype, *options, *_base_on_hub(record)]
    with engine_process.spec_file(with_local_files(spec, record.hub, settings)) as resolved:
        places = [resolved, output.absolute(), run.path.parent, *(checkpoint.path for checkpoint in chosen)]
        # Relative paths in the spec refer to the folder that the run was submitted from.
        start = record.working_folder if Path(record.working_folder).is_dir() else None
        return engine_process.run_engine_command("export", *map(str, places), *more, needs=_NEEDS, cwd=start)


def _base_on_hub(record: RunRecord) -> list[str]:
    """Return the option with the name and the commit of weights of the hub, for the configuration of an adapter."""
    weights = getattr(record.spec.model, "weights", None)
    if weights is None or not is_reference(weights):
        return []
    reference = parse_reference(weights)
    return ["--base", reference.repo, record.hub.get(weights, reference.revision)]


def _report_export(exported: dict[str, Any], source: str, output: Path, as_json: bool) -> None:
    if as_json:
        print_json(exported)
        return
    size = f"{whole_text(exported['parameters'])} parameters, {bytes_text(exported['bytes'])} in {exported['dtype']}"
    say(f"{source} as {exported['model_type']}: {size}")
    if exported["tokenizer"] is None:
        say("exported without a tokenizer: this machine has neither the prepared data nor the spec's tokenizer")
    typer.echo(visible(str(output)))
    if (output / "adapter_config.json").is_file():
        load = f'peft.PeftModel.from_pretrained(base, "{output}")'
        suggest({"in transformers": load, "serve it": f"vllm serve BASE --enable-lora --lora-modules run={output}"})
    elif exported["tokenizer"] is not None and not (output / "preprocessor_config.json").exists():
        load = f'transformers.AutoModelForCausalLM.from_pretrained("{output}", dtype="auto")'
        suggest({"in transformers": load, "serve it": f"vllm serve {output}"})


@app.command(epilog=describe(PRUNING))
def prune(
    run: RunName,
    keep: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Number of recent checkpoints to keep (default: checkpoint.keep)."),
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(
            metavar="M",
            min=1,
            help="Also keep steps that are multiples of M (default: checkpoint.keep_every).",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be deleted without deleting anything.")
    ] = False,
    trust_owner: TrustOwner = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete old checkpoints of a run that has ended.

    Never deletes the latest valid checkpoint or the latest one marked clean. Rejected while the run is active.
    """
    from scaletrain_cli.launch.remove import pruning
    from scaletrain_cli.rundir.record import require_changeable
    from scaletrain_cli.worker.checkpoint_commit import delete_checkpoint

    chosen, _, _ = _own_run(run, trust_owner, "prune")
    if not dry_run:
        require_changeable(chosen, f"checkpoints of {chosen.run_id} cannot be deleted")
    with pruning(chosen, keep, keep_every, dry_run=dry_run) as pruned:
        freed = sum(checkpoint.size_bytes for checkpoint in pruned.to_delete)
        names = [checkpoint.path.name for checkpoint in pruned.to_delete]
        if names and not dry_run:
            confirm(f"Delete {counted(len(names), 'checkpoint')}, {bytes_text(freed)} ({', '.join(names)})?", yes)
            for checkpoint in pruned.to_delete:
                delete_checkpoint(checkpoint.path)
    if as_json:
        print_json({"deleted": names, "bytes": freed, "dry_run": dry_run, "newest_sound_step": pruned.newest.step})
        return
    for name in names:
        typer.echo(visible(name))
    verb = "would be deleted" if dry_run else "deleted"
    say(f"{counted(len(names), 'checkpoint')} {verb}, {bytes_text(freed)}; step {pruned.newest.step} is valid")


def _add_base_problems(record: RunRecord, entries: list[Entry], problems: dict[str, list[str]]) -> None:
    """Add a problem to each checkpoint whose frozen weights are missing from ``model.weights``, or are other ones."""
    from scaletrain_cli.rundir.checkpoints import check_same_base, digests_of, read_base, weight_files
    from scaletrain_cli.spec import ModelSpec

    model = record.spec.model
    weights = model.weights if isinstance(model, ModelSpec) else None
    if weights is None:
        return
    valid = [entry.checkpoint for entry in entries if entry.checkpoint and not problems[entry.path.name]]
    saved = {checkpoint.path.name: base for checkpoint in valid if (base := read_base(checkpoint)) is not None}
    if not saved:
        return
    folder = _cached_base(record) if is_reference(weights) else expand_home(weights)
    if folder is None:
        say(f"{weights} is not in the hub cache of this machine: not compared with the weights of the run")
        return
    folder = Path(record.working_folder, folder)
    digests = cache(lambda: digests_of(folder, weight_files(folder)))
    for name, base in saved.items():
        try:
            check_same_base(name, base, folder, digests())
        except UsageError as error:
            problems[name].append(str(error))


def _cached_base(record: RunRecord) -> Path | None:
    """Return the folder with the weights of the run's commit; None if the cache lacks some. Sends no request."""
    from scaletrain_cli.hub.cache import HubSettings
    from scaletrain_cli.launch.hub_fetch import environment_here
    from scaletrain_cli.rundir.checkpoints import weight_files
    from scaletrain_cli.spec.hub_files import with_local_files

    settings = HubSettings.from_environment(environment_here(record.spec, os.environ))
    local = with_local_files(record.spec, record.hub, settings).transformer.weights
    if local is None or is_reference(local):
        return None
    try:
        complete = all((Path(local) / name).is_file() for name in weight_files(Path(local)))
    except UsageError:
        return None
    return Path(local) if complete else None


def _valid_checkpoint(run_id: str, folder: Path, step: int | None) -> Checkpoint:
    """Return the checkpoint of a step, or the latest valid one. Raises ScaletrainError if it is damaged or missing."""
    from scaletrain_cli.rundir.checkpoints import latest_valid, list_checkpoints, verify_files

    if step is None:
        newest, passed_over = latest_valid(folder)
        if newest is None:
            raise ScaletrainError(f"{run_id} has no valid checkpoint. {'; '.join(passed_over)}".rstrip())
        return newest
    committed = {checkpoint.step: checkpoint for checkpoint in list_checkpoints(folder)}
    if step not in committed:
        known = ", ".join(map(str, committed)) or "none"
        raise UsageError(f"--step {step}: no such checkpoint in {folder}. Available steps: {known}.")
    if problems := verify_files(committed[step]):
        raise ScaletrainError(f"{committed[step].path.name} is damaged: {'; '.join(problems)}")
    return committed[step]


def _latest_valid_checkpoints(run_id: str, folder: Path, count: int) -> list[Checkpoint]:
    """Return the ``count`` latest valid checkpoints, oldest first. Raises ScaletrainError if there are fewer."""
    from scaletrain_cli.rundir.checkpoints import list_checkpoints, verify_files

    valid: list[Checkpoint] = []
    for checkpoint in reversed(list_checkpoints(folder)):
        if len(valid) < count and not verify_files(checkpoint):
            valid.append(checkpoint)
    if len(valid) < count:
        steps = ", ".join(str(checkpoint.step) for checkpoint in reversed(valid)) or "none"
        raise UsageError(
            f"--last {count}: {run_id} has {len(valid)} valid checkpoints (steps: {steps}). "
            "Use a smaller number; checkpoint.keep sets how many a run keeps."
        )
    return valid[::-1]
