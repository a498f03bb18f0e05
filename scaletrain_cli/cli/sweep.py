"""`scaletrain submit --sweep`: plan and check every point, show them, ask once, hand over all or none."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from scaletrain_cli.errors import InfeasibleError, SpecError, UsageError
from scaletrain_cli.text import visible

if TYPE_CHECKING:
    from scaletrain_cli.launch.sweep import Point
    from scaletrain_cli.plan import RunPlan
    from scaletrain_cli.spec import RunSpec

OPTION = "--sweep"
_SCHEMA = {"schema": "scaletrain.submit-sweep/v1"}


def submit_points(
    spec: Path,
    overrides: Sequence[str],
    points: Sequence[tuple[str, ...]],
    *,
    cluster: str | None,
    run_id: str | None,
    max_concurrent: int | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Prints the run ids on stdout, one a line."""
    from scaletrain_cli.cli.options import confirm
    from scaletrain_cli.launch.backends.registry import backend_for
    from scaletrain_cli.launch.resource_checks.checks import require_external
    from scaletrain_cli.launch.shared_folder import room_notes
    from scaletrain_cli.launch.submit import make_record
    from scaletrain_cli.launch.sweep import cap_of, submit_sweep, take_snapshots
    from scaletrain_cli.rundir.paths import RunDir, runs_root
    from scaletrain_cli.safe_files import require_writable
    from scaletrain_cli.ui.console import say, warn

    sweep, planned = _planned(spec, overrides, points, cluster, run_id)
    section = planned[0].spec.cluster
    if len({point.spec.cluster.scheduler for point in planned}) > 1:
        raise UsageError(f"{OPTION} cluster.scheduler: one sweep goes to one scheduler. Submit one for each.")
    scheduler = backend_for(section.scheduler)
    cap = cap_of(section, max_concurrent, len(planned))
    snapshots = take_snapshots(planned)
    not_checked: dict[str, None] = {}
    for point in planned:
        not_checked |= dict.fromkeys(require_external(point.spec, snapshots[point.spec.code]))
    if dry_run:
        for note in not_checked:
            warn(note)
        from scaletrain_cli.ui.console import document

        texts = []
        for point in planned:
            record = make_record(point.spec, point.plan, point.run_id, snapshots[point.spec.code])
            texts.append(scheduler.render(RunDir(runs_root() / point.run_id), record))
            if not as_json:
                typer.echo(visible(f"# {point.run_id}: {', '.join(point.overrides)}"))
                typer.echo(document(texts[-1]))
        if as_json:
            from scaletrain_cli.ui.json import print_json

            told = [
                {"run_id": point.run_id, "overrides": list(point.overrides), "would_send": text}
                for point, text in zip(planned, texts, strict=True)
            ]
            print_json(_SCHEMA | {"sweep": sweep, "scheduler": section.scheduler, "dry_run": True, "runs": told})
        return

    require_writable(runs_root(), "no run can be submitted")
    asked: dict[str, Point] = {}  # the same question once
    for point in planned:
        asked.setdefault(point.spec.cluster.model_dump_json(), point)
    outlooks = [scheduler.preflight(point.spec, point.plan) for point in asked.values()]
    notes = not_checked | dict.fromkeys(note for outlook in outlooks for note in outlook.notes)
    largest = max(planned, key=lambda point: point.plan.durability.checkpoint_bytes)
    for note in [*notes, *room_notes(largest.spec, largest.plan, runs_root(), runs=len(planned))]:
        warn(note)
    if not as_json:
        from scaletrain_cli.ui.sweep import show_points

        show_points(planned, outlooks[0].start, cap)
    at_once = "all at once" if cap == len(planned) else f"{cap} at a time"
    confirm(f"Submit {len(planned)} runs to {section.scheduler}, {at_once}?", yes)
    done = submit_sweep(sweep, planned, scheduler, cap, snapshots)
    if as_json:
        from scaletrain_cli.ui.json import print_json

        rows = [
            {"run_id": one.run.run_id, "run_dir": str(one.run.path), "job_id": one.submission.job_id}
            | {"created": one.created, "overrides": list(point.overrides)}
            for one, point in zip(done, planned, strict=True)
        ]
        head = _SCHEMA | {"sweep": sweep, "scheduler": section.scheduler, "max_concurrent": cap}
        print_json(head | {"start": dataclasses.asdict(outlooks[0].start), "notes": [*notes], "runs": rows})
        return
    new = sum(one.created for one in done)
    before = f"; {len(done) - new} were submitted before" if new < len(done) else ""
    say(f"submitted {new} runs of the sweep {sweep}, {at_once}{before}; `scaletrain list` shows them")
    for one in done:
        typer.echo(visible(one.run.run_id))


def _planned(
    spec: Path,
    overrides: Sequence[str],
    variants: Sequence[tuple[str, ...]],
    cluster: str | None,
    run_id: str | None,
) -> tuple[str, list[Point]]:
    """The sweep's name and its points. Raises for the first one that cannot be, and says which."""
    import time

    from scaletrain_cli.cli.overrides import load_varied
    from scaletrain_cli.launch.submit import new_run_id, plan_for_engine
    from scaletrain_cli.launch.sweep import Point, point_ids

    found: list[tuple[RunSpec, RunPlan]] = []
    for varied in variants:
        try:
            one = load_varied(spec, overrides, varied, OPTION, cluster)
            found.append((one, plan_for_engine(one, spec)))
        except (SpecError, InfeasibleError) as error:
            error.message = f"{', '.join(varied)}: {error.message}"
            raise
    sweep = run_id if run_id is not None else new_run_id(found[0][0].name, time.time())
    named = zip(point_ids(sweep, variants), variants, found, strict=True)
    return sweep, [Point(name, varied, one, plan) for name, varied, (one, plan) in named]
