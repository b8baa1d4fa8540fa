# Everything runs in .venv, made once from the pinned versions of constraints.txt.
# Any Python from 3.11 on makes it; python3.11 first, whose versions are pinned.
PYTHON ?= $(shell for name in python3.11 python3 python3.12 python3.13; do \
	$$name -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
VENV ?= .venv
JOBS ?= 2
MINUTES ?= 10
SEED ?= 0
# About 75 s of one CPU on 26 November 2026 with torch 2.13, the start of torch included: laws (38 s), fixtures of all passes, tables, layout.
QUICK = tests/passes/test_error_laws.py tests/passes/test_repaint_unrounded.py tests/runtime/test_products_told.py \
	tests/passes/test_laws.py tests/passes/test_fixtures.py tests/ir tests/tables tests/planner/test_min_cut.py \
	tests/project/test_house.py tests/project/test_layout.py tests/project/test_op_names.py tests/project/test_torch_internals.py
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo quick test long slow fuzz matrix lint bench docs gallery clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## train a small model in mixed precision: its cast plan, and its accuracy beside fp32's
	$(VENV)/bin/python examples/digits.py

quick: $(VENV)/.dev ## run laws, fixtures and layout before each commit: about 75 s of one CPU
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile $(QUICK) $(ARGS)

test: $(VENV)/.dev ## run the tests on JOBS=2 processes; ARGS= goes to pytest
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

long: $(VENV)/.dev ## run the tests that take many seconds each: examples, guides, several ranks, command lines as processes
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile -m "long and not slow" $(ARGS)

slow: $(VENV)/.dev ## run the tests that take minutes or gigabytes: benchmarks, fault tests at length, mutants of the fuzzer
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile -m slow $(ARGS)

fuzz: $(VENV)/.dev ## run MINUTES=10 of generated cases on JOBS=2 processes; findings go to fuzz-findings/, SEED= says where to begin
	$(VENV)/bin/python -m tests.fuzz --minutes $(MINUTES) --jobs $(JOBS) --seed $(SEED) --resume $(ARGS)

matrix: $(VENV)/.dev ## run the law suite on versions of Python, torch and transformers that have no result in build/matrix/cells.jsonl yet
	$(VENV)/bin/python .ci/matrix.py --out build/matrix --use $(VENV)/bin/python $(ARGS)

lint: $(VENV)/.dev ## ruff here, mypy on a copy installed elsewhere
	$(VENV)/bin/ruff check .
	@installed=$$(mktemp -d) && trap 'rm -rf "$$installed"' EXIT && \
	$(PIP) install --quiet --no-deps --no-build-isolation --target "$$installed" . && rm -rf build && \
	cd "$$installed" && $(abspath $(VENV))/bin/mypy --config-file $(CURDIR)/pyproject.toml -p amprewrite

bench: $(VENV)/.dev ## casts executed, against torch.autocast
	$(VENV)/bin/python examples/benchmarks/casts_vs_autocast.py

docs: $(VENV)/.docs gallery ## build guides, API reference and gallery as one site with a search, to build/site/index.html
	$(VENV)/bin/python examples/site.py --out build/site --gallery build/gallery

gallery: $(VENV)/.dev ## write plans of twelve architectures as HTML, casts and errors beside autocast's, to build/gallery/index.html
	$(VENV)/bin/python examples/gallery.py --out build/gallery

clean: ## remove .venv and what tools left behind
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch comes first and pinned: a CPU build at hand is taken, and the constraints keep it where it is.
$(VENV)/.demo: constraints.txt pyproject.toml
	@test -x $(VENV)/bin/python || test -n "$(PYTHON)" || \
	{ echo "no Python 3.11 or newer with venv was found: install one, or name it with make PYTHON=..." >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(PIP) install --quiet -c constraints.txt "$$(grep '^setuptools==' constraints.txt)" scikit-learn -e .
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) install --quiet -c constraints.txt -e '.[onnx,examples,test,dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(PIP) install --quiet -c constraints.txt -e '.[docs]'
	touch $@
