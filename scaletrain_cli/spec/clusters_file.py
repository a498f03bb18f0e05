"""The user's clusters, ``~/.config/scaletrain/clusters.yaml``: defaults for a spec's cluster section, by name.

    default: lab
    runs: /shared/runs
    clusters:
      lab: {scheduler: slurm, gpu: h100-sxm-80gb, gpus_per_node: 8, slurm: {account: team-a, partition: gpu}}
      cloud: {scheduler: kubernetes, kubernetes: {context: gke-1, namespace: ml, queue: team-a}}
      site: {host: login.site.example, scheduler: slurm, slurm: {partition: gpu}}

The default cluster supplies keys that a spec leaves out. A cluster given by name overrides the spec, and --set
above both. Its keys are validated with the spec. ``host`` is the login node of a cluster that this machine does not
belong to: verbs for it run there, over ssh.
"""

import copy
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import Problem, SpecError, UsageError
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.sent_run import sent
from scaletrain_cli.spec.source import Key, Source, parse_yaml, shown
from scaletrain_cli.text import did_you_mean

CLUSTER_OPTION = "--cluster"
_KEYS = ("default", "runs", "clusters")
_SECTIONS = ("slurm", "kubernetes")  # of the cluster section
HOST = "host"
_HOST_KEYS = ("ssh", "scaletrain", "folder", "runs")


@dataclass(frozen=True)
class LoginNode:
    """The login node of a cluster. ``ssh``: a destination or alias of ssh; ``scaletrain``: the command there, None for
    that of `scaletrain cluster setup`, or else the one on its PATH.

    ``folder``: its working folder, to which relative paths of a spec refer; ``runs``: its runs root, None for the
    default there. A ``~`` in front is the home folder there.
    """

    cluster: str
    ssh: str
    scaletrain: str | None = None
    folder: str = "~"
    runs: str | None = None


@dataclass(frozen=True)
class Cluster:
    """One cluster's entries, as plain data, with locations. ``above``: they override the spec, else are defaults.

    ``login_node``: None if this machine submits to the cluster itself.
    """

    name: str
    entries: dict[str, Any]
    source: Source
    above: bool
    login_node: LoginNode | None = None

    def apply_to(self, raw: dict[str, Any], source: Source) -> None:
        """Merge the entries into the cluster section of a spec that is not validated yet, with their locations."""
        section = raw.setdefault("cluster", {})
        if not isinstance(section, dict):
            return  # reported by validation
        other = section.get("scheduler", self.entries.get("scheduler"))
        if self.above or other == self.entries.get("scheduler", other):
            self._merge(self.entries, section, (), source)

    def overrides(self, scheduler: str) -> list[str]:
        """Return the entries as overrides of a recorded spec with this scheduler, whose own section is left out."""
        other = self.entries.get("scheduler", scheduler)
        overrides = [f"cluster.{scheduler}=null"] if other != scheduler and scheduler in _SECTIONS else []
        return overrides + [f"{key}={json.dumps(value)}" for key, value in _leaves(self.entries, "cluster")]

    def _merge(self, entries: dict[str, Any], section: dict[str, Any], key: Key, source: Source) -> None:
        for name, value in entries.items():
            inner = (*key, name)
            given = section.get(name)
            if isinstance(value, dict) and isinstance(given, dict):
                self._merge(value, given, inner, source)
            elif self.above or given is None:
                section[name] = copy.deepcopy(value)
                here, there = ("cluster", *inner), ("clusters", self.name, *inner)
                source.places = {place: text for place, text in source.places.items() if place[: len(here)] != here}
                for place, text in self.source.places.items():
                    if place[: len(there)] == there:
                        moved: Key = ("cluster", *place[2:])
                        source.places[moved] = text


