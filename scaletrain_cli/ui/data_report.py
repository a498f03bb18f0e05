"""The screen of `data stats`: documents after each step, why documents were removed, lengths, duplicates, mixture."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scaletrain_cli.text import bytes_text, count_text, counted, listed, lost_text, percent_text, whole_text
from scaletrain_cli.ui.console import escaped_text, line, plain, show, stdout_console, titled_table

T = TypeVar("T")
_MOST_RULES = 12
_MOST_PLACES = 3


def show_report(report: Mapping[str, Any]) -> None:
    """Print the report to stdout."""
    console = stdout_console()
    for source in report["sources"]:
        _show_source(console, source)
    for duplicates in report["duplicates"]:
        _show_duplicates(console, duplicates)
    if report["mixture"]:
        _show_mixture(console, report["mixture"])
    if len(report["sources"]) > 1:
        line(console, Text.assemble(("all sources  ", "bold"), _amount(report["totals"])))


def images_text(images: Mapping[str, Any]) -> str:
    """Return the counts of the images of rows in a line."""
    places, distinct, size = (sum(images[name].values()) for name in ("places", "distinct", "bytes"))
    left_out = images["rows_left_out"]
    bad = f"; left out: {counted(left_out, 'row')} with bad images" if left_out else ""
    return (
        f"{counted(places, 'image')} in rows, {whole_text(distinct)} stored ({bytes_text(size)}), "
        f"{whole_text(images['tokens_per_image'])} tokens each{bad}"
    )


def _show_source(console: Console, source: Mapping[str, Any]) -> None:
    line(console, Text.assemble((plain(source["source"]), "bold"), f"  {plain(source['dataset'])}"))
    line(console, f"  {_amount(source)}")
    if source["rows"]:
        rows = source["rows"]
        left_out = f"{whole_text(rows['without_target'])} without a token in the loss, {whole_text(rows['too_long'])}"
        unusable = f", {whole_text(rows['unusable'])} that cannot be used" if rows["unusable"] else ""
        line(
            console,
            f"  {whole_text(rows['read'])} rows read; {whole_text(rows['truncated'])} truncated; left out: {left_out} "
            f"for their length{unusable}",
        )
        if rows["lost"]:
            line(console, f"  not in the tokens: {plain(lost_text(rows['lost']))}")
        if images := source["images"]:
            line(console, f"  {images_text(images)}")
            for place in images["bad"]:
                line(console, f"    {plain(place)}")
    for text in _facts(source):
        line(console, f"  {text}")
    removed = [rule for step in source["steps"] for rule in step["removed"]]
    bad = [failure for step in source["steps"] for failure in step["bad"]]
    for rows, table in ((source["steps"], _steps_table), (removed, _removed_table), (bad, _bad_table)):
        if rows:
            console.print()
            show(console, Padding(table(rows), (0, 0, 0, 2)))
    console.print()


def _amount(counts: Mapping[str, Any]) -> str:
    """Return documents and tokens of a source or of all sources."""
    documents, tokens = sum(counts["documents"].values()), counts["tokens"]
    parts = [
        counted(documents, "document"),
        f"{whole_text(tokens['train'])} training tokens, {whole_text(tokens['validation'])} validation tokens",
    ]
    if counts["bytes"]:
        parts.append(bytes_text(counts["bytes"]))
    if counts.get("tokens_per_byte"):
        parts.append(f"{counts['tokens_per_byte']:.3f} tokens per byte")
    return "; ".join(parts)


def _facts(source: Mapping[str, Any]) -> Iterator[str]:
    if source["lengths"] and source["lengths"]["ranges"]:
        lengths = source["lengths"]
        median = median_range(lengths["ranges"])
        yield (
            f"length: {whole_text(lengths['shortest'])} to {whole_text(lengths['longest'])} tokens, "
            f"median {whole_text(median['from'])} to {whole_text(median['to'])}"
        )
    if source["characters"] and source["characters"]["all"]:
        shares = character_shares(source["characters"])
        yield "characters: " + ", ".join(f"{share_text(share)} {name}" for name, share in shares if share)
    if source["unknown_tokens"]:
        share = source["unknown_tokens"] / sum(source["tokens"].values())
        yield f"unknown tokens: {whole_text(source['unknown_tokens'])} ({percent_text(share)})"
    if source["languages"]:
        kept, removed = (
            ", ".join(
                f"{plain(name) or 'unsure'} {whole_text(count)}" for name, count in source["languages"][kind].items()
            )
            for kind in ("kept", "removed")
        )
        yield f"languages: {kept or 'none'}" + (f"; removed: {removed}" if removed else "")


def character_shares(characters: Mapping[str, int]) -> list[tuple[str, float]]:
    """Return the share of each kind of characters in the text, with its name for people."""
    names = {
        "marks": "punctuation and symbols",
        "digits": "digits",
        "whitespace": "white space",
        "non_ascii": "beyond ASCII",
        "control": "control characters",
        "replacement": "replacement characters",
    }
    return [(name, characters[key] / characters["all"]) for key, name in names.items()]


def median_range(ranges: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
    """Return the range of lengths that half of the documents do not exceed."""
    return quantile([(span, span["documents"]) for span in ranges], 0.5)


def _steps_table(steps: Iterable[Mapping[str, Any]]) -> Table:
    table = titled_table(("step", "documents", "removed", "share", "characters", "tokens", "changed"), "lrrrrrw")
    for step in steps:
        gone = step["documents"] - step["documents_left"]
        table.add_row(
            escaped_text(step["name"]),
            whole_text(step["documents_left"]),
            Text(f"-{whole_text(gone)}", "yellow") if gone else "",
            share_text(gone / step["documents"]) if gone else "",
            characters_text(step),
            tokens_text(step),
            escaped_text(changes_text(step["counts"])),
        )
    return table


def characters_text(step: Mapping[str, Any]) -> str:
    """Return the characters that are left after a step; nothing for sources that are tokenized already."""
    return count_text(step["characters_left"]) if step["characters_left"] or not step["documents_left"] else ""


def tokens_text(step: Mapping[str, Any]) -> str:
    """Return about how many tokens are left after a step; nothing for a source without a character."""
    tokens = step["estimated_tokens_left"]
    return "" if tokens is None else f"~{count_text(tokens)}"


def changes_text(counts: Mapping[str, int]) -> str:
    """Return what a step has counted, by the names of its counts; languages are shown elsewhere."""
    return listed(
        (
            f"{name.partition('.')[2].replace('_', ' ')} {whole_text(count)}"
            for name, count in counts.items()
            if not name.startswith("language.")
        ),
        4,
    )


def _removed_table(rules: Sequence[Mapping[str, Any]]) -> Table:
    table = titled_table(("removed by", "documents", "share", "limit", "measured (10 %, median, 90 %)"), "lrrrw")
    largest = sorted(rules, key=lambda rule: -rule["documents"])[:_MOST_RULES]
    for rule in (candidate for candidate in rules if candidate in largest):
        table.add_row(
            escaped_text(rule["rule"]),
            whole_text(rule["documents"]),
            share_text(rule["share"]),
            escaped_text(value_text(rule["limit"])),
            escaped_text(measured_text(rule["measured"])),
        )
    if len(rules) > _MOST_RULES:
        table.add_row(f"and {counted(len(rules) - _MOST_RULES, 'more rule')}: see --html or --json", "", "", "", "")
    return table


def share_text(share: float) -> str:
    """Return a share as a percentage; ``<0.1 %`` for less that is not 0."""
    return "<0.1 %" if 0 < share < 0.0005 else percent_text(share)


def value_text(value: Any) -> str:
    """Return a measured value or a limit: a number with at most three digits after the point, or a text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return whole_text(int(value)) if value == int(value) else f"{value:.3g}"


