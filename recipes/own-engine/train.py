"""A user's training program under ScaleTrain: a small GPT on bytes, with torch's DistributedDataParallel.

Each rank runs ``python -m train RUN_DIR``. The numbered comments mark the contract of docs/own-engine.md; with it a run
has gang scheduling, requeues, restart budgets, hang detection and verified checkpoints.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from scaletrain_cli.worker import ExitCode, Rank

# 1. Handle the signals before torch is imported, so that no preemption notice is lost.
rank = Rank.start(sys.argv[1])

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

PLACE, WORLD = rank.environment, rank.environment.world_size
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", PLACE.local_rank) if GPU else torch.device("cpu")


class Gpt(nn.Module):
    """Bytes to the logits of the next byte: (batch, seq_len) to (batch, seq_len, 256)."""

    def __init__(self, seq_len: int, hidden_size: int, heads: int, inner_size: int, layers: int) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(hidden_size, heads, inner_size, dropout=0.0, batch_first=True)
        self.tokens = nn.Embedding(256, hidden_size)
        self.places = nn.Embedding(seq_len, hidden_size)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.logits = nn.Linear(hidden_size, 256)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        hidden = self.tokens(ids) + self.places(torch.arange(length, device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        return self.logits(self.blocks(hidden, mask=mask, is_causal=True))


def batches(text: bytes, seq_len: int, per_rank: int, seed: int, first: int) -> Iterator[Tensor]:
    """Yield this rank's batch of each step after ``first``. Depends on the step only, so a resume needs no state."""
    data, step = torch.frombuffer(bytearray(text), dtype=torch.uint8), first
    while True:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(data) - seq_len - 1, (WORLD * per_rank,), generator=generator).tolist()
        mine = starts[PLACE.rank * per_rank : (PLACE.rank + 1) * per_rank]
        yield torch.stack([data[start : start + seq_len + 1] for start in mine]).long().to(DEVICE)
        step += 1


def train() -> int:
    """Train to the last step, or until the run is preempted, and return the exit code."""
    # 2. The resolved spec and the plan: train exactly what was planned.
    spec, total_steps, every = rank.resolved.spec, rank.resolved.total_steps, rank.resolved.checkpoint_interval_steps
    model, training = spec["model"], spec["training"]
    dist.init_process_group("nccl" if GPU else "gloo")
    torch.manual_seed(training["seed"])
    sizes = (model["hidden_size"], model["num_attention_heads"], model["intermediate_size"], model["num_hidden_layers"])
    gpt = Gpt(model["seq_len"], *sizes).to(DEVICE)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=training["optimizer"]["lr"])

    # 3. Rank 0 looks for the latest valid checkpoint; all ranks load the same one.
    latest = rank.checkpoints.latest() if PLACE.rank == 0 else None
    found = torch.tensor(latest.step if latest is not None else 0, device=DEVICE)
    dist.broadcast(found, src=0)
    if step := int(found):
        # weights_only: tensors and plain values. Anything else in a file could run code.
        state = torch.load(rank.checkpoints.folder_of(step) / "state.pt", map_location=DEVICE, weights_only=True)
        gpt.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    if PLACE.rank == 0:
        rank.checkpoints.open()  # no earlier attempt can commit from here on
    rank.record_event("resumed" if step else "started", step=step)
    if step >= total_steps:  # the last attempt saved, and was killed before it recorded the end
        rank.record_event("finished", step=step)
        return ExitCode.DONE

    ddp = DistributedDataParallel(gpt, device_ids=[DEVICE.index] if GPU else None)
    text = Path(json.__file__).read_bytes() * 4
    for ids in batches(text, model["seq_len"], training["global_batch_size"] // WORLD, training["seed"], step):
        step += 1
        rank.heartbeat.beat(step, "step")  # 4. A rank that is silent for too long counts as hung, and is restarted.
        loss = cross_entropy(ddp(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rank.log_metrics(step, loss=loss.item())
        # 5. Ranks agree on exiting: a signal may have reached only some of them. Requeues after 75 are unlimited.
        preempted = torch.tensor(float(rank.preemption.raised), device=DEVICE)
        dist.all_reduce(preempted, dist.ReduceOp.MAX)
        done = step >= total_steps
        if done or preempted or step % every == 0:
            rank.heartbeat.beat(step, "save")
            if PLACE.rank == 0:  # 6. After a kill during a save, the previous checkpoint is still there.
                staged = rank.checkpoints.stage(step)
                with staged.file("state.pt") as file:
                    torch.save({"model": gpt.state_dict(), "optimizer": optimizer.state_dict()}, file)
                rank.checkpoints.commit(step, staged.digests)
            rank.record_event("checkpoint", step=step)
        if done or preempted:
            rank.record_event("finished" if done else "preempted", step=step)
            dist.barrier()
            return ExitCode.DONE if done else ExitCode.PREEMPTED
    raise AssertionError("batches never end")


if __name__ == "__main__":
    rank.run(train)
