"""Memory and time of the losses of images and pairs, and of gradient accumulation of contrastive ones (GradCache)."""

from scaletrain_cli.plan.frameworks.registry import framework_of
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.plan.speed.kernels import Rates, matmul_seconds, memory_seconds
from scaletrain_cli.plan.vision.operations import VisionNetwork
from scaletrain_cli.spec import RunSpec

# Bytes per logit of a classifier, as for text: three fp32 values alive at once (log-probability and two gradients).
_LOGIT_BYTES = 12
_FP32_BYTES = 4


def is_contrastive(spec: RunSpec) -> bool:
    """Return whether the loss compares samples with each other."""
    return spec.training.objective == "contrastive"


def views(spec: RunSpec) -> int:
    """Return the number of images of a sample in a forward pass: 2 for nt_xent, which compares two views of it."""
    return 2 if is_contrastive(spec) and spec.training.loss.of("contrastive") == "nt_xent" else 1


def caches_gradients(spec: RunSpec, layout: Layout) -> bool:
    """Return whether the engine accumulates by GradCache (arXiv:2101.06983), which repeats each forward pass."""
    return framework_of(spec).is_engine and is_contrastive(spec) and layout.gradient_accumulation_steps > 1


def feature_width(spec: RunSpec, whole: VisionNetwork) -> int:
    """Return the elements of one feature vector of a contrastive loss; 0 for other losses."""
    if not is_contrastive(spec):
        return 0
    return whole.features // 2 if whole.features else whole.pooled


def loss_bytes(spec: RunSpec, whole: VisionNetwork, layout: Layout, element: int) -> int:
    """Return the bytes of the loss of a micro-batch, or of all micro-batches of a rank with GradCache.

    A classifier has samples x classes logits. A contrastive loss of the engine has fp32 copies of the rank's own
    features, those of all ranks with their gradients (and once more while these are summed over the ranks), and one
    tile of logits, ``chunk_size`` x ``chunk_size`` at most. The sigmoid loss has the features of one other rank at a
    time.
    Other frameworks have all rows of the rank's own samples at once (OpenCLIP, ``local_loss``).
    """
    samples, width = layout.micro_batch_size, feature_width(spec, whole)
    if not width:
        return samples * whole.classes * _LOGIT_BYTES
    everyone = samples * layout.data_parallel
    if not framework_of(spec).is_engine:
        return 2 * samples * everyone * _LOGIT_BYTES + 4 * everyone * width * element
    steps = layout.gradient_accumulation_steps
    own, kinds = samples * steps * views(spec), 1 if views(spec) == 2 else 2
    loss = spec.training.loss
    keys, chunk = own if loss.of("contrastive") == "sigmoid" else own * layout.data_parallel, loss.chunk_size
    cached = own * kinds * width * _FP32_BYTES * 3 if steps > 1 else 0  # features, their copy as one tensor, gradients
    rows = kinds * own * width * _FP32_BYTES * 2  # and their gradients
    gathered = kinds * keys * width * (2 * _FP32_BYTES) + keys * width * _FP32_BYTES
    return cached + rows + gathered + min(own, chunk) * min(keys, chunk) * _FP32_BYTES


def loss_seconds(spec: RunSpec, whole: VisionNetwork, layout: Layout, rate: Rates) -> float:
    """Return the seconds of a contrastive loss per step, forward and backward; 0 for other losses.

    The matrix of logits is computed forward and again backward, with two products for the gradients.
    """
    if not (width := feature_width(spec, whole)):
        return 0.0
    steps, samples = layout.gradient_accumulation_steps, layout.micro_batch_size
    if not framework_of(spec).is_engine:
        everyone = samples * layout.data_parallel
        product = matmul_seconds(samples, width, everyone, rate)
        return steps * (6 * product + memory_seconds(2.0 * samples * everyone * 30, 20, rate))
    own, kinds = samples * steps * views(spec), 1 if views(spec) == 2 else 2
    everyone = own * layout.data_parallel
    product = matmul_seconds(own, width, everyone, rate)
    passes = 8.0 * _FP32_BYTES  # a tile is written by each product and changed in place
    return kinds * (4 * product + memory_seconds(own * everyone * passes, 20, rate))
