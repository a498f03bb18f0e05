"""``python -m gpu [PIECE ...]``: measure one GPU in pieces, in order of their value, within a time limit.

Each row runs in a process of its own; its line is printed and written as soon as it is there. Rows that are there
already, of this commit and device, are not measured again, so that a second call continues the first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import psutil

from gpu import causes, machine, parity, saves, survival, training
from gpu.piece import Piece, Result, Setting
from gpu.results import Results, Row, page, table_line
from scaletrain_cli.errors import UsageError

PIECES = {
    piece.name: piece
    for piece in (
        *(machine.PIECE, training.STEPS, parity.PIECE, saves.PIECE, causes.PIECE),
        *(training.VARIANTS, survival.PIECE),
    )
}
_PROJECT = Path(__file__).parents[2]
_LEAST_SECONDS = 20.0  # no row is measured in less on a GPU
_RESULT = "result of the row: "  # before the line of JSON that a row's process prints


def main() -> int:
    """Measure the chosen pieces; exit code 1 where a row failed or was not reached."""
    parser = argparse.ArgumentParser(prog="python -m gpu", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)} (default: all)")
    parser.add_argument("--minutes", type=float, default=25.0, help="of all rows together (default 25)")
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--again", action="store_true", help="measure rows that are there already, too")
    parser.add_argument("--tiny", action="store_true", help="a trial on the CPU with tiny models")
    parser.add_argument("--out", type=Path, default=_PROJECT / "build" / "gpu", help="folder of rows and runs")
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep the tables as a page (default: in --out)")
    parser.add_argument("--commit", help="of this tree (default: as git or the folder of wheels says)")
    parser.add_argument("--row", nargs=2, metavar=("PIECE", "ROW"), help=argparse.SUPPRESS)
    parser.add_argument("--gpu", help="its name in the catalogue (default: found out)")
    parser.add_argument("--ceiling", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [name for name in options.pieces if name not in PIECES]:
        parser.error(f"no piece is named {unknown[0]}")
    if options.row:
        piece, row = options.row
        return _be_row(piece, row, Setting(options.gpu, options.ceiling, options.out))
    if not options.tiny and options.gpu is None:
        try:
            options.gpu = machine.found_gpu()
        except UsageError as error:
            parser.error(str(error))
        if options.gpu is None:
            print("No GPU here, so nothing is measured. --tiny tries all pieces on the CPU.")
            return 1
    options.out.mkdir(parents=True, exist_ok=True)
    return _measure(options)


def _measure(options: argparse.Namespace) -> int:
    """Measure rows until the time is up."""
    results, commit = Results(options.out), options.commit or _commit()
    device = options.gpu or "cpu"
    write = options.write or options.out / "gpu.md"
    deadline = time.monotonic() + options.minutes * 60
    failed, left = 0, []
    environment = _environment(options.out)
    for piece in (PIECES[name] for name in options.pieces or PIECES):
        print(f"\n## {piece.title}\n\n" + "\n".join(piece.header()), flush=True)
        # A trial on a CPU has no limits of its own: how long it takes says nothing.
        limits = (math.inf, math.inf) if options.tiny else (piece.seconds, piece.row_seconds)
        ends = min(deadline, time.monotonic() + limits[0])
        for name in piece.tiny if options.tiny else piece.rows:
            known = results.of(commit, device).get((piece.name, name))
            if options.only not in name or (known is not None and known.ok and not options.again):
                continue
            seconds = min(limits[1], ends - time.monotonic())
            if seconds < _LEAST_SECONDS:
                left.append(f"{piece.name}: {name}")
                continue
            row = _row(options, piece, name, commit, seconds, environment, results)
            results.add(row)
            failed += not row.ok
            for cells in row.lines:
                print(table_line(cells, len(piece.columns)), flush=True)
            command = "make gpu" + " ARGS=--tiny" * options.tiny
            text = page(PIECES.values(), results.of(commit, device), command, on_gpu=not options.tiny)
            write.write_text(text, encoding="utf-8")
    for name in left:
        print(f"not reached: {name}")
    print(f"\n{write}")
    return int(bool(failed or left))


def _row(
    options: argparse.Namespace,
    piece: Piece,
    name: str,
    commit: str,
    seconds: float,
    environment: dict[str, str],
    results: Results,
) -> Row:
    """Measure a row in a process of its own, which is killed with all that it started when its time is up."""
    device = options.gpu or "cpu"
    measured = results.of(commit, device).get(("machine", "machine"))
    command = [sys.executable, "-m", "gpu", "--row", piece.name, name, "--out", str(options.out)]
    command += ["--gpu", options.gpu] if options.gpu else []
    command += ["--ceiling", str(measured.facts["ceiling"])] if measured and measured.ok else []
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(seconds)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _kill(process)
        output.seek(0)
        text = output.read()
    found = [line.removeprefix(_RESULT) for line in text.splitlines() if line.startswith(_RESULT)]
    if found and not late:
        result = Result(**json.loads(found[-1]))
    else:
        log = options.out / f"{piece.name}-{name.replace(' ', '-').replace(',', '')}.log"
        log.write_text(text, encoding="utf-8")
        last = (text.strip().splitlines() or ["no output"])[-1][:160].replace("|", " ")
        result = Result([[name, f"out of time after {seconds:.0f} s" if late else f"failed: {last}"]])
    now = time.monotonic()
    ok = bool(found) and not late and not result.failed
    return Row(piece.name, name, commit, device, now - began, time.time(), ok, result.lines, result.facts)


def _be_row(piece: str, name: str, setting: Setting) -> int:
    """Measure a row in this process, and print its result."""
    rows = PIECES[piece].tiny if setting.gpu is None else PIECES[piece].rows
    result = rows[name](setting)
    print(f"\n{_RESULT}{json.dumps(asdict(result))}", flush=True)
    sys.stderr.flush()
    os._exit(0)  # destructors of process groups wait for peers


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started, runs included."""
    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        started = psutil.Process(process.pid).children(recursive=True)
    for each in started:
        with contextlib.suppress(psutil.Error):
            each.kill()
    process.kill()
    process.wait()


def _environment(out: Path) -> dict[str, str]:
    """Return the environment of rows: runs, calibration and imports of their own."""
    paths = [str(_PROJECT / "benchmarks"), str(_PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "SCALETRAIN_RUNS": str(out / "runs"),
        "XDG_CONFIG_HOME": str(out / "config"),
        "PYTHONPATH": os.pathsep.join(paths),
        "TOKENIZERS_PARALLELISM": "true",
        "HF_HUB_OFFLINE": "1",
    }


def _commit() -> str:
    """Return the commit of this tree by git, else the one that was noted when the wheels were gathered."""
    try:
        command = ["git", "-C", str(_PROJECT), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        noted = _PROJECT / "build" / "gpu-wheels" / "COMMIT"
        return noted.read_text(encoding="utf-8").strip() if noted.exists() else "unknown"


if __name__ == "__main__":
    sys.exit(main())
