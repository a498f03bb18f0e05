"""`scaletrain data prepare`: tokens from text, before a run needs them."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import typer

from scaletrain_cli.cli.exit_codes import describe
from scaletrain_cli.cli.options import AsJson, Overrides, SpecPath
from scaletrain_cli.errors import ExitCode, ScaletrainError

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Prepare data.",
)
EXIT_CODES = (ExitCode.DONE, ExitCode.CRASHED, ExitCode.USAGE)


class PreparationError(ScaletrainError):
    """The preparing process failed; it has said why on stderr."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the data could not be prepared (exit code {code}); the reason stands above.")
        known = code in {member.value for member in ExitCode} and code != ExitCode.DONE
        self.exit_code = ExitCode(code) if known else ExitCode.CRASHED


@app.callback()
def group() -> None:
    """Prepare data."""


@app.command(epilog=describe(EXIT_CODES))
def prepare(spec: SpecPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Tokenize the data that a spec names, so that its runs start at once.

    A run does this by itself when it has to; what is prepared already is not prepared again.
    """
    from scaletrain_cli.own_processes import SAFE_CHILDREN, absolute_paths, python_command
    from scaletrain_cli.rundir.paths import runs_root
    from scaletrain_cli.spec import load_spec
    from scaletrain_cli.ui.messages import say
    from scaletrain_cli.ui.units import whole_text

    run = load_spec(spec, overrides or ())
    with tempfile.TemporaryDirectory(prefix="scaletrain-") as folder:
        resolved = Path(folder) / "spec.json"
        resolved.write_text(json.dumps(run.model_dump(mode="json", by_alias=True)), encoding="utf-8")
        # A process of its own: the tokenizer and numpy stay out of the command line. Its talk is our talk.
        command = python_command("scaletrain_cli.engine.prepare", str(resolved), str(runs_root()))
        environment = absolute_paths(os.environ) | SAFE_CHILDREN
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise PreparationError(done.returncode)
    told = json.loads(lines[-1])
    if as_json:
        from scaletrain_cli.ui.json import print_json

        print_json(told)
        return
    say(
        f"{whole_text(told['train_tokens'])} tokens to train on, {whole_text(told['validation_tokens'])} to validate, "
        f"a vocabulary of {whole_text(told['vocab_size'])}"
    )
    typer.echo(told["path"])
