"""Prepare sources: decide which documents stay, find duplicates, and write the tokens of each source as a dataset.

Everything is below one folder, by keys: ``.steps/<key>`` has decisions, ``.tokenizers/<key>`` a trained tokenizer, and
``<key>`` the tokens of a source. Datasets are found without the decisions. A preparation that is stopped at any
moment is continued by the next one. The bytes do not depend on the number of workers. A tokenizer is trained on the
documents that are left after all steps: once, and kept by key.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from scaletrain_cli.data.drafts import write_whole
from scaletrain_cli.data.duplicates import PHASES, Corpus, remove_phases, run_job
from scaletrain_cli.data.duplicates.corpus import DEFAULT_MEMORY_BYTES, settings_key
from scaletrain_cli.data.pipeline.chain import (
    Chain,
    ChainStep,
    Duplicates,
    TokenizerSettings,
    Work,
    applies,
    chain_of,
    encoded_before,
    extended,
    loaded_tokenizer,
)
from scaletrain_cli.data.pipeline.claims import Claims, Timing
from scaletrain_cli.data.pipeline.decisions import chained
from scaletrain_cli.data.pipeline.report import nothing_left, write_report
from scaletrain_cli.data.pipeline.schedule import Progress, Stage, Workers, run_stage
from scaletrain_cli.data.pipeline.shards import (
    SCHEMA,
    encoded,
    read_shard_info,
    remove_damaged_shard,
    seal_of,
    shard_folder,
    write_shard,
)
from scaletrain_cli.data.pipeline.tasks import TASK_BYTES, Source, Task, tasks_of
from scaletrain_cli.data.tokenizers.files import train_tokenizer
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.shared_datasets import (
    is_readable,
    open_to_readers,
    place_of,
    require_own_place,
    steps_folder,
    tokenizers_folder,
)
from scaletrain_cli.safe_files import make_folder, open_to_read
from scaletrain_cli.spec.corpus_files import END_OF_TEXT
from scaletrain_cli.spec.preparation import DuplicatesSpec, PreparationStep

_TRAINING = "bpe/v1"  # raised with every change of the tokenizer of equal documents
_LARGEST_BYTES = 1 << 28
# More text does not improve a tokenizer, and takes time in proportion.
MOST_CHARACTERS = 500_000_000


def characters_of(sources: Sequence[Source]) -> list[int]:
    """Return how many characters of each source the sample has, at least as long as the source has them.

    A source's share of the sample is its share of all bytes as stored. The weights of a mixture have no part in it, so
    that a changed mixture leaves the tokenizer, and all that is prepared with it, as they are.
    """
    sizes = [sum(file.size for file in source.files) for source in sources]
    sizes = sizes if any(sizes) else [1] * len(sizes)
    return [round(MOST_CHARACTERS * size / sum(sizes)) for size in sizes]


def trained_before(path: Path) -> str:
    """Return the content of a tokenizer.json that was trained before; empty if there is none that can be used."""
    try:
        with open_to_read(path) as file:  # of any user
            content = file.read(_LARGEST_BYTES).decode()
        loaded_tokenizer(content)
    except Exception:  # damaged; tokenizers raises nothing narrower
        return ""
    return content


def train_into(path: Path, vocab_size: int, sources: Sequence[Work], _unit: int = 0) -> None:
    """Train the tokenizer and write its tokenizer.json. Raises UsageError and OSError."""
    tokenizer = train_tokenizer(sample(sources), vocab_size, [END_OF_TEXT])
    write_whole(path, str(tokenizer.to_str(pretty=True)))


def sample(sources: Sequence[Work]) -> Iterator[str]:
    """Yield the documents to train on; one source without steps gives its beginning.

    Otherwise each source gives documents from tasks that lie evenly in it, until it has given its share. Raises
    UsageError for a source of which no document is left.
    """
    characters = characters_of([work.source for work in sources])
    from_beginning = len(sources) == 1 and len(sources[0].chain.steps) == 1
    for work, most in zip(sources, characters, strict=True):
        taken, is_empty = 0, True
        for task in work.tasks if from_beginning else spread(work.tasks):
            for _, text in work.chain.documents(task):
                yield text
                is_empty = False
                taken += len(text)
                if taken > most:
                    break
            if taken > most:
                break
        if is_empty:
            raise UsageError(nothing_left(work))


def spread(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks in an order whose every beginning lies evenly in the source: numbers by their reversed bits."""
    bits = max(1, (len(tasks) - 1).bit_length())
    return sorted(tasks, key=lambda task: int(f"{task.number:0{bits}b}"[::-1], 2))


_TOKENS = "tokens/v2"  # raised with every change of the tokens of equal documents