def measured_text(measured: Mapping[str, int]) -> str:
    """Return quantiles of numbers, or the most frequent texts."""
    if (numbers := numbers_of(measured)) is None:
        return listed((f"{name} {whole_text(count)}" for name, count in measured.items()), 4)
    if not numbers:
        return ""
    return ", ".join(dict.fromkeys(value_text(quantile(numbers, share)) for share in (0.1, 0.5, 0.9)))


def numbers_of(measured: Mapping[str, int]) -> list[tuple[float, int]] | None:
    """Return (value, documents) in ascending order; None if some value is a text."""
    try:
        return sorted((float(value), count) for value, count in measured.items())
    except ValueError:
        return None


def quantile(values: Sequence[tuple[T, int]], share: float) -> T:
    """Return the value that a share of the documents does not exceed."""
    left = share * sum(count for _, count in values)
    for value, count in values:
        left -= count
        if left <= 0:
            return value
    return values[-1][0]


def _bad_table(bad: Iterable[Mapping[str, Any]]) -> Table:
    table = titled_table(("cannot be read", "documents", "first of them"), "lrw")
    for failure in bad:
        places = failure["places"]
        first = places[0]
        table.add_row(
            escaped_text(failure["reason"]),
            whole_text(failure["documents"]),
            escaped_text(f"{first['place']}: {first['problem']}"),
        )
        for other in places[1:_MOST_PLACES]:
            table.add_row("", "", escaped_text(f"{other['place']}: {other['problem']}"))
    return table


