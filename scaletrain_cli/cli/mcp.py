"""`scaletrain mcp`: verbs as tools of the Model Context Protocol, served on stdin and stdout.

A tool is a function below: its signature is the schema that clients see, its docstring the description. It runs its
verb with ``--json`` in a process of its own. So the answer is the document of docs/json.md, also for a run on a login
node or on a volume of pods, calls do not disturb each other, and a call that the client cancels ends its verb.
"""

import inspect
import json
import signal
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from scaletrain_cli import __version__
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.own_processes import python_command

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE)

_INSTRUCTIONS = """\
Plan, submit and follow large training runs. Paths of specs are best absolute. Usual order: validate, plan, submit with
dry_run, submit, status; explain when a run waits or has ended, diagnose when it trains badly, resume when it can go on.
A run that is queued, preempted or running goes on by itself: do not submit or resume it, unless a finding of explain
has needs_action. Give submit a run_id: the same id is submitted once, also if the first answer was lost."""

Spec = Annotated[str, Field(description="Path of the run spec (YAML).")]
Overrides = Annotated[
    Sequence[str], Field(description="Keys of the spec with other values, each as KEY=VALUE: training.steps=100.")
]
Cluster = Annotated[str | None, Field(description="Cluster of clusters.yaml in place of the one in the spec.")]
Run = Annotated[str, Field(description="Run id, its unique beginning, or the run directory.")]
DryRun = Annotated[bool, Field(description="Return the job that would be sent; create and change nothing.")]


async def plan(
    spec: Spec,
    overrides: Overrides = (),
    cluster: Cluster = None,
    objective: Annotated[
        Literal["time", "cost", "gpus"] | None, Field(description="Choose the number of GPUs by this.")
    ] = None,
    deadline: Annotated[str | None, Field(description="Longest training time, such as 30d.")] = None,
    budget: Annotated[str | None, Field(description="Highest cost in US dollars, such as 50k.")] = None,
) -> Any:
    """Estimate layout, memory, step time and cost of a run, or of a model of the hub in place of a spec: hf://org/name.
    Starts nothing. A run that does not fit is an error with exit code 3; the document has the reason and the smallest
    layout.
    """
    options = {"set": overrides, "cluster": cluster, "objective": objective, "deadline": deadline, "budget": budget}
    return await _answer("plan", spec, options)


async def validate(spec: Spec, overrides: Overrides = (), cluster: Cluster = None) -> Any:
    """Check a run spec and what it names: data, weights, tokenizer. Returns every problem with its line, or the spec
    with all defaults.
    """
    return await _answer("validate", spec, {"set": overrides, "cluster": cluster})


async def submit(
    spec: Spec,
    overrides: Overrides = (),
    cluster: Cluster = None,
    run_id: Annotated[str | None, Field(description="Id of the run; the same id is submitted once.")] = None,
    dry_run: DryRun = False,
) -> Any:
    """Plan and check a run and submit it to its scheduler, which starts it. Costs GPU time."""
    options = {"set": overrides, "cluster": cluster, "run-id": run_id, "dry-run": dry_run, "yes": True}
    return await _answer("submit", spec, options)


async def resume(run: Run, overrides: Overrides = (), dry_run: DryRun = False) -> Any:
    """Submit a run that has ended again, from its latest valid checkpoint. Overrides may change its size and layout
    (cluster.nodes=2) and its length, not what was trained. Costs GPU time.
    """
    return await _answer("resume", run, {"set": overrides, "dry-run": dry_run, "yes": True})


async def cancel(run: Run) -> Any:
    """Let a run, or each run of a sweep, save a checkpoint and stop; resume continues it. Does not wait for the end."""
    return await _answer("cancel", run, {"yes": True})


