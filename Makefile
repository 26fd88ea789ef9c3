# `make repro` and `make test` do their own set-up; `make help` lists the rest.
SHELL := /bin/bash
VENV  ?= .venv
READY := $(VENV)/.ready
export PATH := $(abspath $(VENV))/bin:$(PATH)
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help setup data repro refresh full estimate test lab report readme export clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## /  make \1\t/' | expand -t 16

setup: $(READY) ## make the virtual environment (the other targets do it when it is missing)

# Byte code is made by all cores at once instead of file by file, and in any case: where PYTHONDONTWRITEBYTECODE is set, each of the
# pipeline's processes would compile its imports anew. Some packages hold templates that don't compile; that is no error.
$(READY): requirements.txt pyproject.toml
	@py=; for p in python3.11 python3.12 python3.13 python3 python; do \
	  if $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then py=$$p; break; fi; done; \
	if [ -z "$$py" ]; then echo "error: no Python 3.11 to 3.13 found on PATH: install one (for example python3.11 with its venv module) and run make again" >&2; exit 1; fi; \
	if ! command -v git >/dev/null; then echo "error: git is not on PATH: install it and run make again" >&2; exit 1; fi; \
	if [ ! -x $(VENV)/bin/pip ] && ! $$py -m venv --clear $(VENV) >/dev/null 2>&1; then \
	  echo "error: $$py cannot make a virtual environment: install its venv module (Debian: python3-venv) and run make again" >&2; exit 1; fi; \
	echo "Installing about 2 GB of packages into $(VENV) (3 to 6 minutes; log in $(VENV)/setup.log) ..."; \
	if ! { $(VENV)/bin/python -m pip install --disable-pip-version-check --no-compile --retries 2 --timeout 60 -r requirements.txt && \
	       $(VENV)/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e . ; } >$(VENV)/setup.log 2>&1; then \
	  if grep -qiE 'NewConnectionError|NameResolution|Temporary failure|Network is unreachable|ProxyError|ConnectTimeout|Connection refused' $(VENV)/setup.log; then \
	    echo "error: no network: pip cannot reach the package index; connect and run make again (log: $(VENV)/setup.log)" >&2; \
	  else echo "error: installing the packages failed: $$(grep -E '^ERROR|No space left' $(VENV)/setup.log | tail -n 1); see $(VENV)/setup.log, then run make again" >&2; fi; exit 1; fi; \
	$(VENV)/bin/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1; \
	touch $@

data: $(READY) ## pull the embedded data from the store in the repository, if data/ is not the version of data.dvc
	@dvc status --quiet data.dvc || dvc pull --quiet data.dvc || { echo "error: data/ is not the version of data.dvc; your own change: dvc add data; else: git checkout data.dvc && dvc pull --force data.dvc" >&2; exit 1; }

repro: data ## run the whole pipeline on the embedded data; reports land in reports/
	@dvc repro && echo "Done: open reports/index.html"

refresh: data ## ask the five public sources anew and keep what they say in live/ (ARGS=--help); needs a network and ingest.contact in params.yaml
	@python -m clinical_rl.sources.live $(ARGS)

full: data ## both scopes and forms, five seeds: many hours, HOURS=3 stops it after three, a later call goes on; reports/full/
	@python -m clinical_rl.full $(if $(HOURS),--hours $(HOURS))

estimate: data ## what the agents that are enabled in params.yaml would ask, and about what that costs; asks nobody (AGENTS='gpt claude': those)
	@python -m clinical_rl.agents $(AGENTS)

test: data ## run all tests
	@python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lab: $(READY) ## open the notebooks in JupyterLab
	@jupyter lab nbs

report: $(READY) ## build the HTML reports again from what has been run
	@dvc repro report

readme: $(READY) ## put the pipeline's figures into README.md
	@python -c 'from clinical_rl.report import update_readme; update_readme()'

export: $(READY) ## write clinical_rl/ from the notebooks
	@find clinical_rl -name '*.py' ! -name '__init__.py' -delete && nbdev_export && nbdev_clean

clean: ## delete what the pipeline made (not the environment, the data, the reports or paid answers in .cache/agents)
	@rm -rf out; find .cache -mindepth 1 -maxdepth 1 ! -name agents -exec rm -rf {} + 2>/dev/null || true
