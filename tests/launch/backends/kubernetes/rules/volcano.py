"""Rules for a Volcano Job that its schema does not state; only Volcano's webhook applies them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.launch.backends.kubernetes.rules.findings import (
    LONGEST_POD_NAME,
    RuleFinding,
    below,
    dns_label,
    one_of,
    service_name,
    twice,
)
from tests.launch.backends.kubernetes.rules.pods import pod_findings

Object = dict[str, Any]
_ACTIONS = ("AbortJob", "RestartJob", "RestartTask", "RestartPod", "TerminateJob", "CompleteJob")
_PLUGINS = ("env", "svc", "ssh", "tensorflow", "mpi", "pytorch", "ray", "hcclrank")


def volcano_findings(job: Object) -> Iterator[RuleFinding]:
    """Yield the problems of a Volcano Job and its pods."""
    spec, name = job.get("spec", {}), str(job.get("metadata", {}).get("name", ""))
    yield from service_name("metadata.name", name)
    tasks = spec.get("tasks", [])
    pods = sum(task.get("replicas", 0) for task in tasks)
    if not tasks:
        yield RuleFinding("spec.tasks", None, "must hold a task.")
    yield from twice("spec.tasks", [task.get("name") for task in tasks], "name")
    if not 0 < spec.get("minAvailable", pods) <= pods:
        yield RuleFinding(
            "spec.minAvailable", spec["minAvailable"], f"must be between 1 and the {pods} pods of all tasks."
        )
    if spec.get("maxRetry", 3) < 1:
        yield RuleFinding("spec.maxRetry", spec["maxRetry"], "must be above 0, which means Volcano's default of 3.")
    for plugin in spec.get("plugins", {}):
        yield from one_of(f"spec.plugins.{plugin}", plugin, _PLUGINS)
    if spec.get("schedulerName", "volcano") != "volcano":
        yield RuleFinding("spec.schedulerName", spec["schedulerName"], "must be volcano: no other one knows its gangs.")
    yield from below("spec", _policy_findings(spec.get("policies", [])))
    for index, task in enumerate(tasks):
        at = f"spec.tasks[{index}]"
        yield from dns_label(f"{at}.name", task.get("name"))
        if task.get("minAvailable", 0) > task.get("replicas", 0):
            yield RuleFinding(
                f"{at}.minAvailable", task["minAvailable"], f"must not exceed replicas {task.get('replicas')}."
            )
        yield from below(at, _policy_findings(task.get("policies", [])))
        yield from below(f"{at}.template", pod_findings(task.get("template", {})))
        policy = task.get("template", {}).get("spec", {}).get("restartPolicy")
        if policy != "Never":
            yield RuleFinding(
                f"{at}.template.spec.restartPolicy", policy, "must be Never, or the job never hears of a crash."
            )
        last = f"{name}-{task.get('name', '')}-{max(0, task.get('replicas', 1) - 1)}"
        if len(last) > LONGEST_POD_NAME:
            yield RuleFinding("metadata.name", name, f"makes pod names of {len(last)} characters; at most 63 can be.")


def _policy_findings(policies: list[Object]) -> Iterator[RuleFinding]:
    for index, policy in enumerate(policies):
        at = f"policies[{index}]"
        yield from one_of(f"{at}.action", policy.get("action"), _ACTIONS, needed=True)
        by_event, code = "event" in policy or "events" in policy, policy.get("exitCode")
        if by_event == (code is not None):
            yield RuleFinding(at, None, "must have either events or an exitCode.")
        if code == 0:
            yield RuleFinding(f"{at}.exitCode", 0, "is success, which no policy may name.")
    yield from twice("policies", [policy["exitCode"] for policy in policies if "exitCode" in policy], "exitCode")
    events = [event for policy in policies for event in (policy.get("events") or [policy.get("event")]) if event]
    yield from twice("policies", events, "event")
