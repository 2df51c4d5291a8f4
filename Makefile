# `make demo` and `make test` set everything up on a fresh machine; a second call starts at once.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

ZERO_STAMP := .venv/installed-deepspeed
DOCS_STAMP := .venv/installed-docs
AUDIT := .venv/audit/bin/pip-audit

.PHONY: demo test test-slow test-processors test-zero test-gpu audit lint docs clean

demo: $(STAMP)
	@if [ -e runs/aot-toy ]; then \
		kept=runs/aot-toy-$$(date +%Y%m%d-%H%M%S); mv runs/aot-toy $$kept; echo "the earlier run is kept as $$kept"; fi
	$(BIN)/python recipes/aot.py --use_cpu true

PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile

test: $(STAMP)
	$(PYTEST) -m 'not slow' $(ARGS)

# Whole recipes, several processes, kills: what takes longer than a few seconds.
test-slow: $(STAMP)
	$(PYTEST) -m slow --ignore tests/test_zero.py $(ARGS)

# The numerical tests as other processors compute them. PROCESSORS="A=1,B=2 C=3" runs them under A and B, then under C.
PROCESSORS ?= ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2,ONEDNN_MAX_CPU_ISA=AVX2,OMP_NUM_THREADS=2
NUMERICAL := advantages aot_scope comparison course gae generation kl kto log_probs masking objective online_preference \
	packing_models packing_stock_trainers packing_trainers policy_contract policy_invariants policy_losses \
	policy_positions policy_terms policy_trainer ppo_trainer preference_losses preference_loss_properties \
	preference_trainer replay reward_ensemble reward_losses reward_trainer rewards shaping shared_backbone splits \
	toy trainer_contract trl_contract unpaired weighting

test-processors: $(STAMP)
	@for settings in $(PROCESSORS); do \
		echo "== $$settings"; \
		(export $$(echo $$settings | tr , ' ') && $(PYTEST) -q -m 'not slow' $(NUMERICAL:%=tests/test_%.py) $(ARGS)) || exit 1; \
	done

# Trains under DeepSpeed ZeRO on two CPU processes. DeepSpeed prints to standard output, so nothing else installs it.
# Its kernels are compiled into .venv: a build that was killed elsewhere leaves a lock there that others wait on.
test-zero: $(ZERO_STAMP)
	rm -f .venv/torch_extensions/*/lock
	TORCH_EXTENSIONS_DIR=$(CURDIR)/.venv/torch_extensions OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_zero.py $(ARGS)

# For a machine with GPUs; elsewhere every test is skipped.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest tests/gpu $(ARGS)

# Asks PyPI for known vulnerabilities of the pinned packages. --strict, as pip-audit else finds none where it cannot ask.
audit: $(AUDIT)
	@status=0; $(AUDIT) --strict --no-deps --disable-pip --progress-spinner off --requirement constraints.txt \
		>.venv/audit/log 2>&1 || status=$$?; \
	unanswered=$$(grep -E 'could not be audited|ConnectionError|ConnectTimeout|ReadTimeout' .venv/audit/log | tail -n 1 | cut -c 1-300); \
	if [ -n "$$unanswered" ]; then \
		echo "audit: the advisory service gave no answer, so nothing is known of any package: $$unanswered" >&2; exit 1; \
	fi; \
	cat .venv/audit/log; exit $$status

$(AUDIT):
	$(PYTHON) -m venv .venv/audit
	.venv/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit

# The pages of docs/ and the reference, into build/docs; any warning is an error.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

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

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,docs]'
	touch $(DOCS_STAMP)

clean:
	rm -rf .venv build *.egg-info