def _show_duplicates(console: Console, duplicates: Mapping[str, Any]) -> None:
    removed = duplicates["removed"]
    sizes = {int(size): count for size, count in duplicates["clusters_by_size"].items()}
    line(console, Text("duplicates", "bold"))
    line(
        console,
        f"  {whole_text(removed['exact'])} exact and {whole_text(removed['near'])} near duplicates removed, in "
        f"{counted(sum(sizes.values()), 'cluster')}"
        + (f" of up to {whole_text(max(sizes))} documents" if sizes else ""),
    )
    for text in _between(duplicates["removed_between_sources"]):
        line(console, f"  {plain(text)}")
    if "expected_recall" in duplicates:
        recall = [f"{percent_text(share)} at {at}" for at, share in duplicates["expected_recall"].items() if at in _AT]
        line(console, f"  expected recall, by similarity: {', '.join(recall)}")
    console.print()


def _between(counts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the duplicates between two sources, for each pair of them if there are several."""
    by_pair: dict[tuple[str, str], list[str]] = {}
    for removal in counts:
        kinds = by_pair.setdefault((removal["removed_from"], removal["kept_in"]), [])
        kinds.append(f"{whole_text(removal['documents'])} {removal['reason']}")
    if len(by_pair) < 2:
        return []
    return [f"removed from {gone}, kept in {kept}: {', '.join(kinds)}" for (gone, kept), kinds in by_pair.items()]


_AT = ("0.70", "0.80", "0.90")


def _show_mixture(console: Console, mixture: Mapping[str, Any]) -> None:
    samples = f"{counted(mixture['samples'], 'sequence')} in the run"
    if len(mixture["sources"]) == 1:
        (only,) = mixture["sources"]
        epochs = f"{epochs_text(only['epochs'])} epochs of {counted(only['sequences'], 'training sequence')}"
        line(console, f"  {samples}: {epochs}")
        return
    line(console, Text.assemble(("mixture  ", "bold"), samples))
    titles = [f"from step {whole_text(stage['first_step'])}" for stage in mixture["stages"]]
    table = titled_table(("source", *titles, "sequences", "share", "epochs"), "l" + "r" * (len(titles) + 3))
    for number, source in enumerate(mixture["sources"]):
        table.add_row(
            escaped_text(source["source"]),
            *(percent_text(stage["shares"][number]) for stage in mixture["stages"]),
            whole_text(source["samples"]),
            percent_text(source["share"]),
            epochs_text(source["epochs"]),
        )
    show(console, Padding(table, (0, 0, 0, 2)))
    console.print()


def epochs_text(epochs: float | None) -> str:
    """Return a number of epochs; nothing for a source without sequences."""
    return "" if epochs is None else f"{epochs:.2f}"
