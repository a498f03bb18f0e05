"""The report of prepared data as one HTML page without outside references: light and dark, also on paper."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from scaletrain_cli.markup import axis_place, details, document, safe, stacked_bar, table, tiles
from scaletrain_cli.text import bytes_text, count_text, counted, percent_text, whole_text
from scaletrain_cli.ui.data_report import (
    changes_text,
    character_shares,
    characters_text,
    epochs_text,
    images_text,
    measured_text,
    median_range,
    numbers_of,
    share_text,
    tokens_text,
    value_text,
)


def page(report: Mapping[str, Any], name: str) -> str:
    """Return the HTML document. ``name``: what the data are of, for the title."""
    body = [f"<h1>{safe(name)}: data</h1>", tiles(_tiles(report))]
    if report["mixture"]:
        body += _mixture(report["mixture"])
    for source in report["sources"]:
        body += _source(source)
    for duplicates in report["duplicates"]:
        body += _duplicates(duplicates)
    return document(f"{name}: data", body)


def _share(share: float) -> str:
    return safe(share_text(share))


def _tiles(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    totals = report["totals"]
    read, documents, tokens = totals["documents_read"], sum(totals["documents"].values()), totals["tokens"]
    if read:
        yield "documents read", whole_text(read), "", ""
    yield "documents" if read is None else "documents left", whole_text(documents), "", ""
    yield "training tokens", count_text(tokens["train"]), "", ""
    yield "validation tokens", count_text(tokens["validation"]), "", ""
    if totals["bytes"]:
        yield "text left", bytes_text(totals["bytes"]), "", ""
        yield "tokens per byte", f"{totals['tokens_per_byte']:.3f}", "", ""


def _mixture(mixture: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2>Mixture</h2><p class='soft'>{counted(mixture['samples'], 'sequence')} in the run</p>"
    yield table(
        ["stage", *(source["source"] for source in mixture["sources"]), ""],
        (
            [
                f"from step {whole_text(stage['first_step'])}",
                *map(percent_text, stage["shares"]),
                _bar(*((_color(number), share) for number, share in enumerate(stage["shares"]))),
            ]
            for stage in mixture["stages"]
        ),
        "t" + "n" * len(mixture["sources"]) + "b",
    )
    yield table(
        ["source", "sequences", "share", "epochs"],
        (
            [
                f'<span class="swatch {_color(number)}"></span>{safe(source["source"])}',
                whole_text(source["samples"]),
                percent_text(source["share"]),
                epochs_text(source["epochs"]),
            ]
            for number, source in enumerate(mixture["sources"])
        ),
        "lnnn",
    )


def _source(source: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2>{safe(source['source'])}</h2><p class='path'>{safe(source['dataset'])}</p>"
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
        yield table(["rows", ""], lines, "ln")
    if source["images"]:
        yield f"<p>{safe(images_text(source['images']))}</p>"
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
                safe(step["name"]),
                whole_text(step["documents_left"]),
                f"−{whole_text(gone)} ({_share(gone / step['documents'])})" if gone else "",
                characters_text(step),
                tokens_text(step),
                _bar(("c0", step["documents_left"] / most), ("c5", gone / most)),
                safe(changes_text(step["counts"])),
            ]
        )
    titles = ["step", "documents", "removed", "characters", "tokens", "share of the documents read", "changed"]
    return table(titles, rows, "lnnnnbl")


def _removed(steps: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    rules = [rule for step in steps for rule in step["removed"]]
    if not rules:
        return
    yield "<h3>Why documents were removed</h3>"
    rows = []
    for rule in rules:
        rows.append(
            [
                f"<code>{safe(rule['rule'])}</code>",
                whole_text(rule["documents"]),
                _share(rule["share"]),
                safe(value_text(rule["limit"])),
                safe(measured_text(rule["measured"])) + _measured(rule["measured"], rule["limit"]),
            ]
        )
        if rule["examples"]:
            texts = (_text(f"{e['place']} · measured {value_text(e['measured'])}", e["text"]) for e in rule["examples"])
            rows.append([_texts(counted(len(rule["examples"]), "example"), texts)])
    yield table(["rule", "documents", "share", "limit", "measured: 10 %, median, 90 %"], rows, "lnnnl")


def _text(place: str, text: str) -> str:
    return f'<p class="path">{safe(place)}</p><pre>{safe(text)}</pre>'


def _texts(summary: str, texts: Iterable[str]) -> str:
    """Return texts of documents that open on a click, and are shown on paper."""
    return f'<div class="texts">{details(summary, "".join(texts))}</div>'


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

    bins = [0] * _BINS
    for value, count in values:
        place = axis_place(value, low, high, logarithmic=logarithmic)
        bins[min(_BINS - 1, int(place * _BINS))] += count
    width = _WIDTH / _BINS
    bars = "".join(
        _column(number * width, width - 1, count / max(bins), _HEIGHT, "c0")
        for number, count in enumerate(bins)
        if count
    )
    if isinstance(limit, int | float):
        bars += _column(axis_place(limit, low, high, logarithmic=logarithmic) * (_WIDTH - 2), 2, 1.0, _HEIGHT, "c5")
    scale = f"{value_text(low)} to {value_text(high)}{', logarithmic' if logarithmic else ''}"
    return (
        f'<svg class="columns" width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f"<title>{safe(scale)}; the line is the limit</title>{bars}</svg>"
    )


def _column(x: float, width: float, share: float, height: float, color: str) -> str:
    """Return a column whose share of the height is filled from below."""
    top, filled = height * (1 - share), height * share
    return f'<rect class="{color}" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{filled:.1f}" />'


def _bad(steps: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    bad = [failure for step in steps for failure in step["bad"]]
    if not bad:
        return
    yield "<h3>Documents that cannot be read</h3>"
    rows = []
    for failure in bad:
        lines = [safe(f"{place['place']}: {place['problem']}") for place in failure["places"]]
        if more := failure["documents"] - len(failure["places"]):
            lines.append(f"and {whole_text(more)} more")
        places = "\n".join(lines)
        rows.append(
            [f"<code>{safe(failure['reason'])}</code>", whole_text(failure["documents"]), f"<pre>{places}</pre>"]
        )
    yield table(["reason", "documents", "places"], rows, "lnl")


def _lengths(lengths: Mapping[str, Any] | None) -> Iterator[str]:
    if not lengths or not lengths["ranges"]:
        return
    ranges, height, width = lengths["ranges"], 120, 1000
    documents, tokens = (max(1, sum(span[name] for span in ranges)) for name in ("documents", "tokens"))
    shares = [(span["documents"] / documents, span["tokens"] / tokens) for span in ranges]
    most, slot = max(max(pair) for pair in shares), width / len(ranges)
    parts = []
    for number, (span, pair) in enumerate(zip(ranges, shares, strict=True)):
        title = (
            f"{whole_text(span['from'])} to {whole_text(span['to'])} tokens: {counted(span['documents'], 'document')} "
            f"({_share(pair[0])}), {counted(span['tokens'], 'token')} ({_share(pair[1])})"
        )
        bars = "".join(
            _column(number * slot + 2 + side * (slot - 4) / 2, (slot - 4) / 2, share / most, height, f"c{side}")
            for side, share in enumerate(pair)
        )
        middle, count = (number + 0.5) * slot, span["from"]
        name = whole_text(count) if count < 10_000 else count_text(count).replace(" ", "")
        label = f'<text x="{middle:.1f}" y="{height + 14}" text-anchor="middle">{name}</text>'
        parts.append(f"<g><title>{title}</title>{bars}{label}</g>")
    median = median_range(ranges)
    yield "<h3>Lengths of documents in tokens</h3>"
    yield (
        f"<p>{whole_text(lengths['shortest'])} to {whole_text(lengths['longest'])} tokens, half of the documents up to "
        f"{whole_text(median['to'])}. <span class='swatch c0'></span>share of the documents, "
        "<span class='swatch c1'></span>share of the tokens, by least length</p>"
    )
    yield f'<svg class="columns" viewBox="0 0 {width} {height + 20}" width="100%" role="img">{"".join(parts)}</svg>'


def _languages(languages: Mapping[str, Mapping[str, int]] | None) -> Iterator[str]:
    if not languages:
        return
    total = max(1, sum(sum(counts.values()) for counts in languages.values()))
    yield "<h3>Languages of documents</h3>"
    names = dict.fromkeys([*languages["kept"], *languages["removed"]])
    rows = []
    for name in sorted(names, key=lambda name: -(languages["kept"].get(name, 0) + languages["removed"].get(name, 0))):
        kept, removed = (languages[kind].get(name, 0) for kind in ("kept", "removed"))
        bar = _bar(("c0", kept / total), ("c5", removed / total))
        rows.append([safe(name) or "too uncertain", whole_text(kept), whole_text(removed), bar])
    yield table(["language", "kept", "removed", "share"], rows, "lnnb")


def _characters(source: Mapping[str, Any]) -> Iterator[str]:
    characters = source["characters"]
    if not characters or not characters["all"]:
        return
    yield "<h3>Characters and unknown tokens</h3>"
    rows = [[name, _share(share), _bar(("c0", share))] for name, share in character_shares(characters)]
    if source["unknown_tokens"] is not None:
        share = source["unknown_tokens"] / max(1, sum(source["tokens"].values()))
        rows.append([f"unknown tokens: {whole_text(source['unknown_tokens'])}", _share(share), _bar(("c5", share))])
    yield table(["kind", "share", ""], rows, "lnb")


def _duplicates(duplicates: Mapping[str, Any]) -> Iterator[str]:
    removed = duplicates["removed"]
    yield "<h2>Duplicates</h2>"
    yield f"<p>{whole_text(removed['exact'])} exact and {whole_text(removed['near'])} near duplicates were removed.</p>"
    if duplicates["removed_between_sources"]:
        yield table(
            ["removed from", "kept in", "kind", "documents"],
            (
                [safe(pair["removed_from"]), safe(pair["kept_in"]), pair["reason"], whole_text(pair["documents"])]
                for pair in duplicates["removed_between_sources"]
            ),
            "llln",
        )
    if duplicates["clusters_by_size"]:
        yield "<h3>Clusters by number of documents</h3>"
        sizes: dict[str, int] = {}  # in ranges: 2, 3, 4 to 7, 8 to 15, ...
        for size, count in duplicates["clusters_by_size"].items():
            power = 1 << (int(size).bit_length() - 1)
            name = size if int(size) < 4 else f"{whole_text(power)} to {whole_text(2 * power - 1)}"
            sizes[name] = sizes.get(name, 0) + count
        yield table(
            ["documents of a cluster", "clusters", ""],
            ([name, whole_text(count), _bar(("c0", count / max(sizes.values())))] for name, count in sizes.items()),
            "lnb",
        )
        clusters = duplicates["largest_clusters"]
        kept = ((f"{counted(cluster['documents'], 'document')} · kept: ", cluster["kept"]) for cluster in clusters)
        texts = (_text(f"{what}{text['place']}", text["text"]) for what, text in kept)
        yield _texts(f"The {counted(len(clusters), 'largest cluster')}", texts)
    if "expected_recall" in duplicates:
        yield "<h3>Pairs of near duplicates</h3>"
        pairs = duplicates["similar_pairs_by_similarity"]
        rows = [
            [f"{float(at):.2f}", percent_text(share), _bar(("c0", share)), whole_text(pairs.get(at, 0))]
            for at, share in duplicates["expected_recall"].items()
        ]
        yield table(["similarity", "expected recall", "", "pairs found, from this similarity on"], rows, "lnbn")
        if examples := duplicates["examples"]:
            yield _texts(counted(len(examples), "example"), map(_pair, examples))


def _pair(example: Mapping[str, Any]) -> str:
    """Return two texts beside each other."""
    sides = "".join(
        f"<div>{_text(example[side]['place'], example[side]['text'])}</div>" for side in ("first", "second")
    )
    return f'<p>similarity {example["similarity"]:.3f}</p><div class="sides">{sides}</div>'


def _color(source: int) -> str:
    """Return the CSS class of a source of a mixture; paler from the ninth on."""
    return f"c{source % 8}{('', ' pale', ' paler')[source // 8 % 3]}"


def _bar(*parts: tuple[str, float]) -> str:
    """Return a bar of (CSS class, share) parts."""
    return stacked_bar(((color, share, share_text(share)) for color, share in parts), "shares")
