# make quickstart   everything once, on text that this machine has: the whole pipeline in miniature
# make test         the default tests
# make test-all     every test that needs no GPU, a real SGLang server's included
#
# PYTHON=... chooses the interpreter, VENV=... the virtual environment, JOBS=... the number of test processes.

# The newest supported Python that really runs: a shim on the PATH may have nothing behind it.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	>/dev/null 2>&1 && { echo $$p; break; }; done)
VENV ?= .venv
JOBS ?= 2

.PHONY: quickstart test test-all lint clean

quickstart: $(VENV)/installed
	$(VENV)/bin/python configs/quickstart/run.py

test: $(VENV)/installed-test
	$(VENV)/bin/python -m pytest -n $(JOBS) -m "not slow and not multidevice and not sglang"

test-all: $(VENV)/installed-test
	$(VENV)/bin/python -m pytest -n $(JOBS) -m "not multidevice and not sglang"
	XLA_FLAGS=--xla_force_host_platform_device_count=8 $(VENV)/bin/python -m pytest -n $(JOBS) -m multidevice
	tests/sglang/install.sh
	$(VENV)/bin/python -m pytest -m sglang

lint: $(VENV)/installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

clean:
	rm -rf $(VENV) runs/quickstart

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11, 3.12 or 3.13 with venv found; set PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-test: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --editable '.[test]'
	touch $@ $(VENV)/installed
