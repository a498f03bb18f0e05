"""The screens of `status` and `explain`: a run with its attempts and what it measures, a sweep, and why a run ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scaletrain_cli.diagnosis.hardware import Hardware, Spread
from scaletrain_cli.diagnosis.speed import RunFigures
from scaletrain_cli.event_texts import Event, event_sentence
from scaletrain_cli.launch.finding import Explanation
from scaletrain_cli.launch.run_status import RunStatus
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.goodput import Goodput
from scaletrain_cli.rundir.measured import Figure, Measured
from scaletrain_cli.rundir.mirror_state import MirrorState
from scaletrain_cli.text import (
    bytes_text,
    count_text,
    counted,
    dollars_text,
    either,
    listed,
    percent_text,
    ratio_text,
    seconds_text,
    span_text,
)
from scaletrain_cli.text import measures_text as validation_text
from scaletrain_cli.ui.console import escaped_text, line, marked, plain, show, stdout_console, titled_table
from scaletrain_cli.ui.diagnosis import finding_lines
from scaletrain_cli.ui.tables import STYLES, steps_text

if TYPE_CHECKING:
    from scaletrain_cli.launch.sweep import SweepStatus
    from scaletrain_cli.launch.view import RunView

_MOST_NODES = 8
_MOST_ATTEMPTS = 10  # the latest ones
NOT_SEEN = str(Reason("launch.view-not-seen"))
# Names of events of the guard, where another plural or another word is usual.
_GUARD_NAMES = {
    "rolled-back": ("rollback",),
    "loss-scale-collapsed": ("collapsed loss scale",),
    "dead-gradients": ("time without gradients", "times without gradients"),
    "flat-loss": ("flat loss", "flat losses"),
    "stopped-early": ("early stop",),
    "stragglers": ("slow rank",),
    "data-wait": ("wait for data", "waits for data"),
    "node-agent-stopped": ("stopped node agent",),
}


def show_status(view: RunView) -> None:
    """Print the status of a run to stdout, with its times and costs, what its ranks and GPUs measure, the events of
    its guard, and the first findings of its diagnosis.
    """
    console, status, attempts, hardware = stdout_console(), view.status, view.attempts, view.hardware
    headline = Text.assemble(
        (plain(status.run_id), "bold"), "  ", (status.state, STYLES.get(status.state, "")), f"  {progress_text(status)}"
    )
    line(console, headline)
    saved = "" if status.files_seen else NOT_SEEN
    if status.files_seen and status.last_checkpoint_step is not None:
        lost = f"; {lost_text(status)}" if status.attempt > 1 or status.steps_lost_total else ""
        saved = f"step {status.last_checkpoint_step:,}{lost}"
    where = f"{status.scheduler} job {status.job_id}" if status.job_id else status.scheduler
    waits_again = status.job.state == "queued" and status.attempt > 0  # `why` is then the end of the last attempt
    nodes = f" on {listed(status.nodes, _MOST_NODES)}" if status.nodes and not waits_again else ""
    is_shown = status.reason != status.job.why if waits_again else status.state == "running"
    says = f": {status.job.detail}" if is_shown and status.job.detail else ""
    branch = status.branch_of
    sizes = ""
    if status.sizes and status.planned_nodes is not None:
        sizes = f"{counted(status.planned_nodes, 'node')}; the job may start on {either(status.sizes)}"
    memory = None if hardware is None else hardware.memory
    rows = (
        ("why", status.why if status.state not in ("finished", "running") else ""),
        ("last", measures_text(status)),
        ("sources", sources_text(status)),
        ("start", str(status.starting or "")),
        ("idle", str(status.idle or "")),
        ("slow", str(status.straggler or "")),
        ("memory", "" if status.measured is None else memory_text(status.measured)),
        ("ranks", "" if memory is None else rank_memory_text(memory, view.record.plan)),
        ("GPU", "" if hardware is None else gpu_text(hardware)),
        ("time", times_text(view.figures)),
        ("cost", cost_text(view.figures)),
        ("goodput", "" if status.goodput is None else goodput_text(status.goodput)),
        ("saved", saved),
        ("in memory", copies_text(view)),
        ("mirror", "" if status.mirror is None else mirror_text(status.mirror, time.time())),
        ("guard", guard_text(view.guard_events)),
        ("job", where + nodes + says),
        ("branch", "" if branch is None else f"of {branch.run_id}, from step {branch.step:,}"),
        ("size", sizes),
    )
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, min_width=len("  goodput"))
    table.add_column(overflow="fold")
    for name, text in rows:
        if text:
            table.add_row(f"  {name}", escaped_text(text))
    show(console, table)
    line(console, Text.assemble(("  files    ", "dim"), plain(status.run_dir)))
    for finding in finding_lines(view.diagnosis.findings):
        show(console, Padding(finding, (0, 0, 0, 2)))
    if view.diagnosis.findings:
        line(console, f"  scaletrain diagnose {status.run_id}  shows causes and changes", "dim")
    if attempts:
        ends = titled_table(("  attempt", "began", "lasted", "checkpoint", "exit", "why"), "lllllw")
        for attempt in attempts[-_MOST_ATTEMPTS:]:
            until = attempt.ended if attempt.ended is not None else time.time()
            ends.add_row(
                f"  {attempt.number}",
                time.strftime("%m-%d %H:%M:%S", time.localtime(attempt.started)),
                seconds_text(max(0.0, until - attempt.started)),
                "-" if attempt.last_checkpoint_step is None else f"step {attempt.last_checkpoint_step}",
                "" if attempt.exit_code is None else str(attempt.exit_code),
                escaped_text(attempt.message),
            )
        show(console, Group("", ends))
    if (earlier := len(attempts) - _MOST_ATTEMPTS) > 0:
        line(console, f"  {counted(earlier, 'earlier attempt')} not shown; --json has all", "dim")


def progress_text(status: RunStatus) -> str:
    """Return ``step 1,234 of 2,000 (62 %)``, or ``step not seen, of 2,000``."""
    if not status.step_seen:
        return f"step not seen, of {status.total_steps:,}"
    share = f" ({percent_text(status.step / status.total_steps)})" if status.total_steps else ""
    return f"step {status.step:,} of {status.total_steps:,}{share}"


def lost_text(status: RunStatus) -> str:
    """Return ``23 steps lost so far``: by crashes and rollbacks."""
    return f"{counted(status.steps_lost_total, 'step')} lost so far"


def mirror_text(mirror: MirrorState, now: float) -> str:
    """Return ``step 500 in s3://bucket/runs; step 600 waits for 2 min``, or why the mirror fails."""
    has = "no checkpoint" if mirror.step is None else f"step {mirror.step:,}"
    text = f"{has} in {mirror.to}"
    if mirror.owner:
        return f"{text}; the run continues in {mirror.owner}"
    if mirror.uploading_step is not None and mirror.upload_bytes:
        done = percent_text(min(1.0, mirror.sent_bytes / mirror.upload_bytes))
        text += f"; step {mirror.uploading_step:,} is copied ({done} of {bytes_text(mirror.upload_bytes)})"
    elif mirror.waiting_step is not None:
        text += f"; step {mirror.waiting_step:,} waits for {seconds_text(mirror.lag_seconds(now))}"
    return text if mirror.problem is None else f"{text}; fails: {mirror.problem}"


