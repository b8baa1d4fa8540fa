"""Switches for the code that Dynamo converts, and the exception by which a backend makes Dynamo skip a frame."""

from types import CodeType

from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.exc import SkipFrame
from torch._dynamo.types import FrameAction, FrameExecStrategy

__all__ = ["SkipFrame", "convert_again", "skip_code"]


def skip_code(code: CodeType, *, callees: bool = False) -> None:
    """Have Dynamo run frames of `code` eagerly; with `callees`, also the frames that they call."""
    set_code_exec_strategy(code, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP if callees else FrameAction.DEFAULT))


def convert_again(code: CodeType) -> None:
    """Have Dynamo convert frames of `code` again after it gave them up."""
    set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))
