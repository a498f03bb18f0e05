"""The texts of a rehearsal (``scaletrain_cli.engine.rehearsal``): verdicts on its items, and causes of failures."""

from scaletrain_cli.reasons import Text

_DATA = {
    "labels-next": Text("{share:percent} of the labels are the next token; {ignored:percent} of them are ignored"),
    "labels-not-next": Text(
        "{share:percent} of the labels are the next token; {offset_share:percent} are the token at offset {offset} "
        "(0: the token itself, 1: the next one)"
    ),
    "labels-ignored": Text("{share:percent} of the labels are ignored by the loss"),
    "labels-other-offset": Text(
        "the loaded weights predict the tokens at offset {offset} best (loss {loss:.3f}; {expected_loss:.3f} for the "
        "next ones)"
    ),
    "labels-vary": Text(
        "{different:whole} different labels in {samples:of sample}; the most frequent is that of {share:percent}"
    ),
    "labels-constant": Text("{share:percent} of {samples:of sample} have the label {label}"),
    "captions-alike": Text("{share:percent} of the captions of a batch are equal"),
    "no-labels": Text("the objective has no labels"),
    "duplicates": Text("{count:of duplicate} in {samples:of sample} ({share:percent})"),
    "few-duplicates": Text("{count:of duplicate} in {samples:of sample}"),
    "first-loss-usual": Text("{loss:.3f}; equal outputs have {expected:.3f}"),
    "first-loss-high": Text("{loss:.3f}, above the {expected:.3f} of equal outputs (at most {high:.2f} is usual)"),
    "first-loss-low": Text("{loss:.3f}, below the {expected:.3f} of equal outputs, which a new model cannot reach"),
    "first-loss-not-finite": Text("the first loss is {loss:number}"),
    "first-loss-unknown": Text("the loss of equal outputs is not defined for this objective"),
    "loaded-weights": Text("the weights are loaded"),
    "causal": Text("a changed token changes no earlier one"),
    "causal-in-documents": Text("a changed token changes no earlier one and no other document"),
    "sees-later": Text(
        "tokens see later ones: a changed token changes earlier hidden states by {change:.2g} of their size"
    ),
    "sees-documents": Text("documents in one row see each other: a changed token changes others by {change:.2g}"),
    "no-causal-model": Text("the model is no causal language model"),
    "outputs-in-pipeline": Text("the stages of a pipeline pass no outputs on"),
}
_STEPS = {
    "norm-even": Text("norm {norm:.3g} in {steps:of step}, at most {largest:.3g}"),
    "norm-jumps": Text("the norm jumps to {largest:.3g} in {steps:of step}; its median is {norm:.3g}"),
    "norm-zero": Text("hardly any gradient: norm {norm:.2g} in {steps:of step}"),
    "norm-not-finite": Text("the loss or the gradient is NaN or infinite at step {step:whole}"),
    "without-gradient": Text("{count:of tensor} got no gradient in {steps:of step}: {names:list}"),
    "step-time": Text("{measured:seconds} per step, planned are {planned:seconds} (spread {spread:seconds})"),
    "slower-than-plan": Text("{measured:seconds} per step, {times:.1f} times the planned {planned:seconds}"),
    "memory-as-planned": Text("{used:bytes} at the peak, planned are {planned:bytes}, there are {capacity:bytes}"),
    "data-fast": Text("a batch is read in {seconds:seconds}, a step takes {step:seconds}; waits: {share:percent}"),
    "data-slow": Text("a batch is read in {seconds:seconds}, a step takes {step:seconds}; waits: {share:percent}"),
}
_LEARNING = {
    "rate-in-range": Text(
        "{lr:.2g}; suggested is {suggestion:.2g} (good from {low:.2g} to {high:.2g} in {steps:of step})"
    ),
    "rate-too-high": Text(
        "{lr:.2g} is too high: it ends at a loss of {loss:.3f} after {steps:of step}, {suggestion:.2g} at "
        "{best_loss:.3f}"
    ),
    "rate-diverges": Text(
        "{lr:.2g} is too high: the loss diverges within {steps:of step}; {suggestion:.2g} ends at {best_loss:.3f}"
    ),
    "rate-too-low": Text(
        "{lr:.2g} is too low: it ends at a loss of {loss:.3f} after {steps:of step}, {suggestion:.2g} at "
        "{best_loss:.3f}"
    ),
    "no-rate-learns": Text("the loss falls at no learning rate from {low:.1g} to {high:.1g}"),
    "budget-too-small": Text(
        "{steps:of step} do not fit into the budget of {budget:seconds}; --budget needs {needed:seconds}"
    ),
    "overfit-learned": Text("{start:.3f} to {end:.3f} in {steps:of step}"),
    "overfit-on-the-way": Text(
        "{start:.3f} to {end:.3f} in {steps:of step}, which took the budget; --budget allows more"
    ),
    "overfit-not-learned": Text("a few samples are not learned: loss {start:.3f} to {end:.3f} in {steps:of step}"),
    "overfit-not-finite": Text("the loss of a few samples becomes {end:number} in {steps:of step}"),
    "overfit-of-pairs": Text("the loss of preference pairs has no such end"),
}
_DURABILITY = {
    "restored": Text("{size:bytes} saved in {seconds:seconds} and loaded in {load:seconds}, equal to the bit"),
    "restored-other-state": Text("the restored state differs: {kinds:list}"),
    "restored-other-loss": Text("the next loss after a restore is {loss:.6f} instead of {expected:.6f}"),
    "save-slow": Text("a checkpoint takes {seconds:seconds}, planned are {planned:seconds}"),
    "resumed": Text(
        "resumed at step {step:whole} without lost steps; {steps:of loss/losses} equal an undisturbed trial"
    ),
    "not-resumed": Text("the run did not resume after the signal before step {step:whole}"),
    "preemption-lost-steps": Text("{lost:of step} lost; resumed at step {step:whole}"),
    "resumed-other-loss": Text("the loss of step {step:whole} is {loss:.6f}, undisturbed {expected:.6f}"),
    "not-after-failure": Text("{item} failed"),
    "ended": Text("the job ended in this item: {why}"),
    "not-reached": Text("the job ended before"),
    "not-submitted": Text("the rehearsal failed ({failed:list}; {run}): nothing was submitted"),
    "timed-out": Text("the job did not end within --timeout"),
    "replica-does-not-fit": Text(
        "{nodes:of node} have {devices:of device}, which replicas of {replica:whole} do not fill",
        ("Use another --nodes",),
    ),
}
_CAUSES = {
    "cause-attention": Text("the attention or its mask lets tokens see what they must not"),
    "cause-constant-captions": Text("the captions of the data say nothing about their images"),
    "cause-constant-labels": Text("the labels of the data are missing, or all from one class"),
    "cause-cut-answers": Text("answers are cut off"),
    "cause-damaged-storage": Text("the storage of checkpoints returns other data than were written"),
    "cause-detached": Text("parameters are frozen, not in use, or detached from the loss"),
    "cause-long-prompts": Text("prompts fill the sequences"),
    "cause-masked-answers": Text("too little of a row counts in the loss"),
    "cause-no-deduplication": Text("no stage of the data pipeline removes duplicates"),
    "cause-other-device": Text("the devices are slower than the ones that the plan is for, or shared"),
    "cause-other-labels": Text("the labels are not those of the inputs"),
    "cause-other-tokenizer": Text("the tokenizer of the data is not that of the weights"),
    "cause-other-weights": Text("the weights were trained for another objective"),
    "cause-repeated-data": Text("files are listed twice, or the data repeat themselves"),
    "cause-slow-checkpoints": Text("the storage of checkpoints is slower than planned"),
    "cause-slow-step": Text(
        "the layout, the kernels or the links are slower than planned; `scaletrain profile` shows where"
    ),
}

TEXTS: dict[str, Text] = _DATA | _STEPS | _LEARNING | _DURABILITY | _CAUSES
