"""Requests to the API server through the official client: objects as plain dicts, and a typed error for each refusal.

Requests name paths, so no API discovery is needed and nothing is converted into the models of the client.
"""

import contextlib
import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from scaletrain_cli.errors import MissingPackageError, Problem, SchedulerError, SchedulerSilentError
from scaletrain_cli.extras import install_command
from scaletrain_cli.launch.backends.kubernetes import api_kinds as kinds
from scaletrain_cli.launch.backends.kubernetes.api_kinds import Kind, Object
from scaletrain_cli.launch.backends.kubernetes.messages import may_be_applied, missing_right, reason
from scaletrain_cli.project_files import project_file
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec.kubernetes import DEFAULT_NAMESPACE

FIELD_MANAGER = "scaletrain"
logger = logging.getLogger(__name__)
_CONNECT_SECONDS = 5.0
_MAY_BE_APPLIED = (502, 503, 504)  # statuses of a gateway or proxy in front of the server
_BUSY, _BUSY_PAUSES_SECONDS = 429, (1.0, 2.0, 4.0)
_READ_SECONDS = 30.0
_LOG_SECONDS = 10.0  # until the first line: it comes from the pod's node, which may be down
_FOLLOW_SECONDS = 300.0  # of silence, after which a followed log is requested again
_SILENCE_SECONDS = 10.0
_PAGE = 500
_MOST_CONNECTIONS = 300  # every followed log uses one
_Answer = TypeVar("_Answer")
_IN_CLUSTER_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


