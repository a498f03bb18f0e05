"""The report of a prepared source: documents after each step, what was removed and why, and the text that is left.

It is put together from what the steps have recorded, and is the same for any number of workers.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from scaletrain_cli.data.drafts import write_whole
from scaletrain_cli.data.duplicates import Corpus
from scaletrain_cli.data.pipeline.chain import Chain, Work
from scaletrain_cli.data.pipeline.decisions import Decisions, read_decisions
from scaletrain_cli.data.pipeline.shards import STATISTICS, length_range_end, read_shard_info
from scaletrain_cli.data.pipeline.tasks import Task
from scaletrain_cli.data.sources.formats import reader_of
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import undamaged_document

SCHEMA = "scaletrain.dataset-report/v1"
NAME = "report.json"
_EXAMPLES_PER_RULE = 3
_PLACES_PER_REASON = 50
# The number of a line is found by reading the file up to there.
_READ_FOR_LINE = {True: 4 << 20, False: 256 << 20}  # remote: bytes


def write_report(source: Work, prepared: Sequence[Work]) -> None:
    """Write the report of a source into its dataset. ``prepared``: all sources. Raises OSError."""
    report = json.dumps(_report(source, prepared), indent=1, ensure_ascii=False)
    write_whole(source.dataset / NAME, f"{report}\n")


def nothing_left(work: Work) -> Reason:
    """Return why no document of a source is left: what removed most of them. All of its tasks have been read."""
    name, chain, tasks = work.name, work.chain, work.tasks
    documents = sum(_decisions(chain, 0, task).documents for task in tasks)
    removed: Counter[tuple[int, str]] = Counter()
    bad: dict[tuple[int, str], dict[str, str]] = {}
    for number in range(len(chain.steps)):
        for task in tasks:
            decisions = _decisions(chain, number, task)
            removed.update({(number, rule): len(numbers) for rule, numbers in decisions.removed.items()})
            for document in decisions.bad:
                bad.setdefault(
                    (number, document["rule"]), {"place": place_of(task, document), "problem": document["problem"]}
                )
    if not removed:
        return Reason("data.no-documents", {"source": name})
    (number, rule), most = max(removed.items(), key=lambda item: item[1])
    params = {"source": name, "documents": documents, "removed": most}
    if (number, rule) in bad:
        return Reason("data.nothing-usable", {**params, **bad[number, rule]})
    return Reason("data.nothing-left", {**params, "rule": rule, "step": chain.steps[number].name})


def _report(source: Work, sources: Sequence[Work]) -> dict[str, Any]:
    steps = [_step(source, number) for number in range(len(source.chain.steps))]
    counts = _tokens(source)
    tokens, characters = sum(counts["tokens"].values()), counts["characters"].get("all", 0)
    for step in steps:  # by the tokens per character of what is left in the end
        step["estimated_tokens_left"] = round(step["characters_left"] * tokens / characters) if characters else None
    # The documents of each language that were kept and removed; None without a step ``language``.
    kept, removed = Counter[str](), Counter[str]()
    for step in steps:
        if step["name"] == "language":
            kept.update({name.partition(".")[2]: count for name, count in step["counts"].items()})
            for rule in step["removed"]:
                unsure = rule["rule"] == "language.min_probability"
                removed.update({"": rule["documents"]} if unsure else rule["measured"])
    return {
        "schema": SCHEMA,
        "source": source.name,
        "bytes_read": sum(file.size for file in _files(source)),
        "files": len(_files(source)),
        "steps": steps,
        "languages": ({"kept": _in_order(kept), "removed": _in_order(removed)} if kept or removed else None),
        "duplicates": [_duplicates(step.duplicates.corpus, sources) for step in source.chain.steps if step.duplicates],
        **counts,
    }


def _files(source: Work) -> list[Any]:
    return list(dict.fromkeys(part.file for task in source.tasks for part in task.parts))


def _step(source: Work, number: int) -> dict[str, Any]:
    step, total = source.chain.steps[number], Decisions()
    removed, removed_characters = Counter[str](), Counter[str]()
    measured: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for task in source.tasks:
        decisions = _decisions(source.chain, number, task)
        for name in ("documents", "characters", "documents_left", "characters_left"):
            setattr(total, name, getattr(total, name) + getattr(decisions, name))
        removed.update({rule: len(numbers) for rule, numbers in decisions.removed.items()})
        removed_characters.update(decisions.removed_characters)
        for rule, values in decisions.measured.items():
            measured[rule].update(values)
        total.counts.update(decisions.counts)
        _keep_first(total.examples, decisions.examples, task, _EXAMPLES_PER_RULE)
        _keep_first(total.bad, decisions.bad, task, _PLACES_PER_REASON)
    bad = {document["rule"] for document in total.bad}
    return {
        "name": step.name,
        "documents": total.documents,
        "characters": total.characters,
        "documents_left": total.documents_left,
        "characters_left": total.characters_left,
        "removed": [
            {
                "rule": rule,
                "documents": removed[rule],
                "share": removed[rule] / total.documents,
                "characters": removed_characters[rule],
                "limit": next((example["limit"] for example in total.examples if example["rule"] == rule), None),
                "measured": _in_order(measured[rule]),
                "examples": [
                    {"place": example["place"], "measured": example["measured"], "text": example["text"]}
                    for example in total.examples
                    if example["rule"] == rule
                ],
            }
            for rule in sorted(removed, key=lambda rule: (-removed[rule], rule))
            if rule not in bad
        ],
        "bad": [
            {
                "reason": rule,
                "documents": removed[rule],
                "places": [
                    {"place": document["place"], "problem": document["problem"], "order": document["order"]}
                    for document in total.bad
                    if document["rule"] == rule
                ],
            }
            for rule in sorted(bad, key=lambda rule: (-removed[rule], rule))
        ],
        "counts": dict(sorted(total.counts.items())),
    }


def _decisions(chain: Chain, number: int, task: Task) -> Decisions:
    return read_decisions(chain.decisions(number, task)) or Decisions()


def _keep_first(kept: list[dict[str, Any]], more: Sequence[Mapping[str, Any]], task: Task, most: int) -> None:
    """Add what was recorded of documents, with the place for people, up to a number for each rule."""
    counts = Counter(example["rule"] for example in kept)
    for example in more:
        if counts[example["rule"]] < most:
            counts[example["rule"]] += 1
            kept.append(
                {**example, "place": place_of(task, example), "order": [task.number, example["part"], example["at"]]}
            )


def place_of(task: Task, document: Mapping[str, Any]) -> str:
    """Return the place of a document: ``web.jsonl:17``, or its byte if the line could only be found with much work."""
    file, place = task.parts[document["part"]].file, document["at"]
    if file.kind in _BY_BYTES and place > _READ_FOR_LINE["://" in file.path]:
        return f"{file.path}, byte {place}"
    return reader_of(file).place_text(file, place)


_BY_BYTES = ("txt", "md", "code", "jsonl")


def _in_order(measured: Mapping[str, int]) -> dict[str, int]:
    """Return values in ascending order; texts by their number of documents."""
    try:
        return dict(sorted(measured.items(), key=lambda item: float(item[0])))
    except ValueError:
        return dict(sorted(measured.items(), key=lambda item: (-item[1], item[0])))


def _duplicates(corpus: Corpus, sources: Sequence[Work]) -> dict[str, Any]:
    """Return the report of a deduplication, with the beginning of each document that it names."""
    key, report = corpus.folder.name, corpus.read_report()
    places = dict(_shown(corpus, sources))

    def named(document: Mapping[str, int]) -> dict[str, Any]:
        return places.get((document["task"], document["index"]), {"source": "", "place": "", "text": ""})

    examples = [
        {"similarity": pair["similarity"], "first": named(pair["first"]), "second": named(pair["second"])}
        for pair in report.get("examples", ())
    ]
    clusters = [
        {"documents": cluster["documents"], "kept": named(cluster["kept"])} for cluster in report["largest_clusters"]
    ]
    return {"key": key, **report, "largest_clusters": clusters, "examples": examples}


def _shown(corpus: Corpus, sources: Sequence[Work]) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
    """Yield (task, index) in the report of a step with the source, the place and the text of the document."""
    for source in sources:
        for number, step in enumerate(source.chain.steps):
            if step.duplicates is None or step.duplicates.corpus.folder != corpus.folder:
                continue
            for task in source.tasks:
                for index, document in _decisions(source.chain, number, task).shown.items():
                    named = {"source": source.name, "place": place_of(task, document), "text": document["text"]}
                    yield (step.duplicates.number_of(task), int(index)), named


def _tokens(source: Work) -> dict[str, Any]:
    """Return documents, tokens, bytes, lengths and kinds of characters of what is left."""
    document: Counter[str] = Counter()
    lengths: dict[int, list[int]] = {}
    characters = Counter[str]()
    shortest: int | None = None
    longest, unknown = 0, None
    for task in source.tasks:
        shard = source.dataset / f"{task.number:06d}"
        if (info := read_shard_info(shard)) is not None:
            document.update({name: count for name, count in asdict(info).items() if name != "digest"})
        statistics = undamaged_document(shard / STATISTICS)
        if statistics is None or statistics["shortest"] is None:
            continue
        for least, (documents, tokens) in statistics["lengths"].items():
            total = lengths.setdefault(int(least), [0, 0])
            total[0] += documents
            total[1] += tokens
        characters.update(statistics["characters"])
        shortest = statistics["shortest"] if shortest is None else min(shortest, statistics["shortest"])
        longest = max(longest, statistics["longest"])
        if statistics["unknown_tokens"] is not None:
            unknown = (unknown or 0) + statistics["unknown_tokens"]
    tokens = document["train_tokens"] + document["validation_tokens"]
    return {
        "documents": {split: document[f"{split}_documents"] for split in ("train", "validation")},
        "tokens": {split: document[f"{split}_tokens"] for split in ("train", "validation")},
        "bytes": document["bytes"],
        "tokens_per_byte": tokens / document["bytes"] if document["bytes"] else None,
        "unknown_tokens": unknown,
        "characters": characters,
        "lengths": {"shortest": shortest, "longest": longest, "ranges": list(_ranges(lengths))},
    }


def _ranges(lengths: Mapping[int, Sequence[int]]) -> Iterator[dict[str, int]]:
    """Yield the ranges of lengths from the shortest to the longest document, those without documents too."""
    least = min(lengths, default=0)
    while least <= max(lengths, default=-1):
        documents, tokens = lengths.get(least, (0, 0))
        end = length_range_end(least)
        yield {"from": least, "to": end, "documents": documents, "tokens": tokens}
        least = end + 1
