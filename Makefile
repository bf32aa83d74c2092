# make quickstart   everything once, on text that this machine has: the whole pipeline in miniature
# make test         the default tests
# make test-all     every test that needs no GPU, a real SGLang server's included
# make test-aot     only those that compile for H100s
#
# PYTHON=... chooses the interpreter, VENV=... the virtual environment, JOBS=... the number of test processes.

# The newest supported Python that really runs: a shim on the PATH may have nothing behind it.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	>/dev/null 2>&1 && { echo $$p; break; }; done)
VENV ?= .venv
JOBS ?= 2

.PHONY: quickstart test test-all test-aot lint clean

quickstart: $(VENV)/installed
	$(VENV)/bin/python configs/quickstart/run.py

test: $(VENV)/installed-test
	$(VENV)/bin/python -m pytest -n $(JOBS) -m "not slow and not multidevice and not sglang and not aot and not gpu"

test-all: $(VENV)/installed-test
	$(VENV)/bin/python -m pytest -n $(JOBS) -m "not multidevice and not sglang and not aot and not gpu"
	XLA_FLAGS=--xla_force_host_platform_device_count=8 $(VENV)/bin/python -m pytest -n $(JOBS) -m multidevice
	tests/sglang/install.sh
	$(VENV)/bin/python -m pytest -m sglang
	$(MAKE) PYTHON=$(VENV)/bin/python VENV=$(VENV)-plan test-aot

test-aot: $(VENV)/installed-plan
	JAX_PLATFORMS=cpu $(VENV)/bin/python -m pytest -m aot

lint: $(VENV)/installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

clean:
	rm -rf $(VENV) $(VENV)-plan runs/quickstart

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11, 3.12 or 3.13 with venv found; set PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-test: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --editable '.[test]'
	touch $@ $(VENV)/installed

# An environment of its own: without JAX_PLATFORMS=cpu, the plugin complains on a machine that has no GPU.
$(VENV)/installed-plan: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --editable '.[plan,test]'
	touch $@