@dataclass(frozen=True)
class Preparation:
    """The sources to prepare, with the settings.

    ``tokenizer``: the content of a tokenizer.json; empty: byte-level BPE with ``vocab_size`` tokens is trained on the
    documents that are left, of which each source gives a share by its size.
    ``memory_bytes``: what deduplication may use in each process.
    """

    sources: tuple[Source, ...]
    sections: tuple[PreparationStep, ...]
    tokenizer: str
    validation_share: float
    skips_bad: bool = False
    task_bytes: int = TASK_BYTES
    vocab_size: int = 0
    memory_bytes: int = DEFAULT_MEMORY_BYTES


def prepare(
    preparation: Preparation,
    folder: Path,
    workers: int,
    progress: Progress,
    *,
    failure: Path | None = None,
    timing: Timing | None = None,
) -> dict[str, Path]:
    """Return the folder of the dataset of each source, by its name, after preparing what is missing.

    Any number of processes, on any machines that share the folder, may do this at the same time, and share the work.
    ``failure``: a file that some of them have in common: they all end with the error of the first one that fails.
    ``progress`` gets the name of a stage, and how many of its units are done. Raises UsageError for input that cannot
    be used, ScaletrainError and OSError.
    """
    steps = steps_folder(folder)
    tokenizers = tokenizers_folder(folder)
    for own in (steps, tokenizers):
        require_own_place(own)
        make_folder(own, parents=True)
    with Claims(steps_folder(folder) / ".work", failure, timing) as claims:
        with Workers(workers, claims.owner) as pool:
            crew = _Crew(claims, pool, progress)
            claims.remove_drafts(steps)
            claims.remove_drafts(tokenizers)
            claims.raise_failure()
            works = _with_all_steps(preparation, steps, crew)
            tokenizer = preparation.tokenizer or _trained(preparation, works, tokenizers, crew)
            done = []
            for work in works:
                dataset = place_of(folder, _dataset_key(preparation, tokenizer, work.chain), _open)
                done.append(replace(work, dataset=dataset))
                _write_shards(done[-1], tokenizer, preparation.validation_share, crew)
            for prepared in done:
                finish = partial(_finish, prepared, tokenizer, preparation.validation_share, done)
                key = f"{prepared.dataset.name}-dataset"
                crew.run(Stage(f"finish {prepared.name}", key, prepared.dataset, ("dataset.json",), finish))

        def remove_phases_again() -> None:
            steps = [step.duplicates for work in works for step in work.chain.steps if step.duplicates is not None]
            for corpus in {step.corpus for step in steps}:
                remove_phases(corpus)  # of which a slow process may have written some again

        claims.at_last_end(remove_phases_again)
        return {work.name: work.dataset for work in done}


@dataclass(frozen=True)
class _Crew:
    """This process and its worker processes, which run the stages together with other preparations."""

    claims: Claims
    workers: Workers
    progress: Progress

    def run(self, stage: Stage) -> None:
        run_stage(stage, self.claims, self.workers, self.progress)


def prepared(preparation: Preparation, folder: Path) -> dict[str, Path] | None:
    """Return what ``prepare`` would return, without doing anything; None if something is missing. Raises UsageError."""
    chains = [_first_step(preparation, steps_folder(folder), source) for source in preparation.sources]
    for section in preparation.sections:
        chains = _planned(chains, preparation.sources, section)
    tokenizer = preparation.tokenizer or _trained_by_anyone(preparation, chains, folder)
    if not tokenizer:
        return None
    keys = [_dataset_key(preparation, tokenizer, chain) for chain in chains]
    places = {source.name: place_of(folder, key, _open) for source, key in zip(preparation.sources, keys, strict=True)}
    return places if all(is_readable(place) for place in places.values()) else None


def _open(dataset: Path) -> None:
    """Open all files of a dataset of another user. Raises ScaletrainError for a damaged one."""
    from scaletrain_cli.data.token_files import open_source

    open_source(dataset)


def _planned(chains: Sequence[Chain], sources: Sequence[Source], section: PreparationStep) -> list[Chain]:
    """Return chains with a further step, of which only the key can be used. Raises UsageError."""
    if not isinstance(section, DuplicatesSpec):
        return [extended(chain, source, (section,)) for chain, source in zip(chains, sources, strict=True)]
    chosen = [number for number, source in enumerate(sources) if applies(section, source)]
    key = _duplicates_key([chains[number] for number in chosen], section)
    planned = list(chains)
    for place, number in enumerate(chosen):
        step = ChainStep(_key_without_duplicates(chains[number], key, place))
        planned[number] = replace(chains[number], steps=(*chains[number].steps, step))
    return planned


def _duplicates_key(chains: Sequence[Chain], section: DuplicatesSpec) -> str:
    """Return the key of the results of deduplication over several sources."""
    return chained("duplicates", [chain.steps[-1].key for chain in chains], settings_key(section))


