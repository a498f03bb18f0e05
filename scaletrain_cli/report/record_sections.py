"""The sections of the page of one run about its record: goodput, attempts, nodes, evaluations, spec and events."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scaletrain_cli.markup import details, plain_value, safe, stacked_bar, table, time_text, value_text
from scaletrain_cli.text import counted, percent_text, seconds_text, whole_text

_ROLLBACK_CLASS = {"rollback": "rollback-time"}


def label(name: str) -> str:
    """Return the name of a figure as words."""
    return safe(_LABELS.get(name, name.replace("_", " ")))


_LABELS = {
    "mfu": "MFU",
    "tokens_per_second": "tokens/s",
    "samples_per_second": "samples/s",
    "exposed_communication": "exposed communication",
    "restore": "set-up",
    "data": "waiting for data",
    "data_wait": "waiting for data",
    "peak": "peak of the fullest rank",
    "bytes": "size",
    "seconds": "time to save",
    "blocked_seconds": "training waits for a save",
    "interval_time": "time between saves",
    "interval": "steps between saves",
    "whole_run": "whole run",
}


def goodput_section(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the shares of the time, as a bar and a table."""
    goodput = run["status"]["goodput"]
    if goodput is None or goodput["wall_seconds"] <= 0:
        return
    wall = goodput["wall_seconds"]
    parts = {name.removesuffix("_seconds"): value for name, value in goodput.items() if name.endswith("_seconds")}
    parts.pop("wall")
    planned = next((row["planned"] for row in run["compared"] if row["topic"] == "goodput"), None)
    beside = f"; {percent_text(planned)} planned" if planned else ""
    yield f"<p>{percent_text(goodput['goodput'])} of {seconds_text(wall)} trained steps that were kept{beside}.</p>"
    order = ["productive", *sorted((name for name in parts if name != "productive"), key=lambda name: -parts[name])]
    bar = [
        (
            _ROLLBACK_CLASS.get(name, name),
            parts[name] / wall,
            f"{name.replace('_', ' ')}: {percent_text(parts[name] / wall)}",
        )
        for name in order
    ]
    yield f'<div class="thick">{stacked_bar(bar, "shares of the time")}</div>'
    rows = [
        [
            f'<span class="swatch {_ROLLBACK_CLASS.get(name, name)}"></span>{label(name)}',
            safe(seconds_text(parts[name])),
            percent_text(parts[name] / wall),
            _MEANINGS.get(name, ""),
        ]
        for name in order
        if parts[name] > 0
    ]
    yield table(["activity", "time", "share", ""], rows, "lnnl")


_MEANINGS = {
    "productive": "steps that were kept, without waiting for data",
    "data": "training waits for its data",
    "save": "a checkpoint blocks training",
    "restore": "set-up of attempts, with loading",
    "evaluation": "validation",
    "rollback": "loading a checkpoint within an attempt",
    "lost_work": "steps that a crash or a rollback undid",
    "idle": "between attempts",
    "suspended": "all processes were stopped, by the scheduler or with the machine",
    "other": "not attributed",
}


