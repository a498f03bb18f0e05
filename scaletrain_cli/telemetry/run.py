"""All telemetry of an attempt: the files of its nodes, and of its layers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.telemetry.series import Series, read_series

MOST_NODES = 64
_NODE_FILE = re.compile(r"node-(\d{4,})-(.+)\.jsonl\.gz")
_SUBJECT = re.compile(r"(rank|gpu|layer) (.+)")


@dataclass(frozen=True)
class Telemetry:
    """The telemetry of one attempt; empty without any.

    ``ranks`` are by rank, ``nodes`` by the name of the node, ``gpus`` by node and index (``gpu07/0``), ``layers`` by
    name. Of nodes with the same name, as on one machine, all but the first are called ``NAME#NODE_RANK``. ``is_whole``
    is False if only some of very many nodes were read.
    """

    attempt: int | None = None
    ranks: Mapping[int, Series] = field(default_factory=dict)
    gpus: Mapping[str, Series] = field(default_factory=dict)
    nodes: Mapping[str, Series] = field(default_factory=dict)
    layers: Mapping[str, Series] = field(default_factory=dict)
    is_whole: bool = True


def telemetry_folder(run: RunDir, attempt: int) -> Path:
    """Return the folder of the series files of an attempt."""
    return run.attempt(attempt) / "telemetry"


def node_file(run: RunDir, attempt: int, node: str) -> Path:
    """Return the file of a node: its ranks, its GPUs and itself. ``node``: as in its record, ``node-0000-HOST``."""
    return telemetry_folder(run, attempt) / f"{node}.jsonl.gz"


def layers_file(run: RunDir, attempt: int) -> Path:
    """Return the file of the layers, which rank 0 writes."""
    return telemetry_folder(run, attempt) / "layers.jsonl.gz"


def read_telemetry(
    run: RunDir, *, attempt: int | None = None, newest: int | None = None, most_nodes: int = MOST_NODES
) -> Telemetry:
    """Return the telemetry of an attempt, by default of the newest that has any.

    ``newest``: maximum number of rows of each subject, see read_series(). ``most_nodes``: maximum number of nodes that
    are read; of more nodes, evenly spaced ones. Files that cannot be read are left out.
    """
    numbers = reversed(run.attempts()) if attempt is None else (attempt,)
    for number in numbers:
        folder = telemetry_folder(run, number)
        names = sorted(path.name for path in folder.glob("*.jsonl.gz"))
        if names:
            return _read_folder(folder, names, number, newest, most_nodes)
    return Telemetry(attempt)


def _read_folder(folder: Path, names: list[str], attempt: int, newest: int | None, most_nodes: int) -> Telemetry:
    ranks: dict[int, Series] = {}
    gpus: dict[str, Series] = {}
    nodes: dict[str, Series] = {}
    layers: dict[str, Series] = {}
    matches = [match for name in names if (match := _NODE_FILE.fullmatch(name))]
    matches.sort(key=lambda match: int(match[1]))
    first: dict[str, str] = {}
    for match in matches:
        first.setdefault(match[2], match[1])
    number = min(len(matches), max(most_nodes, 1))
    for match in (matches[len(matches) * index // number] for index in range(number)):
        node = match[2] if first[match[2]] == match[1] else f"{match[2]}#{int(match[1])}"
        for subject, series in _read(folder / match[0], newest).items():
            kind = _SUBJECT.fullmatch(subject)
            if subject == "node":
                nodes[node] = series
            elif kind is not None and kind[1] == "rank" and kind[2].isdecimal():
                ranks[int(kind[2])] = series
            elif kind is not None and kind[1] == "gpu":
                gpus[f"{node}/{kind[2]}"] = series
    for subject, series in _read(folder / "layers.jsonl.gz", newest).items():
        if (kind := _SUBJECT.fullmatch(subject)) is not None and kind[1] == "layer":
            layers[kind[2]] = series
    return Telemetry(attempt, dict(sorted(ranks.items())), gpus, nodes, layers, number == len(matches))


def _read(path: Path, newest: int | None) -> dict[str, Series]:
    try:
        return read_series(path, newest=newest)
    except OSError:
        return {}
