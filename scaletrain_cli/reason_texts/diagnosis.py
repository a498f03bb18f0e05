"""The texts of the diagnosis of a run (``scaletrain_cli.diagnosis``): findings, causes, and what is not concluded."""

from scaletrain_cli.reasons import Text

_FINDINGS = {
    "first-loss-high": Text(
        "the first loss is {loss:.3f}, above the {expected:.3f} of equal outputs (ln {vocab_size}; at most {high:.2f} "
        "is usual)"
    ),
    "first-loss-low": Text(
        "the first loss is {loss:.3f}, below the {expected:.3f} of equal outputs (ln {vocab_size}), which a new model "
        "cannot reach"
    ),
    "loss-above-start": Text("the loss diverges: {now:.3f} at step {step:whole}, {start:.3f} at the start"),
    "loss-above-uninformed": Text(
        "the loss is {now:.3f} at step {step:whole}, above the {uninformed:.3f} of equal outputs"
    ),
    "loss-rising": Text("the loss rises: {now:.3f} at step {step:whole}, {best:.3f} around step {best_step:whole}"),
    "loss-flat": Text("the loss does not fall: {start:.3f} at the start, {now:.3f} after {steps:of step}"),
    "loss-oscillating": Text(
        "the loss alternates by {band:.3g} around {now:.3f}: neighboring steps have a correlation of {correlation:.2f}"
    ),
    "loss-spikes": Text(
        "{count:of spike} of the loss; the largest at step {step:whole}: {peak:.3f} from a level of {level:.3f}; "
        "{rollbacks:of rollback}"
    ),
    "not-finite": Text(
        "a loss or gradient was NaN or infinite at step {step:whole} ({count:of time}); gradient norm before: "
        "{norm:.3g}, usually {usual_norm:.3g}"
    ),
    "learning-rate-too-high": Text(
        "the learning rate is too high: from step {step:whole} on, at a rate of {rate:.2g}, the loss rose to "
        "{peak:.3f}, above its start of {start:.3f}; the peak rate is {lr:.2g}"
    ),
    "warm-up-too-short": Text(
        "the warm-up of {steps:of step} is too short: from step {step:whole} on the loss rose to {peak:.3f}, above its "
        "start of {start:.3f}, and came back"
    ),
    "learning-rate-too-low": Text(
        "the learning rate of {lr:.2g} is too low: in {steps:of step} no weight can have moved by more than "
        "{share:percent} of the spread of the first weights; the loss fell from {start:.3f} to {now:.3f}"
    ),
    "always-clipped": Text(
        "{share:percent} of the last {steps:of step} are clipped: the gradient norm is {norm:.3g}, the limit "
        "{limit:.3g}"
    ),
    "gradient-norm-grows": Text(
        "the gradient norm grows: {now:.3g} at step {step:whole}, {early:.3g} after the warm-up"
    ),
    "gradient-vanishes": Text("the gradient vanishes: its norm is {now:.3g} at step {step:whole}, {early:.3g} before"),
    "gradient-norm-spikes": Text(
        "{count:of spike} of the gradient norm in {steps:of step}, to ten times its level or more; the largest at step "
        "{step:whole}: {peak:.3g} from {level:.3g}"
    ),
    "gradients-dead": Text(
        "the gradient was zero for {steps:of step} until step {step:whole} (norm {norm:.3g} at most)"
    ),
    "loss-scale-collapses": Text(
        "the loss scale of fp16 collapses: {scale:g} now, {first:g} at first; {skipped:whole} of {steps:of step} "
        "skipped"
    ),
    "overfitting": Text(
        "the model overfits: the validation loss rose to {now:.3f} at step {step:whole} from {best:.3f} at step "
        "{best_step:whole}, while the training loss fell to {training:.3f}"
    ),
    "source-stands-still": Text(
        "{source:source} is not learned: its loss is {now:.3f}, {early:.3f} before, while that of another source fell "
        "by {others:percent}"
    ),
    "data-wait": Text("rank {rank} waits for data {share:percent} of the time, {wait:seconds} per step"),
    "slow-rank": Text(
        "rank {rank} is slow: {seconds:seconds} for its own work in a step, the others {others:seconds}; that is "
        "{share:percent} of a step"
    ),
    "slower-than-plan": Text("a step takes {measured:seconds}, {times:.2f} times the planned {planned:seconds}"),
    "slowing-down": Text("steps take {now:seconds}, {times:.2f} times the {early:seconds} at the start of the attempt"),
    "memory-grows": Text(
        "the memory of rank 0 grows by {per_step:bytes} per step, to {now:bytes} at step {step:whole}"
    ),
    "memory-grows-full": Text(
        "the memory of rank 0 grows by {per_step:bytes} per step, to {now:bytes} at step {step:whole}: the "
        "{capacity:bytes} are full around step {full_at:whole}"
    ),
    "memory-nearly-full": Text("{share:percent} of the memory of a GPU is used: {used:bytes} of {capacity:bytes}"),
    "memory-above-plan": Text("{part} take {measured:bytes}, planned are {planned:bytes}"),
    "restarts": Text(
        "{restarts:of restart} took {share:percent} of the time: lost work {lost_work:seconds}, set-up "
        "{set_up:seconds}, waiting {idle:seconds}"
    ),
    "saves-slow": Text(
        "a checkpoint takes {seconds:seconds}, planned are {planned:seconds}; it blocks training for "
        "{blocked:seconds}, {share:percent} of the time"
    ),
    "saves-block": Text(
        "checkpoints block training for {share:percent} of the time: {blocked:seconds} every {interval:seconds}"
    ),
    "checkpoint-interval": Text(
        "checkpoints every {steps:.0f} steps cost {excess:percent} of the time more than every {best:whole} would, "
        "with {losses:seconds} between interruptions"
    ),
}

