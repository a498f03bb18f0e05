"""The text of each event of events.jsonl, for `scaletrain events`, `scaletrain train` and the log of rank 0."""

from collections.abc import Callable, Mapping
from typing import Any

from scaletrain_cli.reasons import formatted
from scaletrain_cli.text import counted, listed, percent_text, seconds_text

Event = Mapping[str, Any]
_NOT_SHOWN = ("time", "event", "metrics_bytes")


def event_sentence(event: Event) -> str:
    """Return the text of an event; for an unknown event or form, its fields."""
    sentence = _SENTENCES.get(str(event.get("event")))
    try:
        if sentence is None:
            return _fields(event)
        if callable(sentence):
            return sentence(event)
        parts = (sentence,) if isinstance(sentence, str) else sentence
        return "".join(formatted(_template(part, event), event) for part in parts)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):  # the event has another form
        return _fields(event)


def _template(part: "_Part", event: Event) -> str:
    """Return the template of a part; empty if the field that it depends on leaves it out."""
    if isinstance(part, str):
        return part
    field, template = part
    if field.startswith("!"):
        return "" if event[field.lstrip("!")] else template  # an event without the field has another form
    return template if event.get(field) else ""


def _fields(event: Event) -> str:
    given = {key: value for key, value in event.items() if key not in _NOT_SHOWN and value not in (None, "", [])}
    return ", ".join(f"{key.replace('_', ' ')} {_value(value)}" for key, value in given.items())


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return format(value, ".5g")
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value))
    return str(value)


def _resumed(event: Event) -> str:
    lost, passed = event.get("lost_steps", 0), event.get("passed_over") or ()
    source = ", of a copy in host memory" if "saved_step" in event else ""
    text = f"from step {event['step']}{source}" + (
        f"; {counted(lost, 'step')} to repeat" if lost else "; no steps lost"
    )
    return text + (f"; checkpoints skipped: {'; '.join(map(str, passed))}" if passed else "")


def _left(event: Event) -> str:
    step = f"at step {event['step']}"
    if "saved_step" in event:
        return f"{step}; latest checkpoint at step {event['saved_step']}: {event.get('why', 'no time to save')}"
    return f"{step}, state saved"


_CAUSES = {"spike": "after a spike ", "nan": "after a NaN or an infinity "}


def _rolled_back(event: Event) -> str:
    first, last = event["skip"]
    left_out = f"batches {first} to {last} are skipped"
    cause = _CAUSES.get(str(event.get("cause")), "")
    return f"{cause}from step {event['from_step']} to step {event['to_step']}; {left_out}"


def _dead_gradients(event: Event) -> str:
    norms = listed(f"{norm:.3g}" for norm in event["norms"])
    return f"at step {event['step']}: gradient norms of the last {counted(len(event['norms']), 'step')}: {norms}"


def _stopped_early(event: Event) -> str:
    metric = event.get("metric", "validation_loss").replace("_", " ")
    latest = event.get("values", event.get("validation_losses", ()))
    values = ", ".join("NaN" if value is None else f"{value:.4f}" for value in latest)
    return f"at step {event['step']}: the {metric} does not improve; its last values are {values}"


def _evaluated(event: Event) -> str:
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in event["metrics"].items() if "_stderr" not in name)
    failed = f"; failed: {', '.join(event['failed'])}" if event["failed"] else ""
    return f"step {event['step']}: {metrics or 'no metrics'}{failed}"


def _mixture(event: Event) -> str:
    stages = [
        ", ".join(f"{name} {percent_text(share)}" for name, share in stage["shares"].items())
        + (f" from sample {stage['first_sample']:,} on" if stage["first_sample"] > event["first_sample"] else "")
        for stage in event["stages"]
        if stage["first_sample"] >= event["first_sample"] or stage is _begun(event)
    ]
    return f"from batch {event['batch']} (sample {event['first_sample']:,}) on: {'; '.join(stages)}"


