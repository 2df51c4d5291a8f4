# `make demo` and `make test` set everything up on a fresh machine; a second call starts at once.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

ZERO_STAMP := .venv/installed-deepspeed

.PHONY: demo test test-zero lint clean

demo: $(STAMP)
	@if [ -e runs/aot-toy ]; then \
		kept=runs/aot-toy-$$(date +%Y%m%d-%H%M%S); mv runs/aot-toy $$kept; echo "the earlier run is kept as $$kept"; fi
	$(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml recipes/aot.py

test: $(STAMP)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile $(ARGS)

# Trains under DeepSpeed ZeRO on two CPU processes. DeepSpeed prints to standard output, so nothing else installs it.
test-zero: $(ZERO_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_zero.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

$(ZERO_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,deepspeed]'
	touch $(ZERO_STAMP)

clean:
	rm -rf .venv build *.egg-info
