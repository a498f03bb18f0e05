import torch

from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.parallel.expert import is_sharded_over_experts, shard_experts, with_expert_groups
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh
from scaletrain_cli.spec import ModelSpec
from tests.engine.model.test_fields import EXPERTS


def test_expert_and_tensor_ranks_share_every_expert_weight_once() -> None:
    def size(mesh: Mesh) -> int:
        model = outline(ModelSpec.model_validate(EXPERTS))
        shard_experts(model, mesh)
        return sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)

    whole = size(Mesh())
    assert size(Mesh(tensor=Axis(2, 1))) * 2 == whole
    assert size(Mesh(expert=Axis(4, 3))) * 4 == whole


def test_optimizer_groups_separate_experts_and_keep_their_options() -> None:
    expert, dense, bias = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    expert.allreduce, expert.group_name = False, "experts"
    assert is_sharded_over_experts(expert)
    assert not is_sharded_over_experts(dense)
    groups = [{"params": [dense, expert], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}]
    assert [len(group["params"]) for group in with_expert_groups(groups)] == [1, 1, 1]
    assert with_expert_groups(groups)[-1] == {"params": [expert], "weight_decay": 0.1, "moe": True, "name": "experts"}
