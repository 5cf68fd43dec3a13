# make demo     watch a worker answer: makes .venv and a small checkpoint, starts a worker, asks it, shows the answers
# make test     run the tests; they need no GPU and no torch
# make lint     ruff and mypy
# make parity   compare live with torch, transformers and peft, installed in .venv-parity
# make test-oldest   some tests with the oldest versions that setup.cfg admits, in .venv-oldest (Python 3.10 to 3.12)
# make package  build a wheel and an sdist in dist/, install the wheel elsewhere and try it
# make clean    remove what the others made
#
# Needed: Python 3.10 to 3.13 with venv (on Debian: apt install python3-venv), and make.
# Another interpreter: make test PYTHON=python3.12      Some tests: make test TESTS='tests/test_app.py -x'

PYTHON ?= python3
TESTS ?=

SHELL := /bin/sh
.SHELLFLAGS := -ec
.ONESHELL:
.SILENT:
.DEFAULT_GOAL := help
.PHONY: help demo lint test test-oldest parity package clean

# $(call environment,FOLDER,NAME,EXTRAS,OLDEST): a virtual environment with this package and its EXTRAS, in the oldest
# admitted versions where OLDEST names extras. The stamp says for which
# inputs the environment was made and what is in it. It is taken away before anything changes and put back at the end,
# so an interrupted or outdated environment is made anew.
define environment
exec 9<Makefile && if command -v flock >/dev/null; then flock 9; fi
$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || {
    echo "$(PYTHON) is not Python 3.10 to 3.13; choose one with: make PYTHON=python3.12" >&2; exit 1; }
key=$$( (cat pyproject.toml setup.cfg; $(PYTHON) -VV; pwd) | sha256sum | cut -c 1-32)
have=$$(cat $(1)/.stamp 2>/dev/null || true)
case "$$have " in
"$$key "*" $(2) "*) ;;
*)
    test -w . || { echo "$$PWD cannot be written to, and all that is needed is installed in it: use a copy" >&2; exit 1; }
    case "$$have " in
    "$$key "*) ;;
    *)
        echo "Making a virtual environment in $(1)"
        rm -rf $(1)
        $(PYTHON) -m venv $(1) || { rm -rf $(1); echo "Python's venv is missing; on Debian: apt install python3-venv" >&2; exit 1; }
        have=$$key
        ;;
    esac
    rm -f $(1)/.stamp
    echo "Installing jev$(3) and what it needs (a few minutes the first time)"
    $(if $(4),$(1)/bin/python tools/oldest.py $(4) > $(1)/oldest.txt)
    $(1)/bin/python -m pip install --quiet --disable-pip-version-check $(if $(4),--constraint $(1)/oldest.txt) --editable '.$(3)' 9<&-
    echo "$$have base $(2)" > $(1)/.stamp.new
    mv $(1)/.stamp.new $(1)/.stamp
    ;;
esac
exec 9<&-
endef

help:
	sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo:
	$(call environment,.venv,base,)
	exec .venv/bin/python -m jev demo --dir .demo

lint:
	$(call environment,.venv,dev,[dev])
	.venv/bin/ruff check .
	exec .venv/bin/mypy

test:
	$(call environment,.venv,test,[test])
	# Two processes on few cores: NumPy's own threads would only get into each other's way.
	export OPENBLAS_NUM_THREADS=1
	$(if $(TESTS),exec .venv/bin/python -m pytest $(TESTS))
	echo "Running the tests (some minutes): the kernels under the simulator, then everything else"
	failed=0
	NUMBA_ENABLE_CUDASIM=1 .venv/bin/python -m pytest -n 2 tests/kernels || failed=1
	.venv/bin/python -m pytest -n 2 --dist loadfile tests || failed=1
	exit $$failed

# The contract, HTTP, the whole worker, a few kernels in the simulator, and a kernel compiled.
test-oldest:
	$(call environment,.venv-oldest,oldest,[test],test)
	export OPENBLAS_NUM_THREADS=1
	NUMBA_ENABLE_CUDASIM=1 .venv-oldest/bin/python -m pytest tests/kernels/test_silu.py tests/kernels/test_ptx.py
	exec .venv-oldest/bin/python -m pytest -n 2 tests/test_contract.py tests/test_app.py tests/test_processor.py \
	    tests/http tests/checkpoint tests/compiled/test_cubin.py tests/test_server.py

# The wheel is built from the sdist, which holds what the tests need as well (MANIFEST.in).
package:
	$(call environment,.venv,dev,[dev])
	rm -rf dist build
	.venv/bin/python -m build --outdir dist . > /dev/null
	exec .venv/bin/python tools/try_package.py dist

parity:
	$(call environment,.venv-parity,parity,[test$(comma)parity])
	echo "Comparing with torch, transformers and peft"
	exec .venv-parity/bin/python -m pytest -m parity tests/parity

clean:
	rm -rf .venv .venv-parity .venv-oldest .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist ./*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

comma := ,
