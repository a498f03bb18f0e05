"""The texts of a rehearsal (``scaletrain_cli.engine.rehearsal``): verdicts on its items, and causes of failures."""

from scaletrain_cli.reasons import Texts

TEXTS: Texts = {
    # The data and their labels.
    "labels-next": "{share:percent} of the labels are the next token; {ignored:percent} of them are ignored",
    "labels-not-next": "{share:percent} of the labels are the next token; {offset_share:percent} are the token at "
    "offset {offset} (0: the token itself, 1: the next one)",
    "labels-ignored": "{share:percent} of the labels are ignored by the loss",
    "labels-other-offset": "the loaded weights predict the tokens at offset {offset} best (loss {loss:.3f}; "
    "{expected_loss:.3f} for the next ones)",
    "labels-vary": "{different:whole} different labels in {samples:of sample}; the most frequent is that of "
    "{share:percent}",
    "labels-constant": "{share:percent} of {samples:of sample} have the label {label}",
    "captions-alike": "{share:percent} of the captions of a batch are equal",
    "no-labels": "the objective has no labels",
    "duplicates": "{count:of duplicate} in {samples:of sample} ({share:percent})",
    "few-duplicates": "{count:of duplicate} in {samples:of sample}",
    "first-loss-usual": "{loss:.3f}; equal outputs have {expected:.3f}",
    "first-loss-high": "{loss:.3f}, above the {expected:.3f} of equal outputs (at most {high:.2f} is usual)",
    "first-loss-low": "{loss:.3f}, below the {expected:.3f} of equal outputs, which a new model cannot reach",
    "first-loss-not-finite": "the first loss is {loss:number}",
    "first-loss-unknown": "the loss of equal outputs is not defined for this objective",
    "loaded-weights": "the weights are loaded",
    "causal": "a changed token changes no earlier one",
    "causal-in-documents": "a changed token changes no earlier one and no other document",
    "sees-later": "tokens see later ones: a changed token changes earlier hidden states by {change:.2g} of their size",
    "sees-documents": "documents in one row see each other: a changed token changes others by {change:.2g}",
    "no-causal-model": "the model is no causal language model",
    "outputs-in-pipeline": "the stages of a pipeline pass no outputs on",
    # Gradients, time and memory of the first steps.
    "norm-even": "norm {norm:.3g} in {steps:of step}, at most {largest:.3g}",
    "norm-jumps": "the norm jumps to {largest:.3g} in {steps:of step}; its median is {norm:.3g}",
    "norm-zero": "hardly any gradient: norm {norm:.2g} in {steps:of step}",
    "norm-not-finite": "the loss or the gradient is NaN or infinite at step {step:whole}",
    "without-gradient": "{count:of tensor} got no gradient in {steps:of step}: {names:list}",
    "step-time": "{measured:seconds} per step, planned are {planned:seconds} (spread {spread:seconds})",
    "slower-than-plan": "{measured:seconds} per step, {times:.1f} times the planned {planned:seconds}",
    "memory-as-planned": "{used:bytes} at the peak, planned are {planned:bytes}, there are {capacity:bytes}",
    "data-fast": "a batch is read in {seconds:seconds}, a step takes {step:seconds}; waits: {share:percent}",
    "data-slow": "a batch is read in {seconds:seconds}, a step takes {step:seconds}; waits: {share:percent}",
    # The learning rate, and a few samples that are overfitted.
    "rate-in-range": "{lr:.2g}; suggested is {suggestion:.2g} (good from {low:.2g} to {high:.2g} in {steps:of step})",
    "rate-too-high": "{lr:.2g} is too high: it ends at a loss of {loss:.3f} after {steps:of step}, {suggestion:.2g} "
    "at {best_loss:.3f}",
    "rate-diverges": "{lr:.2g} is too high: the loss diverges within {steps:of step}; {suggestion:.2g} ends at "
    "{best_loss:.3f}",
    "rate-too-low": "{lr:.2g} is too low: it ends at a loss of {loss:.3f} after {steps:of step}, {suggestion:.2g} at "
    "{best_loss:.3f}",
    "no-rate-learns": "the loss falls at no learning rate from {low:.1g} to {high:.1g}",
    "budget-too-small": "{steps:of step} do not fit into the budget of {budget:seconds}; --budget needs "
    "{needed:seconds}",
    "overfit-learned": "{start:.3f} to {end:.3f} in {steps:of step}",
    "overfit-on-the-way": "{start:.3f} to {end:.3f} in {steps:of step}, which took the budget; --budget allows more",
    "overfit-not-learned": "a few samples are not learned: loss {start:.3f} to {end:.3f} in {steps:of step}",
    "overfit-not-finite": "the loss of a few samples becomes {end:number} in {steps:of step}",
    "overfit-of-pairs": "the loss of preference pairs has no such end",
    # Checkpoints and preemptions.
    "restored": "{size:bytes} saved in {seconds:seconds} and loaded in {load:seconds}, equal to the bit",
    "restored-other-state": "the restored state differs: {kinds:list}",
    "restored-other-loss": "the next loss after a restore is {loss:.6f} instead of {expected:.6f}",
    "save-slow": "a checkpoint takes {seconds:seconds}, planned are {planned:seconds}",
    "resumed": "resumed at step {step:whole} without lost steps; {steps:of loss/losses} equal an undisturbed trial",
    "not-resumed": "the run did not resume after the signal before step {step:whole}",
    "preemption-lost-steps": "{lost:of step} lost; resumed at step {step:whole}",
    "resumed-other-loss": "the loss of step {step:whole} is {loss:.6f}, undisturbed {expected:.6f}",
    "not-after-failure": "{item} failed",
    "ended": "the job ended in this item: {why}",
    "not-reached": "the job ended before",
    "not-submitted": "the rehearsal failed ({failed:list}; {run}): nothing was submitted",
    "timed-out": "the job did not end within --timeout",
    "replica-does-not-fit": (
        "{nodes:of node} have {devices:of device}, which replicas of {replica:whole} do not fill",
        "Use another --nodes",
    ),
    # Likely causes of failures.
    "cause-attention": "the attention or its mask lets tokens see what they must not",
    "cause-constant-captions": "the captions of the data say nothing about their images",
    "cause-constant-labels": "the labels of the data are missing, or all from one class",
    "cause-cut-answers": "answers are cut off",
    "cause-damaged-storage": "the storage of checkpoints returns other data than were written",
    "cause-detached": "parameters are frozen, not in use, or detached from the loss",
    "cause-long-prompts": "prompts fill the sequences",
    "cause-masked-answers": "too little of a row counts in the loss",
    "cause-no-deduplication": "no stage of the data pipeline removes duplicates",
    "cause-other-device": "the devices are slower than the ones that the plan is for, or shared",
    "cause-other-labels": "the labels are not those of the inputs",
    "cause-other-tokenizer": "the tokenizer of the data is not that of the weights",
    "cause-other-weights": "the weights were trained for another objective",
    "cause-repeated-data": "files are listed twice, or the data repeat themselves",
    "cause-slow-checkpoints": "the storage of checkpoints is slower than planned",
    "cause-slow-step": "the layout, the kernels or the links are slower than planned; `scaletrain profile` shows where",
}
