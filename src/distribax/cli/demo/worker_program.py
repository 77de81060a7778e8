"""What each worker of `distribax demo --strategy multi-worker` runs."""

from __future__ import annotations

import os
import sys

from distribax.cli.demo.classifier import train
from distribax.cli.demo.demo_programs import FIGURES_VARIABLE
from distribax.cli.demo.digits import Digits
from distribax.cli.demo.view import EpochFigures
from distribax.strategies.multi_worker import MultiWorkerMirroredStrategy


def main() -> None:
    """Trains; the first worker writes the figures of each epoch to the file of the demo."""
    strategy = MultiWorkerMirroredStrategy()
    is_first = os.environ["RANK"] == "0"
    with open(os.environ[FIGURES_VARIABLE], "a", buffering=1) as file:

        def tell(figures: EpochFigures) -> None:
            if is_first:
                file.write(f"{figures.to_line()}\n")

        outcome = train(strategy, Digits.load(), int(sys.argv[1]), tell)
        if is_first:
            file.write(f"accuracy {outcome.accuracy}\n")


if __name__ == "__main__":
    main()