class RefusedError(SchedulerError):
    """The API server refused a request. ``status`` is the HTTP status, ``said`` the server's own message."""

    reason: Reason  # every refusal has one

    def __init__(self, why: Reason, status: int, said: str, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(why, problems)
        self.status, self.said = status, said


class ForbiddenError(RefusedError):
    """The user lacks a permission. A status of 403 alone may mean that an object violates a rule or a quota."""


class NotServedError(RefusedError):
    """The cluster has no such resource: its CRD is missing or has other versions, ``served``."""

    def __init__(self, where: str, kind: Kind, served: Sequence[str] = ()) -> None:
        what = {"where": where, "kind": kind.name, "api_version": kind.api_version}
        why = reason("not-installed", **what, install=kind.install) if kind.install else reason("not-served", **what)
        if kind.install and served and not {kind.version, *kind.older} & set(served):
            known = [kind.version, *kind.older]
            why = reason("served-in-other-versions", **what, group=kind.group, served=list(served), known=known)
        super().__init__(why, 404, str(why))
        self.kind = kind


def refusal(where: str, method: str, kind: Kind | None, path: str, error: Any) -> RefusedError:
    """Return the error for ``error``, the client's ApiException of a request ``method`` to ``path``."""
    answer = _status_of(error)
    said = str(answer.get("message") or error.reason or f"HTTP {error.status}").strip()
    if error.status == 0:  # the client reports a bad certificate in this way
        return RefusedError(reason("untrusted-connection", where=where, said=said), 0, said)
    if error.status == 401:
        return RefusedError(reason("not-authenticated", where=where), 401, said)
    if (missing := missing_right(said)) is not None:
        resource = f"{missing.resource}.{missing.group}" if missing.group else missing.resource
        roles = str(project_file("k8s/base/rbac.yaml"))
        why = reason("forbidden", where=where, said=said, verb=missing.verb, resource=resource, roles=roles)
        return (ForbiddenError if error.status == 403 else RefusedError)(why, error.status, said)
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


class Cluster:
    """A connection to one API server. ``where`` names it in every error."""

    def __init__(self, client: Any, where: str) -> None:
        from kubernetes.dynamic import DynamicClient

        self.where = where
        self._silent_since: float | None = None
        self._versions = kinds.ServedVersions(self._group)
        # Sends any path with the client's credentials; without this discoverer it would first read all API groups.
        self._client = DynamicClient(client, discoverer=lambda client, cache_file: None)

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Return one object, or None if none has this name. Raises NotServedError if the cluster has no such kind."""
        try:
            answer = self._in_served_version(
                kind, lambda served: self._json("get", served, served.path(namespace, name))
            )
            return kinds.as_newest(kind, answer)
        except NotServedError:
            raise
        except RefusedError as error:
            if error.status == 404:
                return None
            raise

    def find(self, kind: Kind, namespace: str, *, labels: str = "", fields: str = "") -> list[Object]:
        """Return all objects that match the selectors."""
        objects = self._in_served_version(kind, lambda served: self._find(served, namespace, labels, fields))
        return [kinds.as_newest(kind, item) for item in objects]

    def _find(self, kind: Kind, namespace: str, labels: str, fields: str) -> list[Object]:
        objects: list[Object] = []
        more: str | None = None
        selectors = {"label_selector": labels or None, "field_selector": fields or None}
        while True:
            page = self._json("get", kind, kind.path(namespace), limit=_PAGE, _continue=more, **selectors)
            objects += page.get("items", [])
            if not (more := page.get("metadata", {}).get("continue")):
                return objects

    def _in_served_version(self, kind: Kind, send: Callable[[Kind], _Answer]) -> _Answer:
        """Call ``send`` with the version of the kind that the cluster serves, and return its result.

        Raises NotServedError if the cluster serves none.
        """
        for served in self._versions.candidates(kind):
            try:
                answer = send(served)
            except NotServedError:
                continue
            except RefusedError as error:
                if error.status == 404:  # the object is missing, so the kind exists
                    self._versions.found(kind, served)
                raise
            self._versions.found(kind, served)
            return answer
        if kind.older and self._versions.forget(kind.group):  # upgraded since it was asked for
            return self._in_served_version(kind, send)
        raise NotServedError(self.where, kind, (self._versions.of_group(kind.group) if kind.group else None) or ())

    def _group(self, group: str) -> Object | None:
        """Return the APIGroup object; None if the group is not served, ``{}`` if the user may not read it."""
        try:
            return self._parsed(self._send("get", None, f"/apis/{group}").data)
        except RefusedError as error:
            return None if error.status == 404 else {}

    def events(self, namespace: str, name: str) -> list[Object]:
        """Return the events of the objects of this name, oldest first. The server keeps events for about an hour."""
        events = self.find(kinds.EVENT, namespace, fields=f"involvedObject.name={name}")
        return sorted(events, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))

    def apply(self, body: Object, *, dry_run: bool = False) -> Object:
        """Create or update the object, or with ``dry_run`` only validate it. Return the server's version of it.

        It is written in the version of its kind that the cluster serves.
        """
        metadata = body["metadata"]
        return self._in_served_version(
            kinds.kind_of(body),
            lambda served: self._json(
                "patch",
                served,
                served.path(metadata.get("namespace", ""), metadata["name"]),
                body={**body, "apiVersion": served.api_version},
                content_type="application/apply-patch+yaml",
                field_manager=FIELD_MANAGER,
                dry_run="All" if dry_run else None,
            ),
        )

    def annotate(self, kind: Kind, namespace: str, name: str, annotations: Mapping[str, str | None]) -> None:
        """Add annotations to an object, and remove those that are None. Does nothing if the object does not exist."""
        body = {"metadata": {"annotations": dict(annotations)}}
        try:
            self._json(
                "patch",
                kind,
                kind.path(namespace, name),
                body=body,
                content_type="application/merge-patch+json",
                field_manager=FIELD_MANAGER,
            )
        except RefusedError as error:
            if error.status != 404:
                raise

    def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        uid: str = "",
        background: bool = False,
        at_once: bool = False,
        dry_run: bool = False,
    ) -> bool:
        """Delete an object after its dependents. Return False if it did not exist.

        ``uid``: only the object with this UID. ``background``: delete the object before its dependents. ``at_once``:
        without a grace period or confirmation by the kubelet. ``dry_run``: only validate the request.
        """
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        if uid:
            body["preconditions"] = {"uid": uid}
        if background or at_once:
            body["propagationPolicy"] = "Background"
        if at_once:
            body["gracePeriodSeconds"] = 0
        if dry_run:
            body["dryRun"] = ["All"]
        try:
            self._in_served_version(
                kind, lambda served: self._json("delete", served, served.path(namespace, name), body=body)
            )
        except RefusedError as error:
            if error.status == 404 or (error.status == 409 and uid):
                return False
            raise
        return True

    def log(
        self,
        namespace: str,
        pod: str,
        container: str,
        *,
        since: str = "",
        last_lines: int | None = None,
        follow: bool = False,
    ) -> Iterator[str]:
        """Yield a container's lines, each beginning with its time, from second ``since`` on (RFC 3339).

        Raises RefusedError, also for a node that does not answer.
        """
        query = [("container", container), ("timestamps", "true"), ("follow", "true" if follow else "false")]
        query += [("sinceTime", since)] if since else []
        query += [("tailLines", str(last_lines))] if last_lines is not None else []
        read_seconds = _FOLLOW_SECONDS if follow else _LOG_SECONDS
        path = kinds.POD.path(namespace, pod, "log")
        response = self._send("get", kinds.POD, path, query_params=query, read_seconds=read_seconds, by_node_of=pod)
        try:
            rest = b""
            for chunk in response.stream(1 << 16):
                *whole, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
            if rest:
                yield rest.decode(errors="replace")
        except _transport_errors() as error:
            if not follow:  # a followed log may be silent; the follower repeats the request
                raise self._silent_node(pod, error) from error
        finally:
            response.close()  # unread data would be read as the answer to the next request

    def serves(self, kind: Kind) -> bool:
        """Return whether the cluster has this kind, in its version or one of its ``older`` ones."""
        return any(map(self._serves, self._versions.candidates(kind)))

    def missing(self, kind: Kind) -> NotServedError | None:
        """Return the error of a kind that is not served, with the versions that are; None if it is served."""
        served = self._versions.of_group(kind.group) if kind.group else None
        return None if self.serves(kind) else NotServedError(self.where, kind, served or ())

    def _serves(self, kind: Kind) -> bool:
        try:
            answer = self._json("get", kind, kind.root)
        except RefusedError as error:
            if error.status == 404:
                return False
            raise
        return any(resource.get("name") == kind.plural for resource in answer.get("resources", []))

    def version(self, timeout_seconds: float = _READ_SECONDS) -> str:
        """Return the server's version, such as ``v1.36.2``. This is the cheapest request that the server answers."""
        answer = self._parsed(self._send("get", None, "/version", read_seconds=timeout_seconds).data)
        return str(answer.get("gitVersion", "of unknown version"))

    def _json(self, method: str, kind: Kind, path: str, **options: Any) -> Object:
        return self._parsed(self._send(method, kind, path, **options).data)

    def _parsed(self, data: bytes) -> Object:
        try:
            answer = json.loads(data)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            text = " ".join(data[:200].decode(errors="replace").split())
            raise RefusedError(reason("not-kubernetes", where=self.where, said=text), 200, text)
        return answer

    def _silent_node(self, pod: str, error: BaseException) -> RefusedError:
        said = _short(error)
        return RefusedError(reason("node-no-answer", where=self.where, pod=pod, said=said), 504, said)

    def _send(
        self,
        method: str,
        kind: Kind | None,
        path: str,
        *,
        read_seconds: float = _READ_SECONDS,
        by_node_of: str = "",
        **options: Any,
    ) -> Any:
        import urllib3.exceptions
        from kubernetes.client.exceptions import ApiException

        timeout = (_CONNECT_SECONDS, read_seconds)
        if self._silent_since is not None and time.monotonic() - self._silent_since < _SILENCE_SECONDS:
            raise SchedulerError(reason("no-answer-before", where=self.where))  # else each run of a list would wait
        logger.debug("%s %s %s", self.where, method, path)
        changes = method != "get" and not options.get("dry_run") and "dryRun" not in (options.get("body") or {})
        try:
            return self._request(method, path, serialize=False, _request_timeout=timeout, **options)
        except ApiException as error:
            if not changes and error.status in _MAY_BE_APPLIED and method != "get":  # nothing was applied
                said = f"{error.status} {error.reason}"
                raise SchedulerError(reason("no-answer", where=self.where, said=said)) from error
            if changes and (error.status in _MAY_BE_APPLIED or may_be_applied(str(error.body))):
                why = reason("server-error", where=self.where, status=error.status, said=error.reason)
                raise SchedulerSilentError(why) from error
            raise refusal(self.where, method, kind, path, error) from error
        except _transport_errors() as error:
            # After the connection was established, only the node does not answer.
            if by_node_of and isinstance(error, urllib3.exceptions.ReadTimeoutError):
                raise self._silent_node(by_node_of, error) from error
            if not changes:
                self._silent_since = time.monotonic()
                raise SchedulerError(reason("no-answer", where=self.where, said=_short(error))) from error
            raise SchedulerSilentError(reason("answer-lost", where=self.where, said=_short(error))) from error

    def _request(self, method: str, path: str, **options: Any) -> Any:
        """Send the request, and repeat it while the server answers 429 (Too Many Requests), which changes nothing."""
        from kubernetes.client.exceptions import ApiException

        for pause in _BUSY_PAUSES_SECONDS:
            try:
                return self._client.request(method, path, **options)
            except ApiException as error:
                if error.status != _BUSY:
                    raise
                time.sleep(pause)
        return self._client.request(method, path, **options)


def connect(context: str | None, namespace: str) -> Cluster:
    """Return a connection to the API server of ``context``; for None, of the surrounding pod or the current context.

    Sends no request. Raises UsageError without the client's package, SchedulerError without usable credentials.
    """
    return _connect(context, namespace, os.environ.get("KUBECONFIG") or None)


@functools.lru_cache
def _connect(context: str | None, namespace: str, file: str | None) -> Cluster:
    """Return a cached connection: credentials may come from a program that takes a second to run."""
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise MissingPackageError(
            "cluster.scheduler = kubernetes needs the Kubernetes client, the package kubernetes.",
            install_command("k8s"),
        ) from error
    settings = client.Configuration()
    settings.retries = False  # each retry would take the full timeout again
    settings.connection_pool_maxsize = _MOST_CONNECTIONS
    try:
        if context is None and _is_in_cluster(os.environ):
            config.load_incluster_config(client_configuration=settings)
            name = "this pod's cluster"
        else:
            config.load_kube_config(file, context=context, client_configuration=settings, persist_config=False)
            name = f"context {context or config.list_kube_config_contexts(file)[1]['name']}"
    except Exception as error:  # a kubeconfig and the programs that it names can raise any exception
        params = {"file": file or "~/.kube/config", "said": _short(error)}
        unusable = reason("context-unusable", context=context, **params)
        raise SchedulerError(unusable if context else reason("current-context-unusable", **params)) from error
    return Cluster(client.ApiClient(settings), f"Kubernetes ({name}, {settings.host}, namespace {namespace})")


def configured_namespace(context: str | None) -> str | None:
    """Return the namespace of the kubeconfig's context, or of this pod; None if there is neither."""
    if context is None and _is_in_cluster(os.environ):
        with contextlib.suppress(OSError):
            return _IN_CLUSTER_TOKEN.with_name("namespace").read_text(encoding="utf-8").strip() or None
        return None
    try:
        from kubernetes import config

        known, current = config.list_kube_config_contexts(os.environ.get("KUBECONFIG") or None)
    except Exception:  # connect() reports the error
        return None
    chosen = current if context is None else next((one for one in known if one["name"] == context), None)
    named = (chosen or {}).get("context", {}).get("namespace")
    return str(named) if named else None


def default_namespace(context: str | None) -> str:
    """Return the namespace of a spec that names none: that of the context, or of this pod, else ``default``."""
    return (configured_namespace(context) if is_configured() else None) or DEFAULT_NAMESPACE


def is_configured() -> bool:
    """Return whether there is a kubeconfig, or this runs in a pod of a cluster."""
    files = (os.environ.get("KUBECONFIG") or "~/.kube/config").split(os.pathsep)
    return any(expand_home(file).is_file() for file in files if file) or _is_in_cluster(os.environ)


def _is_in_cluster(environment: Mapping[str, str]) -> bool:
    """Return whether to use the pod's own cluster: a kubeconfig that is set in a pod takes precedence."""
    return "KUBERNETES_SERVICE_HOST" in environment and "KUBECONFIG" not in environment and _IN_CLUSTER_TOKEN.is_file()


def _transport_errors() -> tuple[type[BaseException], ...]:
    import urllib3.exceptions

    return (urllib3.exceptions.HTTPError, OSError)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
