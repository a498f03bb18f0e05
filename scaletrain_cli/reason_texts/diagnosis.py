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
    "loss-swings": Text(
        "the loss swings by {band:.3g} around {now:.3f}, with a period of {period:of step}: the correlation is "
        "{correlation:.2f} after half of it"
    ),
    "targets-visible": Text(
        "the loss is {now:.3f} and was below {limit:.2f} from step {step:whole} on, where equal outputs have "
        "{uninformed:.3f}: so little cannot be learned so soon"
    ),
    "order-not-learned": Text(
        "the loss stands at {now:.3f} at step {last:whole}, near the {entropy:.3f} of token frequencies, which it "
        "reached at step {step:whole}: which token follows which is not learned"
    ),
    "data-duplicated": Text(
        "{share:percent} of the passages of the training text ({tokens:whole} tokens) occur again in a sample of it"
    ),
    "data-repeated": Text("the {tokens:whole} tokens of the training text have been read {epochs:.1f} times"),
    "loss-stairs": Text(
        "the loss falls in stairs where an epoch begins ({count:of time}), by {fall:.3g} at step {step:whole}"
    ),
    "loss-falls-at-resume": Text(
        "the loss is lower by {fall:.3g} after a resume at step {step:whole} ({count:of time}), as for text that was "
        "read before"
    ),
    "validation-far-above": Text(
        "the validation loss of {validation:.3f} at step {step:whole} is {gap:.3f} above the training loss of "
        "{training:.3f}"
    ),
    "underfitting": Text(
        "the model underfits: training ({training:.3f}) and validation ({validation:.3f}) stand close to each other at "
        "step {step:whole}, not far below the {reference:.3f} of a model without context"
    ),
    "batch-too-large": Text(
        "the global batch of {batch:whole} is {times:.3g} times the gradient noise scale of {scale:.3g}: "
        "training needs more samples than with smaller batches"
    ),
    "layer-dead": Text("{layer} gets no gradient: {norm:.3g}, others {usual:.3g} ({count:of layer} in all)"),
    "layer-silent": Text("{share:percent} of the units of {layer} are zero for all inputs ({count:of layer} in all)"),
    "layer-exploding": Text("the {what} of {layer} are {value:.3g}, {times:.0f} times those of others ({usual:.3g})"),
    "update-ratio": Text("each step changes {layer} by {ratio:percent} of its weights, like layers by {usual:percent}"),
    "host-bound": Text(
        "the GPUs wait for the host: it needs {seconds:seconds} per step, {share:percent} of it, to launch kernels, "
        "and they are busy for {utilization:percent} of the time"
    ),
    "communication-bound": Text(
        "each of {ranks:of rank} waits in collectives for at least {share:percent} of the step, {seconds:seconds}; "
        "planned are {planned:seconds}"
    ),
    "micro-batches-small": Text(
        "a step takes {passes:whole} passes of micro-batches of {micro_batch}; with {larger} it would be "
        "{gain:percent} shorter by the plan, and need {peak:bytes} of {capacity:bytes}"
    ),
    "recomputation-needless": Text(
        "activations are recomputed ({mode}), though memory has room: {used:bytes} of {capacity:bytes} are used, "
        "{peak:bytes} would be without; the step would be {gain:percent} shorter by the plan"
    ),
    "utilization-low": Text(
        "the MFU is {mfu:percent}, planned are {planned:percent}; a step takes {step:seconds} instead of "
        "{expected:seconds}"
    ),
    "gpu-hot": Text(
        "GPU {gpu} lowers its clock for heat in {share:percent} of the time: {celsius:.0f} °C, {clock:.3g} of "
        "{highest:.3g} Hz"
    ),
    "gpu-slowed-by-hardware": Text(
        "GPU {gpu} is slowed by its hardware in {share:percent} of the time: {celsius:.0f} °C, {watts:.0f} W, "
        "{clock:.3g} of {highest:.3g} Hz"
    ),
    "gpu-slow-clock": Text(
        "the clock of GPU {gpu} is {share:percent} below that of the others: {clock:.3g} Hz, {celsius:.0f} °C, "
        "{watts:.0f} W"
    ),
    "gpu-at-power-limit": Text(
        "GPU {gpu} is at its limit of power in {share:percent} of the time: {watts:.0f} W, {clock:.3g} of "
        "{highest:.3g} Hz"
    ),
    "gpu-errors": Text("GPU {gpu} had {errors:of error} of memory that its ECC could not correct"),
    "pcie-replays": Text("GPU {gpu} sent {replays:of packet} again over PCIe in {seconds:seconds}"),
    "cpu-throttled": Text("the CPU quota of its cgroup stops the processes of {node} in {share:percent} of the time"),
    "node-memory-short": Text("{node} is short of memory: {available:bytes} of {total:bytes} are available"),
    "memory-grows": Text(
        "the memory of rank {rank} grows by {per_step:bytes} per step, to {now:bytes} at step {step:whole}"
    ),
    "memory-grows-full": Text(
        "the memory of rank {rank} grows by {per_step:bytes} per step, to {now:bytes} at step {step:whole}: the "
        "{capacity:bytes} are full around step {full_at:whole}"
    ),
    "memory-nearly-full": Text("{share:percent} of the memory of a GPU is used: {used:bytes} of {capacity:bytes}"),
    "memory-above-plan": Text("{part} take {measured:bytes}, planned are {planned:bytes}"),
    "restarts": Text(
        "{restarts:of restart} took {share:percent} of the time: lost work {lost_work:seconds}, set-up "
        "{set_up:seconds}, waiting {idle:seconds}"
    ),
    "mirror-failing": Text("checkpoints are not copied to the mirror {to}, whose newest one is of step {step:whole}"),
    "mirror-behind": Text(
        "step {waiting:whole} waits for {lag:seconds} for the mirror {to}, whose newest checkpoint is of step "
        "{step:whole}"
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
    "cause-unshifted-labels": Text(
        "labels are the inputs themselves, not shifted by one; `scaletrain rehearse` compares them token by token"
    ),
    "cause-shifted-labels": Text(
        "labels are shifted once too often, or do not belong to the inputs; `scaletrain rehearse` compares them token "
        "by token"
    ),
    "cause-shuffled-tokens": Text("the order of the tokens carries nothing: shuffled or encoded text"),
    "cause-repetitive-data": Text("the text is the same few passages again and again"),
    "cause-one-class": Text("all images have the same label: a column of labels that is not read"),
    "cause-duplicates": Text("the text holds copies; `data.steps` can remove them"),
    "cause-many-epochs": Text("fewer steps would do"),
    "cause-sampler-restarts": Text("the sampler began anew with the attempt, and repeats what was read"),
    "cause-other-validation-data": Text("the validation data are of another kind than the training data"),
    "cause-much-regularization": Text("the weight decay of {decay:g} holds the weights near zero"),
    "cause-small-model": Text("the model is too small for the data"),
    "cause-much-momentum": Text("gradients of many steps add up (momentum or beta1 {beta:g})"),
    "cause-large-batch": Text("the batch averages gradients that agree already; smaller ones need fewer samples"),
    "cause-rate-for-batch": Text(
        "the learning rate ({lr:.2g}) does not use the batch: larger batches bear larger rates"
    ),
    "cause-zero-weights": Text("its weights are zero at first, or have been masked"),
    "cause-large-layer": Text("its first weights are larger than those of others, or nothing normalizes its input"),
    "cause-small-weights": Text("its weights are far smaller than those of others"),
    "cause-not-compiled": Text("kernels are launched one by one; a compiled graph launches fewer"),
    "cause-small-kernels": Text("the model's kernels are too small for this GPU"),
    "cause-small-micro-batch": Text("micro-batches of {micro_batch} give each pass too little work"),
    "cause-recomputes": Text("recomputation saves memory that is not needed"),
    "cause-slow-link": Text("the link between ranks is slower than its data sheet, or shared"),
    "cause-link-errors": Text("the InfiniBand ports of {node} had {errors:of error}"),
    "cause-small-batch": Text(
        "each gradient exchange follows little work; larger batches per rank exchange less often"
    ),
    "cause-sharded-weights": Text("ZeRO-3 gathers weights in each pass; stages 1 and 2 do not"),
    "cause-part-data": Text("waiting for data: {seconds:seconds}, {share:percent} of the step"),
    "cause-part-communication": Text("waiting in collectives: {seconds:seconds}, {share:percent} of the step"),
    "cause-part-optimizer": Text("the optimizer: {seconds:seconds}, {share:percent} of the step"),
    "cause-part-forward": Text("forward passes: {seconds:seconds}, {share:percent} of the step"),
    "cause-part-backward": Text("backward passes: {seconds:seconds}, {share:percent} of the step"),
    "cause-not-split": Text("the parts of the step were not measured; a profile has them"),
    "cause-cooling": Text("the cooling of GPU {gpu} or of its rack does not suffice"),
    "cause-power-supply": Text("power supply or cooling of GPU {gpu}: an external brake, or a temperature limit"),
    "cause-clock-limit": Text("a clock was set on GPU {gpu}, or it is worn or in another slot"),
    "cause-power-limit": Text("usual at full load; the limit of power sets the speed"),
    "cause-failing-gpu": Text("GPU {gpu} is failing: drain its node, and have it tested"),
    "cause-pcie-link": Text("a bad riser, cable or slot of GPU {gpu}"),
    "cause-cpu-quota": Text("the job asked for fewer CPUs than it uses (CPU limit of the container or of the job)"),
    "cause-many-workers": Text("too many reader processes for this node"),
    "cause-host-memory": Text("offloaded states and pinned buffers fill the host's memory"),
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
    "cause-mirror-fails": Text("{cause}"),
    "cause-mirror-slow": Text("the bandwidth to the mirror is less than a checkpoint needs in its interval"),
    "cause-mirror-often": Text("each checkpoint is copied; with fewer the mirror keeps up"),
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
    "cause-own-loader": Text(
        "the program takes its batches too slowly: more workers or read-ahead of its loader, or faster storage"
    ),
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
    "elsewhere": Text(
        "the run directory is on a volume of the cluster that is not mounted here; run `scaletrain diagnose {run}` in "
        "a pod that mounts it"
    ),
    "no-telemetry": Text(
        "utilization and clocks of GPUs, time in communication and on the host, other ranks' memory: there is no "
        "telemetry"
    ),
    "no-gpu-telemetry": Text("utilization, clocks and errors of GPUs: the telemetry has none"),
    "no-layers": Text("dead and exploding layers: norms by layer were not measured"),
    "no-noise-scale": Text("whether the batch is too large: the gradient noise scale was not measured"),
    "no-dataset": Text("labels shifted twice, duplicates and epochs: no prepared text of one source is here"),
}

TEXTS: dict[str, Text] = _FINDINGS | _CAUSES | _NOT_CONCLUDED
