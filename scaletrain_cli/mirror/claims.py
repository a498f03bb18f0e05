"""Read and make claims on a run in its mirror. The claim with the highest number (``claims/0001.json``) owns the run.

A claim never changes. A place that continues the run makes the next claim, and of several places only one can: a claim
is created only if its name is free. A claim records the step that it continues from, so that checkpoints which an
earlier owner writes later are never restored.
"""

import contextlib
import getpass
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from scaletrain_cli.mirror.stores import MirrorError, MirrorStore
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import parse_json, typed, undamaged_as, write_document
from scaletrain_cli.rundir.paths import RunDir

SCHEMA = "scaletrain.mirror-claim/v1"
FOLDER = "claims"
_NAME = re.compile(rf"{FOLDER}/(\d{{4,}})\.json")
_MOST_CLAIMS = 10_000


@dataclass(frozen=True)
class Claim:
    """The owner of a generation: its run directory on ``host``, and a ``token`` that only this directory has.

    ``from_step`` and ``from_history``: the checkpoint and the list of the history that it continues; None for the
    first owner.
    """

    generation: int
    token: str
    host: str
    user: str
    run_dir: str
    time: float
    from_step: int | None = None
    from_history: str | None = None


@dataclass(frozen=True)
class Activity:
    """The last report of the owner. ``released``: the run has ended there for good."""

    time: float
    step: int | None
    released: bool


def new_claim(run: RunDir, generation: int, *, from_step: int | None = None, from_history: str | None = None) -> Claim:
    """Return a claim of this run directory, which is not made yet."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        user = str(os.geteuid())
    host, now = socket.gethostname(), round(time.time(), 3)
    return Claim(generation, secrets.token_hex(8), host, user, str(run.path), now, from_step, from_history)


def read_claims(store: MirrorStore, known: Sequence[Claim] = ()) -> list[Claim]:
    """Return all claims, the first one first. ``known``: those of an earlier call, which are not read again.

    Raises MirrorError for a damaged one, and errors of the store.
    """
    numbers = sorted(int(match[1]) for name in store.list(FOLDER) if (match := _NAME.fullmatch(name)))
    claims = [claim for claim in known if claim.generation in numbers]
    for number in numbers[len(claims) : _MOST_CLAIMS]:
        try:
            claims.append(typed(Claim, parse_json(store.read(_name(number)) or b"")))
        except (ValueError, TypeError, LookupError) as error:
            raise MirrorError(Reason("mirror.claim-damaged", {"place": store.place, "claim": _name(number)})) from error
    return claims


def make_claim(store: MirrorStore, run: RunDir, claim: Claim) -> bool:
    """Make a claim and keep it in the run directory; return False if another place was first.

    It is kept first, so that a process that is killed in between recognizes its own claim.
    """
    write_document(run.mirror_claim_file, {"schema": SCHEMA, **asdict(claim)})
    made = store.create(_name(claim.generation), json.dumps({"schema": SCHEMA, **asdict(claim)}).encode())
    return made and is_made(store, claim)  # a store that ignores the condition keeps the last one


def is_made(store: MirrorStore, claim: Claim) -> bool:
    """Return whether the mirror has this claim."""
    return claim.token in (store.read(_name(claim.generation)) or b"").decode("utf-8", "replace")


def own_claim(run: RunDir) -> Claim | None:
    """Return the claim that this run directory has made, or was about to make; None before the first."""
    return undamaged_as(Claim, run.mirror_claim_file)


def report_activity(store: MirrorStore, generation: int, step: int | None, *, released: bool = False) -> None:
    """Write what the owner does now."""
    document = {"time": round(time.time(), 3), "step": step, "released": released}
    store.write(_activity(generation), json.dumps(document).encode())


def read_activity(store: MirrorStore, claim: Claim) -> Activity:
    """Return what the owner of a claim has last reported; that of the claim itself if it has reported nothing."""
    with contextlib.suppress(ValueError, TypeError, LookupError):
        reported: Activity = typed(Activity, parse_json(store.read(_activity(claim.generation)) or b""))
        return reported
    return Activity(claim.time, claim.from_step, released=False)


def _name(generation: int) -> str:
    return f"{FOLDER}/{generation:04d}.json"


def _activity(generation: int) -> str:
    return f"activity/{generation:04d}.json"
