"""The `scaletrain` command and its table of verbs.

The module of a verb is imported when the verb is called; `--help` reads the table only. Other packages add verbs by
the entry-point group `scaletrain.verbs`: each entry names a module like those in this folder.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from scaletrain_cli.cli.options import describe
from scaletrain_cli.plugins import VERBS, PluginError, plugins
from scaletrain_cli.text import did_you_mean, listed, visible


@dataclass(frozen=True)
class Verb:
    """One line of ``--help``; ``name``, with _ for -, is the module of ``command`` or ``app``."""

    name: str
    summary: str


GROUPS: dict[str, tuple[Verb, ...]] = {
    "Before a run": (
        Verb("init", "Write a complete run spec to start from."),
        Verb("validate", "Validate a run spec and show the resolved settings."),
        Verb("plan", "Estimate layout, memory, step time, network and cost of a run. Starts nothing."),
        Verb("schema", "Print the JSON Schema of the run spec, for editors."),
        Verb("doctor", "Check the environment: packages, hardware, schedulers, disk."),
        Verb("mcp", "Serve verbs to agents over the Model Context Protocol."),
        Verb("cluster", "Set up a cluster that this machine reaches by ssh: install ScaleTrain on its login node."),
        Verb("image", "Write a Containerfile for training pods from a lock file."),
        Verb("preflight", "Measure devices, memory and links of the nodes with a short job."),
        Verb("rehearse", "Try a run for minutes on its nodes: labels, learning rate, speed, checkpoints."),
        Verb("data", "Prepare, show, report on and upload training data."),
    ),
    "Run": (
        Verb("submit", "Plan a run and submit it to its scheduler."),
        Verb("train", "Train in this terminal; Ctrl-C saves a checkpoint and stops."),
        Verb("resume", "Resume a run from its latest valid checkpoint."),
        Verb("recover", "Resume runs whose jobs were lost, where their spec asks for it."),
        Verb("cancel", "Cancel a run or a sweep."),
        Verb("exec", "Run a command on a node of a running run: exec RUN -- COMMAND."),
        Verb("shell", "Open a shell on a node of a running run."),
        Verb("port-forward", "Reach a port of a node of a running run at 127.0.0.1."),
        Verb("rm", "Delete runs that have ended."),
        Verb("drill", "Inject faults into small runs and verify that they recover."),
    ),
    "Follow": (
        Verb("status", "Show the state of a run and how its attempts ended."),
        Verb("watch", "Watch a run: progress, curves, speed beside the plan, memory, nodes, events, findings."),
        Verb("diagnose", "Diagnose how a run trains: loss, learning rate, data, speed, memory, checkpoints."),
        Verb("profile", "Profile a few steps of a living run, and compare their time with the plan."),
        Verb("report", "Write one HTML page about a run, several runs or a sweep."),
        Verb("explain", "Explain why a run is pending or failed, and how to fix it."),
        Verb("list", "List runs."),
        Verb("logs", "Show the output of a run."),
        Verb("events", "Show the events of a run."),
        Verb("notify", "Test the receivers of notifications, and send what is waiting."),
        Verb("nodes", "List or clear excluded nodes."),
        Verb("checkpoint", "List, verify, export, sample, average, mirror and prune checkpoints."),
        Verb("evaluation", "Evaluate checkpoints in jobs of their own."),
    ),
}


BUILT_IN = tuple(verb.name for verbs in GROUPS.values() for verb in verbs)


def module_of(verb: str) -> Any:
    """Return the module of a verb, or None for an unknown verb. Raises PluginError for one that cannot be used."""
    if verb in BUILT_IN:
        return import_module(f"scaletrain_cli.cli.{verb.replace('-', '_')}")
    plugin = plugins(VERBS).get(verb)
    if plugin is None:
        return None
    module = plugin.load(ModuleType)
    if isinstance(getattr(module, "app", None), typer.Typer):
        return module
    if not callable(getattr(module, "command", None)) or not hasattr(module, "EXIT_CODES"):
        raise plugin.invalid("must have a function command and EXIT_CODES, or a typer.Typer called app")
    return module


class Verbs(TyperGroup):
    """A command group that imports the module of a verb when the verb is called."""

    groups = GROUPS

    def list_commands(self, ctx: Any) -> list[str]:
        return [*BUILT_IN, *plugins(VERBS, BUILT_IN)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        module = module_of(cmd_name)
        if module is None:
            return None
        if hasattr(module, "app"):
            return typer.main.get_command(module.app)
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        app.command(cmd_name, epilog=describe(module.EXIT_CODES))(module.command)
        return typer.main.get_command(app)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in BUILT_IN and args[0] not in plugins(VERBS):
            known = self.list_commands(ctx)
            ctx.fail(f"No such command {args[0]!r}. {did_you_mean(args[0], known, 0.6).strip() or 'See --help.'}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(len(name) for name in self.list_commands(ctx))
        for title, verbs in self.groups.items():
            with formatter.section(title):
                formatter.write_dl([(verb.name.ljust(width), verb.summary) for verb in verbs])
        if added := plugins(VERBS, BUILT_IN):
            with formatter.section("Plug-ins"):
                rows = [
                    (name.ljust(width), f"From the package {listed(verb.packages)}.") for name, verb in added.items()
                ]
                formatter.write_dl(rows)


app = typer.Typer(
    cls=Verbs,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Run `scaletrain VERB --help` for details. Typical order: init, plan, submit, status, logs, resume.",
)


def _show_version(requested: bool) -> None:
    if requested:
        from scaletrain_cli import __version__

        typer.echo(visible(f"scaletrain {__version__}"))
        raise typer.Exit


@app.callback()
def scaletrain(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan, submit, preempt and resume large training jobs from one run spec."""


