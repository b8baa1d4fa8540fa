"""What older releases of torch do otherwise, in tests that pass on newer ones."""

from __future__ import annotations

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def differs_in_2_11(why: str, last: tuple[int, int] = (2, 11)) -> pytest.MarkDecorator:
    """Expect a test to fail on torch 2.11, the oldest that is supported, up to release `last`; `why` says what these releases do."""
    return pytest.mark.xfail(last >= TORCH, reason=f"torch 2.11: {why}", strict=False)


__all__ = ["TORCH", "differs_in_2_11"]
