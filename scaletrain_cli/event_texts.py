"""The text of each event of events.jsonl, for `scaletrain events`, `scaletrain train` and the log of rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scaletrain_cli.text import bytes_text, counted, listed, percent_text, seconds_text

Event = Mapping[str, Any]
_NOT_SHOWN = ("time", "event", "metrics_bytes")


def event_sentence(event: Event) -> str:
    """Return the text of an event; for an unknown event or form, its fields."""
    sentence = _SENTENCES.get(str(event.get("event")))
    try:
        return sentence(event) if sentence is not None else _fields(event)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):  # the event has another form
        return _fields(event)


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


def _submitted(event: Event) -> str:
    code = event.get("code")
    number = event.get("automatic")
    resumed = f", resume {number} without a person" if number else ""
    return f"job {event['job_id']} on {event['scheduler']}" + (f", with the code {code}" if code else "") + resumed


def _resumed(event: Event) -> str:
    lost, passed = event.get("lost_steps", 0), event.get("passed_over") or ()
    text = f"from step {event['step']}" + (f"; {counted(lost, 'step')} to repeat" if lost else "; no steps lost")
    return text + (f"; checkpoints skipped: {'; '.join(map(str, passed))}" if passed else "")


def _checkpoint(event: Event) -> str:
    blocked = f", training waited {seconds_text(event['blocked_seconds'])}" if event.get("blocked_seconds") else ""
    return f"step {event['step']} committed, {bytes_text(event['bytes'])} in {seconds_text(event['seconds'])}{blocked}"


def _first_loss(event: Event) -> str:
    fresh = "plausible for an untrained model" if event["plausible"] else "implausible for an untrained model"
    return f"{event['loss']:.4f}, {fresh} (ln of the vocabulary size is {event['ln_vocab_size']:.4f})"


def _left(event: Event) -> str:
    step = f"at step {event['step']}"
    if "saved_step" in event:
        return f"{step}; latest checkpoint at step {event['saved_step']}: {event.get('why', 'no time to save')}"
    return f"{step}, state saved"


def _attempt_ended(event: Event) -> str:
    message = f": {event['message']}" if event.get("message") else ""
    then = "the run is requeued" if event.get("requeue") else "the run is not requeued"
    why = f" ({event['why']})" if event.get("why") else ""
    return (
        f"attempt {event['attempt']} ended with exit code {event['exit_code']}, {event['reason']}{message}; {then}{why}"
    )


_CAUSES = {"spike": "after a spike ", "nan": "after a NaN or an infinity "}


def _rolled_back(event: Event) -> str:
    first, last = event["skip"]
    left_out = f"batches {first} to {last} are skipped"
    cause = _CAUSES.get(str(event.get("cause")), "")
    return f"{cause}from step {event['from_step']} to step {event['to_step']}; {left_out}"


def _loss_scale_collapsed(event: Event) -> str:
    scales = f"from {event['fell_from']:g} to {event['loss_scale']:g}"
    return f"at step {event['step']}: the loss scale fell {scales} within {counted(event['within_steps'], 'step')}"


def _dead_gradients(event: Event) -> str:
    norms = listed(f"{norm:.3g}" for norm in event["norms"])
    return f"at step {event['step']}: gradient norms of the last {counted(len(event['norms']), 'step')}: {norms}"


def _flat_loss(event: Event) -> str:
    losses = f"{event['first_losses']:.4f} at first and {event['recent_losses']:.4f} recently"
    return f"at step {event['step']}: the loss has not fallen, {losses}"


def _stopped_early(event: Event) -> str:
    metric = event.get("metric", "validation_loss").replace("_", " ")
    values = ", ".join(f"{value:.4f}" for value in event.get("values", event.get("validation_losses", ())))
    return f"at step {event['step']}: the {metric} does not improve; its last values are {values}"


def _evaluated(event: Event) -> str:
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in event["metrics"].items() if "_stderr" not in name)
    failed = f"; failed: {', '.join(event['failed'])}" if event["failed"] else ""
    return f"step {event['step']}: {metrics or 'no metrics'}{failed}"


def _validation_held_back(event: Event) -> str:
    source = f" of {event['source']}" if event.get("source") else ""
    part = f"the last {event['sequences']:,} of {event['of']:,} training sequences{source}"
    return f"{part} are used for validation: the validation split is too small"


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


def _goodput(event: Event) -> str:
    parts = {"save": "save", "restore": "set-up", "evaluation": "evaluation", "rollback": "rollback"}
    parts |= {"lost_work": "lost work", "idle": "idle"}
    rest = ", ".join(f"{shown} {seconds_text(event[f'{name}_seconds'])}" for name, shown in parts.items())
    return f"{percent_text(event['goodput'])} of {seconds_text(event['wall_seconds'])}; {rest}"


def _data_wait(event: Event) -> str:
    waited = f"{percent_text(event['share'])} of the time of the last {counted(event['steps'], 'step')}"
    given = f"data.loader.workers ({event['workers']}) and data.loader.prefetch ({event['prefetch']})"
    return f"rank {event['rank']} waited for data {waited}; raise {given}, or use faster storage"


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


def _idle(event: Event) -> str:
    since = f"the {event['measured']} of the run have done nothing for {seconds_text(event['seconds'])}"
    return f"{since}; unless they do, its ranks save and exit in {seconds_text(event['ends_in_seconds'])}"


def _node_agent_stopped(event: Event) -> str:
    then = "stopped again; its ranks save and exit" if event["ends"] else "was continued by its ranks"
    return f"the agent of node {event['node']} was stopped by a signal for {event['seconds']} s and {then}"


def _nodes_excluded(event: Event) -> str:
    text = f"the job excludes {', '.join(event['nodes'])}" if event["nodes"] else "no nodes are excluded"
    spared = event.get("spared")
    return text + (f"; too few other nodes to exclude {', '.join(spared)}" if spared else "")


def _hub_fetched(event: Event) -> str:
    received = f"{bytes_text(event['bytes'])} received in {seconds_text(event['seconds'])}"
    return f"{counted(event['files'], 'file')} on {event['node']}, {received}"


def _schedule_changed(event: Event) -> str:
    changes = (f"{key} was {_value(each['was'])}, now {_value(each['now'])}" for key, each in event["changes"].items())
    step, rate = event["step"], event["learning_rate"]
    begins = "" if step is None else f"from step {step + 1} on: "
    then = "" if rate is None else f"; the learning rate of step {step + 1} is {rate['now']:.4g}"
    return f"{begins}{', '.join(changes)}{then}"


_SENTENCES: dict[str, Callable[[Event], str]] = {
    "submitted": _submitted,
    "started": lambda event: "training starts at step 0",
    "resumed": _resumed,
    "first-loss": _first_loss,
    "measured": lambda event: (
        f"model states take {bytes_text(event['model_states'])}, planned {bytes_text(event['planned'])}"
    ),
    "checkpoint": _checkpoint,
    "preempted": _left,
    "finished": lambda event: f"at step {event['step']}",
    "attempt-ended": _attempt_ended,
    "rolled-back": _rolled_back,
    "spike": lambda event: f"at step {event['step']}; {event['then']}",
    "loss-scale-collapsed": _loss_scale_collapsed,
    "dead-gradients": _dead_gradients,
    "flat-loss": _flat_loss,
    "stage": lambda event: f"steps {event['step']} to {event['last_step']} train {counted(event['tensors'], 'tensor')}",
    "mixture": _mixture,
    "stopped-early": _stopped_early,
    "evaluation-submitted": lambda event: f"of step {event['step']}: job {event['job_id']}, run {event['evaluation']}",
    "evaluation-not-submitted": lambda event: str(event["message"]),
    "evaluated": _evaluated,
    "goodput": _goodput,
    "data-of-another-user": lambda event: f"{event['folder']} was prepared by {event['owner']}",
    "epochs-counted": lambda event: str(event["text"]),
    "validation-held-back": _validation_held_back,
    "batch-norm-images": lambda event: (
        f"BatchNorm normalizes {counted(event['now'], 'image')} together from step {event['step'] + 1} on, and "
        f"{event['before']:,} before: the layout has changed, and the loss may"
    ),
    "damaged-data": lambda event: f"{event['file']}: {event['problem']}; the run stops",
    "stragglers": _stragglers,
    "profiled": _profiled,
    "profile-refused": lambda event: f"after step {event['step']}: {event['message']}",
    "data-wait": _data_wait,
    "hub-fetching": lambda event: (
        f"{counted(event['files'], 'file')} ({bytes_text(event['bytes'])}) to {event['cache']} on {event['node']}"
    ),
    "hub-fetched": _hub_fetched,
    "finding": _finding,
    "finding-cleared": lambda event: (
        f"after {seconds_text(event['seconds'])}, at step {event['step']}: {event['text']}"
    ),
    "unreachable": lambda event: (
        f"node {event['node']} does not reach the first node, {event['address']} port {event['port']}: {event['error']}"
    ),
    "hang": lambda event: f"{event.get('message') or 'no progress'} (attempt {event['attempt']}, node {event['node']})",
    "idle": _idle,
    "idle-over": lambda event: f"the {event['measured']} of the run work again; it is not ended",
    "idle-unmeasured": lambda event: f"the use of the GPUs of {event['node']} is not known: no idle run is ended",
    "node-agent-stopped": _node_agent_stopped,
    "suspended": lambda event: f"all processes were stopped for {seconds_text(event['seconds'])}, and go on",
    "output-dropped": lambda event: f"{event['message']}: the output of `train` is not shown any more",
    "signal": lambda event: f"{event['signal']} on node {event['node']}, forwarded to its ranks",
    "nodes-excluded": _nodes_excluded,
    "tracker-off": lambda event: str(event["message"]),
    "tracker-on": lambda event: str(event["message"]),
    "mirrored": lambda event: f"step {event['step']}, {bytes_text(event['bytes'])} in {seconds_text(event['seconds'])}",
    "mirror-failed": lambda event: f"{event['to']}: {event['message']}; training continues",
    "mirror-recovered": lambda event: f"{event['to']}, after {seconds_text(event['seconds'])}",
    "mirror-superseded": lambda event: str(event["message"]),
    "moved": lambda event: (
        f"from {event['from_run_dir']} on {event['from_host']} by the mirror {event['to']}, at step {event['step']}"
    ),
    "schedule-changed": _schedule_changed,
    "branched": lambda event: f"from step {event['step']} of {event['from_run']} in {event['from_run_dir']}",
    "resized": lambda event: f"from {event['before']} to {counted(event['nodes'], 'node')}: {event['why']}",
    "cancelled": lambda event: "canceled by the user",
    "stopped": lambda event: f"not requeued: {event['why']} (exit code {event['exit_code']})",
    "from-scratch": lambda event: "training restarts at step 0 without a checkpoint",
    "pods-force-deleted": lambda event: f"force-deleted the pods {', '.join(event['pods'])} of unreachable nodes",
}
EVENT_NAMES = tuple(_SENTENCES)  # of this package; a program of the user's may record others
