"""What older releases of torch do otherwise, in tests that pass on newer ones."""

from __future__ import annotations

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def differs_in_2_11(why: str) -> pytest.MarkDecorator:
    """Expect a test to fail on torch 2.11, the oldest that is supported; `why` says what that release does."""
    return pytest.mark.xfail(TORCH < (2, 12), reason=f"torch 2.11: {why}", strict=False)


__all__ = ["differs_in_2_11"]
