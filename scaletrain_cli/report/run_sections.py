"""The sections of the page of one run, from its JSON object."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from scaletrain_cli.launch.run_status import OVER
from scaletrain_cli.markup import details, plain_value, prose, safe, table, tiles, value_text
from scaletrain_cli.report.hardware import hardware_section
from scaletrain_cli.report.reading import verdict
from scaletrain_cli.report.record_sections import (
    attempts_section,
    evaluations_section,
    events_section,
    goodput_section,
    label,
    nodes_section,
    profiles_section,
    spec_section,
)
from scaletrain_cli.report.run_charts import chart_figures, span_of_run
from scaletrain_cli.text import count_text, counted, percent_text, seconds_text

_FIRST_FINDINGS = 3
SWITCH = (
    '<div class="switch" role="radiogroup" aria-label="horizontal axis"><span>horizontal axis</span>'
    '<label><input type="radio" name="axis" id="axis-step" checked /> steps</label>'
    '<label><input type="radio" name="axis" id="axis-time" /> time</label></div>'
)


def step_text(status: Mapping[str, Any]) -> str:
    """Return ``1,234 of 2,000`` of a status as JSON; ``not seen, of 2,000`` where no step was read."""
    step = "not seen," if status["step"] is None else f"{status['step']:,}"
    return f"{step} of {status['total_steps']:,}"


def rate_of(status: Mapping[str, Any]) -> float | None:
    """Return the tokens per second of a status as JSON; samples of a run that counts samples."""
    samples: float | None = status["samples_per_second"]
    return status["tokens_per_second"] if samples is None else samples


def figure_of(run: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the figure of a name with its ``planned`` and ``measured`` value; None where it has none."""
    return next((row for row in run["compared"] if row["name"] == name), {"planned": None, "measured": None})