def attempts_section(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the attempts over time, and how each ended."""
    attempts: Sequence[Mapping[str, Any]] = run["attempts"]
    if not attempts:
        return
    start, end = attempts[0]["started"], max(attempt["until"] for attempt in attempts)
    width = max(1e-9, end - start)
    bars = []
    for one in attempts:
        ended_well = one["is_open"] or one["reason"] in (None, "preempted", "resize", "idle")
        kind = "done" if one["reason"] == "done" else "" if ended_well else "bad"
        left, size = 100 * (one["started"] - start) / width, 100 * (one["until"] - one["started"]) / width
        title = safe(f"attempt {one['number']}: {one['reason'] or 'runs'}")
        place = f"left:{left:.2f}%;width:{size:.2f}%"
        bars.append(f'<i class="{kind}" style="{place}" title="{title}">{one["number"]}</i>')
    yield f'<div class="timeline" role="img" aria-label="attempts over time">{"".join(bars)}</div>'
    rows = [
        [
            str(one["number"]),
            safe(time_text(one["started"])),
            safe(seconds_text(max(0.0, one["until"] - one["started"]))),
            "" if one["from_step"] is None else whole_text(one["from_step"]),
            "" if one["last_step"] is None else whole_text(one["last_step"]),
            safe("running" if one["is_open"] else one["reason"] or "end not recorded"),
            safe("; ".join(text for text in (one["why"], one["decision"]) if text)),
        ]
        for one in attempts
    ]
    yield table(["attempt", "began (UTC)", "lasted", "from step", "to step", "end", "why"], rows, "ntnnntl")


def nodes_section(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the nodes with the attempts that they took part in, their failures, and why they are excluded."""
    if not run["nodes"]:
        return
    rows = []
    for node in run["nodes"]:
        failures = "; ".join(
            f"attempt {one['attempt']}: rank {one['rank']} "
            + (f"ended by {one['signal']}" if one["signal"] else f"exited with {one['exit_code']}")
            for one in node["failures"]
        )
        excluded = node["excluded"]
        until = f"excluded until {time_text(excluded['expires'])}: {excluded['message']}" if excluded else ""
        rows.append(
            [
                safe(node["node"]),
                safe(_ranges(node["attempts"])),
                safe(_ranges(node["ranks"])),
                safe(failures),
                safe(until),
            ]
        )
    yield table(["node", "attempts", "ranks", "failed first", "excluded"], rows, "tttll")
    if run["not_shown"]:
        yield f"<p class='soft'>{counted(run['not_shown'], 'more node')} without failures.</p>"


def _ranges(numbers: Sequence[int]) -> str:
    """Return ``1-3, 5``."""
    parts: list[str] = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(f"{run[0]}" if len(run) == 1 else f"{run[0]}–{run[-1]}")
    return ", ".join(parts)


def profiles_section(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield each profile: the time of a step by cause beside the plan, and the kernels that take the most."""
    for profile in run["profiles"]:
        last = profile["first_step"] + profile["steps"] - 1
        ranks = ", ".join(map(str, profile["ranks"][:8]))
        steps = f"steps {profile['first_step']:,} to {last:,}"
        yield f"<h3>Attempt {profile['attempt']}, {steps}, ranks {safe(ranks)}</h3>"
        measured, planned = profile["measured"], profile["planned"]
        whole = measured.get("step", {}).get("median") or 0.0
        rows = [
            [
                label(name),
                safe(value_text(planned.get(name), "seconds")),
                safe(value_text(spread["median"], "seconds")),
                percent_text(spread["median"] / whole) if whole else "",
            ]
            for name, spread in sorted(measured.items(), key=lambda pair: -pair[1]["median"])
            if spread["median"] or planned.get(name)
        ]
        if rows:
            yield table(["cause", "planned", "measured", "share"], rows, "lnnn", "Seconds of a step")
        else:
            yield f"<p class='soft'>{safe(profile['state'])}; no rank has written its figures.</p>"
        for figures in profile["by_rank"][:2]:
            kind = "top_kernels" if figures.get("top_kernels") else "top_operators"
            tops = figures.get(kind) or []
            cells = (
                [safe(row["name"]), safe(value_text(row["seconds"], "seconds")), f"{row['count']:.3g}"] for row in tops
            )
            if tops:
                title = "kernel" if kind == "top_kernels" else "operator"
                summary = f"Rank {figures['rank']}: the {title}s that take the most"
                yield details(summary, table([title, "per step", "count"], cells, "lnn"))


def evaluations_section(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the results of tasks on checkpoints, and the measures of validations."""
    done = [one for one in run["evaluations"] if one["metrics"] or one["errors"] or one["state"] != "done"]
    names = list(dict.fromkeys(name for one in done for name in one["metrics"]))[:12]
    if done:
        rows = (
            [
                whole_text(one["step"]),
                safe(one["state"]),
                *(safe(value_text(one["metrics"].get(name), "")) for name in names),
            ]
            for one in done
        )
        yield table(["step", "state", *names], rows, "nl" + "n" * len(names), "Tasks on checkpoints")
    validated = [row for row in run["curves"]["validations"] if row["measures"]]
    if validated:
        measures = list(dict.fromkeys(name for row in validated for name in row["measures"]))[:12]
        rows = (
            [
                whole_text(row["step"]),
                value_text(row["loss"], ""),
                *(value_text(row["measures"].get(name), "") for name in measures),
            ]
            for row in validated[-20:]
        )
        yield table(["step", "loss", *measures], rows, "n" * (2 + len(measures)), "Validations")


def spec_section(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of the file, the changes of each revision, and all keys."""
    spec = run["spec"]
    given = [row for row in spec["keys"] if row["place"]]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    yield f"<p class='soft'>{safe(versions)}; in {safe(run['status']['run_dir'])}</p>"
    if given:
        yield table(
            ["key", "value", "line"],
            (
                [
                    f"<code>{safe(row['key'])}</code>",
                    f"<code>{safe(plain_value(row['value']))}</code>",
                    f"<code>{safe(row['place'].rpartition('/')[2])}</code>",
                ]
                for row in given
            ),
            "tlt",
            "Keys of the file",
        )
    for revision in spec["revisions"]:
        overrides = f": {', '.join(revision['overrides'])}" if revision["overrides"] else ""
        yield f"<h3>Revision {revision['revision']}, {time_text(revision['created'])} UTC{safe(overrides)}</h3>"
        lines = []
        for change in revision["changed"]:
            for mark, tag, value in (("-", "del", change["before"]), ("+", "ins", change["after"])):
                lines.append(f"<{tag}>{mark} {safe(change['key'])}: {safe(plain_value(value))}</{tag}>")
        differences = "\n".join(lines) or "no key of the spec"
        yield f"<pre>{differences}</pre>"
    rows = "\n".join(f"{safe(row['key'])}: {safe(plain_value(row['value']))}" for row in spec["keys"])
    yield details("All keys with defaults", f"<pre>{rows}</pre>")


def events_section(run: Mapping[str, Any]) -> Iterator[str]:
    rows = run["events"]["rows"]
    if rows:
        body = table(
            ["time (UTC)", "event", ""],
            ([safe(time_text(row["time"])), safe(row["event"]), safe(row["text"])] for row in rows),
            "ttl",
        )
        left = run["events"]["not_shown"]
        more = (
            f"<p class='soft'>{counted(left, 'event')} not shown; <code>scaletrain events</code> shows all.</p>"
            if left
            else ""
        )
        yield details(counted(len(rows), "event"), body + more, is_open=len(rows) <= 60)