def times_text(figures: RunFigures) -> str:
    """Return ``12 min 3 s left; 0.52 s per step, planned 0.48 s (x1.08)``; empty before the first steps."""
    step = "" if figures.measured_step_seconds is None else step_text(figures)
    return "; ".join(part for part in (left_text(figures), step) if part)


def left_text(figures: RunFigures) -> str:
    """Return ``12 min 3 s left``; empty where that is not known, and after the last step."""
    return f"{seconds_text(figures.eta_seconds)} left" if figures.eta_seconds else ""


def step_text(figures: RunFigures) -> str:
    """Return ``0.52 s per step, planned 0.48 s (x1.08; p10 to p90 0.40 s to 0.60 s)``, as far as it is known."""
    measured, planned = figures.measured_step_seconds, figures.planned_step_seconds
    span = figures.planned_step_range
    inside = "" if span is None else f"p10 to p90 {span_text(span.p10, span.p90, seconds_text)}"
    if measured is None:
        return f"planned {seconds_text(planned)}{f' ({inside})' if inside else ''}" if planned > 0 else ""
    notes = "; ".join(note for note in (ratio_text(measured / planned) if planned > 0 else "", inside) if note)
    beside = f", planned {seconds_text(planned)} ({notes})" if planned > 0 else ""
    return f"{seconds_text(measured)} per step{beside}"


def copies_text(view: RunView) -> str:
    """Return how often the present attempt copies its state to host memory, or why it does not; else nothing."""
    names = ("memory-copies", "memory-copies-off", "attempt-ended")
    newest = next((event for event in reversed(view.events) if event.get("event") in names), None)
    return "" if newest is None or newest["event"] == "attempt-ended" or view.is_over else event_sentence(newest)


def guard_text(events: Sequence[Event]) -> str:
    """Return ``2 rollbacks, 1 spike; last: ...``: how many events of each kind, and the text of the last one.

    Empty without any. That a rank is slow no more is no event of its own.
    """
    kept = [event for event in events if event.get("event") != "stragglers" or event.get("rank") is not None]
    if not kept:
        return ""
    names = [str(event.get("event")) for event in kept]
    counts = [counted(names.count(name), *_GUARD_NAMES.get(name, (name,))) for name in dict.fromkeys(names)]
    return f"{', '.join(counts)}; last: {event_sentence(kept[-1])}"


