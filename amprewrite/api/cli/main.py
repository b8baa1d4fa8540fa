"""Parse the arguments of the command line, run the command, and report errors.

An error prints one line on stderr and gives status 2. With --debug it raises, so that a traceback shows.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from amprewrite.api.cli import commands
from amprewrite.api.cli.doctor import doctor
from amprewrite.api.cli.models import HOW, first_line
from amprewrite.api.cli.output import ERR
from amprewrite.tables.boundary.printable import printable
from amprewrite.tables.devices import NAMED
from amprewrite.tables.errors import AmpRewriteError
from amprewrite.tables.version import VERSION

MODEL = f"""A MODEL is
  package.module:callable   returns (module, inputs); the folder you stand in is searched
  file.py:callable          the same from a file
  model.pt2                 an exported program with its example inputs
  model.onnx                an fp32 ONNX file
  plan.json                 a saved plan, where only a plan is needed

A callable is code, and is run. .onnx and .json files are data. A .pt2 file may hold code:
one that does, or may, is refused without --trust.

{HOW[0].upper()}{HOW[1:]}."""

BATCHES = """BATCHES is package.module:callable or file.py:callable, which returns an iterable
of batches: a tensor is the one argument, a tuple the arguments, a dict keywords."""

EXAMPLES = {
    "plan": [
        "amprewrite plan zoo:bert --dtype bf16",
        "amprewrite plan zoo:bert --html bert.html --errors",
        "amprewrite plan zoo:bert --device h100",
        "amprewrite plan model.onnx --json > plan.json",
    ],
    "explain": ["amprewrite explain zoo:bert encoder.layer.0", "amprewrite explain plan.json linear_3", "amprewrite explain zoo:bert"],
    "diff": ["amprewrite diff before.json after.json", "amprewrite diff zoo:small zoo:large"],
    "convert": ["amprewrite convert fp32.onnx mixed.onnx --max-rel-err 1e-2", "amprewrite convert zoo:bert bert.onnx --dtype fp16"],
    "verify": ["amprewrite verify zoo:bert --dtype fp16 --max-rel-err 1e-2", "amprewrite verify fp32.onnx"],
    "debug": ["amprewrite debug zoo:bert --dtype fp16 --suggest", "amprewrite debug zoo:bert --train"],
    "calibrate": [
        "amprewrite calibrate zoo:bert zoo:batches -o ranges.json",
        "amprewrite plan zoo:bert --dtype fp16 --calibration ranges.json",
    ],
    "lists": ["amprewrite lists softmax --dtype fp16", "amprewrite lists --lists tf | grep deny"],
    "passes": ["amprewrite passes"],
    "devices": ["amprewrite devices --json"],
    "doctor": ["amprewrite doctor", "amprewrite doctor --run-on cuda:0", "amprewrite doctor --json > report.json"],
}


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports a wrong command line in one line on stderr, with status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message)}; {self.prog} --help lists the choices\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with a subparser for each command."""
    top = _Parser(prog="amprewrite", description="Mixed precision as a graph rewrite: see the cast plan, question it, convert, verify.")
    top.add_argument("--version", action="version", version=f"amprewrite {VERSION}")
    top.set_defaults(debug=False)
    groups = top.add_subparsers(metavar="COMMAND", dest="command", required=True)

    def command(name: str, help: str, model: bool = True, epilog: str = "") -> argparse.ArgumentParser:
        shown = "\n".join(f"  {line}" for line in EXAMPLES[name])
        made: argparse.ArgumentParser = groups.add_parser(
            name,
            help=help,
            description=f"{help[0].upper()}{help[1:]}.",
            epilog=f"examples:\n{shown}\n\n{epilog or (MODEL if model else '')}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(run=doctor if name == "doctor" else getattr(commands, name))
        made.add_argument("--json", action="store_true", help="print data instead of text")
        if model and name != "diff":
            made.add_argument("model", metavar="MODEL")
        if model:
            made.add_argument("--trust", action="store_true", help="load a .pt2 file that may run code")
        made.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return made

    _plan(command("plan", "show the format of each op, and why"))
    made = command("explain", "explain a node's format, and what would change it")
    made.add_argument("node", metavar="NODE", nargs="?", default="", help="a node or a module path; the whole plan if left out")
    _policy(made)
    made = command("diff", "list what differs between two plans; status 1 where something does")
    made.add_argument("a", metavar="A")
    made.add_argument("b", metavar="B")
    _policy(made)
    _convert(command("convert", "write a model in mixed precision, as .onnx or .pt2"))
    made = command("verify", "measure what the plan costs in accuracy, with true rounding")
    made.add_argument("--max-rel-err", type=number, metavar="X", help="status 1 where the output error exceeds X")
    made.add_argument("--top", type=count, default=20, metavar="N", help="rows in the JSON")
    _policy(made, plan=True)
    made = command("debug", "find what overflows, underflows or cancels; status 1 where something does")
    made.add_argument("--suggest", action="store_true", help="bisect to the fewest nodes to keep in fp32")
    made.add_argument("--max-rel-err", type=number, metavar="X", help="the output error that --suggest aims at")
    _policy(made)
    made = command("calibrate", "watch a model's values on batches: what fp16 cannot hold", epilog=f"{BATCHES}\n\n{MODEL}")
    made.add_argument("batches", metavar="BATCHES", nargs="?", default="", help="the model's example inputs if left out")
    made.add_argument("-o", "--output", metavar="PATH", help="write the ranges, for --calibration and rewrite(calibration=...)")
    made.add_argument("--top", type=count, default=20, metavar="N", help="how many values to show, those most at risk first")
    made.add_argument("--train", action="store_true", help="training mode")
    _runs_on(made)
    made = command("lists", "print the op lists", model=False)
    made.add_argument("op", metavar="OP", nargs="?", default="")
    _formats(made)
    command("passes", "print the passes in their order", model=False)
    command("devices", "print the device table, and what this machine has", model=False)
    _devices(command("doctor", "print what this machine has and gains, and check numbers; status 1 if a check fails", model=False))
    return top


def _plan(made: argparse.ArgumentParser) -> None:
    shown = made.add_mutually_exclusive_group()
    shown.add_argument("--code", action="store_true", help="every line of the rewritten code, annotated")
    shown.add_argument("--nodes", action="store_true", help="every node with its reason")
    shown.add_argument("--ops", action="store_true", help="op × dtype table")
    shown.add_argument("--after", metavar="PASS", help="each decision after PASS, and the pass that made it")
    for name, what in (
        ("--html", "an interactive report"), ("--svg", "a picture"), ("--png", "a picture (needs the png extra)"),
        ("--dot", "Graphviz text"), ("--model-explorer", "node data for Google's Model Explorer"),
    ):  # fmt: skip
        made.add_argument(name, metavar="PATH", help=f"write {what}")
    made.add_argument("-o", "--output", metavar="PATH", help="write the plan as JSON")
    made.add_argument("--depth", type=count, metavar="N", help="module levels that pictures open")
    made.add_argument("--errors", action="store_true", help="run the model and put ranges and errors into --html")
    _policy(made, plan=True)


def _convert(made: argparse.ArgumentParser) -> None:
    made.add_argument("out", metavar="OUT", help="the file to write: .onnx, or .pt2 for PyTorch models")
    made.add_argument("--max-rel-err", type=number, metavar="X", help="status 1, and nothing written, where the error exceeds X")
    made.add_argument("--low-io", action="store_true", help="inputs and outputs go low, too")
    _policy(made, plan=True)


def _policy(made: argparse.ArgumentParser, plan: bool = False) -> None:
    """Add the options that affect a plan, such as --dtype and --override. With `plan`, also add --plan."""
    group = _formats(made)
    if plan:
        group.add_argument("--plan", metavar="JSON", help="follow this plan")
    kinds = "softmax=deny, module:head=fp32, node:linear_3=low"
    group.add_argument("--override", action="append", default=[], metavar="KEY=KIND", help=kinds)
    ranges = "ranges.json of amprewrite calibrate; for an ONNX file an .npz of inputs by name"
    group.add_argument("--calibration", metavar="PATH", help=ranges)
    limit = "seconds that one sample run of an ONNX file may take, 'none' for any; 5 and more by its size if left out"
    group.add_argument("--time-limit", type=seconds, default="auto", metavar="X", help=limit)
    group.add_argument("--train", action="store_true", help="training mode, with gradients")


def _formats(made: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options on which op lists depend (--dtype, --lists and devices), and return their group."""
    group = made.add_argument_group("policy")
    group.add_argument("--dtype", metavar="FORMAT", help="bf16 or fp16; the device's best if left out")
    group.add_argument("--lists", default="default", metavar="NAME", help="default, tf, autocast, o2 or o3")
    _devices(group)
    return group


def _devices(made: argparse._ActionsContainer) -> None:
    """Add --device, the device to plan for, and --run-on, the device to run on."""
    named = "plan for this device of `amprewrite devices`, such as h100, at hand or not; for the one it runs on if left out"
    made.add_argument("--device", metavar="NAME", type=_planned_for, help=named)
    _runs_on(made)


def _runs_on(made: argparse._ActionsContainer) -> None:
    made.add_argument("--run-on", metavar="DEVICE", help="move model and inputs to this device of PyTorch first, such as cuda or cuda:1")


def _planned_for(word: str) -> str:
    if word.lower() not in NAMED:
        here = " The device that a model runs on is --run-on." if word.lower().partition(":")[0] in ("cuda", "mps", "xpu", "meta") else ""
        raise argparse.ArgumentTypeError(f"{word} is no device that is planned for; known are {', '.join(NAMED)}.{here}")
    return word.lower()


def count(word: str) -> int:
    value = int(word)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{word} is no count; give 0 or more")
    return value


def number(word: str) -> float:
    value = float(word)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{word} is no error to allow; give a positive number")
    return value


def seconds(word: str) -> float | str | None:
    if word in ("auto", "none"):
        return None if word == "none" else word
    value = float(word)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{word} is no time to wait; give seconds, or 'none' for no limit")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command with `arguments` (None means sys.argv) and return its exit status.

    An error prints one line on stderr and gives status 2; --debug raises it instead.
    """
    options = parser().parse_args(arguments)
    folders = list(sys.path)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe: redirect stdout, so that the flush at exit raises no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except AmpRewriteError as error:
        if options.debug:
            raise
        return _fail(_one_line(str(error)))
    except Exception as error:
        if options.debug:
            raise
        return _fail(f"{type(error).__name__}: {first_line(error)} (--debug shows where)")
    finally:
        sys.path[:] = folders  # restore the import path, because loading a MODEL may have added folders


def _one_line(said: str) -> str:
    return " ".join(said.split())


def _fail(said: str) -> int:
    ERR.print(f"amprewrite: {printable(said)}", style="red" if ERR.is_terminal else None, markup=False)
    return 2


def _warning(message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None) -> None:
    """Print a warning of amprewrite in one line on stderr, and drop warnings of other libraries. Replaces `warnings.showwarning`."""
    if issubclass(category, UserWarning) and category.__module__.startswith("amprewrite"):
        ERR.print(f"amprewrite: warning: {printable(_one_line(str(message)))}", style="yellow" if ERR.is_terminal else None, markup=False)


def run() -> NoReturn:
    """Run the command line as a console script: set how warnings are shown for this process, run `main`, and exit with its status."""
    warnings.showwarning = _warning
    sys.exit(main())
