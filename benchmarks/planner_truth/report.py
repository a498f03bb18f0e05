"""The scores as text and as JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from planner_truth.evaluation import Judged, Outcome, Score
from planner_truth.table import Table
from scaletrain_cli.spec import ModelSpec

_HEAD = f"{'set':<40}{'n':>5}  {'median':>8}{'MAPE':>8}{'p90':>8}{'tau':>7}   {'others':<22}{'to reach'}"


def lines(scores: list[Score], outcomes: Mapping[Table, Outcome]) -> Iterator[str]:
    """Yield a table of errors, a line for each verdict and ranking, and the rows left out by reason."""
    yield _HEAD
    for score in scores:
        yield from _score_lines(score)
    for table, outcome in outcomes.items():
        yield ""
        if outcome.missing:
            yield f"{table.file}: not there"
            continue
        yield f"{table.file}: {len(outcome.rows)} rows predicted, {sum(outcome.skipped.values())} left out"
        for reason, count in outcome.skipped.items():
            yield f"  {count:>5}  {reason}"


def _score_lines(score: Score) -> Iterator[str]:
    chosen = score.truth_set
    beside = f"   {chosen.peer:<22}{chosen.target}"
    title = f"{chosen.title:<40}"
    if score.errors:
        e = score.errors
        tau = f"{score.tau:>7.2f}" if score.tau is not None else " " * 7
        yield f"{title}{e.n:>5}  {e.median:>+8.1%}{e.mape:>8.1%}{e.p90:>8.1%}{tau}{beside}"
        for name, part in score.parts:
            yield f"  {name:<38}{part.n:>5}  {part.median:>+8.1%}{part.mape:>8.1%}{part.p90:>8.1%}"
        if score.parts:
            mean = statistics.fmean(part.mape for _, part in score.parts)
            yield f"{'':<47}mean over {len(score.parts)} sources {mean:.1%}; typical factor {e.factor:.2f}"
    elif score.verdicts:
        v = score.verdicts
        yield f"{title}{v.n:>5}  right {v.accuracy:>18.1%}{'':>7}{beside}"
        yield f"{'':<47}false fits {v.false_fits:.1%}, false rejections {v.false_rejections:.1%} of the rows"
    elif score.ranking:
        r = score.ranking
        yield f"{title}{r.runs:>5}  regret {r.regret:>17.1%}{'':>7}{beside}"
        yield (
            f"{'':<47}median {r.regret_median:.1%}, worst {r.regret_worst:.1%}, Kendall tau {r.tau:.2f}, "
            f"{r.panels} panels"
        )
        crashed = sum(pick.regret is None for pick in score.picks)
        yield (
            f"{'':<47}by predicted time alone, fitting or not: {r.regret_by_time:.1%}; "
            f"with the crashed runs to choose from, {crashed} of {len(score.picks)} picks crashed"
        )
    else:
        yield f"{title}{0:>5}  no rows{'':>24}{beside}"


_MARKDOWN_HEAD = (
    "| published runs | n | mean error | 90 % of the runs | best other tool |",
    "|---|---|---|---|---|",
)


def markdown(scores: list[Score]) -> Iterator[str]:
    """Yield the table of all sets for the documentation, as lines of Markdown."""
    yield from _MARKDOWN_HEAD
    for score in scores:
        chosen = score.truth_set
        for name, n, error, most in _cells(score):
            yield f"| {name} | {n} | {error} | {most} | {'' if chosen.peer == 'none known' else chosen.peer} |"
        for name, part in getattr(score, "parts", ()):
            yield f"| – {name} | {part.n} | {_percent(part.mape)} | {_percent(part.p90)} | |"


def _cells(score: Score) -> Iterator[tuple[str, int, str, str]]:
    """Yield (title, number of runs, mean error, error of nine in ten runs) of a set; none without rows."""
    title = score.truth_set.title
    if score.errors:
        yield title, score.errors.n, _percent(score.errors.mape), _percent(score.errors.p90)
    elif score.verdicts:
        v = score.verdicts
        wrong = f"{_percent(v.false_fits)} false fits, {_percent(v.false_rejections)} false rejections"
        yield f"{title} or not: right", v.n, _percent(v.accuracy), wrong
    elif score.ranking:
        r = score.ranking
        title = f"{title}: how much slower the chosen layout is than the best, {r.panels} panels"
        yield title, r.runs, _percent(r.regret), f"worst {_percent(r.regret_worst)}"


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def rows(score: Score) -> Iterator[str]:
    """Yield every row of a set, those with the largest errors first."""
    for judged in sorted(score.rows, key=lambda row: -abs(_error(score, row))):
        yield _row_line(score, judged)


def _error(score: Score, row: Judged) -> float:
    measured = row.measured
    if score.truth_set.quantity == "fits":
        return float(row.runs != measured.ran)
    if score.truth_set.quantity == "memory":
        return row.memory_bytes / measured.memory_bytes - 1 if measured.memory_bytes else 0.0
    return row.step_seconds / measured.step_seconds - 1 if measured.step_seconds else 0.0


def _row_line(score: Score, row: Judged) -> str:
    measured, layout, model = row.measured, row.case.layout, row.case.spec.model
    network: str = model.family
    if isinstance(model, ModelSpec):
        network = f"L{model.num_hidden_layers} h{model.hidden_size} s{model.seq_len}"
    time = f"{measured.step_seconds:.4g}" if measured.step_seconds else "-"
    memory = f"{measured.memory_bytes / 1e9:.2f}" if measured.memory_bytes else "-"
    return (
        f"{row.row.row_id:<28} {_error(score, row):>+8.1%} | s {row.step_seconds:.4g} true {time} | "
        f"GB {row.memory_bytes / 1e9:.2f} true {memory} {measured.memory_kind} "
        f"fits {row.runs} ran {measured.ran} | "
        f"{network} {row.case.spec.cluster.gpu} "
        f"x{layout.world_size} dp{layout.data_parallel} tp{layout.tensor_parallel} pp{layout.pipeline_parallel} "
        f"vp{layout.virtual_pipeline} cp{layout.context_parallel} ep{layout.expert_parallel} z{layout.zero_stage} "
        f"mbs{layout.micro_batch_size} ga{layout.gradient_accumulation_steps} {layout.activation_checkpointing}"
    )


def to_json(scores: list[Score], outcomes: Mapping[Table, Outcome], with_rows: bool) -> dict[str, Any]:
    """Return the scores by set, and the rows left out by file."""
    found: dict[str, Any] = {"sets": {}, "files": {}}
    for score in scores:
        entry: dict[str, Any] = {"title": score.truth_set.title, "quantity": score.truth_set.quantity}
        for name in ("errors", "verdicts", "ranking"):
            value = getattr(score, name)
            entry |= dataclasses.asdict(value) if value else {}
        if score.tau is not None:
            entry["tau"] = score.tau
        if score.parts:
            entry["parts"] = {name: dataclasses.asdict(part) for name, part in score.parts}
        entry |= {"others": score.truth_set.peer, "to_reach": score.truth_set.target}
        if score.picks:
            entry["picks"] = [dataclasses.asdict(pick) for pick in score.picks]
        if with_rows:
            entry["rows"] = [_row_json(row) for row in score.rows]
        found["sets"][score.truth_set.name] = entry
    for table, outcome in outcomes.items():
        found["files"][table.file] = {
            "missing": outcome.missing,
            "predicted": len(outcome.rows),
            "left_out": dict(outcome.skipped),
        }
    return found


def _row_json(row: Judged) -> dict[str, Any]:
    return {
        "row_id": row.row.row_id,
        "layout": dataclasses.asdict(row.case.layout),
        "predicted": {"step_seconds": row.step_seconds, "memory_bytes": row.memory_bytes, "fits": row.runs},
        "measured": dataclasses.asdict(row.measured),
    }