def cost_text(figures: RunFigures) -> str:
    """Return ``$1,230 so far, $4,560 to come``; empty without a price."""
    if figures.cost_so_far_usd is None:
        return ""
    to_come = f", {dollars_text(figures.cost_to_come_usd)} to come" if figures.cost_to_come_usd else ""
    return f"{dollars_text(figures.cost_so_far_usd)} so far{to_come}"


def measures_text(status: RunStatus) -> str:
    """Return ``loss 4.21, validation 4.30, top-1 71.2 %, 1.26 k images/s``; empty before the first step."""
    parts = []
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.validation_loss is not None:
        parts.append(f"validation {status.validation_loss:.4f}")
    if validated := validation_text(status.validation_measures):
        parts.append(validated)
    per_second = status.tokens_per_second if status.samples_per_second is None else status.samples_per_second
    if per_second is not None:
        parts.append(f"{count_text(per_second)} {status.unit}/s")
    return ", ".join(parts)


def sources_text(status: RunStatus) -> str:
    """Return ``web loss 4.21, validation 4.30; code loss 1.20``, as measured last; empty for a single source."""
    sources = []
    for name in [*status.source_losses, *sorted(set(status.source_validation_losses) - set(status.source_losses))]:
        losses = {"loss": status.source_losses, "validation": status.source_validation_losses}
        known = [f"{what} {by_source[name]:.4f}" for what, by_source in losses.items() if name in by_source]
        sources.append(f"{name} {', '.join(known)}")
    return "; ".join(sources)


def memory_text(measured: Measured) -> str:
    """Return ``model states 1.2 GB, as planned; activations 0.4 GB, 1.3 % above the plan`` of the fullest stage."""
    figures = measured.stages[measured.worst].figures
    parts = {
        "model states": measured.model_states,
        "activations": figures.get("activations"),
        "host": figures.get("host"),
        "peak": figures.get("allocated"),
    }
    return "; ".join(
        f"{name} {bytes_text(figure.measured)}, {_beside_plan(figure)}" for name, figure in parts.items() if figure
    )


# Labels of keys of the JSON object; "restore" includes the set-up of the first attempt.
_PARTS = {"data": "waiting for data", "restore": "set-up", "lost_work": "lost work"}


def goodput_text(goodput: Goodput) -> str:
    """Return ``93.1 % of 2 h 3 min; set-up 3.2 %, lost work 2.1 %``: largest first, without shares under 0.05 %."""
    rest = {_PARTS.get(name, name): seconds for name, seconds in vars(goodput).items() if name != "productive"}
    shares = {name: seconds / goodput.wall for name, seconds in rest.items() if goodput.wall > 0}
    named = [name for name in sorted(shares, key=lambda name: -shares[name]) if shares[name] >= 0.0005]
    parts = ", ".join(f"{name} {percent_text(shares[name])}" for name in named)
    return f"{percent_text(goodput.share)} of {seconds_text(goodput.wall)}" + (f"; {parts}" if parts else "")


def _beside_plan(figure: Figure) -> str:
    if figure.measured == figure.planned:
        return "as planned"
    if figure.difference is None:
        return "not planned"
    share, side = abs(figure.difference), "above" if figure.difference > 0 else "below"
    much = percent_text(share) if share >= 0.0005 else bytes_text(abs(figure.measured - figure.planned))
    return f"{much} {side} the plan"


def show_sweep(status_of_all: SweepStatus) -> None:
    """Print the state of each run of a sweep to stdout."""
    console, sweep, members = stdout_console(), status_of_all.sweep, status_of_all.members
    gone = sweep.points - len(members)
    missing = f"; {gone} of {sweep.points} deleted" if gone > 0 else ""
    counted = f"  {len(members)} runs: {status_of_all.states_in_words}{missing}"
    line(console, Text.assemble((plain(sweep.name), "bold"), counted))
    table = titled_table(("  run", "state", "step", "job", "last measurements, or reason"), "llrlw")
    for member in members:
        name, status = escaped_text(f"  {member.run.run_id}"), member.status
        if status is None:
            table.add_row(name, Text("damaged", "red"), "", "", escaped_text(member.error, "dim"))
            continue
        state = Text(status.state, STYLES.get(status.state, ""))
        measured = status.state in ("running", "finished")
        last = escaped_text(measures_text(status)) if measured else escaped_text(status.why, "dim")
        table.add_row(name, state, steps_text(status), escaped_text(status.job_id), last)
    show(console, table)
    if (best := status_of_all.best) is not None:
        what = f"  lowest {best.measure.replace('_', ' ')} {best.value:.4f}: "
        line(console, Text.assemble((what, "dim"), plain(best.run_id)))