def _begun(event: Event) -> Any:
    """Return the stage that the first sample of a mixture is in."""
    return [stage for stage in event["stages"] if stage["first_sample"] <= event["first_sample"]][-1]


def _stragglers(event: Event) -> str:
    if event.get("rank") is None:
        return "no rank is slower than the others"
    own, others = event.get("seconds"), event.get("others_seconds")
    took = ""
    if isinstance(own, int | float) and isinstance(others, int | float):
        took = f": {seconds_text(own)} for its own work in a step, the others {seconds_text(others)}"
    return f"rank {event['rank']} is slower than the others{took}"


def _finding(event: Event) -> str:
    worse = ", worse than before" if event.get("change") == "worse" else ""
    return f"{event['severity']}{worse}, at step {event['step']}: {event['text']}"


def _profiled(event: Event) -> str:
    steps = f"{counted(event['steps'], 'step')} from step {event['step']} on"
    return f"{steps}, {'ranks' if len(event['ranks']) > 1 else 'rank'} {listed(event['ranks'])}"


def _schedule_changed(event: Event) -> str:
    changes = (f"{key} was {_value(edit['was'])}, now {_value(edit['now'])}" for key, edit in event["changes"].items())
    step, rate = event["step"], event["learning_rate"]
    begins = "" if step is None else f"from step {step + 1} on: "
    then = "" if rate is None else f"; the learning rate of step {step + 1} is {rate['now']:.4g}"
    return f"{begins}{', '.join(changes)}{then}"


