# Every target makes its own virtual environment in .venv on first use; Python 3.11 or newer is enough.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
DEV := .venv/.installed-dev
BENCH := .venv/.installed-bench
NEEDS_3_11 := import sys; sys.exit("ckptz needs Python 3.11 or newer: make PYTHON=..." if sys.version_info < (3, 11) else 0)

# PyTorch's threads wait without spinning: as fast on free cores, several times faster on shared ones.
export OMP_WAIT_POLICY ?= passive

# Images of containers forbid to keep compiled modules, which each of many processes would compile anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-apps test-slow coverage fuzz lint types docs check format man bench

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' Makefile | expand -t 18

demo: $(DEV) ## train, compress, restore, resume: a table and a picture in demo-output/, about three minutes
	$(BIN)/python -m bench.demo

test: $(DEV) ## the test suite, in two processes
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-apps: $(DEV) ## the demo, transformers, Trainer, Lightning, ranks, bounds of kernels, every written byte
	$(BIN)/python -m pytest -m 'apps and not slow'

test-slow: $(DEV) ## the exhaustive sweeps
	$(BIN)/python -m pytest -m slow

# Tests that give the parsers every kind of bytes; compiled kernels are not counted.
PARSER_TESTS := tests/format tests/hostile tests/api/test_together.py tests/api/test_groups.py tests/api/test_refusals.py \
	tests/codec/test_effort.py tests/codec/test_eight_bit_codes.py tests/codec/test_low_rank.py tests/sync/test_sync_sparse.py \
	tests/training/test_checkpointer.py tests/training/test_moves.py \
	tests/codec/test_moments.py::test_jobs_and_order_change_no_byte_and_chunks_agree \
	tests/integrations/test_moved.py::test_chains_of_whole_checkpoints_move_weights

coverage: $(DEV) ## branches of the parsers that no test takes: fails if there is one
	$(BIN)/python -m coverage run -m pytest -m "not slow" $(PARSER_TESTS)
	$(BIN)/python -m coverage report

FUZZ_SECONDS ?= 60

fuzz: $(DEV) ## damaged inputs for the readers of what others wrote, a minute each: FUZZ_SECONDS=60
	$(BIN)/python -m bench.fuzz.foreign --executions 1000000000 --seconds $(FUZZ_SECONDS) --dry

lint: $(DEV) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV) ## mypy --strict
	$(BIN)/mypy

docs: $(DEV) ## the site, in build/site: fails on a link or a name that leads nowhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

check: lint types docs test test-apps ## lint, types, site and tests: what a change must pass

format: $(DEV) ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

man: $(DEV) ## man pages of the program and every verb, in build/man
	mkdir -p build/man
	$(BIN)/click-man ckptz --target build/man

bench: $(BENCH) ## sizes and speeds, against other compressors; see bench/README.md
	$(BIN)/python -m bench.product.lossless
	$(BIN)/python -m bench.product.load
	$(BIN)/python -m bench.product.weight_sync
	$(BIN)/python -m bench.product.link_speed
	$(BIN)/python -m bench.product.others
	$(BIN)/python -m bench.product.tensor_sizes
	$(BIN)/python -m bench.product.whole_state
	$(BIN)/python -m bench.product.checkpointer
	$(BIN)/python -m bench.product.exact_head

$(DEV): pyproject.toml constraints.txt
	@$(PYTHON) -c '$(NEEDS_3_11)'
	@echo "Setting up .venv, once; this downloads PyTorch and takes a few minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(BENCH): $(DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $@
