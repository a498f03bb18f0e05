"""Choose the version in which a cluster serves a kind. The API server is asked once for each group (``/apis/GROUP``).

A group may serve several versions, and a kind only in some of them: early versions of Kueue served Cohorts as v1alpha1
and ClusterQueues as v1beta1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from scaletrain_cli.launch.backends.kubernetes.api_kinds import Kind, Object


class ServedVersions:
    """The versions that one API server serves, as far as they are known.

    ``ask`` returns the APIGroup object of a group: None if it is not served, ``{}`` if the user may not read it.
    """

    def __init__(self, ask: Callable[[str], Object | None]) -> None:
        self._ask = ask
        self._groups: dict[str, tuple[str, ...] | None] = {}
        self._used: dict[Kind, Kind] = {}

    def of_group(self, group: str) -> tuple[str, ...] | None:
        """Return the versions of a group, the server's preferred one first; None if they are not known."""
        if group not in self._groups:
            found = self._ask(group)
            versions = [str(each.get("version", "")) for each in (found or {}).get("versions", ())]
            self._groups[group] = None if found == {} else tuple(versions)
        return self._groups[group]

    def candidates(self, kind: Kind) -> list[Kind]:
        """Return the kind in each version in which the launcher knows it and the group is served, the newest first.

        The version in which it was found before is first. A kind that is known in one version only is not asked for.
        """
        known = [kind, *(dataclasses.replace(kind, version=version) for version in kind.older)]
        served = self.of_group(kind.group) if kind.older else None
        found = known if served is None else [one for one in known if one.version in served]
        return sorted(found, key=lambda one: one != self._used.get(kind))

    def found(self, kind: Kind, served: Kind) -> None:
        """Remember in which version the server has the kind."""
        self._used[kind] = served

    def forget(self, group: str) -> bool:
        """Ask again for a group, whose controller may have been upgraded; return whether its versions are others."""
        before = self._groups.pop(group, None)
        return before is not None and self.of_group(group) != before