# What an event says: a template over its fields (reasons.py); parts, of which one with a field is left out where it is
# empty, and one with !field where it is not; or a function.
_Part = str | tuple[str, str]
_SENTENCES: dict[str, str | tuple[_Part, ...] | Callable[[Event], str]] = {
    "submitted": (
        "job {job_id} on {scheduler}",
        ("code", ", with the code {code}"),
        ("automatic", ", resume {automatic} without a person"),
    ),
    "started": "training starts at step 0",
    "resumed": _resumed,
    "first-loss": (
        ("plausible", "{loss:.4f}, plausible"),
        ("!plausible", "{loss:.4f}, implausible"),
        " for an untrained model (ln of the vocabulary size is {ln_vocab_size:.4f})",
    ),
    "measured": "model states take {model_states:bytes}, planned {planned:bytes}",
    "checkpoint": (
        "step {step} committed, {bytes:bytes} in {seconds:seconds}",
        ("blocked_seconds", ", training waited {blocked_seconds:seconds}"),
    ),
    "preempted": _left,
    "finished": "at step {step}",
    "attempt-ended": (
        "attempt {attempt} ended with exit code {exit_code}, {reason}",
        ("message", ": {message}"),
        ("requeue", "; another one follows"),
        ("in_place", " in the same job"),
        ("ends_run", "; none follows"),
        ("why", " ({why})"),
    ),
    "nodes-replaced": ("attempt {attempt} begins without {nodes:every}", ("by", ", on {by:every} instead")),
    "rolled-back": _rolled_back,
    "spike": "at step {step}; {then}",
    "loss-scale-collapsed": (
        "at step {step}: the loss scale fell from {fell_from:g} to {loss_scale:g} within {within_steps:of step}"
    ),
    "dead-gradients": _dead_gradients,
    "flat-loss": (
        "at step {step}: the loss has not fallen, {first_losses:.4f} at first and {recent_losses:.4f} recently"
    ),
    "stage": "steps {step} to {last_step} train {tensors:of tensor}",
    "mixture": _mixture,
    "stopped-early": _stopped_early,
    "evaluation-submitted": "of step {step}: job {job_id}, run {evaluation}",
    "evaluation-not-submitted": "{message}",
    "evaluated": _evaluated,
    "goodput": (
        "{goodput:percent} of {wall_seconds:seconds}; save {save_seconds:seconds}, set-up {restore_seconds:seconds}, "
        "evaluation {evaluation_seconds:seconds}, rollback {rollback_seconds:seconds}, "
        "lost work {lost_work_seconds:seconds}, idle {idle_seconds:seconds}"
    ),
    "data-of-another-user": "{folder} was prepared by {owner}",
    "epochs-counted": "{text}",
    "validation-held-back": (
        "the last {sequences:,} of {of:,} training sequences",
        ("source", " of {source}"),
        " are used for validation: the validation split is too small",
    ),
    "batch-norm-images": lambda event: (
        f"BatchNorm normalizes {counted(event['now'], 'image')} together from step {event['step'] + 1} on, and "
        f"{event['before']:,} before: the layout has changed, and the loss may"
    ),
    "damaged-data": "{file}: {problem}; the run stops",
    "stragglers": _stragglers,
    "profiled": _profiled,
    "profile-refused": "after step {step}: {message}",
    "data-wait": (
        "rank {rank} waited for data {share:percent} of the time of the last {steps:of step}; raise "
        "data.loader.workers ({workers}) and data.loader.prefetch ({prefetch}), or use faster storage"
    ),
    "hub-fetching": "{files:of file} ({bytes:bytes}) to {cache} on {node}",
    "hub-fetched": "{files:of file} on {node}, {bytes:bytes} received in {seconds:seconds}",
    "finding": _finding,
    "finding-cleared": "after {seconds:seconds}, at step {step}: {text}",
    "unreachable": "node {node} does not reach the first node, {address} port {port}: {error}",
    "start-waits": "{text}",
    "hang": lambda event: f"{event.get('message') or 'no progress'} (attempt {event['attempt']})",
    "corruption": "{message} (attempt {attempt})",
    "idle": (
        "the {measured} of the run have done nothing for {seconds:seconds}; unless they do, its ranks save and exit in "
        "{ends_in_seconds:seconds}"
    ),
    "idle-over": "the {measured} of the run work again; it is not ended",
    "idle-unmeasured": "the use of the GPUs of {node} is not known: no idle run is ended",
    "node-agent-stopped": (
        "the agent of node {node} was stopped by a signal for {seconds} s and ",
        ("ends", "stopped again; its ranks save and exit"),
        ("!ends", "was continued by its ranks"),
    ),
    "suspended": "all processes were stopped for {seconds:seconds}, and go on",
    "output-dropped": "{message}: the output of `train` is not shown any more",
    "signal": "{signal} on node {node}, forwarded to its ranks",
    "nodes-excluded": (
        ("nodes", "the job excludes {nodes:every}"),
        ("!nodes", "no nodes are excluded"),
        ("spared", "; too few other nodes to exclude {spared:every}"),
    ),
    "tracker-off": "{message}",
    "tracker-on": "{message}",
    "memory-copies": "the state is copied to host memory every {every:of step}, which blocks training for "
    "{blocked_seconds:seconds}",
    "memory-copies-off": "{message}",
    "mirrored": "step {step}, {bytes:bytes} in {seconds:seconds}",
    "mirror-failed": "{to}: {message}; training continues",
    "mirror-recovered": "{to}, after {seconds:seconds}",
    "mirror-superseded": "{message}",
    "moved": "from {from_run_dir} on {from_host} by the mirror {to}, at step {step}",
    "schedule-changed": _schedule_changed,
    "branched": "from step {step} of {from_run} in {from_run_dir}",
    "resized": "from {before} to {nodes:of node}: {why}",
    "cancelled": "cancelled by the user",
    "stopped": "not requeued: {why} (exit code {exit_code})",
    "from-scratch": "training restarts at step 0 without a checkpoint",
    "pods-force-deleted": "force-deleted the pods {pods:every} of unreachable nodes",
}
EVENT_NAMES = tuple(_SENTENCES)  # of this package; a program of the user's may record others
