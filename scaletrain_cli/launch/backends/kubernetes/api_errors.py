"""Errors for the API server's refusals: where, what, which right or resource is missing, and what to do. Pure."""

from __future__ import annotations

import json
from typing import Any

from scaletrain_cli.errors import Problem, SchedulerError
from scaletrain_cli.launch.backends.kubernetes.api_kinds import Kind, Object
from scaletrain_cli.launch.backends.kubernetes.messages import missing_right
from scaletrain_cli.project_files import project_file


class RefusedError(SchedulerError):
    """The API server refused a request. ``status`` is the HTTP status, ``said`` the server's own message."""

    def __init__(self, message: str, status: int, said: str, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message, problems)
        self.status, self.said = status, said

    @property
    def is_rights(self) -> bool:
        """Return True if the user lacks a permission; False if an object violates a rule or a quota."""
        return self.status == 403 and missing_right(self.said) is not None


class NotServedError(RefusedError):
    """The cluster has no such resource: its CRD is missing or has another version."""

    def __init__(self, message: str, kind: Kind) -> None:
        super().__init__(message, 404, message)
        self.kind = kind


def refusal(where: str, method: str, kind: Kind | None, path: str, error: Any) -> RefusedError:
    """Return the error for the answer ``error`` of the client to ``method`` on ``path``."""
    answer = _status_of(error)
    said = str(answer.get("message") or error.reason or f"HTTP {error.status}").strip()
    subject = f"{where}: {path.rpartition('/')[2] if kind is None else kind.name}"
    if error.status == 0:  # the client reports a bad certificate in this way
        return RefusedError(f"{where}: no trusted connection: {said}. Check the CA of the context.", 0, said)
    if error.status == 401:
        advice = "Log in again: the credentials of the context are missing, wrong or out of date."
        return RefusedError(f"{where}: not authenticated (401). {advice}", 401, said)
    if (missing := missing_right(said)) is not None:
        right = f"{missing.verb} {missing.resource}" + (f".{missing.group}" if missing.group else "")
        advice = (
            f"Ask an administrator for the right to {right}: {project_file('k8s/rbac.yaml')} has all that is needed."
        )
        return RefusedError(f"{where} forbids it (403): {said}. {advice}", error.status, said)
    if error.status == 404 and kind is not None and not answer.get("details", {}).get("name"):
        how = f" Install it: {kind.install}" if kind.install else ""
        return NotServedError(f"{where} has no {kind.name} of {kind.api_version}.{how}", kind)
    problems = tuple(
        Problem(kind.name if kind else path, str(cause.get("field", "")), str(cause.get("message", "")))
        for cause in answer.get("details", {}).get("causes") or ()
    )
    verb = {"get": "cannot be read", "delete": "cannot be deleted"}.get(method, "is refused")
    return RefusedError(f"{subject} {verb} ({error.status}): {said}", error.status, said, problems)


def _status_of(error: Any) -> Object:
    """Return the Status object of a refusal; empty if the body is not the API server's own, such as a proxy's page."""
    try:
        answer = json.loads(error.body)
    except (TypeError, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}
