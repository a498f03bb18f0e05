"""`scaletrain preflight`: measure devices and links of the nodes and compare them with the plan."""

import typer

from scaletrain_cli.cli.options import AsJson, ClusterName, JobTimeout, Overrides, SpecPath, Yes, confirm, seconds_of
from scaletrain_cli.errors import ExitCode, InfeasibleError
from scaletrain_cli.ui.json import print_json

EXIT_CODES = tuple(code for code in ExitCode if code <= ExitCode.WRONG_NODES)


def command(
    spec: SpecPath,
    overrides: Overrides = None,
    cluster: ClusterName = None,
    timeout: JobTimeout = "30m",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Submit a job of the planned size whose ranks measure their devices and links, and report anomalies.

    Each node checks its GPUs, memory, /dev/shm and clock; all ranks time a matrix multiplication, transfers between
    pairs of nodes and an all-reduce. A training run does the same before its first step (guard.preflight).
    """
    from scaletrain_cli.launch.backends.registry import backend_for
    from scaletrain_cli.launch.epochs import provisional
    from scaletrain_cli.launch.short_jobs import run_preflight
    from scaletrain_cli.launch.submit import plan_for_engine
    from scaletrain_cli.spec import load_spec
    from scaletrain_cli.ui.live import StatusLine
    from scaletrain_cli.ui.submission import show_outlook

    seconds = seconds_of("--timeout", timeout)
    # Preflight runs the built-in engine, even for a spec with code.engine.
    run_spec = provisional(load_spec(spec, [*(overrides or ()), "code={}"], cluster=cluster))
    try:
        plan, scheduler = plan_for_engine(run_spec, spec), backend_for(run_spec.cluster.scheduler)
    except InfeasibleError as error:
        error.message = f"{error.message.rstrip('.')} (preflight always runs the built-in engine)"
        raise
    show_outlook(scheduler.preflight(run_spec, plan))
    where = f"{run_spec.cluster.nodes} x {run_spec.cluster.gpus_per_node} on {run_spec.cluster.scheduler}"
    confirm(f"Submit a job that takes one to two minutes, {where}?", yes)
    with StatusLine() as line:
        report = run_preflight(run_spec, plan, scheduler, seconds, line.update)
    if as_json:
        print_json(report.to_json())
    else:
        from scaletrain_cli.ui.short_jobs import show_preflight

        show_preflight(report)
    raise typer.Exit(report.exit_code)
