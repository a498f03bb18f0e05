"""A tokenizer that is trained on the documents that are left after all steps: once, and kept by key."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.data.drafts import write_whole
from scaletrain_cli.data.pipeline.chain import Chain, Work, loaded_tokenizer
from scaletrain_cli.data.pipeline.decisions import chained
from scaletrain_cli.data.pipeline.report import nothing_left
from scaletrain_cli.data.pipeline.tasks import Task
from scaletrain_cli.data.tokenizers.files import train_tokenizer
from scaletrain_cli.errors import UsageError
from scaletrain_cli.safe_files import open_to_read
from scaletrain_cli.spec.corpus_files import END_OF_TEXT

_TRAINING = "bpe/v1"  # raised with every change of the tokenizer of equal documents
_LARGEST_BYTES = 1 << 28
# More text does not improve a tokenizer, and takes time in proportion.
MOST_CHARACTERS = 500_000_000


@dataclass(frozen=True)
class BpeTraining:
    """``sizes``: the bytes of each source as stored, by name.

    A source's share of the sample is its share of all bytes. The weights of a mixture have no part in it, so that a
    changed mixture leaves the tokenizer, and all that is prepared with it, as they are.
    """

    vocab_size: int
    sizes: tuple[tuple[str, int], ...] = ()

    def characters(self, sources: Sequence[str]) -> list[int]:
        """Return how many characters of each source the sample has, at least as long as the source has them."""
        sizes = dict(self.sizes)
        given = [sizes.get(name, 0) for name in sources]
        given = given if any(given) else [1] * len(given)
        return [round(MOST_CHARACTERS * size / sum(given)) for size in given]


def tokenizer_path(folder: Path, training: BpeTraining, names: Sequence[str], chains: Sequence[Chain]) -> Path:
    """Return the file of the tokenizer that is trained on these sources; it is there if it has been trained.

    ``folder``: of all trained tokenizers.
    """
    keys = [chain.steps[-1].key for chain in chains]
    key = chained(_TRAINING, training.vocab_size, list(zip(keys, training.characters(names), strict=True)))
    return folder / key / "tokenizer.json"


def trained_before(path: Path) -> str:
    """Return the content of a tokenizer.json that was trained before; empty if there is none that can be used."""
    try:
        with open_to_read(path) as file:  # of any user
            content = file.read(_LARGEST_BYTES).decode()
        loaded_tokenizer(content)
    except Exception:  # damaged; tokenizers raises nothing narrower
        return ""
    return content


def train_into(path: Path, training: BpeTraining, sources: Sequence[Work], _unit: int = 0) -> None:
    """Train the tokenizer and write its tokenizer.json. Raises UsageError and OSError."""
    tokenizer = train_tokenizer(sample(training, sources), training.vocab_size, [END_OF_TEXT])
    write_whole(path, str(tokenizer.to_str(pretty=True)))


def sample(training: BpeTraining, sources: Sequence[Work]) -> Iterator[str]:
    """Yield the documents to train on; one source without steps gives its beginning.

    Otherwise each source gives documents from tasks that lie evenly in it, until it has given its share. Raises
    UsageError for a source of which no document is left.
    """
    characters = training.characters([each.name for each in sources])
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
