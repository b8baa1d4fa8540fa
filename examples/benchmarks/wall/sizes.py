"""How large the inputs and the models of the walls are: tiny, so that hundreds take an hour, or as asked.

At tiny sizes positions, counts and sums stay below what low formats hold exactly: `--length 1024` and the like show the rest.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from typing import Any

import transformers

DEPTH, WORDS, EXPERTS = 2, 96, 4


@dataclass
class Sizes:
    length: int = 12
    width: int = 64
    image: int = 32
    sound: int = 4000
    batch: int = 2
    trained: bool = False

    @property
    def heads(self) -> int:
        return max(4, self.width // 128)

    @property
    def patch(self) -> int:
        """Of an image, so that there are no more than 1,024."""
        return max(8, self.image // 32)

    @property
    def largest(self) -> float:
        """Parameters beyond which a model has not been made small."""
        return min(3e7 * (self.width / 64) ** 2, 2e8)


SIZES = Sizes()
"""Of this process; each case is given those of its run."""


def asks_sizes(options: ArgumentParser) -> None:
    options.add_argument("--length", type=int, default=SIZES.length, help="tokens of a text; above 128 weights are as if trained")
    options.add_argument("--width", type=int, default=SIZES.width, help="hidden size of models that are made small by name")
    options.add_argument("--side", type=int, default=SIZES.image, help="pixels of a side of an image")
    options.add_argument("--sound", type=float, default=SIZES.sound / 16000, help="seconds of sound")
    options.add_argument("--batch", type=int, default=SIZES.batch)
    options.add_argument("--trained", action="store_true", help="draw weights as if trained, at any length")


def sizes_of(asked: Namespace) -> Sizes:
    trained = asked.trained or asked.length > 128
    return Sizes(asked.length, asked.width, asked.side, round(16000 * asked.sound), asked.batch, trained)


def take(sizes: Sizes) -> None:
    """Use these sizes from here on, in this process."""
    vars(SIZES).update(asdict(sizes))


_PLACES = re.compile(r"max_position|n_positions|max_seq|seq_length|max_source|max_target|n_ctx")


def lengthen(config: Any, level: int = 0) -> Any:
    """Give a configuration as many positions as there are tokens, or frames of sound at 50 a second; parts included."""
    least = max(SIZES.length, SIZES.sound // 320) + 2  # RoBERTa and its like count from 2 on
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig) and level < 4:
            lengthen(value, level + 1)
        elif _PLACES.search(name) and isinstance(value, int) and 1 < value < least:
            setattr(config, name, least)
    return config
