"""Local SGD with an outer optimizer: DiLoCo (arXiv:2311.08105).

Groups of data-parallel ranks train alone, each with its own inner optimizer, on their parts of the global batch. After
every ``inner_steps`` steps, and after the last one, the difference of the outer weights from the mean of the groups'
weights is the gradient of an outer step, and all groups continue from the new outer weights. Inner states stay with
their group. All is done on the fp32 weights that a rank updates, which are the same elements in every group.
"""

from typing import Any

import torch
import torch.distributed as dist

from scaletrain_cli.engine.optim.deepspeed_optimizer import master_weights, use_master_weights
from scaletrain_cli.engine.parallel.mesh import Axis
from scaletrain_cli.spec.training import LocalSGDSpec


class LocalSGD:
    """The outer weights of the elements that this rank updates, and the momentum of the outer optimizer.

    ``groups``: the ranks that update the same elements, one of each group. Costs eight bytes per element; four without
    momentum.
    """

    def __init__(
        self, engine: Any, settings: LocalSGDSpec, groups: Axis, total_steps: int, device: torch.device
    ) -> None:
        """Call it while all groups have the same weights. ``device``: that ranks communicate from."""
        self._engine, self._settings, self._total_steps, self._device = engine, settings, total_steps, device
        self.groups = groups
        weights = master_weights(engine)
        self.outer = [weight.detach().clone() for weight in weights]
        nesterov = settings.outer_optimizer == "nesterov"
        self.momentum = [torch.zeros_like(weight) for weight in weights] if nesterov else []

    @property
    def bytes(self) -> int:
        """Bytes of this rank's outer weights and momentum."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.outer, *self.momentum))

    def is_due(self, step: int) -> bool:
        """Return whether the groups meet after a step (1-based)."""
        return step % self._settings.inner_steps == 0 or step == self._total_steps

    @torch.no_grad()
    def after_step(self, step: int) -> bool:
        """Run the outer step if it is due after optimizer step ``step`` (1-based); return if it was. Collective."""
        if not self.is_due(step):
            return False
        rate, beta = self._settings.outer_learning_rate, self._settings.outer_momentum
        for index, (weight, outer) in enumerate(zip(master_weights(self._engine), self.outer, strict=True)):
            gradient = (outer - weight).to(self._device)
            if self.groups.group is not None:
                dist.all_reduce(gradient, group=self.groups.group)
                gradient.div_(self.groups.size)
            gradient = gradient.to(outer.device)
            if self.momentum:
                self.momentum[index].mul_(beta).add_(gradient)
                gradient.add_(self.momentum[index], alpha=beta)
            outer.add_(gradient, alpha=-rate)
            weight.copy_(outer)
        use_master_weights(self._engine)
        return True