def run_sections(run: Mapping[str, Any], tables: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the HTML of each section that the run has something for."""
    span = span_of_run(run)
    figures = chart_figures(run, span, tables)
    rest = [
        ("diagnosis", "Diagnosis", [*_diagnosis(run)]),
        ("planned", "Planned and measured", [*_planned(run)]),
        ("goodput", "Goodput", [*goodput_section(run)]),
        ("attempts", "Attempts", [*attempts_section(run)]),
        ("nodes", "Nodes", [*nodes_section(run)]),
        ("hardware", "Ranks and GPUs", [*hardware_section(run, span, tables)]),
        ("profiles", "Profiles", [*profiles_section(run)]),
        ("evaluations", "Evaluations", [*evaluations_section(run)]),
        ("spec", "Spec", [*spec_section(run)]),
        ("events", "Events", [*events_section(run)]),
    ]
    shown = [(key, title, body) for key, title, body in rest if body]
    yield from head(run)
    links = [("curves", "Curves"), *((key, title) for key, title, _ in shown)]
    yield f'<nav aria-label="sections">{"".join(f"""<a href="#{key}">{title}</a>""" for key, title in links)}</nav>'
    if figures:
        legend = "numbers: attempts · ↩ rollback · round: findings · green ticks: checkpoints · dotted: undone steps"
        yield f'<section id="curves">{SWITCH}<p class="soft"><small>{legend}</small></p>'
        yield f'<div class="charts">{"".join(figures)}</div></section>'
    else:
        missing = "No step was measured yet." if run["status"]["files_seen"] else "The steps were not seen."
        yield f'<section id="curves"><p class="missing">{missing}</p></section>'
    for key, title, body in shown:
        yield f'<section id="{key}"><h2>{title}</h2>{"".join(body)}</section>'
    if run["missing"]:
        rows = "".join(f"<li>{safe(entry['text'])}</li>" for entry in run["missing"])
        yield f'<section id="missing"><h2>Not in this report</h2><ul class="missing">{rows}</ul></section>'


def head(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the head: name, state, verdict, tiles and the first findings."""
    status, what = run["status"], run["what"]
    findings = run["diagnosis"]["findings"]
    level = verdict(status, findings)
    yield f'<header><div class="title"><h1>{safe(run["run_id"])}</h1>'
    yield f'<span class="pill {_STATES.get(status["state"], "attention")}">{safe(status["state"])}</span></div>'
    yield f'<p class="soft">{safe(_what(what, status))}</p>'
    yield f'<p class="verdict {level}"><span>{safe(_verdict(run))}</span></p>'
    share = min(1.0, (status["step"] or 0) / status["total_steps"]) if status["total_steps"] else 0.0
    done = f'<i style="width:{100 * share:.1f}%"></i>'
    yield f'<div class="progress" role="img" aria-label="{percent_text(share)} of the steps">{done}</div>'
    yield tiles(_tiles(run, share))
    yield "</header>"
    if findings:
        items = "".join(map(finding_item, findings[:_FIRST_FINDINGS]))
        more = len(findings) - _FIRST_FINDINGS
        link = f"{counted(more, 'more finding')}, " if more > 0 else ""
        yield f'<ul class="list">{items}<li><a href="#diagnosis">{link}causes and changes</a></li></ul>'


_STATES = {"finished": "good", "running": "running", "queued": "running", "ending": "running", "failed": "bad"}


def _what(what: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    layout = what["layout"]
    degrees = {
        name: layout[f"{name}_parallel"] for name in ("data", "tensor", "pipeline", "sequence", "context", "expert")
    }
    axes = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    parts = [
        f"{what['family']}, {count_text(what['parameters'])} parameters",
        f"{what['objective'].replace('_', ' ')}, {what['precision']}, {what['optimizer']}",
        f"{counted(what['nodes'], 'node')}, {what['world_size']:,} × {what['device']}",
        ", ".join([*axes, f"ZeRO stage {layout['zero_stage']}"]),
        f"batches of {what['global_batch_size']:,}",
        f"{status['scheduler']} job {status['job_id']}" if status["job_id"] else status["scheduler"],
    ]
    return " · ".join(parts)


def _verdict(run: Mapping[str, Any]) -> str:
    """Return the state of the run in one or two sentences."""
    status, findings = run["status"], run["diagnosis"]["findings"]
    rollbacks = sum(mark["kind"] == "rollback" for mark in run["marks"])
    state = {"finished": "Finished", "failed": "Failed", "cancelled": "Cancelled", "ended-idle": "Ended idle"}.get(
        status["state"], status["state"].capitalize()
    )
    attempts = f" in {counted(len(run['attempts']), 'attempt')}" if run["attempts"] else ""
    back = f" with {counted(rollbacks, 'rollback')}" if rollbacks else ""
    text = f"{state} at step {step_text(status)}{attempts}{back}."
    if status["state"] not in ("finished", "running") and status["why"]:
        text += f" {status['why'][0].upper()}{status['why'][1:]}."
    counts = {name: sum(finding["severity"] == name for finding in findings) for name in ("error", "warning", "note")}
    numbers = ", ".join(counted(count, name) for name, count in counts.items() if count)
    return f"{text} Diagnosis: {numbers or _no_findings(run)}."


def _no_findings(run: Mapping[str, Any]) -> str:
    if not run["status"]["files_seen"]:
        return "not seen"
    return "no findings" if run["diagnosis"]["measured_steps"] else "no step to diagnose"


def _tiles(run: Mapping[str, Any], share: float) -> Iterator[tuple[str, str, str, str]]:
    status = run["status"]
    step, planned = status["step_seconds"]["measured"], status["step_seconds"]["planned"]
    eta = status["eta_seconds"]
    left = "" if status["state"] in OVER else "time left not known" if eta is None else f"{seconds_text(eta)} left"
    if run["attempts"] and not left:
        left = f"in {seconds_text(run['attempts'][-1]['until'] - run['attempts'][0]['started'])}"
    yield "progress", percent_text(share), left, ""
    known = status["validation_loss"] is not None
    validation = f"validation {value_text(status['validation_loss'], '')}" if known else "no validation"
    yield "loss", value_text(status["loss"], ""), validation, "bad" if isinstance(status["loss"], str) else ""
    beside = f"planned {value_text(planned, 'seconds')}" if planned else "not planned"
    slow = "attention" if step and planned and step > 1.15 * planned else ""
    ratio = f", ×{step / planned:.2f}" if step and planned else ""
    yield "step time", value_text(step, "seconds"), f"{beside}{ratio}", slow
    rate, mfu = rate_of(status), figure_of(run, "mfu")
    note = "MFU not measured"
    if mfu["measured"] is not None:
        note = f"MFU {value_text(mfu['measured'], 'share')}, planned {value_text(mfu['planned'], 'share')}"
    yield f"{status['unit']} per second", "–" if rate is None else count_text(rate), note, ""
    peak = figure_of(run, "peak")["measured"]
    capacity = run["planned"]["memory_capacity_bytes"]
    ranks = (status["hardware"] or {}).get("memory_bytes")
    of = (
        f"of {value_text(capacity, 'bytes')}"
        if capacity
        else f"most of {counted(ranks['count'], 'rank')}"
        if ranks
        else "of rank 0"
    )
    full = "attention" if peak and capacity and peak > 0.95 * capacity else ""
    yield "peak memory", value_text(peak, "bytes"), of, full
    goodput = status["goodput"]
    restarts = f"{counted(status['restarts'], 'restart')}, {counted(status['steps_lost_total'], 'step')} lost"
    restarts = restarts if status["files_seen"] else "not seen"
    yield "goodput", "–" if goodput is None else percent_text(goodput["goodput"]), restarts, ""
    to_come, whole = status["cost_to_come_usd"], figure_of(run, "whole_run")["planned"]
    come = f"planned {value_text(whole, 'usd')}" if whole else "no price"
    come = f"{value_text(to_come, 'usd')} to come" if to_come else come
    yield "cost", value_text(status["cost_so_far_usd"], "usd"), come, ""
    saved = status["last_checkpoint_step"]
    if not status["files_seen"]:
        yield "last checkpoint", "–", "not seen", ""
        return
    seconds = figure_of(run, "seconds")["measured"]
    note = f"saved in {value_text(seconds, 'seconds')}" if seconds else "none yet"
    yield "last checkpoint", "–" if saved is None else f"step {saved:,}", note, ""


def finding_item(finding: Mapping[str, Any]) -> str:
    """Return the line of a finding in a list."""
    return f"<li>{_chip(finding)}{prose(finding['text'])}</li>"


def _chip(finding: Mapping[str, Any]) -> str:
    return f'<span class="chip {safe(finding["severity"])}">{safe(finding["severity"])}</span>'


def _diagnosis(run: Mapping[str, Any]) -> Iterator[str]:
    diagnosis = run["diagnosis"]
    if not diagnosis["findings"]:
        yield f"<p>{_no_findings(run).capitalize()}.</p>"
    for number, finding in enumerate(diagnosis["findings"], 1):
        causes = "".join(f"<li>{prose(cause['text'])}{_change(cause['change'])}</li>" for cause in finding["causes"])
        title = f"{_chip(finding)}<b>{number}. {prose(finding['text'])}</b> "
        yield f'<div class="found {safe(finding["severity"])}">{title}'
        yield f"<small>confidence: {safe(finding['confidence'])}; {safe(finding['code'])}</small>"
        yield f"<ol>{causes}</ol></div>" if causes else "</div>"
    if diagnosis["not_concluded"]:
        rows = "".join(f"<li>{prose(entry['text'])}</li>" for entry in diagnosis["not_concluded"])
        yield details("Not concluded", f"<ul class='soft'>{rows}</ul>")


def _change(change: Mapping[str, Any] | None) -> str:
    if change is None:
        return ""
    given = "" if change["given"] is None else f" = {plain_value(change['given'])}"
    to = "" if change["to"] in (None, change["given"]) else f": try {plain_value(change['to'])}"
    return f'<br /><code class="change">{safe(change["place"])} {safe(change["key"])}{safe(given)}{safe(to)}</code>'


_TOPICS = ("memory", "step time", "throughput", "cost", "checkpoints", "goodput")


def _planned(run: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    most = {
        topic: max(
            (max(row["planned"] or 0, row["measured"] or 0) for row in run["compared"] if row["topic"] == topic),
            default=0,
        )
        for topic in ("memory", "step time")
    }
    for topic, group in itertools.groupby(
        sorted(run["compared"], key=lambda row: _TOPICS.index(row["topic"])), lambda row: row["topic"]
    ):
        for place, row in enumerate(group):
            planned, measured = row["planned"], row["measured"]
            rows.append(
                [
                    f"<b>{safe(topic)}</b>" if place == 0 else "",
                    label(row["name"]),
                    safe(value_text(planned, row["unit"])),
                    safe(value_text(measured, row["unit"])),
                    safe(_difference(planned, measured)),
                    _pair(planned, measured, most.get(topic) or max(planned or 0, measured or 0), row["topic"]),
                ]
            )
    if rows:
        yield table(["", "figure", "planned", "measured", "difference", "planned (gray) and measured"], rows, "ttnnnb")


def _difference(planned: float | None, measured: float | None) -> str:
    if planned is None or measured is None or planned <= 0:
        return ""
    share = measured / planned - 1
    if abs(share) < 0.0005:
        return "as planned"
    if abs(share) < 0.0095:
        return f"{share:+.1%}".replace("%", " %")
    return f"{share:+.0%}".replace("%", " %") if abs(share) < 10 else f"×{measured / planned:,.0f}"


def _pair(planned: float | None, measured: float | None, most: float, topic: str) -> str:
    if not most:
        return ""
    higher_is_worse = topic in ("memory", "step time", "cost")
    over = " over" if higher_is_worse and planned and measured and measured > 1.1 * planned else ""
    bars = [f'<i class="p" style="width:{100 * planned / most:.1f}%"></i>'] if planned else []
    bars += [f'<i class="m{over}" style="width:{100 * measured / most:.1f}%"></i>'] if measured else []
    return f'<div class="pair" aria-hidden="true">{"".join(bars)}</div>'
