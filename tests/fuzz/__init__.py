"""The fuzzer: it writes programs, state sequences, option sets and ONNX files, runs them rewritten, and compares with fp32.

    python -m tests.fuzz --minutes 10                 # all kinds; findings go to fuzz-findings/, a table is printed
    python -m tests.fuzz --kinds programs --seed 0 --cases 400
    python -m tests.fuzz --show programs:17           # print one case as a runnable program, and what comes of it
    python -m tests.fuzz.mutants --minutes 10         # put known bugs back, one at a time: does the fuzzer report each?

A case is a seed: the same seed makes the same case. A run that is stopped goes on at the seed where it stopped.

`vocabulary.py` lists the statements, `programs.py` puts them together, `oracle.py` says what is right, `program_case.py` runs one
program. `states.py` makes sequences of operations on one model, `option_sets.py` sets of options, `onnx_files.py` files.
`shrink.py` cuts a finding down; `findings.py` groups findings by signature and writes them. Nothing in the library knows of this package.
"""
