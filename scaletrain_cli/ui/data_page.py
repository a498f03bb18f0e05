"""The report of prepared data as one HTML page without outside references: light and dark, also on paper."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from scaletrain_cli.text import bytes_text, count_text, counted, percent_text, visible, whole_text
from scaletrain_cli.ui.data_report import (
    changes_text,
    character_shares,
    characters_text,
    epochs_text,
    images_text,
    length_quantile,
    measured_text,
    numbers_of,
    share_text,
    tokens_text,
    value_text,
)

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2128; --soft: #59636e; --line: #d5dae0; --back: #fff; --panel: #f5f7f9;
  --bar: #3b76c4; --second: #e08a2e; --gone: #c94f4f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ee; --soft: #98a3af; --line: #38414b; --back: #14181d;
  --panel: #1d232a; --bar: #6ea3e8; --second: #e8a65b; --gone: #e57b7b; } }
* { box-sizing: border-box; }
html { font-size: 16px; }
body { font: .94rem/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 1080px;
  margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; }
h2 { margin: 2.6rem 0 .4rem; padding-top: .6rem; border-top: 2px solid var(--line); }
h3 { margin: 1.6rem 0 .4rem; font-size: 1.05rem; } p { margin: .3rem 0; } .soft { color: var(--soft); }
.path { font: .8rem ui-monospace, monospace; color: var(--soft); overflow-wrap: anywhere; }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; }
.tile { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .6rem 1rem;
  flex: 1 1 9rem; }
.tile b { display: block; font-size: 1.35rem; font-weight: 600; } .tile span { color: var(--soft); font-size: .85rem; }
.wide { overflow-x: auto; margin: 0 0 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .9rem .28rem 0; text-align: left; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { font-weight: 500; color: var(--soft); font-size: .85rem; white-space: nowrap; }
.n { text-align: right; white-space: nowrap; } td.bar { width: 34%; min-width: 8rem; vertical-align: middle; }
.track { display: flex; height: .8rem; border-radius: 3px; overflow: hidden; background: var(--panel); }
.track i { display: block; }
.a { background: var(--bar); } .b { background: var(--second); } .c { background: var(--gone); }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .3em 0 .8em; }
svg { display: block; max-width: 100%; } svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
details { margin: .1rem 0; } tr:has(+ tr.more) td { border-bottom: 0; padding-bottom: 0; }
summary { cursor: pointer; color: var(--bar); font-size: .9rem; }
pre { font: .78rem/1.45 ui-monospace, monospace; background: var(--panel); border-radius: 6px; padding: .5rem .7rem;
  margin: .2rem 0 .6rem; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: .8rem; } .pair > * { min-width: 0; }
code { font: .8rem ui-monospace, monospace; overflow-wrap: anywhere; }
@media (max-width: 640px) { .pair { grid-template-columns: 1fr; } }
@media print { :root { --ink: #000; --soft: #444; --line: #bbb; --back: #fff; --panel: #f4f4f4; --bar: #3b76c4;
  --second: #e08a2e; --gone: #c94f4f; } html { font-size: 11px; }
  body { max-width: none; margin: 0; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  tr, pre, .tile, svg { break-inside: avoid; } tr.more { break-inside: auto; } h2, h3 { break-after: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; } summary { list-style: none; } }
"""
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8" />
<meta name="viewport" content="width=device-width, initial-scale=1" />
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'" />
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
_HUES = (213, 32, 150, 340, 265, 185, 55, 0)  # of the sources of a mixture


def page(report: Mapping[str, Any], name: str) -> str:
    """Return the HTML document. ``name``: what the data are of, for the title."""
    body = [f"<h1>{_safe(name)}: data</h1>", _tiles(report)]
    if report["mixture"]:
        body += _mixture(report["mixture"])
    for source in report["sources"]:
        body += _source(source)
    for duplicates in report["duplicates"]:
        body += _duplicates(duplicates)
    return _PAGE.format(title=_safe(f"{name}: data"), style=_STYLE, body="\n".join(body))


def _safe(text: object) -> str:
    """Return text of documents and users for HTML, with control characters escaped."""
    return escape(visible(str(text)))


def _share(share: float) -> str:
    return _safe(share_text(share))


