"""Exact and near duplicates of the documents of all sources.

The work is done in phases, each of independent jobs: one job of a phase needs all of the phase before, writes one file,
and is done if that file is there. Any process may run any job, in any order within a phase; the bytes are the same.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.data.duplicates.candidates import write_band, write_identical, write_pairs
from scaletrain_cli.data.duplicates.clusters import parts, read_removed, write_clusters, write_shingles, write_verified
from scaletrain_cli.data.duplicates.corpus import Corpus, Texts
from scaletrain_cli.data.duplicates.signatures import write_signatures
from scaletrain_cli.safe_files import make_folder

__all__ = ["PHASES", "Corpus", "Texts", "read_removed", "remove_phases", "run_job"]


@dataclass(frozen=True)
class Phase:
    """A phase: the number of its jobs once the phases before are done, the file of each, and what writes it.

    ``near``: it is needed for near duplicates alone.
    """

    name: str
    all_jobs: Callable[[Corpus], int]
    path: Callable[[Corpus, int], Path]
    write: Callable[[Corpus, int, Texts], None]
    near: bool = False

    def jobs(self, corpus: Corpus) -> int:
        """Return the number of jobs, which is 0 once the report is there: files of phases may be removed by then."""
        needed = not corpus.report.exists() and (corpus.settings.near or not self.near)
        return self.all_jobs(corpus) if needed else 0


PHASES = (
    Phase("signatures", lambda corpus: corpus.tasks, Corpus.signatures, write_signatures),
    Phase("identical", lambda _: 1, lambda corpus, _: corpus.identical, lambda corpus, *_: write_identical(corpus)),
    Phase(
        "bands",
        lambda corpus: corpus.settings.bands,
        Corpus.band,
        lambda corpus, band, _: write_band(corpus, band),
        near=True,
    ),
    Phase("pairs", lambda _: 1, lambda corpus, _: corpus.pairs, lambda corpus, *_: write_pairs(corpus), near=True),
    Phase("shingles", lambda corpus: corpus.tasks, Corpus.shingles, write_shingles, near=True),
    Phase("verified", parts, Corpus.verified, lambda corpus, part, _: write_verified(corpus, part), near=True),
    Phase("clusters", lambda _: 1, lambda corpus, _: corpus.report, lambda corpus, *_: write_clusters(corpus)),
)


def run_job(corpus: Corpus, phase: int, job: int, texts: Texts) -> None:
    """Run one job of ``PHASES[phase]`` unless its file is there. Raises UsageError if the texts have changed."""
    task = PHASES[phase]
    if not task.path(corpus, job).exists():
        make_folder(corpus.folder)
        task.write(corpus, job, texts)


def remove_phases(corpus: Corpus) -> None:
    """Remove all files but the removed documents and the report, once that is there."""
    if corpus.report.exists():
        for path in (corpus.identical, corpus.pairs):
            path.unlink(missing_ok=True)
        for path in (corpus.signatures(0), corpus.band(0), corpus.shingles(0), corpus.verified(0)):
            shutil.rmtree(path.parent, ignore_errors=True)  # another process may be doing the same
