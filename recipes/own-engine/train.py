"""A training program of one's own under ScaleTrain: a small GPT on bytes, in plain torch with DistributedDataParallel.

Started on every rank as ``python -m train RUN_DIR``. It keeps the contract of docs/own-engine.md, marked 1 to 6 below,
and gets gangs, requeues, restart budgets, hang detection and verified checkpoints for it.
"""

import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from scaletrain_cli.worker.heartbeat import Heartbeat, show_stacks_when_asked
from scaletrain_cli.worker.signals import PreemptionFlag, die_with_agent

# 1. Signals are blocked until somebody listens: do so before torch loads, so that no notice is lost.
die_with_agent()
flag, heartbeat = PreemptionFlag(), Heartbeat.from_environment(os.environ)
flag.install()
show_stacks_when_asked(os.environ)

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.rundir.checkpoints import checkpoint_path, checkpoints_to_prune, latest_valid
from scaletrain_cli.rundir.journal import append_line, record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import checkpoint_folder, read_record
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.worker import checkpoint_commit

RANK, WORLD, ATTEMPT = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "SCALETRAIN_ATTEMPT"))
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPU else torch.device("cpu")


class Gpt(nn.Module):
    """Bytes to the logits of the next byte: (batch, seq_len) to (batch, seq_len, 256)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        heads, inner = spec.num_attention_heads, spec.intermediate_size
        block = nn.TransformerEncoderLayer(spec.hidden_size, heads, inner, dropout=0.0, batch_first=True)
        self.tokens = nn.Embedding(256, spec.hidden_size)
        self.places = nn.Embedding(spec.seq_len, spec.hidden_size)
        self.blocks = nn.TransformerEncoder(block, spec.num_hidden_layers, enable_nested_tensor=False)
        self.logits = nn.Linear(spec.hidden_size, 256)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        hidden = self.tokens(ids) + self.places(torch.arange(length, device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        return self.logits(self.blocks(hidden, mask=mask, is_causal=True))


def batches(text: bytes, seq_len: int, per_rank: int, seed: int, first: int) -> Iterator[Tensor]:
    """What each step trains on, from step ``first`` on: a function of the step alone, so a resume needs no more."""
    data, step = torch.frombuffer(bytearray(text), dtype=torch.uint8), first
    while True:
        chance = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(data) - seq_len - 1, (WORLD * per_rank,), generator=chance).tolist()
        mine = starts[RANK * per_rank : (RANK + 1) * per_rank]
        yield torch.stack([data[start : start + seq_len + 1] for start in mine]).long().to(DEVICE)
        step += 1


def main() -> int:
    run = RunDir(Path(sys.argv[1]))
    record = read_record(run)  # 2. The spec and the plan: what was planned is what runs.
    spec, layout = record.spec, record.plan.layout
    model_spec, folder = spec.transformer, checkpoint_folder(run, spec)
    dist.init_process_group("nccl" if GPU else "gloo")
    torch.manual_seed(spec.training.seed)
    model = Gpt(model_spec).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.training.optimizer.lr)

    # 3. The newest checkpoint that verifies, the same on every rank; the one before it where that one is damaged.
    found = latest_valid(folder)[0] if RANK == 0 else None
    newest = torch.tensor(found.step if found is not None else 0, device=DEVICE)
    dist.broadcast(newest, src=0)
    if step := int(newest):
        # weights_only: tensors and plain values. Whatever else a file may hold could run code.
        state = torch.load(checkpoint_path(folder, step) / "state.pt", map_location=DEVICE, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    if RANK == 0:
        checkpoint_commit.open_attempt(folder, ATTEMPT)  # from here on no earlier attempt can commit any more
        record_event(run, "resumed" if step else "started", step=step)
    if step >= spec.total_steps:  # saved, and killed before it could say that it was done
        if RANK == 0:
            record_event(run, "finished", step=step)
        return ExitCode.DONE

    def save() -> None:
        """4. Hash while writing, commit by rename; a kill in between leaves the one before."""
        if RANK == 0:
            whole = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, whole)
            writer = checkpoint_commit.HashingWriter(
                checkpoint_commit.stage_checkpoint(folder, ATTEMPT, step) / "state.pt"
            )
            writer.write(whole.getbuffer())
            files = {"state.pt": writer.close()}
            checkpoint_commit.commit_checkpoint(folder, step, files, world_size=WORLD, clean=True, attempt=ATTEMPT)
            for old in checkpoints_to_prune(folder, spec.checkpoint.keep, spec.checkpoint.keep_every):
                checkpoint_commit.remove_checkpoint(old.path, ATTEMPT)
            record_event(run, "checkpoint", step=step)

    trained = DistributedDataParallel(model, device_ids=[DEVICE.index] if GPU else None)
    text = Path(json.__file__).read_bytes() * 4  # something to learn by heart
    per_rank = layout.global_batch_size // WORLD
    every = record.plan.durability.interval_steps if spec.checkpoint.every == "auto" else spec.checkpoint.every
    for ids in batches(text, model_spec.seq_len, per_rank, spec.training.seed, step):
        step += 1
        heartbeat.beat(step, "step")  # 5. A rank that is silent for too long is found, dumped and retried.
        loss = cross_entropy(trained(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if RANK == 0:
            append_line(run.metrics, {"step": step, "loss": loss.item()})
        # 6. Ranks agree on leaving: a signal may have reached only some of them. 75 brings the run back, uncharged.
        leaving = torch.tensor(float(flag.raised), device=DEVICE)
        dist.all_reduce(leaving, dist.ReduceOp.MAX)
        done = step >= spec.total_steps
        if done or leaving or step % every == 0:
            heartbeat.beat(step, "save")
            save()
        if done or leaving:
            if RANK == 0:
                record_event(run, "finished" if done else "preempted", step=step)
            dist.barrier()
            return ExitCode.DONE if done else ExitCode.PREEMPTED
    raise AssertionError("batches never end")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a process group whose peer has gone may abort in its destructor, which would hide the code