_MANY = 2  # from which on the worst of several is named
_PART_NAMES = {
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "optimizer_seconds": "optimizer",
    "communication_seconds": "communication",
    "data_wait_seconds": "data wait",
}
_THROTTLE_NAMES = {"throttled_by_power": "power", "throttled_by_heat": "heat", "throttled_by_hardware": "the hardware"}
_LEAST_THROTTLED = 0.01


def rank_memory_text(memory: Spread, plan: RunPlan) -> str:
    """Return ``rank 3 61.2 GB, median 60.1 GB of 8 ranks; planned 62.0 GB of 80.0 GB``.

    Of very many ranks a part is read, which the text tells: ``of 512 ranks (of 4,096)``.
    """
    world = plan.layout.world_size
    part = f" (of {world:,})" if memory.count < world else ""
    worst = f"{memory.highest_name} {bytes_text(memory.highest)}"
    others = (
        f", median {bytes_text(memory.median)} of {counted(memory.count, 'rank')}{part}" if memory.count > 1 else ""
    )
    return f"{worst}{others}; planned {bytes_text(plan.memory.peak)} of {bytes_text(plan.memory.capacity)}"


def gpu_text(hardware: Hardware) -> str:
    """Return ``97 % used (gpu07/0 80 %), 1.98 GHz, up to 71 °C (gpu07/0), 650 W each``; empty without GPUs."""
    parts = []
    if (use := hardware.gpu_spreads.get("utilization")) is not None:
        parts.append(f"{percent_text(use.median)} used{_named(use.lowest_name, percent_text(use.lowest), use)}")
    if (clock := hardware.gpu_spreads.get("sm_clock_hertz")) is not None:
        slowest = _named(clock.lowest_name, f"{clock.lowest / 1e9:.2f}", clock)
        parts.append(f"{clock.median / 1e9:.2f} GHz{slowest}")
    if (heat := hardware.gpu_spreads.get("temperature_celsius")) is not None:
        parts.append(f"up to {heat.highest:.0f} °C{f' ({heat.highest_name})' if heat.count >= _MANY else ''}")
    if (power := hardware.gpu_spreads.get("power_watts")) is not None:
        parts.append(f"{power.median:,.0f} W each" if power.count >= _MANY else f"{power.median:,.0f} W")
    for column, name in _THROTTLE_NAMES.items():
        share = hardware.throttled.get(column)
        if share is not None and share.highest >= _LEAST_THROTTLED:
            parts.append(f"{share.highest_name} throttled by {name} {percent_text(share.highest)} of the time")
    return ", ".join(parts)


def step_parts_text(hardware: Hardware) -> str:
    """Return ``420 ms: forward 120 ms, backward 260 ms, communication 40 ms``, means of the same latest steps.

    Empty if no rank measures its parts.
    """
    parts = {_PART_NAMES[name]: seconds for name, seconds in hardware.step_parts.items()}
    text = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts.items())
    return text if not parts or hardware.step_seconds is None else f"{seconds_text(hardware.step_seconds)}: {text}"


def planned_parts_text(plan: RunPlan) -> str:
    """Return the planned parts of a step that take at least 0.5 % of it, largest first."""
    time = plan.time
    parts = {
        "compute": time.compute,
        "communication": time.exposed_communication,
        "bubble": time.bubble,
        "optimizer": time.optimizer,
        "data wait": time.data_wait,
    }
    named = sorted(parts, key=lambda name: -parts[name])
    return ", ".join(f"{name} {seconds_text(parts[name])}" for name in named if parts[name] >= 0.005 * time.step)


def _named(name: str, text: str, spread: Spread) -> str:
    return f" ({name} {text})" if spread.count >= _MANY and spread.lowest < 0.95 * spread.median else ""


def show_explanation(explanation: Explanation) -> None:
    """Print the explanation to stdout."""
    console = stdout_console()
    state = (explanation.state, STYLES.get(explanation.state, ""))
    line(console, Text.assemble((plain(explanation.run_id), "bold"), "  ", state))
    for finding in explanation.findings:
        note = " Waiting will not help; action is needed." if finding.needs_action else ""
        show(console, Group("", escaped_text(f"{finding.headline}.{note}", "bold yellow" if note else "bold")))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="dim", overflow="fold", max_width=32)
        table.add_column(overflow="fold")
        for evidence in finding.evidence:
            for number, text in enumerate(evidence.text.splitlines() or [""]):
                table.add_row(escaped_text("" if number else evidence.source), escaped_text(text))
        actions = marked(("→", escaped_text(action)) for action in finding.actions)
        for part in ([table] if finding.evidence else []) + ([actions] if finding.actions else []):
            show(console, Padding(part, (0, 0, 0, 2)))
