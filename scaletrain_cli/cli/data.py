"""`scaletrain data`: tokenize the data of a spec ahead of its runs, and show rows as a model is trained on them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scaletrain_cli.cli.options import AsJson, Overrides, SpecPath, describe, verb_group
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.reasons import Reason
from scaletrain_cli.text import visible

if TYPE_CHECKING:
    from scaletrain_cli.spec import DataSpec

app = verb_group("Prepare and show training data.")
EXIT_CODES = (ExitCode.DONE, ExitCode.CRASHED, ExitCode.USAGE)
_NEEDS = ("numpy", "tokenizers")


@app.command(epilog=describe(EXIT_CODES))
def prepare(
    spec: SpecPath,
    overrides: Overrides = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", min=1, help="Number of processes for text (default: the CPU cores)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prepare the data of a spec ahead of its runs: the steps of data.prepare, then tokenization.

    A preparation that was stopped continues where it was. Prepared data are reused.
    """
    from scaletrain_cli.cli.options import show_fetch
    from scaletrain_cli.launch.engine_process import run_engine_command
    from scaletrain_cli.launch.hub_files import fetched_spec
    from scaletrain_cli.rundir.paths import runs_root
    from scaletrain_cli.safe_files import create_file
    from scaletrain_cli.spec import load_spec
    from scaletrain_cli.text import whole_text
    from scaletrain_cli.ui.console import say

    run = fetched_spec(load_spec(spec, overrides or ()), "data", show_fetch())
    with tempfile.TemporaryDirectory(prefix="scaletrain-") as folder:
        resolved = Path(folder) / "spec.json"
        create_file(resolved, json.dumps(run.model_dump(mode="json", by_alias=True)))
        # A separate process keeps the tokenizer and numpy out of the command line; its stderr is passed on.
        prepared = run_engine_command("prepare", str(resolved), str(runs_root()), str(workers or 0), needs=_NEEDS)
    if as_json:
        from scaletrain_cli.ui.json import print_json

        print_json(prepared)
        return
    say(
        f"{whole_text(prepared['train_tokens'])} training tokens, "
        f"{whole_text(prepared['validation_tokens'])} validation tokens, "
        f"vocabulary of {whole_text(prepared['vocab_size'])}"
    )
    for path in [each["path"] for each in prepared.get("sources", ())] or [prepared["path"]]:
        typer.echo(visible(path))


@app.command(epilog=describe(EXIT_CODES))
def show(
    spec: SpecPath,
    overrides: Overrides = None,
    row: Annotated[int, typer.Option("--row", metavar="N", min=1, help="First row to show, counted from 1.")] = 1,
    count: Annotated[int, typer.Option("--count", metavar="N", min=1, help="Number of rows to show.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Show rows for fine-tuning as they are trained on: rendered, truncated, and with the part in the loss marked.

    Reads only the first rows, and prepares nothing. Requires training.objective: sft or dpo.
    """
    from scaletrain_cli.cli.options import show_fetch
    from scaletrain_cli.errors import UsageError
    from scaletrain_cli.launch.engine_process import run_engine_command
    from scaletrain_cli.launch.hub_files import fetched_spec
    from scaletrain_cli.rundir.paths import runs_root
    from scaletrain_cli.safe_files import create_file
    from scaletrain_cli.spec import load_spec
    from scaletrain_cli.ui.data_rows import show_rows
    from scaletrain_cli.ui.json import print_json

    run = load_spec(spec, overrides or ())
    if run.training.objective == "causal_lm":
        raise UsageError(Reason("data.nothing-to-show"))
    run = fetched_spec(run, "data", show_fetch())
    with tempfile.TemporaryDirectory(prefix="scaletrain-") as folder:
        resolved = Path(folder) / "spec.json"
        create_file(resolved, json.dumps(run.model_dump(mode="json", by_alias=True)))
        words = ("show", str(resolved), str(runs_root()), str(row), str(count))
        answer = run_engine_command(*words, needs=(*_NEEDS, "jinja2"))
    if as_json:
        print_json(answer)
    else:
        show_rows(answer)


@app.command(epilog=describe(EXIT_CODES))
def upload(
    spec: SpecPath,
    destination: Annotated[
        str,
        typer.Argument(metavar="URL", help="Folder of an object store: s3://, gs:// or az://.", show_default=False),
    ],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Copy the prepared data of a spec to an object store, and print the lines of a spec that reads them there.

    Each node reads them through a cache (data.cache). Credentials come from the environment. An upload that was stopped
    continues where it was.
    """
    from scaletrain_cli.cli.options import show_fetch
    from scaletrain_cli.launch.engine_process import run_engine_command
    from scaletrain_cli.launch.hub_files import fetched_spec
    from scaletrain_cli.rundir.paths import runs_root
    from scaletrain_cli.safe_files import create_file
    from scaletrain_cli.spec import load_spec
    from scaletrain_cli.ui.json import print_json

    run = fetched_spec(load_spec(spec, overrides or ()), "data", show_fetch())
    with tempfile.TemporaryDirectory(prefix="scaletrain-") as folder:
        resolved = Path(folder) / "spec.json"
        create_file(resolved, json.dumps(run.model_dump(mode="json", by_alias=True)))
        uploaded = run_engine_command("upload", str(resolved), str(runs_root()), destination, needs=_NEEDS)
    if as_json:
        print_json(uploaded)
    else:
        paths = {each["name"]: each["path"] for each in uploaded["sources"]}
        for line in _lines_with_paths(run.data, paths):
            typer.echo(visible(line))


def _lines_with_paths(data: DataSpec, paths: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a spec with the sources of ``data`` at other paths, by their names."""
    yield "data:"
    if data.source is not None:
        yield f"  source: {paths[data.all_sources[0].name]}"
        return
    yield "  sources:"
    for source in data.sources:
        share = {"weight": source.weight, "epochs": source.epochs}
        fields = {"name": source.name, "path": paths[source.name], **share}
        written = ", ".join(f"{name}: {json.dumps(value)}" for name, value in fields.items() if value is not None)
        yield f"    - {{{written}}}"