def _leaves(entries: dict[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each entry that is no section, or an empty one."""
    for name, value in entries.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}.{name}")
        else:
            yield f"{above}.{name}", value


def clusters_file() -> Path:
    """Return ``$SCALETRAIN_CLUSTERS``, or ``scaletrain/clusters.yaml`` in the user's configuration folder."""
    if named := os.environ.get("SCALETRAIN_CLUSTERS"):
        return expand_home(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or expand_home("~/.config")) / "scaletrain" / "clusters.yaml"


def choose_cluster(name: str | None) -> Cluster | None:
    """Return the named cluster; without a name the default one, or None. Raises SpecError or UsageError."""
    file = sent().clusters or clusters_file()
    if name is None and not file.exists():
        return None
    data, source = _read(file)
    sections = data["clusters"]
    chosen = name if name is not None else data["default"]
    if chosen is None:
        return None
    if chosen not in sections:
        known = f"Available clusters: {', '.join(sections)}." if sections else "The file defines no clusters."
        where = CLUSTER_OPTION if name is not None else f"{source.place(('default',))} default"
        raise UsageError(
            f"{where} = {shown(chosen)}: no such cluster in {file}. {did_you_mean(chosen, sections)}{known}"
        )
    entries, host = dict(sections[chosen]), sections[chosen].get(HOST)
    entries.pop(HOST, None)
    login_node = None if host is None else LoginNode(chosen, **({"ssh": host} if isinstance(host, str) else host))
    return Cluster(chosen, entries, source, name is not None, login_node)


def cluster_names() -> list[str]:
    """Return the names of the user's clusters. Raises SpecError or UsageError for a file that cannot be read."""
    file = clusters_file()
    return [*_read(file)[0]["clusters"]] if file.exists() else []


def configured_runs_root() -> Path | None:
    """Return the runs root in the file, or None. Raises SpecError."""
    file = clusters_file()
    if not file.exists():
        return None
    runs = _read(file)[0]["runs"]
    return expand_home(runs) if runs is not None else None


def _read(file: Path) -> tuple[dict[str, Any], Source]:
    source = Source(str(file))
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"cannot read {file}: {why}.") from error
    says_anything = any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines())
    data = parse_yaml(text, source) if says_anything else {}
    problems = [
        Problem(source.place((key,)), shown(key), f"unknown key. Use {', '.join(_KEYS)}.")
        for key in data.keys() - set(_KEYS)
    ]
    sections = data.get("clusters") or {}
    if not isinstance(sections, dict):
        problems.append(
            Problem(source.place(("clusters",)), "clusters", "must be a mapping of cluster names to sections.")
        )
        sections = {}
    for name, entries in sections.items():
        if not isinstance(entries, dict):
            what = "must be a mapping with keys of a spec's cluster section."
            problems.append(Problem(source.place(("clusters", name)), f"clusters.{name}", what, shown(entries)))
        elif entries.get(HOST) is not None:
            problems += _host_problems(name, entries[HOST], source)
    for key in ("default", "runs"):
        if not isinstance(data.get(key), str | None):
            problems.append(Problem(source.place((key,)), key, "must be text.", shown(data[key])))
    if problems:
        raise SpecError(f"{file} is not a valid clusters file", tuple(problems))
    return {"default": data.get("default"), "runs": data.get("runs"), "clusters": sections}, source


def _host_problems(cluster: str, given: Any, source: Source) -> Iterator[Problem]:
    """Yield what is wrong with the key ``host`` of a cluster."""
    key: Key = ("clusters", cluster, HOST)
    if not isinstance(given, dict):
        given = {"ssh": given}
    elif "ssh" not in given:
        yield Problem(source.place(key), f"clusters.{cluster}.{HOST}.ssh", "is missing: the destination for ssh.")
    for name, value in given.items():
        inner = f"clusters.{cluster}.{HOST}.{name}"
        if name not in _HOST_KEYS:
            yield Problem(source.place((*key, name)), inner, f"unknown key. Use {', '.join(_HOST_KEYS)}.")
        elif not isinstance(value, str) or not value or not value.isprintable() or value.startswith("-"):
            # ssh would take a dash in front for an option
            what = "must be text on one line that does not begin with a dash."
            yield Problem(source.place((*key, name)), inner, what, shown(value))
