"""Functions that make Dynamo capture or skip the frames of a code object, and two errors of Dynamo. A backend raises SkipFrame to make
Dynamo run the frame eagerly. Dynamo raises Unsupported at code that it cannot capture."""

from types import CodeType

from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.exc import SkipFrame, Unsupported
from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy

__all__ = ["SkipFrame", "Unsupported", "convert_again", "skip_code", "skip_once"]


def skip_code(code: CodeType, *, callees: bool = False) -> None:
    """Make Dynamo run frames of `code` eagerly. With `callees`, frames that they call run eagerly as well."""
    set_code_exec_strategy(code, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP if callees else FrameAction.DEFAULT))


def convert_again(code: CodeType) -> None:
    """Make Dynamo capture frames of `code` again, for instance after `skip_code`."""
    set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))


def skip_once() -> ConvertFrameReturn:
    """Return a value that makes Dynamo run one frame eagerly. Frames that it calls, and later frames of its code, are not affected."""
    return ConvertFrameReturn(apply_to_code=False)
