# make demo           the main job, on data that it simulates
# make demo-online    a stream, a trainer and a server for two minutes, with a page to watch
# make test           lint, types and the fast tests: before every commit
# make test-all       everything else: long searches, documentation, browser
# make lint           style, format, strict types            make format      format the code
# make coverage       the fast tests with coverage           make bench       the benchmarks, as JSON
# make docs           the site, in site/                     make test-docs   the site and every code block of README and docs
# make test-long      long searches and control matrices     make test-campaigns  kills, damage, every method resumed
# make test-browser   the report in a real Chromium; screenshots go to artefacts/
# make test-adapters  TorchRec, FuxiCTR and DeepCTR-Torch models, with these packages in .venv-adapters
# make test-spark     the Spark engine against the embedded one, in .venv-spark; needs java 17
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
BASE   := $(VENV)/.ready-base
READY  := $(VENV)/.ready
PAGES  := $(VENV)/.ready-docs
SPARK  := .venv-spark
INSTALL = PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable

.PHONY: demo demo-online test test-all coverage test-long test-campaigns test-adapters test-spark test-browser docs test-docs lint format bench setup clean
.DEFAULT_GOAL := demo

# The pinned install, repeated only if one of these two files changes; the tools are installed when they are needed.
$(BASE): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing lpfs into $(VENV)"
	@$(INSTALL) .
	@touch $@

$(READY): $(BASE)
	@echo "installing the tools to test it with"
	@$(INSTALL) '.[dev]'
	@touch $@

$(PAGES): $(READY)
	@echo "installing the tools for its docs"
	@$(INSTALL) '.[docs]'
	@touch $@

setup: $(READY)

demo: $(BASE)
	$(BIN)/python examples/demo.py

demo-online: $(READY)
	$(BIN)/python examples/online.py

test: lint
	$(BIN)/python -m pytest

test-all: test-long test-docs test-browser

coverage: $(READY)
	$(BIN)/python -m pytest --cov=lpfs --cov-report=term

test-long: $(READY)
	$(BIN)/python -m pytest -m 'long and not campaign' -n 3

test-campaigns: $(READY)
	$(BIN)/python -m pytest -m campaign -n 3 -o faulthandler_timeout=3600

# A separate environment, because these packages require others that nothing else here needs. The metadata of torchrec
# requires a CUDA package, hence --no-deps, followed by the packages that it imports.
ADAPTERS := .venv-adapters
PIP_ADAPTERS := $(ADAPTERS)/bin/python -m pip install --quiet --disable-pip-version-check \
	--constraint constraints.txt --constraint constraints-adapters.txt

$(ADAPTERS)/.ready: pyproject.toml constraints.txt constraints-adapters.txt
	@test -x $(ADAPTERS)/bin/python || $(PYTHON) -m venv $(ADAPTERS)
	@echo "installing lpfs and the packages that it adapts into $(ADAPTERS)"
	@$(PIP_ADAPTERS) --editable . hypothesis pytest pytest-cov pytest-xdist
	@$(PIP_ADAPTERS) --no-deps torchrec fbgemm-gpu-cpu
	@$(PIP_ADAPTERS) tensordict torchmetrics tqdm pyre-extensions
	@$(PIP_ADAPTERS) fuxictr deepctr-torch
	@touch $@

test-adapters: $(ADAPTERS)/.ready
	LPFS_ADAPTERS=required $(ADAPTERS)/bin/python -m pytest -n 0 tests/adapters

$(SPARK)/.ready: pyproject.toml constraints.txt
	@test -x $(SPARK)/bin/python || $(PYTHON) -m venv $(SPARK)
	@echo "installing lpfs and Spark into $(SPARK)"
	@PIP_CONSTRAINT=constraints.txt $(SPARK)/bin/python -m pip install --quiet --disable-pip-version-check \
		--editable '.[dev,spark]'
	@touch $@

test-spark: $(SPARK)/.ready
	$(SPARK)/bin/python -m pytest -m spark -n 0 tests/data/engines/test_spark.py

test-browser: $(READY)
	@if command -v chromium >/dev/null; then \
		LPFS_BROWSER=required $(BIN)/python -m pytest -m browser -n 0 tests/browser; \
	else \
		echo "chromium is not installed: the report was not tested in a browser"; \
	fi

docs: $(PAGES)
	$(BIN)/python tools/pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "open site/index.html; with its search: $(BIN)/python -m http.server -d site"

test-docs: docs
	$(BIN)/python -m pytest -m docs -n 3 --dist load tests/docs

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/gate_overhead.py

clean:
	rm -rf $(VENV) $(ADAPTERS) $(SPARK) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage artefacts site
