"""One rank of a script under torchrun: `rank_script.py SCRIPT ARGUMENT...` runs it and leaves without Python's teardown.

PyTorch 2.13 keeps the threads of a gloo group after `destroy_process_group()` where FSDP2 or tensor parallelism used the
group, and Python aborts ("terminate called without an active exception") if one of them asks for the interpreter while it
ends (https://github.com/pytorch/pytorch/pull/179291). A script that raises still ends with an error.
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