_CAUSES = {
    "cause-alternating-data": Text("batches of two kinds alternate in the data"),
    "cause-bad-batch": Text("unusual samples around step {step:whole}; `scaletrain data show` prints a batch"),
    "cause-changed-data": Text("other data came later, or the data are damaged"),
    "cause-chosen-workers": Text("the workers that were chosen cannot read and decode fast enough"),
    "cause-ends": Text("attempts ended: {reason}, {times:of time}; `scaletrain explain` has the evidence"),
    "cause-few-steps": Text("{steps:of step} are too few to learn"),
    "cause-few-workers": Text("{workers:of worker} cannot read and decode fast enough"),
    "cause-fp16-overflow": Text("fp16 overflows at 65,504; bf16 has the range of fp32"),
    "cause-fp16-range": Text("activations or gradients leave the range of fp16; bf16 needs no loss scale"),
    "cause-free-blocks": Text("the C library keeps free blocks between blocks in use"),
    "cause-frequent-saves": Text("checkpoints are more frequent than interruptions need"),
    "cause-growing-wait": Text("the wait for data has grown by {wait:seconds} per step"),
    "cause-growing-weights": Text("weights or logits grow; weight decay holds them"),
    "cause-ignored-targets": Text("no token of the batches counts in the loss"),
    "cause-keep-best": Text("the best checkpoint may be deleted as newer ones are saved"),
    "cause-large-micro-batch": Text("the micro-batch of {micro_batch} needs too much for activations"),
    "cause-larger-batches": Text("later batches are larger"),
    "cause-leak": Text("a program keeps tensors or objects of every step"),
    "cause-learned-source": Text("{source:source} has been learned; more of it teaches little"),
    "cause-little-data": Text("the data are few for this model, and are repeated"),
    "cause-little-regularization": Text("little regularization"),
    "cause-long-interval": Text("checkpoints are too rare for these interruptions"),
    "cause-long-set-up": Text("an attempt takes long until its first step: start of processes, loading, compilation"),
    "cause-low-clipping": Text("the limit of {limit:g} is far below the usual norm of {norm:.3g}"),
    "cause-no-clipping": Text("gradients are not clipped"),
    "cause-no-gradient": Text("hardly any gradient reaches the weights (norm {norm:.3g})"),
    "cause-no-recompute": Text("activations are kept that could be recomputed"),
    "cause-not-recorded": Text(
        "{share:percent} of the excess has no recorded cause; the largest part of the plan is {part} "
        "({seconds:seconds}). A profile can tell kernels, communication and the host apart"
    ),
    "cause-nothing-to-learn": Text("the targets do not follow from the inputs: wrong labels or random data"),
    "cause-plan-is-low": Text("the plan is too low for this model or library; its verdict is not to be relied on"),
    "cause-queue": Text("the job waits in the queue between attempts"),
    "cause-random-source": Text("{source:source} cannot be predicted: damaged text, another encoding, or random data"),
    "cause-rare-saves": Text("work since the last checkpoint is lost at each interruption"),
    "cause-rare-source": Text("{source:source} is too rare in the batches"),
    "cause-rate-too-high": Text("the learning rate ({lr:.2g}) is too high"),
    "cause-rate-too-low": Text("the learning rate ({lr:.2g}) is too low"),
    "cause-saturated": Text("units are saturated or dead, and pass no gradient on"),
    "cause-short-interval": Text("checkpoints are too frequent for these interruptions"),
    "cause-short-warm-up": Text("the warm-up ({steps:of step}) is too short"),
    "cause-slow-checkpoint-storage": Text("the storage wrote {bytes:bytes} in {seconds:seconds}"),
    "cause-slow-node": Text("the node or device of rank {rank} is slow or shared; `scaletrain preflight` measures it"),
    "cause-slow-rank-holds": Text("a slow rank explains {share:percent} of the excess"),
    "cause-slow-second-moment": Text("Adam's beta2 of {beta:g} follows larger gradients slowly (arXiv:2304.13013)"),
    "cause-slow-storage": Text("the storage is slow; more batches read ahead (now {prefetch}) bridge its pauses"),
    "cause-slower-device": Text("the device is throttled, hot, or shared with another process"),
    "cause-small-vocabulary": Text("the data use a part of the vocabulary, or the weights are not new"),
    "cause-synchronous-saves": Text("training waits until a checkpoint is written"),
    "cause-targets-of-other-tokens": Text("the loss counts padding, or another tokenizer's tokens"),
    "cause-trained-too-long": Text("training went on after step {step:whole}, when the validation was best"),
    "cause-uneven-data": Text("its batches take longer to read or are longer"),
    "cause-visible-targets": Text("targets are visible in the inputs, or few distinct tokens occur"),
    "cause-waits-for-data": Text("waiting for data explains {share:percent} of the excess"),
    "cause-wide-weights": Text("the first weights are too large: initializer_range {given:g}, usually {usual:g}"),
}

_NOT_CONCLUDED = {
    "check-failed": Text("{check}: the record has a form that this version does not know"),
    "few-steps": Text("{steps:of step} measured; the loss is judged from {needed} on"),
    "sampled": Text(
        "{read:whole} of {last:of step} were read; what lasts a few steps is known from events of the guard only"
    ),
    "not-from-scratch": Text(
        "the first loss and the learning rate: those of a new model do not apply to given weights, adapters and "
        "preference pairs"
    ),
    "not-text": Text("the first loss: it is that of equal outputs for new language models only"),
    "no-validation": Text("overfitting: no validation has been measured"),
    "on-cpu": Text("the step time beside the plan: planned times are rough for CPUs"),
    "rate-needs-trial": Text(
        "whether another learning rate would be better, as long as the loss falls: that needs a trial"
    ),
    "not-recorded": Text(
        "utilization and clocks of GPUs, time in communication and on the host, norms by layer: not recorded"
    ),
}

TEXTS: dict[str, Text] = _FINDINGS | _CAUSES | _NOT_CONCLUDED
