"""Rules for Jobs and JobSets that no schema states. Webhooks or the validation of Jobs apply some of them.

A JobSet with a template that violates one is accepted; an event shows the error when the controller creates the Job.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from scaletrain_cli.launch.backends.kubernetes.pod import EXCLUSIVE_TOPOLOGY
from tests.launch.backends.kubernetes.rules.findings import (
    LONGEST_POD_NAME,
    RuleFinding,
    below,
    dns_label,
    label_map,
    one_of,
    service_name,
    twice,
)
from tests.launch.backends.kubernetes.rules.pods import pod_findings

Object = dict[str, Any]
FAILURE_REASONS = (
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
)
_JOBSET_ACTIONS = (
    "FailJobSet",
    "RestartJobSet",
    "RestartJobSetAndIgnoreMaxRestarts",
    "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
)
_RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]{0,126}[A-Za-z0-9_])?")
_POD_SUFFIX = 6
# Python accepts these in a pattern, Go does not: a rule with one never matches.
_NOT_IN_GO = re.compile(r"\(\?(<?[=!]|P=|\(|>)|\\[1-9Z]")


def job_findings(job: Object) -> Iterator[RuleFinding]:
    """Yield the problems of a batch/v1 Job and its pods."""
    spec = job.get("spec", {})
    template = spec.get("template", {})
    yield from below("spec.template", pod_findings(template))
    policy = template.get("spec", {}).get("restartPolicy")
    if policy not in ("Never", "OnFailure"):
        yield RuleFinding("spec.template.spec.restartPolicy", policy, "must be Never or OnFailure in a Job.")
    yield from one_of("spec.completionMode", spec.get("completionMode"), ("Indexed", "NonIndexed"))
    yield from one_of("spec.podReplacementPolicy", spec.get("podReplacementPolicy"), ("Failed", "TerminatingOrFailed"))
    for key in ("parallelism", "completions", "backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished"):
        if not isinstance(value := spec.get(key, 0), int) or isinstance(value, bool) or value < 0:
            yield RuleFinding(f"spec.{key}", value, "must be a whole number that is not negative.")
    if spec.get("completionMode") == "Indexed" and spec.get("completions") is None:
        yield RuleFinding("spec.completions", None, "is needed with completionMode Indexed.")
    if spec.get("parallelism", 1) != spec.get("completions", 1):
        given = f"{spec.get('parallelism')} of {spec.get('completions')}"
        yield RuleFinding("spec.parallelism", given, "must equal completions: a gang runs all of its pods at once.")
    if "podFailurePolicy" in spec:
        yield from _pod_failure_findings(spec, policy)
    last = f"{job.get('metadata', {}).get('name', '')}-{max(0, int(spec.get('completions') or 1) - 1)}"
    if len(last) + _POD_SUFFIX > LONGEST_POD_NAME:
        message = f"makes pod names of {len(last) + _POD_SUFFIX} characters; at most {LONGEST_POD_NAME} can be."
        yield RuleFinding("metadata.name", job.get("metadata", {}).get("name"), message)


def _pod_failure_findings(spec: Object, restart_policy: Any) -> Iterator[RuleFinding]:
    path = "spec.podFailurePolicy"
    if restart_policy != "Never":
        yield RuleFinding(
            "spec.template.spec.restartPolicy", restart_policy, "must be Never beside a podFailurePolicy."
        )
    if spec.get("podReplacementPolicy", "Failed") != "Failed":
        yield RuleFinding(
            "spec.podReplacementPolicy", spec["podReplacementPolicy"], f"must be Failed beside a {path[5:]}."
        )
    names = [container.get("name") for container in spec.get("template", {}).get("spec", {}).get("containers", [])]
    for index, rule in enumerate(spec["podFailurePolicy"].get("rules", [])):
        at, codes, conditions = f"{path}.rules[{index}]", rule.get("onExitCodes"), rule.get("onPodConditions")
        yield from one_of(f"{at}.action", rule.get("action"), ("FailJob", "FailIndex", "Ignore", "Count"), needed=True)
        if rule.get("action") == "FailIndex" and "backoffLimitPerIndex" not in spec:
            yield RuleFinding(f"{at}.action", "FailIndex", "needs backoffLimitPerIndex.")
        if bool(codes) == bool(conditions):
            yield RuleFinding(at, None, "must have either onExitCodes or onPodConditions.")
        if codes:
            yield from below(f"{at}.onExitCodes", _exit_code_findings(codes, names))
        for condition in conditions or []:
            yield from one_of(f"{at}.onPodConditions.status", condition.get("status"), ("True", "False", "Unknown"))


def _exit_code_findings(codes: Object, containers: list[Any]) -> Iterator[RuleFinding]:
    operator, values = codes.get("operator"), codes.get("values", [])
    yield from one_of("operator", operator, ("In", "NotIn"), needed=True)
    if not values or len(values) > 255:
        yield RuleFinding("values", values, "must hold 1 to 255 exit codes.")
    if operator == "In" and 0 in values:
        yield RuleFinding("values", 0, "is success, which no rule for failures may name.")
    if any(later <= earlier for earlier, later in itertools.pairwise(values)):
        yield RuleFinding("values", values, "must be in ascending order, each once.")
    if codes.get("containerName") is not None and codes["containerName"] not in containers:
        yield RuleFinding("containerName", codes["containerName"], "names no container of the pod.")


def jobset_findings(jobset: Object) -> Iterator[RuleFinding]:
    """Yield the problems of a JobSet, without those of its Jobs."""
    spec, metadata = jobset.get("spec", {}), jobset.get("metadata", {})
    yield from service_name("metadata.name", metadata.get("name"))
    names = [replicated.get("name") for replicated in spec.get("replicatedJobs", [])]
    if not names:
        yield RuleFinding("spec.replicatedJobs", None, "must hold a replicated job.")
    yield from twice("spec.replicatedJobs", names, "name")
    for index, replicated in enumerate(spec.get("replicatedJobs", [])):
        yield from dns_label(f"spec.replicatedJobs[{index}].name", replicated.get("name"))
        inner = replicated.get("template", {}).get("metadata", {})
        yield from label_map(f"spec.replicatedJobs[{index}].template.metadata.labels", inner.get("labels"))
    success = spec.get("successPolicy", {})
    yield from one_of("spec.successPolicy.operator", success.get("operator"), ("All", "Any"))
    yield from _unknown_targets("spec.successPolicy", success, names)
    subdomain = spec.get("network", {}).get("subdomain")
    if subdomain is not None:
        yield from service_name("spec.network.subdomain", subdomain)
    if metadata.get("annotations", {}).get(EXCLUSIVE_TOPOLOGY, "-") == "":
        yield RuleFinding(f"metadata.annotations.{EXCLUSIVE_TOPOLOGY}", "", "must be the label of a domain.")
    yield from below("spec.failurePolicy", _failure_policy_findings(spec.get("failurePolicy", {}), names))


def _failure_policy_findings(policy: Object, replicated_jobs: list[Any]) -> Iterator[RuleFinding]:
    strategy = policy.get("restartStrategy")
    if strategy == "InPlaceRestart":
        yield RuleFinding("restartStrategy", strategy, "is behind a feature gate of JobSet that is off.")
    else:
        yield from one_of("restartStrategy", strategy, ("Recreate", "BlockingRecreate"))
    if not 0 <= policy.get("maxRestarts", 0) < 2**31:
        yield RuleFinding("maxRestarts", policy["maxRestarts"], "must be between 0 and 2147483647.")
    rules = policy.get("rules", [])
    yield from twice("rules", [rule.get("name") for rule in rules], "name")
    for index, rule in enumerate(rules):
        at = f"rules[{index}]"
        if not _RULE_NAME.fullmatch(str(rule.get("name", ""))):
            message = "must be letters, digits and _ , : alone, begin with a letter and not end with , or :."
            yield RuleFinding(f"{at}.name", rule.get("name"), message)
        yield from one_of(f"{at}.action", rule.get("action"), _JOBSET_ACTIONS, needed=True)
        for reason in rule.get("onJobFailureReasons", []):
            yield from one_of(f"{at}.onJobFailureReasons", reason, FAILURE_REASONS)
        for pattern in rule.get("onJobFailureMessagePatterns", []):
            if not _is_go_pattern(pattern):
                yield RuleFinding(f"{at}.onJobFailureMessagePatterns", pattern, "is no regular expression of Go.")
        yield from _unknown_targets(at, rule, replicated_jobs)


def _unknown_targets(path: str, part: Object, names: list[Any]) -> Iterator[RuleFinding]:
    for target in part.get("targetReplicatedJobs", []):
        if target not in names:
            yield RuleFinding(f"{path}.targetReplicatedJobs", target, "names no replicated job.")


def _is_go_pattern(pattern: Any) -> bool:
    if not isinstance(pattern, str) or _NOT_IN_GO.search(pattern):
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True