async def status(
    run: Run, wait: Annotated[str | None, Field(description="Wait for the end, at most this long, as 50s.")] = None
) -> Any:
    """Show the state of a run or a sweep: step, loss, speed beside the plan, cost, checkpoints, attempts, findings.
    With wait, a run that did not finish is an error with the exit code of the run, or 124 if it goes on.
    """
    return await _answer("status", run, {"wait": wait})


async def explain(run: Run) -> Any:
    """Explain why a run waits or why its last attempt ended, with evidence and actions. A run that is not over needs no
    action, unless the finding has needs_action.
    """
    return await _answer("explain", run, {})


async def diagnose(run: Run) -> Any:
    """Diagnose how a run trains: loss, learning rate, gradients, data, speed, memory, checkpoints. Each finding has
    evidence, likely causes, and the key of the spec to change.
    """
    return await _answer("diagnose", run, {})


async def logs(
    run: Run,
    attempt: Annotated[int | None, Field(description="Number of the attempt; default: the last one.")] = None,
    rank: Annotated[int | None, Field(description="Rank; default: all of them.")] = None,
    last_lines: Annotated[int, Field(ge=0, description="Number of last lines of each rank.")] = 50,
) -> Any:
    """Show what the ranks of a run printed."""
    return await _answer("logs", run, {"attempt": attempt, "rank": rank, "tail": last_lines})


async def list_runs(
    state: Annotated[str | None, Field(description="Only runs in this state: running, active, over, ...")] = None,
    limit: Annotated[int, Field(ge=0, description="Most runs to list; 0: all.")] = 20,
) -> Any:
    """List the runs under the runs root, the newest first."""
    return await _answer("list", None, {"state": state, "limit": limit})


def command() -> None:
    """Serve plan, submit, status and other verbs to agents, as a server of the Model Context Protocol.

    A client starts this command and speaks with it through stdin and stdout. It ends with its client; runs that it has
    submitted go on. The tools ask for no confirmation: that is up to the client. Requires the extra [mcp].
    """
    from mcp.server import MCPServer
    from mcp.server.mcpserver.tools import Tool
    from mcp.types import ToolAnnotations

    reads = ToolAnnotations(read_only_hint=True)
    # Destructive also where a job is added: no later call gives back what it costs.
    acts = ToolAnnotations(read_only_hint=False, destructive_hint=True)
    tools = []
    for function in (plan, validate, submit, resume, cancel, status, explain, diagnose, logs, list_runs):
        annotations = acts if function in (submit, resume, cancel) else reads
        tool = Tool.from_function(
            function, description=inspect.getdoc(function), annotations=annotations, structured_output=False
        )
        arguments = tool.fn_metadata.arg_model  # which would ignore a wrong name, and so submit with "dryrun": true
        arguments.model_config["extra"] = "forbid"
        arguments.model_rebuild(force=True)
        tools.append(tool.model_copy(update={"parameters": arguments.model_json_schema()}))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # asyncio's handler would wait for the next line of stdin
    MCPServer("scaletrain", instructions=_INSTRUCTIONS, version=__version__, log_level="WARNING", tools=tools).run()


async def _answer(verb: str, argument: str | None, options: dict[str, Any]) -> Any:
    """Run a verb and return its document, or an error of the tool with exit code, message and document."""
    from anyio import run_process
    from mcp.types import CallToolResult, TextContent

    words = [verb, "--json"]
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False:
            words += [f"--{name}={one}" for one in (value if isinstance(value, list | tuple) else [value])]
    if argument is not None:
        words += ["--", argument]
    ended = await run_process(python_command("scaletrain_cli", *words), check=False)
    document = json.loads(ended.stdout or "{}")
    texts = [json.dumps(document)]
    if ended.returncode:
        said = ended.stderr.decode(errors="replace").strip() or document.get("error", {}).get("message", "")
        texts.insert(0, f"exit code {ended.returncode}: {said}")
    content = [TextContent(type="text", text=text) for text in texts]
    return CallToolResult(content=content, structured_content=document, is_error=ended.returncode != 0)
