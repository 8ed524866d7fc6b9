# concertina: `make help` lists what can be made.
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help setup demo check test test-long test-gpu test-gpu-packages test-e2e test-images e2e-prerequisites azurite prometheus kueue jobset next-kubernetes vale wheels workflow-linters kind lint check-docs format docstrings bench crds pod-template chart-readme monitoring reference docs lock clean environment binaries

BIN := .venv/bin
HELM = $$($(BIN)/python tools/binaries.py helm)
TESTS ?= tests
# What test-images builds: operator, agent, trainer. The trainer's image needs 31 GB of disk while it is built.
IMAGES ?= operator agent
# Files of tests at a time; each process has a cluster of its own, 3 GiB of memory or so. Two cores have time for three:
# tests of the control plane wait more than they compute.
SIDE_BY_SIDE ?= $(shell awk '/MemAvailable/ {print ($$2 > 12e6 ? 3 : 2)}' /proc/meminfo)
# Whole files, the longest first (tests/conftest.py sorts them): what a file's tests share is made once.
# A process that dies ends the run, with the name of its test: xdist 3.8 waits for ever for the rest of its file.
PYTEST = $(BIN)/python -m pytest -n $(SIDE_BY_SIDE) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
# An interpreter with a torch of its own, as GPU machines have, or that of `make setup`.
GPU_PYTHON = $(or $(PYTHON),$(wildcard $(BIN)/python),python3)
GPU_OPTIONS = $(if $(ONLY),--only "$(ONLY)") $(if $(COMMIT),--commit "$(COMMIT)") $(if $(JSON),--json "$(JSON)") \
	$(if $(DEADLINE),--deadline-seconds "$(DEADLINE)")
BENCHMARKS ?= local_cluster neighbours recovery checkpoint checkpoint_floor determinism data metrics measuring step_hook

help: ## Show this
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: environment binaries ## Make .venv from the lock, and find or build the control plane's programs (once)

environment:
	@tools/install-environment.sh .venv dev

binaries: environment
	@$(BIN)/python tools/binaries.py

demo: setup ## See a job lose a node, go on, grow back and finish: a cluster of its own, about 3 minutes
	@$(BIN)/concertina demo

check: environment ## For each save: form, types, import rules and unit tests, about a minute
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -n 2 tests/unit

test: setup ## The gate: every law once, every real component once; TESTS=tests/unit runs some, SIDE_BY_SIDE=0 one by one
	@$(PYTEST) -m "not long" $(TESTS)

test-long: setup ## What is only more of the same: seeds, crashes, scripts, stores, drills
	@$(PYTEST) -m long $(TESTS)

test-gpu: ## Run what needs CUDA, in at most ten minutes; PYTHON=python3 uses that Python and its torch: see docs/gpu-checks.md
	@PYTHONPATH=tests$(if $(PYTHONPATH),:$(PYTHONPATH)) $(GPU_PYTHON) -m builders.gpu $(if $(LIST),list,run $(GPU_OPTIONS))

test-gpu-packages: ## Fill out/gpu-packages with what test-gpu needs beside torch and numpy; FOR=3.12 for another machine's Python, TITAN=1 with torchtitan
	@$(GPU_PYTHON) tools/gpu_packages.py out/gpu-packages $(FOR) $(if $(TITAN),--titan out/torchtitan)

test-e2e: setup ## Play drills and changes on the cluster of KUBECONFIG, in one namespace of it: see docs/e2e.md
	@CONCERTINA_E2E_RUN=1 $(BIN)/python -m pytest tests/e2e

e2e-prerequisites: setup ## Print what test-e2e must find on the cluster, for `kubectl apply --server-side -f -`
	@PYTHONPATH=tests $(BIN)/python -m builders.cluster.e2e

test-images: environment ## Build images by the Dockerfiles and run them; needs root, buildah, mmdebstrap and PREFIX, the folder of a Python 3.13
	@CONCERTINA_IMAGES_RUN=1 CONCERTINA_IMAGES="$(IMAGES)" CONCERTINA_IMAGES_PYTHON="$(PREFIX)" $(BIN)/python -m pytest tests/images

kind: setup ## Try everything on a cluster of two nodes by kind: images, chart, demo job, three drills; needs docker or podman
	@PYTHONPATH=tests $(BIN)/python -m builders.cluster.kind

azurite: setup ## Install Azurite, by which az:// is tested (once, a minute or two; needs Node.js and npm)
	@PYTHONPATH=tests $(BIN)/python -m builders.stores.azurite

