"""Errors for the API server's refusals: where, what, which right or resource is missing, and what to do. Pure."""

from __future__ import annotations

import json
from typing import Any

from scaletrain_cli.errors import Problem, SchedulerError
from scaletrain_cli.launch.backends.kubernetes.api_kinds import Kind, Object
from scaletrain_cli.launch.backends.kubernetes.messages import missing_right, reason
from scaletrain_cli.project_files import project_file
from scaletrain_cli.reasons import Reason


class RefusedError(SchedulerError):
    """The API server refused a request. ``status`` is the HTTP status, ``said`` the server's own message."""

    reason: Reason  # every refusal has one

    def __init__(self, why: Reason, status: int, said: str, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(why, problems)
        self.status, self.said = status, said

    @property
    def is_rights(self) -> bool:
        """Return True if the user lacks a permission; False if an object violates a rule or a quota."""
        return self.status == 403 and missing_right(self.said) is not None


class NotServedError(RefusedError):
    """The cluster has no such resource: its CRD is missing or has another version."""

    def __init__(self, where: str, kind: Kind) -> None:
        what = {"where": where, "kind": kind.name, "api_version": kind.api_version}
        why = reason("not-installed", **what, install=kind.install) if kind.install else reason("not-served", **what)
        super().__init__(why, 404, str(why))
        self.kind = kind


def refusal(where: str, method: str, kind: Kind | None, path: str, error: Any) -> RefusedError:
    """Return the error for the answer ``error`` of the client to ``method`` on ``path``."""
    answer = _status_of(error)
    said = str(answer.get("message") or error.reason or f"HTTP {error.status}").strip()
    if error.status == 0:  # the client reports a bad certificate in this way
        return RefusedError(reason("untrusted-connection", where=where, said=said), 0, said)
    if error.status == 401:
        return RefusedError(reason("not-authenticated", where=where), 401, said)
    if (missing := missing_right(said)) is not None:
        resource = f"{missing.resource}.{missing.group}" if missing.group else missing.resource
        roles = str(project_file("k8s/rbac.yaml"))
        why = reason("forbidden", where=where, said=said, verb=missing.verb, resource=resource, roles=roles)
        return RefusedError(why, error.status, said)
    if error.status == 404 and kind is not None and not answer.get("details", {}).get("name"):
        return NotServedError(where, kind)
    subject = path.rpartition("/")[2] if kind is None else kind.name
    problems = tuple(
        Problem.because(
            subject, str(cause.get("field", "")), reason("refused-field", said=str(cause.get("message", "")))
        )
        for cause in answer.get("details", {}).get("causes") or ()
    )
    code = {"get": "read-refused", "delete": "delete-refused"}.get(method, "write-refused")
    why = reason(code, where=where, object=subject, status=error.status, said=said)
    return RefusedError(why, error.status, said, problems)


def _status_of(error: Any) -> Object:
    """Return the Status object of a refusal; empty if the body is not the API server's own, such as a proxy's page."""
    try:
        answer = json.loads(error.body)
    except (TypeError, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}