def _key_without_duplicates(chain: Chain, key: str, place: int) -> str:
    """Return the key of a source after deduplication, at its place: of equal sources the first one keeps more."""
    return chained(chain.steps[-1].key, key, place)


def _dataset_key(preparation: Preparation, tokenizer: str, chain: Chain) -> str:
    settings = asdict(loaded_tokenizer(tokenizer)[0])
    return chained(_TOKENS, chain.steps[-1].key, settings, preparation.validation_share)


def _trained(preparation: Preparation, works: Sequence[Work], folder: Path, crew: _Crew) -> str:
    """Return the tokenizer.json that is trained on the documents that are left, once, and kept in ``folder``."""
    path = _tokenizer_path(preparation, folder, [work.chain for work in works])
    train = partial(train_into, path, preparation.vocab_size, works)
    if not trained_before(path):
        path.unlink(missing_ok=True)
    with Workers(1, crew.claims.owner) as this_process:  # whose training uses all cores
        stage = Stage("train the tokenizer", path.parent.name, path.parent, (path.name,), train)
        run_stage(stage, crew.claims, this_process, crew.progress)
    return trained_before(path)


def _trained_by_anyone(preparation: Preparation, chains: Sequence[Chain], folder: Path) -> str:
    """Return a tokenizer that this user or another one has trained; empty if there is none that can be read."""
    others = sorted(folder.glob(".tokenizers*"))
    places = (_tokenizer_path(preparation, place, chains) for place in [tokenizers_folder(folder), *others])
    return next(filter(None, map(trained_before, places)), "")


def _tokenizer_path(preparation: Preparation, folder: Path, chains: Sequence[Chain]) -> Path:
    """Return the file of the tokenizer that is trained on the sources; it is there if it has been trained.

    ``folder``: of all trained tokenizers.
    """
    keys = zip((chain.steps[-1].key for chain in chains), characters_of(preparation.sources), strict=True)
    return folder / chained(_TRAINING, preparation.vocab_size, list(keys)) / "tokenizer.json"


def _first_step(preparation: Preparation, steps: Path, source: Source) -> Chain:
    """Return the chain that only reads a source. Raises UsageError for tokens without their tokenizer."""
    settings = None
    if source.is_tokenized:
        if not preparation.tokenizer:
            raise UsageError(Reason("data.tokens-without-tokenizer", {"source": source.name}))
        settings = loaded_tokenizer(preparation.tokenizer)[0]
    return chain_of(steps, source, (), skips_bad=preparation.skips_bad, tokenizer=settings)


def _after(chains: Iterable[Chain]) -> str:
    """Return the names of the steps that are done together with what follows them, for people; empty if none is."""
    names: dict[str, None] = {}
    for chain in chains:
        done = max((number for number, step in enumerate(chain.steps) if step.duplicates is not None), default=0)
        names |= dict.fromkeys(step.name for step in chain.steps[done + 1 :])
    return f" (after {', '.join(names)})" if names else ""


def _write_shards(work: Work, tokenizer: str, validation_share: float, crew: _Crew) -> None:
    """Write the shards of a source that are missing. Raises UsageError if no document of it is left."""
    dataset = work.dataset
    crew.claims.remove_drafts(dataset)
    if read_document(dataset / "dataset.json") is None:
        require_own_place(dataset)
        make_folder(dataset)
        write = partial(_write_tokens, tokenizer, validation_share)
        shards = tuple(shard_folder(dataset, task.number).name for task in work.tasks)
        # A worker process gets one task at a time, not all.
        one = [replace(work, tasks=(task,)) for task in work.tasks].__getitem__
        name = f"tokenize {work.name}{_after([work.chain])}"
        crew.run(Stage(name, f"{dataset.name}-shards", dataset, shards, write, one))
        written = (read_shard_info(dataset / shard) for shard in shards)
        if not any(shard is None or shard.train_documents + shard.validation_documents for shard in written):
            raise UsageError(nothing_left(work))


def _finish(work: Work, tokenizer: str, validation_share: float, prepared: Sequence[Work], _unit: int) -> None:
    """Write what makes a dataset complete: damaged shards again, and dataset.json as the last file.

    ``prepared``: all sources, whose tokens are there: examples of duplicates may be documents of any of them.
    """
    dataset = work.dataset
    for task in work.tasks:
        if remove_damaged_shard(shard_folder(dataset, task.number)):
            _write_tokens(tokenizer, validation_share, replace(work, tasks=(task,)))
    write_report(work, prepared)
    write_whole(dataset / "tokenizer.json", tokenizer)
    description = _description(work, loaded_tokenizer(tokenizer)[0])
    write_whole(dataset / "dataset.json", json.dumps(description, indent=1) + "\n")
    open_to_readers(dataset)


