"""The texts of the diagnosis of a run (``scaletrain_cli.diagnosis``): findings, causes, and what is not concluded."""

from scaletrain_cli.reasons import Texts

TEXTS: Texts = {
    # Findings.
    "first-loss-high": "the first loss is {loss:.3f}, above the {expected:.3f} of equal outputs (ln {vocab_size}; at "
    "most {high:.2f} is usual)",
    "first-loss-low": "the first loss is {loss:.3f}, below the {expected:.3f} of equal outputs (ln {vocab_size}), "
    "which a new model cannot reach",
    "loss-above-start": "the loss diverges: {now:.3f} at step {step:whole}, {start:.3f} at the start",
    "loss-above-uninformed": "the loss is {now:.3f} at step {step:whole}, above the {uninformed:.3f} of equal outputs",
    "loss-rising": "the loss rises: {now:.3f} at step {step:whole}, {best:.3f} around step {best_step:whole}",
    "loss-flat": "the loss does not fall: {start:.3f} at the start, {now:.3f} after {steps:of step}",
    "loss-oscillating": "the loss alternates by {band:.3g} around {now:.3f}: neighboring steps have a correlation of "
    "{correlation:.2f}",
    "loss-spikes": "{count:of spike} of the loss; the largest at step {step:whole}: {peak:.3f} from a level of "
    "{level:.3f}; {rollbacks:of rollback}",
    "not-finite": "a loss or gradient was NaN or infinite at step {step:whole} ({count:of time}); gradient norm "
    "before: {norm:.3g}, usually {usual_norm:.3g}",
    "learning-rate-too-high": "the learning rate is too high: from step {step:whole} on, at a rate of {rate:.2g}, the "
    "loss rose to {peak:.3f}, above its start of {start:.3f}; the peak rate is {lr:.2g}",
    "warm-up-too-short": "the warm-up of {steps:of step} is too short: from step {step:whole} on the loss rose to "
    "{peak:.3f}, above its start of {start:.3f}, and came back",
    "learning-rate-too-low": "the learning rate of {lr:.2g} is too low: in {steps:of step} no weight can have moved "
    "by more than {share:percent} of the spread of the first weights; the loss fell from {start:.3f} to {now:.3f}",
    "always-clipped": "{share:percent} of the last {steps:of step} are clipped: the gradient norm is {norm:.3g}, the "
    "limit {limit:.3g}",
    "gradient-norm-grows": "the gradient norm grows: {now:.3g} at step {step:whole}, {early:.3g} after the warm-up",
    "gradient-vanishes": "the gradient vanishes: its norm is {now:.3g} at step {step:whole}, {early:.3g} before",
    "gradient-norm-spikes": "{count:of spike} of the gradient norm in {steps:of step}, to ten times its level or "
    "more; the largest at step {step:whole}: {peak:.3g} from {level:.3g}",
    "gradients-dead": "the gradient was zero for {steps:of step} until step {step:whole} (norm {norm:.3g} at most)",
    "loss-scale-collapses": "the loss scale of fp16 collapses: {scale:g} now, {first:g} at first; {skipped:whole} of "
    "{steps:of step} skipped",
    "overfitting": "the model overfits: the validation loss rose to {now:.3f} at step {step:whole} from {best:.3f} at "
    "step {best_step:whole}, while the training loss fell to {training:.3f}",
    "source-stands-still": "{source:source} is not learned: its loss is {now:.3f}, {early:.3f} before, while that of "
    "another source fell by {others:percent}",
    "data-wait": "rank {rank} waits for data {share:percent} of the time, {wait:seconds} per step",
    "slow-rank": "rank {rank} is slow: {seconds:seconds} for its own work in a step, the others {others:seconds}; "
    "that is {share:percent} of a step",
    "slower-than-plan": "a step takes {measured:seconds}, {times:.2f} times the planned {planned:seconds}",
    "slowing-down": "steps take {now:seconds}, {times:.2f} times the {early:seconds} at the start of the attempt",
    "loss-swings": "the loss swings by {band:.3g} around {now:.3f}, with a period of {period:of step}: the "
    "correlation is {correlation:.2f} after half of it",
    "targets-visible": "the loss is {now:.3f} and was below {limit:.2f} from step {step:whole} on, where equal "
    "outputs have {uninformed:.3f}: so little cannot be learned so soon",
    "order-not-learned": "the loss stands at {now:.3f} at step {last:whole}, near the {entropy:.3f} of token "
    "frequencies, which it reached at step {step:whole}: which token follows which is not learned",
    "data-duplicated": "{share:percent} of the passages of the training text ({tokens:whole} tokens) occur again in a "
    "sample of it",
    "data-repeated": "the {tokens:whole} tokens of the training text have been read {epochs:.1f} times",
    "loss-stairs": "the loss falls in stairs where an epoch begins ({count:of time}), by {fall:.3g} at step "
    "{step:whole}",
    "loss-falls-at-resume": "the loss is lower by {fall:.3g} after a resume at step {step:whole} ({count:of time}), "
    "as for text that was read before",
    "validation-far-above": "the validation loss of {validation:.3f} at step {step:whole} is {gap:.3f} above the "
    "training loss of {training:.3f}",
    "underfitting": "the model underfits: training ({training:.3f}) and validation ({validation:.3f}) stand close to "
    "each other at step {step:whole}, not far below the {reference:.3f} of a model without context",
    "batch-too-large": "the global batch of {batch:whole} is {times:.3g} times the gradient noise scale of "
    "{scale:.3g}: training needs more samples than with smaller batches",
    "layer-dead": "{layer} gets no gradient: {norm:.3g}, others {usual:.3g} ({count:of layer} in all)",
    "layer-silent": "{share:percent} of the units of {layer} are zero for all inputs ({count:of layer} in all)",
    "layer-exploding": "the {what} of {layer} are {value:.3g}, {times:.0f} times those of others ({usual:.3g})",
    "update-ratio": "each step changes {layer} by {ratio:percent} of its weights, like layers by {usual:percent}",
    "host-bound": "the GPUs wait for the host: it needs {seconds:seconds} per step, {share:percent} of it, to launch "
    "kernels, and they are busy for {utilization:percent} of the time",
    "communication-bound": "each of {ranks:of rank} waits in collectives for at least {share:percent} of the step, "
    "{seconds:seconds}; planned are {planned:seconds}",
    "micro-batches-small": "a step takes {passes:whole} passes of micro-batches of {micro_batch}; with {larger} it "
    "would be {gain:percent} shorter by the plan, and need {peak:bytes} of {capacity:bytes}",
    "recomputation-needless": "activations are recomputed ({mode}), though memory has room: {used:bytes} of "
    "{capacity:bytes} are used, {peak:bytes} would be without; the step would be {gain:percent} shorter by the plan",
    "utilization-low": "the MFU is {mfu:percent}, planned are {planned:percent}; a step takes {step:seconds} instead "
    "of {expected:seconds}",
    "gpu-hot": "GPU {gpu} lowers its clock for heat in {share:percent} of the time: {celsius:.0f} °C, {clock:.3g} of "
    "{highest:.3g} Hz",
    "gpu-slowed-by-hardware": "GPU {gpu} is slowed by its hardware in {share:percent} of the time: {celsius:.0f} °C, "
    "{watts:.0f} W, {clock:.3g} of {highest:.3g} Hz",
    "gpu-slow-clock": "the clock of GPU {gpu} is {share:percent} below that of the others: {clock:.3g} Hz, "
    "{celsius:.0f} °C, {watts:.0f} W",
    "gpu-at-power-limit": "GPU {gpu} is at its limit of power in {share:percent} of the time: {watts:.0f} W, "
    "{clock:.3g} of {highest:.3g} Hz",
    "gpu-errors": "GPU {gpu} had {errors:of error} of memory that its ECC could not correct",
    "pcie-replays": "GPU {gpu} sent {replays:of packet} again over PCIe in {seconds:seconds}",
    "cpu-throttled": "the CPU quota of its cgroup stops the processes of {node} in {share:percent} of the time",
    "node-memory-short": "{node} is short of memory: {available:bytes} of {total:bytes} are available",
    "memory-grows": "the memory of rank {rank} grows by {per_step:bytes} per step, to {now:bytes} at step {step:whole}",
    "memory-grows-full": "the memory of rank {rank} grows by {per_step:bytes} per step, to {now:bytes} at step "
    "{step:whole}: the {capacity:bytes} are full around step {full_at:whole}",
    "memory-nearly-full": "{share:percent} of the memory of a GPU is used: {used:bytes} of {capacity:bytes}",
    "memory-above-plan": "{part} take {measured:bytes}, planned are {planned:bytes}",
    "hung": "attempt {attempt} hung: {hang}",
    "state-corrupted": "silent corruption in attempt {attempt}: {corruption}",
    "restarts": "{restarts:of restart} took {share:percent} of the time: lost work {lost_work:seconds}, set-up "
    "{set_up:seconds}, waiting {idle:seconds}",
    "mirror-failing": "checkpoints are not copied to the mirror {to}, whose newest one is of step {step:whole}",
    "mirror-behind": "step {waiting:whole} waits for {lag:seconds} for the mirror {to}, whose newest checkpoint is of "
    "step {step:whole}",
    "saves-slow": "a checkpoint takes {seconds:seconds}, planned are {planned:seconds}; it blocks training for "
    "{blocked:seconds}, {share:percent} of the time",
    "saves-block": "checkpoints block training for {share:percent} of the time: {blocked:seconds} every "
    "{interval:seconds}",
    "checkpoint-interval": "checkpoints every {steps:.0f} steps cost {excess:percent} of the time more than every "
    "{best:whole} would, with {losses:seconds} between interruptions",
    # Likely causes.
    "cause-unshifted-labels": "labels are the inputs themselves, not shifted by one; `scaletrain rehearse` compares "
    "them token by token",
    "cause-shifted-labels": "labels are shifted once too often, or do not belong to the inputs; `scaletrain rehearse` "
    "compares them token by token",
    "cause-shuffled-tokens": "the order of the tokens carries nothing: shuffled or encoded text",
    "cause-repetitive-data": "the text is the same few passages again and again",
    "cause-one-class": "all images have the same label: a column of labels that is not read",
    "cause-duplicates": "the text holds copies; `data.steps` can remove them",
    "cause-many-epochs": "fewer steps would do",
    "cause-sampler-restarts": "the sampler began anew with the attempt, and repeats what was read",
    "cause-other-validation-data": "the validation data are of another kind than the training data",
    "cause-much-regularization": "the weight decay of {decay:g} holds the weights near zero",
    "cause-small-model": "the model is too small for the data",
    "cause-much-momentum": "gradients of many steps add up (momentum or beta1 {beta:g})",
    "cause-large-batch": "the batch averages gradients that agree already; smaller ones need fewer samples",
    "cause-rate-for-batch": "the learning rate ({lr:.2g}) does not use the batch: larger batches bear larger rates",
    "cause-zero-weights": "its weights are zero at first, or have been masked",
    "cause-large-layer": "its first weights are larger than those of others, or nothing normalizes its input",
    "cause-small-weights": "its weights are far smaller than those of others",
    "cause-not-compiled": "kernels are launched one by one; a compiled graph launches fewer",
    "cause-small-kernels": "the model's kernels are too small for this GPU",
    "cause-small-micro-batch": "micro-batches of {micro_batch} give each pass too little work",
    "cause-recomputes": "recomputation saves memory that is not needed",
    "cause-slow-link": "the link between ranks is slower than its data sheet, or shared",
    "cause-link-errors": "the InfiniBand ports of {node} had {errors:of error}",
    "cause-small-batch": "each gradient exchange follows little work; larger batches per rank exchange less often",
    "cause-sharded-weights": "ZeRO-3 gathers weights in each pass; stages 1 and 2 do not",
    "cause-part-data": "waiting for data: {seconds:seconds}, {share:percent} of the step",
    "cause-part-communication": "waiting in collectives: {seconds:seconds}, {share:percent} of the step",
    "cause-part-optimizer": "the optimizer: {seconds:seconds}, {share:percent} of the step",
    "cause-part-forward": "forward passes: {seconds:seconds}, {share:percent} of the step",
    "cause-part-backward": "backward passes: {seconds:seconds}, {share:percent} of the step",
    "cause-not-split": "the parts of the step were not measured; a profile has them",
    "cause-cooling": "the cooling of GPU {gpu} or of its rack does not suffice",
    "cause-power-supply": "power supply or cooling of GPU {gpu}: an external brake, or a temperature limit",
    "cause-clock-limit": "a clock was set on GPU {gpu}, or it is worn or in another slot",
    "cause-power-limit": "usual at full load; the limit of power sets the speed",
    "cause-failing-gpu": "GPU {gpu} is failing: drain its node, and have it tested",
    "cause-pcie-link": "a bad riser, cable or slot of GPU {gpu}",
    "cause-cpu-quota": "the job asked for fewer CPUs than it uses (CPU limit of the container or of the job)",
    "cause-many-workers": "too many reader processes for this node",
    "cause-host-memory": "offloaded states and pinned buffers fill the host's memory",
    "cause-alternating-data": "batches of two kinds alternate in the data",
    "cause-bad-batch": "unusual samples around step {step:whole}; `scaletrain data show` prints a batch",
    "cause-changed-data": "other data came later, or the data are damaged",
    "cause-chosen-workers": "the workers that were chosen cannot read and decode fast enough",
    "cause-ends": "attempts ended: {reason}, {times:of time}; `scaletrain explain` has the evidence",
    "cause-few-steps": "{steps:of step} are too few to learn",
    "cause-few-workers": "{workers:of worker} cannot read and decode fast enough",
    "cause-fp16-overflow": "fp16 overflows at 65,504; bf16 has the range of fp32",
    "cause-fp16-range": "activations or gradients leave the range of fp16; bf16 needs no loss scale",
    "cause-free-blocks": "the C library keeps free blocks between blocks in use",
    "cause-frequent-saves": "checkpoints are more frequent than interruptions need",
    "cause-growing-wait": "the wait for data has grown by {wait:seconds} per step",
    "cause-growing-weights": "weights or logits grow; weight decay holds them",
    "cause-ignored-targets": "no token of the batches counts in the loss",
    "cause-keep-best": "the best checkpoint may be deleted as newer ones are saved",
    "cause-large-micro-batch": "the micro-batch of {micro_batch} needs too much for activations",
    "cause-larger-batches": "later batches are larger",
    "cause-leak": "a program keeps tensors or objects of every step",
    "cause-learned-source": "{source:source} has been learned; more of it teaches little",
    "cause-little-data": "the data are few for this model, and are repeated",
    "cause-little-regularization": "little regularization",
    "cause-long-interval": "checkpoints are too rare for these interruptions",
    "cause-long-set-up": "an attempt takes long until its first step: start of processes, loading, compilation",
    "cause-low-clipping": "the limit of {limit:g} is far below the usual norm of {norm:.3g}",
    "cause-mirror-fails": "{cause}",
    "cause-mirror-slow": "the bandwidth to the mirror is less than a checkpoint needs in its interval",
    "cause-mirror-often": "each checkpoint is copied; with fewer the mirror keeps up",
    "cause-no-clipping": "gradients are not clipped",
    "cause-no-gradient": "hardly any gradient reaches the weights (norm {norm:.3g})",
    "cause-no-recompute": "activations are kept that could be recomputed",
    "cause-not-recorded": "{share:percent} of the excess has no recorded cause; the largest part of the plan is "
    "{part} ({seconds:seconds}). A profile can tell kernels, communication and the host apart",
    "cause-nothing-to-learn": "the targets do not follow from the inputs: wrong labels or random data",
    "cause-plan-is-low": "the plan is too low for this model or library; its verdict is not to be relied on",
    "cause-queue": "the job waits in the queue between attempts",
    "cause-random-source": "{source:source} cannot be predicted: damaged text, another encoding, or random data",
    "cause-rare-saves": "work since the last checkpoint is lost at each interruption",
    "cause-rare-source": "{source:source} is too rare in the batches",
    "cause-rate-too-high": "the learning rate ({lr:.2g}) is too high",
    "cause-rate-too-low": "the learning rate ({lr:.2g}) is too low",
    "cause-saturated": "units are saturated or dead, and pass no gradient on",
    "cause-short-interval": "checkpoints are too frequent for these interruptions",
    "cause-short-warm-up": "the warm-up ({steps:of step}) is too short",
    "cause-slow-checkpoint-storage": "the storage wrote {bytes:bytes} in {seconds:seconds}",
    "cause-slow-node": "the node or device of rank {rank} is slow or shared; `scaletrain preflight` measures it",
    "cause-corrupting-node": "the memory or the device of the node of rank {ranks:list}: an event in its log "
    "(`dmesg`, `nvidia-smi -q`), or a test of the device, shows which",
    "cause-hung-rank": "what the rank does instead: see its stacks in attempts/{attempt:04d}/stacks",
    "cause-slow-rank-holds": "a slow rank explains {share:percent} of the excess",
    "cause-slow-second-moment": "Adam's beta2 of {beta:g} follows larger gradients slowly (arXiv:2304.13013)",
    "cause-own-loader": "the program takes its batches too slowly: more workers or read-ahead of its loader, or "
    "faster storage",
    "cause-slow-storage": "the storage is slow; more batches read ahead (now {prefetch}) bridge its pauses",
    "cause-slower-device": "the device is throttled, hot, or shared with another process",
    "cause-small-vocabulary": "the data use a part of the vocabulary, or the weights are not new",
    "cause-synchronous-saves": "training waits until a checkpoint is written",
    "cause-targets-of-other-tokens": "the loss counts padding, or another tokenizer's tokens",
    "cause-trained-too-long": "training went on after step {step:whole}, when the validation was best",
    "cause-uneven-data": "its batches take longer to read or are longer",
    "cause-visible-targets": "targets are visible in the inputs, or few distinct tokens occur",
    "cause-waits-for-data": "waiting for data explains {share:percent} of the excess",
    "cause-wide-weights": "the first weights are too large: initializer_range {given:g}, usually {usual:g}",
    # What is not concluded, and why.
    "check-failed": "{check}: the record has a form that this version does not know",
    "few-steps": "{steps:of step} measured; the loss is judged from {needed} on",
    "sampled": "{read:whole} of {last:of step} were read; what lasts a few steps is known from events of the guard "
    "only",
    "not-from-scratch": "the first loss and the learning rate: those of a new model do not apply to given weights, "
    "adapters and preference pairs",
    "not-text": "the first loss: it is that of equal outputs for new language models only",
    "no-validation": "overfitting: no validation has been measured",
    "on-cpu": "the step time beside the plan: planned times are rough for CPUs",
    "rate-needs-trial": "whether another learning rate would be better, as long as the loss falls: that needs a trial",
    "elsewhere": "the run directory is on a volume of the cluster that is not mounted here; run `scaletrain diagnose "
    "{run}` in a pod that mounts it",
    "no-telemetry": "utilization and clocks of GPUs, time in communication and on the host, other ranks' memory: "
    "there is no telemetry",
    "no-gpu-telemetry": "utilization, clocks and errors of GPUs: the telemetry has none",
    "no-layers": "dead and exploding layers: norms by layer were not measured",
    "no-noise-scale": "whether the batch is too large: the gradient noise scale was not measured",
    "no-dataset": "labels shifted twice, duplicates and epochs: no prepared text of one source is here",
}
