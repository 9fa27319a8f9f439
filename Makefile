# make train, make test, make docs, make bench, make onnx, make test-onnx, make precision, make launchers: each sets up what it needs and does its job. CUDA=0 or CUDA=1 overrides what is detected.
PYTHON ?= python3
override CUDA := $(if $(filter 0 1,$(CUDA)),$(CUDA),$(shell nvidia-smi >/dev/null 2>&1 && echo 1 || echo 0))
REQUIREMENTS := $(if $(filter 1,$(CUDA)),requirements-cuda12.txt,requirements.txt)
STAMP := .venv/installed-$(REQUIREMENTS)
RUN := .venv/bin/python
WORKDIR = runs/quickstart

.PHONY: setup train test test-long test-all test-onnx lint bench bench-train bench-infer onnx precision launchers docs

train: setup
	$(RUN) main.py --config=configs/quickstart.py --workdir=runs/quickstart

# What takes long by its nature (kill -9, several processes, browsers, installs) is left to test-long.
test: lint
	$(RUN) -m pytest -n 2 -m "not long"

test-long: setup
	XLA_FLAGS= $(RUN) -m pytest -n 2 -m long

test-all: test test-long

# Speed against Keras on TensorFlow and PyTorch, which live in an environment of their own, as what converts to ONNX does.
bench:
	$(MAKE) --keep-going bench-train bench-infer

bench-train: setup .venv-peers/installed
	$(RUN) -m benchmarks.train_step $(BENCH)

bench-infer: setup .venv-peers/installed .venv-onnx/installed
	$(RUN) -m benchmarks.inference $(BENCH)

.venv-peers/installed: benchmarks/requirements.txt
	$(PYTHON) -m venv --clear .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/requirements.txt
	@touch $@

# A trained model as ONNX, checked. jax2onnx needs another orbax-checkpoint, so it has an environment of its own.
onnx: setup .venv-onnx/installed
	$(RUN) main.py export --workdir=$(WORKDIR)
	.venv-onnx/bin/python -m mlcn_jax onnx --workdir=$(WORKDIR)

# Each lane in float32, bfloat16 and int8, and the smallest mix as an export.
precision: setup .venv-onnx/installed
	$(RUN) main.py export --workdir=$(WORKDIR)
	.venv-onnx/bin/python -m mlcn_jax precision --workdir=$(WORKDIR)

# The tests that convert to ONNX and quantise; elsewhere they are skipped.
test-onnx: setup .venv-onnx/installed
	XLA_FLAGS= .venv-onnx/bin/python -m pytest -m "long or not long" tests/serving/test_onnx.py tests/serving/test_precision.py

.venv-onnx/installed: requirements-onnx.txt
	$(PYTHON) -m venv --clear .venv-onnx
	.venv-onnx/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-onnx.txt
	@touch $@

# The job files of docs/howto/clusters.md, under a Slurm of one node and Open MPI: installs both (Debian, as root).
launchers: setup
	apt-get install --yes --no-install-recommends slurm-wlm openmpi-bin
	MLCN_JAX_LAUNCHERS=1 XLA_FLAGS= $(RUN) -m pytest -m long -rs --timeout=1000 tests/distributed/test_launchers.py

# The docs as a website in docs/_build. Warnings are errors.
docs: .venv/installed-requirements-docs.txt .venv/installed-package
	JAX_PLATFORMS=cpu $(RUN) -m sphinx -W --keep-going -q docs docs/_build
	@echo "docs: docs/_build/index.html"

.venv/installed-requirements-docs.txt: requirements-docs.txt $(STAMP)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	@touch $@

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	.venv/bin/lint-imports --config setup.cfg

setup: .venv/installed-package
	@echo "environment: .venv with $(REQUIREMENTS) (CUDA=0 takes the CPU, CUDA=1 a GPU)"

# A changed list of pins, or a change between CPU and CUDA, makes the environment anew.
$(STAMP): requirements.txt requirements-cuda12.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	@echo "installing $(REQUIREMENTS) into .venv"
	$(PYTHON) -m venv --clear .venv
	$(RUN) -m pip install --quiet --disable-pip-version-check -r $(REQUIREMENTS)
	@touch $(STAMP)

# The package itself, from this folder: `mlcn_jax` and `import mlcn_jax` work wherever .venv is used.
.venv/installed-package: $(STAMP) setup.cfg setup.py pyproject.toml
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
