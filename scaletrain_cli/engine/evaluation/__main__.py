"""``python -m scaletrain_cli.engine.evaluation RUN_DIR``: the rank of an evaluation job (see launch/evaluate.py)."""

import sys

from scaletrain_cli.worker import Rank


def main() -> None:
    """Evaluate the checkpoint that the environment names, and end the process with the exit code."""
    rank = Rank.start(sys.argv[1])  # before torch is imported

    def evaluate() -> int:
        from scaletrain_cli.engine.evaluation.tasks import evaluate_checkpoint

        return evaluate_checkpoint(rank)

    rank.run(evaluate)


if __name__ == "__main__":
    main()
