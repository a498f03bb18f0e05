"""Exact and near duplicates of the documents of all sources.

The work is done in phases, each of independent jobs: one job of a phase needs all of the phase before, writes one file,
and is done if that file is there. Any process may run any job, in any order within a phase; the bytes are the same.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from scaletrain_cli.data.duplicates.candidates import write_band, write_identical, write_pairs
from scaletrain_cli.data.duplicates.clusters import read_removed, write_clusters
from scaletrain_cli.data.duplicates.corpus import Corpus, Settings, Texts
from scaletrain_cli.data.duplicates.signatures import write_signatures
from scaletrain_cli.data.duplicates.verification import parts, write_shingles, write_verified
from scaletrain_cli.safe_files import make_folder

__all__ = ["PHASES", "Corpus", "Settings", "Texts", "read_removed", "remove_phases", "run_job"]


class Phase(NamedTuple):
    """A phase: its jobs once the phases before are done (none when all is done), their files, and what writes them."""

    name: str
    jobs: Callable[[Corpus], int]
    path: Callable[[Corpus, int], Path]
    write: Callable[[Corpus, int, Texts], None]


def _until_done(jobs: Callable[[Corpus], int]) -> Callable[[Corpus], int]:
    """Return the number of jobs, which is 0 once the report is there: files of phases may be removed by then."""
    return lambda corpus: 0 if corpus.report.exists() else jobs(corpus)


def _if_near(corpus: Corpus, jobs: int) -> int:
    return jobs if corpus.settings.near else 0


PHASES = (
    Phase(
        "signatures",
        _until_done(lambda corpus: corpus.tasks),
        lambda corpus, task: corpus.signatures(task),
        write_signatures,
    ),
    Phase(
        "identical",
        _until_done(lambda _corpus: 1),
        lambda corpus, _job: corpus.identical,
        lambda corpus, _job, _texts: write_identical(corpus),
    ),
    Phase(
        "bands",
        _until_done(lambda corpus: _if_near(corpus, corpus.settings.bands)),
        lambda corpus, band: corpus.band(band),
        lambda corpus, band, _texts: write_band(corpus, band),
    ),
    Phase(
        "pairs",
        _until_done(lambda corpus: _if_near(corpus, 1)),
        lambda corpus, _job: corpus.pairs,
        lambda corpus, _job, _texts: write_pairs(corpus),
    ),
    Phase(
        "shingles",
        _until_done(lambda corpus: _if_near(corpus, corpus.tasks)),
        lambda corpus, task: corpus.shingles(task),
        write_shingles,
    ),
    Phase(
        "verified",
        _until_done(lambda corpus: parts(corpus) if corpus.settings.near else 0),
        lambda corpus, part: corpus.verified(part),
        lambda corpus, part, _texts: write_verified(corpus, part),
    ),
    Phase(
        "clusters",
        _until_done(lambda _corpus: 1),
        lambda corpus, _job: corpus.report,
        lambda corpus, _job, _texts: write_clusters(corpus),
    ),
)


def run_job(corpus: Corpus, phase: int, job: int, texts: Texts) -> None:
    """Run one job of ``PHASES[phase]`` unless its file is there. Raises UsageError if the texts have changed."""
    found = PHASES[phase]
    if not found.path(corpus, job).exists():
        make_folder(corpus.folder)
        found.write(corpus, job, texts)


def remove_phases(corpus: Corpus) -> None:
    """Remove all files but the removed documents and the report, once that is there."""
    if corpus.report.exists():
        for path in (corpus.identical, corpus.pairs):
            path.unlink(missing_ok=True)
        for path in (corpus.signatures(0), corpus.band(0), corpus.shingles(0), corpus.verified(0)):
            shutil.rmtree(path.parent, ignore_errors=True)  # another process may be doing the same