def _tiles(report: Mapping[str, Any]) -> str:
    totals = report["totals"]
    documents, tokens = sum(totals["documents"].values()), totals["tokens"]
    tiles = [
        (whole_text(documents), "documents" if totals["documents_read"] is None else "documents left"),
        (count_text(tokens["train"]), "training tokens"),
        (count_text(tokens["validation"]), "validation tokens"),
    ]
    if totals["documents_read"]:
        tiles.insert(0, (whole_text(totals["documents_read"]), "documents read"))
    if totals["bytes"]:
        tiles += [(bytes_text(totals["bytes"]), "text left"), (f"{totals['tokens_per_byte']:.3f}", "tokens per byte")]
    cells = (f'<div class="tile"><b>{_safe(value)}</b><span>{name}</span></div>' for value, name in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>'


def _mixture(mixture: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2>Mixture</h2><p class='soft'>{counted(mixture['samples'], 'sequence')} in the run</p>"
    yield _table(
        ["stage", *(each["source"] for each in mixture["sources"]), ""],
        (
            [
                f"from step {whole_text(stage['first_step'])}",
                *map(percent_text, stage["shares"]),
                _stack(stage["shares"]),
            ]
            for stage in mixture["stages"]
        ),
        "l" + "n" * len(mixture["sources"]) + "b",
    )
    yield _table(
        ["source", "sequences", "share", "epochs"],
        (
            [
                f"<span class='key' style='margin-left:0;background:{_hue(number)}'></span>{_safe(each['source'])}",
                whole_text(each["samples"]),
                percent_text(each["share"]),
                epochs_text(each["epochs"]),
            ]
            for number, each in enumerate(mixture["sources"])
        ),
        "lnnn",
    )


def _source(source: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2>{_safe(source['source'])}</h2><p class='path'>{_safe(source['dataset'])}</p>"
    tokens = source["tokens"]
    size = f"{bytes_text(source['bytes'])}, " if source["bytes"] else ""
    density = f", {source['tokens_per_byte']:.3f} tokens per byte" if source["tokens_per_byte"] else ""
    documents = counted(sum(source["documents"].values()), "document")
    split = f"{whole_text(tokens['train'])} training and {whole_text(tokens['validation'])} validation tokens"
    yield f"<p>{documents}, {size}{split}{density}</p>"
    if source["rows"]:
        names = {"read": "rows read", "truncated": "truncated", "without_target": "left out: no token in the loss"}
        names |= {"too_long": "left out: too long", "unusable": "left out: cannot be used"}
        names |= {"target_tokens": "tokens in the loss"}
        lines = [[name, whole_text(source["rows"][key])] for key, name in names.items()]
        lines += [[f"without {name}", whole_text(count)] for name, count in source["rows"]["lost"].items()]
        yield _table(["rows", ""], lines, "ln")
    if source["images"]:
        yield f"<p>{_safe(images_text(source['images']))}</p>"
    if source["steps"]:
        yield "<h3>After each step</h3>"
        yield _steps(source["steps"])
    yield from _removed(source["steps"])
    yield from _bad(source["steps"])
    yield from _lengths(source["lengths"])
    yield from _languages(source["languages"])
    yield from _characters(source)


def _steps(steps: Sequence[Mapping[str, Any]]) -> str:
    most = max(1, steps[0]["documents"])
    rows = []
    for step in steps:
        gone = step["documents"] - step["documents_left"]
        rows.append(
            [
                _safe(step["name"]),
                whole_text(step["documents_left"]),
                f"−{whole_text(gone)} ({_share(gone / step['documents'])})" if gone else "",
                characters_text(step),
                tokens_text(step),
                _bar([(step["documents_left"] / most, "a"), (gone / most, "c")]),
                _safe(changes_text(step["counts"])),
            ]
        )
    titles = ["step", "documents", "removed", "characters", "tokens", "share of the documents read", "changed"]
    return _table(titles, rows, "lnnnnbl")


def _removed(steps: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    rules = [rule for step in steps for rule in step["removed"]]
    if not rules:
        return
    yield "<h3>Why documents were removed</h3>"
    rows = []
    for rule in rules:
        rows.append(
            [
                f"<code>{_safe(rule['rule'])}</code>",
                whole_text(rule["documents"]),
                _share(rule["share"]),
                _safe(value_text(rule["limit"])),
                _safe(measured_text(rule["measured"])) + _measured(rule["measured"], rule["limit"]),
            ]
        )
        if rule["examples"]:
            examples = "".join(_example(each) for each in rule["examples"])
            count = counted(len(rule["examples"]), "example")
            rows.append([f"<details><summary>{count}</summary>{examples}</details>"])
    yield _table(["rule", "documents", "share", "limit", "measured: 10 %, median, 90 %"], rows, "lnnnl")


def _example(example: Mapping[str, Any]) -> str:
    measured = _safe(value_text(example["measured"]))
    return f"<p class='path'>{_safe(example['place'])} · measured {measured}</p><pre>{_safe(example['text'])}</pre>"


_BINS, _WIDTH, _HEIGHT = 24, 200, 30


def _measured(measured: Mapping[str, int], limit: Any) -> str:
    """Return a histogram of numbers, with a line at the limit; nothing for texts and for a single value."""
    values = numbers_of(measured)
    if not values or len(values) < 2:
        return ""
    numbers = [value for value, _ in values]
    if isinstance(limit, int | float):
        numbers.append(float(limit))
    low, high = min(numbers), max(numbers)
    logarithmic = low > 0 and high / low > 50

    def place(value: float) -> float:
        if logarithmic:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    bins = [0] * _BINS
    for value, count in values:
        bins[min(_BINS - 1, int(place(value) * _BINS))] += count
    width = _WIDTH / _BINS
    bars = "".join(
        f'<rect x="{number * width:.1f}" y="{_HEIGHT * (1 - count / max(bins)):.1f}" width="{width - 1:.1f}" '
        f'height="{_HEIGHT * count / max(bins):.1f}" fill="var(--bar)" />'
        for number, count in enumerate(bins)
        if count
    )
    mark = ""
    if isinstance(limit, int | float):
        at = place(float(limit)) * (_WIDTH - 2) + 1
        mark = f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{_HEIGHT}" stroke="var(--gone)" stroke-width="2" />'
    scale = f"{value_text(low)} to {value_text(high)}{', logarithmic' if logarithmic else ''}"
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f"<title>{_safe(scale)}; the line is the limit</title>{bars}{mark}</svg>"
    )


def _bad(steps: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    bad = [each for step in steps for each in step["bad"]]
    if not bad:
        return
    yield "<h3>Documents that cannot be read</h3>"
    rows = []
    for each in bad:
        places = "\n".join(f"{place['place']}: {place['problem']}" for place in each["places"])
        more = each["documents"] - len(each["places"])
        more_text = f"\nand {whole_text(more)} more" if more else ""
        rows.append(
            [
                f"<code>{_safe(each['reason'])}</code>",
                whole_text(each["documents"]),
                f"<pre>{_safe(places + more_text)}</pre>",
            ]
        )
    yield _table(["reason", "documents", "places"], rows, "lnl")


def _lengths(lengths: Mapping[str, Any] | None) -> Iterator[str]:
    if not lengths or not lengths["ranges"]:
        return
    ranges, height, width = lengths["ranges"], 120, 1000
    documents, tokens = (max(1, sum(each[name] for each in ranges)) for name in ("documents", "tokens"))
    shares = [(each["documents"] / documents, each["tokens"] / tokens) for each in ranges]
    most, slot = max(max(pair) for pair in shares), width / len(ranges)
    parts = []
    for number, (each, pair) in enumerate(zip(ranges, shares, strict=True)):
        title = (
            f"{whole_text(each['from'])} to {whole_text(each['to'])} tokens: {counted(each['documents'], 'document')} "
            f"({_share(pair[0])}), {counted(each['tokens'], 'token')} ({_share(pair[1])})"
        )
        bars = "".join(
            f'<rect x="{number * slot + 2 + side * (slot - 4) / 2:.1f}" y="{height * (1 - share / most):.1f}" '
            f'width="{(slot - 4) / 2:.1f}" height="{height * share / most:.1f}" fill="var(--{color})" />'
            for side, (share, color) in enumerate(zip(pair, ("bar", "second"), strict=True))
        )
        middle, name = (number + 0.5) * slot, _short(each["from"])
        label = f'<text x="{middle:.1f}" y="{height + 14}" text-anchor="middle">{name}</text>'
        parts.append(f"<g><title>{title}</title>{bars}{label}</g>")
    median = length_quantile(ranges, 0.5)
    yield "<h3>Lengths of documents in tokens</h3>"
    yield (
        f"<p>{whole_text(lengths['shortest'])} to {whole_text(lengths['longest'])} tokens, half of the documents up to "
        f"{whole_text(median['to'])}. <span class='key a'></span>share of the documents"
        "<span class='key b'></span>share of the tokens, by least length</p>"
    )
    yield f'<svg viewBox="0 0 {width} {height + 20}" width="100%" role="img">{"".join(parts)}</svg>'


def _short(count: int) -> str:
    return whole_text(count) if count < 10_000 else count_text(count).replace(" ", "")


def _languages(languages: Mapping[str, Mapping[str, int]] | None) -> Iterator[str]:
    if not languages:
        return
    total = max(1, sum(sum(counts.values()) for counts in languages.values()))
    yield "<h3>Languages of documents</h3>"
    names = dict.fromkeys([*languages["kept"], *languages["removed"]])
    rows = []
    for name in sorted(names, key=lambda name: -(languages["kept"].get(name, 0) + languages["removed"].get(name, 0))):
        kept, removed = (languages[kind].get(name, 0) for kind in ("kept", "removed"))
        bar = _bar([(kept / total, "a"), (removed / total, "c")])
        rows.append([_safe(name) or "too uncertain", whole_text(kept), whole_text(removed), bar])
    yield _table(["language", "kept", "removed", "share"], rows, "lnnb")


def _characters(source: Mapping[str, Any]) -> Iterator[str]:
    characters = source["characters"]
    if not characters or not characters["all"]:
        return
    yield "<h3>Characters and unknown tokens</h3>"
    rows = [[name, _share(share), _bar([(share, "a")])] for name, share in character_shares(characters)]
    if source["unknown_tokens"] is not None:
        share = source["unknown_tokens"] / max(1, sum(source["tokens"].values()))
        rows.append([f"unknown tokens: {whole_text(source['unknown_tokens'])}", _share(share), _bar([(share, "c")])])
    yield _table(["kind", "share", ""], rows, "lnb")


def _duplicates(duplicates: Mapping[str, Any]) -> Iterator[str]:
    removed = duplicates["removed"]
    yield "<h2>Duplicates</h2>"
    yield f"<p>{whole_text(removed['exact'])} exact and {whole_text(removed['near'])} near duplicates were removed.</p>"
    if duplicates["removed_between_sources"]:
        yield _table(
            ["removed from", "kept in", "kind", "documents"],
            (
                [_safe(each["removed_from"]), _safe(each["kept_in"]), each["reason"], whole_text(each["documents"])]
                for each in duplicates["removed_between_sources"]
            ),
            "llln",
        )
    if duplicates["clusters_by_size"]:
        yield "<h3>Clusters by number of documents</h3>"
        yield _counts(["documents of a cluster", "clusters", ""], _by_size(duplicates["clusters_by_size"]))
        yield from _clusters(duplicates["largest_clusters"])
    if "expected_recall" in duplicates:
        yield "<h3>Pairs of near duplicates</h3>"
        found = duplicates["similar_pairs_by_similarity"]
        rows = [
            [f"{float(at):.2f}", percent_text(share), _bar([(share, "a")]), whole_text(found.get(at, 0))]
            for at, share in duplicates["expected_recall"].items()
        ]
        yield _table(["similarity", "expected recall", "", "pairs found, from this similarity on"], rows, "lnbn")
        yield from _pairs(duplicates["examples"])


def _by_size(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers of clusters in ranges of sizes: 2, 3, 4 to 7, 8 to 15, ..."""
    found: dict[str, int] = {}
    for text, count in sizes.items():
        size = int(text)
        power = 1 << (size.bit_length() - 1)
        name = text if size < 4 else f"{whole_text(power)} to {whole_text(2 * power - 1)}"
        found[name] = found.get(name, 0) + count
    return found


def _clusters(clusters: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"<details><summary>The {counted(len(clusters), 'largest cluster')}</summary>"
    for each in clusters:
        yield f"<p class='path'>{counted(each['documents'], 'document')} · kept: {_safe(each['kept']['place'])}</p>"
        yield f"<pre>{_safe(each['kept']['text'])}</pre>"
    yield "</details>"


def _pairs(examples: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not examples:
        return
    yield f"<details><summary>{counted(len(examples), 'example')}</summary>"
    for each in examples:
        sides = "".join(
            f"<div><p class='path'>{_safe(each[side]['place'])}</p><pre>{_safe(each[side]['text'])}</pre></div>"
            for side in ("first", "second")
        )
        yield f"<p>similarity {each['similarity']:.3f}</p><div class='pair'>{sides}</div>"
    yield "</details>"


def _counts(titles: Sequence[str], counts: Mapping[str, int]) -> str:
    most = max(counts.values())
    rows = ([_safe(name), whole_text(count), _bar([(count / most, "a")])] for name, count in counts.items())
    return _table(titles, rows, "lnb")


def _stack(shares: Sequence[float]) -> str:
    parts = (
        f'<i style="width:{100 * share:.2f}%;background:{_hue(n)}"></i>' for n, share in enumerate(shares) if share
    )
    return f'<div class="track">{"".join(parts)}</div>'


def _hue(source: int) -> str:
    return f"hsl({_HUES[source % len(_HUES)]} 55% {(55, 40, 70)[source // len(_HUES) % 3]}%)"


def _bar(parts: Iterable[tuple[float, str]]) -> str:
    filled = "".join(f'<i class="{color}" style="width:{100 * share:.2f}%"></i>' for share, color in parts if share)
    return f'<div class="track">{filled}</div>'


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], kinds: str) -> str:
    """Return a table; cells are HTML. ``kinds``: l text, n number, b bar. A row of one cell has all columns."""
    classes = {"l": "", "n": ' class="n"', "b": ' class="bar"'}
    head = "".join(f"<th{classes[kind]}>{_safe(title)}</th>" for title, kind in zip(titles, kinds, strict=True))
    body = "\n".join(
        f"<tr>{''.join(f'<td{classes[kind]}>{cell}</td>' for cell, kind in zip(row, kinds, strict=True))}</tr>"
        if len(row) > 1
        else f'<tr class="more"><td colspan="{len(titles)}">{row[0]}</td></tr>'
        for row in rows
    )
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'