prometheus: environment ## Have Prometheus and promtool, by which dashboards and alerts are tested (once; built, 4 minutes on 2 cores)
	@$(BIN)/python tools/binaries.py prometheus promtool

kueue: environment ## Build Kueue's controller, beside which long tests run the operator (once; 4 minutes on 2 cores)
	@$(BIN)/python tools/binaries.py kueue

jobset: environment ## Build JobSet's controller, beside which benchmarks/queues.py measures (once; 4 minutes on 2 cores)
	@$(BIN)/python tools/binaries.py jobset

next-kubernetes: environment ## Have the next version of Kubernetes, by which gangs are tested (once; built, 5 minutes on 2 cores)
	@$(BIN)/python tools/binaries.py next-kubernetes

vale: environment ## Provide Vale, with which `make lint` checks prose (once; built, 2 minutes on 2 cores)
	@$(BIN)/python tools/binaries.py vale

workflow-linters: environment ## Provide actionlint and zizmor, with which `make lint` checks workflows (once, a minute)
	@$(BIN)/python tools/binaries.py actionlint
	@VIRTUAL_ENV=.venv $(BIN)/uv pip install --quiet --require-hashes -r tools/zizmor/requirements.txt

lint: setup ## Check form, types, import rules, docstrings, commit subjects, prose, workflows, the CRD, dashboards, alerts and the chart; change nothing
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tools/docstring_ratchet.py
	@$(BIN)/python tools/commit_subjects.py
	@$(BIN)/python tools/prose.py
	@$(BIN)/python tools/workflow_lint.py
	@$(BIN)/python -m concertina.api.crd --check
	@$(BIN)/python -m monitoring --check
	@$(BIN)/python tools/chart_readme.py --check
	@$(BIN)/python -m tools.reference --check
	@$(HELM) lint --strict --quiet charts/concertina
	@$(HELM) template concertina charts/concertina --set 'watchNamespaces={a,b}' > /dev/null
	@$(HELM) template concertina charts/concertina --set monitoring.alerts.enabled=true \
		--set monitoring.dashboards.enabled=true > /dev/null
	@echo "lint: all good"

format: environment ## Put the sources into form
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format .

check-docs: environment ## Check the documents: links, paths, long lines, decisions, and what is generated
	@$(BIN)/python tools/chart_readme.py --check
	@$(BIN)/python -m pytest -q tests/unit/repository/test_docs.py tests/unit/repository/test_runbooks.py

docstrings: environment ## Record the number of docstring violations of each package, after it fell
	@$(BIN)/python tools/docstring_ratchet.py --write

bench: setup ## Run the benchmarks and print their tables; BENCHMARKS=recovery runs one
	@for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py || exit 1; done

crds: environment ## Write the CRD into crds/ and the chart, from the models in operator/concertina/api
	@$(BIN)/python -m concertina.api.crd

pod-template: environment ## Read the schema of a pod's template from the pinned Kubernetes, then write the CRD
	@$(BIN)/python tools/podtemplate/generate.py
	@$(BIN)/python -m concertina.api.crd

chart-readme: environment ## Write the chart's README from the comments in its values.yaml
	@$(BIN)/python tools/chart_readme.py

monitoring: environment ## Write dashboards and alerts into the chart, from the code in monitoring/
	@$(BIN)/python -m monitoring

reference: environment ## Write the generated pages of docs/reference, from the CRD, the commands, the metrics and the chart
	@$(BIN)/python -m tools.reference

docs: ## Build the documentation site into out/site, and fail on a broken link
	@tools/install-environment.sh out/docs-environment docs
	@NO_MKDOCS_2_WARNING=1 out/docs-environment/bin/mkdocs build --strict --quiet
	@echo "docs: open out/site/index.html"

wheels: ## Build the distributions' wheels into dist/
	@tools/install-environment.sh out/build-environment build
	@rm -rf */packages/*/build
	@for part in */packages/*; do \
		out/build-environment/bin/uv build --quiet --wheel --no-build-isolation --python out/build-environment/bin/python \
			--out-dir dist $$part || exit 1; done
	@rm -rf */packages/*/build

lock: environment ## Pin anew what the environments hold (within pyproject.toml's bounds)
	@$(BIN)/python tools/lock.py --upgrade

clean: ## Remove what was made in this folder (shared programs in the user's cache stay)
	rm -rf .venv out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