def verb_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return the verb in a command line, with the sub-verb of a group; empty if there is none."""
    named = [word for word in words if not word.startswith("-")]
    if not named:
        return ()
    try:
        module = module_of(named[0])
    except PluginError:
        return ()
    if module is None:
        return ()
    group = getattr(module, "app", None)
    second = {command.name or command.callback.__name__ for command in group.registered_commands} if group else set()
    return (named[0], named[1]) if named[1:] and named[1] in second else (named[0],)


@dataclass(frozen=True)
class CommandLine:
    """A command line as its verb parses it: ``verb`` has one or two words, ``rest`` follows them."""

    verb: tuple[str, ...]
    rest: tuple[str, ...]
    params: Mapping[str, Any]

    @property
    def quoted(self) -> list[str]:
        """All words, quoted for a shell."""
        return [shlex.quote(word) for word in (*self.verb, *self.rest)]

    def with_word(self, given: str, word: str) -> list[str]:
        """Return ``quoted`` with ``word``, which is quoted, in place of ``given``, an argument or that of --spec."""
        joined = [word.rpartition("--spec=") for word in self.rest]  # of `drill`
        place = next(place for place, (*_, word) in enumerate(joined) if word == given or Path(word) == Path(given))
        words = self.quoted
        words[len(self.verb) + place] = joined[place][1] + word
        return words

    def with_option(self, names: Sequence[str], value: str) -> list[str]:
        """Return all words with ``value`` for the option, before the other words: after ``--`` it would be none."""
        return [*self.verb, names[0], value, *self.without_option(names)]

    def without_option(self, names: Sequence[str]) -> list[str]:
        """Return ``rest`` without the option ``names``: its name and its letter, the name first."""
        kept, skip = [], False
        for word in self.rest:
            is_joined = word.startswith(f"{names[0]}=") or any(word.startswith(name) for name in names[1:])
            if not (skip or word in names or is_joined):
                kept.append(word)
            skip = not skip and word in names
        return kept


def parsed(words: Sequence[str]) -> CommandLine:
    """Return the command line as its verb parses it; arguments that are missing or wrong are None."""
    verb = verb_words(words)
    start = max((words.index(word) for word in verb), default=-1) + 1
    command: Any = typer.main.get_command(app)
    for word in verb:
        command = command.get_command(None, word)
    context = command.make_context(verb[-1] if verb else "scaletrain", list(words[start:]), resilient_parsing=True)
    return CommandLine(verb, tuple(words[start:]), context.params)