def _with_all_steps(preparation: Preparation, steps: Path, crew: _Crew) -> list[Work]:
    """Return the sources with all of their steps; run those that must be done for all documents before the next one."""
    works = [
        Work(source, tasks_of(source, preparation.task_bytes), _first_step(preparation, steps, source))
        for source in preparation.sources
    ]
    for section in preparation.sections:
        if isinstance(section, DuplicatesSpec):
            works = _without_duplicates(works, section, steps, preparation.memory_bytes, crew)
        else:
            works = [replace(work, chain=extended(work.chain, work.source, (section,))) for work in works]
    return works


def _without_duplicates(
    works: Sequence[Work], section: DuplicatesSpec, steps: Path, memory_bytes: int, crew: _Crew
) -> list[Work]:
    """Find the duplicates among the documents that are left so far, and return the sources with that step."""
    chosen = [number for number, work in enumerate(works) if applies(section, work.source)]
    tasks = [(works[number].chain, task) for number in chosen for task in works[number].tasks]
    key = _duplicates_key([works[number].chain for number in chosen], section)
    corpus = Corpus(steps / key, tuple(task.source for _, task in tasks), section, memory_bytes)
    make_folder(corpus.folder)
    texts = _Texts(dict(enumerate(tasks)))
    for number in range(len(PHASES)):
        stage = _phase(corpus, number, texts)
        crew.run(stage if number else replace(stage, name=f"{stage.name}{_after(chain for chain, _ in tasks)}"))
    remove_phases(corpus)
    result, first = list(works), 0
    for place, number in enumerate(chosen):
        work = works[number]
        duplicates = Duplicates(corpus, first)
        step = ChainStep(_key_without_duplicates(work.chain, key, place), section.step, None, duplicates)
        result[number] = replace(work, chain=replace(work.chain, steps=(*work.chain.steps, step)))
        first += len(work.tasks)
    return result


@dataclass(frozen=True)
class _Texts:
    """The documents of each task, for deduplication in worker processes."""

    tasks: Mapping[int, tuple[Chain, Task]]

    def __call__(self, task: int, /) -> Iterator[tuple[int, str]]:
        chain, texts = self.tasks[task]
        return chain.documents(texts)

    def for_job(self, job: int) -> "tuple[int, _Texts]":
        """Return what a worker process needs for a job: a phase that reads texts has one job for each task."""
        return job, _Texts({job: self.tasks[job]} if job in self.tasks else {})


def _phase(corpus: Corpus, number: int, texts: _Texts) -> Stage:
    """Return the stage of a phase of deduplication, whose phases before are done."""
    phase, paths = PHASES[number], list[Path]()
    try:
        paths = [phase.path(corpus, job) for job in range(phase.jobs(corpus))]
    except FileNotFoundError:
        if not corpus.report.exists():  # else another process has finished and removed what the phases wrote
            raise
    return Stage(
        f"duplicates: {phase.name}",
        f"{corpus.folder.name}-{phase.name}",
        paths[0].parent if paths else corpus.folder,
        tuple(path.name for path in paths),
        partial(_find_duplicates, corpus, number),
        texts.for_job,
        is_over=corpus.report.exists,
    )


def _find_duplicates(corpus: Corpus, phase: int, given: tuple[int, _Texts]) -> None:
    job, texts = given
    run_job(corpus, phase, job, texts)


def _write_tokens(tokenizer: str, validation_share: float, work: Work) -> None:
    """Write the shard of the only task of ``work``."""
    settings, loaded = loaded_tokenizer(tokenizer)
    (task,) = work.tasks
    texts = (text for _, text in work.chain.documents(task))
    documents = encoded(loaded, texts, settings.end_of_text, settings.dtype)
    if work.source.is_tokenized:
        documents = encoded_before(work.chain.token_documents(task, settings), settings)
    write_shard(shard_folder(work.dataset, task.number), documents, validation_share, settings.unknown)


def _description(work: Work, tokenizer: TokenizerSettings) -> dict[str, Any]:
    """Return the contents of dataset.json: totals, and the counts and the digest of every shard, in order."""
    shards = [read_shard_info(shard_folder(work.dataset, task.number)) for task in work.tasks]
    if None in shards:
        raise UsageError(Reason("data.shards-missing", {"folder": str(work.dataset)}))
    documents = [asdict(shard) for shard in shards if shard is not None]
    numbers = [name for name in (documents[0] if documents else {}) if name != "digest"]
    description = {
        "schema": SCHEMA,
        "source": work.name,
        "content": work.source.content,
        "steps": [step.key for step in work.chain.steps],
        "tokenizer": asdict(tokenizer),
        "fingerprint": hashlib.sha256("\n".join(shard["digest"] for shard in documents).encode()).hexdigest(),
        **{name: sum(shard[name] for shard in documents) for name in numbers},
        "shards": documents,
    }
    return description | {"seal": seal_of(description)}
